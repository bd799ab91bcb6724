"""Everything that a report says, in whatever format: read from certificates files, checked and computed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from smoothcert.certification.certificates import CertificatesFile, read_certificates
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import check_regular_file
from smoothcert.io.results import settings_path
from smoothcert.report.comparison import Published, comparison_notes, place_in_table, published_rows
from smoothcert.report.html_gallery import Gallery
from smoothcert.report.layout import MOST_DECIMALS
from smoothcert.report.locate import find_certificates, run_recipe
from smoothcert.report.metrics import TrainedRun, read_run, training_runs
from smoothcert.report.seeds import SeedMean, over_seeds
from smoothcert.report.summary import Summary, default_radii, in_l1, is_randomized, refuse_without_images, summarize
from smoothcert.report.tables import by_sigma

MOST_RADII, LARGEST_RADIUS = 1_000, 1e6
DEEPEST = 50
"""Levels of settings inside settings; ours have four."""
NO_IMAGES = "left out: no image is certified yet"
PublishedFor = Callable[[Path], Published | None]
Files = list[tuple[str, CertificatesFile]]


@dataclass(frozen=True)
class Contents:
    """The contents of a report; runs in the order in which they are shown, except that tables sort by sigma."""

    title: str
    summaries: Sequence[Summary]
    seeds: Sequence[SeedMean] = ()
    published: Mapping[str, Published] = field(default_factory=dict)
    """Name of a run -> the row of a paper's table that it reproduces."""
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Difference from the paper -> the names of the runs."""
    warnings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What a reader should know before comparing numbers -> the names of the runs."""
    trained: Sequence[TrainedRun] = ()
    """The training of the runs."""
    gallery: Gallery | None = None
    """Where the pictures of the HTML page come from."""
    pictures: Sequence[str] = ()
    """File names of the figures of the report."""

    @property
    def tables(self) -> str:
        """The paper's table that runs are compared with."""
        return ", ".join(dict.fromkeys(row.table for row in self.published.values()))


def read_contents(
    paths: Sequence[Path],
    radii: Sequence[float] | None,
    title: str,
    published: PublishedFor | None,
    gallery: Gallery | None,
    same_images: bool,
) -> Contents:
    """The contents of a report of `paths`; the parameters are those of `write_report`."""
    chosen = None if radii is None else _checked_radii(radii)
    named = [_marked(name, _read(path)) for name, path in find_certificates(paths)]
    empty = [name for name, file in named if not file.rows]
    whole = [(name, file) for name, file in named if file.rows] or named
    rows = {} if published is None else published_rows(whole, published)
    whole.sort(key=lambda run: place_in_table(rows.get(run[0])))
    files = cut_to_shared_images(whole) if same_images else whole
    if chosen is None:
        chosen = sorted({radius for row in rows.values() for radius in row.accuracy_at})
    columns = chosen or default_radii([file for _, file in files])
    summaries = []
    warnings: dict[str, list[str]] = {NO_IMAGES: empty} if empty else {}
    for (name, file), (_, all_rows) in zip(files, whole, strict=True):
        summary, differences = summarize(file, name, columns), _trained_otherwise(file)
        cut = [f"of its {len(all_rows.rows):,} images those that all runs have"]
        remarks = (*summary.remarks, *differences, *(cut if summary.images < len(all_rows.rows) else ()))
        summaries.append(replace(summary, remarks=remarks))
        for difference in differences:
            warnings.setdefault(difference, []).append(name)
    return Contents(
        title=title,
        summaries=summaries,
        seeds=over_seeds(summaries),
        published=rows,
        notes=comparison_notes(by_sigma(summaries), rows),
        warnings=warnings,
        trained=[read_run(name, folder) for name, folder in training_runs(summaries)],
        gallery=gallery,
    )


