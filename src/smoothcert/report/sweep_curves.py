"""ACR against a hyper-parameter: one panel per sweep."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from smoothcert.report.hyperparameters import FEWEST_VALUES, LOSS_FORM, Sweep
from smoothcert.report.looks import looks_of
from smoothcert.report.names import MEANINGS, METHODS, dataset_name, setting_name, setting_text
from smoothcert.report.style import AXIS_SIZE, GREY, NOTE_SIZE, TITLE_SIZE, legend_below, new_figure, plain, quiet_axes

_SPREAD = 20
"""Values whose largest is this many times the smallest have a logarithmic axis."""


def draw_sweeps(sweeps: Sequence[Sweep], forms_left_out: Sequence[str] = ()) -> Figure | None:
    """ACR at each value, with bars of ± one standard error over images, or ± one standard deviation over seeds where a
    value has several runs; None without sweeps.

    A dashed line marks the run of plain Gaussian training. A note names the forms of the loss that have no sweep.
    """
    if not sweeps:
        return None
    columns = min(3, len(sweeps))
    rows = -(-len(sweeps) // columns)
    figure = new_figure(3.6 * columns + 0.4, 3.6 * rows)
    # Radii of one sigma and data set share an axis, so that panels can be compared.
    comparable = len({(sweep.sigma, sweep.dataset) for sweep in sweeps}) == 1
    grid: list[Axes] = figure.subplots(rows, columns, squeeze=False, sharey=comparable).ravel().tolist()
    for axes in grid[len(sweeps) :]:
        axes.remove()
    for axes, sweep in zip(grid, sweeps, strict=False):
        _draw(axes, sweep)
    legend_below(figure, curves=False, notes=_notes(sweeps, forms_left_out))
    return figure


def _notes(sweeps: Sequence[Sweep], forms_left_out: Sequence[str]) -> list[str]:
    points = [point for sweep in sweeps for point in sweep.points]
    scopes = dict.fromkeys(
        f"{sweep.images:,} images{f', n = {sweep.n:,} votes per image' if sweep.n else ''}"
        for sweep in sweeps
        if sweep.images
    )
    notes = list(scopes) if len(scopes) == 1 else []
    if any(point.standard_error for point in points):
        notes.append("bars: ± 1 standard error over images; differences on the same images are more precise")
    if any(point.standard_deviation for point in points):
        notes.append("bars of values with several runs: ± 1 standard deviation over training seeds")
    if forms_left_out:
        forms = ", ".join(plain(setting_text(LOSS_FORM, form)) for form in forms_left_out)
        notes.append(f"not drawn, fewer than {FEWEST_VALUES} values: {forms}")
    return notes


def _draw(axes: Axes, sweep: Sweep) -> None:
    values = [point.value for point in sweep.points]
    errors = [point.standard_deviation or point.standard_error or 0.0 for point in sweep.points]
    acrs = [point.acr for point in sweep.points]
    method = METHODS.get(sweep.method, sweep.method)
    colour = looks_of([method])[method].colour
    axes.errorbar(values, acrs, errors if any(errors) else None, marker="o", color=colour, capsize=3, linewidth=1.6)
    doubling = all(after == 2 * before for before, after in pairwise(values))
    if values[0] > 0 and (doubling or values[-1] / values[0] >= _SPREAD):
        axes.set_xscale("log", base=2 if doubling else 10)
    axes.set_xticks(*_ticks(values, axes.get_xscale() == "log"))
    axes.minorticks_off()
    if sweep.reference is not None:
        _, acr = sweep.reference
        axes.axhline(acr, color=GREY, linestyle=(0, (4, 3)), linewidth=0.9)
        # At the end of the line where the curve is farther away.
        left = abs(acrs[0] - acr) > abs(acrs[-1] - acr)
        style: dict[str, Any] = {"color": GREY, "fontsize": NOTE_SIZE, "ha": "left" if left else "right"}
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(METHODS["gaussian"], (0.02 if left else 1, acr), (0, 3), **place, **style)
    data = [dataset_name(sweep.dataset)] if sweep.dataset else []
    network = [sweep.network] if sweep.network else []
    first = ", ".join([method, *data, *network, f"σ = {sweep.sigma:g}"])
    shared = ", ".join(setting_text(key, value) for key, value in sweep.shared.items())
    axes.set_title("\n".join(plain(line) for line in (first, shared) if line), fontsize=TITLE_SIZE)
    name = setting_name(sweep.parameter)
    axes.set_xlabel(plain(f"{name}: {MEANINGS[name]}" if name in MEANINGS else name), fontsize=AXIS_SIZE)
    axes.set_ylabel("average certified L2 radius (ACR)", fontsize=AXIS_SIZE)
    axes.margins(y=0.15)
    quiet_axes(axes)


def _ticks(values: Sequence[float], logarithmic: bool) -> tuple[list[float], list[str]]:
    """Ticks at the values, without those whose labels would touch the one before."""
    places = [math.log(value) if logarithmic else value for value in values]
    kept: list[int] = []
    for i, place in enumerate(places):
        if not kept or place - places[kept[-1]] > 0.06 * (places[-1] - places[0]):
            kept.append(i)
    return [values[i] for i in kept], [f"{values[i]:g}" for i in kept]
