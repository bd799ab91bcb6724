"""Tables and curves from certificates files. Reads those only: no model, no checkpoint, no forward pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smoothcert.certificates import CertificatesFile, read_certificates
from smoothcert.errors import RequestError
from smoothcert.files import write_text_atomically
from smoothcert.report.curves import PICTURE_FORMATS, draw_curves
from smoothcert.report.locate import find_certificates
from smoothcert.report.summary import (
    Summary,
    abstention_rate,
    average_certified_radius,
    certified_accuracy,
    default_radii,
    largest_certifiable_radius,
    summarize,
)
from smoothcert.report.tables import (
    by_sigma,
    csv_table,
    escape_markdown,
    latex_table,
    markdown_table,
    terminal_table,
)

__all__ = [
    "FORMATS",
    "Report",
    "Summary",
    "abstention_rate",
    "average_certified_radius",
    "certified_accuracy",
    "csv_table",
    "default_radii",
    "draw_curves",
    "find_certificates",
    "largest_certifiable_radius",
    "latex_table",
    "markdown_table",
    "summarize",
    "terminal_table",
    "write_report",
]

FORMATS = ("md", "csv", "tex", *PICTURE_FORMATS)


@dataclass(frozen=True)
class Report:
    """The numbers of each run, in the order given, and the files that were written."""

    summaries: list[Summary]
    written: list[Path]


def write_report(
    paths: Sequence[Path],
    out: Path,
    formats: Sequence[str] = ("md", "csv", "tex", "png"),
    radii: Sequence[float] | None = None,
    title: str = "Certified robustness",
) -> Report:
    """Tabulate and draw the certificates that `paths` name (see `find_certificates`) into the folder `out`.

    Writes report.md, report.csv, report.tex and curves.png/.pdf/.svg, as `formats` asks, each replaced atomically.
    Everything is read and checked before the first file is written. `radii` are the columns of the tables, by default
    those of `default_radii`.
    """
    formats = _checked_formats(formats)
    found = find_certificates(paths)
    files = [_marked(name, read_certificates(path)) for name, path in found]
    columns = default_radii([file for _, file in files]) if radii is None else _checked_radii(radii)
    summaries = [summarize(file, name, columns) for name, file in files]
    pictures = [out / f"curves.{kind}" for kind in formats if kind in PICTURE_FORMATS]
    texts = {
        "md": lambda: _markdown(title, summaries, pictures),
        "csv": lambda: csv_table(summaries),
        "tex": lambda: latex_table(summaries),
    }
    rendered = {out / f"report.{kind}": texts[kind]() for kind in formats if kind in texts}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if pictures:
            draw_curves(files, pictures)
        for path, text in rendered.items():
            write_text_atomically(path, text)
    except OSError as error:
        raise RequestError(
            f"{out}: expected a folder to write to, got '{error.strerror or error}'; choose another folder"
        ) from error
    return Report(summaries, [*rendered, *pictures])


def _marked(name: str, file: CertificatesFile) -> tuple[str, CertificatesFile]:
    """A label-aware file answers another question than the others: its name says so in every table and picture."""
    return (f"{name} (label-aware)" if file.settings.get("label_aware") else name), file


def _checked_formats(formats: Sequence[str]) -> list[str]:
    unknown = [kind for kind in formats if kind not in FORMATS]
    if unknown or not formats:
        given = ", ".join(map(repr, unknown)) or "none"
        raise RequestError(f"expected report formats out of {', '.join(FORMATS)}, got {given}; choose from these")
    return list(dict.fromkeys(formats))


def _checked_radii(radii: Sequence[float]) -> list[float]:
    wrong = [r for r in radii if not (math.isfinite(r) and r >= 0)]
    if wrong or not radii:
        given = ", ".join(map(str, wrong)) or "none"
        raise RequestError(f"expected radii >= 0 for the columns of the table, got {given}; give for example 0 0.5 1")
    return [float(r) for r in radii]


def _described(summary: Summary) -> str:
    """One Markdown list item: how the run was certified, as far as its file tells."""
    error = summary.acr_standard_error
    parts = [
        f"ACR {summary.acr:.3f}" + ("" if error is None else f" ± {error:.3f} (standard error over images)"),
        f"{summary.images:,} images",
        None if summary.dataset is None else f"data set {escape_markdown(summary.dataset)}",
        None if summary.split is None else f"split {escape_markdown(summary.split)}",
        "n not recorded or mixed" if summary.n is None else f"n = {summary.n:,}",
        None if summary.n0 is None else f"n0 = {summary.n0:,}",
        "alpha not recorded" if summary.alpha is None else f"alpha = {summary.alpha:g}",
        None if summary.precision is None else f"precision {escape_markdown(summary.precision)}",
        f"{summary.votes:,} votes" if summary.votes else "votes not recorded",
        *map(escape_markdown, summary.remarks),
    ]
    return f"- **{escape_markdown(summary.name)}**: {', '.join(part for part in parts if part)}\n"


def _markdown(title: str, summaries: Sequence[Summary], pictures: Sequence[Path]) -> str:
    shown = [path.name for kind in (".png", ".svg") for path in pictures if path.suffix == kind]
    curves = (
        f"\n![Certified accuracy against radius]({shown[0]})\n\n"
        "A dashed vertical line marks the largest radius that n agreeing votes can certify; a thin line, where there "
        "is one, the accuracy that is left under attack.\n"
        if shown
        else ""
    )
    return (
        f"# {escape_markdown(title)}\n\n"
        f"{markdown_table(summaries)}\n"
        "Certified accuracy in % at each radius: the share of images that are classified correctly with a certified "
        "radius greater than it (at 0: correctly, without abstaining). "
        "ACR: average certified radius, 0 where wrong or abstained.\n"
        f"{curves}\n"
        "## How each run was certified\n\n"
        f"{''.join(map(_described, by_sigma(summaries)))}"
    )
