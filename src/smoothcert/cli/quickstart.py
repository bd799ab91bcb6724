"""`smoothcert quickstart`: the whole flow on the bundled MNIST sample: train, certify, compare, report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoothcert.cli.options import console
from smoothcert.cli.sweeping import finish_and_report

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.training.recipe import TrainRecipe

METHODS = ("mnist/gaussian", "mnist/consistency", "mnist/smoothmix")
SIGMA = 0.5
VOTES, SKIP = 1_000, 20
OUT = Path("quickstart")


def quickstart(out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = OUT) -> None:
    """Train, certify and compare three small networks on a bundled MNIST sample, in one to four minutes."""
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.papers.reproduce.run_state import Resources
    from smoothcert.papers.sweep import plan_runs

    recipes = {name.split("/")[1]: small_recipe(name) for name in METHODS}
    resources = Resources()
    runs = plan_runs(recipes, out / "runs", CertifySettings(n=VOTES, skip=SKIP), resources)
    finish_and_report(runs, resources, out / "report", ("md", "html", "png"))
    console.print(f"{runs[0].images} test images, n = {VOTES:,} votes: a small budget for a first look.")
    console.print(f"Full runs: smoothcert train --preset {METHODS[-1]} --sigma {SIGMA} --out runs/a")


def small_recipe(name: str) -> "TrainRecipe":
    """Return the recipe of the preset `name`, scaled down as by `reproduce --quick`: the order is as published."""
    from smoothcert.papers.presets import preset
    from smoothcert.papers.reproduce.planning import QUICK_CHANGES, cheaper
    from smoothcert.training.recipe import with_overrides

    recipe = preset(name, SIGMA)
    return with_overrides(recipe, (*QUICK_CHANGES["mnist"], "nesterov=true", *cheaper(recipe.objective)))
