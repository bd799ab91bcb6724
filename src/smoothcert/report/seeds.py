"""Runs that share everything but the training seed: their means, and how far these are from the reference run's."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix

from scipy.special import stdtrit

from smoothcert.certification.model_provenance import changes_of
from smoothcert.io.text import flattened
from smoothcert.report.paired import Comparison
from smoothcert.report.summary import Summary

# Settings that follow from the training seed or from the data set, or that do not change what is measured.
_NOT_COMPARED = (
    *("weights_sha256", "classes_sha256", "seed", "num_classes"),
    *("batch_size", "noise_block", "batch_norm_folded", "compile", "device"),
)


@dataclass(frozen=True)
class SeedMean:
    """Runs that differ by their training seed only, in the given order; at least two, one per seed."""

    members: tuple[Summary, ...]
    listed: bool = False
    """Whether its name lists the runs, because another mean of the comparison has the same star."""

    @property
    def group(self) -> tuple[float, str]:
        return self.members[0].group

    @property
    def name(self) -> str:
        """The names of the runs with a star where they differ, as in `gaussian-seed*`."""
        names = [summary.name for summary in self.members]
        if self.listed:
            return ", ".join(names)
        start = commonprefix(names)  # noqa: RUF071 - by letters, not by folders
        end = commonprefix([name[len(start) :][::-1] for name in names])[::-1]  # noqa: RUF071
        return f"{start}*{end}"


def _all_but_the_seed(summary: Summary) -> tuple[str, frozenset[int]]:
    """What the runs of a mean share: recipe, changes of the weights, protocol and images.

    Settings that are off may also be unrecorded.
    """
    recipe = summary.recipe
    settings = summary.file.settings
    trained = {key: value for key, value in recipe.items() if key != "seed" and value is not None}
    certified = {key: value for key, value in settings.items() if key not in _NOT_COMPARED and value}
    certified["changes"] = changes_of(summary.file.provenance, recipe.get("epochs"))
    return repr([sorted(flattened(fields).items(), key=repr) for fields in (trained, certified)]), summary.indices


def over_seeds(summaries: Sequence[Summary]) -> list[SeedMean]:
    """Means over the runs that share everything but the training seed, in the order of their first run.

    A seed that occurs twice (one run certified twice) counts once, by its first file. Files without a recipe next to
    them have no known seed and are left out.
    """
    alike: dict[tuple[str, frozenset[int]], dict[str, Summary]] = {}
    for summary in summaries:
        if (seed := summary.recipe.get("seed")) is not None:
            alike.setdefault(_all_but_the_seed(summary), {}).setdefault(str(seed), summary)
    means = [SeedMean(tuple(members.values())) for members in alike.values() if len(members) > 1]
    counts = Counter((mean.group, mean.name) for mean in means)
    return [replace(mean, listed=counts[mean.group, mean.name] > 1) for mean in means]


@dataclass(frozen=True)
class MeanDifference:
    """The mean over seeds of one group of runs minus that of another, by Welch's t-test (two-sided, 5%).

    The degrees of freedom are at most those of two groups of the smaller size: two seeds whose values are close by
    chance would otherwise count as exact next to many. Of two equal methods with two and ten seeds, 10% of the
    differences would be significant; so it is 2%.

    Seeds are not paired: seed 0 of two methods has nothing in common but the number.
    """

    value: float
    standard_error: float
    degrees_of_freedom: float | None
    """Of Welch and Satterthwaite, limited; None if no value differs from the others of its group."""

    @property
    def significant(self) -> bool:
        """Whether it exceeds what seeds differ by chance: 4.3 standard errors or more with two seeds each.

        Two standard errors are too few: of the differences between two equal methods with two seeds each, 18% are
        larger. Without any spread nothing is established: seeds often have the same certified accuracy, a share of a
        few hundred images, by chance.
        """
        if self.degrees_of_freedom is None:
            return False
        return bool(abs(self.value) > stdtrit(self.degrees_of_freedom, 0.975) * self.standard_error)


def mean_difference(values: Sequence[float], others: Sequence[float]) -> MeanDifference:
    """The mean of `values` minus that of `others`, each with one number per seed, of which there are two or more."""
    errors = [statistics.variance(each) / len(each) for each in (values, others)]
    difference = statistics.fmean(values) - statistics.fmean(others)
    squared = sum(errors)
    if not squared:
        return MeanDifference(difference, 0.0, None)
    freedom = squared**2 / (errors[0] ** 2 / (len(values) - 1) + errors[1] ** 2 / (len(others) - 1))
    return MeanDifference(difference, squared**0.5, min(freedom, 2 * (min(len(values), len(others)) - 1)))


@dataclass(frozen=True)
class FromReference:
    """The ACR of a mean minus that of the runs that share all but the seed with the reference run."""

    reference: str
    """The name of their mean, or of the reference run if it is the only one."""
    acr: MeanDifference | None
    """None if the reference run is the only one."""


def from_reference(means: Sequence[SeedMean], comparisons: Sequence[Comparison]) -> Mapping[str, FromReference]:
    """Name of the first run of a mean -> its difference from the reference run of its comparison.

    The mean with the reference run has none, nor has a mean of runs that are not ranked.
    """
    references = {run.name: c.reference for c in comparisons for run in c.runs if c.reference is not None}
    mean_of = {run.name: mean for mean in means for run in mean.members}
    differences = {}
    for mean in means:
        name = mean.members[0].name
        if (reference := references.get(name)) is None:
            continue
        other = mean_of.get(reference)
        if other is None:
            differences[name] = FromReference(reference, None)
        elif other is not mean:
            acr = mean_difference([run.acr for run in mean.members], [run.acr for run in other.members])
            differences[name] = FromReference(other.name, acr)
    return differences
