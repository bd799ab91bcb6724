"""Everything that a report says, in whatever format: read from certificates files, checked and computed."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from smoothcert.certification.certificates import CertificatesFile, read_certificates
from smoothcert.certification.shards import missing_rows
from smoothcert.data.datasets import were_trained_on
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import check_regular_file
from smoothcert.io.results import settings_path
from smoothcert.io.text import counted, one_line
from smoothcert.report.descriptions import Description, Named, describe
from smoothcert.report.further_tables import FurtherTable, constant_sentences, further_tables
from smoothcert.report.headline import STATISTICS, headlines
from smoothcert.report.html_data import Gallery
from smoothcert.report.hyperparameters import Sweep, sweeps, with_hyperparameters
from smoothcert.report.labels import Panel, by_sigma, panels_of
from smoothcert.report.layout import MOST_DECIMALS, Layout
from smoothcert.report.locate import distinct_names, locate
from smoothcert.report.paired import Comparison, comparisons
from smoothcert.report.protocol import norm_of
from smoothcert.report.published import Published, PublishedFor, comparison_notes, place_in_table, published_rows
from smoothcert.report.seeds import SeedMean, over_seeds
from smoothcert.report.seeds_table import seeds_layout, seeds_sentences
from smoothcert.report.summary import Summary, default_radii, implied_l_infinity, summarize
from smoothcert.report.tables import NUMBERS, RANKED, intervals_layout, layout
from smoothcert.report.trained_run import TrainedRun, training_runs
from smoothcert.training.run_folder import CERTIFICATES, run_of_certificates

LARGEST_RADIUS = 1e6
DEEPEST = 50
"""Levels of settings inside settings; ours have four."""
NO_IMAGES = "left out: no image is certified yet"
NO_CERTIFICATES = "left out: no certificates"
TRIAL = "left out: another file of this run has its images and more; --all-images or its own path shows it"
VOTES = ("n", "n0", "seed", "batch_size")
"""Settings in which a trial differs from the certificates of a run."""
NO_SIGMA = 'compared with no run of known σ: describe the file, as in --as "sigma=0.5,n=100000,alpha=0.001"'
NO_L_INFINITY = "no ACR in L∞, which needs radii in L2 and the image size of a known data set"
SEEDS = (
    "Runs that differ only in their training seed, on the same images and with the same settings; sd: sample standard "
    "deviation."
)
INTERVALS = (
    "Wilson intervals over the choice of images, for ACR that of numbers between 0 and the largest radius. They do not "
    "include the spread over seeds."
)


@dataclass(frozen=True)
class LatexTable:
    """How report.tex looks."""

    columns: Sequence[str] = ()
    """The keys of its columns, as in report.csv; () for the usual ones."""
    caption: str | None = None
    """Of the table of runs, and the start of that of the table over seeds; None for the usual ones."""
    label: str | None = None
    """Of the table of runs; that of the table over seeds ends in `-seeds`."""


@dataclass(frozen=True)
class Choices:
    """What a report is asked for; `write_report` explains the fields."""

    radii: Sequence[float] | None = None
    title: str = "Certified robustness"
    published: PublishedFor | None = None
    gallery: Gallery | None = None
    same_images: bool = True
    reference: str | None = None
    described: Sequence[Description] = ()
    l_infinity: bool = False
    latex: LatexTable = LatexTable()


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
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """File name -> content of the figures of the report."""
    comparisons: Sequence[Comparison] = ()
    """The runs of each sigma, data set and norm next to each other."""
    sweeps: Sequence[Sweep] = ()
    """ACR against the hyper-parameters that take three or more numbers."""
    latex: LatexTable = LatexTable()
    reference: str | None = None
    """The name of the run that was asked for as the reference."""

    @property
    def tables(self) -> str:
        """The paper's table that runs are compared with."""
        return ", ".join(dict.fromkeys(row.table for row in self.published.values()))

    @cached_property
    def panels(self) -> list[Panel]:
        """The runs of each sigma and data set with their labels in figures."""
        return panels_of(self.summaries)

    @property
    def labels(self) -> dict[str, str]:
        """Name of a run -> its label in figures."""
        return {run.name: one_line(label) for panel in self.panels for label, run in panel}

    @property
    def headlines(self) -> list[str]:
        """The result in words, one paragraph per comparison."""
        return headlines(self.comparisons, self.seeds)

    @property
    def compares_runs(self) -> bool:
        """Whether runs are next to each other: bold, differences and what is established need two."""
        return any(len(comparison.runs) > 1 for comparison in self.comparisons)

    @property
    def explanations(self) -> list[str]:
        """What the numbers, words and signs of the tables mean, one paragraph each."""
        constants = constant_sentences(self.comparisons)
        return [f"{NUMBERS} Bold: {RANKED}.", *constants, STATISTICS] if self.compares_runs else [NUMBERS, *constants]

    @cached_property
    def table(self) -> Layout:
        """The table of the runs."""
        return layout(self.summaries, self.published, self.comparisons)

    @cached_property
    def seeds_table(self) -> Layout | None:
        """The table of the means over seeds; None without any."""
        return seeds_layout(self.seeds, self.published, self.comparisons) if self.seeds else None

    @cached_property
    def further(self) -> list[FurtherTable]:
        """The tables after the first."""
        seeds = []
        if (table := self.seeds_table) is not None:
            seeds = [FurtherTable("Mean ± sd over seeds", " ".join([SEEDS, *seeds_sentences(table)]), table)]
        intervals = FurtherTable("95% confidence intervals", INTERVALS, intervals_layout(self.summaries))
        return [*seeds, *further_tables(self.comparisons), intervals]

    @property
    def hyperparameters(self) -> set[str]:
        """The keys of the hyper-parameters that the table has columns for."""
        return {key for summary in self.summaries for key in summary.hyperparameters}


