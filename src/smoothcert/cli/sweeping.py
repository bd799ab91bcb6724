"""`smoothcert sweep`: train, certify and report one run per combination of values."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoothcert.cli.options import Device, ImageOptions, MaxImages, Skip, Votes, console, parse_numbers
from smoothcert.cli.recipes import RecipeOptions, choose_recipe, refuse_twice, split_values
from smoothcert.errors import RequestError, WorkError
from smoothcert.training.run_folder import refuse_file

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.papers.reproduce.run_state import Resources, RunState

JOBS_ON_A_GPU = 8
"""Runs that train side by side on a GPU, at most, unless --jobs is given."""
FORMATS = ("md", "csv", "html", "png")


def sweep(
    set_: Annotated[
        list[str], typer.Option("--set", help="key=a,b,c: one run per value, and per combination with other keys.")
    ] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = Path("runs/sweep"),
    *,
    options: RecipeOptions,
    sigma: Annotated[str | None, typer.Option(help="Comma-separated noise levels.")] = None,
    n: Votes = 100_000,
    skip: Skip = 1,
    max_images: MaxImages = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once.", show_default="1; on a GPU up to 8")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs and the estimate only.")] = False,
    files: ImageOptions,
    device: Device = "auto",
) -> None:
    """Train, certify and report one run per combination of values; run it again to finish the rest."""
    refuse_file(out)
    refuse_twice(options.fields(sigma, files.image_size), set_, "give all its values at once, as in KEY=a,b")
    grid = parse_grid(set_)
    fixed = [f"{key}={values[0]}" for key, values in grid.items() if len(values) == 1]
    varied = {key: values for key, values in grid.items() if len(values) > 1}
    levels = parse_numbers("sigma", sigma, float)
    if len({f"{level:g}" for level in levels}) < len(levels):  # as in the names of the runs
        raise RequestError(f"sigma: expected different noise levels, got {sigma}; name each once")
    sigmas = levels or (None,)
    bases = {
        f"sigma{value:g}" if len(sigmas) > 1 else "": choose_recipe(
            options,
            value,
            files,
            fixed,
            silent=value != sigmas[0],  # the defaults are the same for all
            varied=varied,
        )
        for value in sigmas
    }
    from smoothcert.certification.estimate import LONG
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.distributed import find_device
    from smoothcert.objectives import is_built_in
    from smoothcert.papers.reproduce.run_state import Resources, plan_table, with_estimate
    from smoothcert.papers.sweep import all_recipes, plan_runs

    recipes = all_recipes(bases, varied)
    torch_device = find_device(device)
    default_jobs = min(JOBS_ON_A_GPU, len(recipes)) if torch_device.type == "cuda" else 1
    at_once = default_jobs if jobs is None else jobs
    resources = Resources(reader=files.load, device=device, jobs=at_once)
    planned = plan_runs(recipes, out, CertifySettings(n=n, skip=skip, max_images=max_images), resources)
    runs = [with_estimate(run, resources, torch_device) for run in planned]
    console.print(plan_table(runs))
    if changed := [run for run in runs if run.changed_code]:
        code = " and ".join(dict.fromkeys(name for run in changed for name in run.changed_code))
        names = ", ".join(run.folder.name for run in changed)
        console.warn(f"{code} changed after these runs were trained: {names}; choose another --out to train them again")
    if sum(run.seconds for run in runs) > LONG:
        console.print("fewer votes (--n) or images (--skip) take less")
    if dry_run:
        return
    built_in = all(is_built_in(recipe.objective) for recipe in recipes.values())
    if at_once > 1 and torch_device.type == "cpu" and not built_in:
        raise RequestError(f"--jobs: expected 1 on a CPU with an objective of your own, got {at_once}; leave it out")
    finish_and_report(runs, resources, out / "report", FORMATS)


def finish_and_report(runs: "Sequence[RunState]", resources: "Resources", out: Path, formats: Sequence[str]) -> None:
    """Train and certify what is missing of `runs`, and report the finished ones; those that failed are an error."""
    from smoothcert.papers.reproduce.work import failures_in_words, finish_runs
    from smoothcert.report import write_report
    from smoothcert.report.thumbnails import pictures

    failed = finish_runs(runs, resources, console)
    if finished := [run.certificates for run in runs if run.folder not in failed]:
        gallery = partial(pictures, folder=resources.reader.folder)
        write_report(finished, out, formats, gallery=gallery, request={}).show(console)
    if failed:
        raise WorkError(failures_in_words(failed, len(runs)))


def parse_grid(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key of `key=a,b,c`."""
    grid: dict[str, list[str]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise RequestError(f"--set {override}: expected key=value or key=a,b,c, for instance --set seed=0,1,2")
        values = split_values(text)
        if "" in values:
            raise RequestError(f"--set {override}: expected comma-separated values, got an empty one; remove it")
        if repeated := [value for value in values if values.count(value) > 1]:
            raise RequestError(f"--set {override}: expected each value once, got {repeated[0]} twice; remove one")
        grid[key] = values
    return grid
