"""Runs that do not learn: dead starts are repeated with warm-up, runs at chance are noted."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import metrics, tiny_recipe
from torch import Tensor, nn

from smoothcert.data import ImageData
from smoothcert.training import loop
from smoothcert.training.checkpoint import load_run, tensors_digest
from smoothcert.training.dead_start import constant_output, no_better_than_majority, restart_if_dead
from smoothcert.training.loop import train
from smoothcert.training.resume import load_state
from smoothcert.training.status import TrainingStatus


class Constant(nn.Module):
    """Gives the same logits for all images."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits.expand(len(images), 10)


@pytest.mark.parametrize(("epochs", "warm_up", "notes"), [(6, 0, 1), (6, 2, 1), (4, 0, 0)])
def test_run_at_chance_is_noted_once(
    tmp_path: Path, tiny_data: ImageData, epochs: int, warm_up: int, notes: int
) -> None:
    """The commonest one, which is right more often than one in ten times."""
    heard: list[str] = []
    counts = torch.bincount(tiny_data.labels)
    recipe = tiny_recipe(
        epochs=epochs, learning_rate=1e-9, learning_rate_drops=(), learning_rate_warm_up=warm_up, batch_size=256
    )
    model = Constant((counts == counts.max()).float())
    train(recipe, tiny_data, tmp_path / "run", model=model, device="cpu", on_note=heard.append)
    assert len(heard) == notes
    for note in heard:
        assert f"{int(counts.max()) / 256:.1%}, no better than one class for all images" in note
        assert ("learning_rate_warm_up" in note) == (warm_up == 0)
        assert "\n" not in note


