"""Certified accuracy against radius: one panel a sigma, one exact step curve a run, what attacks left above it."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from smoothcert.attack_file import AttacksFile, read_attacks
from smoothcert.certificates import CertificatesFile, CertifiedImage
from smoothcert.errors import RequestError
from smoothcert.files import replaced_atomically
from smoothcert.report.locate import find_attacks
from smoothcert.report.summary import Summary, counted_radii, summarize
from smoothcert.report.tables import by_sigma, decimals_needed, one_line

Floats = NDArray[np.float64]
Style = str | tuple[float, Sequence[float]]
Look = tuple[str, Style]
PICTURE_FORMATS = ("png", "pdf", "svg")

# Okabe and Ito's palette, safe for colour-blind readers; its yellow is left out, too pale for a line on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Five styles and seven colours: 35 curves before a look repeats, and neighbours differ in print without colour too.
_STYLES: tuple[Style, ...] = ("-", (0, (5, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)))
_GREY = "#666666"
_LABEL_SIZE = 8.0
_LABEL_GAP = 0.035
"""Two curves closer than this (as a fraction of all images) cannot be told apart by a label at one of them."""


ATTACKED = "attacked (upper bound)"
ATTACKED_PART = "attacked (upper bound, of other or fewer images)"


@dataclass(frozen=True, slots=True)
class Steps:
    """A step function by its corners: `accuracy[i]` holds from `radii[i]` up to the next, that one excluded."""

    radii: Floats
    accuracy: Floats

    def share_at_least(self, radius: float) -> float:
        """The fraction of images with a radius >= `radius`, for a positive radius."""
        return float(self.accuracy[np.searchsorted(self.radii[1:], radius, "left")])


@dataclass(frozen=True, slots=True)
class Curve(Steps):
    """One run in a panel: the corners that `step_curve` gives, its name there, its numbers, and its attacks."""

    label: str
    summary: Summary
    attacked: tuple[Steps, ...] = ()
    same_images: bool = True
    """Whether the attacks were on the certified images: only then must their curves lie above."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in data coordinates."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Box") -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.top <= other.bottom or other.top <= self.bottom)

    def crossed_by(self, curve: Steps) -> bool:
        """Curves never rise: one that is below the left bottom corner or above the right top one misses the box."""
        return curve.share_at_least(self.left) > self.bottom and curve.share_at_least(self.right) < self.top


def step_curve(rows: Sequence[CertifiedImage]) -> tuple[Floats, Floats]:
    """Corners (radius, accuracy in [0, 1]) of the certified accuracy as a step function: a value holds from its radius
    up to the next, that one excluded (`where="post"`). Both arrays have one entry more than there are right images;
    the last accuracy is 0. No grid: the curve has every step of the data."""
    radii = np.sort(np.asarray(counted_radii(rows), dtype=np.float64))
    accuracy = np.arange(len(radii), -1, -1, dtype=np.float64) / max(len(rows), 1)
    return np.concatenate([[0.0], radii]), accuracy


def attacked_curve(file: AttacksFile) -> Steps:
    """Corners of the empirical accuracy, exact like `step_curve`, ending at the largest radius that was attacked.

    At each radius an upper bound on robust accuracy; beyond the end nothing was tried.
    """
    distances = np.sort(np.asarray([row.distance for row in file.rows if not row.withstood], dtype=np.float64))
    end = max([*file.settings.get("radii", ()), *distances], default=0.0)
    standing = 1 - np.arange(len(distances) + 1, dtype=np.float64) / max(len(file.rows), 1)
    return Steps(np.concatenate([[0.0], distances, [end]]), np.append(standing, standing[-1]))


def _attacks_on(file: CertificatesFile) -> list[AttacksFile]:
    """The attacks in the run's folder on the classifier and data that `file` certifies."""
    keys = ("weights_sha256", "noise", "sigma", "sound", "dataset", "split", "precision")
    found = [read_attacks(path) for path in find_attacks(file.path)]
    # What is off may be recorded as such or not at all.
    wanted = [file.settings.get(key) or None for key in keys]
    return [a for a in found if a.rows and [a.settings.get(key) or None for key in keys] == wanted]


def _plain(text: str) -> str:
    """`text` on one line, for a figure: a dollar sign would start a formula."""
    return one_line(text).replace("$", r"\$")


def _curves(files: Sequence[tuple[str, CertificatesFile]]) -> list[list[Curve]]:
    """One list a panel, by sigma (and data set, if there are several), runs in the given order.

    A run is labelled by its method where no panel has two runs of that method: then it looks the same in all panels.
    """
    named = dict(files)
    if len(named) < len(files):
        raise RequestError("expected a different name for each curve, got one name twice; rename one of them")
    summaries = by_sigma([summarize(file, name, ()) for name, file in files])
    panels = [list(members) for _, members in groupby(summaries, key=lambda summary: summary.group)]
    methods = [(summary.method, index) for index, panel in enumerate(panels) for summary in panel]
    repeated = {method for (method, _), count in Counter(methods).items() if count > 1}
    repeated |= {summary.name for summary in summaries if summary.method != summary.name}

    def curve(summary: Summary) -> Curve:
        label = summary.method if summary.method and summary.method not in repeated else summary.name
        file = named[summary.name]
        attacks = _attacks_on(file)
        certified = {row.index for row in file.rows}
        same = all({row.index for row in attack.rows} == certified for attack in attacks)
        return Curve(*step_curve(file.rows), _plain(label), summary, tuple(map(attacked_curve, attacks)), same)

    return [[curve(summary) for summary in panel] for panel in panels]


