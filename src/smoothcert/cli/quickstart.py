"""`smoothcert quickstart`: the whole flow on the bundled MNIST sample: train, certify, compare, report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoothcert.cli.options import console
from smoothcert.cli.reporting import report_runs
from smoothcert.training.run_folder import RECIPE

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.data import Images

METHODS = ("mnist/gaussian", "mnist/consistency", "mnist/smoothmix")
SIGMA = 0.5
# A small budget that shows the published order; the presets take 90 epochs of 60,000 images.
BUDGET = (
    "dataset=mnist-sample",
    "epochs=2",
    "batch_size=128",
    "learning_rate=0.05",
    "learning_rate_drops=[1]",
    "nesterov=true",
)
# One long attack step covers the distance of four short ones at a quarter of the cost.
CHEAPER = {"mnist/smoothmix": ("objective.num_noise=2", "objective.steps=1", "objective.step_size=4")}
VOTES, SKIP = 1_000, 20
OUT = Path("quickstart")


def quickstart(out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = OUT) -> None:
    """Train, certify and compare three small networks on a bundled MNIST sample, in three to four minutes."""
    from smoothcert.certification.certify_dataset import certify_dataset
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.data import load_dataset
    from smoothcert.report.progress import status_bar
    from smoothcert.training.checkpoint import load_run

    train_data, test_data = (load_dataset("mnist-sample", split) for split in ("train", "test"))
    settings = CertifySettings(n=VOTES, skip=SKIP)
    images = len(settings.selection(len(test_data)).indices)
    folders = [out / "runs" / name.split("/")[1] for name in METHODS]
    for name, folder in zip(METHODS, folders, strict=True):
        train_method(name, folder, train_data)
        path = folder / "certificates" / f"test-n{VOTES}.tsv"
        with status_bar(f"certify {folder.name}") as show:
            certify_dataset(load_run(folder), test_data, path, settings, on_progress=show, on_warning=show.warn)
    report_runs(folders, out / "report", ("md", "html", "png"))
    console.print(f"{images} test images, n = {VOTES:,} votes: a small budget for a first look.")
    console.print(f"Full runs: smoothcert train --preset {METHODS[-1]} --sigma {SIGMA} --out runs/a")


def train_method(name: str, folder: Path, data: "Images | None" = None) -> None:
    """Train the quickstart's run of one method, or continue it, with a bar."""
    from smoothcert.data import load_dataset
    from smoothcert.papers.presets import preset
    from smoothcert.report.progress import train_with_bar
    from smoothcert.training.recipe import with_overrides

    data = load_dataset("mnist-sample", "train") if data is None else data
    recipe = with_overrides(preset(name, SIGMA), (*BUDGET, *CHEAPER.get(name, ())))
    train_with_bar(recipe, data, folder, resume=(folder / RECIPE).exists())
