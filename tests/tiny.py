"""A small network and a small recipe for tests, and what tests read from run folders."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from smoothcert.models import MODELS, ModelSpec
from smoothcert.objectives import Gaussian
from smoothcert.training.checkpoint import Run, load_run, save_weights, tensors_digest
from smoothcert.training.metrics import METRICS
from smoothcert.training.recipe import TrainRecipe


class TinyNet(nn.Module):
    """[n, 1, 28, 28] -> logits [n, num_classes], in a twentieth of the time of LeNet.

    With the layers that the library treats in its own ways: a convolution, and names as LeNet has them.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 7, stride=3)
        self.fc1 = nn.Linear(8 * 8 * 8, 64)
        self.fc2 = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.conv1(images)).flatten(1)
        logits: Tensor = self.fc2(functional.relu(self.fc1(hidden)))
        return logits


class ListDataset(Dataset[Any]):
    """The items of a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Killed(Exception):
    """What `killed_after_the_first_epoch` stops a training with."""


def killed_after_the_first_epoch(run: Run, line: dict[str, Any]) -> None:
    """For `on_epoch` of `train`."""
    if line["epoch"] == 0:
        raise Killed


# A name of its own among the models: every process that imports this module can train and load it.
MODELS["tiny"] = ModelSpec("the network of the tests", (1, 28, 28), TinyNet)


def tiny_recipe(**changes: object) -> TrainRecipe:
    fields = {
        "dataset": "mnist-sample",
        "model": "tiny",
        "sigma": 0.5,
        "objective": Gaussian(),
        "epochs": 2,
        "batch_size": 64,
        "learning_rate": 0.1,
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
    save_weights(Run(folder, changed, run.spec, model, run.epoch, {**run.provenance, "seed": seed}))
    return folder