class DiesOfALargeFirstStep(nn.Module):
    """A linear network whose output is zero for good if its first step is longer than `limit`."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)
        self.limit = limit
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("start", self.linear.weight.detach().clone())
        self.register_buffer("alive", torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.calls == 1 and torch.is_grad_enabled():
            self.alive.fill_(float((self.linear.weight - self.start).norm() < self.limit))
        self.calls += torch.is_grad_enabled()
        return self.alive * self.linear(images.flatten(1))


def dying(limit: float) -> DiesOfALargeFirstStep:
    torch.manual_seed(0)
    return DiesOfALargeFirstStep(limit)


@pytest.mark.parametrize(
    ("interrupted_in", "restarts", "ema", "optimizer", "rate"),
    [
        *((None, 0, 0.5, "sgd", 0.5), (None, 0, 0.0, "adamw", 0.01)),
        *((1, 0, 0.0, "sgd", 0.5), (2, 0, 0.0, "sgd", 0.5), (0, 1, 0.0, "sgd", 0.5), (1, 1, 0.0, "sgd", 0.5)),
    ],
)
def test_dead_start_is_repeated_with_warm_up(
    tmp_path: Path,
    tiny_data: ImageData,
    monkeypatch: pytest.MonkeyPatch,
    interrupted_in: int | None,
    restarts: int,
    ema: float,
    optimizer: str,
    rate: float,
) -> None:
    """It then equals a run that had the warm-up from the beginning, also after an interruption before or after it."""
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)  # each epoch is saved
    notes: list[str] = []
    recipe = tiny_recipe(epochs=4, learning_rate=rate, learning_rate_drops=(), ema=ema, optimizer=optimizer)
    folder = tmp_path / "run"

    def interrupt(status: TrainingStatus) -> None:
        if (status.epoch, len(notes)) == (interrupted_in, restarts):
            raise KeyboardInterrupt

    try:
        train(recipe, tiny_data, folder, model=dying(0.2), device="cpu", on_note=notes.append, on_progress=interrupt)
    except KeyboardInterrupt:
        state = load_state(folder)
        assert state is not None
        assert state.epoch == interrupted_in
        train(recipe, tiny_data, folder, model=dying(0.2), device="cpu", on_note=notes.append, resume=True)
    assert len(notes) == 1
    assert "dead start" in notes[0]
    run = load_run(folder, model=dying(0.2))
    assert run.provenance["learning_rate_warm_up"] == 1
    assert run.recipe == recipe, "the recipe stays as requested"

    warm = recipe.model_copy(update={"learning_rate_warm_up": 1})
    train(warm, tiny_data, tmp_path / "warm", model=dying(0.2), device="cpu")
    expected = load_run(tmp_path / "warm", model=dying(0.2)).model.state_dict()
    assert tensors_digest(run.model.state_dict()) == tensors_digest(expected)
    assert [line["learning_rate"] for line in metrics(folder)] == pytest.approx([rate / 10, rate, rate, rate])
    assert metrics(folder)[-1]["noisy_accuracy"] > 0.3


def test_dead_start_is_repeated_only_once(tmp_path: Path, tiny_data: ImageData) -> None:
    """Some published settings do collapse, and their rows are trained to the end."""
    notes: list[str] = []
    recipe = tiny_recipe(epochs=5, learning_rate_drops=())
    train(recipe, tiny_data, tmp_path / "run", model=dying(0.0), device="cpu", on_note=notes.append)
    assert ["dead start" in note for note in notes] == [True, False]
    assert "no better than one class for all images" in notes[1]
    assert len(metrics(tmp_path / "run")) == 5


def test_only_the_second_and_third_epoch_show_a_dead_start() -> None:
    """A network that needs two epochs to start, or collapses later, is trained to the end."""
    labels = torch.tensor([0] * 60 + [1] * 40)
    dead, alive = ({"cross_entropy": loss, "noisy_accuracy": 0.6} for loss in (math.log(2), 0.5))
    for losses in ((dead, dead, alive, dead, dead), (dead, alive, dead, dead, dead)):
        run: Any = SimpleNamespace(epoch=0, dead_epochs=0, initial_weights={}, data=SimpleNamespace(labels=labels))
        for run.epoch, of_epoch in enumerate(losses):
            assert not restart_if_dead(run, of_epoch)


def test_dead_start_from_a_file_is_not_repeated(tmp_path: Path, tiny_data: ImageData) -> None:
    """A resumed run need not give the file again, and would start from random weights."""
    save_file(dying(0.2).state_dict(), tmp_path / "first.safetensors")
    notes: list[str] = []
    options = {"model": dying(0.2), "init": tmp_path / "first.safetensors", "on_note": notes.append}
    recipe = tiny_recipe(epochs=4, learning_rate=0.5, learning_rate_drops=())
    train(recipe, tiny_data, tmp_path / "run", device="cpu", **options)
    assert not any("dead start" in note for note in notes), notes
    assert [line["learning_rate"] for line in metrics(tmp_path / "run")] == [0.5] * 4


def test_constant_output_is_recognized_by_its_cross_entropy() -> None:
    """Its cross-entropy is ln C, or the entropy of the labels once it has learnt how common the classes are."""
    labels = torch.tensor([0] * 60 + [1] * 40)
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    for cross_entropy, expected in ((math.log(2), True), (entropy, True), (0.68, False), (0.3, False)):
        assert constant_output({"cross_entropy": cross_entropy, "noisy_accuracy": 0.6}, labels) == expected
        assert constant_output({"natural": cross_entropy, "noisy_accuracy": 0.6}, labels) == expected
    for factor, expected in ((1.0009, True), (0.9991, True), (1.0011, False), (0.9989, False)):
        assert constant_output({"cross_entropy": factor * entropy, "noisy_accuracy": 0.6}, labels) == expected
    assert not constant_output({"cross_entropy": entropy, "noisy_accuracy": 0.9}, labels)
    assert not constant_output({"loss": entropy, "noisy_accuracy": 0.6}, labels), "no cross-entropy to judge by"
    assert not constant_output({"cross_entropy": entropy}, labels), "no accuracy: the objective gives no logits"


def test_a_learnt_accuracy_is_above_that_of_the_majority_class() -> None:
    labels = torch.tensor([0] * 60 + [1] * 40)
    assert [no_better_than_majority(accuracy, labels) for accuracy in (0.0, 0.5, 0.6, 0.62, 0.64, 1.0)] == [
        True
    ] * 4 + [False] * 2
    assert not no_better_than_majority(1.0, torch.zeros(5, dtype=torch.int64)), "one class: nothing to learn"


def test_run_that_learns_is_not_noted(tmp_path: Path, tiny_data: ImageData) -> None:
    heard: list[str] = []
    recipe = tiny_recipe(epochs=5, batch_size=32, learning_rate_drops=())
    train(recipe, tiny_data.subset(torch.arange(128)), tmp_path / "run", device="cpu", on_note=heard.append)
    assert heard == []
