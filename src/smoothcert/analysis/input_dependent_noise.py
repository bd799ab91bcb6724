"""Noise whose scale depends on the input (theorem 1 of https://arxiv.org/abs/2111.09277).

A class has probability p under N(x, s0^2 I) in d dimensions. How small can its probability be under N(x', s1^2 I),
where ||x' - x|| = r? With s1 = s0 the answer is Phi(Phi^-1(p) - r / s0) for every d. With s1 != s0 the two Gaussians
concentrate on different shells: in high dimension a classifier can tell them apart, and the answer tends to 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from scipy import special, stats

from smoothcert.certification.columns import Floats
from smoothcert.errors import RequestError
from smoothcert.io.text import csv_text
from smoothcert.report.style import FIRST, GREY, SECOND, legend_below, one_panel

SMALLEST_SHOWN = 1e-12
"""The lower end of the figure's axis; the CSV file has every digit."""
LARGEST_DIMENSION = 10**9
SMALLEST_SIGMA, LARGEST_LENGTH = 1e-6, 1e6
LARGEST_MEAN = 5e9
"""Limit of the mean of a chi-square variable: beyond it scipy's quantiles and tails lose their digits, or are NaN."""
IMAGES = {"MNIST": 28 * 28, "CIFAR-10": 3 * 32 * 32, "ImageNet": 3 * 224 * 224}


@dataclass(frozen=True)
class TwoScales:
    """The class's probability p at x, the noise levels at x and at x', and their distance r."""

    probability: float
    sigma: float
    other_sigma: float
    radius: float

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise RequestError(f"probability: expected a number between 0 and 1, got {self.probability}")
        for name, value, least in (
            ("sigma", self.sigma, SMALLEST_SIGMA),
            ("other-sigma", self.other_sigma, SMALLEST_SIGMA),
            ("radius", self.radius, 0),
        ):
            if not least <= value <= LARGEST_LENGTH:
                raise RequestError(f"{name}: expected {least:g} to {LARGEST_LENGTH:g}, got {value}")

    @property
    def ratio(self) -> float:
        """s1 / s0."""
        return self.other_sigma / self.sigma

    @property
    def shift(self) -> float:
        """r / s0."""
        return self.radius / self.sigma

    @property
    def same_scale(self) -> float:
        """Phi(Phi^-1(p) - r / s0): the smallest probability at x' if the noise there were that at x."""
        return float(special.ndtr(special.ndtri(self.probability) - self.shift))


@dataclass(frozen=True)
class WorstCases:
    """The exact smallest probability at x' and the bound on it, for each dimension."""

    scales: TwoScales
    dimensions: tuple[int, ...]
    exact: Floats
    bound: Floats


def worst_case(scales: TwoScales, dimension: int) -> float:
    """The smallest probability under N(x', s1^2 I) of a set whose probability under N(x, s0^2 I) is p; exact.

    By the lemma of Neyman and Pearson the set is where the ratio of the densities, at x' over at x, is smallest. With
    z measured from x and delta = x' - x, its logarithm is, up to constants,
        |z|^2 / (2 s0^2) - |z - delta|^2 / (2 s1^2),
    a quadratic form around m = -delta s0^2 / (s1^2 - s0^2). So for s1 > s0 the set is a ball around m, for s1 < s0 the
    outside of one. |z - m|^2 / s^2 is chi-square with d degrees of freedom and non-centrality
        |m|^2 / s0^2 = (r s0 / (s1^2 - s0^2))^2 at x,    |delta - m|^2 / s1^2 = (r s1 / (s1^2 - s0^2))^2 at x'.
    """
    _refuse_dimension("dimension", dimension)
    p, ratio = scales.probability, scales.ratio
    if ratio == 1:
        return scales.same_scale
    at_x = (scales.shift / (ratio**2 - 1)) ** 2
    at_other = at_x * ratio**2
    rho = ratio**-2
    value = math.nan
    if dimension + max(at_x, at_other) <= LARGEST_MEAN:
        if ratio > 1:
            value = float(stats.ncx2.cdf(rho * stats.ncx2.ppf(p, dimension, at_x), dimension, at_other))
        else:
            value = float(stats.ncx2.sf(rho * stats.ncx2.isf(p, dimension, at_x), dimension, at_other))
    if math.isnan(value):
        raise RequestError(
            f"sigma {scales.sigma} and other-sigma {scales.other_sigma} at radius {scales.radius} in dimension "
            f"{dimension}: beyond the precision of the chi-square computation; give a smaller radius or dimension, or "
            "sigmas further apart or equal"
        )
    return value


def _refuse_dimension(name: str, dimension: int) -> None:
    if not 1 <= dimension <= LARGEST_DIMENSION:
        raise RequestError(f"{name}: expected 1 to {LARGEST_DIMENSION}, got {dimension}")


