"""Noise: distribution, independence of keys, radius against high-precision arithmetic."""

import math
from collections.abc import Callable
from decimal import Decimal, getcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

import smoothcert as sc
from normal_numbers import GENERATORS
from smoothcert import noise as noises
from smoothcert.errors import RequestError
from smoothcert.noise import BOX_MULLER_CHUNK, NOISES, Gaussian, fill_by_box_muller


def filled(key: int, sigma: float = 1.0, size: int = 40_000) -> torch.Tensor:
    out = torch.zeros(size)
    Gaussian(sigma).fill(out, key)
    return out


def test_fill_is_gaussian() -> None:
    assert stats.kstest(filled(3, sigma=0.5).numpy() / 0.5, "norm").pvalue > 1e-4


def test_fill_depends_on_the_whole_key_and_nothing_else() -> None:
    assert torch.equal(filled(5), filled(5))
    # Keys that agree in their low 32 bits: torch's own CPU generator would give the same noise for both.
    low, high = filled(5), filled(5 + 2**32)
    assert abs(float(np.corrcoef(low, high)[0, 1])) < 0.03


def test_sample_has_the_scale_and_comes_from_the_generator() -> None:
    noise = Gaussian(0.25).sample((3, 5000), torch.Generator().manual_seed(1))
    again = Gaussian(0.25).sample((3, 5000), torch.Generator().manual_seed(1))
    assert torch.equal(noise, again)
    assert float(noise.std()) == pytest.approx(0.25, rel=0.02)
    assert abs(float(noise.mean())) < 0.01


def normal_tail(x: float) -> Decimal:
    """P(N(0, 1) > x) to 40 digits, by the Taylor series of erf; for 0 <= x <= 6."""
    getcontext().prec = 60
    z = Decimal(x)
    term = total = z
    k = 0
    while abs(term) > Decimal(10) ** -55:
        k += 1
        term = term * z * z / (2 * k + 1)
        total += term
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
    return Decimal("0.5") - total * (-(z * z) / 2).exp() / (2 * pi).sqrt()


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(1e-9, 0.499), st.floats(0.01, 10))
def test_radius_is_never_rounded_up(q: float, sigma: float) -> None:
    radius = Gaussian(1.0).radius(q)
    assert radius < 6.1
    # The tail beyond the claimed radius must be at least q: a larger radius would claim more than was shown.
    assert normal_tail(radius) >= Decimal(q)
    assert normal_tail(radius * (1 + 1e-10)) < Decimal(q) * (1 + Decimal("1e-6"))
    assert Gaussian(sigma).radius(q) == pytest.approx(sigma * radius, rel=1e-12)


def test_no_radius_at_or_beyond_one_half() -> None:
    assert {noise(1.0).radius(q) for noise in NOISES.values() for q in (0.5, 0.7, 1.0)} == {0.0}


def test_radius_between_two_bounds() -> None:
    """sigma / 2 (Phi^-1(1 - q) - Phi^-1(runner-up)): rounded down, and 0 where the bounds do not separate."""
    assert Gaussian(0.5).radius_between(0.3, 0.1) == pytest.approx(0.25 * (0.5244005127 + 1.2815515655), rel=1e-9)
    for q in (0.4, 0.01, 1e-9):
        assert 0 < Gaussian(2.0).radius_between(q, q) <= Gaussian(2.0).radius(q)
    assert Gaussian(0.5).radius_between(0.6, 0.5) == Gaussian(0.5).radius_between(0.5, 1.0) == 0.0


@pytest.mark.parametrize("name", NOISES)
def test_error_at_inverts_radius(name: str) -> None:
    noise = NOISES[name](0.5)
    for q in (0.4, 0.01, 1e-6):
        assert noise.error_at(noise.radius(q)) == pytest.approx(q, rel=1e-6)
        assert NOISES[name](1.0).radius(q) == pytest.approx(2 * noise.radius(q), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("gaussian", stats.norm(0, 0.5)),
        ("laplace", stats.laplace(0, 0.5 / 2**0.5)),
        ("uniform", stats.uniform(-(3**0.5) / 2, 3**0.5)),
    ],
)
def test_both_samplers_have_the_distribution(name: str, law: object) -> None:
    """Keyed noise for certification and generator noise for training, by Kolmogorov-Smirnov; sigma is the spread."""
    noise = NOISES[name](0.5)
    keyed = torch.zeros(40_000)
    noise.fill(keyed, 7)
    drawn = noise.sample((40_000,), torch.Generator().manual_seed(7))
    for values in (keyed, drawn):
        assert stats.kstest(values.numpy(), law.cdf).pvalue > 1e-4
        assert float(values.std()) == pytest.approx(0.5, rel=0.03)


