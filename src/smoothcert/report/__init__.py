"""Tables, figures and pages from certificates files. Reads those only: no model, no checkpoint, no forward pass."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from smoothcert.certification.certificates import CertificatesFile, read_certificates
from smoothcert.errors import RequestError, WorkError, write_error
from smoothcert.io.files import check_regular_file
from smoothcert.io.results import settings_path
from smoothcert.io.written_files import write_files
from smoothcert.report.comparison import Published, comparison_notes, place_in_table, published_rows
from smoothcert.report.curves import draw_curves
from smoothcert.report.distribution import draw_distribution
from smoothcert.report.document import TEXTS, Contents, terminal_report
from smoothcert.report.html_gallery import Gallery
from smoothcert.report.layout import MOST_DECIMALS
from smoothcert.report.locate import find_certificates
from smoothcert.report.metrics import read_run, training_runs
from smoothcert.report.run_table import report
from smoothcert.report.seeds import SeedMean, over_seeds, run_recipe
from smoothcert.report.shared_images import cut_to_shared_images
from smoothcert.report.style import PICTURE_FORMATS
from smoothcert.report.summary import (
    Summary,
    abstention_rate,
    average_certified_radius,
    certified_accuracy,
    default_radii,
    in_l1,
    largest_certifiable_radius,
    summarize,
)
from smoothcert.report.tables import (
    by_sigma,
    csv_table,
    differing_protocols,
    latex_table,
    markdown_table,
    on_the_same_images,
    terminal_table,
)
from smoothcert.report.training_curves import draw_training_curves

__all__ = [
    "FORMATS",
    "Contents",
    "Published",
    "Report",
    "SeedMean",
    "Summary",
    "abstention_rate",
    "average_certified_radius",
    "certified_accuracy",
    "csv_table",
    "default_radii",
    "differing_protocols",
    "draw_curves",
    "find_certificates",
    "largest_certifiable_radius",
    "latex_table",
    "markdown_table",
    "on_the_same_images",
    "summarize",
    "terminal_report",
    "terminal_table",
    "write_report",
]

FORMATS = (*TEXTS, *PICTURE_FORMATS)
MOST_RADII, LARGEST_RADIUS = 1_000, 1e6
DEEPEST = 50
"""Levels of settings inside settings; ours have four."""
NO_IMAGES = "left out: no image is certified yet"
PublishedFor = Callable[[Path], Published | None]


@dataclass(frozen=True)
class Report:
    """What was reported, and the files that were written."""

    contents: Contents
    written: list[Path]

    @property
    def summaries(self) -> list[Summary]:
        """The numbers of each run, in the order given, or that of the paper's table."""
        return list(self.contents.summaries)


