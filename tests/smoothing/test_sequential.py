"""Sequential rules against independent computations: vote by vote, or over all count paths in rational arithmetic.

Nothing here is sampled. The probability that a rule is wrong is summed over all possible outcomes.
"""

import bisect
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from scipy import optimize, special, stats

from smoothcert.smoothing import sequential
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.smoothing.sequential import (
    Boundaries,
    GridRun,
    GridTest,
    boundaries,
    combined_error_bound,
    split_alpha,
)

ALPHA = 0.001


def crossing_exactly(looks: list[int], claims: Callable[[int, int], bool], p: Fraction) -> Fraction:
    """P(claims(successes, n) at some look), one vote at a time, in fractions."""
    alive, crossed = {0: Fraction(1)}, Fraction(0)
    for n in range(1, looks[-1] + 1):
        after: dict[int, Fraction] = {}
        for count, weight in alive.items():
            after[count] = after.get(count, Fraction(0)) + weight * (1 - p)
            after[count + 1] = after.get(count + 1, Fraction(0)) + weight * p
        if n in looks:
            crossed += sum((weight for count, weight in after.items() if claims(count, n)), Fraction(0))
            after = {count: weight for count, weight in after.items() if not claims(count, n)}
        alive = after
    return crossed


def reaches(found: Boundaries) -> Callable[[int, int], bool]:
    upper = dict(zip(found.looks.tolist(), found.upper.tolist(), strict=True))
    return lambda count, n: count >= upper[n]


def crossing_vote_by_vote(found: Boundaries, q: float, most: int) -> float:
    """P(ever reaching `upper`) in floats, one vote at a time; paths with more than `most` failures are dropped."""
    at = {int(n): int(n - upper) for n, upper in zip(found.looks, found.upper, strict=True)}
    mass = np.zeros(most + 1)
    mass[0] = 1.0
    crossed = 0.0
    for n in range(1, int(found.looks[-1]) + 1):
        failed = mass[:-1] * q
        mass *= 1 - q
        mass[1:] += failed
        if n in at:
            crossed += math.fsum(mass[: at[n] + 1])
            mass[: at[n] + 1] = 0.0
    return crossed


def operating(found: Boundaries, q: float, *, futility: bool = True) -> tuple[float, float]:
    """P(claim) and the expected number of votes when votes fail with probability q: between the boundaries only."""
    mass, before, claim, votes = np.ones(1), 0, 0.0, 0.0
    for n, upper, lower in zip(found.looks.tolist(), found.upper.tolist(), found.lower.tolist(), strict=True):
        votes += (n - before) * mass.sum()
        mass = np.convolve(mass, stats.binom.pmf(np.arange(n - before + 1), n - before, q))
        claim += mass[: n - upper + 1].sum()
        mass[: n - upper + 1] = 0.0
        if futility:
            mass = mass[: max(n - lower, 1)]
        before = n
    return float(claim), float(votes)


SMALL = [  # q, alpha, batch, n_max, half_spent
    (0.5, 0.1, 4, 30, 10),
    (0.25, 0.05, 1, 24, 5),
    (0.1, 0.2, 7, 40, 0),
    (0.08, 0.3, 5, 40, 20),
    (0.5, 0.3, 8, 40, 3000),
    (0.9, 0.05, 5, 25, 10),
]


@pytest.mark.parametrize(("q", "alpha", "batch", "n_max", "half_spent"), SMALL)
def test_the_probability_of_ever_crossing_is_the_spent_alpha(
    q: float, alpha: float, batch: int, n_max: int, half_spent: int
) -> None:
    found = boundaries(q, alpha, batch, n_max, half_spent=half_spent)
    looks = found.looks.tolist()
    at_t = crossing_exactly(looks, reaches(found), 1 - Fraction(q))
    assert float(at_t) == pytest.approx(found.spent, abs=1e-12)
    assert 0 < at_t <= Fraction(alpha)
    # p = t is the worst point of the null hypothesis.
    below = [crossing_exactly(looks, reaches(found), (1 - Fraction(q)) * k / 5) for k in (0, 2, 4, 5)]
    assert all(a < b for a, b in pairwise(below))


