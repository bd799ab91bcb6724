"""A service around the trained run, and images as clients send them."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from smoothcert.certification.serve.requests import Limits
from smoothcert.certification.serve.service import ServedModel, Service
from smoothcert.certification.settings import CertifySettings
from smoothcert.certification.subject import Subject
from smoothcert.data import mnist
from smoothcert.training.checkpoint import load_run

pytest.importorskip("fastapi")


def png(pixels: torch.Tensor, kind: str = "PNG") -> bytes:
    """uint8 [h, w] as a file."""
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="session")
def digit() -> torch.Tensor:
    """A digit that the trained run recognizes, uint8 [28, 28]."""
    images, labels = mnist.load_sample("test").batch(torch.arange(20))
    return (images[int((labels == 0).nonzero()[0]), 0] * 255).round().to(torch.uint8)


@pytest.fixture(scope="session")
def served(trained_run: Path) -> ServedModel:
    return served_run(trained_run)


def served_run(folder: Path) -> ServedModel:
    run = load_run(folder)
    settings = CertifySettings()
    return ServedModel.of(folder.name, Subject.of(run), run.spec, run.recipe.dataset, torch.device("cpu"), settings)


@pytest.fixture
def service(served: ServedModel, tmp_path: Path) -> Iterator[Service]:
    made = Service([served], Limits(queue=8, body=100_000, pixels=10_000, images=4), tmp_path / "log")
    yield made
    made.engine.close()
