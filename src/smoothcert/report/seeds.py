"""Runs that share everything but the training seed."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

from scipy.special import stdtrit

from smoothcert.certification.model_provenance import changes_of
from smoothcert.io.text import flattened
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

    @property
    def group(self) -> tuple[float, str]:
        return self.members[0].group

    @property
    def name(self) -> str:
        """The names of the runs with a star where they differ, as in `gaussian-seed*`."""
        names = [summary.name for summary in self.members]
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
    return [SeedMean(tuple(members.values())) for members in alike.values() if len(members) > 1]


def exceeds(values: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the mean of `values`, one per seed, is larger than that of `others` by Welch's t-test (two-sided, 5%).

    With two or three seeds a difference of two standard errors is common by chance; the test asks for 4.3 with two.
    """
    errors = [statistics.variance(each) / len(each) for each in (values, others)]
    difference = statistics.fmean(values) - statistics.fmean(others)
    squared = sum(errors)
    if not squared:
        return difference > 0
    freedom = squared**2 / (errors[0] ** 2 / (len(values) - 1) + errors[1] ** 2 / (len(others) - 1))
    return bool(difference > stdtrit(freedom, 0.975) * squared**0.5)
