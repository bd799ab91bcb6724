"""Commands that write several files, on a full disk and when they are interrupted: nothing is half made or lost."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny import tiny_recipe

from smoothcert import load_dataset
from smoothcert.models import LeNet
from smoothcert.training.checkpoint import InputSpec, Run, new_model, save_weights
from smoothcert.training.run_folder import MODEL, RECIPE

Cli = Callable[..., tuple[int, str, str]]
NETWORK = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(784, num_classes))
"""
CODE = ("--model", "net.py:build")
COMMANDS = {
    "merge": ("merge", "one.tsv", "two.tsv", "--out", "new/out/whole.tsv"),
    "merge, compressed": ("merge", "one.tsv", "two.tsv", "--out", "new/out/whole.tsv.gz"),
    "recertify": ("recertify", "one.tsv", "--alpha", 0.01, "--out", "new/out/again.tsv"),
    "export": ("export", "run", "--out", "new/out", *CODE),
    "import": ("import", "lenet.pt", "--sigma", 0.5, "--dataset", "mnist-sample", "--out", "new/out"),
    "adapt": ("adapt", "run", "--out", "new/out", *CODE, "--device", "cpu"),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Cli) -> Iterator[Path]:
    """The current folder, with what the commands read: a run, two shards of its certificates, a checkpoint."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    recipe = tiny_recipe(model="net.py:build")
    spec = InputSpec.of(load_dataset("mnist-sample", "test"))
    save_weights(Run(Path("run"), recipe, spec, new_model("net.py:build", spec).eval(), 2, {}))
    recipe.save(Path("run", RECIPE))
    torch.save(LeNet(10).state_dict(), "lenet.pt")
    for shard, name in (("1/2", "one"), ("2/2", "two")):
        words = ("--shard", shard, "--name", name, "--n", 20, "--max-images", 4, "--device", "cpu")
        assert run_cli("certify", "run", *CODE, *words)[0] == 0
    for file in Path("run/certificates").iterdir():
        file.rename(file.name)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    yield tmp_path
    signal.signal(signal.SIGINT, inherited)


def fail_in_write(number: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the `number`-th write of a file, the disk is full or the user presses Ctrl-C."""
    fsync, calls = os.fsync, []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == number:
            if kind == "interrupt":
                signal.raise_signal(signal.SIGINT)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)


@pytest.mark.parametrize("kind", ["full disk", "interrupt"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_fails_leaves_nothing_and_then_works(
    command: tuple[object, ...], number: int, kind: str, project: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_in_write(number, kind, patch)
        code, _, error = run_cli(*command)
    expected = (130, "interrupted") if kind == "interrupt" else (1, "could not be written to (No space left on device)")
    assert (code, error.count("\n"), expected[1] in error) == (expected[0], 1, True)
    assert not Path("new").exists()
    assert run_cli(*command)[0] == 0
    assert len(list(Path("new/out").iterdir())) == 2


def test_weights_of_adapt_that_cannot_be_written_leave_no_folder(
    project: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*CODE, "--dataset", "mnist-sample", "--sigma", 0.5, "--device", "cpu")
    with monkeypatch.context() as patch:
        fail_in_write(1, "full disk", patch)
        code, _, error = run_cli("adapt", *words, "--out", "new/out/a.safetensors")
    assert (code, error.count("\n")) == (1, 1)
    assert not Path("new").exists()


def test_an_import_that_is_interrupted_in_its_check_leaves_nothing(
    project: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the input layer needs test images, whose download takes minutes."""

    def download(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("smoothcert.training.input_layer.input_layer_warning", download)
        assert run_cli(*COMMANDS["import"])[0] == 130
    assert not Path("new").exists()
    assert run_cli(*COMMANDS["import"])[0] == 0


def test_what_a_killed_command_left_in_its_folder_is_removed(project: Path, run_cli: Cli) -> None:
    """These files are hidden: to the user the folder looks empty."""
    Path("new/out").mkdir(parents=True)
    for name in (".metrics.jsonl.lock", f".{MODEL}.abcd1234.tmp", f".{RECIPE}.abcd1234.tmp"):
        Path("new/out", name).write_text("")
    assert run_cli(*COMMANDS["export"])[0] == 0
    assert sorted(path.name for path in Path("new/out").iterdir()) == [MODEL, RECIPE]


@pytest.mark.parametrize("kind", ["full disk", "interrupt"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_report_that_cannot_be_replaced_stays_whole(
    number: int, kind: str, project: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("report", "--format", "md,csv,tex", "--out", "report")
    assert run_cli(*words, "one.tsv")[0] == 0
    before = {path.name: path.read_bytes() for path in Path("report").glob("report*")}
    with monkeypatch.context() as patch:
        fail_in_write(number, kind, patch)
        assert run_cli(*words, "two.tsv")[0] in (1, 130)
    assert {path.name: path.read_bytes() for path in Path("report").glob("report*")} == before
    assert run_cli("report", "--check", "report")[0] == 0
    assert run_cli(*words, "two.tsv")[0] == 0
    assert run_cli("report", "--check", "report")[0] == 0