def _looks(panels: Sequence[Sequence[Curve]]) -> dict[str, Look]:
    """Colour and line style for each label, the same in all panels."""
    labels = dict.fromkeys(curve.label for panel in panels for curve in panel)
    return {label: (_COLOURS[i % len(_COLOURS)], _STYLES[i % len(_STYLES)]) for i, label in enumerate(labels)}


def _ceilings(panel: Sequence[Curve]) -> dict[float, int]:
    """Largest certifiable radius -> its n, for the runs that tell; ascending."""
    pairs = {c.summary.ceiling: c.summary.n for c in panel}
    return dict(sorted((c, n) for c, n in pairs.items() if c is not None and n is not None))


def _reach(panel: Sequence[Curve]) -> float:
    """The right end of the axis: a little beyond the last step and the last ceiling, so that their labels fit."""
    ends = [*(float(curve.radii[-1]) for curve in panel), *_ceilings(panel)]
    return 1.09 * (max(ends) or panel[0].summary.sigma or 1.0)


def _panel_title(summary: Summary, several_datasets: bool, decimals: int) -> str:
    sigma = "σ not recorded" if summary.sigma is None else f"σ = {summary.sigma:.{decimals}f}"
    return f"{_plain(summary.dataset)}, {sigma}" if several_datasets and summary.dataset else sigma


