"""Confidence bounds on a binomial proportion, and the binomial test of PREDICT.

Everything here is float64 and computed for the error q = 1 - p: near p = 1, where radii are large, p itself has no
digits left. Every bound is rounded to the safe side.
"""

import math

from scipy import special

from smoothcert.noise import SAFETY


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
    if count1 == 0:
        return 1.0
    # The null distribution is symmetric, so the two-sided p-value is twice the upper tail P(X >= count1).
    return min(1.0, 2.0 * float(special.betainc(count1, count2 + 1, 0.5)))


def smallest_error_bound(n: int, alpha: float) -> float:
    """The smallest error bound that n votes can give: all of them agree."""
    return error_upper_bound(n, n, alpha)


def votes_needed(q: float, alpha: float) -> int:
    """The smallest n for which n agreeing votes prove an error probability of at most q."""
    if not 0 < q < 1:
        raise ValueError(f"expected 0 < q < 1, got {q}")
    n = max(1, math.ceil(math.log(alpha) / math.log1p(-q)))
    while smallest_error_bound(n, alpha) > q:
        n += 1
    return n


def runner_up_upper_bound(largest_other_count: int, n: int, alpha: float) -> float:
    """Clopper-Pearson upper bound on the probability of the true runner-up, from the largest count of another class.

    For any number of classes, P(bound < p_B) <= alpha. No union over classes is needed: the true runner-up is one
    fixed class, its count is at most the largest one, and the bound grows with the count.
    """
    return error_upper_bound(n - largest_other_count, n, alpha)


def two_sided_bounds(count: int, largest_other_count: int, n: int, alpha: float) -> tuple[float, float]:
    """Upper bounds on q_A = 1 - p_A and on p_B, the largest probability of another class than A.

    With probability at least 1 - alpha both hold, and then R = sigma/2 (Phi^-1(1 - q_A) - Phi^-1(p_B)) is certified if
    it is positive. q_A takes 0.9 alpha, p_B the rest; p_B is at most q_A, which bounds it already. Both are rounded up.
    """
    if not 0 <= largest_other_count <= n - count:
        raise ValueError(f"expected counts that add up to at most {n}, got {count} and {largest_other_count}")
    q = error_upper_bound(count, n, 0.9 * alpha)
    # Not 0.1 * alpha: the two parts must not add up to more than alpha by rounding.
    return q, min(q, runner_up_upper_bound(largest_other_count, n, math.nextafter(alpha - 0.9 * alpha, 0.0)))
