"""What all figures share: sizes, panels, legends; and files that depend on the numbers alone."""

import io
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from smoothcert.io.text import one_line
from smoothcert.report.labels import Panel, titles_of
from smoothcert.report.looks import Look
from smoothcert.report.names import meanings_in

GREY = "#666666"
PALE = "#E6E6E6"
FIRST, SECOND = "#0058a8", "#d55e00"
"""Colours of curves that are not runs."""
TITLE_SIZE, AXIS_SIZE, LABEL_SIZE, NOTE_SIZE = 9.5, 9.0, 8.0, 7.0
DOTS_PER_INCH, MOST_PIXELS = 320, 2_000
"""Sharp on screens with two pixels per point; pages are no wider than 1,000 points."""
_MOST_COLUMNS = 6
_LETTERS_PER_INCH = 17
_FREE_HEIGHT = 0.45
"""Height of a legend, in inches, for which the panels make room (two lines); the figure grows by the rest."""

# Without dates and version stamps, so that the same numbers give the same file.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "svg": {"Date": None, "Creator": None},
}


def line_style(look: Look) -> Literal["-"] | tuple[float, tuple[float, ...]]:
    """The line style of a look, as matplotlib takes it."""
    return (0, look.dash) if look.dash else "-"


def plain(text: str) -> str:
    """`text` on one line for a figure: without dollar signs, which would start a formula, and without an underscore at
    the start, which matplotlib leaves out of legends."""
    shown = one_line(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that needs no display and makes room for its labels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def one_panel(width: float, height: float, title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """A figure of one panel, with the names of its axes."""
    figure = new_figure(width, height)
    axes = figure.subplots()
    quiet_axes(axes)
    axes.set_title(title, fontsize=TITLE_SIZE)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def axes_grid(count: int, width: float, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes of this size in inches, row by row, at most three per row."""
    columns = 2 if count == 4 else min(3, count)
    rows = -(-count // columns)
    figure = new_figure(width * columns + 0.3, height * rows)
    grid: list[Axes] = figure.subplots(rows, columns, squeeze=False, **shared).ravel().tolist()
    for axes in grid[count:]:
        axes.remove()
    return figure, grid[:count]


def panel_grid(
    panels: Sequence[Panel], x: str, y: str, extra_height: float = 0.0, pad: float = 4.0
) -> tuple[Figure, list[Axes]]:
    """A figure with empty `panels` and their titles.

    `x` is the name of every horizontal axis, where {norm} stands for the norm of the radii, `y` that of the common
    vertical one, in percent; `pad` is the room below a title, in points.
    """
    width, height = (4.9, 3.6) if len(panels) == 1 else (3.1, 2.9)
    figure, grid = axes_grid(len(panels), width, height + extra_height, sharey=True)
    for axes, title, panel in zip(grid, titles_of(panels), panels, strict=True):
        axes.set_title(plain(title), fontsize=TITLE_SIZE, pad=pad)
        axes.set_xlabel(x.format(norm=panel[0][1].norm))
        axes.set_ylim(0, 102)
        quiet_axes(axes)
        subplot = axes.get_subplotspec()
        axes.set_ylabel(y if subplot is not None and subplot.is_first_col() else "")
    return figure, grid


def draw_steps(axes: Axes, x: Any, y: Any, label: str, look: Look) -> None:
    """A step curve whose values hold up to the next x."""
    axes.step(x, y, where="post", color=look.colour, linestyle=line_style(look), linewidth=1.6, label=label)


def quiet_axes(axes: Axes) -> None:
    """A pale grid behind the curves, no frame above and to the right, small ticks and names of axes."""
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color=GREY)
    axes.xaxis.label.set_fontsize(AXIS_SIZE)
    axes.yaxis.label.set_fontsize(AXIS_SIZE)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(
    figure: Figure, further: Sequence[tuple[str, Artist]] = (), *, curves: bool = True, notes: Sequence[str] = ()
) -> None:
    """One legend below the panels: `notes` and what the letters in titles and labels mean, each label of the figure
    once (if `curves`), then `further` (label, handle) pairs.

    It has as many columns as fit. The figure grows for a long legend, so that the panels keep their size. Nothing is
    drawn where there is nothing to say.
    """
    entries: dict[str, Artist] = {}
    for axes in figure.axes if curves else ():
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    entries |= further
    handles, labels = list(entries.values()), list(entries)
    note = _note(figure, labels, notes)
    if not entries and not note:
        return
    look_of_legend: dict[str, Any] = {"fontsize": LABEL_SIZE, "frameon": False, "handlelength": 3.2, "title": note}
    look_of_legend["title_fontproperties"] = {"size": NOTE_SIZE}
    for columns in range(max(1, min(len(entries), _MOST_COLUMNS)), 0, -1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, **look_of_legend)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    legend.get_title().set(color=GREY, multialignment="center")
    inches = legend.get_window_extent().height / figure.dpi
    figure.set_figheight(figure.get_figheight() + max(0.0, inches - _FREE_HEIGHT))


def _note(figure: Figure, labels: Sequence[str], notes: Sequence[str]) -> str:
    """`notes`, and what the letters in the labels, titles and texts of a figure mean, in lines that fit."""
    above = [axes.get_title(loc=side) for axes in figure.axes for side in ("left", "center", "right")]
    inside = [text.get_text() for axes in figure.axes for text in axes.texts]
    most = int(_LETTERS_PER_INCH * figure.get_figwidth())
    lines = [""]
    for meaning in (*notes, *meanings_in([figure.get_suptitle(), *above, *inside, *labels])):
        longer = f"{lines[-1]};  {meaning}" if lines[-1] else meaning
        if len(longer) > most:
            lines += textwrap.wrap(meaning, most)
        else:
            lines[-1] = longer
    return "\n".join(filter(None, lines))


def pictures_of(name: str, draw: Callable[[], Figure | None], formats: Sequence[str]) -> dict[str, bytes | None]:
    """File name -> picture of the figure that `draw` makes, for each of `formats`; None where it makes none."""
    # A user's LaTeX must not read names as formulas. TrueType in PDF: journals refuse Type 3 fonts. A fixed salt makes
    # SVG ids, hence the file, reproducible.
    with matplotlib.rc_context({"text.usetex": False, "pdf.fonttype": 42, "svg.hashsalt": "smoothcert"}):
        figure = draw() if formats else None
        return {f"{name}.{kind}": None if figure is None else _picture(figure, kind) for kind in formats}


def _picture(figure: Figure, kind: str) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from (current )?font")  # it draws a box
        dots = min(DOTS_PER_INCH, MOST_PIXELS / figure.get_figwidth())
        figure.savefig(file, format=kind, dpi=dots, metadata=_METADATA[kind])
    if kind != "png":
        return file.getvalue()
    return _compressed(file, dots, palette=not any(axes.images for axes in figure.axes))


def _compressed(png: io.BytesIO, dots: float, *, palette: bool) -> bytes:
    """The picture without transparency; with a `palette` of 96 colours, which lines and their smooth edges hardly
    exceed, it has a fifth of the size."""
    with Image.open(png) as stored:
        picture = stored.convert("RGB")
    if palette:
        picture = picture.quantize(96, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        picture.putpalette(
            [255 if level >= 250 else level for level in picture.getpalette() or []]
        )  # white stays white
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True, dpi=(dots, dots))
    return file.getvalue()
