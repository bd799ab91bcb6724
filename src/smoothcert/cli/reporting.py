"""`smoothcert report` and `smoothcert quickstart`."""

from pathlib import Path
from typing import Annotated

import typer

from smoothcert.cli.options import console, parse_radii


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders or certificates files.")],
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    format_: Annotated[str, typer.Option("--format", help="Of md, csv, tex, png, pdf, svg; by commas.")] = "md,csv,png",
    radii: Annotated[str | None, typer.Option(help="Radii of the table, by commas.")] = None,
) -> None:
    """Tables and certified-accuracy curves from certificates."""
    from smoothcert.report import terminal_table, write_report

    written = write_report(runs, out, [f.strip() for f in format_.split(",")], parse_radii(radii))
    console.print(terminal_table(written.summaries, console.width))
    for path in written.written:
        console.print(f"wrote {path}", soft_wrap=True)


def quickstart(out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = Path("quickstart")) -> None:
    """Bundled MNIST sample: models trained, certified, compared; report written."""
    from smoothcert.quickstart import run_quickstart

    run_quickstart(out)
