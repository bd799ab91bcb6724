"""ACR against a hyper-parameter: one panel per sweep."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from smoothcert.report.hyperparameters import Sweep
from smoothcert.report.names import METHODS, dataset_name, setting_name, setting_text
from smoothcert.report.style import AXIS_SIZE, FIRST, GREY, NOTE_SIZE, TITLE_SIZE, new_figure, plain, quiet_axes

_SPREAD = 20
"""Values whose largest is this many times the smallest have a logarithmic axis."""


def draw_sweeps(sweeps: Sequence[Sweep]) -> Figure | None:
    """Mean ACR at each value, with bars of ± one standard deviation over seeds; None without sweeps.

    A dashed line marks the run of plain Gaussian training.
    """
    if not sweeps:
        return None
    columns = min(3, len(sweeps))
    rows = -(-len(sweeps) // columns)
    figure = new_figure(3.6 * columns + 0.4, 3.0 * rows)
    grid: list[Axes] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axes in grid[len(sweeps) :]:
        axes.remove()
    for axes, sweep in zip(grid, sweeps, strict=False):
        _draw(axes, sweep)
    return figure


def _draw(axes: Axes, sweep: Sweep) -> None:
    values = [point.value for point in sweep.points]
    errors = [point.standard_deviation or 0.0 for point in sweep.points]
    acrs = [point.acr for point in sweep.points]
    axes.errorbar(values, acrs, errors if any(errors) else None, marker="o", color=FIRST, capsize=3, linewidth=1.6)
    if values[0] > 0 and values[-1] / values[0] >= _SPREAD:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    if sweep.reference is not None:
        name, acr = sweep.reference
        axes.axhline(acr, color=GREY, linestyle=(0, (4, 3)), linewidth=0.9)
        axes.annotate(
            plain(name), (1, acr), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
            ha="right", color=GREY, fontsize=NOTE_SIZE,
        )  # fmt: skip
    shared = [setting_text(key, value) for key, value in sweep.shared.items()]
    data = [dataset_name(sweep.dataset)] if sweep.dataset else []
    where = ", ".join([*data, f"σ = {sweep.sigma:g}", *shared])
    axes.set_title(plain(f"{METHODS.get(sweep.method, sweep.method)}: {where}"), fontsize=TITLE_SIZE)
    axes.set_xlabel(plain(setting_name(sweep.parameter)), fontsize=AXIS_SIZE)
    axes.set_ylabel("average certified L2 radius (ACR)", fontsize=AXIS_SIZE)
    axes.margins(y=0.15)
    quiet_axes(axes)
