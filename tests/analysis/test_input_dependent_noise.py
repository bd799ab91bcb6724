"""The exact worst case against the lemma of Neyman and Pearson done by brute force; the bound above it."""

import itertools
import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.special import ndtr, ndtri

from smoothcert.analysis.input_dependent_noise import (
    LARGEST_DIMENSION,
    LARGEST_MEAN,
    TwoScales,
    bound_constant,
    default_dimensions,
    draw_worst_cases,
    worst_case,
    worst_cases,
    worst_cases_csv,
)
from smoothcert.errors import RequestError

BOTH_WAYS = pytest.mark.parametrize("other_sigma", [0.35, 0.8])


def log_density(points: np.ndarray, centre: np.ndarray, sigma: float) -> np.ndarray:
    """Of an isotropic Gaussian, points [n, d]."""
    d = points.shape[1]
    return -((points - centre) ** 2).sum(1) / (2 * sigma**2) - d * math.log(sigma) - d / 2 * math.log(2 * math.pi)


def worst_set_on_a_grid(scales: TwoScales, dimension: int, steps: int) -> float:
    """Cells of space taken in the order of the density ratio until they have probability p at x."""
    axis = np.linspace(-6, 6, steps)
    points = np.stack([a.ravel() for a in np.meshgrid(*[axis] * dimension)], axis=1)
    cell = (axis[1] - axis[0]) ** dimension
    delta = np.eye(1, dimension)[0] * scales.radius
    here = log_density(points, 0 * delta, scales.sigma)
    there = log_density(points, delta, scales.other_sigma)
    order = np.argsort(there - here)
    mass = np.cumsum(np.exp(here[order])) * cell
    return float((np.exp(there[order]) * cell)[mass <= scales.probability].sum())


@BOTH_WAYS
@pytest.mark.parametrize(("dimension", "steps"), [(1, 200_001), (2, 501)])
@pytest.mark.parametrize("radius", [0.0, 0.6])
def test_exact_value_equals_a_search_over_cells(other_sigma: float, dimension: int, steps: int, radius: float) -> None:
    scales = TwoScales(0.9, 0.5, other_sigma, radius)
    expected = worst_set_on_a_grid(scales, dimension, steps)
    assert worst_case(scales, dimension) == pytest.approx(expected, abs=2e-3 if dimension == 2 else 2e-4)


@BOTH_WAYS
@pytest.mark.parametrize("dimension", [3, 40])
def test_exact_value_equals_a_monte_carlo_estimate(other_sigma: float, dimension: int) -> None:
    scales, n = TwoScales(0.9, 0.5, other_sigma, 0.6), 200_000 // dimension
    generator = np.random.default_rng(3)
    delta = np.eye(1, dimension)[0] * scales.radius

    def ratio(points: np.ndarray) -> np.ndarray:
        return log_density(points, delta, other_sigma) - log_density(points, 0 * delta, 0.5)

    threshold = np.quantile(ratio(0.5 * generator.standard_normal((n, dimension))), 0.9)
    estimate = (ratio(delta + other_sigma * generator.standard_normal((n, dimension))) <= threshold).mean()
    assert worst_case(scales, dimension) == pytest.approx(estimate, abs=8 * 0.5 / math.sqrt(n))


@pytest.mark.parametrize(("other_sigma", "power"), [(1.0, 0.25), (0.25, 4.0)])
def test_closed_form_in_two_dimensions_without_a_shift(other_sigma: float, power: float) -> None:
    # There |z|^2 / s^2 is exponential: the tail at x', of the ball or of its outside, is a power of that at x.
    expected = 1 - 0.01**power if other_sigma > 0.5 else 0.99**power
    assert worst_case(TwoScales(0.99, 0.5, other_sigma, 0.0), 2) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("factor", [1 - 1e-5, 1.0, 1 + 1e-5])
@pytest.mark.parametrize("dimension", [1, 784])
def test_nearly_equal_scales_give_the_usual_guarantee(factor: float, dimension: int) -> None:
    expected = ndtr(ndtri(0.9) - 0.4 / 0.5)
    assert worst_case(TwoScales(0.9, 0.5, 0.5 * factor, 0.4), dimension) == pytest.approx(expected, abs=2e-4)


def test_the_bound_holds_everywhere() -> None:
    grid = itertools.product((0.3, 0.9, 0.999), (0.1, 0.4, 0.49, 0.51, 0.6, 2.0), (0.0, 0.5, 3.0))
    for p, other_sigma, radius in grid:
        cases = worst_cases(TwoScales(p, 0.5, other_sigma, radius), default_dimensions()[::18])
        assert (cases.exact <= cases.bound * (1 + 1e-9)).all(), cases.scales


def test_the_bound_is_c_over_d_and_not_far_from_chebyshev() -> None:
    scales = TwoScales(0.99, 0.5, 0.55, 0.25)
    rho, k, shift = 0.25 / 0.3025, math.sqrt(99), 0.0625 / 0.3025
    constant = bound_constant(scales)
    assert constant == pytest.approx(2 * ((math.sqrt(1 + 2 * shift) + rho * k) / (1 - rho)) ** 2, rel=1e-12)
    d = 10**6
    chebyshev = 2 * (d + 2 * shift) / ((1 - rho) * d - rho * k * math.sqrt(2 * d)) ** 2
    bound = worst_cases(scales, [d]).bound[0]
    assert bound == constant / d
    assert chebyshev <= bound


