"""Batch-norm statistics of averaged weights: torch's own computation, resume, networks without batch norm."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import digest, tiny_recipe
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from smoothcert.data import ImageData
from smoothcert.noise import Gaussian
from smoothcert.training import loop
from smoothcert.training.checkpoint import load_run
from smoothcert.training.loop import train
from smoothcert.training.resume import load_state
from smoothcert.training.seeds import derived_seed
from smoothcert.training.status import TrainingStatus
from smoothcert.training.weight_average import AveragedWeights


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 6, 5, stride=3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(384, 10))
    return nn.Sequential(*layers, nn.BatchNorm1d(10), nn.Dropout(0.0))


RECIPE = tiny_recipe(model="mine", epochs=3, ema=0.9, batch_size=32, learning_rate=0.1)


def saved(folder: Path) -> dict[str, Tensor]:
    return load_run(folder, model=network()).model.state_dict()


def noisy_batches(data: ImageData, epoch: int) -> list[Tensor]:
    """The inputs of the statistics after `epoch`, augmented by a flip, from the seeds that the module documents."""
    seeds = [derived_seed(RECIPE.seed, 7, epoch, part) for part in range(2)]
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seeds[0]))
    order = order[: len(data) // 32 * 32].view(-1, 32)
    generator = torch.Generator().manual_seed(seeds[1])
    images = [data.batch(row)[0].flip(3) for row in order]
    return [batch + Gaussian(0.5).sample(batch.shape, generator) for batch in images]


def test_statistics_are_those_of_the_averaged_network(tiny_data: ImageData, tmp_path: Path) -> None:
    data = tiny_data.subset(torch.arange(250))  # the last 26 are less than a batch
    data = replace(data, augment=lambda images, uniform: images.flip(3))
    train(RECIPE, data, tmp_path / "run", model=network(), device="cpu")
    weights = saved(tmp_path / "run")
    other = network()
    other.load_state_dict(weights)
    update_bn(noisy_batches(data, 2), other)  # torch: cumulative averages over the batches
    expected = other.state_dict()
    for name in ("1.running_mean", "1.running_var", "5.running_mean", "5.running_var"):
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-5, atol=1e-6)
    state = load_state(tmp_path / "run")
    assert state is not None
    raw = state.model
    assert int(raw["1.num_batches_tracked"]) == 3 * 7, "every step of training is in training mode"
    assert not torch.allclose(raw["1.running_mean"], weights["1.running_mean"], rtol=1e-3)


def test_counters_of_the_averaged_network_are_those_of_the_last_one() -> None:
    model = network()
    average = AveragedWeights(model, 0.9)
    model(torch.randn(4, 1, 28, 28))
    average.update(1)
    assert int(average.tensors["1.num_batches_tracked"]) == int(average.tensors["5.num_batches_tracked"]) == 1


def test_resume_is_exact_and_evaluation_changes_nothing(
    tiny_data: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", -1.0)

    def interrupt(status: TrainingStatus) -> None:
        if status.epoch == 2:
            raise KeyboardInterrupt

    train(RECIPE, tiny_data, tmp_path / "whole", model=network(), device="cpu")
    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, tiny_data, tmp_path / "run", model=network(), device="cpu", on_progress=interrupt)
    train(RECIPE, tiny_data, tmp_path / "run", model=network(), device="cpu", resume=True)
    whole, resumed = saved(tmp_path / "whole"), saved(tmp_path / "run")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    train(RECIPE, tiny_data, tmp_path / "test", model=network(), device="cpu", test_data=tiny_data)
    assert all(torch.equal(tensor, saved(tmp_path / "test")[name]) for name, tensor in whole.items())


def test_networks_without_batch_norm_are_unchanged(
    tiny_data: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(epochs=1, ema=0.9)
    train(recipe, tiny_data, tmp_path / "now", device="cpu")
    monkeypatch.setattr(loop, "recompute_statistics", lambda run: None)
    train(recipe, tiny_data, tmp_path / "before", device="cpu")
    assert digest(tmp_path / "now") == digest(tmp_path / "before")
