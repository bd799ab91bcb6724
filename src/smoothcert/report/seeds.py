"""Mean and spread over training seeds: runs that share everything else are put together."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.yaml_file import read_yaml
from smoothcert.report.comparison import Published, published_columns
from smoothcert.report.layout import UNKNOWN, Column, Layout, decimals_needed
from smoothcert.report.summary import Summary
from smoothcert.report.tables import arranged
from smoothcert.training.run_folder import recipe_of_certificates

SEEDS_CAPTION = "mean ± sd over seeds; certified accuracy in % at each radius"
# They follow from the training seed, or say where and with which noise the same thing was measured.
_NOT_COMPARED = ("weights_sha256", "seed", "batch_size", "noise_block", "batch_norm_folded", "compile", "device")


@dataclass(frozen=True)
class SeedMean:
    """Runs that differ by their training seed only, in the given order; at least two, one for each seed."""

    members: tuple[Summary, ...]

    def __post_init__(self) -> None:
        if len({summary.group for summary in self.members}) > 1:
            given = ", ".join(f"{s.path} (sigma {s.sigma}, {s.dataset})" for s in self.members)
            raise RequestError(
                f"expected one sigma and one data set for a mean over seeds, got {given}; leave the others out"
            )

    @property
    def name(self) -> str:
        """The names of the runs with a star where they differ, as in `gaussian-seed*`."""
        names = [summary.name for summary in self.members]
        start = _common_start(names)
        rests = [name[len(start) :] for name in names]
        end = _common_start([rest[::-1] for rest in rests])[::-1]
        return f"{start}*{end}"

    @property
    def sigma(self) -> float | None:
        return self.members[0].sigma

    @property
    def group(self) -> tuple[float, str]:
        return self.members[0].group

    @property
    def indices(self) -> frozenset[int]:
        return self.members[0].indices

    @property
    def protocol(self) -> tuple[tuple[str, object], ...]:
        return self.members[0].protocol

    @property
    def acr(self) -> tuple[float, float]:
        """Mean and sample standard deviation."""
        return _mean_and_sd([summary.acr for summary in self.members])

    def accuracy(self, radius: float) -> tuple[float, float] | None:
        """Mean and sample standard deviation of the certified accuracy at `radius`, in percent."""
        fractions = [summary.accuracy_at[radius] for summary in self.members if radius in summary.accuracy_at]
        return _mean_and_sd([100 * x for x in fractions]) if len(fractions) == len(self.members) else None


def _common_start(texts: Sequence[str]) -> str:
    columns = zip(*texts, strict=False)
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, columns))


def _mean_and_sd(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values)


def run_recipe(path: Path) -> Mapping[str, Any] | None:
    """The recipe of the run that the certificates file `path` belongs to, as its YAML has it; None without one."""
    recipe = recipe_of_certificates(path)
    if recipe is None:
        return None
    try:
        return read_yaml(recipe)
    except RequestError as error:
        reason = str(error).removeprefix(f"{recipe}: ").partition(";")[0]
        raise WorkError(
            f"{recipe}: expected the recipe of a run in YAML, got '{reason}'; restore or remove it"
        ) from error


def _all_but_the_seed(file: CertificatesFile, recipe: Mapping[str, Any]) -> tuple[str, frozenset[int]]:
    """What two runs must share to be put together: recipe, protocol and images. What is off may be left unrecorded."""
    trained = {key: value for key, value in recipe.items() if key != "seed" and value is not None}
    certified = {key: value for key, value in file.settings.items() if key not in _NOT_COMPARED and value}
    return repr(_canonical([trained, certified])), frozenset(row.index for row in file.rows)


def _canonical(value: object) -> object:
    """`value` such that equal mappings have equal texts, whatever the order and the types of their keys."""
    if isinstance(value, Mapping):
        return sorted((repr(key), repr(_canonical(inner))) for key, inner in value.items())
    return [_canonical(inner) for inner in value] if isinstance(value, list | tuple) else value


def over_seeds(files: Sequence[CertificatesFile], summaries: Sequence[Summary]) -> list[SeedMean]:
    """Means over the runs that share everything but the training seed, in the order of their first run.

    `summaries` are those of `files`. A seed that is there twice (one run certified twice) counts once, by its first
    file. Files without a recipe beside them have no known seed and are left out.
    """
    alike: dict[tuple[str, frozenset[int]], dict[Any, Summary]] = {}
    for file, summary in zip(files, summaries, strict=True):
        recipe = run_recipe(file.path)
        if recipe is not None and recipe.get("seed") is not None:
            alike.setdefault(_all_but_the_seed(file, recipe), {}).setdefault(str(recipe["seed"]), summary)
    return [SeedMean(tuple(members.values())) for members in alike.values() if len(members) > 1]


def _with_spread(key: str, title: str, decimals: int, radius: float | None) -> tuple[Column, Column]:
    """A column that shows `mean ± sd`, and for CSV one with the sd."""

    def numbers(mean: SeedMean) -> tuple[float, float] | None:
        return mean.acr if radius is None else mean.accuracy(radius)

    def text(mean: SeedMean) -> str:
        found = numbers(mean)
        return UNKNOWN if found is None else " ± ".join(f"{x:.{decimals}f}" for x in found)

    def part(which: int) -> Any:
        return lambda mean: None if (found := numbers(mean)) is None else found[which]

    return (
        Column(key, title, part(0), decimals, radius=radius, ranked=True, text=text),
        Column(f"{key}_sd", "sd", part(1), decimals, csv_only=True),
    )


def seeds_layout(means: Sequence[SeedMean], published: Mapping[str, Published] = {}) -> Layout:
    """A row for each mean, ACR with 4 decimals: seeds change the third. `published` as for `tables.layout`; it is
    shown where all runs of a mean have the same row."""

    def published_of(mean: SeedMean) -> Published | None:
        rows = [published.get(summary.name) for summary in mean.members]
        same = len({None if row is None else (row.table, row.label) for row in rows}) == 1
        return rows[0] if same else None

    def label(mean: SeedMean) -> str:
        row = published_of(mean)
        return (mean.members[0].method or UNKNOWN) if row is None else row.label

    members = [summary for mean in means for summary in mean.members]
    radii = sorted({radius for summary in members for radius in summary.accuracy_at})
    labels = [f"{radius:.{decimals_needed(radii)}f}" for radius in radii]
    one_dataset = len({summary.dataset for summary in members}) < 2
    numbers = [
        *_with_spread("acr", "ACR", 4, None),
        *(c for label, radius in zip(labels, radii, strict=True) for c in _with_spread(label, label, 1, radius)),
    ]
    columns = (
        Column("sigma", "σ", lambda m: m.sigma, decimals_needed([s.sigma for s in members if s.sigma is not None])),
        Column("dataset", "data set", lambda m: m.members[0].dataset, csv_only=one_dataset),
        Column("name", "runs", lambda m: m.name),
        Column("method", "method", lambda m: m.members[0].method, text=label),
        Column("seeds", "seeds", lambda m: len(m.members), decimals=0),
        *numbers,
        Column("images", "images", lambda m: m.members[0].images, decimals=0),
        *(published_columns(numbers, published_of) if published else ()),
    )
    return arranged(columns, means, published_of)
