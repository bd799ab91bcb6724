"""Tables in the layout of the papers: sigma, run, ACR, certified accuracy in percent at each radius."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from smoothcert.errors import RequestError
from smoothcert.report.comparison import Published, published_below
from smoothcert.report.layout import UNKNOWN, Cell, Column, Layout, Row, Value, decimals_needed, with_best_marked
from smoothcert.report.seeds import SeedMean
from smoothcert.report.summary import Summary

CAPTION = "certified accuracy in % at each radius"
SEEDS_CAPTION = "mean ± sd over seeds; certified accuracy in % at each radius"
NOTHING: Mapping[str, Published] = {}
PublishedOf = Callable[[Any], Published | None]
"""From the subject of a row (a run, a mean over seeds) to its published row; None if the table has none."""
Subject = TypeVar("Subject", bound=Summary | SeedMean)


def by_sigma(summaries: Sequence[Summary]) -> list[Summary]:
    """Sorted by sigma, unknown ones last, then by data set; otherwise in the given order."""
    return sorted(summaries, key=lambda summary: summary.group)


def on_the_same_images(summaries: Sequence[Summary]) -> bool:
    """Whether the runs of each group are on the same images, so that they can be ranked."""
    groups = {summary.group: summary.indices for summary in summaries}
    return all(groups[summary.group] == summary.indices for summary in summaries)


def differing_protocols(summaries: Sequence[Summary]) -> list[str]:
    """The settings, such as n, in which runs of one group differ; such runs are not ranked."""
    groups = {summary.group: dict(summary.protocol) for summary in summaries}
    settings = [(summary.group, name, value) for summary in summaries for name, value in summary.protocol]
    return list(dict.fromkeys(name for group, name, value in settings if groups[group].get(name) != value))


def compact(count: int) -> str:
    """A count with at most three digits and a letter, as in 100M; a dash for an unknown one."""
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


def _part(pair: Callable[[Any], tuple[float, float] | None], which: int) -> Callable[[Any], Value]:
    """The first or second number of what `pair` gives for a subject."""
    return lambda subject: None if (numbers := pair(subject)) is None else numbers[which]


def _joined(pair: Callable[[Any], tuple[float, float] | None], sign: str, decimals: int | None) -> Callable[[Any], str]:
    """Both numbers as text, with `sign` between them."""
    return lambda subject: (
        UNKNOWN if (numbers := pair(subject)) is None else sign.join(f"{x:.{decimals}f}" for x in numbers)
    )


def _interval_columns(column: Column) -> list[Column]:
    """For CSV: both ends of the 95% interval of a number."""
    ends = {f"{column.key}_{end}": which for which, end in enumerate(("low", "high"))}
    return [
        Column(key, key, _part(lambda s: s.interval(column.radius), which), column.decimals, csv_only=True)
        for key, which in ends.items()
    ]


def _interval_column(column: Column) -> Column:
    """For reading: the 95% interval of a number as `low–high`."""
    text = _joined(lambda s: s.interval(column.radius), "–", column.decimals)
    return Column(column.key, column.title, text, column.decimals, radius=column.radius, text=text)


def _spread_columns(column: Column) -> list[Column]:
    """A column that shows `mean ± sd` over seeds (ACR with 4 decimals: seeds change the third), and for CSV the sd."""
    decimals = 4 if column.radius is None else column.decimals

    def mean_and_sd(mean: SeedMean) -> tuple[float, float] | None:
        values = [value for s in mean.members if isinstance(value := column.value(s), int | float)]
        return (statistics.fmean(values), statistics.stdev(values)) if len(values) == len(mean.members) else None

    text, key, radius = _joined(mean_and_sd, " ± ", decimals), column.key, column.radius
    return [
        Column(key, column.title, _part(mean_and_sd, 0), decimals, radius=radius, ranked=True, text=text),
        Column(f"{key}_sd", "sd", _part(mean_and_sd, 1), decimals, csv_only=True),
    ]


def _heading(summaries: Sequence[Summary]) -> tuple[Column, Column, Column]:
    sigma_decimals = decimals_needed([s.sigma for s in summaries if s.sigma is not None])
    one_dataset = len({s.dataset for s in summaries} - {None}) < 2
    return (
        Column("sigma", "σ", lambda s: s.sigma, decimals=sigma_decimals),
        Column("dataset", "data set", lambda s: s.dataset, csv_only=one_dataset),
        Column("name", "run", lambda s: s.name),
    )


def _numbers(summaries: Sequence[Summary]) -> list[Column]:
    """ACR and the accuracies."""
    radii = sorted({radius for summary in summaries for radius in summary.accuracy_at})
    decimals = decimals_needed(radii)
    acr = Column("acr", "ACR", lambda s: s.acr, decimals=3, ranked=True)
    return [acr, *(_accuracy_column(radius, decimals) for radius in radii)]


def _columns(summaries: Sequence[Summary], published: Mapping[str, Published]) -> tuple[Column, ...]:
    # A method that only repeats the name of the run says nothing; the paper's label says which variant it is.
    no_method = not published and all(s.method is None or s.method == s.name for s in summaries)
    same_votes = len({s.votes for s in summaries}) == 1
    acr, *accuracies = numbers = _numbers(summaries)

    def method(summary: Summary) -> str:
        row = published.get(summary.name)
        return (summary.method or UNKNOWN) if row is None else row.label

    def votes(summary: Summary) -> str:
        return compact(summary.votes)

    return (
        *_heading(summaries),
        Column("method", "method", lambda s: s.method, csv_only=no_method, text=method),
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
        Column("votes", "votes", lambda s: s.votes or None, decimals=0, csv_only=same_votes, text=votes),
        *(end for column in numbers for end in _interval_columns(column)),
    )


def _arranged(
    columns: Sequence[Column],
    subjects: Sequence[Subject],
    run_of: Callable[[Subject], Summary],
    published: PublishedOf | None,
) -> Layout:
    """The rows of `subjects` in groups by sigma (unknown last), then in the given order, the best of each group marked,
    published rows under those that have one (in CSV as further columns). `run_of` gives the run, or one of the runs,
    that a subject is about.

    Not ranked: runs without a recorded sigma, which may differ in it; runs on different images, which can matter more
    than how the network was trained; runs certified with different n, alpha, bound or noise, on which radii depend.
    """
    groups = []
    numbers = [] if published is None else [i for i, column in enumerate(columns) if column.ranked]
    for _, members in groupby(sorted(subjects, key=lambda s: run_of(s).group), key=lambda s: run_of(s).group):
        group = list(members)
        runs = [run_of(subject) for subject in group]
        rows = [tuple(column.cell(subject) for column in columns) for subject in group]
        if runs[0].sigma is not None and on_the_same_images(runs) and not differing_protocols(runs):
            rows = with_best_marked(columns, rows)
        lines: list[Row] = []
        for subject, row in zip(group, rows, strict=True):
            printed = None if published is None else published(subject)
            aside = () if printed is None else published_below(columns, row, printed)
            texts = () if published is None else (getattr(printed, key, None) for key in ("table", "label"))
            values = [line[i].value for i in numbers for line in aside] or [None] * (2 * len(numbers))
            lines += [(*row, *(Cell(value, "") for value in (*texts, *values))), *aside]
        groups.append(tuple(lines))
    keys = ["published_table", "published_row"]
    keys += [key for i in numbers for key in (f"published_{columns[i].key}", f"{columns[i].key}_difference")]
    further = () if published is None else (Column(key, key, csv_only=True) for key in keys)
    return Layout((*columns, *further), tuple(groups))


def layout(summaries: Sequence[Summary], published: Mapping[str, Published] = NOTHING) -> Layout:
    """The table of the runs; `published`: name of a run -> the row to show under it."""
    if not summaries:
        raise RequestError("expected at least one run to tabulate, got none; give run folders or certificates files")

    published = {s.name: published[s.name] for s in summaries if s.name in published}
    published_of = (lambda summary: published.get(summary.name)) if published else None
    return _arranged(_columns(summaries, published), summaries, lambda summary: summary, published_of)


def intervals_layout(summaries: Sequence[Summary]) -> Layout:
    """The 95% confidence intervals over images, for reading: ACR and each accuracy as `low–high`."""
    columns = (*_heading(summaries), *map(_interval_column, _numbers(summaries)))
    return _arranged(columns, summaries, lambda summary: summary, None)


def seeds_layout(means: Sequence[SeedMean], published: Mapping[str, Published] = NOTHING) -> Layout:
    """One row per mean over seeds. `published` as for `layout`; a row is shown where all runs of a mean share it."""

    def published_of(mean: SeedMean) -> Published | None:
        rows = [published.get(summary.name) for summary in mean.members]
        same = len({None if row is None else (row.table, row.label) for row in rows}) == 1
        return rows[0] if same else None

    def method(mean: SeedMean) -> str:
        row = published_of(mean)
        return (mean.members[0].method or UNKNOWN) if row is None else row.label

    members = [summary for mean in means for summary in mean.members]
    sigmas = [summary.sigma for summary in members if summary.sigma is not None]
    one_dataset = len({summary.dataset for summary in members}) < 2
    numbers = [spread for column in _numbers(members) for spread in _spread_columns(column)]
    columns = (
        Column("sigma", "σ", lambda m: m.members[0].sigma, decimals_needed(sigmas)),
        Column("dataset", "data set", lambda m: m.members[0].dataset, csv_only=one_dataset),
        Column("name", "runs", lambda m: m.name),
        Column("method", "method", lambda m: m.members[0].method, text=method),
        Column("seeds", "seeds", lambda m: len(m.members), decimals=0),
        *numbers,
        Column("images", "images", lambda m: m.members[0].images, decimals=0),
    )
    return _arranged(columns, means, lambda mean: mean.members[0], published_of if published else None)