@pytest.mark.parametrize(("q", "alpha", "batch", "n_max", "half_spent"), SMALL)
def test_every_boundary_is_the_smallest_that_the_budget_allows(
    q: float, alpha: float, batch: int, n_max: int, half_spent: int
) -> None:
    found = boundaries(q, alpha, batch, n_max, half_spent=half_spent)
    looks, upper = found.looks.tolist(), found.upper.tolist()
    for k, n in enumerate(looks):
        spent = [
            crossing_exactly(looks[: k + 1], lambda count, m, u=[*upper[:k], last]: count >= u[looks.index(m)], t)
            for t in [1 - Fraction(q)]
            for last in (upper[k], upper[k] - 1)
        ]
        allowed = Fraction(alpha) * n / (n + half_spent)
        assert spent[0] <= allowed
        assert spent[1] > allowed * (1 - Fraction(1, 10**8))


@pytest.mark.parametrize(("q", "n"), [(0.02, 20_000), (1e-4, 100_000)])
def test_cut_off_tails_do_not_matter_at_full_size(q: float, n: int) -> None:
    found = boundaries(q, ALPHA, 500, n)
    most = int(n * q + 12 * math.sqrt(n * q)) + 40
    assert crossing_vote_by_vote(found, q, most) == pytest.approx(found.spent, abs=1e-12)
    assert found.spent <= ALPHA


@pytest.mark.parametrize("q", [0.5, 0.3, 0.7])
def test_cut_off_tails_count_as_spent(q: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "CUT", 0.5)  # tails that weigh as much as this would show if they were free
    found = boundaries.__wrapped__(q, 0.3, 20, 60, half_spent=0)
    crossing = float(crossing_exactly(found.looks.tolist(), reaches(found), 1 - Fraction(q)))
    assert crossing < found.spent - 1e-3
    assert found.spent <= 0.3


