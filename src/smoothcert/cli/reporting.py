"""`smoothcert report`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoothcert.cli.options import Data, Force, console, parse_radii
from smoothcert.data.datasets import refuse_absent_data
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.compressed import existing_form
from smoothcert.io.references import same_reference
from smoothcert.io.text import counted
from smoothcert.training.run_folder import check_exists

if TYPE_CHECKING:
    from smoothcert.report import Choices


@dataclass(frozen=True)
class ReportRequest:
    """What a report is asked for, as it is stored next to the report: paths are relative to its folder."""

    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Run folders, folders of them, or certificates files, also of other tools."),
    ] = None
    title: Annotated[str | None, typer.Option(help="Title of the report.")] = None
    radii: Annotated[
        str | None, typer.Option(help="Comma-separated radii of the table.", rich_help_panel="Numbers")
    ] = None
    paper: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Show the published rows of a table, such as smoothmix/table2.")
    ] = None
    all_images: Annotated[
        bool,
        typer.Option("--all-images", help="Count all images of each run, not only those that all runs of a σ have."),
    ] = False
    reference: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Run to subtract from the others (name or path); by default plain Gaussian."),
    ] = None
    described: Annotated[
        list[str] | None,
        typer.Option(
            "--as",
            metavar="KEY=VALUE,...",
            help="Describe a file of another tool, once per file: name=CAT-RS,sigma=0.5,n=100k,alpha=0.001",
        ),
    ] = None
    linf: Annotated[
        bool,
        typer.Option("--linf", help="Add ACR / sqrt(d), the L-infinity radius it implies."),
    ] = False
    columns: Annotated[
        str | None,
        typer.Option(help="Columns of report.tex, by their names in report.csv: name,acr,acr_minus_reference."),
    ] = None
    caption: Annotated[
        str | None, typer.Option(help="Caption of report.tex; a table over seeds appends its description.")
    ] = None
    label: Annotated[str | None, typer.Option(help="Label of report.tex; a table over seeds appends -seeds.")] = None

    @property
    def paths(self) -> list[Path]:
        return list(map(Path, self.runs or ()))

    @classmethod
    def stored_in(cls, folder: Path) -> "ReportRequest":
        """Return the request of the report in `folder`, with the paths of its runs from the current folder."""
        from pydantic import TypeAdapter, ValidationError

        from smoothcert.report.check import request_of

        known = {key: value for key, value in request_of(folder).items() if key in cls.__dataclass_fields__}
        try:
            stored = TypeAdapter(cls).validate_python(known)
        except ValidationError as error:
            wrong = error.errors()[0]["loc"][0]
            raise WorkError(
                f"{folder}: the stored request of the report is damaged: '{wrong}'; write it again"
            ) from error
        if not stored.runs:
            raise WorkError(f"{folder}: the stored request of the report is damaged: expected its runs; write it again")
        # A file may have been compressed since.
        runs = [str(existing_form(Path(os.path.normpath(folder / run)))) for run in stored.runs]
        if missing := [run for run in runs if not os.path.exists(run)]:
            raise RequestError(
                f"{folder}: expected the certificates of its report at {missing[0]}, got nothing there; say where the "
                f"runs are, with the options of the report: `smoothcert report RUNS --check {folder}`"
            )
        return replace(stored, runs=runs)

    def choices(self) -> "Choices":
        """Return what `write_report` takes; wrong radii, descriptions and tables are refused."""
        from smoothcert.report import Choices, LatexTable
        from smoothcert.report.descriptions import parse_description

        published = None
        if self.paper is not None:
            from smoothcert.papers.rows import published_for

            published = published_for(self.paper)
        columns = [] if self.columns is None else [key.strip() for key in self.columns.split(",")]
        return Choices(
            radii=parse_radii(self.radii),
            published=published,
            same_images=not self.all_images,
            reference=self.reference,
            described=[parse_description(text) for text in self.described or ()],
            l_infinity=self.linf,
            latex=LatexTable(columns, self.caption, self.label),
            title=Choices.title if self.title is None else self.title,
        )


def report(
    *,
    request: ReportRequest,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    format_: Annotated[
        str, typer.Option("--format", help="Comma-separated formats: md, csv, tex, html, png, pdf, svg.")
    ] = "md,csv,html,png",
    images: Annotated[
        list[str] | None,
        typer.Option(metavar="folder:PATH", help="Your own images (or npz:PATH) to show in the HTML page."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write nothing: recompute every number of the report in DIR."),
    ] = None,
    force: Force = False,
    data: Data = None,
) -> None:
    """Make tables, figures and an HTML page from certificates."""
    if check is not None:
        _check(check, request if request.runs else ReportRequest.stored_in(check))
        return
    formats = [f.strip() for f in format_.split(",")]
    for option, value, needed in (
        ("--columns", request.columns, "tex"),
        ("--caption", request.caption, "tex"),
        ("--label", request.label, "tex"),
        ("--images", images, "html"),
    ):
        if value and needed not in formats:
            raise RequestError(f"{option}: expected {needed} in --format with it, got {format_}; add {needed}")
    for path in request.paths:
        check_exists(path)
    from smoothcert.report import write_report

    choices = replace(request.choices(), gallery=_gallery(images or (), data) if "html" in formats else None)
    options = {key: value for key, value in vars(request).items() if key != "runs"}
    written = write_report(request.paths, out, formats, choices=choices, force=force, request=options)
    written.show(console)
    _note_unused_images(images or (), [summary.dataset for summary in written.contents.summaries])


def _note_unused_images(images: Sequence[str], datasets: Sequence[str | None]) -> None:
    """Print a note for each of --images that none of the certificates is about, so that the page does not show it."""
    certified = sorted({dataset for dataset in datasets if dataset is not None})
    for name in images:
        if not any(same_reference(name, dataset) for dataset in certified):
            are = f"they are of {', '.join(certified)}" if certified else "they do not record their data set"
            console.note(f"--images {name}: not shown, no certificates here are of these images; {are}")


def _gallery(images: Sequence[str], data: Path | None) -> Any:
    """The test images, if they are available; the other formats need no torch."""
    from smoothcert.report.thumbnails import own_images, pictures

    for name in images:
        if not own_images(name):
            raise RequestError(f"images: expected folder:PATH or npz:PATH, got '{name}'; name where your images are")
        refuse_absent_data(name)
    return partial(pictures, folder=data, named=images)


def _check(folder: Path, request: ReportRequest) -> None:
    """Compare the report in `folder` with its certificates; differences are printed and are failed work."""
    for path in request.paths:
        check_exists(path)
    from smoothcert.report.check import MOST_SHOWN, differing_numbers
    from smoothcert.report.contents import read_contents

    contents = read_contents(request.paths, request.choices())
    differences = differing_numbers(folder, contents)
    for line in differences[:MOST_SHOWN]:
        console.print(line)
    if differences:
        raise WorkError(f"{folder}: {counted(len(differences), 'difference')} from the certificates; report again")
    console.print(f"{folder}: every number agrees with the certificates")
