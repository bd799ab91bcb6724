"""The course of training: loss, accuracy under noise and the other terms of the objective, from metrics.jsonl."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from smoothcert.report.labels import in_groups, labels_of, panel_titles
from smoothcert.report.looks import Look, looks_of
from smoothcert.report.names import shared_network
from smoothcert.report.style import GREY, TITLE_SIZE, axes_grid, legend_below, line_style, new_figure, plain, quiet_axes
from smoothcert.report.trained_run import TrainedRun, further_terms, learning_rate_drops
from smoothcert.training.metrics import Metrics

_LOSS, _ACCURACY = "loss", "noisy_accuracy"
_TITLES = {
    _LOSS: "training loss",
    _ACCURACY: "accuracy under noise (%)",
    "kl": "term: KL divergence",
    "mix": "term: mixed images",
    "mse": "term: squared difference",
    "robust": "term: robustness",
    "low": "term: images of low confidence",
    "high": "term: confident images",
}
_NOTES = (
    "losses of different methods are different functions: do not compare them",
    "accuracy: on each method's own training inputs, which are attacked images for methods that attack",
)
_NOTE_ON_TERMS = "terms: parts of the loss before weighting (a weight may be 0)"


def _draw_line(axes: Axes, metrics: Metrics, key: str, label: str, look: Look) -> None:
    scale = 100.0 if key == _ACCURACY else 1.0
    points = [(entry["epoch"], scale * entry[key]) for entry in metrics if math.isfinite(entry.get(key, math.nan))]
    if points:
        epochs, values = zip(*points, strict=True)
        axes.plot(epochs, values, color=look.colour, linestyle=line_style(look), linewidth=1.4, label=label)
        axes.lines[-1].set(marker="o" if len(points) == 1 else "", markersize=3)


def _scale_row(row: Sequence[Axes]) -> None:
    """A logarithmic axis for the losses of a row where all values are positive and differ at least tenfold."""
    values = np.array([value for axes in row for line in axes.get_lines() for value in np.asarray(line.get_ydata())])
    if not len(values) or values.min() <= 0 or values.max() < 10 * values.min():
        return
    for axes in row:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if values.max() < 1000 * values.min() else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _mark_drops(axes: Axes, runs: Sequence[TrainedRun]) -> list[Line2D]:
    stepped = [run for run in runs if run.recipe.get("schedule") != "cosine"]  # cosine: falls in every epoch
    drops = sorted({drop for run in stepped for drop in learning_rate_drops(run.metrics)})
    return [axes.axvline(drop, color=GREY, linewidth=0.7, linestyle=(0, (1, 2)), zorder=1) for drop in drops]


def _axes_grid(quantities: int, groups: int) -> tuple[Figure, list[list[Axes]]]:
    """Axes by [quantity][group]: one row per quantity and one column per group; for one group, three per row."""
    if groups == 1:
        figure, every = axes_grid(quantities, 3.1, 2.8)
        return figure, [[axes] for axes in every]
    figure = new_figure(3.1 * groups + 0.3, 2.2 * quantities + 0.3)
    return figure, figure.subplots(quantities, groups, sharex="col", sharey="row", squeeze=False).tolist()


def _set_titles(figure: Figure, grid: Sequence[Sequence[Axes]], titles: Sequence[str]) -> None:
    """Titles above the columns and epochs below them; one title if all axes are in one row."""
    if len(titles) == 1:
        figure.suptitle(titles[0], fontsize=TITLE_SIZE)
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title if len(titles) > 1 else "", fontsize=TITLE_SIZE)
    for axes in (axes for row in (grid if len(titles) == 1 else grid[-1:]) for axes in row):
        axes.set_xlabel("epoch")


def draw_training_curves(runs: Sequence[TrainedRun]) -> Figure | None:
    """The metrics of runs by epoch: training loss, accuracy under noise and each further term of the loss, in panels of
    their own; None if no run has metrics.

    One column of panels per sigma and data set; each point is a mean over an epoch, on training images under noise. A
    dotted line marks an epoch that starts with a lower learning rate. A run has the same look in all panels. Runs
    without metrics are left out.
    """
    labels = {name: plain(label) for name, label in labels_of(runs).items()}
    looks = looks_of(labels.values())
    groups = in_groups(run for run in runs if run.metrics)
    if not groups:
        return None
    terms = sorted({term for group in groups for run in group for term in further_terms(run.metrics)})
    quantities = [_LOSS, _ACCURACY, *terms]
    figure, grid = _axes_grid(len(quantities), len(groups))
    marks: list[Line2D] = []
    for quantity, row in zip(quantities, grid, strict=True):
        for axes, group in zip(row, groups, strict=True):
            quiet_axes(axes)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
            for run in group:
                _draw_line(axes, run.metrics, quantity, labels[run.name], looks[labels[run.name]])
        if quantity != _ACCURACY:
            _scale_row(row)
        for axes, group in zip(row, groups, strict=True):
            marks += _mark_drops(axes, group)
        row[0].set_ylabel(_TITLES.get(quantity, f"term: {plain(quantity)}"))

    titles = panel_titles([(group[0].group, shared_network(run.recipe for run in group)) for group in groups])
    _set_titles(figure, grid, [plain(title) for title in titles])
    notes = [*_NOTES, *([_NOTE_ON_TERMS] if terms else [])]
    legend_below(figure, [("learning rate drops", mark) for mark in marks[:1]], notes=notes)
    return figure