def _marked(name: str, file: CertificatesFile) -> tuple[str, CertificatesFile]:
    """Name what makes a file not comparable with plain certificates: tables and pictures show it after its name."""
    marks = {
        "label-aware": bool(file.settings.get("label_aware")),
        "L1": in_l1(file),
        "cascade": bool(file.settings.get("cascade")),
        "randomized bound": is_randomized(file),
    }
    return " ".join([name, *(f"({mark})" for mark, holds in marks.items() if holds)]), file


def _read(path: Path) -> CertificatesFile:
    """A certificates file whose radii can be drawn and whose settings are flat enough to be shown."""
    check_regular_file(path)
    file = read_certificates(path)
    largest = max((row.certificate.radius for row in file.rows), default=0.0)
    if largest > LARGEST_RADIUS:
        raise WorkError(
            f"{path}: damaged, expected radii of at most {LARGEST_RADIUS:,.0f}, got {largest:g}; restore it"
        )
    level: list[object] = [file.settings, file.provenance]
    for _ in range(DEEPEST):
        dicts = [list(value.values()) for value in level if isinstance(value, dict)]
        level = [inner for values in (*dicts, *(v for v in level if isinstance(v, list))) for inner in values]
    if level:
        raise WorkError(f"{settings_path(path)}: damaged, expected at most {DEEPEST} levels of settings, got more")
    return file


def _trained_otherwise(file: CertificatesFile) -> list[str]:
    """How the noise of the certificates differs from that of training: a network may be poor under other noise."""
    trained, certified = file.settings.get("training_sigma"), file.settings.get("sigma")
    differences = []
    if None not in (trained, certified) and trained != certified:
        differences.append(f"certified with sigma {certified}, trained with sigma {trained}")
    recipe = run_recipe(file.path)
    if recipe and certified is not None:
        trained_noise, noise = (settings.get("noise") or "gaussian" for settings in (recipe, file.settings))
        if trained_noise != noise:
            differences.append(f"certified with {noise} noise, trained with {trained_noise} noise")
    return differences


def cut_to_shared_images(files: Files) -> Files:
    """`files` with only the images that all files of a data set and split share; refused if there is none.

    A file that does not record its data set is taken to be of the one that the others record, and refused if these
    record several.
    """
    data = {name: (file.settings.get("dataset"), file.settings.get("split")) for name, file in files}
    known = {source for source in data.values() if source[0] is not None}
    unknown = [name for name, source in data.items() if source[0] is None]
    if unknown and len(known) > 1:
        raise RequestError(f"{unknown[0]}: expected a recorded data set, got none; report it without --same-images")
    data |= dict.fromkeys(unknown, next(iter(known))) if known else {}
    shared: dict[object, set[int]] = {}
    for name, file in files:
        refuse_without_images(file)
        indices = {row.index for row in file.rows}
        shared[data[name]] = shared.get(data[name], indices) & indices
    for source, indices in shared.items():
        if not indices:
            names = ", ".join(name for name in data if data[name] == source)
            raise RequestError(f"{names}: expected images that all of these have, got none; leave a run out")
    return [
        (name, replace(file, rows=tuple(row for row in file.rows if row.index in shared[data[name]])))
        for name, file in files
    ]


def _checked_radii(radii: Sequence[float]) -> list[float]:
    wrong = [r for r in radii if not 0 <= r <= LARGEST_RADIUS]
    if wrong or not radii:
        given = f"{wrong[0]:g}" if wrong else "none"
        raise RequestError(
            f"expected radii from 0 to {LARGEST_RADIUS:,.0f} for the columns of the table, got {given}; "
            "give for example 0 0.5 1"
        )
    distinct = sorted({float(r) for r in radii})
    if len(distinct) > MOST_RADII:
        raise RequestError(f"expected at most {MOST_RADII:,} radii for a table, got {len(distinct):,}; give fewer")
    if len({f"{r:.{MOST_DECIMALS}f}" for r in distinct}) < len(distinct):
        raise RequestError(f"expected radii that differ in {MOST_DECIMALS} decimals, got some that do not; give others")
    return distinct
