"""`smoothcert reproduce`: a paper's table, trained, certified and set beside the published numbers."""

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from smoothcert.cli.options import Data, Device, console
from smoothcert.errors import RequestError

Number = TypeVar("Number", int, float)


def reproduce(
    table: Annotated[str, typer.Argument(help="Paper and table, as in smoothmix/table2.")],
    sigma: Annotated[str | None, typer.Option(help="Rows of these noise levels, by commas.")] = None,
    method: Annotated[list[str], typer.Option(help="Rows whose label or run name has this in it; may repeat.")] = [],  # noqa: B006
    seeds: Annotated[str | None, typer.Option(help="Train each row with these seeds, by commas.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Scaled down: few epochs, images and votes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the estimate only.")] = False,
    jobs: Annotated[int, typer.Option(help="Runs at once.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs and report.", show_default="reproduced/PAPER-TABLE")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", "--votes", help="Votes an image.", show_default="the paper's")] = None,
    skip: Annotated[int | None, typer.Option(help="Every SKIP-th image.", show_default="the paper's")] = None,
    max_images: Annotated[int | None, typer.Option(help="Certify at most so many images.")] = None,
    set_: Annotated[list[str], typer.Option("--set", help="key=value: overrides a field of every recipe.")] = [],  # noqa: B006
    compile_: Annotated[bool, typer.Option("--compile", help="torch.compile the votes.")] = False,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """A paper's table: train and certify what is missing, then report it beside the published numbers."""
    from smoothcert.reproduction import Request, plan, plan_table
    from smoothcert.reproduction import reproduce as reproduce_table

    request = Request(
        table=table,
        out=Path("reproduced") / table.replace("/", "-") if out is None else out,
        sigmas=parse_numbers("sigma", sigma, float),
        methods=tuple(method),
        seeds=parse_numbers("seeds", seeds, int),
        quick=quick,
        overrides=tuple(set_),
        n=n,
        skip=skip,
        max_images=max_images,
        data=data,
        device=device,
        jobs=jobs,
        compile=compile_,
    )
    planned = plan(request)
    console.print(plan_table(request, planned))
    if dry_run:
        return
    reproduce_table(request, planned, console)


def parse_numbers(option: str, text: str | None, kind: type[Number]) -> tuple[Number, ...]:
    try:
        return () if text is None else tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise RequestError(f"{option}: expected numbers by commas, got {text}") from error
