"""What the figures and the HTML page share: one panel per sigma and data set, its runs with their labels, its title."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smoothcert.io.text import one_line
from smoothcert.report.layout import decimals_needed
from smoothcert.report.names import NamedRun, dataset_name, labels_of, network_name
from smoothcert.report.summary import Summary, in_groups

_MOST_LETTERS = 55
"""Of a note above a panel."""


@dataclass(frozen=True, slots=True)
class Member:
    """One run in a panel, with its label there."""

    label: str
    summary: Summary


def panels_of(summaries: Sequence[Summary]) -> list[list[Member]]:
    """One list per panel, by sigma (and data set, if there are several), runs in the given order."""
    labels = labels_of([NamedRun(s.name, s.method, s.recipe, s.group) for s in summaries])
    return [[Member(labels[s.name], s) for s in members] for members in in_groups(summaries)]


def labels_of_runs(panels: Sequence[Sequence[Member]]) -> dict[str, str]:
    """Name of a run -> its label, on one line."""
    return {member.summary.name: one_line(member.label) for panel in panels for member in panel}


def titles_of(panels: Sequence[Sequence[Member]]) -> list[str]:
    """The titles of the panels that `panels_of` gives."""
    firsts = [panel[0].summary for panel in panels]
    networks = [shared_network(member.summary.recipe for member in panel) for panel in panels]
    titles = panel_titles([(s.sigma, s.dataset, network) for s, network in zip(firsts, networks, strict=True)])
    return [f"{title}, {first.apart}" if first.apart else title for title, first in zip(titles, firsts, strict=True)]


def shared_network(recipes: Iterable[Mapping[str, Any]]) -> str | None:
    """The name of the network that all `recipes` have; None if they differ or one has none."""
    models = {recipe.get("model") for recipe in recipes}
    model = models.pop() if len(models) == 1 else None
    return network_name(model) if isinstance(model, str) else None


def panel_titles(groups: Sequence[tuple[float | None, str | None, str | None]]) -> list[str]:
    """A title for each (sigma, data set, network), as in "MNIST, LeNet, σ = 0.50"."""
    decimals = decimals_needed([sigma for sigma, *_ in groups if sigma is not None])
    titles = []
    for sigma, dataset, network in groups:
        level = "σ not recorded" if sigma is None else f"σ = {sigma:.{decimals}f}"
        titles.append(", ".join(filter(None, (dataset and dataset_name(dataset), network, level))))
    return titles


def scope_text(runs: Sequence[tuple[str, Summary]]) -> str:
    """The numbers of images and votes of the runs (label, summary) of a panel, on two lines; runs with more images than
    the others are named where that is short."""
    by_count: dict[int, list[str]] = {}
    for label, summary in runs:
        by_count.setdefault(summary.images, []).append(label)
    few, *others = sorted(by_count)
    text = f"{few:,} images"
    if others:
        named = f"{text} ({others[-1]:,} for: {', '.join(by_count[others[-1]])})"
        short = len(others) == 1 and len(named) <= _MOST_LETTERS
        text = named if short else f"{few:,} to {others[-1]:,} images, see the table"
    votes = sorted({summary.n for _, summary in runs if summary.n is not None})
    if votes:
        most = f" to {votes[-1]:,}" if len(votes) > 1 else ""
        text += f"\nn = {votes[0]:,}{most} votes per image"
    return text
