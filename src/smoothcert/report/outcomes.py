"""The rows of a certificates file as arrays, and the 95% intervals of shares and means over images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from smoothcert.certification.certificates import CertifiedImage
from smoothcert.smoothing.certificate import ABSTAIN

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
NORMAL_95 = float(ndtri(0.975))


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What counts of each image, one entry per image in each array, ascending by index."""

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


def outcomes_of(rows: Sequence[CertifiedImage]) -> Outcomes:
    """The arrays of `rows`, in any order."""
    cells = [(row.index, row.label, (c := row.certificate).predict, c.n > 0 and c.count == c.n) for row in rows]
    columns = np.array(cells, dtype=np.int64).reshape(-1, 4)
    order = np.argsort(columns[:, 0], kind="stable")
    index, label, predict, agree = columns[order].T
    certified = (predict == label) & (predict != ABSTAIN)
    radius = np.array([row.certificate.radius for row in rows], dtype=np.float64)[order]
    return Outcomes(index, label, certified, np.where(certified, radius, 0.0), certified & (agree > 0))


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
