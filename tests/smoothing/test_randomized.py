"""The randomized bound: exact coverage by enumeration, its order in the coin, and the coins of the rules."""

import math
import re
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor

from smoothcert.noise import Gaussian
from smoothcert.smoothing import bounds, votes
from smoothcert.smoothing.bounds import error_upper_bound, randomized_error_bound
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import Stage, VoteCounter, block_keys, coin_of

COINS = (1e-9, 0.001, 0.2, 0.5, 0.9, 0.999, 1.0)


def probability_of_failure(p: float, n: int, alpha: float) -> float:
    """P(bound < 1 - p), summed over all counts; the coins that fail for a count are found by bisection."""
    total = 0.0
    for count in range(n + 1):
        low, high = 0.0, 1.0  # coins up to `low` give a bound below 1 - p
        if randomized_error_bound(count, n, alpha, 1.0) < 1 - p:
            low = 1.0
        elif randomized_error_bound(count, n, alpha, 0.0) < 1 - p:
            for _ in range(45):
                middle = (low + high) / 2
                below = randomized_error_bound(count, n, alpha, middle) < 1 - p
                low, high = (middle, high) if below else (low, middle)
        total += math.comb(n, count) * p**count * (1 - p) ** (n - count) * low
    return total


@pytest.mark.parametrize("alpha", [0.01, 0.2])
@pytest.mark.parametrize("n", [5, 16])
def test_bound_fails_with_probability_alpha_exactly(n: int, alpha: float) -> None:
    for p in (0.5, 0.63, 0.8, 0.999 * 2 ** (-1 / n)):
        failing = probability_of_failure(p, n, alpha)
        assert alpha * (1 - 1e-6) < failing <= alpha
    assert probability_of_failure(1.001 * 2 ** (-1 / n), n, alpha) == 0.0


@pytest.mark.parametrize(("n", "alpha"), [(2, 0.05), (7, 0.3), (25, 0.001)])
def test_bound_is_rounded_to_the_safe_side(n: int, alpha: float) -> None:
    """At the bound, P(X > count) + coin P(X = count) is alpha, in rational arithmetic never more."""
    for count, coin in product(range(1, n + 1), (0.01, 0.3, 0.7, 1.0)):
        if count == n and coin < 2 * alpha:
            continue  # no q solves the equation
        q = Fraction(randomized_error_bound(count, n, alpha, coin))
        law = [math.comb(n, k) * (1 - q) ** k * q ** (n - k) for k in range(count, n + 1)]
        reached = sum(law[1:], Fraction(0)) + Fraction(coin) * law[0]
        assert Fraction(alpha) * (1 - Fraction(1, 10**7)) < reached <= Fraction(alpha)


@pytest.mark.parametrize(("count", "coin"), [(561, 0.01), (565, 0.5), (565, 1.0)])
def test_tails_that_no_float_holds_give_a_safe_bound(count: int, coin: float) -> None:
    q = Fraction(randomized_error_bound(count, 600, 1e-300, coin))
    law = [math.comb(600, k) * (1 - q) ** k * q ** (600 - k) for k in range(count, 601)]
    assert 0 < sum(law[1:], Fraction(0)) + Fraction(coin) * law[0] <= Fraction(1e-300)


