"""What several test files share: a small part of the MNIST sample and a run trained on it."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_recipe

from smoothcert.data import ImageData, mnist_sample
from smoothcert.training import train


@pytest.fixture(scope="session")
def tiny_data() -> ImageData:
    return mnist_sample.load("train").subset(torch.arange(256))


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LeNet after two short epochs: good enough to certify some images. Tests that write copy it first."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    data = mnist_sample.load("train").subset(torch.arange(2048))
    train(tiny_recipe(), data, folder, device="cpu")
    return folder
