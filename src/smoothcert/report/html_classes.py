"""The heat maps of the HTML page: certified accuracy of each class and run."""

from collections.abc import Mapping, Sequence
from typing import Any

from smoothcert.io.text import one_line
from smoothcert.report.names import dataset_name
from smoothcert.report.outcomes import Outcomes
from smoothcert.report.paired import Comparison

MOST_CLASSES = 30
"""Of more classes, the worst are shown."""


def class_maps(
    comparisons: Sequence[Comparison], labels: Mapping[str, str], class_names: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """One map per comparison: rows are runs, columns classes, at the radius of its headline.

    `labels` gives the label of each run, `class_names` the names of the classes of a data set, if known.
    """
    return [_map(comparison, labels, class_names.get(comparison.first.dataset or "", ())) for comparison in comparisons]


def _map(comparison: Comparison, labels: Mapping[str, str], names: Sequence[str]) -> dict[str, Any]:
    radius = comparison.headline_radius or 0.0
    found = {run.name: run.classes for run in comparison.runs}

    def mean(label: int) -> float:
        own = [classes[label].accuracy(radius) for classes in found.values() if label in classes]
        return sum(own) / len(own)

    every = sorted({label for classes in found.values() for label in classes})
    shown = sorted(sorted(every, key=mean)[:MOST_CLASSES])
    runs = [
        {"name": name, "label": labels[name], "cells": [_cell(classes.get(label), radius) for label in shown]}
        for name, classes in found.items()
    ]
    return {
        "title": _title(comparison, radius, len(shown), len(every)),
        "classes": [one_line(names[label]) if 0 <= label < len(names) else str(label) for label in shown],
        "runs": runs,
    }


def _title(comparison: Comparison, radius: float, shown: int, every: int) -> str:
    run = comparison.first
    sigma = "σ not recorded" if run.sigma is None else f"σ = {run.sigma:g}"
    data = "" if run.dataset is None else f"{dataset_name(run.dataset)}, "
    worst = "" if shown == every else f"; the {shown} worst of {every:,} classes"
    return f"{data}{sigma}: certified accuracy (%) at {run.norm} radius {radius:g}{worst}"


def _cell(outcomes: Outcomes | None, radius: float) -> dict[str, Any] | None:
    if outcomes is None:
        return None
    clean, share = (100 * outcomes.accuracy(r) for r in (0.0, radius))
    words = f"{len(outcomes):,} images, {clean:.1f}% at radius 0, {share:.1f}% at {radius:g}, ACR {outcomes.acr:.3f}"
    return {"share": share, "text": f"{share:.0f}", "never": not outcomes.certified.any(), "title": words}
