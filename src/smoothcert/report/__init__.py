"""Tables, figures and pages from certificates files. Reads only those: no model, no checkpoint, no forward pass."""

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from smoothcert.certification.certificates import CertificatesFile, read_certificates
from smoothcert.errors import RequestError
from smoothcert.io.compressed import stem
from smoothcert.io.console import PlainConsole
from smoothcert.io.files import with_home
from smoothcert.io.written_files import is_as_written, refuse_foreign_files, stored_request, write_files
from smoothcert.report.check import request_for
from smoothcert.report.contents import Choices, Contents, LatexTable, checked_radii, read_contents
from smoothcert.report.descriptions import parse_description
from smoothcert.report.document import TEXT_FILES, TEXTS, terminal_report
from smoothcert.report.figures import FIGURES, PICTURE_FORMATS, STORED_AS, digest_of, digests_stored_in, figures_of
from smoothcert.report.locate import find_certificates
from smoothcert.report.paired import Difference
from smoothcert.report.published import Published
from smoothcert.report.summary import Summary, summarize

if TYPE_CHECKING:  # tables are made without torch and matplotlib
    from matplotlib.figure import Figure

    from smoothcert.training.checkpoint import Run

__all__ = [
    "FORMATS",
    "Choices",
    "Contents",
    "LatexTable",
    "Published",
    "Report",
    "Summary",
    "find_certificates",
    "summarize",
    "write_report",
]

FORMATS = (*TEXTS, *PICTURE_FORMATS)
Row = dict[str, str | float | int | None]
_OF_LATEX = ("columns", "caption", "label")
"""The options of a report about how its table in LaTeX looks."""


@dataclass(frozen=True)
class Report:
    """The contents of a report, the files that were written, and those of an earlier report that were removed."""

    contents: Contents
    written: list[Path]
    removed: list[Path]

    def show(self, console: PlainConsole) -> None:
        """Print the result in words, the tables, and what was written and removed."""
        for shown in terminal_report(self.contents, console.width):
            console.print(shown)
        for path in self.written:
            console.print(f"wrote {path}")
        if self.removed:
            console.print(f"removed {', '.join(map(str, self.removed))}, from a report of other runs or options")


