"""Test accuracy between epochs, and metrics for TensorBoard."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import digest, metrics, tiny_recipe
from torch import Tensor, nn

import smoothcert as sc
from smoothcert.data import ImageData, mnist
from smoothcert.errors import RequestError
from smoothcert.training.loop import train
from smoothcert.training.resume import load_state
from smoothcert.training.seeds import derived_seed
from smoothcert.training.tracking import tracker


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_test_accuracy_equals_a_plain_loop_and_does_not_change_training(
    tmp_path: Path, tiny_data: ImageData, ema: float
) -> None:
    test_data, recipe = mnist.load_sample("test").subset(torch.arange(700)), tiny_recipe(ema=ema, batch_size=16)
    run = sc.train(recipe, tiny_data, tmp_path / "run", test_data=test_data, evaluate_every=2, device="cpu")
    train(recipe, tiny_data, tmp_path / "plain", device="cpu")
    assert digest(tmp_path / "run") == digest(tmp_path / "plain")
    first, second = metrics(tmp_path / "run")
    assert "test_noisy_accuracy" not in first
    images, labels = test_data.batch(torch.arange(700))
    generator = torch.Generator().manual_seed(derived_seed(recipe.seed, 3, 1))
    noise = torch.cat([torch.randn((size, 1, 28, 28), generator=generator) for size in (500, 200)])
    with torch.no_grad():
        correct = int((run.model(images + 0.5 * noise).argmax(1) == labels).sum())
        state = load_state(tmp_path / "run")
        assert state is not None
        run.model.load_state_dict(state.model)
        without_average = int((run.model(images + 0.5 * noise).argmax(1) == labels).sum())
    assert second["test_noisy_accuracy"] == pytest.approx(correct / 700, abs=1.5 / 700)
    assert (abs(without_average - correct) > 10) == (ema > 0), "the average is another network"


class WithMapping(nn.Linear):
    def forward(self, images: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(images.flatten(1))}


def test_test_accuracy_of_a_network_that_returns_a_mapping(tmp_path: Path, tiny_data: ImageData) -> None:
    """`test_data` alone means every epoch."""
    options = {"model": WithMapping(784, 10), "test_data": tiny_data.subset(torch.arange(99))}
    run = sc.train(tiny_recipe(epochs=1), tiny_data, tmp_path / "run", device="cpu", **options)
    assert 0 < run.metrics[0]["test_noisy_accuracy"] <= 1


class SevenInEvalMode(nn.Linear):
    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images.flatten(1))
        return logits if self.training else nn.functional.one_hot(torch.full((len(images),), 7), 10).float()


def test_test_accuracy_is_that_in_eval_mode(tmp_path: Path, tiny_data: ImageData) -> None:
    """Batch norm and dropout compute otherwise while a network is trained."""
    sevens = tiny_data.subset((tiny_data.labels == 7).nonzero().flatten())
    options = {"model": SevenInEvalMode(784, 10), "test_data": sevens}
    run = sc.train(tiny_recipe(epochs=1), tiny_data, tmp_path / "run", device="cpu", **options)
    assert run.metrics[0]["test_noisy_accuracy"] == 1


@pytest.mark.parametrize(("shape", "classes"), [((1, 14, 14), 10), ((3, 28, 28), 10), ((1, 28, 28), 11)])
def test_other_test_images_are_refused_before_training(
    tmp_path: Path, tiny_data: ImageData, shape: tuple[int, int, int], classes: int
) -> None:
    """The first epoch would be lost: the accuracy is measured after it."""
    images, labels = torch.zeros(4, *shape, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    other = ImageData(images, labels, classes, "other", "test")
    with pytest.raises(RequestError, match=r"test data: expected images \(1, 28, 28\) of at most 10 classes") as caught:
        sc.train(tiny_recipe(), tiny_data, tmp_path / "run", test_data=other, evaluate_every=1, device="cpu")
    assert f"got {shape} of {classes};" in str(caught.value)
    for wrong in (-1, 1.5):
        with pytest.raises(
            RequestError, match=rf"evaluate_every: expected 0 \(never\) or a number of epochs, got {wrong}"
        ):
            sc.train(tiny_recipe(), "folder:/nowhere", tmp_path / "run", evaluate_every=wrong, device="cpu")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_command_line_starts_from_weights_measures_and_tracks(
    tmp_path: Path,
    tiny_data: ImageData,
    monkeypatch: pytest.MonkeyPatch,
    run_cli: Callable[..., tuple[int, str, str]],
    trained_run: Path,
) -> None:
    monkeypatch.setattr(mnist, "load_sample", lambda split: tiny_data)
    tiny_recipe(epochs=1).save(tmp_path / "r.yaml")
    options = ["--recipe", tmp_path / "r.yaml", "--device", "cpu", "--out", tmp_path / "run"]
    options += ["--init", trained_run, "--evaluate-every", 1, "--track", "tensorboard"]
    monkeypatch.setattr(
        "smoothcert.training.tracking.tracker", lambda tool: lambda run, line: tracked.append(run.epoch)
    )
    tracked: list[int] = []
    assert run_cli("train", *options)[0] == 0
    assert 0.3 < metrics(tmp_path / "run")[0]["test_noisy_accuracy"] <= 1, "two epochs on 2,048 images came before"
    assert sc.load(tmp_path / "run").provenance["init"]["file"] == "model.safetensors"
    assert tracked == [1]
    code, _, err = run_cli("train", *options[:4], "--out", tmp_path / "other", "--init", tmp_path / "nothing.pt")
    assert code == 2
    assert "nothing.pt: no such file" in err
    assert err.count("\n") == 1


def test_tensorboard_files_hold_the_metrics(tmp_path: Path, tiny_data: ImageData) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sc.train(tiny_recipe(), tiny_data, tmp_path / "run", track="tensorboard", device="cpu")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("loss", "noisy_accuracy", "learning_rate"):
        written = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(line["epoch"], pytest.approx(line[name], rel=1e-6)) for line in metrics(tmp_path / "run")]
        assert written == expected, name


@pytest.mark.parametrize("tool", ["tensorboard", "wandb"])
def test_missing_package_is_one_line(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoothcert.training.tracking.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=rf"expected the package {tool}, got none; .*smoothcert\[track\]"):
        tracker(tool)


def test_wandb_receives_one_step_per_epoch(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the package, which needs an account."""
    logged: list[tuple[int, float]] = []

    class Stand:
        @staticmethod
        def init(**settings: object) -> type["Stand"]:
            assert settings["name"] == "run"
            return Stand

        @staticmethod
        def log(values: dict[str, float], step: int) -> None:
            logged.append((step, values["loss"]))

        @staticmethod
        def finish() -> None:
            logged.append((-1, 0.0))

    monkeypatch.setitem(sys.modules, "wandb", Stand)
    monkeypatch.setattr("smoothcert.training.tracking.find_spec", lambda name: True)
    sc.train(tiny_recipe(), tiny_data, tmp_path / "run", track="wandb", device="cpu")
    assert logged == [*((line["epoch"], line["loss"]) for line in metrics(tmp_path / "run")), (-1, 0.0)]
