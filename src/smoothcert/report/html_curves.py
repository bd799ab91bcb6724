"""The data of the curves in the HTML page: every step of every run, in as few characters as possible."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from smoothcert.io.text import one_line
from smoothcert.report.looks import Look
from smoothcert.report.panels import Member, titles_of
from smoothcert.report.summary import Summary

STEPS_PER_UNIT = 10_000
"""Radii are rounded down to a multiple of 1 / STEPS_PER_UNIT."""
_LARGEST = 2.0**40


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
            "steps": np.diff(in_steps(summary.file.columns.counted_radii), prepend=0).tolist(),
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


def in_steps(radii: ArrayLike) -> NDArray[np.int64]:
    """The radii, ascending, in units of 1 / STEPS_PER_UNIT: the largest whole numbers that do not exceed them.

    No radius is shown larger than it was certified, and one with four decimals stays the same.
    """
    values = np.sort(np.asarray(radii, dtype=np.float64)).clip(max=_LARGEST / STEPS_PER_UNIT)
    steps: NDArray[np.float64] = np.floor(values * STEPS_PER_UNIT)
    # The product may have been rounded across a whole number, in either direction.
    steps += (steps + 1) / STEPS_PER_UNIT <= values
    steps -= steps / STEPS_PER_UNIT > values
    return steps.astype(np.int64)
