"""Hyper-parameters in which runs of one method differ: columns of tables, and ACR against those that are numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smoothcert.io.text import flattened
from smoothcert.report.layout import Value
from smoothcert.report.paired import obstacles
from smoothcert.report.summary import Summary

FEWEST_VALUES = 3
"""A figure of ACR against a hyper-parameter needs this many values of it."""
LOSS_FORM = "objective.form"
"""What the weight of a loss means depends on it, so a figure always names it."""
# These have columns of their own, or differ without changing what is compared.
_NOT_COLUMNS = ("sigma", "dataset", "seed", "objective.name")


@dataclass(frozen=True)
class Sweep:
    """Runs that share all but one numeric hyper-parameter (and the seed), and can be ranked."""

    parameter: str
    """As in "objective.weight"."""
    runs: Mapping[float, Sequence[Summary]]
    """Value of the parameter -> its runs, one per training seed; values ascend."""
    shared: Mapping[str, Value]
    """The other hyper-parameters that differ in the report, and the form of the loss, with their values here."""
    reference: Summary | None
    """A run of plain Gaussian training that can be compared with all others."""

    @property
    def first(self) -> Summary:
        """The first run: its method, sigma, data set and number of votes are those of all."""
        return next(iter(self.runs.values()))[0]


def with_hyperparameters(summaries: Sequence[Summary]) -> list[Summary]:
    """`summaries` with the hyper-parameters in which runs of the same method, sigma and data set differ.

    Files without a recipe have none. A run has only keys of its own recipe. Of a part that only some runs have, such as
    a sampler or an attack, those count in which the runs that have it differ: the name of the method says who has it.
    """
    recipes = {s.name: _flat(s.recipe) for s in summaries}
    differing: dict[str, None] = {}
    for members in _alike(summaries):
        known = [recipe for s in members if (recipe := recipes[s.name])]
        for key in (key for recipe in known for key in recipe):
            in_all = key.rpartition(".")[0] in ("", "objective")
            if len({repr(recipe.get(key)) for recipe in known if in_all or key in recipe}) > 1:
                differing[key] = None
    shown = [key for key in differing if key not in _NOT_COLUMNS]
    return [
        replace(s, hyperparameters={k: _value(recipes[s.name][k]) for k in shown if k in recipes[s.name]})
        for s in summaries
    ]


def sweeps(summaries: Sequence[Summary]) -> list[Sweep]:
    """ACR against each hyper-parameter of `with_hyperparameters` that takes three or more numbers, all else equal."""
    every_sweep = []
    for members in _alike(summaries):
        for parameter in dict.fromkeys(key for s in members for key in s.hyperparameters):
            groups: dict[str, list[Summary]] = {}
            for s in members:
                if isinstance(s.hyperparameters.get(parameter), int | float):
                    groups.setdefault(repr(sorted(_others(s, parameter).items())), []).append(s)
            for group in groups.values():
                values = {s.hyperparameters[parameter] for s in group}
                if len(values) >= FEWEST_VALUES and not obstacles(group):
                    every_sweep.append(_sweep(parameter, group, summaries))
    return every_sweep


def _alike(summaries: Sequence[Summary]) -> Iterator[list[Summary]]:
    """The runs of each method, sigma and data set; those without a known method or sigma are left out."""
    groups: dict[object, list[Summary]] = {}
    for s in summaries:
        if s.method is not None and s.sigma is not None:
            groups.setdefault((s.method, s.group), []).append(s)
    yield from groups.values()


def _others(summary: Summary, parameter: str) -> dict[str, Value]:
    return {key: value for key, value in summary.hyperparameters.items() if key != parameter}


def _sweep(parameter: str, group: Sequence[Summary], summaries: Sequence[Summary]) -> Sweep:
    """The sweep of `group`, whose runs share all but `parameter`; the reference is one of `summaries`."""
    runs_at: dict[float, list[Summary]] = {}
    for s in sorted(group, key=lambda s: float(s.hyperparameters[parameter] or 0)):
        runs_at.setdefault(float(s.hyperparameters[parameter] or 0), []).append(s)
    first = group[0]
    shared = _others(first, parameter)
    if form := _flat(first.recipe).get(LOSS_FORM):
        shared.setdefault(LOSS_FORM, form)
    plain = (s for s in summaries if s.method == "gaussian" and s.group == first.group and s not in group)
    return Sweep(parameter, runs_at, shared, next((s for s in plain if not obstacles([*group, s])), None))


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in flattened(recipe).items() if value is not None}


def _value(value: object) -> Value:
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else str(value)