@pytest.mark.parametrize("q", [0.5, 0.3, 1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize(("batch", "n_max"), [(500, 20_000), (300, 1000), (64, 50), (1, 200)])
def test_boundaries_are_in_order(q: float, batch: int, n_max: int) -> None:
    found = boundaries(q, ALPHA, batch, n_max)
    assert found.looks[-1] == n_max
    assert (np.diff(found.looks, prepend=0) <= batch).all()
    assert (found.upper > found.lower).all()
    assert found.upper[-1] == found.lower[-1] + 1
    assert (found.lower >= -1).all()
    assert found.spent <= ALPHA


def test_an_unreachable_radius_is_given_up_at_once() -> None:
    found = boundaries(1e-9, ALPHA, 100, 1000)
    assert (found.upper > found.looks).all()
    assert (found.lower == found.looks).all()


def test_looking_at_an_uncorrected_bound_after_every_batch_is_wrong_too_often() -> None:
    alpha, looks, t = 0.05, list(range(5, 41, 5)), Fraction(3, 4)
    claims = {(s, n): 1 - Fraction(error_upper_bound(s, n, alpha)) > t for n in looks for s in range(n + 1)}
    assert crossing_exactly([40], lambda s, n: claims[s, n], t) <= Fraction(alpha)
    assert crossing_exactly(looks, lambda s, n: claims[s, n], t) > Fraction(alpha) * 3 / 2
    found = boundaries(0.25, alpha, 5, 40, half_spent=10)
    assert crossing_exactly(looks, reaches(found), t) <= Fraction(alpha)


@pytest.mark.parametrize(("r", "truth", "most_votes"), [(0.0, 0.25, 7000), (2.0, 2.6, 6000)])
def test_a_clear_case_takes_few_votes_and_loses_no_power(r: float, truth: float, most_votes: int) -> None:
    q, actual = float(special.ndtr(-r)), float(special.ndtr(-truth))
    found = boundaries(q, ALPHA, 500, 40_000)
    claim, votes = operating(found, actual)
    assert votes < most_votes
    count = bisect.bisect_left(range(40_001), True, key=lambda s: error_upper_bound(s, 40_000, ALPHA) <= q)
    fixed = float(stats.binom.cdf(40_000 - count, 40_000, actual))
    assert claim > fixed - 0.005
    # The mirror image: a radius that the image does not have is given up soon.
    rejected, votes = operating(boundaries(actual, ALPHA, 500, 40_000), q)
    assert votes < most_votes
    assert rejected < ALPHA


@pytest.mark.parametrize("q", [0.4, 0.003])
def test_futility_costs_little_power_and_never_adds_claims(q: float) -> None:
    found = boundaries(q, ALPHA, 250, 10_000)
    half = float(special.betainccinv(10_000 - found.upper[-1] + 1, found.upper[-1], 0.5))
    for actual in (q, half, half * 0.9, half * 0.3):
        with_it, votes = operating(found, actual)
        without, longer = operating(found, actual, futility=False)
        assert with_it <= without + 1e-12
        assert votes <= longer
        if actual <= half:
            assert with_it >= without - sequential.FUTILITY
    impossible_only = boundaries(q, ALPHA, 250, 10_000, futility=0.0)
    assert operating(impossible_only, q)[0] == pytest.approx(operating(found, q, futility=False)[0], abs=1e-15)
    assert (impossible_only.upper == found.upper).all()


@pytest.mark.parametrize(
    ("q", "alpha", "batch", "n_max", "half_spent", "futility"),
    [(0.5, 0.1, 4, 30, 10, 0.2), (0.5, 0.05, 1, 30, 20, 0.9), (0.3, 0.2, 4, 60, 20, 0.5), (0.3, 0.05, 4, 60, 20, 0.2)],
)
def test_every_futility_boundary_is_the_largest_that_its_budget_allows(
    q: float, alpha: float, batch: int, n_max: int, half_spent: int, futility: float
) -> None:
    """At the p where the last look claims half of the time, paths are given up from the worst one on."""
    found = boundaries(q, alpha, batch, n_max, futility=futility, half_spent=half_spent)
    looks, most = found.looks.tolist(), (found.looks - found.upper).tolist()
    half = optimize.brentq(lambda x: stats.binom.cdf(most[-1], n_max, x) - 0.5, 1e-9, 1 - 1e-9, xtol=1e-15)
    alive, spent, before = {0: 1.0}, 0.0, 0
    for k, n in enumerate(looks):
        after: Counter[int] = Counter()
        for failures, weight in alive.items():
            for more, chance in enumerate(stats.binom.pmf(np.arange(n - before + 1), n - before, half)):
                after[failures + more] += weight * float(chance)
        hopeless = max(most[k:]) + 1
        alive = {failures: w for failures, w in after.items() if most[k] < failures < hopeless}
        stop = hopeless
        while stop - 1 > most[k] and spent + alive.get(stop - 1, 0.0) <= futility * n / (n + half_spent):
            stop -= 1
            spent += alive.pop(stop, 0.0)
        assert n - found.lower[k] == min(stop, n + 1), k
        before = n


def outcomes(
    test: GridTest, bound: Callable[[GridRun], float], *, obey: bool = True
) -> dict[float, Counter[tuple[int, int]]]:
    """For each bound that the rule can end with: how many vote sequences, by (n, successes), lead to it.

    Runs the real `GridRun` through every count path; paths in the same state are merged.
    """
    ended: dict[float, Counter[tuple[int, int]]] = {}
    alive: dict[tuple[int, bytes], int] = {(0, test.start().crossed.tobytes()): 1}
    for before, n in pairwise([0, *test.looks.tolist()]):
        after: Counter[tuple[int, bytes]] = Counter()
        for (count, crossed), ways in alive.items():
            for more in range(n - before + 1):
                run = GridRun(test, np.frombuffer(crossed, dtype=np.bool_), before, count)
                verdict = run.update(count + more, n)
                weight = ways * math.comb(n - before, more)
                if (verdict == "stop" and obey) or n == test.looks[-1]:
                    ended.setdefault(bound(run), Counter())[n, count + more] += weight
                else:
                    after[count + more, run.crossed.tobytes()] += weight
        alive = dict(after)
    return ended


def wrong(ended: dict[float, Counter[tuple[int, int]]], p: Fraction) -> Fraction:
    """P(the claimed lower bound on p is at least p), for bounds that are claims "1 - p < q"."""
    return sum(
        (
            ways * p**count * (1 - p) ** (n - count)
            for q, where in ended.items()
            if q < 1 and 1 - Fraction(q) >= p
            for (n, count), ways in where.items()
        ),
        Fraction(0),
    )


GRID = [0.5, 0.4, 0.25, 0.2, 0.1]


@pytest.mark.parametrize("obey", [True, False])
def test_a_grid_of_radii_needs_no_division_of_alpha(obey: bool) -> None:
    alpha = 0.1
    test = GridTest(GRID, alpha, 10, 60, half_spent=5)
    ended = outcomes(test, lambda run: run.error_bound, obey=obey)
    everything = sum(Fraction(ways, 2**n) for where in ended.values() for (n, _), ways in where.items())
    assert everything == 1
    assert set(ended) == {1.0, *GRID}
    chances = [wrong(ended, p) for p in [1 - Fraction(q) for q in GRID] + [Fraction(k, 40) for k in range(1, 40)]]
    assert max(chances) <= Fraction(alpha)
    assert max(chances) > Fraction(alpha) / 3


def test_a_claim_needs_all_smaller_radii() -> None:
    test = GridTest([0.5, 0.1], 0.05, 10, 40, half_spent=10)
    run = GridRun(test, np.array([False, True]))
    assert run.claimed == 0
    assert run.error_bound == 1.0


def test_sequential_tests_and_a_bound_held_back_share_alpha() -> None:
    alpha = 0.1
    first, held_back = split_alpha(alpha)
    assert first == pytest.approx(0.3 * alpha)
    assert Fraction(first) + Fraction(held_back) <= Fraction(alpha)
    test = GridTest(GRID, first, 10, 60, half_spent=5)
    ended = outcomes(test, lambda run: combined_error_bound(run, held_back))
    assert len(ended) > len(GRID) + 3
    thresholds = [(1 - Fraction(q)) * (1 - Fraction(1, 10**9)) for q in sorted(ended)[::2] if q < 1]
    chances = [wrong(ended, p) for p in thresholds + [1 - Fraction(q) for q in GRID]]
    assert max(chances) <= Fraction(alpha)
    # This computation detects the mistake of giving the whole of alpha to both.
    both = outcomes(GridTest(GRID, alpha, 10, 60, half_spent=5), lambda run: combined_error_bound(run, alpha))
    assert max(
        wrong(both, (1 - Fraction(q)) * (1 - Fraction(1, 10**9))) for q in sorted(both)[::2] if q < 1
    ) > Fraction(alpha)


def test_bound_held_back_is_not_used_before_the_last_look() -> None:
    """A run that ends early claims what its tests have crossed, although Clopper-Pearson would give more."""
    run = GridTest([0.5, 0.001], 0.03, 10, 40, half_spent=5).start()
    run.update(10, 10)
    assert combined_error_bound(run, 0.07) == run.error_bound == 0.5 > error_upper_bound(10, 10, 0.07)
    run.update(40, 40)
    assert combined_error_bound(run, 0.07) == error_upper_bound(40, 40, 0.07) < run.error_bound == 0.5
    assert combined_error_bound(run, 0.0) == run.error_bound, "nothing is held back"


@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.1, 1 / 3])
def test_the_parts_of_alpha_do_not_exceed_it(alpha: float) -> None:
    first, second = split_alpha(alpha)
    assert Fraction(first) + Fraction(second) <= Fraction(alpha)
    assert first + second == pytest.approx(alpha, rel=1e-12)


