"""Tables in the layout of the papers: sigma, run, ACR, certified accuracy in percent at each radius."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Protocol, TypeVar

from rich.table import Table

from smoothcert.errors import RequestError
from smoothcert.report.comparison import Published, PublishedOf, beside, published_columns
from smoothcert.report.layout import (
    UNKNOWN,
    Cell,
    Column,
    Layout,
    Value,
    decimals_needed,
    fitting,
    row_of,
    with_best_marked,
)
from smoothcert.report.rendering import comma_separated, latex, markdown, terminal
from smoothcert.report.summary import Summary

__all__ = [
    "CAPTION",
    "Cell",
    "Column",
    "Layout",
    "arranged",
    "by_sigma",
    "compact",
    "csv_table",
    "decimals_needed",
    "fitting",
    "intervals_layout",
    "latex_table",
    "layout",
    "markdown_table",
    "terminal_table",
]

CAPTION = "certified accuracy in % at each radius"
NOTHING: Mapping[str, Published] = {}


class Grouped(Protocol):
    """What a row is about: it has a group to be ranked in, sorted by sigma."""

    @property
    def sigma(self) -> float | None: ...
    @property
    def group(self) -> tuple[float, str]: ...
    @property
    def indices(self) -> frozenset[int]: ...
    @property
    def protocol(self) -> tuple[tuple[str, object], ...]: ...


Subject = TypeVar("Subject", bound=Grouped)


def by_sigma(subjects: Sequence[Subject]) -> list[Subject]:
    """Sorted by sigma, the unknown last, then by data set; in the given order within."""
    return sorted(subjects, key=lambda subject: subject.group)


def on_the_same_images(subjects: Sequence[Grouped]) -> bool:
    """Whether those of each group are, so that they can be ranked."""
    groups = {subject.group: subject.indices for subject in subjects}
    return all(groups[subject.group] == subject.indices for subject in subjects)


def differing_protocols(subjects: Sequence[Grouped]) -> list[str]:
    """What runs of one group were certified with differently, such as n; such runs are not ranked."""
    groups = {subject.group: dict(subject.protocol) for subject in subjects}
    pairs = [(subject.group, name, value) for subject in subjects for name, value in subject.protocol]
    return list(dict.fromkeys(name for group, name, value in pairs if groups[group].get(name) != value))


def compact(count: int) -> str:
    """A count in at most three digits and a letter, as in 100M; a dash where it is not known."""
    if not count:
        return UNKNOWN
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        # From 999.5 on, three digits of the smaller unit would read 1e+03.
        if count >= 0.9995 * unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)


def _accuracy_column(radius: float, decimals: int) -> Column:
    def percent(summary: Summary) -> Value:
        fraction = summary.accuracy_at.get(radius)
        return None if fraction is None else 100 * fraction

    label = f"{radius:.{decimals}f}"
    return Column(label, label, percent, decimals=1, radius=radius, ranked=True)


def _end(interval: Callable[[Summary], tuple[float, float] | None], which: int, scale: int) -> Callable[..., Value]:
    def end(summary: Summary) -> Value:
        ends = interval(summary)
        return None if ends is None else scale * ends[which]

    return end


def _interval(column: Column) -> Callable[[Summary], tuple[float, float] | None]:
    """The 95% interval, over images, of what `column` (ACR or an accuracy) shows."""
    radius = column.radius
    return (lambda s: s.acr_interval) if radius is None else (lambda s: s.accuracy_interval(radius))


def _interval_columns(column: Column) -> list[Column]:
    """For CSV: both ends of the interval."""
    scale = 1 if column.radius is None else 100
    keys = f"{column.key}_low", f"{column.key}_high"
    ends = [_end(_interval(column), which, scale) for which in (0, 1)]
    return [Column(key, key, end, column.decimals, csv_only=True) for key, end in zip(keys, ends, strict=True)]


def _heading(summaries: Sequence[Summary]) -> tuple[Column, Column, Column]:
    sigma_decimals = decimals_needed([s.sigma for s in summaries if s.sigma is not None])
    one_dataset = len({s.dataset for s in summaries} - {None}) < 2
    return (
        Column("sigma", "σ", lambda s: s.sigma, decimals=sigma_decimals),
        Column("dataset", "data set", lambda s: s.dataset, csv_only=one_dataset),
        Column("name", "run", lambda s: s.name),
    )


def _numbers(summaries: Sequence[Summary]) -> tuple[Column, ...]:
    """ACR and the accuracies."""
    radii = sorted({radius for summary in summaries for radius in summary.accuracy_at})
    decimals = decimals_needed(radii)
    acr = Column("acr", "ACR", lambda s: s.acr, decimals=3, ranked=True)
    return acr, *(_accuracy_column(radius, decimals) for radius in radii)


def _columns(summaries: Sequence[Summary], published_of: PublishedOf) -> tuple[Column, ...]:
    # A method that only repeats the name of the run says nothing; the paper's label says which variant it is.
    labels = {s.name: row.label for s in summaries if (row := published_of(s)) is not None}
    no_method = not labels and all(s.method is None or s.method == s.name for s in summaries)
    same_votes = len({s.votes for s in summaries}) == 1
    acr, *accuracies = numbers = _numbers(summaries)
    return (
        *_heading(summaries),
        Column(
            "method",
            "method",
            lambda s: s.method,
            csv_only=no_method,
            text=lambda s: labels.get(s.name, s.method or UNKNOWN),
        ),
        acr,
        Column("acr_standard_error", "±", lambda s: s.acr_standard_error, decimals=3, csv_only=True),
        *accuracies,
        Column("abstention", "abstain", lambda s: 100 * s.abstention, decimals=1),
        Column("images", "images", lambda s: s.images, decimals=0),
        Column("n", "n", lambda s: s.n, decimals=0, csv_only=True),
        Column("n0", "n0", lambda s: s.n0, decimals=0, csv_only=True),
        Column("alpha", "α", lambda s: s.alpha, decimals=3, csv_only=True),
        Column("split", "split", lambda s: s.split, csv_only=True),
        Column("precision", "precision", lambda s: s.precision, csv_only=True),
        Column(
            "votes",
            "votes",
            lambda s: s.votes or None,
            decimals=0,
            csv_only=same_votes,
            text=lambda s: compact(s.votes),
        ),
        *(end for column in numbers for end in _interval_columns(column)),
        *(published_columns(numbers, published_of) if labels else ()),
    )


def arranged(columns: Sequence[Column], subjects: Sequence[Subject], published_of: PublishedOf) -> Layout:
    """The rows of `subjects` in groups by sigma (unknown last), then in the given order, the best of each group marked,
    published rows under those that have one. Not ranked: runs without a recorded sigma, which may differ in it; runs on
    different images, which can matter more than how the network was trained; runs certified with different n, alpha,
    bound or noise, on which radii depend."""
    groups = []
    for _, members in groupby(by_sigma(subjects), key=lambda subject: subject.group):
        group = list(members)
        rows = [row_of(columns, subject) for subject in group]
        if group[0].sigma is not None and on_the_same_images(group) and not differing_protocols(group):
            rows = with_best_marked(columns, rows)
        found = [published_of(subject) for subject in group]
        groups.append(
            tuple(
                line
                for own, row in zip(rows, found, strict=True)
                for line in (own, *(() if row is None else beside(columns, own, row)))
            )
        )
    return Layout(tuple(columns), tuple(groups))


def layout(summaries: Sequence[Summary], published: Mapping[str, Published] = NOTHING) -> Layout:
    """The cells of every table; `published`: name of a run -> the row to show under it. Groups hold one sigma each."""
    if not summaries:
        raise RequestError("expected at least one run to tabulate, got none; give run folders or certificates files")

    def published_of(summary: Summary) -> Published | None:
        return published.get(summary.name)

    return arranged(_columns(summaries, published_of), summaries, published_of)


def intervals_layout(summaries: Sequence[Summary]) -> Layout:
    """The 95% confidence intervals over images, for reading: ACR and each accuracy as `low–high`."""

    def shown_interval(column: Column) -> Column:
        interval, scale = _interval(column), 1 if column.radius is None else 100

        def text(summary: Summary) -> str:
            ends = interval(summary)
            return UNKNOWN if ends is None else "–".join(f"{scale * end:.{column.decimals}f}" for end in ends)

        return Column(column.key, column.title, text, column.decimals, radius=column.radius, text=text)

    columns = (*_heading(summaries), *map(shown_interval, _numbers(summaries)))
    return arranged(columns, summaries, lambda summary: None)


def markdown_table(summaries: Sequence[Summary], published: Mapping[str, Published] = NOTHING) -> str:
    """A GitHub table; the best ACR and accuracies of each sigma are bold, where runs are ranked. Accuracies in %."""
    return markdown(layout(summaries, published))


def csv_table(summaries: Sequence[Summary], published: Mapping[str, Published] = NOTHING) -> str:
    """All numbers with ten digits, a header line first; accuracies in percent, unknown values empty."""
    return comma_separated(layout(summaries, published))


def latex_table(summaries: Sequence[Summary], published: Mapping[str, Published] = NOTHING) -> str:
    """A tabular for the booktabs package, a rule between sigmas; the best ACR and accuracies of each sigma are bold,
    where runs are ranked (see `arranged`)."""
    return latex(layout(summaries, published))


def terminal_table(
    summaries: Sequence[Summary], width: int = 100, published: Mapping[str, Published] = NOTHING
) -> Table:
    """The same table for a terminal of `width` columns, radii left out where it is too narrow for all."""
    return terminal(layout(summaries, published), width, CAPTION)
