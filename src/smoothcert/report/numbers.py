"""Everything that a report says about one run: accuracies with intervals, classes, the limit that n sets.

Shares are fractions in [0, 1], radii are in the norm of the file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from smoothcert.certification.columns import Flags
from smoothcert.data.datasets import DATASETS
from smoothcert.report.fewer_votes import acr_at_fewer_votes
from smoothcert.report.outcomes import Outcomes, standard_error, wilson_interval
from smoothcert.report.summary import Summary

FEWER_VOTES = (1_000, 10_000)
"""The numbers of votes at which ACR is derived again from the stored votes."""
LIMITED = 0.1
"""From this share of images at the largest radius on, the report says that n limits the result."""


@dataclass(frozen=True)
class AccuracyAt:
    """Certified accuracy at one radius: `count` of `images` are certified for their label at `radius` or more."""

    radius: float
    count: int
    images: int
    reachable: bool = True
    """False if n votes cannot show this radius even where all agree: a dash in tables, not 0."""

    @property
    def share(self) -> float:
        return self.count / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval over the choice of images."""
        return wilson_interval(self.share, self.images)


@dataclass(frozen=True)
class ClassNumbers:
    """The numbers of the images with one label."""

    label: int
    images: int
    acr: float
    accuracy: tuple[AccuracyAt, ...]
    """At 0 and the radii of the run, ascending."""

    @property
    def never_certified(self) -> bool:
        """True if not one image of the class is certified for its label, at any radius."""
        return self.accuracy[0].count == 0


@dataclass(frozen=True)
class RunNumbers:
    """The numbers of one run."""

    name: str
    images: int
    acr: float
    acr_standard_error: float | None
    """Over the choice of images; None for a single image."""
    accuracy: tuple[AccuracyAt, ...]
    """At the radii of the tables, ascending."""
    classes: tuple[ClassNumbers, ...]
    """Of each label that occurs, ascending."""
    ceiling: float | None
    """The largest radius that n votes can show; None if n, alpha or sigma are not recorded."""
    at_ceiling: float | None
    """The share of images whose n votes all go to their label: their radius is `ceiling`, whatever the network."""
    acr_at: Mapping[int, float | None]
    """n -> the ACR to expect with n votes per image, from the stored votes; None where they do not suffice."""
    dimension: int | None
    """The number of pixel values of an image, if the data set is a known one."""

    @property
    def worst_class(self) -> ClassNumbers:
        """The class with the smallest ACR; of several the first."""
        return min(self.classes, key=lambda numbers: numbers.acr)

    @property
    def never_certified(self) -> tuple[int, ...]:
        """The labels of which not one image is certified."""
        return tuple(numbers.label for numbers in self.classes if numbers.never_certified)

    @property
    def limited_by_n(self) -> bool:
        """Whether a tenth of the images or more are at the largest radius: more votes would raise ACR visibly."""
        return self.at_ceiling is not None and self.at_ceiling >= LIMITED

    def l_infinity(self, radius: float) -> float | None:
        """The L-infinity radius r / sqrt(d) that an L2 radius r implies: that cube fits into the ball."""
        return None if self.dimension is None else radius / math.sqrt(self.dimension)


def run_numbers(summary: Summary) -> RunNumbers:
    """The numbers of one run, at the radii of its summary."""
    outcomes, radii = summary.outcomes, list(summary.accuracy_at)
    stored = bool(summary.file.columns.n.any())
    spec = DATASETS.get(summary.dataset or "") if summary.norm == "L2" else None
    return RunNumbers(
        name=summary.name,
        images=len(outcomes),
        acr=float(outcomes.radius.mean()),
        acr_standard_error=standard_error(outcomes.radius),
        accuracy=_accuracies(summary, outcomes, np.ones(len(outcomes), dtype=np.bool_), radii),
        classes=_classes(summary, outcomes, radii),
        ceiling=summary.ceiling,
        at_ceiling=float(outcomes.unanimous.mean()) if stored and summary.ceiling is not None else None,
        acr_at={n: acr_at_fewer_votes(summary.file, n) for n in FEWER_VOTES},
        dimension=None if spec is None else math.prod(spec.shape),
    )


def _accuracies(summary: Summary, outcomes: Outcomes, chosen: Flags, radii: Sequence[float]) -> tuple[AccuracyAt, ...]:
    images = int(chosen.sum())
    counts = [int((outcomes.certified_at(radius) & chosen).sum()) for radius in radii]
    return tuple(AccuracyAt(r, count, images, summary.reaches(r)) for r, count in zip(radii, counts, strict=True))


def _classes(summary: Summary, outcomes: Outcomes, radii: Sequence[float]) -> tuple[ClassNumbers, ...]:
    numbers = []
    for label in np.unique(outcomes.label).tolist():
        chosen = outcomes.label == label
        accuracies = _accuracies(summary, outcomes, chosen, sorted({0.0, *radii}))
        numbers.append(ClassNumbers(label, int(chosen.sum()), float(outcomes.radius[chosen].mean()), accuracies))
    return tuple(numbers)
