"""The table over seeds: mean and standard deviation of ACR and accuracies, the difference from the reference."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from smoothcert.report.further_tables import ACR_DIFFERENCE, heading, minus_title, with_error
from smoothcert.report.layout import UNKNOWN, Column, Layout, Value
from smoothcert.report.paired import Comparison, obstacles
from smoothcert.report.published import Published
from smoothcert.report.seeds import SeedMean, from_reference, mean_difference
from smoothcert.report.summary import Summary
from smoothcert.report.tables import (
    NOTHING,
    arranged,
    before_and_after_results,
    hyperparameter_columns,
    joined,
    number_columns,
    part,
)

SEEDS_CAPTION = "mean ± sd over seeds; certified accuracy in % at each radius"
RANKED_SEEDS = "the best mean of each σ, if it differs significantly from every other (t-test over seeds, 5%)"
"""What bold means in the table over seeds."""
MEAN_DIFFERENCES = (
    "ACR − ...: difference of the mean ACR from that of the reference, with its standard error over seeds in brackets "
    "(the seeds of two methods are not paired). A star marks significant differences (Welch's t-test, 5%). The "
    "reference has a dash, and so have all others if it has one seed only."
)
"""What the column of differences in the table over seeds shows."""


def _spread_columns(column: Column) -> list[Column]:
    """A column that shows `mean ± sd` over seeds (ACR with 4 decimals: seeds change the third), and for CSV the sd."""
    decimals = 4 if column.radius is None else column.decimals

    def mean_and_sd(mean: SeedMean) -> tuple[float, float] | None:
        values = [value for s in mean.members if isinstance(value := column.value(s), int | float)]
        return (statistics.fmean(values), statistics.stdev(values)) if len(values) == len(mean.members) else None

    text = joined(mean_and_sd, " ± ", decimals)
    return [
        replace(column, value=part(mean_and_sd, 0), decimals=decimals, text=text),
        Column(f"{column.key}_sd", "sd", part(mean_and_sd, 1), decimals, csv_only=True),
    ]


def _mean_difference_columns(means: Sequence[SeedMean], comparisons: Sequence[Comparison]) -> list[Column]:
    """The difference of the mean ACR from that of the reference; for CSV what it consists of. None if no mean has a
    reference other than itself."""
    differences = from_reference(means, comparisons)
    if not differences:
        return []

    def number(mean: SeedMean, name: str) -> float | None:
        difference = differences.get(mean.members[0].name)
        return None if difference is None else getattr(difference.acr, name, None)

    def text(mean: SeedMean) -> str:
        difference = differences.get(mean.members[0].name)
        return UNKNOWN if difference is None else with_error(difference.acr, 4)

    known = [difference for difference in differences.values() if difference.acr is not None]
    title = minus_title(difference.reference for difference in known or differences.values())
    values: dict[str, Callable[[SeedMean], Value]] = {
        "reference": lambda m: getattr(differences.get(m.members[0].name), "reference", None),
        f"{ACR_DIFFERENCE}_standard_error": lambda m: number(m, "standard_error"),
        f"{ACR_DIFFERENCE}_degrees_of_freedom": lambda m: number(m, "degrees_of_freedom"),
    }
    return [
        Column(ACR_DIFFERENCE, title, lambda m: number(m, "value"), 4, text=text, folds_at=10),
        *(Column(key, key, value, csv_only=True) for key, value in values.items()),
    ]


def seeds_sentences(table: Layout) -> list[str]:
    """What bold and stars mean in a table over seeds."""
    return [f"Bold: {RANKED_SEEDS}.", *([MEAN_DIFFERENCES] if table.has(ACR_DIFFERENCE) else [])]


def seeds_layout(
    means: Sequence[SeedMean],
    published: Mapping[str, Published] = NOTHING,
    comparisons: Sequence[Comparison] = (),
) -> Layout:
    """One row per mean over seeds. `published` as for `layout`; a row is shown where all runs of a mean share it.

    `comparisons` have the reference runs; without them the table has no differences.
    """

    def published_of(mean: SeedMean) -> Published | None:
        rows = [published.get(summary.name) for summary in mean.members]
        same = len({None if row is None else (row.table, row.label) for row in rows}) == 1
        return rows[0] if same else None

    def method(mean: SeedMean) -> str:
        row = published_of(mean)
        return mean.members[0].named.label() or UNKNOWN if row is None else row.label

    def first(mean: SeedMean) -> Summary:
        return mean.members[0]

    members = [summary for mean in means for summary in mean.members]
    before, after = before_and_after_results(hyperparameter_columns(members, first))
    acr, *accuracies = number_columns(members)
    columns = (
        *heading(members, first),
        Column("name", "runs", lambda m: m.name),
        Column("method", "method", lambda m: m.members[0].method, text=method, left_out=1),
        *before,
        Column("seeds", "seeds", lambda m: len(m.members), decimals=0),
        *_spread_columns(acr),
        *_mean_difference_columns(means, comparisons),
        *(spread for column in accuracies for spread in _spread_columns(column)),
        Column("images", "images", lambda m: m.members[0].images, decimals=0, left_out=3, in_latex=False),
        *after,
    )
    return arranged(columns, means, published_of if published else None, _best_mean)


def _best_mean(means: Sequence[SeedMean], number: int, column: Column) -> bool:
    """Whether the mean exceeds every other of its group, beyond what seeds differ by chance."""
    if len(means) < 2 or obstacles([mean.members[0] for mean in means]):
        return False
    values = [
        [s.acr if column.radius is None else s.accuracy_at[column.radius] for s in mean.members] for mean in means
    ]
    leads = [mean_difference(values[number], other) for i, other in enumerate(values) if i != number]
    return all(lead.value > 0 and lead.significant for lead in leads)
