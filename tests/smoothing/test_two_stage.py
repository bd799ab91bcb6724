"""The two-stage rule: sound with fresh votes, not with reused ones, both by enumeration; and what it saves."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from smoothcert.noise import Gaussian
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.smoothing.rules import second_stage_votes


def chance(count: int, n: int, p: Fraction) -> Fraction:
    return math.comb(n, count) * p**count * (1 - p) ** (n - count)


def wrong(plan: list[int], first_n: int, alpha: float, p: Fraction, *, reuse: bool) -> Fraction:
    """P(the bound exceeds the probability of its class), for two classes of probability p and 1 - p.

    The first stage chooses the class with more votes and then `plan[its count]` votes; with `reuse` the first votes
    are among those bounded.
    """
    total = Fraction(0)
    for votes in range(first_n + 1):
        first, truth = (votes, p) if 2 * votes > first_n else (first_n - votes, 1 - p)
        n = plan[first]
        more, start = (n - first_n, first) if reuse else (n, 0)
        least = next((k for k in range(n + 1) if error_upper_bound(k, n, alpha) < 1 - truth), n + 1)
        claims = (chance(k, more, truth) for k in range(max(least - start, 0), more + 1))
        total += chance(votes, first_n, p) * sum(claims, Fraction(0))
    return total


def test_fresh_votes_keep_alpha_and_reused_votes_do_not() -> None:
    alpha, first_n, n_max = 0.05, 11, 40
    settings = {"alpha": alpha, "n_max": n_max, "radius_loss": 0.2, "minimum": 13}
    plan = [second_stage_votes(k, first_n, **settings) for k in range(first_n + 1)]
    assert len(set(plan)) > 2  # else there is nothing to get wrong
    bounds = {1 - Fraction(error_upper_bound(k, n, alpha)) for n in set(plan) for k in range(n // 3, n + 1)}
    points = [b * (1 - Fraction(1, 10**9)) for b in sorted(bounds)[::4]] + [Fraction(k, 10) for k in range(1, 10)]
    assert max(wrong(plan, first_n, alpha, p, reuse=False) for p in points) <= Fraction(alpha)
    # The class was chosen because it was lucky: at p = 1/2, where no class leads, this is worst.
    assert wrong(plan, first_n, alpha, Fraction(1, 2), reuse=True) > Fraction(alpha) * 5 / 4


@pytest.mark.parametrize("radius_loss", [0.02, 0.1])
@pytest.mark.parametrize("p", [0.55, 0.9, 0.99, 0.9999])
def test_the_expected_loss_of_radius_is_what_was_asked_for(p: float, radius_loss: float) -> None:
    # Over all first stages, and over the central range of second-stage counts.
    def mean_radius(n: int) -> float:
        counts = np.unique(stats.binom.ppf(np.linspace(0.005, 0.995, 100), n, p).astype(int))
        weights = np.diff(stats.binom.cdf(counts, n, p), prepend=0.0)
        radii = [Gaussian(1.0).radius(error_upper_bound(int(k), n, 0.001)) for k in counts]
        return float(np.average(radii, weights=weights))

    firsts = np.arange(501)
    likely = stats.binom.pmf(firsts, 500, p)
    full, lost = mean_radius(100_000), 0.0
    for first in firsts[likely > 1e-3]:
        n = second_stage_votes(int(first), 500, alpha=0.001, n_max=100_000, radius_loss=radius_loss)
        lost += likely[first] * (full - mean_radius(n))
    assert lost <= radius_loss * 1.1


def test_a_looser_demand_costs_fewer_votes() -> None:
    def votes(first_count: int, radius_loss: float) -> int:
        return second_stage_votes(first_count, 500, alpha=0.001, n_max=100_000, radius_loss=radius_loss)

    assert votes(450, 0.02) < 50_000
    assert votes(450, 0.1) < votes(450, 0.05) < votes(450, 0.02) < votes(450, 0.0) == 100_000
    # More failures make each vote tell more about the radius.
    assert votes(300, 0.02) < votes(450, 0.02) < votes(490, 0.02)


@pytest.mark.parametrize("first_count", [0, 28, 30, 35, 40, 45, 49])
def test_number_of_votes_is_the_least_that_suffices(first_count: int) -> None:
    """By trying all numbers, for each value of p that 50 votes leave plausible: the largest p needs the most."""
    failed, n = 50 - first_count, np.arange(20, 201)
    ends = stats.beta.ppf(0.1, failed, first_count + 1), stats.beta.isf(0.1, failed + 1, first_count or 1e-9)
    least = []
    for q in (ends[0], (ends[0] + failed / 50) / 2, failed / 50, min(ends[1], 0.999)):
        radii = np.maximum(0.0, -stats.norm.ppf(stats.beta.isf(0.01, n * q + 1, n * (1 - q) + 1e-12)))
        least.append(int(n[np.argmax(radii >= radii[-1] - 0.1)]))
    votes = second_stage_votes(first_count, 50, alpha=0.01, n_max=200, radius_loss=0.1, minimum=20)
    assert votes == max(least) == least[0]


def test_the_ends_of_the_range() -> None:
    settings = {"alpha": 0.001, "n_max": 100_000, "radius_loss": 0.02}
    assert second_stage_votes(500, 500, **settings) > 90_000
    assert second_stage_votes(200, 500, **settings) == 1000
    assert second_stage_votes(0, 500, **settings) == 1000
    assert second_stage_votes(200, 500, alpha=0.001, n_max=100_000, radius_loss=0.0) == 1000
    assert second_stage_votes(200, 500, **settings, minimum=64) == 64
    assert second_stage_votes(450, 500, alpha=0.001, n_max=500, radius_loss=0.02) == 500


@pytest.mark.parametrize(
    ("count", "n", "changed"),
    [(6, 5, {}), (-1, 5, {}), (0, 0, {}), (1, 2, {"alpha": 0.0}), (1, 2, {"n_max": 0}), (1, 2, {"radius_loss": -1.0})],
)
def test_impossible_arguments_are_refused(count: int, n: int, changed: dict[str, float]) -> None:
    settings = {"alpha": 0.001, "n_max": 1000, "radius_loss": 0.02, **changed}
    with pytest.raises(ValueError, match="expected"):
        second_stage_votes(count, n, **settings)
