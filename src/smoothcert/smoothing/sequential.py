"""Exact sequential tests: stop sampling as soon as the votes decide whether a radius is certified.

After A. Gandy, "Sequential Implementation of Monte Carlo Tests with Uniformly Bounded Resampling Risk", 2009. A test
asks whether p, the probability of the chosen class, exceeds t = 1 - q. It looks at the count of successes after every
batch. Its upper boundary is built from the exact distribution of counts under p = t, so that the probability of *ever*
crossing it is at most alpha, however many looks there are. Counts are kept as failures, whose probability q stays
accurate where 1 - q has no digits left.
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

# The n at which half of alpha may be spent: alpha * n / (n + HALF_SPENT).
HALF_SPENT = 3000
# The power that futility may cost, at the alternative of `_futility` and at every p above it.
FUTILITY = 1e-3
# The part of alpha that may be given to tails which are cut off for speed; they count as spent.
CUT = 1e-13
# The part of alpha never given out: it covers the rounding of some hundred thousand float64 operations.
ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Boundaries:
    """When a test of "p <= t" stops.

    With probability at least 1 - alpha a test whose null hypothesis p <= t is true never reaches `upper`, at any
    look, whether or not `lower` is obeyed. Looks may be left out, never added.
    """

    looks: Ints  # the number of votes after each look
    upper: Ints  # claim p > t as soon as successes >= upper[k]; above looks[k]: not yet possible
    lower: Ints  # stop without a claim as soon as successes <= lower[k]; -1: not yet
    spent: float  # the probability of ever reaching `upper` under p = t, tails cut off for speed included


@dataclass(frozen=True, eq=False)
class _Counts:
    """A distribution of the number of failures: P(first + i) = mass[i], for the paths that still run."""

    mass: Floats
    first: int

    def plus(self, batch: "_Counts") -> "_Counts":
        mass = np.convolve(self.mass, batch.mass) if len(self.mass) else self.mass  # no path may be left
        return _Counts(mass, self.first + batch.first)

    def split_low(self, budget: float) -> tuple[int, float, "_Counts"]:
        """Take off the most counts at the low end that weigh at most `budget`: the last of them, weight, the rest."""
        weight = np.cumsum(self.mass)
        taken = int(np.searchsorted(weight, budget, side="right"))
        return (
            self.first + taken - 1,
            float(weight[taken - 1]) if taken else 0.0,
            _Counts(self.mass[taken:], self.first + taken),
        )

    def split_high(self, budget: float) -> tuple[int, float, "_Counts"]:
        """Take off the most counts at the high end that weigh at most `budget`: the first of them, weight, the rest."""
        weight = np.cumsum(self.mass[::-1])
        taken = int(np.searchsorted(weight, budget, side="right"))
        kept = len(self.mass) - taken
        return self.first + kept, float(weight[taken - 1]) if taken else 0.0, _Counts(self.mass[:kept], self.first)

    def between(self, low: int, high: int) -> "_Counts":
        """The part with low < count < high."""
        start = min(max(low + 1 - self.first, 0), len(self.mass))
        stop = max(high - self.first, start)
        return _Counts(self.mass[start:stop], self.first + start)


def _binomial(n: int, q: float, cut: float) -> tuple[_Counts, float]:
    """Binomial(n, q) without tails that weigh at most `cut` each, and the weight of what was left out."""
    from scipy import stats  # takes most of a second, which only sequential runs need

    whole = _Counts(stats.binom.pmf(np.arange(n + 1), n, q), 0)
    _, below, rest = whole.split_low(cut)
    _, above, rest = rest.split_high(cut)
    return rest, below + above


def _looks(batch: int, n_max: int) -> tuple[Ints, Ints]:
    """The votes after each look, and the votes between looks; the last look is at n_max, perhaps a shorter batch."""
    looks = np.unique(np.append(np.arange(batch, n_max + 1, batch, dtype=np.int64), n_max))
    return looks, np.diff(looks, prepend=0)


def _most_failures(q: float, alpha: float, batch: int, n_max: int, half_spent: int) -> tuple[Ints, float]:
    """The most failures with which each look claims (-1: none do), and the probability of ever claiming under q."""
    looks, sizes = _looks(batch, n_max)
    cut = CUT * alpha / (4 * len(looks))
    steps = {int(size): _binomial(int(size), q, cut) for size in set(sizes.tolist())}
    counts, spent = _Counts(np.ones(1), 0), 0.0
    boundary = np.empty_like(looks)
    for k, (n, size) in enumerate(zip(looks.tolist(), sizes.tolist(), strict=True)):
        step, left_out = steps[size]
        counts = counts.plus(step)
        _, dropped, counts = counts.split_high(cut)
        spent += left_out + dropped
        allowed = alpha * (1 - ROUNDING - CUT) * n / (n + half_spent)
        # Counts below the array were cut off, hence paid for: the boundary may lie there at no further cost.
        boundary[k], absorbed, counts = counts.split_low(allowed - spent)
        spent += absorbed
    return boundary, spent


def _futility(most: Ints, beta: float, batch: int, n_max: int, half_spent: int) -> Ints:
    """The fewest failures with which each look stops without a claim.

    Two rules. Stop when no later look could claim even if no further vote failed: this costs nothing. And stop by
    the mirrored construction at the alternative where the last look alone would claim half of the time: under that p
    the paths stopped in this way before they claim weigh at most `beta`. A larger p reaches a low boundary less
    often, so `beta` bounds the loss of power for every p at which the test is more likely than not to claim.
    """
    looks, sizes = _looks(batch, n_max)
    last = int(most[-1])
    # The best that any later look asks for; nothing comes after the last look.
    hope = np.append(np.maximum.accumulate(most[::-1])[::-1][1:], -1)
    if last < 0 or beta == 0:
        return np.asarray(np.maximum(hope, most) + 1)
    q = float(special.betainccinv(last + 1, n_max - last, 0.5))  # P(Binomial(n_max, q) <= last) = 1/2
    cut = CUT * beta / len(looks)
    steps = {int(size): _binomial(int(size), q, cut)[0] for size in set(sizes.tolist())}
    counts, spent = _Counts(np.ones(1), 0), 0.0
    boundary = np.empty_like(looks)
    for k, (n, size) in enumerate(zip(looks.tolist(), sizes.tolist(), strict=True)):
        stop = max(int(hope[k]), int(most[k])) + 1
        counts = counts.plus(steps[size]).between(int(most[k]), stop)
        found, absorbed, counts = counts.split_high(beta * (1 - ROUNDING) * n / (n + half_spent) - spent)
        spent += absorbed
        # An array that ends below `stop` ends where a path has no weight that matters: stopping there is free too.
        boundary[k] = min(stop, max(found, int(most[k]) + 1))
    return boundary


def boundaries(
    q: float, alpha: float, batch: int, n_max: int, *, futility: float = FUTILITY, half_spent: int = HALF_SPENT
) -> Boundaries:
    """The exact sequential test of "p <= 1 - q", looking after every `batch` votes and at `n_max`.

    With probability at least 1 - alpha no look claims p > 1 - q when that is false: by look n at most
    alpha * n / (n + half_spent) is spent, computed exactly under p = 1 - q, and a smaller p crosses less often.
    `futility` bounds the power lost by giving up early (0: give up only when a claim has become impossible); it
    does not enter the computation of alpha, so the guarantee holds also for those who ignore it.
    """
    if not 0 < q < 1 or not 0 < alpha < 1 or not 0 <= futility < 1:
        raise ValueError(f"expected 0 < q, alpha < 1 and 0 <= futility < 1, got {q}, {alpha}, {futility}")
    if batch < 1 or n_max < 1 or half_spent < 0:
        raise ValueError(f"expected batch, n_max >= 1 and half_spent >= 0, got {batch}, {n_max}, {half_spent}")
    looks, _ = _looks(batch, n_max)
    most, spent = _most_failures(q, alpha, batch, n_max, half_spent)
    lower = looks - _futility(most, futility, batch, n_max, half_spent)
    return _read_only(looks, looks - most, np.maximum(lower, -1), spent)


def _read_only(looks: Ints, upper: Ints, lower: Ints, spent: float) -> Boundaries:
    for array in (looks, upper, lower):
        array.setflags(write=False)  # cached boundaries are shared
    return Boundaries(looks, upper, lower, spent)


@lru_cache(maxsize=512)
def cached_boundaries(
    q: float, alpha: float, batch: int, n_max: int, *, futility: float = FUTILITY, half_spent: int = HALF_SPENT
) -> Boundaries:
    """`boundaries`, kept in memory. Never on disk: a changed file would turn abstentions into certificates."""
    return boundaries(q, alpha, batch, n_max, futility=futility, half_spent=half_spent)


class GridTest:
    """Tests of rising radii on one stream of votes, each at the full alpha.

    `qs` are the error probabilities of the radii r_1 < r_2 < ..., hence strictly falling. The claim is the largest j
    with tests 1, ..., j all crossed. With probability at least 1 - alpha every claim is true: if p is too small for
    some radii, let r_i be the least of them. All true hypotheses are then i, i + 1, ..., and a false claim needs test
    i to cross, which has probability at most alpha. The tests may depend on each other in any way, and no alpha is
    divided.
    """

    def __init__(
        self,
        qs: Sequence[float],
        alpha: float,
        batch: int,
        n_max: int,
        *,
        futility: float = FUTILITY,
        half_spent: int = HALF_SPENT,
    ) -> None:
        if not qs or any(low >= high for high, low in pairwise(qs)):
            raise ValueError(f"expected falling error probabilities, got {list(qs)}")
        self.qs = tuple(float(q) for q in qs)
        self.tests = [
            cached_boundaries(q, alpha, batch, n_max, futility=futility, half_spent=half_spent) for q in self.qs
        ]
        self.looks = self.tests[0].looks
        self._upper = np.stack([test.upper for test in self.tests], axis=1)
        self._lower = np.stack([test.lower for test in self.tests], axis=1)
        self._index = {n: k for k, n in enumerate(self.looks.tolist())}

    def start(self) -> "GridRun":
        """A run for one image."""
        return GridRun(self, np.zeros(len(self.qs), dtype=np.bool_))

    def crossed(self, successes: int, n: int) -> NDArray[np.bool_]:
        """Which tests cross their upper boundary with `successes` among `n` votes."""
        return np.asarray(successes >= self._upper[self._look(n)])

    def futile(self, successes: int, n: int) -> NDArray[np.bool_]:
        """Which tests are not worth more votes."""
        return np.asarray(successes <= self._lower[self._look(n)])

    def _look(self, n: int) -> int:
        if n not in self._index:
            raise ValueError(f"expected n at a look (every {self.looks[0]} votes up to {self.looks[-1]}), got {n}")
        return self._index[n]


@dataclass
class GridRun:
    """One image's run through a `GridTest`."""

    test: GridTest
    crossed: NDArray[np.bool_]  # test j has crossed at some look
    n: int = 0
    successes: int = 0

    def update(self, successes: int, n: int) -> Literal["continue", "stop"]:
        """Take the cumulative count after `n` votes. "stop": all tests have crossed, the next is futile, or n_max.

        Going on after "stop", to n_max at most, is allowed and keeps the guarantee; it is only unlikely to pay.
        """
        if n <= self.n or not self.successes <= successes <= self.successes + n - self.n:
            raise ValueError(f"expected counts that grow from {self.successes} of {self.n}, got {successes} of {n}")
        self.crossed = self.crossed | self.test.crossed(successes, n)
        self.n, self.successes = n, successes
        j = self.claimed
        if j == len(self.crossed) or n == int(self.test.looks[-1]):
            return "stop"
        # Only the next test matters, and only now: futility is advice, so a test once futile may still cross.
        return "stop" if self.test.futile(successes, n)[j] else "continue"

    @property
    def claimed(self) -> int:
        """How many tests, from the first on, have crossed."""
        return int(np.logical_and.accumulate(self.crossed).sum())

    @property
    def error_bound(self) -> float:
        """The claim: 1 - p is at most this (1 when nothing is claimed)."""
        return self.test.qs[self.claimed - 1] if self.claimed else 1.0


def split_alpha(alpha: float, sequential_share: float = 0.3) -> tuple[float, float]:
    """Divide alpha between sequential tests and a Clopper-Pearson bound held back for n_max.

    Either can be false with at most its own part, on the same votes, so both hold with probability at least
    1 - alpha: the parts add up to at most alpha, and no independence is needed.
    """
    if not 0 < alpha < 1 or not 0 < sequential_share < 1:
        raise ValueError(f"expected 0 < alpha, sequential_share < 1, got {alpha} and {sequential_share}")
    sequential = alpha * sequential_share
    return sequential, math.nextafter(alpha - sequential, 0.0)


def combined_error_bound(run: GridRun, held_back: float) -> float:
    """An upper bound on 1 - p: the run's claim or, if it came to n_max, Clopper-Pearson at `held_back` if smaller.

    With the two parts of `split_alpha`, the bound is below 1 - p with probability at most alpha. Clopper-Pearson is
    valid because its n is fixed beforehand; that it is not looked at when the run stops early cannot make it wrong.
    """
    if run.n < int(run.test.looks[-1]):
        return run.error_bound
    return min(run.error_bound, error_upper_bound(run.successes, run.n, held_back))
