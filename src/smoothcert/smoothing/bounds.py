"""Confidence bounds on a binomial proportion, and the binomial test of PREDICT.

Everything here is float64 and computed for the error q = 1 - p: near p = 1, where radii are large, p itself has no
digits left. Every bound is rounded to the safe side.
"""

import math
from collections.abc import Callable

from scipy import special

from smoothcert.noise import SAFETY

BRACKET = 1e-10
"""Relative width of the bracket in which the randomized bound is computed; its upper end is the bound."""
SLACK = 1e-10
"""Amount added to the error bounds of integer noise: more than its total variation from Gaussian noise on every image
that `IntegerGaussian.slack` accepts."""
SMALLEST_FLOAT = 5e-324
TAIL_ERROR = 1e-19
"""Relative error of scipy's incomplete beta function per vote, at most: measured 3e-20 with up to 10^9 votes, next to a
few ulp, which SAFETY covers."""


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
    if count == n:
        return min(1.0, -math.expm1(math.log(alpha) / n) * (1 + SAFETY))
    step = SAFETY
    q = float(special.betainccinv(n - count + 1, count, alpha)) * (1 + SAFETY)
    # The inverse works with 1 - q: with a million votes or more its error exceeds SAFETY. The tail itself is accurate.
    while q < 1 and special.betaincc(n - count + 1, count, q) > _safe_level(alpha, n):
        step *= 2
        q *= 1 + step
    return min(1.0, q)


def _safe_level(alpha: float, n: int) -> float:
    """Alpha less the possible error of a tail probability of n votes: a computed tail up to it is at most alpha."""
    return alpha * (1 - SAFETY - TAIL_ERROR * n)


def randomized_error_bound(count: int, n: int, alpha: float, coin: float) -> float:
    """Randomized Clopper-Pearson upper bound on q = 1 - p, with a `coin` in (0, 1] that no vote depends on.

    It is the q with P(X > count) + coin * P(X = count) = alpha for X ~ Binomial(n, 1 - q) (Voracek 2024). Under the
    true p the left side is uniform on (0, 1) if the coin is, because the coin fills the gaps between the tails of X;
    and it falls with q. So P(bound < 1 - p) = alpha where a q solves the equation, while Clopper-Pearson, which is the
    case coin = 1, stays below alpha. The bound grows with the coin and is never above Clopper-Pearson.

    If all votes agree and the coin is at most alpha, no q solves the equation. A coin below 2 alpha then counts as
    2 alpha, which gives q = 1 - 2^(-1/n). For alpha up to 1/2 the bound therefore fails with probability alpha for p
    from 1/2 to 2^(-1/n), and never for larger p. For a larger alpha it is Clopper-Pearson if all votes agree.
    """
    plain = error_upper_bound(count, n, alpha)
    if not 0 <= coin <= 1:
        raise ValueError(f"expected a coin from 0 to 1, got {coin}")
    if plain == 1:  # no vote, or so few at so small an alpha that q rounds to 1
        return plain
    if count == n:
        share = min(1.0, max(coin, 2 * alpha))
        return min(plain, -math.expm1(math.log(alpha / share) / n) * (1 + SAFETY))
    failures = n - count

    def excess(q: float) -> float:
        fewer, as_many = special.betaincc(failures, count + 1, q), special.betaincc(failures + 1, count, q)
        tail = (1 - coin) * fewer + coin * as_many
        return math.log(max(tail, SMALLEST_FLOAT) / _safe_level(alpha, n))  # a tail may be too small for a float

    # One vote more, at coin 1, is the bound at coin 0.
    return min(plain, _falling_root(excess, error_upper_bound(count + 1, n, alpha), plain) * (1 + SAFETY))


def _falling_root(function: Callable[[float], float], low: float, high: float) -> float:
    """The upper end of a short bracket of the root of a falling function (Illinois variant of regula falsi)."""
    at_low, at_high = function(low), function(high)
    if at_low <= 0:
        return low
    last = 0
    for _ in range(100):
        if high - low <= BRACKET * high:
            break
        middle = (low * at_high - high * at_low) / (at_high - at_low)
        value = function(middle)
        if value > 0:
            low = middle
            at_low = value
            if last > 0:
                at_high /= 2
            last = 1
        else:
            high = middle
            at_high = value
            if last < 0:
                at_low /= 2
            last = -1
    return high


def top_two_p_value(count1: int, count2: int) -> float:
    """Two-sided binomial test of `count1` out of `count1 + count2` against 1/2, for count1 >= count2."""
    if count1 < count2 or count2 < 0:
        raise ValueError(f"expected count1 >= count2 >= 0, got {count1} and {count2}")
    if count1 == 0:
        return 1.0
    # The null distribution is symmetric, so the two-sided p-value is twice the upper tail P(X >= count1).
    return min(1.0, 2.0 * float(special.betainc(count1, count2 + 1, 0.5)))


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
