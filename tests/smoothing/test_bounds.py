"""Clopper-Pearson and PREDICT's test against exact enumeration in rational arithmetic."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from smoothcert.noise import Gaussian
from smoothcert.smoothing.bounds import (
    error_upper_bound,
    randomized_error_bound,
    top_two_p_value,
)


def upper_tail(n: int, p: Fraction, count: int) -> Fraction:
    """P(Binomial(n, p) >= count), exactly."""
    return sum((math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(count, n + 1)), Fraction(0))


@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.3])
@pytest.mark.parametrize("n", [1, 2, 7, 25])
def test_the_bound_exceeds_p_with_probability_at_most_alpha(n: int, alpha: float) -> None:
    bounds = [1 - Fraction(error_upper_bound(count, n, alpha)) for count in range(n + 1)]
    assert all(a < b for a, b in pairwise(bounds))
    # Just below a bound is where the rule is most often wrong: check there and on a grid.
    for p in [Fraction(k, 20) for k in range(1, 20)] + [b * (1 - Fraction(1, 10**9)) for b in bounds[1:]]:
        least = next((k for k in range(n + 1) if bounds[k] > p), n + 1)  # the bounds rise with the count
        assert upper_tail(n, p, least) <= Fraction(alpha)


@pytest.mark.parametrize("n", [3, 20])
@pytest.mark.parametrize("alpha", [0.001, 0.1])
def test_the_bound_is_one_sided_and_not_looser_than_needed(n: int, alpha: float) -> None:
    for count in range(1, n + 1):
        p = 1 - Fraction(error_upper_bound(count, n, alpha))
        # At the exact bound the tail is alpha: within rounding, never above. A two-sided bound would give alpha / 2.
        assert Fraction(alpha) * (1 - Fraction(1, 10**6)) <= upper_tail(n, p, count) <= Fraction(alpha)


def upper_tail_of_many(n: int, q: float, failures: int, coin: float = 1.0) -> Decimal:
    """P(fewer failures) + coin * P(as many failures) for n votes that fail with probability q, with 60 digits."""
    with localcontext(prec=60):
        odds, term = Decimal(q) / (1 - Decimal(q)), (n * (1 - Decimal(q)).ln()).exp()
        tail = Decimal(0)
        for j in range(failures):
            tail, term = tail + term, term * (n - j) / (j + 1) * odds
        return tail + Decimal(coin) * term


MANY = [(10**5, 7), (564_933, 1), (10_029_439, 1), (43_744_162, 24), (318_139_167, 1), (879_275_684, 19), (10**9, 3)]
"""Numbers of votes and of failures; for most of these the inverse of scipy alone claims too much."""


@pytest.mark.parametrize("alpha", [1e-9, 0.001, 0.3])
@pytest.mark.parametrize(("n", "failures"), MANY)
def test_the_bound_of_many_votes_is_rounded_to_the_safe_side(n: int, failures: int, alpha: float) -> None:
    tail = upper_tail_of_many(n, error_upper_bound(n - failures, n, alpha), failures)
    assert Decimal(alpha) * (1 - Decimal("1e-6")) <= tail <= Decimal(alpha)
    randomized = upper_tail_of_many(n, randomized_error_bound(n - failures, n, alpha, 0.25), failures, 0.25)
    assert Decimal(alpha) * (1 - Decimal("1e-6")) <= randomized <= Decimal(alpha)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 200_000), st.floats(1e-9, 0.5), st.data())
def test_the_bound_agrees_with_scipy(n: int, alpha: float, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, n))
    reference = stats.binomtest(count, n, alternative="greater").proportion_ci(1 - alpha, method="exact").low
    assert 1 - error_upper_bound(count, n, alpha) == pytest.approx(reference, rel=1e-6, abs=2e-12)


@pytest.mark.parametrize(("n", "radius"), [(10**3, 2.463), (10**4, 3.199), (10**5, 3.812), (10**6, 4.347)])
def test_radius_when_all_votes_agree(n: int, radius: float) -> None:
    assert Gaussian(1.0).radius(error_upper_bound(n, n, 0.001)) == pytest.approx(radius, abs=1e-3)


def test_no_votes_prove_nothing() -> None:
    assert error_upper_bound(0, 10, 0.001) == 1.0
    assert error_upper_bound(1, 1, 1e-15) == 1.0  # a probability, although it is rounded up


@pytest.mark.parametrize(("count", "n", "alpha"), [(-1, 5, 0.1), (6, 5, 0.1), (0, 0, 0.1), (1, 2, 0.0), (1, 2, 1.0)])
def test_impossible_arguments_are_refused(count: int, n: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        error_upper_bound(count, n, alpha)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 400), st.integers(0, 400))
def test_top_two_p_value_is_the_binomial_test(a: int, b: int) -> None:
    high, low = max(a, b), min(a, b)
    reference = stats.binomtest(high, high + low).pvalue if high + low else 1.0
    assert top_two_p_value(high, low) == pytest.approx(reference, rel=1e-9)
