"""ACR against a hyper-parameter: one panel per sweep."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from smoothcert.report.hyperparameters import Sweep
from smoothcert.report.labels import scope_text
from smoothcert.report.looks import looks_of
from smoothcert.report.names import MEANINGS, METHODS, dataset_name, setting_name, setting_text, shared_network
from smoothcert.report.style import GREY, NOTE_SIZE, TITLE_SIZE, axes_grid, legend_below, plain, quiet_axes

_SPREAD = 20
"""Values whose largest is this many times the smallest have a logarithmic axis."""


def draw_sweeps(sweeps: Sequence[Sweep]) -> Figure | None:
    """ACR at each value, with bars of one standard error over images, or one standard deviation over seeds where a
    value has several runs; None without sweeps.

    A dashed line marks the run of plain Gaussian training.
    """
    if not sweeps:
        return None
    # Radii of one sigma and data set share an axis, so that panels can be compared.
    comparable = len({(sweep.first.sigma, sweep.first.dataset) for sweep in sweeps}) == 1
    figure, grid = axes_grid(len(sweeps), 3.6, 3.6, sharey=comparable)
    for axes, sweep in zip(grid, sweeps, strict=True):
        _draw(axes, sweep)
    legend_below(figure, curves=False, notes=_notes(sweeps))
    return figure


def _notes(sweeps: Sequence[Sweep]) -> list[str]:
    counts = {len(runs) for sweep in sweeps for runs in sweep.runs.values()}
    notes = [scope_text(sweep.first for sweep in sweeps).replace("\n", ", ")]
    if 1 in counts:
        notes.append("bars: 1 standard error over images; differences on the same images are more precise")
    if counts - {1}:
        notes.append("bars of values with several runs: 1 standard deviation over training seeds")
    return notes


def _draw(axes: Axes, sweep: Sweep) -> None:
    values = list(sweep.runs)
    first = sweep.first
    acrs = [fmean(run.acr for run in runs) for runs in sweep.runs.values()]
    errors = [
        stdev(run.acr for run in runs) if len(runs) > 1 else runs[0].acr_standard_error or 0.0
        for runs in sweep.runs.values()
    ]
    method = first.named.title or ""
    own_method = first.named.own_method
    colour = looks_of([method])[method].colour
    axes.errorbar(values, acrs, errors if any(errors) else None, marker="o", color=colour, capsize=3, linewidth=1.6)
    doubling = all(after == 2 * before for before, after in pairwise(values))
    if values[0] > 0 and (doubling or values[-1] / values[0] >= _SPREAD):
        axes.set_xscale("log", base=2 if doubling else 10)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    if sweep.reference is not None:
        acr = sweep.reference.acr
        axes.axhline(acr, color=GREY, linestyle=(0, (4, 3)), linewidth=0.9)
        # At the end of the line where the curve is farther away.
        left = abs(acrs[0] - acr) > abs(acrs[-1] - acr)
        style: dict[str, Any] = {"color": GREY, "fontsize": NOTE_SIZE, "ha": "left" if left else "right"}
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(METHODS["gaussian"], (0.02 if left else 1, acr), (0, 3), **place, **style)
    network = shared_network(run.recipe for runs in sweep.runs.values() for run in runs)
    facts = (method, first.dataset and dataset_name(first.dataset), network, f"σ = {first.sigma:g}")
    shared = ", ".join(setting_text(key, value, own_method) for key, value in sweep.shared.items())
    axes.set_title(
        "\n".join(plain(line) for line in (", ".join(filter(None, facts)), shared) if line), fontsize=TITLE_SIZE
    )
    name = setting_name(sweep.parameter, own_method)
    axes.set_xlabel(plain(f"{name}: {MEANINGS[name]}" if name in MEANINGS else name))
    axes.set_ylabel("average certified L2 radius (ACR)")
    axes.margins(y=0.15)
    quiet_axes(axes)
