"""Tables of a report after the first: differences from a reference run, the best runs, classes, the number of votes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smoothcert.report.comparison import signed
from smoothcert.report.layout import UNKNOWN, Column, Layout, Value, decimals_needed
from smoothcert.report.numbers import FEWER_VOTES, AccuracyAt, ClassNumbers, RunNumbers
from smoothcert.report.paired import Best, Comparison, Difference, PairedRun
from smoothcert.report.summary import Summary

MOST_CLASSES = 20
"""With more classes, tables show the worst one only."""


@dataclass(frozen=True)
class FurtherTable:
    """A table with its heading, and what it shows in a sentence or two."""

    title: str
    caption: str
    layout: Layout


def further_tables(comparisons: Sequence[Comparison]) -> list[FurtherTable]:
    """The tables after the first, in order; those that have nothing to show are left out."""
    tables = [_differences(comparisons), _best_runs(comparisons), *_classes(comparisons), _votes(comparisons)]
    return [table for table in tables if table.layout.groups]


def constant_sentences(comparisons: Sequence[Comparison]) -> list[str]:
    """What the classifier that always answers one class reaches: the least that a result must exceed."""
    acrs: dict[tuple[int, float], list[str]] = {}
    for comparison in comparisons:
        constant = comparison.constant
        where = "" if comparison.sigma is None else f" at σ = {comparison.sigma:g}"
        acr = [] if constant.acr is None else [f"ACR {constant.acr:.3f}{where}"]
        acrs.setdefault((constant.label, constant.share), []).extend(acr)
    return [
        f"For comparison: a classifier that always answers class {label} has certified accuracy {100 * share:.1f}% at "
        f"every radius that n can show{'; ' if texts else ''}{', '.join(texts)}."
        for (label, share), texts in acrs.items()
    ]


def _table(title: str, caption: str, columns: Sequence[Column], groups: Sequence[Sequence[Any]]) -> FurtherTable:
    rows = tuple(tuple(tuple(c.cell(subject) for c in columns) for subject in group) for group in groups if group)
    return FurtherTable(title, caption, Layout(tuple(columns), rows))


def _sigma_column(comparisons: Sequence[Comparison]) -> Column:
    decimals = decimals_needed([c.sigma for c in comparisons if c.sigma is not None])
    return Column("sigma", "σ", lambda pair: pair[0].sigma, decimals=decimals)


def _with_error(difference: Difference | None, decimals: int, scale: float = 1.0) -> str:
    """A difference with its standard error in brackets; a star where it is significant."""
    if difference is None:
        return UNKNOWN
    error = "" if difference.standard_error is None else f" ({scale * difference.standard_error:.{decimals}f})"
    return signed(scale * difference.value, decimals) + error + ("*" if difference.significant else "")


def _differences(comparisons: Sequence[Comparison]) -> FurtherTable:
    ranked = [c for c in comparisons if c.paired]
    radii = sorted({r for c in ranked for run in c.paired for r in run.accuracy})
    digits = decimals_needed(radii)

    def column(key: str, title: str, of: Callable[[PairedRun], Difference | None], scale: float) -> Column:
        decimals = 3 if scale == 1 else 1

        def value(pair: tuple[Comparison, PairedRun]) -> Value:
            difference = of(pair[1])
            return None if difference is None else scale * difference.value

        return Column(key, title, value, decimals, text=lambda pair: _with_error(of(pair[1]), decimals, scale))

    columns = [
        _sigma_column(ranked),
        Column("name", "run", lambda pair: pair[1].name),
        Column("reference", "minus", lambda pair: pair[0].reference),
        column("acr", "ACR", lambda run: run.acr, 1),
        column("easy", "ACR, easy images", lambda run: run.easy, 1),
        column("hard", "ACR, hard images", lambda run: run.hard, 1),
        *(column(f"{r:.{digits}f}", f"{r:.{digits}f}", lambda run, r=r: run.accuracy.get(r), 100) for r in radii),  # type: ignore[misc]
    ]
    caption = (
        "Run minus reference on the same images, with the standard error of the paired difference in brackets; "
        "accuracies in points. A star marks differences of more than two standard errors. Easy images: those for which "
        "the radius of the reference is at least its median radius; hard images: the others."
    )
    return _table(
        "Differences from a reference run", caption, columns, [[(c, run) for run in c.paired] for c in ranked]
    )


def _best_runs(comparisons: Sequence[Comparison]) -> FurtherTable:
    ranked = [c for c in comparisons if c.best]
    digits = decimals_needed([b.radius for c in ranked for b in c.best if b.radius is not None])

    def at(pair: tuple[Comparison, Best]) -> str:
        return "ACR" if pair[1].radius is None else f"radius {pair[1].radius:.{digits}f}"

    def value(pair: tuple[Comparison, Best]) -> str:
        return f"{pair[1].value:.3f}" if pair[1].radius is None else f"{100 * pair[1].value:.1f}%"

    def lead(pair: tuple[Comparison, Best]) -> str:
        return _with_error(pair[1].lead, *((3, 1.0) if pair[1].radius is None else (1, 100.0)))

    columns = [
        _sigma_column(ranked),
        Column("at", "at", at),
        Column("best", "best run", lambda pair: pair[1].name),
        Column("value", "value", value),
        Column("second", "next best", lambda pair: pair[1].second),
        Column("lead", "lead", lead),
        Column("established", "best of all established", lambda pair: "yes" if pair[1].significant else "no"),
    ]
    caption = (
        "The lead over the next best run, with the standard error of the paired difference in brackets. Established: "
        "better than every other run by more than two standard errors."
    )
    return _table("Best run at each radius", caption, columns, [[(c, best) for best in c.best] for c in ranked])


def _classes(comparisons: Sequence[Comparison]) -> list[FurtherTable]:
    """ACR per class, and certified accuracy per class at the radius of the headline."""
    labels = sorted({numbers.label for c in comparisons for run in c.runs for numbers in run.classes})
    labels = labels if 1 < len(labels) <= MOST_CLASSES else []
    groups = [[(c, run) for run in c.runs if len(run.classes) > 1] for c in comparisons]
    heading = [_sigma_column(comparisons), Column("name", "run", lambda pair: pair[1].name)]

    def of_class(run: RunNumbers, label: int) -> ClassNumbers | None:
        return next((numbers for numbers in run.classes if numbers.label == label), None)

    def acr(pair: tuple[Comparison, RunNumbers], label: int) -> Value:
        numbers = of_class(pair[1], label)
        return None if numbers is None else numbers.acr

    def accuracy(pair: tuple[Comparison, RunNumbers], label: int) -> Value:
        numbers, radius = of_class(pair[1], label), pair[0].headline_radius
        found = None if numbers is None else _at(numbers.accuracy, radius)
        return None if found is None else 100 * found.share

    worst = Column("worst", "worst class", lambda pair: str(pair[1].worst_class.label))
    least = Column("least", "its ACR", lambda pair: pair[1].worst_class.acr, 3)
    whole = Column("acr", "all", lambda pair: pair[1].acr, 3)
    acrs = [Column(f"{k}", f"{k}", lambda pair, k=k: acr(pair, k), 3) for k in labels]  # type: ignore[misc]
    shares = [Column(f"{k}", f"{k}", lambda pair, k=k: accuracy(pair, k), 1) for k in labels]  # type: ignore[misc]
    radius = Column("radius", "radius", lambda pair: pair[0].headline_radius, 2)
    never = "A class with ACR 0 is never certified."
    tables = [_table("ACR of each class", never, [*heading, whole, worst, least, *acrs], groups)]
    if shares and any(c.headline_radius is not None for c in comparisons):
        caption = "In %, of the images of each class, at the radius of the headline."
        tables.append(_table("Certified accuracy of each class", caption, [*heading, radius, *shares], groups))
    return tables


def _at(accuracy: Sequence[AccuracyAt], radius: float | None) -> AccuracyAt | None:
    return next((found for found in accuracy if found.radius == radius), None)


def _votes(comparisons: Sequence[Comparison]) -> FurtherTable:
    columns = [
        _sigma_column(comparisons),
        Column("name", "run", lambda pair: pair[1].name),
        Column("acr", "ACR", lambda pair: pair[1].acr, 3),
        *(
            Column(f"acr_at_n_{n}", f"ACR at n = {n:,}", lambda pair, n=n: pair[1].acr_at[n], 3)  # type: ignore[misc]
            for n in FEWER_VOTES
        ),
        Column("ceiling", "largest radius", lambda pair: pair[1].ceiling, 3),
        Column(
            "at_ceiling",
            "images there (%)",
            lambda pair: None if pair[1].at_ceiling is None else 100 * pair[1].at_ceiling,
            1,
        ),
    ]
    caption = (
        "ACR at fewer votes is the mean over all ways to draw n of the stored votes. Images whose n votes all "
        "agree have the largest radius that n can show: more votes, not a better network, would raise it."
    )
    groups = [[(c, run) for run in c.runs if run.at_ceiling is not None] for c in comparisons]
    return _table("What the number of votes limits", caption, columns, groups)


def csv_columns(comparisons: Sequence[Comparison]) -> list[Column]:
    """For CSV: the worst class, the share at the largest radius, ACR with fewer votes, the run minus its reference."""
    runs = {run.name: run for comparison in comparisons for run in comparison.runs}
    paired = {run.name: (run, c.reference) for c in comparisons for run in c.paired}

    def of_run(value: Callable[[RunNumbers], Value]) -> Callable[[Summary], Value]:
        return lambda s: value(runs[s.name]) if s.name in runs else None

    def of_pair(value: Callable[[PairedRun, str | None], Value]) -> Callable[[Summary], Value]:
        return lambda s: value(*paired[s.name]) if s.name in paired else None

    values: dict[str, Callable[[Summary], Value]] = {
        "worst_class": of_run(lambda r: r.worst_class.label),
        "worst_class_acr": of_run(lambda r: r.worst_class.acr),
        "worst_class_accuracy": of_run(lambda r: 100 * r.worst_class.accuracy[0].share),
        "never_certified": of_run(lambda r: " ".join(map(str, r.never_certified)) or None),
        "largest_radius": of_run(lambda r: r.ceiling),
        "at_largest_radius": of_run(lambda r: None if r.at_ceiling is None else 100 * r.at_ceiling),
        **{f"acr_at_n_{n}": of_run(lambda r, n=n: r.acr_at[n]) for n in FEWER_VOTES},  # type: ignore[misc]
        "reference": of_pair(lambda _, reference: reference),
        "acr_minus_reference": of_pair(lambda run, _: run.acr.value),
        "acr_minus_reference_standard_error": of_pair(lambda run, _: run.acr.standard_error),
    }
    return [Column(key, key, value, csv_only=True) for key, value in values.items()] if comparisons else []