def read_contents(paths: Sequence[Path], choices: Choices) -> Contents:
    """The contents of a report of `paths`; every file is read and checked, and nothing is written."""
    radii = None if choices.radii is None else checked_radii(choices.radii)
    whole, notes = _reported_files(paths, choices)
    rows = {} if choices.published is None else published_rows(whole, choices.published)
    whole.sort(key=lambda run: place_in_table(rows.get(run[0])))
    files = cut_to_shared_images(whole) if choices.same_images else whole
    if radii is None:
        radii = sorted({radius for row in rows.values() for radius in row.accuracy_at})
    radii = radii or default_radii([file for _, file in files])
    summaries = [summarize(file, name, radii) for name, file in files]
    differences = {s.name: _differences(s, every) for s, (_, every) in zip(summaries, whole, strict=True)}
    notes += [(text, name) for name, texts in differences.items() for text in texts]
    summaries = [replace(s, remarks=(*s.remarks, *differences[s.name])) for s in summaries]
    summaries = with_hyperparameters(summaries)
    if choices.l_infinity:
        summaries = [replace(s, l_infinity=implied_l_infinity(s)) for s in summaries]
        notes += [(NO_L_INFINITY, s.name) for s in summaries if s.l_infinity is None]
    notes += [(NO_SIGMA, s.name) for s in summaries if s.sigma is None]
    reference = _name_of(choices.reference, summaries)
    compared = comparisons(summaries, reference)
    notes += [(f"not ranked: {'; '.join(c.obstacles)}", run.name) for c in compared if c.obstacles for run in c.runs]
    warnings: dict[str, list[str]] = {}
    for note, name in notes:
        warnings.setdefault(note, []).append(name)
    return Contents(
        title=choices.title,
        summaries=summaries,
        seeds=over_seeds(summaries),
        published=rows,
        notes=comparison_notes(by_sigma(summaries), rows),
        warnings=warnings,
        trained=training_runs(summaries),
        gallery=choices.gallery,
        comparisons=compared,
        sweeps=sweeps(summaries),
        latex=choices.latex,
        reference=reference,
    )


def _name_of(reference: str | None, summaries: Sequence[Summary]) -> str | None:
    """The name of the run that `reference` is the path of; any other text unchanged."""
    if reference is None or "\0" in reference or any(summary.name == reference for summary in summaries):
        return reference
    path = Path(os.path.realpath(reference))
    names = [s.name for s in summaries if path in (s.file.path.resolve(), run_of_certificates(s.file.path))]
    if len(names) > 1:
        raise RequestError(
            f"reference: expected one run, got {reference}, which has the certificates {', '.join(names)}; give the "
            "name of one"
        )
    return names[0] if names else reference


def _reported_files(paths: Sequence[Path], choices: Choices) -> tuple[list[Named], list[tuple[str, str]]]:
    """The files of `paths` that the report is about, and a note, with a name, for each run or file that is left out.

    A file without rows is kept if no file has any: it is refused later.
    """
    located, uncertified = locate(paths)
    files = {path: _read(path) for _, path in located}
    trials: list[Path] = []
    if choices.same_images:  # the other runs would be cut to the few images of a trial
        given = {path.resolve() for path in paths}
        others = [path for path, file in files.items() if file.rows and path.resolve() not in given]
        trials = [path for path in others if any(_covers(whole, files[path]) for whole in files.values())]
    names = distinct_names([path.name for path in uncertified], uncertified)
    notes = [(NO_CERTIFICATES, name) for name in names]
    notes += [(TRIAL, name) for name, path in located if path in trials]
    if trials:
        located, _ = locate(paths, without=trials)
    named = describe([(name, files[path]) for name, path in located], choices.described)
    named = [_marked(name, file) for name, file in named]
    notes += [(NO_IMAGES, name) for name, file in named if not file.rows]
    return [(name, file) for name, file in named if file.rows] or named, notes


