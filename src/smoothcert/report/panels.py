"""What the figures of a report share: a panel for each sigma, one look a method, titles."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.errors import RequestError
from smoothcert.report.layout import decimals_needed
from smoothcert.report.style import AXIS_SIZE, TITLE_SIZE, Style, look, new_figure, plain, save_figure
from smoothcert.report.summary import Summary, summarize
from smoothcert.report.tables import by_sigma

Look = tuple[str, Style]


@dataclass(frozen=True, slots=True)
class Member:
    """One run in a panel: its label there, its numbers, its certificates."""

    label: str
    summary: Summary
    file: CertificatesFile


def short_labels(runs: Iterable[tuple[str, str | None, tuple[float, str]]]) -> dict[str, str]:
    """Name -> label for (name, method, group) triples with distinct names; a group (sigma, data set) is a panel.

    What is one thing at several sigmas gets one label, and so looks the same in all panels: a run is labelled by its
    method where no panel has two runs of that method, else by its name without the sigma at its end.
    """
    runs = list(runs)
    if len({name for name, _, _ in runs}) < len(runs):
        raise RequestError("expected a different name for each curve, got one name twice; rename one of them")
    repeated = {method for (method, _), count in Counter((m, panel) for _, m, panel in runs).items() if count > 1}
    repeated |= {name for name, method, _ in runs if method != name}
    taken = {name for name, _, _ in runs} | {method for _, method, _ in runs if method and method not in repeated}

    def label(name: str, method: str | None, sigma: float) -> str:
        if method and method not in repeated:
            return method
        stem, _, end = name.rpartition("-")
        return stem if stem and stem not in taken and _is_number(end, sigma) else name

    return {name: label(name, method, sigma) for name, method, (sigma, _) in runs}


def _is_number(text: str, number: float) -> bool:
    try:
        return float(text) == number
    except ValueError:
        return False


def panels_of(files: Sequence[tuple[str, CertificatesFile]]) -> list[list[Member]]:
    """One list a panel, by sigma (and data set, if there are several), runs in the given order."""
    if not files:
        raise RequestError("expected at least one certificates file to draw, got none; give one")
    summaries = [summarize(file, name, ()) for name, file in files]
    labels = short_labels((s.name, s.method, s.group) for s in summaries)
    named = dict(files)
    groups = groupby(by_sigma(summaries), key=lambda summary: summary.group)
    return [[Member(plain(labels[s.name]), s, named[s.name]) for s in members] for _, members in groups]


def looks_of(labels: Iterable[str]) -> dict[str, Look]:
    """Colour and line style for each label, by the order in which labels first appear."""
    distinct = dict.fromkeys(labels)
    return {label: look(i) for i, label in enumerate(distinct)}


def panel_titles(groups: Sequence[tuple[float | None, str | None]]) -> list[str]:
    """A title for each (sigma, data set); the data set is named where there are several."""
    several = len({dataset for _, dataset in groups} - {None}) > 1
    decimals = decimals_needed([sigma for sigma, _ in groups if sigma is not None])

    def title(sigma: float | None, dataset: str | None) -> str:
        text = "σ not recorded" if sigma is None else f"σ = {sigma:.{decimals}f}"
        return f"{dataset}, {text}" if several and dataset else text

    return [title(sigma, dataset) for sigma, dataset in groups]


def panel_grid(
    panels: Sequence[Sequence[Member]], x: str, y: str, extra_height: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """A figure with empty `panels` and their titles, row by row, at most three in a row.

    `x` is the name of every horizontal axis, `y` that of the common vertical one.
    """
    count = len(panels)
    columns = 2 if count == 4 else min(3, count)
    rows = -(-count // columns)
    width, height = (4.8, 3.5) if count == 1 else (3.1 * columns + 0.3, 2.9 * rows)
    figure = new_figure(width, height + extra_height * rows)
    grid: list[Axes] = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel().tolist()
    for axes in grid[count:]:
        axes.remove()
    titles = panel_titles([(panel[0].summary.sigma, panel[0].summary.compared_on) for panel in panels])
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(plain(title), fontsize=TITLE_SIZE)
        axes.set_xlabel(x, fontsize=AXIS_SIZE)
    for axes in grid[:count:columns]:
        axes.set_ylabel(y, fontsize=AXIS_SIZE)
    return figure, grid[:count]


def write_pictures(draw: Callable[[], Figure], paths: Sequence[Path]) -> None:
    """Draw once and write the picture to each of `paths`, as PNG, PDF or SVG by its ending, replaced atomically."""
    # Texts take their settings when they are made: a user's LaTeX must not read names as formulas.
    with matplotlib.rc_context({"text.usetex": False}):
        save_figure(draw(), paths)
