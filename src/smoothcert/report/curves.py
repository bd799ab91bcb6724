"""Certified accuracy against radius: one panel per sigma, one exact step curve per run, accuracy under attack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from smoothcert.certification.attack_file import (
    SAME_IF_BOTH_HAVE_IT,
    SAME_OR_IN_NEITHER,
    AttacksFile,
    read_attacks,
)
from smoothcert.certification.certificates import CertificatesFile
from smoothcert.certification.columns import Columns, Floats
from smoothcert.io.compressed import result_files
from smoothcert.report.labels import panels_of, scope_text
from smoothcert.report.looks import Look, looks_of
from smoothcert.report.style import GREY, LABEL_SIZE, NOTE_SIZE, draw_steps, legend_below, panel_grid, plain
from smoothcert.report.summary import Summary
from smoothcert.training.run_folder import ATTACKS, run_of_certificates

ATTACKED = "attacked (upper bound)"
CEILING = "thin dashed line: largest radius that n votes can certify"
ATTACKED_PART = "attacked (upper bound, of other or fewer images)"
# Names are at the right ends of a few curves that are far enough apart: no legend to look up.
MOST_CURVES = 4
LONGEST = 32
"""Longer names would take the room of the curves."""
LINE_HEIGHT = 6.0
"""Height of a line of text, in percent of the axis."""
NEAR = 0.85
"""How far to the right, as a share of the axis, curves with names at their ends reach at least."""
MOST_MOVED = 7.0
"""How far a name may be moved from the end of its curve, in percent."""


class Steps(NamedTuple):
    """A step function by its corners: `accuracy[i]` is the height between `radii[i]` and the next radius."""

    radii: Floats
    accuracy: Floats


@dataclass(frozen=True, slots=True)
class Curve:
    """One run in a panel: its certified accuracy, and the accuracy that each of its attacks left."""

    label: str
    summary: Summary
    certified: Steps
    attacked: tuple[Steps, ...]
    same_images: bool
    """Whether the attacks were on the certified images: only then must their curves lie above."""


def step_curve(columns: Columns) -> Steps:
    """Corners (radius, accuracy in [0, 1]) of the certified accuracy: the accuracy of a corner holds beyond its radius,
    up to and including the next radius. There is one corner more than there are correct images; the last accuracy is 0.
    The curve has every step of the data, without a grid."""
    radii = np.sort(columns.counted_radii)
    accuracy = np.arange(len(radii), -1, -1, dtype=np.float64) / max(len(columns), 1)
    return Steps(np.concatenate([[0.0], radii]), accuracy)


def attacked_curve(file: AttacksFile) -> Steps:
    """Corners of the accuracy under attack, exact like `step_curve`, up to the largest radius that was attacked.

    At each radius it is an upper bound on the robust accuracy.
    """
    distances = np.sort(np.asarray([row.distance for row in file.rows if not row.withstood], dtype=np.float64))
    end = max([*(file.settings.get("radii") or ()), *distances], default=0.0)
    standing = 1 - np.arange(len(distances) + 1, dtype=np.float64) / max(len(file.rows), 1)
    return Steps(np.concatenate([[0.0], distances, [end]]), np.append(standing, standing[-1]))


def _attacks_on(file: CertificatesFile) -> list[AttacksFile]:
    """The attacks in the folder of the run on the classifier and data that `file` certifies."""
    run = run_of_certificates(file.path)
    attacks = [] if run is None else [read_attacks(path) for path in result_files(run / ATTACKS)]
    keys = (*SAME_IF_BOTH_HAVE_IT, *SAME_OR_IN_NEITHER)
    # Settings that are off may also be unrecorded.
    wanted = [file.settings.get(key) or None for key in keys]
    return [a for a in attacks if a.rows and [a.settings.get(key) or None for key in keys] == wanted]


def _curve(label: str, summary: Summary) -> Curve:
    attacks = _attacks_on(summary.file)
    same = all({row.index for row in attack.rows} == summary.indices for attack in attacks)
    steps = step_curve(summary.file.columns)
    return Curve(plain(label), summary, steps, tuple(map(attacked_curve, attacks)), same)


def _draw_panel(axes: Axes, panel: Sequence[Curve], looks: Mapping[str, Look]) -> float:
    """Draw the curves of a panel, a dashed line at each largest certifiable radius, and the numbers of images and votes
    above, where no curve is; the largest radius that a curve shows."""
    ceilings = {c.summary.ceiling for c in panel if c.summary.ceiling is not None}
    last = max(float(curve.certified.radii[-1]) for curve in panel)
    # A little beyond the last step and the last ceiling.
    axes.set_xlim(0, 1.04 * (max([last, *ceilings]) or panel[0].summary.sigma or 1.0))
    for ceiling in sorted(ceilings):
        axes.axvline(ceiling, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    text = scope_text(curve.summary for curve in panel)
    axes.text(1, 1.005, text, transform=axes.transAxes, va="bottom", ha="right", color=GREY, fontsize=NOTE_SIZE)
    for curve in panel:
        draw_steps(axes, curve.certified.radii, 100 * curve.certified.accuracy, curve.label, looks[curve.label])
        for steps in curve.attacked:
            axes.step(steps.radii, 100 * steps.accuracy, where="post", color=looks[curve.label].colour, linewidth=0.8)
    return last


def _attack_entry(curves: Sequence[Curve], looks: Mapping[str, Look]) -> list[tuple[str, Line2D]]:
    """The entry of the legend for the thin curves of all colours; none without such curves."""
    shown = [curve for curve in curves if curve.attacked]
    if not shown:
        return []
    text = ATTACKED if all(curve.same_images for curve in shown) else ATTACKED_PART
    colour = looks[shown[0].label].colour if len(curves) == 1 else GREY
    return [(text, Line2D([], [], color=colour, linewidth=0.8))]


def _label_right(axes: Axes, end: float, curves: Sequence[Curve], looks: Mapping[str, Look]) -> bool:
    """Write each label to the right of the axes, joined to its curve near the radius `end` by a thin line.

    False, and nothing is drawn, if there are too many curves, their names are long, or their ends are close together or
    far from the right: a long thin line would look like a curve.
    """
    right = axes.get_xlim()[1]
    steps = {curve.label: curve.certified for curve in curves}
    corners = {label: np.searchsorted(curve.radii, 0.99 * end) - 1 for label, curve in steps.items()}
    heights = {label: 100 * float(curve.accuracy[corners[label]]) for label, curve in steps.items()}
    places = _spread(heights)
    if end < NEAR * right or len(heights) > MOST_CURVES or max(map(len, heights)) > LONGEST:
        return False
    if any(abs(places[label] - heights[label]) > MOST_MOVED for label in places):
        return False
    for label, height in heights.items():
        colour = looks[label].colour
        axes.plot([end, right], [height, places[label]], color=colour, linewidth=0.6, clip_on=False, zorder=1)
        text = axes.annotate(label, (right, places[label]), (4, 0), textcoords="offset points", va="center")
        text.set(color=colour, fontsize=LABEL_SIZE + 0.5, fontweight="bold", annotation_clip=False)
    return True


def _spread(heights: Mapping[str, float]) -> dict[str, float]:
    """Places at least one line apart, from the lowest height up, then centred on the heights."""
    places: dict[str, float] = {}
    for label in sorted(heights, key=lambda label: (heights[label], label)):
        below = max(places.values(), default=-LINE_HEIGHT)
        places[label] = max(heights[label], below + LINE_HEIGHT)
    shift = sum(places[label] - heights[label] for label in places) / len(places)
    return {label: place - min(shift, min(places.values())) for label, place in places.items()}


def draw_curves(summaries: Sequence[Summary]) -> Figure:
    """The certified accuracy of runs against the radius.

    A thin dashed line marks the largest radius that n votes can certify, if n and alpha are known; above each panel are
    the numbers of images and votes. If the run folder of a certificates file holds `attacks/*.tsv` on the same
    classifier, a thin curve of the run's colour shows the accuracy that these attacks left: an upper bound. A few
    curves whose ends are far apart have their names there; otherwise a legend names them.
    """
    members = panels_of(summaries)
    panels = [[_curve(label, summary) for label, summary in panel] for panel in members]
    curves = [curve for panel in panels for curve in panel]
    looks = looks_of(curve.label for curve in curves)
    figure, grid = panel_grid(members, "{norm} radius", "certified accuracy (%)", extra_height=0.1, pad=20)
    ends = [_draw_panel(axes, panel, looks) for axes, panel in zip(grid, panels, strict=True)]
    named = len(panels) == 1 and _label_right(grid[0], ends[0], curves, looks)
    notes = [CEILING] if any(summary.ceiling is not None for summary in summaries) else []
    legend_below(figure, _attack_entry(curves, looks), curves=not named, notes=notes)
    return figure