def write_report(
    paths: Sequence[Path],
    out: Path,
    formats: Sequence[str] = ("md", "csv", "tex", "png"),
    radii: Sequence[float] | None = None,
    title: str = "Certified robustness",
    published: PublishedFor | None = None,
    gallery: Gallery | None = None,
    same_images: bool = False,
    force: bool = False,
) -> Report:
    """Tabulate and draw the certificates that `paths` name (see `find_certificates`) into the folder `out`.

    Writes report.md, report.csv, report.tex and report.html and, as png, pdf or svg, curves, distribution and training
    (the last two where the files contain what they need), as `formats` asks, each replaced atomically; with runs that
    differ by their training seed only, report-seeds.csv too. Everything is read, checked and drawn before the first
    file is written. Files in `out` that smoothcert did not write are refused, unless `force` replaces them.
    `published` gives for a certificates file the row of a paper's table to set beside it, or None; runs then come in
    the order of the table. `radii` are the columns of the tables, by default those of the paper's table, else of
    `default_radii`. `gallery` has the pictures of the HTML page. With `same_images` only the images count that all
    files of a data set have.
    """
    formats = _checked_formats(formats)
    contents = _contents(paths, radii, title, published, gallery, same_images)
    try:
        pictures = _drawn(contents, [kind for kind in formats if kind in PICTURE_FORMATS])
    except OSError as error:
        raise write_error(out, error) from error
    drawn = [out / name for name, picture in pictures.items() if picture is not None]
    contents = replace(contents, pictures=drawn)
    texts = {name: text for kind in formats if kind in TEXTS for name, text in TEXTS[kind](contents).items()}
    files = {name: None if text is None else text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
    return Report(contents, write_files(out, {**files, **pictures}, force))


def _drawn(contents: Contents, kinds: Sequence[str]) -> dict[str, bytes | None]:
    """File name -> picture, for all figures; None for figures that the files do not contain enough for."""
    if not kinds:
        return {}
    with tempfile.TemporaryDirectory(prefix="smoothcert-") as folder:
        figures = {
            name: [Path(folder) / f"{name}.{kind}" for kind in kinds] for name in ("curves", "distribution", "training")
        }
        draw_curves(contents.files, figures["curves"])
        draw_distribution(contents.files, figures["distribution"])
        draw_training_curves(contents.trained, figures["training"])
        paths = [path for pictures in figures.values() for path in pictures]
        return {path.name: path.read_bytes() if path.exists() else None for path in paths}


def _contents(
    paths: Sequence[Path],
    radii: Sequence[float] | None,
    title: str,
    published: PublishedFor | None,
    gallery: Gallery | None,
    same_images: bool,
) -> Contents:
    """All that a report of `paths` says, read and computed."""
    chosen = None if radii is None else _checked_radii(radii)
    found = [_marked(name, _read(path)) for name, path in find_certificates(paths)]
    given = [(name, file) for name, file in found if file.rows] or found
    empty = [name for name, file in found if not file.rows]
    rows = {} if published is None else published_rows(given, published)
    given.sort(key=lambda named: place_in_table(rows.get(named[0])))
    files = cut_to_shared_images(given) if same_images else given
    if chosen is None:
        chosen = sorted({radius for row in rows.values() for radius in row.accuracy_at})
    columns = chosen or default_radii([file for _, file in files])
    trained_otherwise = {name: _trained_otherwise(file) for name, file in files}
    summaries = [
        _with_remarks(summarize(file, name, columns), trained_otherwise[name], whole)
        for (name, file), (_, whole) in zip(files, given, strict=True)
    ]
    warnings: dict[str, list[str]] = {NO_IMAGES: empty} if empty else {}
    for name, differences in trained_otherwise.items():
        for difference in differences:
            warnings.setdefault(difference, []).append(name)
    return Contents(
        title=title,
        files=files,
        summaries=summaries,
        seeds=over_seeds([file for _, file in files], summaries),
        published=rows,
        notes=comparison_notes(by_sigma(summaries), rows),
        warnings=warnings,
        trained=[read_run(name, folder) for name, folder in training_runs(files)],
        gallery=gallery,
    )


def _marked(name: str, file: CertificatesFile) -> tuple[str, CertificatesFile]:
    """A label-aware file answers another question than the others, as does one in L1: its name says so in every table
    and picture."""
    marks = {"label-aware": bool(file.settings.get("label_aware")), "L1": in_l1(file)}
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
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise WorkError(f"{settings_path(path)}: damaged, expected at most {DEEPEST} levels of settings, got more")
    return file


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _trained_otherwise(file: CertificatesFile) -> list[str]:
    """How the noise of the certificates differs from that of training, as far as the files say: the network may be poor
    under noise that it has not seen."""
    trained, certified = file.settings.get("training_sigma"), file.settings.get("sigma")
    found = []
    if None not in (trained, certified) and trained != certified:
        found.append(f"certified with sigma {certified}, trained with sigma {trained}")
    recipe = run_recipe(file.path)
    if recipe is not None and certified is not None:
        trained_noise, noise = (settings.get("noise") or "gaussian" for settings in (recipe, file.settings))
        if trained_noise != noise:
            found.append(f"certified with {noise} noise, trained with {trained_noise} noise")
    return found


def _with_remarks(summary: Summary, remarks: Sequence[str], file: CertificatesFile) -> Summary:
    """With further remarks, and one if not all images of the file count."""
    cut = [f"of its {len(file.rows):,} images those that all runs have"] if summary.images < len(file.rows) else []
    return replace(summary, remarks=(*summary.remarks, *remarks, *cut))


def _checked_formats(formats: Sequence[str]) -> list[str]:
    unknown = [kind for kind in formats if kind not in FORMATS]
    if unknown or not formats:
        given = ", ".join(map(repr, unknown)) or "none"
        raise RequestError(f"expected report formats out of {', '.join(FORMATS)}, got {given}; choose from these")
    return list(dict.fromkeys(formats))


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


class _CallableModule(ModuleType):
    """Makes `smoothcert.report(...)` a function, although `smoothcert.report` is also this package."""

    __call__ = staticmethod(report)


sys.modules[__name__].__class__ = _CallableModule
