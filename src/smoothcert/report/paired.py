"""Runs of one sigma and data set next to each other: who is best, by how much, and whether that is established.

Differences are paired: image by image on the same images, so that the choice of images cancels out. A difference of
ACR is significant if it exceeds two standard errors, or, where few images differ, by the exact randomization test; a
difference of accuracies by the exact sign test of the images that only one of the two runs certifies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from smoothcert.certification.columns import Flags, Floats
from smoothcert.errors import RequestError
from smoothcert.io.text import number_text
from smoothcert.report.labels import in_groups
from smoothcert.report.summary import Summary, standard_error

SIGNIFICANT = 2.0
"""A difference of ACR of more than this many standard errors is significant."""
FEW = 16
"""Up to this number of images that differ, all their signs are counted."""
LEVEL = 0.05
"""Largest p-value of a significant difference, by an exact test."""


@dataclass(frozen=True)
class Difference:
    """The mean over the images of a paired difference (shares in [0, 1]), and its standard error."""

    value: float
    standard_error: float | None
    """None for a single image."""
    significant: bool


@dataclass(frozen=True)
class PairedRun:
    """One run minus the reference run, on the images of both."""

    name: str
    acr: Difference
    accuracy: Mapping[float, Difference]
    """Radius -> difference of the certified accuracy; radii that one of the two cannot reach are left out."""
    easy: Difference | None
    """Difference of ACR on the images that are easy for both: the sum of their radii is at least its median."""
    hard: Difference | None
    """On the other images. Both are None if all images are easy."""


@dataclass(frozen=True)
class Best:
    """The best run of one column: `radius` for certified accuracy, None for ACR."""

    radius: float | None
    name: str
    second: str
    """The next best run."""
    lead: Difference
    """Best minus next best."""
    significant: bool
    """Whether the best is significantly better than every other run."""


@dataclass(frozen=True)
class Comparison:
    """The runs of one sigma, data set and norm."""

    runs: tuple[Summary, ...]
    obstacles: tuple[str, ...]
    """Why the runs are not ranked, as in "n differs (1,000 and 100,000)"; empty if they can be."""
    reference: str | None
    """The run that `paired` compares with; None if the runs are not ranked."""
    paired: tuple[PairedRun, ...]
    """Of the other runs, in order."""
    best: tuple[Best, ...]
    """ACR first, then the radii, without those at which all runs have 0. Empty if the runs are not ranked."""

    @property
    def first(self) -> Summary:
        """The first run: its sigma, data set and norm are those of all."""
        return self.runs[0]

    @cached_property
    def headline_radius(self) -> float | None:
        """The radius of the headline: of those above 0 that all runs can reach, the one nearest to sigma."""
        radii = [r for r in self.first.accuracy_at if r > 0 and all(run.reaches(r) for run in self.runs)]
        return min(radii, key=lambda r: (abs(r - (self.first.sigma or 0.5)), r), default=None)

    @property
    def ranked(self) -> bool:
        return not self.obstacles and len(self.runs) > 1

    def best_at(self, radius: float | None) -> Best | None:
        """The best run at `radius`, or by ACR for None; None where no run is ranked."""
        return next((best for best in self.best if best.radius == radius), None)


def comparisons(summaries: Sequence[Summary], reference: str | None = None) -> list[Comparison]:
    """One comparison per sigma, data set and norm, by sigma, runs in the given order.

    `reference` is the name of the run to compare with, in its group; the other groups, and all without it, take their
    run of plain Gaussian training, or else their first run. A name that no run has is a RequestError.
    """
    names = [summary.name for summary in summaries]
    if reference is not None and reference not in names:
        raise RequestError(
            f"reference: expected one of {', '.join(names)}, got {reference}; give the name or path of a run"
        )
    return [_compared(members, reference) for members in in_groups(summaries)]


def obstacles(summaries: Sequence[Summary]) -> list[str]:
    """Why runs of one group must not be ranked: settings on which radii depend, or images, differ or are unknown."""
    if len(summaries) < 2:
        return []
    reasons = ["sigma is not recorded"] if summaries[0].sigma is None else []
    for key in summaries[0].protocol:
        values = dict.fromkeys(_shown(summary.protocol.get(key)) for summary in summaries)
        if len(values) > 1:
            reasons.append(f"{key} differs ({' and '.join(values)})")
        elif key in ("n", "alpha") and "not recorded" in values:
            reasons.append(f"{key} is not recorded")
    first = summaries[0].outcomes
    others = [summary.outcomes for summary in summaries[1:]]
    if any(not np.array_equal(first.index, other.index) for other in others):
        reasons.append("the images differ")
    elif any(not np.array_equal(first.label, other.label) for other in others):
        reasons.append("the labels of the same images differ, so these are different data")
    elif any(len({s.file.settings.get(key) for s in summaries} - {None}) > 1 for key in ("split", "images_sha256")):
        reasons.append("split or images_sha256 differ, so these may be different images")
    return reasons


def _shown(value: object) -> str:
    if value is None or value == "":
        return "not recorded"
    return number_text(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _compared(group: list[Summary], reference: str | None) -> Comparison:
    """The comparison of one group; one that has obstacles, or a single run, has neither a reference nor a best run."""
    reasons = tuple(obstacles(group))
    if reasons or len(group) < 2:
        return Comparison(tuple(group), reasons, None, (), ())
    named = [summary for summary in group if summary.name == reference]
    gaussian = [summary for summary in group if summary.method == "gaussian"]
    chosen = (named or gaussian or group)[0]
    paired = tuple(_paired(summary, chosen) for summary in group if summary is not chosen)
    return Comparison(tuple(group), reasons, chosen.name, paired, tuple(_bests(group)))


def difference_of_radii(ours: Floats, theirs: Floats) -> Difference:
    """The difference of the average radii of the same images and its standard error.

    Of a few images that differ, two standard errors would be too little: six of seven favour one of two equal runs once
    in eight times.
    """
    values = ours - theirs
    mean, error = float(values.mean()), standard_error(values)
    differing = values[values != 0]
    if len(differing) <= FEW:
        return Difference(mean, error, randomization_test(differing) <= LEVEL)
    return Difference(mean, error, abs(mean) > SIGNIFICANT * (error or 0.0))


def randomization_test(values: Floats) -> float:
    """The p-value of the sum of `values`, if each is as likely with the other sign (two-sided, exact)."""
    signs = 1 - 2 * (np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1)
    rounding = 1e-9 * np.abs(values).sum()
    return float((np.abs(signs @ values) >= abs(values.sum()) - rounding).mean())


def difference_of_shares(ours: Flags, theirs: Flags, level: float = LEVEL) -> Difference:
    """The difference of two shares of the same images and its standard error; significant at `level`.

    Two standard errors would be too little: four images that one run alone certifies would exceed them, although four
    all favour one of two equal runs once in eight times.
    """
    values = ours.astype(np.float64) - theirs
    only_ours, only_theirs = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    return Difference(float(values.mean()), standard_error(values), sign_test(only_ours, only_theirs) <= level)


def sign_test(first: int, second: int) -> float:
    """The p-value of `first` and `second` times for one of two sides, if both are equally likely (two-sided, exact)."""
    return min(1.0, 2 * float(special.bdtr(min(first, second), first + second, 0.5))) if first + second else 1.0


def _paired(run: Summary, reference: Summary) -> PairedRun:
    """`run` minus `reference`; both have the same images, in the same order."""
    ours, theirs = run.outcomes, reference.outcomes
    accuracy = {
        r: difference_of_shares(ours.certified_at(r), theirs.certified_at(r))
        for r in run.accuracy_at
        if run.reaches(r) and reference.reaches(r)
    }
    # By both runs alike: images chosen by the radius of one of two equal runs have a smaller radius in the other.
    both = ours.radius + theirs.radius
    easy = both >= np.median(both)
    easy_and_hard = (difference_of_radii(ours.radius[part], theirs.radius[part]) for part in (easy, ~easy))
    parts = (None, None) if easy.all() else easy_and_hard
    return PairedRun(run.name, difference_of_radii(ours.radius, theirs.radius), accuracy, *parts)


def _bests(group: Sequence[Summary]) -> list[Best]:
    """The best run by ACR and at each radius, without those at which all runs have 0."""
    every = [summary.outcomes for summary in group]
    values: dict[float | None, list[Any]] = {None: [outcomes.radius for outcomes in every]}
    values |= {radius: [outcomes.certified_at(radius) for outcomes in every] for radius in group[0].accuracy_at}
    return [_best(group, radius, rows) for radius, rows in values.items() if any(row.any() for row in rows)]


def _best(group: Sequence[Summary], radius: float | None, values: Sequence[Any]) -> Best:
    """Of `values`, for each run one number or flag per image."""
    means = np.array([row.mean() for row in values])
    first, second = np.argsort(-means, kind="stable")[:2].tolist()
    difference = difference_of_radii if radius is None else difference_of_shares
    leads = {other: difference(values[first], values[other]) for other in range(len(group)) if other != first}
    established = all(lead.significant for lead in leads.values())
    return Best(radius, group[first].name, group[second].name, leads[second], established)
