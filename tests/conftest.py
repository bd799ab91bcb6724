"""What several test files share: a small part of the MNIST sample and a run trained on it."""

from pathlib import Path

import pytest
import torch

from smoothcert.data import ImageData, load_dataset
from smoothcert.objectives import Gaussian
from smoothcert.recipe import TrainRecipe
from smoothcert.training import train


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
    }
    return TrainRecipe.model_validate(fields | changes)


@pytest.fixture(scope="session")
def tiny_data() -> ImageData:
    return load_dataset("mnist-sample", "train").subset(torch.arange(256))


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LeNet after two short epochs: good enough to certify some images. Tests that write copy it first."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    data = load_dataset("mnist-sample", "train").subset(torch.arange(2048))
    train(tiny_recipe(), data, folder, device="cpu")
    return folder