def bound_constant(scales: TwoScales) -> float:
    """C such that the worst case in d dimensions is at most C / d, for every d; infinite for equal scales.

    Any set A with probability at least p at x bounds the worst case from above. Write rho = (s0 / s1)^2 and
    k = sqrt(p / (1 - p)): by Cantelli's inequality no variable exceeds its mean by k standard deviations, or falls
    short of it, with probability above 1 / (1 + k^2) = 1 - p.

    s1 > s0: let A be the ball around x of squared radius s0^2 (d + k sqrt(2 d)). At x, |z|^2 / s0^2 is chi-square,
    mean d, variance 2 d: A has at least p. At x', |z|^2 / s1^2 has mean d + l and variance 2 (d + 2 l), l = (r / s1)^2,
    and in A it is below rho (d + k sqrt(2 d)). By Chebyshev's inequality, where the denominator's root is positive,
        P(A) <= 2 (d + 2 l) / ((1 - rho) d - rho k sqrt(2 d))^2
             <= 2 (1 + 2 l) / ((1 - rho) sqrt(d) - rho k sqrt(2))^2.
    With C = 2 ((sqrt(1 + 2 l) + rho k) / (1 - rho))^2 and d >= C, the root is at least
    (1 - rho) sqrt(d) (1 - rho k sqrt(2) / ((1 - rho) sqrt(C))) = sqrt(2 (1 + 2 l) d / C), so P(A) <= C / d; for d < C
    there is nothing to show.

    s1 < s0: let A be the outside of the ball around x' of squared radius s0^2 (d + l - k sqrt(2 (d + 2 l))), now with
    l = (r / s0)^2. In the same way C = 2 ((1 + rho k sqrt(1 + 2 l)) / (rho - 1))^2.
    """
    rho = scales.ratio**-2
    if rho == 1:
        return math.inf
    k = math.sqrt(scales.probability / (1 - scales.probability))
    spread = math.sqrt(1 + 2 * (scales.shift / max(1, scales.ratio)) ** 2)
    top = spread + rho * k if rho < 1 else 1 + rho * k * spread
    return 2 * (top / (1 - rho)) ** 2


def default_dimensions(largest: int = 10**6) -> tuple[int, ...]:
    """Whole numbers from 1 to `largest`, about 25 per decade."""
    _refuse_dimension("max-dimension", largest)
    grid = np.geomspace(1, largest, 1 + round(25 * math.log10(largest))) if largest > 1 else np.ones(1)
    return tuple(sorted({int(d) for d in grid.round()}))


def worst_cases(scales: TwoScales, dimensions: Sequence[int]) -> WorstCases:
    """The exact worst case and min(1, C / d) for each of `dimensions`."""
    exact = np.asarray([worst_case(scales, d) for d in dimensions], dtype=np.float64)
    bound = np.minimum(1.0, bound_constant(scales) / np.asarray(dimensions, dtype=np.float64))
    return WorstCases(scales, tuple(dimensions), exact, bound)


def worst_cases_csv(cases: WorstCases) -> str:
    """One row per dimension: the exact worst case, the bound, and the value for equal scales."""
    rows = (
        [d, float(exact), float(bound), cases.scales.same_scale]
        for d, exact, bound in zip(cases.dimensions, cases.exact, cases.bound, strict=True)
    )
    return csv_text([["dimension", "exact", "bound", "same_scale"], *rows])


def draw_worst_cases(cases: WorstCases) -> Figure:
    """Exact value and bound against the dimension, both axes logarithmic; the dimensions of data sets marked."""
    scales = cases.scales
    dimensions = np.asarray(cases.dimensions)
    at_x = f"The class has probability {scales.probability:g} at an image, under noise of σ = {scales.sigma:g}."
    title = f"{at_x}\nHow small can it be at L2 distance {scales.radius:g}, where σ = {scales.other_sigma:g}?"
    x, y = "dimension d (number of pixel values)", "smallest probability of the class"
    figure, axes = one_panel(5.2, 3.6, title, x, y)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(1, max(10, dimensions[-1]))
    lowest = max(SMALLEST_SHOWN, float(min(cases.exact.min(), cases.bound.min(), 0.1)) / 2)
    axes.set_ylim(lowest, 2.5)
    axes.plot(dimensions, cases.bound, color=SECOND, linestyle=(0, (5, 1.5)), linewidth=1.5)
    # A value of 0 (less than the smallest float) is drawn below the frame, so that the curve leaves it.
    axes.plot(dimensions, np.maximum(cases.exact, 1e-300), color=FIRST, linewidth=1.8)
    same = axes.axhline(scales.same_scale, color=GREY, linewidth=0.9, linestyle=(0, (1, 1)))
    for name, pixels in IMAGES.items():
        if pixels <= axes.get_xlim()[1]:
            axes.axvline(pixels, color=GREY, linewidth=0.5)
            axes.text(pixels, lowest * 1.3, f" {name}", rotation=90, fontsize=7, color=GREY, va="bottom", ha="right")
    constant = bound_constant(scales)
    bound = (
        f"upper bound on the worst case: min(1, C/d), C = {constant:,.0f}"
        if math.isfinite(constant)
        else "no bound: same σ"
    )
    handles = [*axes.get_lines()[:2], same]
    labels = [bound, "exact worst case", f"same σ: {scales.same_scale:.4g}, any d"]
    legend_below(figure, list(zip(labels, handles, strict=True)), curves=False)
    return figure
