"""What the HTML page draws: every step of every curve in as few characters as possible, and heat maps of classes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from smoothcert.io.text import one_line
from smoothcert.report.looks import Look
from smoothcert.report.names import Member, dataset_name, titles_of
from smoothcert.report.outcomes import Outcomes
from smoothcert.report.paired import Comparison
from smoothcert.report.summary import Summary

STEPS_PER_UNIT = 10_000
"""Radii are rounded down to a multiple of 1 / STEPS_PER_UNIT."""
_LARGEST = 2.0**40
MOST_CLASSES = 30
"""Of more classes, the worst are shown."""


def curve_data(
    panels: Sequence[Sequence[Member]], look_of: Mapping[str, int], looks: Mapping[str, Look]
) -> list[dict[str, Any]]:
    """For each sigma and data set its runs, each with all steps of its curve and with its look.

    `steps` are the ascending radii that count, each as its difference from the one before, in 1 / STEPS_PER_UNIT.
    """
    dashes = [" ".join(f"{2 * length:g}" for length in look.dash) for look in looks.values()]

    def run(member: Member) -> dict[str, Any]:
        summary = member.summary
        return {
            "name": one_line(summary.name),
            "label": one_line(member.label),
            "look": look_of[summary.name],
            "dash": dashes[look_of[summary.name]],
            "acr": f"{summary.acr:.3f}",
            "images": summary.images,
            "steps": np.diff(in_steps(np.sort(summary.file.columns.counted_radii)), prepend=0).tolist(),
        }

    return [
        {
            "title": one_line(title),
            "norm": panel[0].summary.norm,
            "runs": [run(member) for member in panel],
            "ceilings": _ceilings([member.summary for member in panel]),
        }
        for panel, title in zip(panels, titles_of(panels), strict=True)
    ]


def _ceilings(summaries: Sequence[Summary]) -> list[tuple[float, int]]:
    pairs = {(summary.ceiling, summary.n) for summary in summaries}
    return sorted((ceiling, n) for ceiling, n in pairs if ceiling is not None and n is not None)


def in_steps(radii: ArrayLike, per_unit: int = STEPS_PER_UNIT) -> NDArray[np.int64]:
    """The radii in units of 1 / per_unit: the largest whole numbers that do not exceed them.

    No radius is shown larger than it was certified, and one with as few decimals stays the same.
    """
    values = np.asarray(radii, dtype=np.float64).clip(max=_LARGEST / per_unit)
    steps: NDArray[np.float64] = np.floor(values * per_unit)
    # The product may have been rounded across a whole number, in either direction.
    steps += (steps + 1) / per_unit <= values
    steps -= steps / per_unit > values
    return steps.astype(np.int64)


def class_name(label: int, names: Sequence[str]) -> str:
    """The name of a class among `names`; its number if they do not have it."""
    return one_line(names[label]) if 0 <= label < len(names) else str(label)


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
        "classes": [class_name(label, names) for label in shown],
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
