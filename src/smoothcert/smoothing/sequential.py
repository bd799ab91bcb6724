"""Exact sequential tests: stop sampling as soon as the votes decide whether a radius is certified.

After A. Gandy, "Sequential Implementation of Monte Carlo Tests with Uniformly Bounded Resampling Risk", 2009. A test
asks whether p, the probability of the chosen class, exceeds t = 1 - q. It looks at the count of successes after every
batch. Its upper boundary is built from the exact distribution of counts under p = t, so that the probability of *ever*
crossing it is at most alpha, however many looks there are. Counts are kept as failures, because their probability q
stays accurate where 1 - q loses its digits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special

from smoothcert.smoothing.bounds import error_upper_bound

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

HALF_SPENT = 3000
"""Number of votes at which half of alpha may be spent: alpha * n / (n + HALF_SPENT)."""
FUTILITY = 1e-3
"""Power that futility may cost, at the alternative of `_futility` and at every p above it."""
CUT = 1e-13
"""Part of alpha that pays for tails that are cut off for speed."""
ROUNDING = 1e-9
"""Part of alpha that is never spent: it covers the rounding of some hundred thousand float64 operations."""


@dataclass(frozen=True, eq=False)
class Boundaries:
    """Counts at which a test of "p <= t" stops.

    With probability at least 1 - alpha a test whose null hypothesis p <= t is true never reaches `upper`, at any
    look, whether or not `lower` is obeyed. Looks may be left out, never added.
    """

    looks: Ints  # the number of votes after each look
    upper: Ints  # claim p > t as soon as successes >= upper[k]; above looks[k]: not yet possible
    lower: Ints  # stop without a claim as soon as successes <= lower[k]; -1: not yet
    spent: float  # the probability of ever reaching `upper` under p = t, including tails that are cut off for speed


@dataclass(frozen=True, eq=False)
class _Counts:
    """Distribution of the number of failures over the paths that still run: P(first + i) = mass[i]."""

    mass: Floats
    first: int

    def plus(self, batch: "_Counts") -> "_Counts":
        mass = np.convolve(self.mass, batch.mass) if len(self.mass) else self.mass  # no path may be left
        return _Counts(mass, self.first + batch.first)

    def split_low(self, budget: float) -> tuple[int, float, "_Counts"]:
        """Remove as many low counts as weigh at most `budget`: the last removed count, their weight, the rest."""
        weight = np.cumsum(self.mass)
        removed = int(np.searchsorted(weight, budget, side="right"))
        rest = _Counts(self.mass[removed:], self.first + removed)
        return rest.first - 1, float(weight[removed - 1]) if removed else 0.0, rest

    def split_high(self, budget: float) -> tuple[int, float, "_Counts"]:
        """Remove as many high counts as weigh at most `budget`: the first removed count, their weight, the rest."""
        weight = np.cumsum(self.mass[::-1])
        removed = int(np.searchsorted(weight, budget, side="right"))
        kept = len(self.mass) - removed
        return self.first + kept, float(weight[removed - 1]) if removed else 0.0, _Counts(self.mass[:kept], self.first)

    def between(self, low: int, high: int) -> "_Counts":
        """The part with low < count < high."""
        start = min(max(low + 1 - self.first, 0), len(self.mass))
        stop = max(high - self.first, start)
        return _Counts(self.mass[start:stop], self.first + start)


def _binomials(sizes: Ints, q: float, cut: float) -> dict[int, tuple[_Counts, float]]:
    """Binomial(n, q) for each n of `sizes` without tails of at most `cut` each, and the weight of these tails."""
    from scipy import stats  # its import takes most of a second, and only sequential rules need it

    binomials = {}
    for n in set(sizes.tolist()):
        whole = _Counts(stats.binom.pmf(np.arange(n + 1), n, q), 0)
        _, below, rest = whole.split_low(cut)
        _, above, rest = rest.split_high(cut)
        binomials[n] = rest, below + above
    return binomials


def spendable(alpha: float, n: int, half_spent: int = HALF_SPENT) -> float:
    """The part of alpha that the looks up to n votes may spend."""
    return alpha * (1 - ROUNDING - CUT) * n / (n + half_spent)


def _most_failures(q: float, alpha: float, looks: Ints, half_spent: int) -> tuple[Ints, float]:
    """The most failures with which each look claims (-1: none), and the probability of ever claiming under q."""
    sizes = np.diff(looks, prepend=0)
    cut = CUT * alpha / (4 * len(looks))
    batches = _binomials(sizes, q, cut)
    counts = _Counts(np.ones(1), 0)
    spent = 0.0
    boundary = np.empty_like(looks)
    for k, (n, size) in enumerate(zip(looks.tolist(), sizes.tolist(), strict=True)):
        batch, tails = batches[size]
        counts = counts.plus(batch)
        _, dropped, counts = counts.split_high(cut)
        spent += tails + dropped
        # Counts below the array were cut off and paid for: the boundary may lie there at no further cost.
        boundary[k], absorbed, counts = counts.split_low(spendable(alpha, n, half_spent) - spent)
        spent += absorbed
    return boundary, spent


def _futility(most: Ints, beta: float, looks: Ints, half_spent: int) -> Ints:
    """The fewest failures with which each look stops without a claim.

    Two rules. Stop when no later look could claim even if no further vote failed: this costs nothing. And stop by
    the mirrored construction at the alternative where the last look alone would claim half of the time: under that p
    the paths stopped in this way before they claim weigh at most `beta`. A larger p reaches a low boundary less
    often, so `beta` bounds the loss of power for every p at which the test is more likely than not to claim.
    """
    last = int(most[-1])
    # The most failures that any later look accepts; no look follows the last one.
    later = np.append(np.maximum.accumulate(most[::-1])[::-1][1:], -1)
    hopeless = np.asarray(np.maximum(later, most) + 1)
    if last < 0 or beta == 0:
        return hopeless
    q = float(special.betainccinv(last + 1, int(looks[-1]) - last, 0.5))  # P(Binomial(n_max, q) <= last) = 1/2
    sizes = np.diff(looks, prepend=0)
    batches = _binomials(sizes, q, CUT * beta / len(looks))
    counts = _Counts(np.ones(1), 0)
    spent = 0.0
    boundary = np.empty_like(looks)
    for k, (n, size) in enumerate(zip(looks.tolist(), sizes.tolist(), strict=True)):
        counts = counts.plus(batches[size][0]).between(int(most[k]), int(hopeless[k]))
        high, absorbed, counts = counts.split_high(beta * (1 - ROUNDING) * n / (n + half_spent) - spent)
        spent += absorbed
        # An array that ends below `hopeless` ends where no path has weight: stopping there is free, too.
        boundary[k] = min(int(hopeless[k]), max(high, int(most[k]) + 1))
    return boundary


@lru_cache(maxsize=512)
def boundaries(
    q: float, alpha: float, batch: int, n_max: int, *, futility: float = FUTILITY, half_spent: int = HALF_SPENT
) -> Boundaries:
    """The exact sequential test of "p <= 1 - q", looking after every `batch` votes and at `n_max`.

    With probability at least 1 - alpha no look claims p > 1 - q when that is false: by look n at most
    alpha * n / (n + half_spent) is spent, computed exactly under p = 1 - q, and a smaller p crosses less often.
    `futility` bounds the power lost by giving up early (0: give up only when a claim has become impossible); it does
    not enter the computation of alpha, so the guarantee also holds for callers who ignore it.

    Results are cached in memory. Never on disk: a changed file would turn abstentions into certificates.
    """
    if not 0 < q < 1 or not 0 < alpha < 1 or batch < 1 or n_max < 1:
        raise ValueError(f"expected 0 < q, alpha < 1 and batch, n_max >= 1, got {q}, {alpha}, {batch}, {n_max}")
    looks = np.unique(np.append(np.arange(batch, n_max + 1, batch, dtype=np.int64), n_max))
    most, spent = _most_failures(q, alpha, looks, half_spent)
    upper = looks - most
    lower = np.maximum(looks - _futility(most, futility, looks, half_spent), -1)
    for array in (looks, upper, lower):
        array.setflags(write=False)  # callers share cached arrays
    return Boundaries(looks, upper, lower, spent)


class GridTest:
    """Tests of rising radii on one stream of votes, each at the full alpha.

    `qs` are the error probabilities of the radii r_1 < r_2 < ..., hence strictly falling. The claim is the largest j
    with tests 1, ..., j all crossed. With probability at least 1 - alpha every claim is true: if p is too small for
    some radii, let r_i be the least of them. All true hypotheses are then i, i + 1, ..., and a false claim needs test
    i to cross, which has probability at most alpha. The tests may depend on each other in any way, and no alpha is
    divided.
    """

    def __init__(
        self, qs: Sequence[float], alpha: float, batch: int, n_max: int, *, half_spent: int = HALF_SPENT
    ) -> None:
        if not qs or any(low >= high for high, low in pairwise(qs)):
            raise ValueError(f"expected falling error probabilities, got {list(qs)}")
        self.qs = tuple(float(q) for q in qs)
        tests = [boundaries(q, alpha, batch, n_max, half_spent=half_spent) for q in self.qs]
        self.looks = tests[0].looks
        self.upper = {int(n): np.array([test.upper[k] for test in tests]) for k, n in enumerate(self.looks)}
        self.lower = {int(n): np.array([test.lower[k] for test in tests]) for k, n in enumerate(self.looks)}

    def start(self) -> "GridRun":
        """A run for one image."""
        return GridRun(self, np.zeros(len(self.qs), dtype=np.bool_))


@dataclass
class GridRun:
    """The run of one image through a `GridTest`."""

    test: GridTest
    crossed: NDArray[np.bool_]  # test j has crossed at some look
    n: int = 0
    successes: int = 0

    def update(self, successes: int, n: int) -> Literal["continue", "stop"]:
        """Take the cumulative count after `n` votes. "stop": all tests have crossed, the next is futile, or n_max.

        A caller may continue after "stop", up to n_max: the guarantee still holds, but more votes are unlikely to pay.
        """
        if n <= self.n or not self.successes <= successes <= self.successes + n - self.n:
            raise ValueError(f"expected counts that grow from {self.successes} of {self.n}, got {successes} of {n}")
        if n not in self.test.upper:
            raise ValueError(f"expected n at a look, got {n}")
        self.crossed = self.crossed | (successes >= self.test.upper[n])
        self.n, self.successes = n, successes
        j = self.claimed
        if j == len(self.crossed) or n == int(self.test.looks[-1]):
            return "stop"
        # Only the next test matters, and only now: futility is advice, so a test that was futile may still cross.
        return "stop" if successes <= self.test.lower[n][j] else "continue"

    @property
    def claimed(self) -> int:
        """Number of tests, from the first one, that have crossed without a gap."""
        return int(np.logical_and.accumulate(self.crossed).sum())

    @property
    def error_bound(self) -> float:
        """The claim: 1 - p is at most this (1 if nothing is claimed)."""
        return self.test.qs[self.claimed - 1] if self.claimed else 1.0


def split_alpha(alpha: float) -> tuple[float, float]:
    """Divide alpha between sequential tests and a Clopper-Pearson bound that is reserved for n_max.

    Either can be false with at most its own part, on the same votes, so both hold with probability at least
    1 - alpha: the parts add up to at most alpha, and no independence is needed.
    """
    sequential = 0.3 * alpha
    return sequential, math.nextafter(alpha - sequential, 0.0)


def combined_error_bound(run: GridRun, held_back: float) -> float:
    """An upper bound on 1 - p: the claim of the run or, if it reached n_max, Clopper-Pearson at `held_back` if smaller.

    With the two parts of `split_alpha`, the bound is below 1 - p with probability at most alpha. Clopper-Pearson is
    valid because its n is fixed beforehand; not computing it when the run stops early cannot make it wrong. A
    `held_back` of 0 reserves nothing: the bound is the claim.
    """
    if not held_back or run.n < int(run.test.looks[-1]):
        return run.error_bound
    return min(run.error_bound, error_upper_bound(run.successes, run.n, held_back))