@BOTH_WAYS
def test_the_guarantee_vanishes_with_the_dimension(other_sigma: float) -> None:
    exact = worst_cases(TwoScales(0.99, 0.5, other_sigma, 0.25), (1, 3, 10, 30, 100, 300)).exact
    assert (np.diff(exact) < 0).all()
    assert exact[-1] < 1e-6


def test_equal_scales_have_no_such_bound() -> None:
    cases = worst_cases(TwoScales(0.99, 0.5, 0.5, 0.25), (1, 10**6))
    assert math.isinf(bound_constant(cases.scales))
    assert cases.bound.tolist() == [1, 1]
    assert cases.exact[0] == cases.exact[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((1.0, 0.5, 0.6, 0.1), "probability"),
        ((0.9, 0.0, 0.6, 0.1), "sigma"),
        ((0.9, 0.5, -1.0, 0.1), "other-sigma"),
        ((0.9, 0.5, 0.6, -0.1), "radius"),
        ((0.9, 0.5, float("nan"), 0.1), "other-sigma"),
        ((0.9, 1e200, 0.55, 0.1), "sigma"),
        ((0.9, 0.5, 1e200, 0.1), "other-sigma"),
        ((0.9, 0.5, 0.55, 1e200), "radius"),
    ],
)
def test_wrong_requests(fields: tuple[float, float, float, float], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}: expected"):
        TwoScales(*fields)


@pytest.mark.parametrize("other_sigma", [0.35, 0.8, 0.5])
@pytest.mark.parametrize("unit", [1e-5, 1e-3, 1e5])
def test_the_unit_of_length_does_not_matter(other_sigma: float, unit: float) -> None:
    first, second = (TwoScales(0.9, 0.5 * u, other_sigma * u, 0.6 * u) for u in (1.0, unit))
    assert worst_case(second, 40) == pytest.approx(worst_case(first, 40), rel=1e-9)
    assert bound_constant(second) == pytest.approx(bound_constant(first), rel=1e-9)


@pytest.mark.parametrize(
    ("other_sigma", "radius", "dimension"),
    [
        (0.50001, 10.0, 784),
        (0.49999, 10.0, 784),
        (0.5 * (1 + 1e-8), 0.5, 100),
        (0.5 * (1 - 1e-8), 0.5, 100),  # scipy gives 0.676 here, more than the 0.611 of equal scales
        (0.55, 4e5, 10**6),
    ],
)
def test_imprecise_computations_are_refused(other_sigma: float, radius: float, dimension: int) -> None:
    with pytest.raises(RequestError) as caught:
        worst_case(TwoScales(0.9, 0.5, other_sigma, radius), dimension)
    expected = f"sigma 0.5 and other-sigma {other_sigma} at radius {radius} in dimension {dimension}: beyond"
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("radius", [0.25, 1.0, 2.5])
def test_values_are_exact_up_to_the_limit(sign: int, radius: float) -> None:
    # The nearest scales that are allowed, by the non-centrality (r s0 / (s1^2 - s0^2))^2; equal ones are known exactly.
    scales = TwoScales(0.9, 0.5, math.sqrt(0.25 + sign * radius * 0.5 / math.sqrt(0.99 * LARGEST_MEAN)), radius)
    assert worst_case(scales, 1) == pytest.approx(scales.same_scale, rel=1e-3)


@BOTH_WAYS
def test_the_largest_dimension(other_sigma: float) -> None:
    scales = TwoScales(0.99, 0.5, other_sigma, 0.25)
    assert default_dimensions(LARGEST_DIMENSION)[-1] == LARGEST_DIMENSION
    assert worst_case(scales, LARGEST_DIMENSION) == 0
    for wrong in (0, LARGEST_DIMENSION + 1, 10**23):
        with pytest.raises(RequestError, match=f"^max-dimension: expected 1 to 1000000000, got {wrong}$"):
            default_dimensions(wrong)
        with pytest.raises(RequestError, match=f"^dimension: expected 1 to 1000000000, got {wrong}$"):
            worst_case(scales, wrong)


def test_csv_and_figure_show_the_numbers() -> None:
    cases = worst_cases(TwoScales(0.99, 0.5, 0.55, 0.25), default_dimensions(10_000))
    lines = worst_cases_csv(cases).splitlines()
    assert lines[0] == "dimension,exact,bound,same_scale"
    assert [float(cell) for cell in lines[-1].split(",")] == pytest.approx(
        [10_000, cases.exact[-1], cases.bound[-1], ndtr(ndtri(0.99) - 0.5)]
    )
    figure = draw_worst_cases(cases)
    assert isinstance(figure, Figure)
    bound, exact = (line.get_ydata() for line in figure.axes[0].get_lines()[:2])
    np.testing.assert_allclose(np.asarray(exact), np.maximum(cases.exact, 1e-300))
    np.testing.assert_allclose(np.asarray(bound), cases.bound)