def _draw_ceilings(axes: Axes, panel: Sequence[Curve], reach: float) -> None:
    labelled = -math.inf
    for ceiling, n in _ceilings(panel).items():
        axes.axvline(ceiling, color=_GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
        if ceiling - labelled > 0.07 * reach:
            text = f"limit of n = {n:,}"
            axes.text(ceiling + 0.012 * reach, 50, text, rotation=90, va="center", ha="left", color=_GREY, fontsize=6.5)
            labelled = ceiling


def _draw_panel(axes: Axes, panel: Sequence[Curve], looks: Mapping[str, Look], title: str) -> None:
    reach = _reach(panel)
    axes.set_xlim(0, reach)
    axes.set_ylim(0, 102)
    axes.set_title(title, fontsize=9.5)
    axes.grid(color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color=_GREY)
    axes.spines[["top", "right"]].set_visible(False)
    _draw_ceilings(axes, panel, reach)
    for curve in panel:
        colour, style = looks[curve.label]
        x, y = curve.radii, 100 * curve.accuracy
        axes.step(x, y, where="post", color=colour, linestyle=style, linewidth=1.6, label=curve.label)
        for steps in curve.attacked:
            axes.step(steps.radii, 100 * steps.accuracy, where="post", color=colour, linewidth=0.8)


def _spots(curve: Curve, others: Sequence[Curve], limit: float) -> list[float]:
    """Radii at which `curve` is clear of all others, the clearest first; the middle of the curve wins ties."""

    def clearance(x: float) -> float:
        return min((abs(other.share_at_least(x) - curve.share_at_least(x)) for other in others), default=1.0)

    grid = [limit * i / 60 for i in range(2, 59)]
    spots = [x for x in grid if curve.share_at_least(x) > 0 and clearance(x) > _LABEL_GAP]
    return sorted(spots, key=lambda x: (-round(clearance(x), 2), abs(x - limit / 2)))


def _place(panel: Sequence[Curve], sizes: Mapping[str, tuple[float, float]], limit: float) -> dict[str, Box] | None:
    """A box for each label, beside its own curve, clear of all curves and labels; None where there is no room.

    `sizes`: width (radius) and height (fraction of images) of each text, margin included.
    """
    placed: dict[str, Box] = {}
    lines = [*panel, *(steps for curve in panel for steps in curve.attacked)]

    def free(box: Box) -> bool:
        inside = min(box.left, box.bottom) >= 0 and box.right <= limit and box.top <= 1.02
        return inside and not any(map(box.overlaps, placed.values())) and not any(map(box.crossed_by, lines))

    for curve in panel:
        width, height = sizes[curve.label]
        spots = [(x, curve.share_at_least(x)) for x in _spots(curve, [c for c in panel if c is not curve], limit)]
        boxes = (box for x, y in spots for box in (Box(x, y, x + width, y + height), Box(x - width, y - height, x, y)))
        box = next(filter(free, boxes), None)
        if box is None:
            return None
        placed[curve.label] = box
    return placed


def _direct_labels(figure: Figure, axes: Axes, panel: Sequence[Curve]) -> dict[str, Box] | None:
    """Where the labels go in this panel, measured in its font; None where a legend is needed."""
    sizes: dict[str, tuple[float, float]] = {}
    frame = axes.get_window_extent()
    for curve in panel:
        text = axes.text(0, 0, curve.label, fontsize=_LABEL_SIZE)
        extent = text.get_window_extent()
        text.remove()
        margin = 6 * figure.dpi / 72
        width = (extent.width + margin) / frame.width * _reach(panel)
        sizes[curve.label] = (width, (extent.height + margin) / frame.height * 1.02)
    return _place(panel, sizes, min(_ceilings(panel), default=_reach(panel)))


def _label(figure: Figure, grid: Sequence[Axes], panels: Sequence[Sequence[Curve]], looks: Mapping[str, Look]) -> None:
    """Names beside the curves if all panels have room, else a legend below them; thin curves are always in a legend."""
    thin = _attack_entry([curve for panel in panels for curve in panel])
    if len(looks) == 1 and len(panels) == 1:
        grid[0].set_title(f"{next(iter(looks))}, {grid[0].get_title()}", fontsize=9.5)
        return _legend(figure, thin)
    figure.draw_without_rendering()
    boxes = [_direct_labels(figure, axes, panel) for axes, panel in zip(grid, panels, strict=True)]
    if all(box is not None for box in boxes):
        for axes, placed in zip(grid, boxes, strict=True):
            for label, box in (placed or {}).items():
                x, y = (box.left + box.right) / 2, 50 * (box.bottom + box.top)
                axes.text(x, y, label, color=looks[label][0], fontsize=_LABEL_SIZE, ha="center", va="center")
        return _legend(figure, thin)
    lines = {str(line.get_label()): line for axes in grid for line in axes.get_lines() if line.get_label() in looks}
    return _legend(figure, [*((label, lines[label]) for label in looks), *thin])


def _attack_entry(curves: Sequence[Curve]) -> list[tuple[str, Line2D]]:
    """The legend's entry for the thin curves, whatever their colour; none where there are no such curves."""
    shown = [curve for curve in curves if curve.attacked]
    if not shown:
        return []
    text = ATTACKED if all(curve.same_images for curve in shown) else ATTACKED_PART
    colour = _looks([curves])[shown[0].label][0] if len(curves) == 1 else _GREY
    return [(text, Line2D([], [], color=colour, linewidth=0.8))]


def _legend(figure: Figure, entries: Sequence[tuple[str, Line2D]]) -> None:
    """One legend below the panels; none where there is nothing to explain."""
    if not entries:
        return
    labels, handles = zip(*entries, strict=True)
    longest = max(map(len, labels))
    columns = max(1, min(len(labels), int(figure.get_figwidth() * 12 / (longest + 8))))
    figure.legend(
        handles=handles,
        labels=labels,
        loc="outside lower center",
        ncols=columns,
        fontsize=_LABEL_SIZE,
        frameon=False,
        handlelength=3.2,
    )


def _figure(files: Sequence[tuple[str, CertificatesFile]]) -> Figure:
    panels = _curves(files)
    looks = _looks(panels)
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    width, height = (4.8, 3.5) if len(panels) == 1 else (3.1 * columns + 0.3, 2.9 * rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel().tolist()
    for axes in grid[len(panels) :]:
        axes.remove()
    del grid[len(panels) :]
    several = len({panel[0].summary.dataset for panel in panels} - {None}) > 1
    decimals = decimals_needed([s.sigma for panel in panels for s in [panel[0].summary] if s.sigma is not None])
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, looks, _panel_title(panel[0].summary, several, decimals))
        axes.set_xlabel("radius", fontsize=9)
    for axes in grid[::columns]:
        axes.set_ylabel("certified accuracy (%)", fontsize=9)
    _label(figure, grid, panels, looks)
    return figure


# Without dates and version stamps, so that the same certificates give the same file.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "svg": {"Date": None, "Creator": None},
}


def draw_curves(files: Sequence[tuple[str, CertificatesFile]], paths: Sequence[Path]) -> None:
    """Draw (name, file) pairs and write the picture to each of `paths`, as PNG, PDF or SVG by its ending.

    A thin dashed line marks the largest radius that n votes can certify, where n and alpha are known. Where the run
    folder of a certificates file holds `attacks/*.tsv` on the same classifier, a thin curve of the run's colour shows
    the accuracy that these attacks left: an upper bound. Files are replaced atomically.
    """
    if not files:
        raise RequestError("expected at least one certificates file to draw, got none; give one")
    for path in paths:
        if path.suffix[1:] not in PICTURE_FORMATS:
            raise RequestError(f"{path}: expected a name that ends in .png, .pdf or .svg; choose one of these")
    # TrueType in PDF: journals refuse Type 3 fonts. A fixed salt makes SVG ids, hence the file, reproducible.
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "smoothcert", "text.usetex": False}):
        figure = _figure(files)
        for path in paths:
            kind = path.suffix[1:]
            with replaced_atomically(path) as temporary:
                figure.savefig(temporary, format=kind, dpi=160, metadata=_METADATA[kind])
