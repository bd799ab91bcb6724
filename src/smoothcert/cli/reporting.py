"""`smoothcert report` and `smoothcert quickstart`."""

from pathlib import Path
from typing import Annotated

import typer

from smoothcert.cli.options import Data, Force, console, parse_radii
from smoothcert.errors import RequestError
from smoothcert.training.run_folder import check_exists


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, folders of them, or certificates files.")],
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    format_: Annotated[
        str, typer.Option("--format", help="Formats, separated by commas: md, csv, tex, html, png, pdf, svg.")
    ] = "md,csv,html,png",
    radii: Annotated[str | None, typer.Option(help="Radii of the table, separated by commas.")] = None,
    paper: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Show the published rows of a table, such as smoothmix/table2.")
    ] = None,
    same_images: Annotated[
        bool, typer.Option("--same-images", help="Count only images that all runs of a data set have.")
    ] = False,
    images: Annotated[
        list[str] | None,
        typer.Option(metavar="folder:PATH", help="Your own images (or npz:PATH) to show in the HTML page."),
    ] = None,
    force: Force = False,
    data: Data = None,
) -> None:
    """Tables, figures and an HTML page from certificates."""
    for path in runs:
        check_exists(path)
    from functools import partial

    from smoothcert.report import differing_protocols, on_the_same_images, terminal_report, write_report

    published = None
    if paper is not None:
        from smoothcert.papers.rows import published_for

        published = published_for(paper)
    formats = [f.strip() for f in format_.split(",")]
    gallery = None
    if "html" in formats:  # the test images, where they are at hand; the rest of a report does without torch
        from smoothcert.report.thumbnails import own_images, pictures

        for name in images or ():
            if not own_images(name):
                raise RequestError(
                    f"images: expected folder:PATH or npz:PATH, got '{name}'; name where your images are"
                )
        gallery = partial(pictures, folder=data, named=images or ())
    written = write_report(
        runs,
        out,
        formats,
        parse_radii(radii),
        published=published,
        gallery=gallery,
        same_images=same_images,
        force=force,
    )
    for shown in terminal_report(written.contents, console.width):
        console.print(shown)
    if same_images:
        left = {summary.dataset or "the data": summary.images for summary in written.summaries}
        counts = ", ".join(f"{count:,} of {dataset}" for dataset, count in left.items())
        console.print(
            f"counted: the images that all runs of a data set have, whatever their σ: {counts}", soft_wrap=True
        )
    elif not on_the_same_images(written.summaries):
        console.print("not all runs are on the same images: compare them with --same-images")
    if differing := differing_protocols(written.summaries):
        console.print(f"runs of one σ were certified with different {', '.join(differing)}: no best is marked")
    for path in written.written:
        console.print(f"wrote {path}", soft_wrap=True)


def quickstart(out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = Path("quickstart")) -> None:
    """Bundled MNIST sample: models trained, certified, compared; report written."""
    from smoothcert.cli.quickstart import run_quickstart

    run_quickstart(out)
