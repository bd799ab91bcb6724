"""What several test files share: a small part of the MNIST sample and a run trained on it."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from tiny import tiny_recipe

from smoothcert import cli
from smoothcert.data import ImageData, mnist
from smoothcert.report import style
from smoothcert.smoothing import votes
from smoothcert.training.loop import train


def pytest_collection_finish() -> None:
    """What has been imported stays until the end: the garbage collector need not look at it again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def small_forward_passes() -> Iterator[None]:
    """Every forward pass of a certification has the whole batch size: with few votes per image most of it is unused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(votes.BATCH_SIZE, "cpu", 250)  # a noise block: votes stay the same
        yield


@pytest.fixture(autouse=True)
def same_rounding() -> Iterator[None]:
    """After a step in bf16 on a CPU without it, torch computes float32 by another library until the process ends."""
    yield
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture(scope="session")
def tiny_data() -> ImageData:
    return mnist.load_sample("train").subset(torch.arange(256))


@pytest.fixture(scope="session")
def test_data() -> ImageData:
    return mnist.load_sample("test")


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A network after two short epochs: good enough to certify some images. Tests that write copy it first."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    data = mnist.load_sample("train").subset(torch.arange(3072))
    train(tiny_recipe(), data, folder, device="cpu")
    before = sorted(folder.rglob("*"))
    yield folder
    assert sorted(folder.rglob("*")) == before, "a test wrote into the run that all tests share"


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports write a few bytes in place of each picture, which takes its time."""
    monkeypatch.setattr(style, "_picture", lambda figure, kind: b"a picture")


@pytest.fixture(scope="session")
def built_app() -> object:
    """The commands with their parsers, which `cli.main` builds anew in every call: most of the time of a short one."""
    return typer.main.get_command(cli.app)


@pytest.fixture
def run_cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], built_app: object
) -> Callable[..., tuple[int, str, str]]:
    """Calls `smoothcert` with the arguments given; exit code, output, errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(cli, "app", built_app)
        monkeypatch.setattr(sys, "argv", ["smoothcert", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return call
