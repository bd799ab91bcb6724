"""The two-sided bound: all counts of three classes enumerated."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import special, stats

from smoothcert.smoothing import bounds
from smoothcert.smoothing.bounds import error_upper_bound, runner_up_upper_bound, two_sided_bounds


def radius(q: float, p_b: float) -> float:
    """In units of sigma."""
    return float(-special.ndtri(q) - special.ndtri(p_b)) / 2


def wrong(n: int, alpha: float, p: tuple[float, float, float], parts: tuple[float, float] | None = None) -> float:
    """P(claimed radius > true radius) over all counts of classes A, B, C; `parts`: other levels for the two bounds."""
    truth = radius(p[1] + p[2], max(p[1], p[2]))
    total = []
    for a in range(n + 1):
        for b in range(n - a + 1):
            c = n - a - b
            q, p_b = two_sided_bounds(a, max(b, c), n, alpha)
            if parts is not None:
                q = error_upper_bound(a, n, parts[0])
                p_b = min(q, runner_up_upper_bound(max(b, c), n, parts[1]))
            if q < 1 and p_b < 1 and radius(q, p_b) > max(truth, 0.0):
                total.append(math.comb(n, a) * math.comb(n - a, b) * p[0] ** a * p[1] ** b * p[2] ** c)
    return math.fsum(total)


POINTS = [(a / 10, b / 10, (10 - a - b) / 10) for a in range(1, 9) for b in range(1, 10 - a)]


@pytest.mark.parametrize(("n", "alpha"), [(5, 0.2), (12, 0.05), (25, 0.1)])
def test_the_radius_is_too_large_with_probability_at_most_alpha(n: int, alpha: float) -> None:
    assert max(wrong(n, alpha, p) for p in POINTS) <= alpha


def test_the_enumeration_detects_a_rule_that_spends_too_much() -> None:
    assert max(wrong(25, 0.1, p, parts=(0.4, 0.4)) for p in POINTS) > 0.1


@pytest.mark.parametrize("n", [1, 4, 11])
@pytest.mark.parametrize("alpha", [0.01, 0.2])
def test_the_largest_other_count_bounds_the_true_runner_up(n: int, alpha: float) -> None:
    uppers = [runner_up_upper_bound(k, n, alpha) for k in range(n + 1)]
    assert uppers == sorted(uppers)
    # Classes B and C equally likely is where the largest count says most; A takes the rest.
    for p in [Fraction(k, 40) for k in range(1, 20)] + [Fraction(b) * (1 + Fraction(1, 10**9)) for b in uppers]:
        if 2 * p > 1:
            continue
        low = sum(
            (
                math.comb(n, b) * math.comb(n - b, c) * p ** (b + c) * (1 - 2 * p) ** (n - b - c)
                for b in range(n + 1)
                for c in range(n - b + 1)
                if uppers[max(b, c)] < p
            ),
            Fraction(0),
        )
        assert low <= Fraction(alpha)


@pytest.mark.parametrize("alpha", [0.001, 0.05, 1 / 3])
def test_the_levels_of_the_two_bounds_add_up_to_at_most_alpha(alpha: float) -> None:
    n = 1000
    q, p_b = two_sided_bounds(700, 100, n, alpha)
    assert q == error_upper_bound(700, n, 0.9 * alpha)
    assert p_b == pytest.approx(stats.beta.isf(0.1 * alpha, 101, n - 100), rel=1e-9)


def test_the_levels_exceed_alpha_not_even_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[float] = []
    monkeypatch.setattr(bounds, "error_upper_bound", lambda count, n, alpha: levels.append(alpha) or 0.1)
    for alpha in np.linspace(0.001, 0.1, 50).tolist():
        levels.clear()
        two_sided_bounds(7, 1, 10, alpha)
        assert alpha * (1 - 1e-12) < sum(map(Fraction, levels)) <= Fraction(alpha)


def test_the_radius_grows_with_many_classes() -> None:
    one_sided = error_upper_bound(70_000, 100_000, 0.001)
    assert radius(one_sided, one_sided) == pytest.approx(0.51, abs=0.005)
    assert radius(*two_sided_bounds(70_000, 10_000, 100_000, 0.001)) == pytest.approx(0.89, abs=0.005)


def test_two_classes_gain_nothing_and_lose_little() -> None:
    for count in (600, 900, 999, 1000):
        q, p_b = two_sided_bounds(count, 1000 - count, 1000, 0.001)
        assert p_b == q
        assert radius(q, p_b) == pytest.approx(-special.ndtri(error_upper_bound(count, 1000, 0.001)), abs=0.02)


def test_more_votes_for_another_class_never_help() -> None:
    radii = [radius(*two_sided_bounds(60, other, 100, 0.01)) for other in range(41)]
    assert (np.diff(radii) <= 0).all()


@pytest.mark.parametrize(("count", "other"), [(60, 41), (60, -1), (101, 0)])
def test_impossible_counts_are_refused(count: int, other: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        two_sided_bounds(count, other, 100, 0.01)
