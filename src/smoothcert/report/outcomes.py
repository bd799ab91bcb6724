"""What counts of each image as arrays, and the 95% intervals of shares and means over images."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from smoothcert.certification.columns import Columns, Flags, Floats, Integers

NORMAL_95 = float(ndtri(0.975))


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What counts of some images, one entry per image in each array, ascending by index."""

    index: Integers
    label: Integers
    certified: Flags
    """Whether the image is certified for its label, with any radius."""
    radius: Floats
    """The certified radius; 0 where wrong or abstained."""
    unanimous: Flags
    """Whether all n votes went to the label: the largest radius that n can show. False where votes are not stored."""

    def __len__(self) -> int:
        return len(self.index)

    def certified_at(self, radius: float) -> Flags:
        """Whether each image is certified for its label with a radius of at least `radius`."""
        return self.certified & (self.radius >= radius)

    def accuracy(self, radius: float = 0.0) -> float:
        """The certified accuracy at `radius`, in [0, 1]."""
        return float(self.certified_at(radius).mean())

    @property
    def acr(self) -> float:
        """The average certified radius."""
        return float(self.radius.mean())

    def at(self, c: Flags | Integers) -> "Outcomes":
        """The chosen images, by flags or positions."""
        return Outcomes(self.index[c], self.label[c], self.certified[c], self.radius[c], self.unanimous[c])


def outcomes_of(columns: Columns) -> Outcomes:
    """What counts of rows in any order."""
    certified = columns.correct
    radius = np.where(certified, columns.radius, 0.0)
    unanimous = certified & (columns.n > 0) & (columns.count == columns.n)
    outcomes = Outcomes(columns.index, columns.label, certified, radius, unanimous)
    return outcomes.at(np.argsort(columns.index, kind="stable"))


def wilson_interval(fraction: float, images: int) -> tuple[float, float]:
    """Wilson's 95% interval for a proportion that was `fraction` among `images`: unlike the normal one it stays in
    [0, 1] and has a width at 0 and 1 too."""
    z2 = NORMAL_95**2 / images
    centre = (fraction + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (fraction * (1 - fraction) + z2 / 4)) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def standard_error(values: Floats) -> float | None:
    """Of the mean of `values`: sample standard deviation / sqrt(count); None for a single value."""
    return None if len(values) < 2 else float(np.std(values, ddof=1) / math.sqrt(len(values)))
