"""What the figures and the HTML page share: one panel per sigma and data set, labels of runs, titles."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from smoothcert.errors import RequestError
from smoothcert.report.layout import decimals_needed
from smoothcert.report.summary import Summary
from smoothcert.report.tables import by_sigma


@dataclass(frozen=True, slots=True)
class Member:
    """One run in a panel, with its label there."""

    label: str
    summary: Summary


def short_labels(runs: Iterable[tuple[str, str | None, tuple[float, str]]]) -> dict[str, str]:
    """Name -> label for (name, method, group) triples with distinct names; a group (sigma, data set) is a panel.

    Runs that differ only in sigma share a label, and so look the same in all panels: the label of a run is its method
    if no panel has two runs of that method, otherwise its name without the sigma at the end.
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


def panels_of(summaries: Sequence[Summary]) -> list[list[Member]]:
    """One list per panel, by sigma (and data set, if there are several), runs in the given order."""
    labels = short_labels((s.name, s.method, s.group) for s in summaries)
    groups = groupby(by_sigma(summaries), key=lambda summary: summary.group)
    return [[Member(labels[s.name], s) for s in members] for _, members in groups]


def titles_of(panels: Sequence[Sequence[Member]]) -> list[str]:
    """The titles of the panels that `panels_of` gives."""
    return panel_titles([(panel[0].summary.sigma, panel[0].summary.compared_on) for panel in panels])


def panel_titles(groups: Sequence[tuple[float | None, str | None]]) -> list[str]:
    """A title for each (sigma, data set); it has the data set if there are several."""
    several = len({dataset for _, dataset in groups} - {None}) > 1
    decimals = decimals_needed([sigma for sigma, _ in groups if sigma is not None])

    def title(sigma: float | None, dataset: str | None) -> str:
        text = "σ not recorded" if sigma is None else f"σ = {sigma:.{decimals}f}"
        return f"{dataset}, {text}" if several and dataset else text

    return [title(sigma, dataset) for sigma, dataset in groups]