def test_l1_radii() -> None:
    """Section 7's formulas, at p = 0.9: Laplace -b ln(2 (1 - p)), uniform 2 l (p - 1/2)."""
    assert NOISES["laplace"](2**0.5).radius(0.1) == pytest.approx(-math.log(0.2), rel=1e-9)
    assert NOISES["uniform"](1 / 3**0.5).radius(0.1) == pytest.approx(0.8, rel=1e-9)
    assert NOISES["uniform"](1 / 3**0.5).error_at(1.5) == 0.0, "beyond the noise"
    assert {name: noise.norm for name, noise in NOISES.items()} == {"gaussian": "L2", "laplace": "L1", "uniform": "L1"}


TAKE_SIGMA: dict[str, Callable[[Any], float]] = {
    "Gaussian": lambda sigma: Gaussian(sigma).sigma,
    "SmoothedClassifier": lambda sigma: sc.SmoothedClassifier(torch.nn.Flatten(), sigma=sigma).noise.sigma,
    "losses": lambda sigma: sc.losses.Consistency(sigma=sigma).sigma,
    "preset": lambda sigma: sc.preset("mnist/gaussian", sigma=sigma).sigma,
}


@pytest.mark.parametrize("name", TAKE_SIGMA)
def test_sigma_is_a_positive_number_wherever_it_is_given(name: str) -> None:
    for right in (0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), Fraction(1, 2)):
        assert TAKE_SIGMA[name](right) == 0.5
        assert type(TAKE_SIGMA[name](right)) is float
    texts_and_others = ("0.5", b"1", True, [0.5], object(), torch.tensor([0.5, 1.0]))
    for wrong in (0, 0.0, -1.0, math.nan, math.inf, 10**400, *texts_and_others):
        with pytest.raises(RequestError, match="sigma: expected a number > 0, got ") as caught:
            TAKE_SIGMA[name](wrong)
        assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("q", [0.0, -0.1, 1.1, math.nan])
def test_an_error_that_is_no_probability_has_no_radius(q: float) -> None:
    """An error of 0 would certify everything."""
    for noise in NOISES.values():
        with pytest.raises(ValueError, match="expected 0 < q <= 1"):
            noise(1.0).radius(q)
    for pair in ((q, 0.1), (0.1, q)):
        with pytest.raises(ValueError, match="expected probabilities"):
            Gaussian(1.0).radius_between(*pair)


@pytest.mark.parametrize("length", [1, 2, 7, BOX_MULLER_CHUNK, 2 * BOX_MULLER_CHUNK + 5])
def test_box_muller_fills_any_length_and_nothing_else(length: int) -> None:
    room = np.full(length + 2, np.nan, np.float32)
    fill_by_box_muller(room[1:-1], np.random.SFC64(1), 0.5)
    assert np.isfinite(room[1:-1]).all()
    assert np.isnan(room[[0, -1]]).all()


def test_box_muller_gives_the_normal_distribution() -> None:
    """The distribution, its tails, and independence of the two numbers that share a radius."""
    values = np.empty(200_000, np.float32)
    fill_by_box_muller(values, np.random.SFC64(7), 0.25)
    unit = values.astype(np.float64) / 0.25
    assert stats.kstest(unit, "norm").pvalue > 1e-4
    for edge in (3.0, 4.0):
        expected = 2 * stats.norm.sf(edge)
        seen = int((np.abs(unit) > edge).sum())
        assert stats.binomtest(seen, len(unit), expected).pvalue > 1e-4
    assert np.abs(unit).max() < 6.67
    first, second = unit[: BOX_MULLER_CHUNK // 2], unit[BOX_MULLER_CHUNK // 2 : BOX_MULLER_CHUNK]
    assert abs(stats.pearsonr(first, second).statistic) < 0.05
    assert abs(stats.pearsonr(first**2, second**2).statistic) < 0.05


@pytest.mark.parametrize(("word", "largest"), [(0, math.sqrt(64 * math.log(2))), (2**64 - 1, 0.0)])
def test_box_muller_is_finite_for_the_smallest_and_the_largest_bits(word: int, largest: float) -> None:
    class Scripted:
        def random_raw(self, count: int) -> np.ndarray:
            return np.full(count, word, np.uint64)

    out = np.empty(4, np.float32)
    fill_by_box_muller(out, Scripted(), 0.5)  # type: ignore[arg-type]
    assert np.abs(out).max() == pytest.approx(0.5 * largest, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("shape", [(1,), (250, 1, 1, 3), (2 * BOX_MULLER_CHUNK + 5,)])
def test_both_generators_give_the_numbers_of_their_definition(
    monkeypatch: pytest.MonkeyPatch, generator: str, shape: tuple[int, ...]
) -> None:
    """On every machine, whichever of the two it prefers; float32 allows an error of some units in the last place."""
    monkeypatch.setattr(noises, "VECTOR_MATHEMATICS", generator == "sfc64, box-muller")
    assert Gaussian.draws(torch.device("cpu")) == generator
    out = torch.empty(shape)
    Gaussian(0.25).fill(out, 2**63 + 11)
    expected = 0.25 * GENERATORS[generator](2**63 + 11, out.numel()).reshape(shape)
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-6, atol=1e-6)