def test_a_run_stops_when_it_has_its_answer() -> None:
    test = GridTest([0.5, 0.16, 0.005], ALPHA, 500, 100_000)
    run = test.start()
    assert run.update(500, 500) == "continue"
    assert run.claimed == 2
    assert run.update(2000, 2000) == "stop"  # looks may be left out
    assert run.claimed == 3
    assert run.update(2500, 2500) == "stop"
    lost = test.start()
    assert lost.update(100, 500) == "stop"
    assert (lost.claimed, lost.error_bound) == (0, 1.0)
    last = int(test.lower[500][0])
    assert [test.start().update(last + more, 500) for more in (0, 1)] == ["stop", "continue"]


def test_impossible_counts_are_refused() -> None:
    run = GridTest([0.5], ALPHA, 100, 1000).start()
    assert run.update(55, 100) == "continue"
    for successes, n in [(60, 150), (54, 200), (156, 200), (55, 100)]:
        with pytest.raises(ValueError, match="expected"):
            run.update(successes, n)
    for qs in ([0.1, 0.5], [0.5, 0.5]):
        with pytest.raises(ValueError, match="falling"):
            GridTest(qs, ALPHA, 100, 1000)
    for arguments in [(0.0, 0.1, 1, 1), (0.5, 1.0, 1, 1), (0.5, 0.1, 0, 1), (0.5, 0.1, 1, 0)]:
        with pytest.raises(ValueError, match="expected"):
            boundaries(*arguments)


def test_boundaries_are_computed_once_and_read_only() -> None:
    cached = boundaries(0.1, ALPHA, 100, 2000)
    assert boundaries(0.1, ALPHA, 100, 2000) is cached
    with pytest.raises(ValueError, match="read-only"):
        cached.upper[0] = 0
