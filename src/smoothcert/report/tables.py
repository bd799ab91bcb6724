"""Tables in the layout of the papers: sigma, run, ACR, certified accuracy in percent at each radius."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from smoothcert.report.further_tables import csv_columns, heading
from smoothcert.report.labels import in_groups
from smoothcert.report.layout import UNKNOWN, Column, Layout, Row, Value, decimals_needed
from smoothcert.report.names import setting_titles, value_text
from smoothcert.report.paired import Comparison
from smoothcert.report.published import Published, minus, published_below
from smoothcert.report.seeds import SeedMean
from smoothcert.report.summary import Summary

CAPTION = "certified accuracy in % at each radius"
NUMBERS = (
    "Certified accuracy in % at each radius: the share of images that are classified correctly with a certified radius "
    "of at least that (at 0: correctly, without abstaining); a dash for radii that n votes or the rule cannot show. "
    "ACR: average certified radius, 0 where wrong or abstained."
)
RANKED = (
    "the best of each σ, if its paired difference from every other run is established, as explained below; runs on "
    "different images, or certified with different n, alpha, bound or noise, are not ranked"
)
"""What bold means in the table of runs."""
MOST_BEFORE_RESULTS = 4
"""Tables of the papers have up to four columns of hyper-parameters before the results."""
NAME = Column("name", "run", lambda subject: subject.name)
NOTHING: Mapping[str, Published] = {}
PublishedOf = Callable[[Any], Published | None]
"""From the subject of a row (a run, a mean over seeds) to its published row; None if the table has none."""
Subject = TypeVar("Subject", bound=Summary | SeedMean)


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
        fraction = summary.shown_accuracy(radius)
        return None if fraction is None else 100 * fraction

    label = f"{radius:.{decimals}f}"
    return Column(label, label, percent, decimals=1, radius=radius, ranked=True, shaded=True)


def part(pair: Callable[[Any], tuple[float, float] | None], which: int) -> Callable[[Any], Value]:
    """The first or second number of what `pair` gives for a subject."""
    return lambda subject: None if (numbers := pair(subject)) is None else numbers[which]


def joined(pair: Callable[[Any], tuple[float, float] | None], sign: str, decimals: int | None) -> Callable[[Any], str]:
    """Both numbers as text, with `sign` between them."""
    return lambda subject: (
        UNKNOWN if (numbers := pair(subject)) is None else sign.join(f"{x:.{decimals}f}" for x in numbers)
    )


def _interval_columns(column: Column) -> list[Column]:
    """For CSV: both ends of the 95% interval of a number."""
    ends = {f"{column.key}_{end}": which for which, end in enumerate(("low", "high"))}
    return [
        Column(key, key, part(lambda s: s.interval(column.radius), which), column.decimals, csv_only=True)
        for key, which in ends.items()
    ]


def _interval_column(column: Column) -> Column:
    """For reading: the 95% interval of a number as `low–high`."""
    text = joined(lambda s: s.interval(column.radius), "–", column.decimals)
    return Column(column.key, column.title, text, column.decimals, radius=column.radius, text=text)


def number_columns(summaries: Sequence[Summary]) -> list[Column]:
    """ACR and the accuracies."""
    radii = sorted({radius for summary in summaries for radius in summary.accuracy_at})
    decimals = decimals_needed(radii)
    acr = Column("acr", "ACR", lambda s: s.acr, decimals=3, ranked=True)
    return [acr, *(_accuracy_column(radius, decimals) for radius in radii)]


def hyperparameter_columns(summaries: Sequence[Summary], of: Callable[[Any], Summary] = lambda s: s) -> list[Column]:
    """One column per hyper-parameter in which runs differ, titled as in the papers; `of` gives the run of a row."""
    of_own_methods = {key for s in summaries if s.named.own_method for key in s.hyperparameters}
    titles = setting_titles(dict.fromkeys(key for s in summaries for key in s.hyperparameters), of_own_methods)

    def column(key: str, title: str) -> Column:
        def text(row: Any) -> str:
            value = of(row).hyperparameters.get(key)
            return UNKNOWN if value is None else value_text(value)

        in_method = key == "objective.one_step"  # as in "SmoothMix (η = 5), one-step"
        return Column(key, title, lambda r: of(r).hyperparameters.get(key), csv_only=in_method, text=text, left_out=4)

    return [column(key, title) for key, title in titles.items()]


def before_and_after_results(settings: Sequence[Column]) -> tuple[list[Column], list[Column]]:
    """Divide the hyper-parameters: those of training follow the results if there are too many of them."""
    if sum(not column.csv_only for column in settings) <= MOST_BEFORE_RESULTS:
        return list(settings), []
    of_method = [column for column in settings if column.key.startswith("objective.")]
    return of_method, [column for column in settings if column not in of_method]


def _columns(
    summaries: Sequence[Summary],
    published: Mapping[str, Published],
    comparisons: Sequence[Comparison],
) -> tuple[Column, ...]:
    # A method that only repeats the name of the run says nothing; the paper's label says which variant it is.
    no_method = not published and all(s.method is None or s.method == s.name for s in summaries)
    same_votes = len({s.votes for s in summaries}) == 1
    l_infinity = Column("acr_l_infinity", "ACR in L∞", lambda s: s.l_infinity, decimals=4)
    acr, *accuracies = numbers = number_columns(summaries)
    before, after = before_and_after_results(hyperparameter_columns(summaries))

    def method(summary: Summary) -> str:
        row = published.get(summary.name)
        return summary.named.label() or UNKNOWN if row is None else row.label

    def votes(summary: Summary) -> str:
        return compact(summary.votes)

    return (
        *heading(summaries),
        NAME,
        Column("method", "method", lambda s: s.method, csv_only=no_method, text=method, left_out=1),
        *before,
        acr,
        Column("acr_standard_error", "±", lambda s: s.acr_standard_error, decimals=3, csv_only=True),
        *([l_infinity] if any(s.l_infinity is not None for s in summaries) else []),
        *accuracies,
        Column("abstention", "abstain", lambda s: 100 * s.abstention, decimals=1, left_out=3, in_latex=False),
        Column("images", "images", lambda s: s.images, decimals=0, left_out=3, in_latex=False),
        *after,
        Column("n", "n", lambda s: s.n, decimals=0, csv_only=True),
        Column("n0", "n0", lambda s: s.n0, decimals=0, csv_only=True),
        Column("alpha", "α", lambda s: s.alpha, decimals=3, csv_only=True),
        Column("split", "split", lambda s: s.split, csv_only=True),
        Column("precision", "precision", lambda s: s.precision, csv_only=True),
        Column(
            "votes",
            "votes in all",
            lambda s: s.votes or None,
            0,
            csv_only=same_votes,
            text=votes,
            left_out=2,
            in_latex=False,
        ),
        *(end for column in numbers for end in _interval_columns(column)),
        *csv_columns(comparisons),
    )


def _published_columns(columns: Sequence[Column], published: PublishedOf) -> list[Column]:
    """For CSV: the row of a paper's table that a subject reproduces, its numbers, and ours minus these."""

    def printed(subject: object, column: Column) -> float | None:
        return None if (row := published(subject)) is None else row.at(column.radius)

    values: dict[str, Callable[[Any], Value]] = {
        "published_table": lambda s: getattr(published(s), "table", None),
        "published_row": lambda s: getattr(published(s), "label", None),
    }
    for column in columns:
        if column.ranked:
            values[f"published_{column.key}"] = partial(printed, column=column)
            values[f"{column.key}_difference"] = lambda s, c=column: minus(c.value(s), printed(s, c))  # type: ignore[misc]
    return [Column(key, key, value, csv_only=True) for key, value in values.items()]


