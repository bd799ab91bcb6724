"""`smoothcert reproduce`: train and certify tables of the papers, and compare them with the published numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from smoothcert.cli.options import Data, Device, MaxImages, console, count_option, parse_numbers
from smoothcert.cli.recipes import refuse_twice
from smoothcert.data.datasets import DatasetReader
from smoothcert.errors import RequestError
from smoothcert.training.run_folder import refuse_file


def reproduce(
    tables: Annotated[list[str], typer.Argument(help="Tables, such as smoothmix/table2: see `smoothcert papers`.")],
    sigma: Annotated[str | None, typer.Option(help="Only rows of these comma-separated noise levels.")] = None,
    method: Annotated[list[str], typer.Option(help="Rows whose label or run name contains this; repeatable.")] = [],  # noqa: B006
    seeds: Annotated[str | None, typer.Option(help="Train each row with these comma-separated seeds.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Scaled down: few epochs, images and votes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the estimate only.")] = False,
    jobs: Annotated[int, typer.Option(help="Runs at once.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs and reports.", show_default="reproduced/PAPER-TABLE")
    ] = None,
    n: Annotated[
        int | None, count_option("--n", "--votes", help="Votes per image.", show_default="the paper's")
    ] = None,
    skip: Annotated[int | None, count_option(help="Every SKIP-th image.", show_default="the paper's")] = None,
    max_images: MaxImages = None,
    set_: Annotated[list[str], typer.Option("--set", help="key=value: overrides a field of every recipe.")] = [],  # noqa: B006
    compile_: Annotated[bool, typer.Option("--compile", help="Use torch.compile for the votes.")] = False,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Reproduce a paper's table: train and certify what is missing, and report it next to the published numbers."""
    refuse_twice({}, set_)
    from smoothcert.papers.tables import paper_table

    for table in tables:
        paper_table(table)  # refuses a wrong name before torch is imported
    from smoothcert.certification.estimate import LONG
    from smoothcert.papers.reproduce import QUICK, Request, plan, plan_table, share_runs
    from smoothcert.papers.reproduce import reproduce as reproduce_tables

    names = {table: table.replace("/", "-") for table in tables}
    if out is not None:
        refuse_file(out)
    if out is None and len(names) > 1:
        raise RequestError(f"give --out DIR for the runs that {len(names)} tables share")
    first = Request(
        table=tables[0],
        out=Path("reproduced") / names[tables[0]] if out is None else out,
        sigmas=parse_numbers("sigma", sigma, float),
        methods=tuple(method),
        seeds=parse_numbers("seeds", seeds, int),
        quick=quick,
        overrides=tuple(set_),
        n=n,
        skip=skip,
        max_images=max_images,
        reader=DatasetReader(data),
        device=device,
        jobs=jobs,
        compile=compile_,
    )
    requests = [first]
    if len(names) > 1:
        shared = replace(first, other_tables=tuple(names))
        requests = [replace(shared, table=table, report=f"report-{name}") for table, name in names.items()]
    plans = list(zip(requests, share_runs([plan(request) for request in requests]), strict=True))
    for request, planned in plans:
        title = f"{request.table} ({QUICK})" if quick else request.table
        console.print(plan_table(planned, title, [run.paper.acr for run in planned]))
    if sum(run.seconds for _, planned in plans for run in planned) > LONG:
        less = "a GPU or fewer epochs (--set epochs=1)" if quick else "--quick, fewer votes (--n) or images (--skip)"
        console.print(f"fewer rows (--sigma, --method), {less} take less; what is finished is kept when you interrupt")
    if not dry_run:
        reproduce_tables(plans, console)
