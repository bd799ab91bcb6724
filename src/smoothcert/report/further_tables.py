"""Tables of a report after the first: differences from a reference run, classes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from smoothcert.report.layout import UNKNOWN, Column, Layout, Value, decimals_needed, layout_of
from smoothcert.report.paired import Comparison, Difference, PairedRun
from smoothcert.report.protocol import class_name, class_names_of
from smoothcert.report.published import signed
from smoothcert.report.seeds import MeanDifference
from smoothcert.report.summary import Summary

MOST_CLASSES = 20
"""Of more classes, tables show those with the smallest ACR."""
ACR_DIFFERENCE = "acr_minus_reference"
"""The key of the columns with the ACR of a run, or of a mean over seeds, minus that of the reference."""


@dataclass(frozen=True)
class FurtherTable:
    """A table with its heading, and what it shows in a sentence or two."""

    title: str
    caption: str
    layout: Layout


def further_tables(comparisons: Sequence[Comparison]) -> list[FurtherTable]:
    """The tables after the first, in order; those that have nothing to show are left out."""
    tables = [_differences(comparisons), *_classes(comparisons)]
    return [table for table in tables if table.layout.groups]


def constant_sentences(comparisons: Sequence[Comparison]) -> list[str]:
    """What the classifier that always answers the most frequent class reaches: the least that a result must exceed.

    All its votes agree, so each image of that class has the largest radius that n can show.
    """
    acrs: dict[tuple[str, float], list[str]] = {}
    for comparison in comparisons:
        first = comparison.first
        labels, counts = np.unique(first.outcomes.label, return_counts=True)
        share = float(counts.max() / counts.sum())
        texts = acrs.setdefault((first.class_name(int(labels[counts.argmax()])), share), [])
        ceilings = [run.ceiling for run in comparison.runs if run.ceiling is not None]
        if ceilings and first.sigma is not None:
            apart = f" ({first.apart})" if first.apart else ""
            texts.append(f"ACR {share * max(ceilings):.3f} at σ = {first.sigma:g}{apart}")
    return [
        f"For comparison: a classifier that always answers class {name} has certified accuracy {100 * share:.1f}% at "
        f"every radius that n can show{'; ' if texts else ''}{', '.join(dict.fromkeys(texts))}."
        for (name, share), texts in acrs.items()
    ]


def heading(summaries: Sequence[Summary], of: Callable[[Any], Summary] = lambda s: s) -> tuple[Column, Column]:
    """The columns before the name; `of` gives the run of a row."""
    sigma_decimals = decimals_needed([s.sigma for s in summaries if s.sigma is not None])
    one_dataset = len({s.dataset for s in summaries} - {None}) < 2
    return (
        Column("sigma", "σ", lambda row: of(row).sigma, decimals=sigma_decimals),
        Column("dataset", "data set", lambda row: of(row).dataset, csv_only=one_dataset),
    )


def _runs(comparisons: Sequence[Comparison]) -> list[Summary]:
    return [run for comparison in comparisons for run in comparison.runs]


def minus_title(references: Iterable[str]) -> str:
    """The heading of differences of ACR, with the name of the reference if there is only one."""
    first, *others = dict.fromkeys(references)
    return f"ACR − {'reference' if others else first}"


def with_error(difference: Difference | MeanDifference | None, decimals: int, scale: float = 1.0) -> str:
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

        return Column(key, title, value, decimals, text=lambda pair: with_error(of(pair[1]), decimals, scale))

    columns = [
        *heading(_runs(comparisons), lambda pair: pair[0].first),
        Column("name", "run", lambda pair: pair[1].name),
        Column("reference", "minus", lambda pair: pair[0].reference),
        column("acr", "ACR", lambda run: run.acr, 1),
        column("easy", "ACR, easy images", lambda run: run.easy, 1),
        column("hard", "ACR, hard images", lambda run: run.hard, 1),
        *(column(f"{r:.{digits}f}", f"{r:.{digits}f}", lambda run, r=r: run.accuracy.get(r), 100) for r in radii),  # type: ignore[misc]
    ]
    caption = (
        "Run minus reference on the same images, with the standard error of the paired difference in brackets; "
        "accuracies in points. A star marks established differences. Easy images: those for which the mean radius of "
        "the two runs is at least its median; hard images: the others."
    )
    content = layout_of(columns, [[(c, run) for run in c.paired] for c in ranked])
    return FurtherTable("Differences from a reference run", caption, content)


def _classes(comparisons: Sequence[Comparison]) -> list[FurtherTable]:
    """ACR per class, and certified accuracy per class at the radius of the headline."""
    groups = [[run for run in c.runs if len(run.classes) > 1] for c in comparisons]
    acrs_of: dict[int, list[float]] = {}
    for run in (run for group in groups for run in group):
        for label, outcomes in run.classes.items():
            acrs_of.setdefault(label, []).append(outcomes.acr)
    labels = sorted(sorted(acrs_of, key=lambda label: fmean(acrs_of[label]))[:MOST_CLASSES])
    worst = f" The {MOST_CLASSES} worst of {len(acrs_of):,} classes." if len(labels) < len(acrs_of) else ""
    several = {class_names_of(run.file) for run in _runs(comparisons)}
    names = next(iter(several)) if len(several) == 1 else ()
    titles = {label: class_name(label, names) for label in labels}
    radius_of = {run.name: c.headline_radius for c in comparisons for run in c.runs}

    def acr(run: Summary, label: int) -> Value:
        return run.classes[label].acr if label in run.classes else None

    def accuracy(run: Summary, label: int) -> Value:
        radius = radius_of[run.name]
        return None if radius is None or label not in run.classes else 100 * run.classes[label].accuracy(radius)

    first = [*heading(_runs(comparisons)), Column("name", "run", lambda run: run.name)]
    acrs = [
        Column("acr", "all", lambda run: run.acr, 3),
        Column("worst", "worst class", lambda run: run.class_name(run.worst_class)),
        Column("least", "its ACR", lambda run: acr(run, run.worst_class), 3),
        *(Column(f"{k}", titles[k], lambda run, k=k: acr(run, k), 3) for k in labels),  # type: ignore[misc]
    ]
    shares = [Column(f"{k}", titles[k], lambda run, k=k: accuracy(run, k), 1, shaded=True) for k in labels]  # type: ignore[misc]
    caption = f"0 for a class of which no image has a certified radius above 0.{worst}"
    tables = [FurtherTable("ACR of each class", caption, layout_of([*first, *acrs], groups))]
    if shares and any(radius is not None for radius in radius_of.values()):
        radius = Column("radius", "radius", lambda run: radius_of[run.name], 2)
        caption = f"In %, of the images of each class, at the radius of the headline.{worst}"
        content = layout_of([*first, radius, *shares], groups)
        tables.append(FurtherTable("Certified accuracy of each class", caption, content))
    return tables


def csv_columns(comparisons: Sequence[Comparison]) -> list[Column]:
    """For CSV: the worst class, the share at the largest radius, the run minus its reference."""
    paired = {run.name: run for c in comparisons for run in c.paired}
    reference = {run.name: c.reference for c in comparisons if c.reference is not None for run in c.paired}

    def difference(summary: Summary) -> Difference | None:
        return paired[summary.name].acr if summary.name in paired else None

    def part(name: str) -> Callable[[Summary], Value]:
        return lambda summary: getattr(difference(summary), name, None)

    values: dict[str, Callable[[Summary], Value]] = {
        "worst_class": lambda s: s.worst_class,
        "worst_class_acr": lambda s: s.classes[s.worst_class].acr,
        "worst_class_accuracy": lambda s: 100 * s.classes[s.worst_class].accuracy(),
        "never_certified": lambda s: " ".join(map(str, s.never_certified)) or None,
        "largest_radius": lambda s: s.ceiling,
        "at_largest_radius": lambda s: None if s.at_ceiling is None else 100 * s.at_ceiling,
        "reference": lambda s: reference.get(s.name),
    }
    # LaTeX, too, if it is asked for the difference, which then has its standard error in the same column.
    title = minus_title(reference.values()) if reference else ACR_DIFFERENCE
    differences = [
        Column(ACR_DIFFERENCE, title, part("value"), 3, csv_only=True, text=lambda s: with_error(difference(s), 3)),
        Column(error := f"{ACR_DIFFERENCE}_standard_error", error, part("standard_error"), csv_only=True),
    ]
    columns = [Column(key, key, value, csv_only=True) for key, value in values.items()]
    return [*columns, *differences] if comparisons else []