def test_enumeration_finds_a_bound_with_the_wrong_side_of_the_coin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mutants: a bound that ignores the coin is not exact, one that drops P(X = count) fails too often."""
    right = randomized_error_bound
    monkeypatch.setitem(globals(), "randomized_error_bound", lambda count, n, alpha, coin: right(count, n, alpha, 1.0))
    assert probability_of_failure(0.63, 16, 0.2) < 0.95 * 0.2
    monkeypatch.setitem(globals(), "randomized_error_bound", lambda count, n, alpha, coin: right(count, n, alpha, 0.0))
    assert probability_of_failure(0.63, 16, 0.2) > 1.05 * 0.2


@pytest.mark.parametrize(("n", "alpha"), [(1, 0.3), (7, 0.05), (1000, 0.001), (100_000, 0.001)])
def test_bound_grows_with_the_coin_up_to_clopper_pearson(n: int, alpha: float) -> None:
    for count in sorted({1, n // 2, n - 1, n} & set(range(1, n + 1))):
        values = [randomized_error_bound(count, n, alpha, coin) for coin in COINS]
        assert all(a <= b for a, b in pairwise(values))
        assert values[-1] == pytest.approx(error_upper_bound(count, n, alpha), rel=1e-9)
        assert max(values) <= error_upper_bound(count, n, alpha)
        if count < n:
            assert values[0] == pytest.approx(error_upper_bound(count + 1, n, alpha), rel=1e-6)
    assert randomized_error_bound(0, n, alpha, 0.5) == 1.0


def test_unanimous_votes_have_a_closed_form() -> None:
    for coin in (0.01, 0.3, 1.0):
        expected = 1 - (0.001 / coin) ** (1 / 1000)
        assert randomized_error_bound(1000, 1000, 0.001, coin) == pytest.approx(expected, rel=1e-9)
    assert randomized_error_bound(1000, 1000, 0.001, 0.0) == pytest.approx(1 - 2 ** (-1 / 1000), rel=1e-9)
    noise, coins = Gaussian(1.0), (np.arange(4000) + 0.5) / 4000
    mean = np.mean([noise.radius(randomized_error_bound(100_000, 100_000, 0.001, float(coin))) for coin in coins])
    assert mean == pytest.approx(3.8545, abs=1e-3)  # the plain bound gives 3.811


def test_the_page_about_certification_has_the_mean_and_the_largest_radius_of_unanimous_votes() -> None:
    """From the closed form q = 1 - (alpha / u)^(1/n) with u = max(U, 2 alpha), by numerical integration over U."""
    n, alpha = 100_000, 0.001

    def radius(coin: float) -> float:
        return float(norm.isf(-math.expm1(math.log(alpha / max(coin, 2 * alpha)) / n)))

    mean = quad(radius, 0, 1, points=[2 * alpha, 0.01, 0.1], limit=500)[0]
    page = (Path(__file__).parents[2] / "docs/certification.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"- `--bound randomized`(.*?)\n- ", page.replace("\n\n", "\n- "), flags=re.DOTALL)
    assert re.findall(r"(\d\.\d{3})\s+σ", text) == [f"{r:.3f}" for r in (mean, radius(1.0), radius(0.0))]


def test_a_bound_that_rounds_to_1() -> None:
    """P(at least 1 of 10 votes) = 1e-17 at p = 1e-18: 1 - p is 1 in floating point."""
    assert randomized_error_bound(1, 10, 1e-17, 0.5) == error_upper_bound(1, 10, 1e-17) == 1


def test_impossible_coins_are_refused() -> None:
    for coin in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="expected a coin from 0 to 1"):
            bounds.randomized_error_bound(3, 5, 0.1, coin)


def test_coins_are_uniform_and_not_noise() -> None:
    coins = [coin_of((5, i)) for i in range(2000)]
    assert 0 < min(coins) < 0.01
    assert 0.99 < max(coins) <= 1
    assert abs(np.mean(coins) - 0.5) < 0.03
    assert coin_of((5, 3)) == coins[3] != coin_of((6, 3))
    stages = ("select", "estimate", "predict")
    keys = [key for stage in stages for key in block_keys((5, 3), stage, 9)]
    assert block_keys((5, 3), "coin", 1)[0] not in keys
    assert not any(abs(coins[3] - key * 2.0**-64) < 1e-15 for key in keys)


def test_no_two_images_and_stages_share_keys_whatever_their_indices() -> None:
    """Large indices, such as 64-bit identifiers, must not run into the number of the stage."""
    indices = [5, 5 + 2**32, 5 + 2**64, 5 + 2**96, 5 + 2**128, 2**32, 2**33, 2**32 + 2**64, 0, 1, 2, 3]
    stages: tuple[Stage, ...] = ("select", "estimate", "predict", "coin")
    keys = [key for index in indices for stage in stages for key in block_keys((7, index), stage, 3)]
    assert len(set(keys)) == len(keys)
    assert block_keys((7, 5), "select", 1) == [int(np.random.SeedSequence([7, 5, 0]).generate_state(1, np.uint64)[0])]


def test_coins_are_above_zero_and_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, coin in ((0, 2.0**-53), (2**64 - 1, 1.0), (2**63, 0.5 + 2.0**-53)):
        monkeypatch.setattr(votes, "block_keys", lambda *_, key=key: [key])
        assert coin_of((5, 3)) == coin


def half_space(images: Tensor) -> Tensor:
    score = images.flatten(1)[:, 0]
    return torch.stack([-score, score], dim=1)


@pytest.mark.parametrize("options", [{}, {"radius_loss": 0.05}, {"label_aware": True}])
def test_rules_use_the_votes_of_the_plain_bound_and_the_coin_of_the_image(options: dict[str, object]) -> None:
    counter, images = VoteCounter(half_space, Gaussian(0.5), 2, 500), torch.tensor([0.1, 0.9, -0.6]).view(3, 1, 1, 1)
    seeds, labels = [(3, i) for i in range(3)], [1, 1, 1]
    plain, drawn = (
        Rule(n0=50, n=2000, alpha=0.001, bound=bound, **options).certify(counter, images, seeds, labels)  # type: ignore[arg-type]
        for bound in ("one-sided", "randomized")
    )
    for i, (a, b) in enumerate(zip(plain, drawn, strict=True)):
        assert (a.votes, a.count, a.n) == (b.votes, b.count, b.n)
        assert (a.coin, b.coin) == (None, coin_of((3, i)) if b.n else None)
        if b.coin is not None:
            expected = Gaussian(0.5).radius(randomized_error_bound(b.count, b.n, 0.001, b.coin))
            assert b.radius == expected >= a.radius
    assert drawn[1].radius > plain[1].radius > 0
