"""A small recipe for tests, and what tests read from run folders."""

import json
from pathlib import Path

import torch

from smoothcert.objectives import Gaussian
from smoothcert.training.checkpoint import Run, load_run, save_weights, tensors_digest
from smoothcert.training.metrics import METRICS
from smoothcert.training.recipe import TrainRecipe


def tiny_recipe(**changes: object) -> TrainRecipe:
    fields = {
        "dataset": "mnist-sample",
        "model": "lenet",
        "sigma": 0.5,
        "objective": Gaussian(),
        "epochs": 2,
        "batch_size": 64,
        "learning_rate": 0.05,
        "learning_rate_drops": (1,),
        "precision": "fp32",
    }
    return TrainRecipe.model_validate(fields | changes)


def digest(folder: Path) -> str:
    return tensors_digest(load_run(folder).model.state_dict())


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def without_times(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def other_run(run: Run, folder: Path, seed: int, **recipe: object) -> Path:
    """Write a run whose weights differ a little from those of `run`."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    model = load_run(run.folder).model
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    changed = run.recipe.model_copy(update=recipe)
    save_weights(folder, model.state_dict(), changed, run.spec, run.epoch, {**run.provenance, "seed": seed})  # type: ignore[arg-type]
    return folder
