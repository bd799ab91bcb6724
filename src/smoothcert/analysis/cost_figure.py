"""The figure of what training cost: bars of time and memory, next to published ones."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from smoothcert.analysis.cost import GIB, Cost, cost_cells
from smoothcert.io.text import duration
from smoothcert.report.looks import looks_of
from smoothcert.report.names import METHODS, dataset_name, network_name
from smoothcert.report.style import AXIS_SIZE, GREY, LABEL_SIZE, TITLE_SIZE, legend_below, new_figure, plain, quiet_axes

SPREAD = 50
"""Bars that differ by more than this factor have a logarithmic axis."""


def draw_cost(costs: Sequence[Cost]) -> Figure:
    """Bars: the whole training time of each run, and peak memory if known; dashed bars are the published values."""
    with_memory = any(c.peak_memory_bytes is not None for c in costs)
    figure = new_figure(7.6 if with_memory else 5.4, 1.2 + 0.55 * len(costs))
    panels: list[Axes] = figure.subplots(1, 1 + with_memory, sharey=True, squeeze=False).ravel().tolist()
    _, cells = cost_cells(costs)
    methods = [METHODS.get(c.method, c.method) for c in costs]
    looks = looks_of(methods)
    colours = [looks[method].colour for method in methods]
    hours = _scaled([c.seconds_planned or c.seconds for c in costs], 1 / 3600)
    unit, factor = ("hours", 1.0) if max((h or 0 for h in hours), default=0) >= 1 else ("minutes", 60.0)
    paper = _scaled([c.published_hours for c in costs], factor)
    texts = [
        row[6] if c.published_hours is None else f"{row[6]}, published {duration(3600 * c.published_hours)}"
        for c, row in zip(costs, cells, strict=True)
    ]
    _bars(panels[0], _scaled(hours, factor), paper, texts, f"training time ({unit})", colours)
    if with_memory:
        memory = _scaled([c.peak_memory_bytes for c in costs], 1 / GIB)
        paper = _scaled([c.published_memory_gb for c in costs], 1e9 / GIB)
        texts = [
            row[7] if printed is None else f"{row[7]}, published {printed:.2f} GiB"
            for printed, row in zip(paper, cells, strict=True)
        ]
        _bars(panels[1], memory, paper, texts, "peak memory (GiB)", colours)
    panels[0].set_yticks(range(len(costs)), list(map(plain, _names(costs))))
    panels[0].invert_yaxis()
    what = dict.fromkeys(
        f"{dataset_name(c.dataset)}, {network_name(c.model)}, {c.epochs_planned} epochs" for c in costs
    )
    dashed = "; dashed: published" if any(c.published_hours is not None for c in costs) else ""
    figure.suptitle(plain(f"{' and '.join(what)}{dashed}"), fontsize=TITLE_SIZE)
    legend_below(figure, curves=False, notes=_notes(costs))
    return figure


def _notes(costs: Sequence[Cost]) -> list[str]:
    notes = []
    if devices := dict.fromkeys(plain(c.device) for c in costs if c.device):
        notes.append(f"bars: measured on {' and '.join(devices)}")
    if begun := [c.epochs for c in costs if not c.done]:
        measured = f"{min(begun)} to {max(begun)}" if min(begun) < max(begun) else f"{begun[0]}"
        notes.append(f"about: {measured} epochs were measured, and their median stands for each of the others")
    if any(c.published_hours is not None for c in costs):
        notes.append("published: table 3 of arXiv:2006.04062, on other hardware")
    return notes


def _names(costs: Sequence[Cost]) -> list[str]:
    """The method and sigma of each run; where two runs share them, the name of the run, too."""
    names = [f"{METHODS.get(c.method, c.method)}, σ = {c.sigma:g}" for c in costs]
    return [f"{n} ({c.run})" if names.count(n) > 1 else n for n, c in zip(names, costs, strict=True)]


def _scaled(values: Sequence[float | None], factor: float) -> list[float | None]:
    return [None if value is None else value * factor for value in values]


def _bars(
    axes: Axes,
    values: Sequence[float | None],
    paper: Sequence[float | None],
    texts: Sequence[str],
    title: str,
    colours: Sequence[str],
) -> None:
    """One bar per run, below its text; on a logarithmic axis where a bar would be too short to be seen."""
    quiet_axes(axes)
    axes.grid(visible=False, axis="y")
    lengths = [v for v in (*values, *paper) if v] or [1.0]
    axes.barh(range(len(values)), [v or 0 for v in values], height=0.4, color=colours)
    for i, (printed, text) in enumerate(zip(paper, texts, strict=True)):
        if printed is not None:
            axes.barh(i, printed, height=0.4, fill=False, edgecolor=GREY, linewidth=1.0, linestyle=(0, (3, 2)))
        # Above the bars, which may fill the panel.
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "bottom"}
        axes.annotate(text, (0, i - 0.2), (3, 2), fontsize=LABEL_SIZE, color=GREY, **place)
    if max(lengths) > SPREAD * min(lengths):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlim(10 ** math.floor(math.log10(min(lengths))), 1.5 * max(lengths))
        title += ", logarithmic"
    else:
        axes.set_xlim(0, 1.05 * max(lengths))
    axes.set_ylim(-0.6, len(values) - 0.6)
    axes.set_xlabel(title, fontsize=AXIS_SIZE)
