"""Confidence bounds on a binomial proportion, and the binomial test of PREDICT.

Everything here is float64 and speaks of the error side q = 1 - p: near p = 1, where radii are large, p itself has
no digits left. Every bound is rounded to the safe side.
"""

import math

from scipy import special, stats

# scipy's inverse incomplete beta is good to a few ulp. One part in 1e12 covers that many times over and
# costs less than 1e-12 of a radius.
SAFETY = 1e-12


def error_upper_bound(count: int, n: int, alpha: float) -> float:
    """Clopper-Pearson upper bound on q = 1 - p from `count` successes in `n` trials of probability p.

    For every p, P(bound < 1 - p) <= alpha. One-sided. 1 when count is 0.
    """
    if not 0 <= count <= n or n < 1:
        raise ValueError(f"expected 0 <= count <= n and n >= 1, got count {count}, n {n}")
    if not 0 < alpha < 1:
        raise ValueError(f"expected 0 < alpha < 1, got {alpha}")
    if count == 0:
        return 1.0
    # The quantile of Beta(n - count + 1, count) at 1 - alpha, through the complement, since 1 - alpha would round.
    agree = count == n
    q = -math.expm1(math.log(alpha) / n) if agree else float(special.betainccinv(n - count + 1, count, alpha))
    return min(1.0, q * (1 + SAFETY))


def lower_bound(count: int, n: int, alpha: float) -> float:
    """Clopper-Pearson lower bound on p, one-sided at `alpha`: 1 - error_upper_bound, rounded down."""
    return max(0.0, math.nextafter(1.0 - error_upper_bound(count, n, alpha), -math.inf))


def top_two_p_value(count1: int, count2: int) -> float:
    """Two-sided binomial test of `count1` out of `count1 + count2` against 1/2, for count1 >= count2."""
    if count1 < count2 or count2 < 0:
        raise ValueError(f"expected count1 >= count2 >= 0, got {count1} and {count2}")
    # The null distribution is symmetric, so the two-sided p-value is twice the upper tail.
    return min(1.0, 2.0 * float(stats.binom.sf(count1 - 1, count1 + count2, 0.5)))


def smallest_error_bound(n: int, alpha: float) -> float:
    """The least q that n votes can show: all of them agree."""
    return error_upper_bound(n, n, alpha)


def votes_needed(q: float, alpha: float) -> int:
    """The least n for which n agreeing votes show an error probability of at most q."""
    if not 0 < q < 1:
        raise ValueError(f"expected 0 < q < 1, got {q}")
    n = max(1, math.ceil(math.log(alpha) / math.log1p(-q)))
    while smallest_error_bound(n, alpha) > q:
        n += 1
    return n