def arranged(
    columns: Sequence[Column],
    subjects: Sequence[Subject],
    published: PublishedOf | None = None,
    is_best: Callable[[Sequence[Subject], int, Column], bool] = lambda group, number, column: False,
) -> Layout:
    """The rows of `subjects` in groups by sigma (unknown last), then in the given order.

    The cells of ranked columns that have a value and for which `is_best` holds, with the group and the number of the
    subject in it, are marked. Published rows are under those that have one; in CSV they are further columns.
    """
    if published is not None:
        columns = [*columns, *_published_columns(columns, published)]
    groups = []
    for group in in_groups(subjects):
        rows: list[Row] = []
        for number, subject in enumerate(group):
            cells = [(column, column.cell(subject)) for column in columns]
            row = tuple(
                replace(cell, best=c.ranked and cell.value is not None and is_best(group, number, c))
                for c, cell in cells
            )
            printed = None if published is None else published(subject)
            rows += [row] if printed is None else [row, *published_below(columns, row, printed)]
        groups.append(tuple(rows))
    return Layout(tuple(columns), tuple(groups))


def layout(
    summaries: Sequence[Summary],
    published: Mapping[str, Published] = NOTHING,
    comparisons: Sequence[Comparison] = (),
) -> Layout:
    """The table of the runs; `published`: name of a run -> the row to show under it.

    `comparisons` say which runs are significantly the best; without them no cell is marked.
    """
    published = {s.name: published[s.name] for s in summaries if s.name in published}
    published_of = (lambda summary: published.get(summary.name)) if published else None
    best = {(b.name, b.radius) for c in comparisons for b in c.best if b.significant}

    def is_best(group: Sequence[Summary], number: int, column: Column) -> bool:
        return (group[number].name, column.radius) in best

    return arranged(_columns(summaries, published, comparisons), summaries, published_of, is_best)


def intervals_layout(summaries: Sequence[Summary]) -> Layout:
    """The 95% confidence intervals over images, for reading: ACR and each accuracy as `low–high`."""
    columns = (*heading(summaries), NAME, *map(_interval_column, number_columns(summaries)))
    return arranged(columns, summaries)
