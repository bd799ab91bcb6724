"""The figures of a report, and a digest of the numbers and words that each of them shows."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from smoothcert.io.written_files import stored_request
from smoothcert.report.contents import Contents

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = ("png", "pdf", "svg")
"""Formats of figures."""
FIGURES = {
    "curves": (
        "Certified accuracy against radius",
        "A dashed vertical line marks the largest radius that n agreeing votes can certify; a thin line, where there "
        "is one, the accuracy that is left under attack.",
    ),
    "distribution": (
        "Distribution of the probability of the true class",
        "The share of images whose true class gets at most this share of the votes. Images whose votes all agree "
        "are counted in the strip at the right; they dominate the ACR.",
    ),
    "sweeps": (
        "ACR against hyper-parameters",
        "All else equal. Bars: one sample standard deviation over training seeds, where there are several, else one "
        "standard error over images; dashed: plain Gaussian training.",
    ),
    "training": ("Training", "Loss and accuracy under noise in each epoch; dotted lines mark learning-rate drops."),
}
"""Name of a figure -> its title and caption."""
STORED_AS = "figures_show"
"""The key of a stored request under which it has the digests of what the figures of a report show."""
DIGITS = 6
"""Numbers count to this many digits: the last ones may differ between machines."""


def figures_of(contents: Contents) -> "Mapping[str, Callable[[], Figure | None]]":
    """Name of a figure -> the function that draws it, or returns None where the files do not have what it needs."""
    # matplotlib takes long to import, and only figures need it.
    from smoothcert.report.curves import draw_curves
    from smoothcert.report.distribution import draw_distribution
    from smoothcert.report.sweep_curves import draw_sweeps
    from smoothcert.report.training_curves import draw_training_curves

    return {
        "curves": lambda: draw_curves(contents.summaries),
        "distribution": lambda: draw_distribution(contents.summaries),
        "sweeps": lambda: draw_sweeps(contents.sweeps),
        "training": lambda: draw_training_curves(contents.trained),
    }


def digest_of(figure: "Figure") -> str:
    """SHA-256 of what a figure shows: the points of its lines and marks, its texts and labels.

    It does not depend on how a version of matplotlib draws them, nor on fonts, sizes and colours.
    """
    return hashlib.sha256("\n".join(_shown_in(figure)).encode("utf-8", "backslashreplace")).hexdigest()


def digests_stored_in(folder: Path) -> Mapping[str, str]:
    """Name of a figure -> the digest of what it showed when it was written to `folder`."""
    stored = (stored_request(folder) or {}).get(STORED_AS)
    return stored if isinstance(stored, dict) else {}


def _shown_in(figure: "Figure") -> Iterator[str]:
    yield from (text.get_text() for legend in figure.legends for text in (legend.get_title(), *legend.get_texts()))
    for axes in figure.axes:
        yield from (axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *(text.get_text() for text in axes.texts))
        for line in axes.lines:
            label = str(line.get_label())
            yield "" if label.startswith("_") else label  # matplotlib numbers the lines without a label
            yield _points(line.get_xydata())
        yield from (_points(path.vertices) for marks in axes.collections for path in marks.get_paths())


def _points(values: object) -> str:
    return " ".join(f"{number + 0.0:.{DIGITS}g}" for number in np.asarray(values, dtype=np.float64).ravel().tolist())