def _marked(name: str, file: CertificatesFile) -> tuple[str, CertificatesFile]:
    """Name what makes a file not comparable with plain certificates: tables and pictures show it after its name."""
    marks = {
        "label-aware": bool(file.settings.get("label_aware")),
        "L1": norm_of(file) == "L1",
        "cascade": bool(file.settings.get("cascade")),
        "randomized bound": file.is_randomized,
    }
    return " ".join([name, *(f"({mark})" for mark, holds in marks.items() if holds)]), file


def _read(path: Path) -> CertificatesFile:
    """A certificates file whose radii can be drawn and whose settings are flat enough to be shown."""
    check_regular_file(path)
    file = read_certificates(path)
    largest = file.columns.radius.max(initial=0.0)
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


def _differences(summary: Summary, whole: CertificatesFile) -> list[str]:
    """What tells the numbers of a run from those of a usual one; `whole` is its file with all images."""
    settings = summary.file.settings
    recipe = summary.recipe
    differences = []
    trained_on = str(recipe.get("dataset") or "")
    if summary.dataset and were_trained_on(summary.dataset, summary.split or "", trained_on):
        differences.append("certified on images that it was trained on: new images may do worse")
    trained, certified = settings.get("training_sigma"), settings.get("sigma")
    if None not in (trained, certified) and trained != certified:
        differences.append(f"certified with sigma {certified}, trained with sigma {trained}")
    trained_noise, noise = (fields.get("noise") or "gaussian" for fields in (recipe, settings))
    if recipe and certified is not None and trained_noise != noise:
        differences.append(f"certified with {noise} noise, trained with {trained_noise} noise")
    # The images of an interrupted or partly merged file may be those of a few classes.
    merged = whole.provenance.get("incomplete")
    missing = "; ".join(map(str, merged)) if isinstance(merged, list) else missing_rows(replace(whole, torn=False))
    if missing:
        differences.append(f"incomplete: {one_line(missing)[:200]}")
    if summary.images < len(whole.rows):
        images = counted(summary.images, "image")
        are = "is" if summary.images == 1 else "are"
        differences.append(f"only the {images} that all runs of the same σ have {are} counted")
    return differences


def _covers(whole: CertificatesFile, part: CertificatesFile) -> bool:
    """Whether `part` is a trial of `whole`: of the same run, for some of its images, with at most as many votes."""
    if part.path.parent != whole.path.parent or part.path.parent.name != CERTIFICATES:
        return False
    settings, others = ({k: v for k, v in file.settings.items() if k not in VOTES} for file in (whole, part))
    fewer = (part.settings.get("n") or 0) <= (whole.settings.get("n") or 0)
    return settings == others and fewer and set(part.columns.index.tolist()) < set(whole.columns.index.tolist())


def cut_to_shared_images(files: Sequence[Named]) -> list[Named]:
    """`files` with only the images that all files of one sigma, data set, split and norm share.

    Files that have no image in common, or whose images are known to differ, keep all of theirs: they are not ranked.
    """
    keys = [(*(file.settings.get(key) for key in ("sigma", "dataset", "split")), norm_of(file)) for _, file in files]
    shared: dict[object, set[int]] = {}
    digests: dict[object, set[object]] = {}
    for key, (_, file) in zip(keys, files, strict=True):
        indices = set(file.columns.index.tolist())
        digests.setdefault(key, set()).add(file.settings.get("images_sha256"))
        shared[key] = shared.get(key, indices) & indices if len(digests[key] - {None}) < 2 else set()
    return [
        (name, file.only(shared[key]) if 0 < len(shared[key]) < len(file.rows) and key[0] is not None else file)
        for key, (name, file) in zip(keys, files, strict=True)
    ]


def checked_radii(given: object) -> list[float]:
    """The radii ascending, each once; none, or some that a table cannot tell apart, are a RequestError."""
    try:
        radii = [float(radius) for radius in given]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise RequestError(f"radii: expected numbers, got {given!r}; give for example (0, 0.5, 1)") from error
    wrong = [r for r in radii if not 0 <= r <= LARGEST_RADIUS]
    if wrong or not radii:
        first = f"{wrong[0]:g}" if wrong else "none"
        raise RequestError(
            f"expected radii from 0 to {LARGEST_RADIUS:,.0f} for the columns of the table, got {first}; "
            "give for example 0 0.5 1"
        )
    distinct = sorted(set(radii))
    if len({f"{r:.{MOST_DECIMALS}f}" for r in distinct}) < len(distinct):
        raise RequestError(f"expected radii that differ in {MOST_DECIMALS} decimals, got some that do not; give others")
    return distinct
