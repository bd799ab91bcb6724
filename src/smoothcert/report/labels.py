"""Names beside the curves of a figure, found by looking at what is drawn; a legend where there is no room for them."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from smoothcert.report.figures import LABEL_SIZE, TITLE_SIZE, Look
from smoothcert.report.placement import Box, Panel, Place, place_labels

BEHIND = "_behind"
"""Matplotlib's label for faint lines that a name may be written over."""
_MARGIN_POINTS = 6.0
_FREE_HEIGHT = 0.45
"""Inches of a legend, two lines, that the panels make room for; more is added to the figure."""


def _places(figure: Figure, axes: Axes, looks: Mapping[str, Look]) -> dict[str, Place]:
    """Where the labels of the curves in `axes` go, measured in their font."""
    to_panel = axes.transAxes.inverted()
    lines = [line for line in axes.get_lines() if np.size(line.get_xdata()) and line.get_label() != BEHIND]
    points = [to_panel.transform(line.get_transform().transform_path(line.get_path()).vertices) for line in lines]
    names = [str(line.get_label()) if line.get_label() in looks else None for line in lines]
    if not any(names):
        return {}
    frame = axes.get_window_extent()
    margin = _MARGIN_POINTS * figure.dpi / 72
    sizes: dict[str, tuple[float, float]] = {}
    for name in filter(None, names):
        text = axes.text(0, 0, name, fontsize=LABEL_SIZE)
        extent = text.get_window_extent()
        text.remove()
        sizes[name] = (extent.width + margin) / frame.width, (extent.height + margin) / frame.height
    written = [to_panel.transform_bbox(text.get_window_extent()) for text in axes.texts]
    taken = [Box(*box.extents) for box in written]
    return place_labels(Panel(points, names, taken), sizes)


def _write_labels(axes: Axes, places: Mapping[str, Place], looks: Mapping[str, Look]) -> None:
    for name, place in places.items():
        colour, box = looks[name][0], place.box
        x, y = (box.left + box.right) / 2, (box.bottom + box.top) / 2
        text = axes.text(x, y, name, transform=axes.transAxes, color=colour, fontsize=LABEL_SIZE)
        text.set(ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        if place.leader:
            xs, ys = zip(*place.leader, strict=True)
            leader = Line2D(xs, ys, color=colour, linewidth=0.6, marker="o", markersize=2.5, markevery=[0])
            leader.set(transform=axes.transAxes, label="_leader", zorder=3)
            axes.add_line(leader)


def name_curves(
    figure: Figure, grid: Sequence[Axes], looks: Mapping[str, Look], entries: Sequence[tuple[str, Line2D]] = ()
) -> None:
    """Write the label of each line that `looks` knows beside it, in every panel that has room for it.

    A label without room in any panel puts all labels into a legend below the panels instead. `entries` are explained
    in a legend in any case. The only curve of a figure with one panel is named in the title.
    """
    lines = {str(line.get_label()): line for axes in grid for line in axes.get_lines() if line.get_label() in looks}
    if len(lines) == 1 and len(grid) == 1:
        grid[0].set_title(f"{next(iter(lines))}, {grid[0].get_title()}", fontsize=TITLE_SIZE)
        return legend_below(figure, entries)
    height = figure.get_figheight()
    legend_below(figure, entries)
    figure.draw_without_rendering()
    places = [_places(figure, axes, looks) for axes in grid]
    if set(lines) == {name for placed in places for name in placed}:
        for axes, placed in zip(grid, places, strict=True):
            _write_labels(axes, placed, looks)
        return None
    for legend in [*figure.legends]:
        legend.remove()
    figure.set_figheight(height)
    return legend_below(figure, [*((name, lines[name]) for name in looks if name in lines), *entries])


def legend_below(figure: Figure, entries: Sequence[tuple[str, Line2D]]) -> None:
    """One legend below the panels, for which the figure grows; none where there is nothing to explain."""
    if not entries:
        return
    labels, handles = zip(*entries, strict=True)
    longest = max(map(len, labels))
    columns = max(1, min(len(labels), int(figure.get_figwidth() * 12 / (longest + 8))))
    legend = figure.legend(
        handles=handles,
        labels=labels,
        loc="outside lower center",
        ncols=columns,
        fontsize=LABEL_SIZE,
        frameon=False,
        handlelength=3.2,
    )
    inches = legend.get_window_extent().height / figure.dpi
    figure.set_figheight(figure.get_figheight() + max(0.0, inches - _FREE_HEIGHT))