def write_report(
    paths: Sequence[Path],
    out: Path,
    formats: Sequence[str] = ("md", "csv", "tex", "png"),
    *,
    choices: Choices = Choices(),
    force: bool = False,
    request: Mapping[str, object] | None = None,
    **changes: Any,
) -> Report:
    """Tabulate and draw the certificates that `paths` name (see `find_certificates`) into the folder `out`.

    Writes report.md, report.csv, report.tex and report.html and, as png, pdf or svg, curves, distribution, sweeps and
    training (the last three if the files contain what they need), as `formats` asks, each replaced atomically;
    report-seeds.csv too if runs differ by their training seed only. Everything is read, checked and drawn before the
    first file is written. Files in `out` that smoothcert did not write are refused, unless `force` replaces them. If
    `paths` or `request` differ from those of an earlier report in `out`, the files of that one are removed.

    `changes` replace fields of `choices`. `published` gives for a certificates file the row of a paper's table to
    compare it with, or None; runs are then in the order of the table. `radii` are the columns of the tables, by default
    those of the paper's table, otherwise those of `default_radii`. `gallery` has the pictures of the HTML page. Unless
    `same_images` is False, only the images count that all files of one sigma and data set share. `reference` is the
    name or path of the run to take differences from, `described` describes files of other tools (see `describe`),
    `l_infinity` adds the L-infinity radius that ACR implies, `latex` has the columns, caption and label of report.tex.
    `request`, the options of the command `report` that lead to these choices, is stored in `out` together with `paths`,
    so that the report can be checked later (see `check`); without it nothing is stored or removed.
    """
    unknown = [kind for kind in formats if kind not in FORMATS]
    if unknown or not formats:
        given = ", ".join(map(repr, unknown)) or "none"
        raise RequestError(f"expected report formats out of {', '.join(FORMATS)}, got {given}; choose from these")
    refuse_foreign_files(out, (), force)  # a file in place of the folder, before anything is drawn
    formats = list(dict.fromkeys(formats))
    contents = read_contents(paths, replace(choices, **changes))
    pictures, digests = _drawn(contents, [kind for kind in formats if kind in PICTURE_FORMATS])
    contents = replace(contents, pictures={name: file for name, file in pictures.items() if file is not None})
    texts = {name: text for kind in formats if kind in TEXTS for name, text in TEXTS[kind](contents).items()}
    files = {name: None if text is None else text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
    stored = None if request is None else request_for(out, paths, {**request, "reference": contents.reference})
    old = [name for name in _files_of_other_report(out, stored) if name not in {**files, **pictures}]
    if stored is not None and not old and "tex" not in formats:  # the table of the earlier call stays as it looks
        earlier = stored_request(out) or {}
        stored |= {key: earlier[key] for key in _OF_LATEX if key in earlier}
    shown = {**({} if old else digests_stored_in(out)), **digests}
    stored = {**stored, STORED_AS: shown} if stored and shown else stored
    written = write_files(out, {**files, **pictures, **dict.fromkeys(old)}, force, stored)
    return Report(contents, written, [out / name for name in old])


def _files_of_other_report(out: Path, request: Mapping[str, object] | None) -> list[str]:
    """The files in `out` of a report that was asked for other runs or options than `request`; users' files stay.

    A report that differs in its formats, or in how its table in LaTeX looks, is the same one.
    """
    earlier = stored_request(out)
    if request is None or earlier is None:
        return []
    if all(earlier.get(key) == request.get(key) for key in {*earlier, *request}.difference((STORED_AS, *_OF_LATEX))):
        return []
    names = (*TEXT_FILES, *(f"{figure}.{kind}" for figure in FIGURES for kind in PICTURE_FORMATS))
    return [name for name in names if is_as_written(out, name)]


def _drawn(contents: Contents, kinds: Sequence[str]) -> tuple[dict[str, bytes | None], dict[str, str]]:
    """File name -> picture, for all figures, None for figures that the files do not contain enough for; and the digests
    of what the figures show, by their names."""
    if not kinds:
        return {}, {}
    from smoothcert.report.style import pictures_of  # imports matplotlib

    pictures: dict[str, bytes | None] = {}
    digests: dict[str, str] = {}
    for name, draw in figures_of(contents).items():
        draw_once = cache(draw)
        pictures |= pictures_of(name, draw_once, kinds)
        if (figure := draw_once()) is not None:
            digests[name] = digest_of(figure)
    return pictures, digests


def report(
    runs: "str | Path | Run | CertificatesFile | Iterable[str | Path | Run | CertificatesFile]",
    *,
    radii: Sequence[float] | None = None,
    reference: str | Path | None = None,
    described: str | Sequence[str] = (),
    out: str | Path | None = None,
    formats: str | Sequence[str] = ("md", "csv", "html", "png"),
) -> list[Row]:
    """Return one row per certificates file of `runs` (run folders, folders of them, or files), for `pandas.DataFrame`.

    A row has the name, data set, method, sigma, the training seed and the hyper-parameters in which runs of one method
    differ (None for runs without them), average certified radius (ACR) and its standard error, the certified accuracy
    (a fraction) at each of `radii`, the abstention rate and the number of images and votes. The accuracy is None where
    the tables have a dash. Runs of one sigma and data set are compared on the images that all of them have:
    `acr_minus_reference` is the difference from the run `reference` (its name or path; by default the Gaussian or first
    one), with the standard error of the paired difference. `described` says what each file of another tool holds, as
    `--as` of the command `smoothcert report` does, for example "name=CAT-RS,sigma=0.5,n=100000,alpha=0.001". With
    `out`, the report is also written there, as the command does: tables and a page as md, csv, tex and html, figures as
    png, pdf and svg. Files of an earlier report of other runs or options in `out` are removed.
    """
    given = runs if isinstance(runs, Iterable) and not isinstance(runs, str | CertificatesFile) else [runs]
    paths = [
        run.path if isinstance(run, CertificatesFile) else run.folder if hasattr(run, "folder") else with_home(run)
        for run in given
    ]
    radii = None if radii is None else checked_radii(radii)
    formats = [kind.strip() for kind in formats.split(",")] if isinstance(formats, str) else formats
    texts = [described] if isinstance(described, str) else list(described)
    reference = None if reference is None else str(reference)
    choices = Choices(radii=radii, reference=reference, described=list(map(parse_description, texts)))
    if out is None:
        contents = read_contents(paths, choices)
    else:
        from smoothcert.report.thumbnails import pictures

        columns = ",".join(str(float(radius)).removesuffix(".0") for radius in radii or ())
        asked = {"radii": columns, "reference": reference, "described": texts}
        contents = write_report(
            paths, with_home(out), formats, choices=choices, gallery=pictures, request=asked
        ).contents
    for note, names in contents.warnings.items():
        warnings.warn(f"{', '.join(names)}: {note}", stacklevel=2)
    differences = {run.name: (c.reference, run.acr) for c in contents.comparisons for run in c.paired}
    settings = list(dict.fromkeys(key for summary in contents.summaries for key in summary.hyperparameters))
    return [_row(summary, settings, *differences.get(summary.name, (None, None))) for summary in contents.summaries]


def _row(summary: Summary, settings: Sequence[str], reference: str | None, difference: Difference | None) -> Row:
    accuracies = {f"certified_accuracy_{radius:g}": summary.shown_accuracy(radius) for radius in summary.accuracy_at}
    run: Row = {
        "name": summary.name,
        "dataset": summary.dataset,
        "method": summary.named.label(),
        "sigma": summary.sigma,
        "seed": summary.recipe.get("seed"),
    }
    results: Row = {
        "acr": summary.acr,
        "acr_standard_error": summary.acr_standard_error,
        **accuracies,
        "abstention": summary.abstention,
        "images": summary.images,
        "n": summary.n,
        "alpha": summary.alpha,
        "bound": str(summary.protocol["bound"]),
        "votes": summary.votes,
        "reference": reference,
        "acr_minus_reference": None if difference is None else difference.value,
        "acr_minus_reference_standard_error": None if difference is None else difference.standard_error,
    }
    # A recipe of the user's own may have a field such as "name": the names of the report win.
    return run | {key: summary.hyperparameters.get(key) for key in settings} | run | results


def plot_certificates(file: CertificatesFile, path: str | Path | None) -> "Figure":
    """Draw the curve of one file; also write the figure to `path` if one is given."""
    from smoothcert.report.curves import draw_curves

    figure = draw_curves([summarize(file, stem(file.path), ())])
    if path is not None:
        figure.savefig(path)
    return figure


def certificates_of_run(folder: Path, name: str | None) -> CertificatesFile:
    """The only certificates file of the run, or the one called `name`."""
    files = {stem(path): path for _, path in find_certificates([folder])}
    first, *more = files
    if name is None and more:
        raise RequestError(
            f"{folder}: expected one certificates file, got {', '.join(files)}; choose one with "
            f"read_certificates({first!r})"
        )
    if name is not None and name not in files:
        raise RequestError(f"{folder}: expected certificates among {', '.join(files)}, got {name}")
    return read_certificates(files[name or first])


class _CallableModule(ModuleType):
    """Makes `smoothcert.report(...)` a function, although `smoothcert.report` is also this package."""

    __call__ = staticmethod(report)


sys.modules[__name__].__class__ = _CallableModule
