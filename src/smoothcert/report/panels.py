"""What the figures and the HTML page share: one panel per sigma and data set, its runs with their labels, its title."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from smoothcert.io.text import one_line
from smoothcert.report.layout import decimals_needed
from smoothcert.report.locate import run_recipe
from smoothcert.report.names import NamedRun, dataset_name, labels_of
from smoothcert.report.summary import Summary
from smoothcert.report.tables import by_sigma


@dataclass(frozen=True, slots=True)
class Member:
    """One run in a panel, with its label there."""

    label: str
    summary: Summary


def panels_of(summaries: Sequence[Summary]) -> list[list[Member]]:
    """One list per panel, by sigma (and data set, if there are several), runs in the given order."""
    labels = labels_of([NamedRun(s.name, s.method, run_recipe(s.file.path), s.group) for s in summaries])
    groups = groupby(by_sigma(summaries), key=lambda summary: summary.group)
    return [[Member(labels[s.name], s) for s in members] for _, members in groups]


def labels_of_runs(panels: Sequence[Sequence[Member]]) -> dict[str, str]:
    """Name of a run -> its label, on one line."""
    return {member.summary.name: one_line(member.label) for panel in panels for member in panel}


def titles_of(panels: Sequence[Sequence[Member]]) -> list[str]:
    """The titles of the panels that `panels_of` gives."""
    firsts = [panel[0].summary for panel in panels]
    titles = panel_titles([(first.sigma, first.dataset) for first in firsts])
    return [f"{title}, {first.apart}" if first.apart else title for title, first in zip(titles, firsts, strict=True)]


def panel_titles(groups: Sequence[tuple[float | None, str | None]]) -> list[str]:
    """A title for each (sigma, data set), as in "MNIST, σ = 0.50"."""
    decimals = decimals_needed([sigma for sigma, _ in groups if sigma is not None])

    def title(sigma: float | None, dataset: str | None) -> str:
        level = "σ not recorded" if sigma is None else f"σ = {sigma:.{decimals}f}"
        return level if dataset is None else f"{dataset_name(dataset)}, {level}"

    return [title(sigma, dataset) for sigma, dataset in groups]
