"""How every figure looks: colours, line styles, sizes, legends, and files that are the same for the same numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from smoothcert.errors import RequestError
from smoothcert.io.files import replaced_atomically
from smoothcert.io.text import one_line

Style = str | tuple[float, Sequence[float]]
PICTURE_FORMATS = ("png", "pdf", "svg")

# Okabe and Ito's palette, safe for colour-blind readers; its yellow is left out, too pale for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Five styles and seven colours: 35 curves before a look repeats, and neighbours differ in print without colour too.
STYLES: tuple[Style, ...] = ("-", (0, (5, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)))
GREY = "#666666"
PALE = "#E6E6E6"
TITLE_SIZE, AXIS_SIZE, LABEL_SIZE, NOTE_SIZE = 9.5, 9.0, 8.0, 7.0
_MOST_COLUMNS = 6
_FREE_HEIGHT = 0.45
"""Inches of a legend (two lines) for which the panels make room; the figure grows by the rest."""

# Without dates and version stamps, so that the same numbers give the same file.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "svg": {"Date": None, "Creator": None},
}


def look(index: int) -> tuple[str, Style]:
    """Colour and line style of the `index`-th curve of a figure."""
    return COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]


def plain(text: str) -> str:
    """`text` on one line, for a figure: a dollar sign would start a formula, and matplotlib leaves labels that begin
    with an underscore out of legends."""
    shown = one_line(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that needs no display and makes room for its labels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def quiet_axes(axes: Axes) -> None:
    """A pale grid behind the curves, no frame above and to the right, small ticks."""
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, further: Sequence[tuple[str, Artist]] = ()) -> None:
    """One legend below the panels: each label of the figure once, then `further` (label, handle) pairs.

    It has as many columns as fit. The figure grows for a long legend, so that the panels keep their size. Nothing is
    drawn where there are no labels.
    """
    entries: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    entries |= further
    if not entries:
        return
    look_of_legend: dict[str, Any] = {"fontsize": LABEL_SIZE, "frameon": False, "handlelength": 3.2}
    handles, labels = list(entries.values()), list(entries)
    for columns in range(min(len(entries), _MOST_COLUMNS), 0, -1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, **look_of_legend)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    inches = legend.get_window_extent().height / figure.dpi
    figure.set_figheight(figure.get_figheight() + max(0.0, inches - _FREE_HEIGHT))


def save_figure(figure: Figure, paths: Sequence[Path]) -> None:
    """Write `figure` to each of `paths`, as PNG, PDF or SVG by its ending; each file is replaced atomically."""
    for path in paths:
        if path.suffix[1:] not in PICTURE_FORMATS:
            raise RequestError(f"{path}: expected a name that ends in .png, .pdf or .svg; choose one of these")
    # TrueType in PDF: journals refuse Type 3 fonts. A fixed salt makes SVG ids, hence the file, reproducible.
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "smoothcert", "text.usetex": False}):
        for path in paths:
            kind = path.suffix[1:]
            with replaced_atomically(path) as temporary:
                figure.savefig(temporary, format=kind, dpi=160, metadata=_METADATA[kind])
