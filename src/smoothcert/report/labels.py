"""The labels of runs and the titles of panels in figures and pages; which runs belong to one panel."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from smoothcert.io.text import counted, flattened
from smoothcert.report.layout import decimals_needed
from smoothcert.report.names import dataset_name, method_name, network_name, setting_text, shared_network

if TYPE_CHECKING:
    from smoothcert.report.summary import Summary

Panel = Sequence[tuple[str, "Summary"]]
"""The label and the summary of each run of a panel."""
_NOT_SHOWN = ("name", "sigma", "dataset", "noise")
_MOST_SETTINGS = 3
"""Of a label: runs of a method that differ in more have their names instead."""


@dataclass(frozen=True, slots=True)
class NamedRun:
    """What the label of a run depends on: its distinct name, its method and recipe if known, its panel."""

    name: str
    method: str | None
    recipe: Mapping[str, Any]
    group: tuple[float, str]

    @property
    def title(self) -> str | None:
        """The name of the method without its hyper-parameters; None if the method is not known."""
        if self.method is None:
            return None
        adversarial = self.method == "consistency" and self.objective.get("adversary")
        parts = ["SmoothAdv"] if adversarial else []
        trained, behind, _ = self.method.partition(" + denoiser")
        parts += [method_name(trained), *(["denoiser"] if behind else [])]
        parts += ["attacked noise"] if self.objective.get("noise_attack") else []
        parts += ["weighted images"] if self.settings.get("sampler.name") == "radius-weighted" else []
        return " + ".join(parts)

    @property
    def settings(self) -> dict[str, Any]:
        """The hyper-parameters of the objective, then the other fields of the recipe, without nesting."""
        training = {key: value for key, value in self.recipe.items() if key != "objective" and value is not None}
        every = {**flattened(self.objective), **flattened(training)}
        return {key: value for key, value in every.items() if key not in _NOT_SHOWN}

    @property
    def own_method(self) -> bool:
        """Whether the method is a user's own: its hyper-parameters may mean something else than the papers' letters."""
        return ":" in str(self.objective.get("name"))

    @property
    def objective(self) -> Mapping[str, Any]:
        """The method and its hyper-parameters in the recipe; {} if the recipe has none, or only the name."""
        objective = self.recipe.get("objective")
        return objective if isinstance(objective, Mapping) else {}

    def label(self, keys: Sequence[str] = ()) -> str | None:
        """The name of the method with the hyper-parameters `keys`, as in "SmoothMix (η = 5), one-step"."""
        if self.title is None:
            return None
        settings = self.settings
        shown = [key for key in dict.fromkeys(("eta", *keys)) if key in settings and key != "one_step"]
        details = ", ".join(setting_text(key, settings[key], self.own_method) for key in shown)
        ending = ", one-step" if settings.get("one_step") else ""
        return f"{self.title}{f' ({details})' if details else ''}{ending}"


class Grouped(Protocol):
    """What belongs to a panel or a group of rows, such as a run."""

    @property
    def group(self) -> tuple[float, str]: ...


G = TypeVar("G", bound=Grouped)


def by_sigma(runs: Iterable[G]) -> list[G]:
    """Sorted by sigma, unknown ones last, then by data set; otherwise in the given order."""
    return sorted(runs, key=lambda run: run.group)


def in_groups(runs: Iterable[G]) -> list[list[G]]:
    """The runs that can be compared, `by_sigma`."""
    return [list(members) for _, members in groupby(by_sigma(runs), key=lambda run: run.group)]


def labels_of(runs: Sequence[NamedRun]) -> dict[str, str]:
    """Name of a run -> its label, distinct within a panel and independent of the order of the runs.

    Runs that differ only in sigma share a label, and so look the same in all panels. The label is the method; where a
    panel has several runs of a method, with the hyper-parameters that differ, or with the name of the run if many
    differ; where none differ, or the method is not known, the name of the run without the sigma at its end. In a panel
    with several networks, the networks other than the most common one are named as well.
    """
    families: dict[tuple[str | None, str], list[NamedRun]] = {}
    networks = _named_networks(runs)
    for run in runs:
        families.setdefault((run.label(), networks[run.name]), []).append(run)
    differing = {run.name: _differing(family) for family in families.values() for run in family}
    methods = {run.name: _method_label(run, differing[run.name]) for run in runs}
    labels = {
        run.name: _without_sigma(run) if methods[run.name] is None else f"{methods[run.name]}{networks[run.name]}"
        for run in runs
    }
    fallbacks: tuple[Callable[[NamedRun], str], ...] = (_without_sigma, lambda run: run.name)
    for fallback in fallbacks:
        # A name may repeat a label that was distinct before.
        while twice := [run for run in _repeated(runs, labels) if labels[run.name] != fallback(run)]:
            labels |= {run.name: fallback(run) for run in twice}
    return labels


def _method_label(run: NamedRun, differing: Sequence[str]) -> str | None:
    """The method with the settings in which its runs differ, or with the name of the run if these are many."""
    if len(differing) <= _MOST_SETTINGS or run.title is None:
        return run.label(differing)
    name = _without_sigma(run)
    return run.title if name.lower() == run.title.lower() else f"{run.title} ({name})"


def _differing(runs: Sequence[NamedRun]) -> list[str]:
    """The fields in which runs of one panel differ: of the objective, or of the recipe if these do not suffice."""
    panels: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for run in runs:
        panels.setdefault(run.group, []).append(run.settings)
    objective = {key for run in runs for key in flattened(run.objective)}
    keys = dict.fromkeys(key for settings in panels.values() for one in settings for key in one)
    differ = [key for key in keys if any(len({repr(one.get(key)) for one in panel}) > 1 for panel in panels.values())]
    of_objective = [key for key in differ if key in objective]
    apart = all(
        len({repr([one.get(key) for key in of_objective]) for one in panel}) == len(panel) for panel in panels.values()
    )
    return of_objective if apart else differ


def _named_networks(runs: Sequence[NamedRun]) -> dict[str, str]:
    """Name of a run -> ", " and its network, if it shares a panel with others and is not the most common one."""
    panels: dict[tuple[float, str], set[str]] = {}
    models = {run.name: str(run.recipe["model"]) for run in runs if run.recipe.get("model")}
    for run in runs:
        panels.setdefault(run.group, set()).update([models[run.name]] if run.name in models else [])
    mixed = {model for panel in panels.values() if len(panel) > 1 for model in panel}
    counts = Counter(model for model in models.values() if model in mixed).most_common(2)
    if len(counts) == 2 and counts[0][1] > counts[1][1]:
        mixed.discard(counts[0][0])
    return {run.name: f", {network_name(models[run.name])}" if models.get(run.name) in mixed else "" for run in runs}


def _repeated(runs: Sequence[NamedRun], labels: Mapping[str, str]) -> list[NamedRun]:
    """The runs whose label occurs twice in their panel."""
    counts = Counter((run.group, labels[run.name]) for run in runs)
    return [run for run in runs if counts[run.group, labels[run.name]] > 1]


def _without_sigma(run: NamedRun) -> str:
    stem, _, end = run.name.rpartition("-")
    try:
        return stem if stem and float(end) == run.group[0] else run.name
    except ValueError:
        return run.name


def panels_of(summaries: "Sequence[Summary]") -> list[Panel]:
    """One panel per sigma (and data set, if there are several), runs in the given order."""
    labels = labels_of([summary.named for summary in summaries])
    return [[(labels[s.name], s) for s in members] for members in in_groups(summaries)]


def titles_of(panels: Sequence[Panel]) -> list[str]:
    """The titles of the panels that `panels_of` gives."""
    firsts = [panel[0][1] for panel in panels]
    networks = [shared_network(summary.recipe for _, summary in panel) for panel in panels]
    titles = panel_titles([((s.group[0], s.dataset), net) for s, net in zip(firsts, networks, strict=True)])
    return [", ".join(filter(None, (title, s.apart))) for title, s in zip(titles, firsts, strict=True)]


def panel_titles(groups: Sequence[tuple[tuple[float, str | None], str | None]]) -> list[str]:
    """A title for each ((sigma, data set), network), as in "MNIST, LeNet, σ = 0.50"; an unknown sigma is infinite."""
    decimals = decimals_needed([sigma for (sigma, _), _ in groups if math.isfinite(sigma)])
    titles = []
    for (sigma, dataset), network in groups:
        level = f"σ = {sigma:.{decimals}f}" if math.isfinite(sigma) else "σ not recorded"
        titles.append(", ".join(filter(None, (dataset and dataset_name(dataset), network, level))))
    return titles


def facts_of(summaries: "Sequence[Summary]") -> list[str]:
    """Data, network, norm, images, n and alpha of some runs, as in "MNIST", "1,000 and 10,000 images"; what is not
    recorded is left out."""

    def listed(values: Iterable[object], text: str = "{}") -> list[str]:
        known = dict.fromkeys(value for value in values if value is not None)
        texts = [f"{value:,}" if isinstance(value, int) else f"{value}" for value in known]
        return [text.format(" and ".join(texts))] if texts else []

    models = [summary.file.settings.get("model") for summary in summaries]
    images = sorted({summary.images for summary in summaries})
    return [
        *listed(None if s.dataset is None else dataset_name(s.dataset) for s in summaries),
        *listed(None if model is None else network_name(str(model)) for model in models),
        *listed((s.norm for s in summaries), "{} radii"),
        *listed(images, "{} image" if images == [1] else "{} images"),
        *listed(sorted({s.n for s in summaries if s.n is not None}), "n = {} votes"),
        *listed(sorted({s.alpha for s in summaries if s.alpha is not None}), "α = {}"),
    ]


def scope_text(summaries: "Iterable[Summary]") -> str:
    """The numbers of images and votes of some runs, on two lines."""
    runs = list(summaries)
    images = sorted({run.images for run in runs})
    votes = sorted({run.n for run in runs if run.n is not None})
    text = counted(images[0], "image")
    if len(images) > 1:
        text = f"{images[0]:,} to {images[-1]:,} images, see the table"
    if votes:
        most = f" to {votes[-1]:,}" if len(votes) > 1 else ""
        text += f"\nn = {votes[0]:,}{most} votes per image"
    return text
