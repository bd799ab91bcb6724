"""Samplers: the discard rule and the weights against slow transcriptions, draws, resume and several processes."""

import math
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import run_together
from scipy import stats
from tiny import TinyNet, digest, metrics, tiny_recipe, without_times
from torch import Tensor, nn

from smoothcert.data import ImageData, mnist
from smoothcert.distributed import Team
from smoothcert.errors import WorkError
from smoothcert.noise import NOISES
from smoothcert.objectives import OBJECTIVES
from smoothcert.training import evaluate, loop, sampler
from smoothcert.training.dead_start import DEAD_EPOCHS
from smoothcert.training.evaluate import correct_votes
from smoothcert.training.loop import train
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.resume import load_state
from smoothcert.training.run_folder import STATE
from smoothcert.training.sampler import RadiusWeightedSampler, UniformSampler, radius_weights
from smoothcert.training.sampler_settings import RadiusWeighted
from smoothcert.training.seeds import derived_seed
from smoothcert.training.status import TrainingStatus

START, EVERY, DISCARD_VOTES, VOTES = 3, 2, 10, 8


def weighted_recipe(**changes: object) -> TrainRecipe:
    """Evaluations in the epochs 3 and 5 of 6."""
    settings = {"start": START, "every": EVERY, "discard_votes": DISCARD_VOTES, "votes": VOTES, "discard_below": 0.3}
    return tiny_recipe(**({"epochs": 6, "sampler": {"name": "radius-weighted", **settings}} | changes))


def transcribed_weights(votes: int) -> list[float]:
    """Phi^-1 of the lower Clopper-Pearson bound at 0.1, not below the smallest positive one."""
    radii = [stats.norm.ppf(stats.beta.ppf(0.1, k, votes - k + 1)) if k else -1.0 for k in range(votes + 1)]
    smallest = next(radius for radius in radii if radius > 0)
    return [radius if radius > 0 else smallest for radius in radii]


def test_weights_of_sixteen_votes_are_the_published_ones() -> None:
    weights = radius_weights(16, NOISES["gaussian"](1.0))
    assert [round(weight, 3) for weight in weights[12:]] == [0.154, 0.329, 0.526, 0.765, 1.108]
    assert set(weights[:12]) == {weights[12]}


@pytest.mark.parametrize("votes", [4, 5, 8, 100])
def test_weights_equal_the_formula(votes: int) -> None:
    assert radius_weights(votes, NOISES["gaussian"](1.0)) == pytest.approx(transcribed_weights(votes), rel=1e-9)


@pytest.mark.parametrize("noise", ["laplace", "uniform"])
def test_weights_of_other_noises_are_positive_and_rise(noise: str) -> None:
    weights = radius_weights(16, NOISES[noise](1.0))
    assert 0 < weights[0] == weights[12] < weights[13] < weights[14] < weights[15] < weights[16]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_data: ImageData) -> tuple[Path, list[dict[str, Any]]]:
    """An uninterrupted run: its folder, and the network before each epoch with the order that the epoch drew."""
    folder, epochs = tmp_path_factory.mktemp("sampler") / "run", list[dict[str, Any]]()
    plain = RadiusWeightedSampler.order

    def order(self: RadiusWeightedSampler, run: Any, generator: torch.Generator) -> Tensor:
        network = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        drawn = plain(self, run, generator)
        weights = None if self.weights is None else self.weights.clone()
        epochs.append({"network": network, "drawn": drawn, "weights": weights, "training": run.model.training})
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RadiusWeightedSampler, "order", order)
        train(weighted_recipe(), tiny_data, folder, device="cpu")
    return folder, epochs


@torch.no_grad()
def transcribed_votes(
    network: dict[str, Tensor], data: ImageData, chosen: list[int], votes: int, purpose: int, epoch: int
) -> dict[int, int]:
    """The correct votes of each chosen image, one copy at a time."""
    model = TinyNet(10).eval()
    model.load_state_dict(network)
    generator = torch.Generator().manual_seed(derived_seed(0, purpose, epoch, 0))
    images, counts = data.images[chosen].float() / 255, dict.fromkeys(chosen, 0)
    for _ in range(votes):
        noise = torch.randn(images.shape, generator=generator) * 0.5
        for index, logits in zip(chosen, model(images + noise).tolist(), strict=True):
            counts[index] += logits.index(max(logits)) == int(data.labels[index])
    return counts


def test_discarded_images_and_weights_equal_a_slow_transcription(
    recorded: tuple[Path, list[dict[str, Any]]], tiny_data: ImageData
) -> None:
    folder, epochs = recorded
    votes = transcribed_votes(epochs[START]["network"], tiny_data, list(range(256)), DISCARD_VOTES, 4, START)
    kept = [index for index, count in votes.items() if Fraction(count, DISCARD_VOTES) >= Fraction(3, 10)]
    assert 20 < len(kept) < 236
    assert Fraction(3, 10) in {Fraction(votes[index], DISCARD_VOTES) for index in kept}  # the threshold is kept
    for epoch in range(START, 6):
        if (epoch - START) % EVERY == 0:
            votes = transcribed_votes(epochs[epoch]["network"], tiny_data, kept, VOTES, 5, epoch)
        expected = torch.zeros(256, dtype=torch.float64)
        for index in kept:
            expected[index] = transcribed_weights(VOTES)[votes[index]]
        assert torch.allclose(epochs[epoch]["weights"], expected, rtol=1e-9)
    assert [line["discarded_images"] for line in metrics(folder)] == [0] * START + [256 - len(kept)] * 3


def test_discarded_images_are_not_drawn(recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    _, epochs = recorded
    for number, epoch in enumerate(epochs):
        assert epoch["drawn"].shape == (256,)
        assert epoch["training"], "the network is in training mode after an evaluation"
        if number < START:
            generator = torch.Generator().manual_seed(derived_seed(0, 1, number))
            assert torch.equal(epoch["drawn"], torch.randperm(256, generator=generator))
        else:
            assert (epoch["weights"][epoch["drawn"]] > 0).all()
            assert (epoch["weights"] == 0).any()


def run_stub(**changes: object) -> Any:
    """What samplers read of a run."""
    fields = {"recipe": weighted_recipe(), "epoch": START + 1, "data": range(256), "device": torch.device("cpu")}
    run = SimpleNamespace(**(fields | {"group": Team(), "autocast": nullcontext, "precision": "fp32"} | changes))
    run.noise = NOISES[run.recipe.noise](run.recipe.sigma)
    return run


def test_images_are_drawn_in_proportion_to_their_weights() -> None:
    weights = torch.tensor([0.0, 0.154, 0.0, 1.108], dtype=torch.float64).repeat(64)
    drawn = RadiusWeightedSampler(RadiusWeighted(start=START, every=1000))
    drawn.weights = weights.clone()
    orders = [drawn.order(run_stub(epoch=epoch), torch.Generator()) for epoch in range(START + 1, START + 101)]
    counts = torch.bincount(torch.cat(orders), minlength=256).double()
    assert not counts[weights == 0].any()
    expected = weights / weights.sum() * counts.sum()
    positive = weights > 0
    assert stats.chisquare(counts[positive], expected[positive]).pvalue > 1e-4
    assert not torch.equal(orders[0], orders[1])


def test_weights_are_radii_of_the_noise_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laplace noise: the radius of an image whose votes all agree is ln(0.5 / q) / sqrt(2), 1 - q = 0.1^(1/8)."""
    monkeypatch.setattr(sampler, "correct_votes", lambda run, votes, kept, purpose: torch.full((256,), VOTES))
    weighted = RadiusWeightedSampler(RadiusWeighted(start=START, every=1, votes=VOTES, discard_below=0.0))
    weighted.order(run_stub(recipe=weighted_recipe(noise="laplace")), torch.Generator())
    assert weighted.weights is not None
    expected = math.log(0.5 / (1 - 0.1 ** (1 / VOTES))) / math.sqrt(2)
    assert weighted.weights.tolist() == pytest.approx([expected] * 256, rel=1e-9)


@pytest.mark.parametrize("batch_size", [48, 100, 1000])
def test_votes_belong_to_their_images(tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    """With almost no noise all votes agree with the prediction, for every division into rows, augmented data too."""
    monkeypatch.setattr(evaluate, "PIXELS_AT_ONCE", 1)
    torch.manual_seed(0)
    network, indices = TinyNet(10), torch.arange(255, 5, -1)
    model = nn.Sequential(network, nn.Dropout(0.9)).train()  # votes are cast in eval mode
    with torch.no_grad():
        right = network(tiny_data.images.float() / 255).argmax(1) == tiny_data.labels
    shifted = ImageData(
        tiny_data.images, tiny_data.labels, 10, "mine", "train", augment=lambda images, uniform: images.flip(3)
    )
    recipe = weighted_recipe(batch_size=batch_size, sigma=1e-9)
    votes = correct_votes(run_stub(recipe=recipe, data=shifted, model=model), 3, indices, 4)
    assert torch.equal(votes, 3 * right[indices])
    assert 0 < int(right.sum()) < 256


class BrightCentre(nn.Module):
    """Class 0 where one pixel is above 1/2: each vote depends on the noise of its own image."""

    def forward(self, images: Tensor) -> Tensor:
        score = images[:, 0, 14, 14] - 0.5
        return torch.stack([score, -score], dim=1)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_row_has_its_own_noise_whichever_process_counts_it(
    monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """Equal images in rows of 48: their votes equal those of a transcription that numbers the rows."""
    monkeypatch.setattr(evaluate, "PIXELS_AT_ONCE", 1)
    grey = ImageData(torch.full((120, 1, 28, 28), 128, dtype=torch.uint8), torch.zeros(120).long(), 2, "grey", "train")
    recipe, counted = weighted_recipe(batch_size=48), torch.zeros(120, dtype=torch.int64)
    for rank in range(processes):
        group = SimpleNamespace(rank=rank, size=processes, copy_from_first=list, total=lambda counts: counts)
        run = run_stub(recipe=recipe, data=grey, model=BrightCentre(), group=group)
        counted += correct_votes(run, 20, torch.arange(120), 4)
    expected = []
    for row in range(3):
        generator = torch.Generator().manual_seed(derived_seed(0, 4, START + 1, row))
        noises = torch.stack([torch.randn((48, 1, 28, 28), generator=generator) for _ in range(20)])
        expected.append((128 / 255 + 0.5 * noises[:, :, 0, 14, 14] > 0.5).sum(0))
    assert torch.equal(counted, torch.cat(expected)[:120])


def test_resumed_run_equals_uninterrupted_run(
    recorded: tuple[Path, list[dict[str, Any]]],
    tiny_data: ImageData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupted in each epoch of an evaluation, and between the two."""
    whole, _ = recorded
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    for interrupted_in in (START, START + 1, START + EVERY):

        def interrupt(status: TrainingStatus, epoch: int = interrupted_in) -> None:
            if status.epoch == epoch:
                raise KeyboardInterrupt

        resume = interrupted_in > START
        with pytest.raises(KeyboardInterrupt):
            train(weighted_recipe(), tiny_data, tmp_path / "run", device="cpu", on_progress=interrupt, resume=resume)
        state = load_state(tmp_path / "run")
        assert state is not None
        assert (state.epoch, state.sampler is None) == (interrupted_in, interrupted_in <= START)
    train(weighted_recipe(), tiny_data, tmp_path / "run", device="cpu", resume=True)
    assert digest(tmp_path / "run") == digest(whole)
    assert without_times(metrics(tmp_path / "run")) == without_times(metrics(whole))
    ours, theirs = load_state(tmp_path / "run"), load_state(whole)
    assert ours is not None
    assert theirs is not None
    assert ours.sampler is not None
    assert theirs.sampler is not None
    assert torch.equal(ours.sampler, theirs.sampler)


def test_the_default_device_of_torch_does_not_change_a_run(
    recorded: tuple[Path, list[dict[str, Any]]], tmp_path: Path, tiny_data: ImageData
) -> None:
    torch.set_default_device("meta")
    try:
        train(weighted_recipe(), tiny_data, tmp_path / "run", device="cpu")
    finally:
        torch.set_default_device(None)
    assert digest(tmp_path / "run") == digest(recorded[0])


def test_discarding_all_images_is_refused_in_one_line(tmp_path: Path, tiny_data: ImageData) -> None:
    settings = {"name": "radius-weighted", "start": START, "discard_below": 1.0, "discard_votes": 50}
    recipe = weighted_recipe(sampler=settings, learning_rate=1e-9)
    with pytest.raises(WorkError, match="would discard all 64 images in epoch 3") as caught:
        train(recipe, tiny_data.subset(torch.arange(64)), tmp_path / "run", device="cpu")
    assert "\n" not in str(caught.value)


def test_lost_classes_are_reported(tmp_path: Path, tiny_data: ImageData) -> None:
    """A network that gives one class for every image keeps the images of that class alone."""
    notes: list[str] = []
    data = tiny_data.subset(torch.arange(64))

    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(10))

        def forward(self, images: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(torch.full((len(images),), 7), 10) + 0 * self.weight

    recipe = weighted_recipe(model="mine", epochs=4)
    train(recipe, data, tmp_path / "run", device="cpu", model=Constant(), on_note=notes.append)
    left = int((data.labels == 7).sum())
    expected = f"discards {64 - left} of 64 images from epoch 3 on, all of class 0, 1, 2, 3, 4, 5, 6, 8, 9 among them"
    assert any(expected in note for note in notes), notes


def test_evaluation_follows_the_epochs_that_detect_a_dead_start() -> None:
    """A dead network keeps the images of one class, which would hide that it is dead."""
    assert RadiusWeighted.model_fields["start"].metadata[0].ge > max(DEAD_EPOCHS)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_can_be_combined_with_the_sampler(tmp_path: Path, tiny_data: ImageData, objective: str) -> None:
    settings = {"name": "radius-weighted", "start": START, "discard_below": 0.1, "discard_votes": 4, "votes": 0}
    recipe = weighted_recipe(objective=objective, epochs=4, batch_size=8, sampler=settings)
    teacher = TinyNet(10) if objective == "distillation" else None
    train(recipe, tiny_data.subset(torch.arange(8)), tmp_path / "run", classifier=teacher, device="cpu")
    state = load_state(tmp_path / "run")
    assert state is not None
    assert state.sampler is not None
    assert set(state.sampler.tolist()) <= {0.0, 1.0}
    assert metrics(tmp_path / "run")[-1]["discarded_images"] == int((state.sampler == 0).sum())


def test_uniform_sampler_leaves_no_trace_in_the_files(trained_run: Path) -> None:
    state = torch.load(trained_run / STATE, weights_only=True)
    assert "sampler" not in state
    assert "sampler" not in (trained_run / "recipe.yaml").read_text()
    assert all("discarded_images" not in line for line in metrics(trained_run))
    assert UniformSampler.weights is None


def record_orders(folder: Path) -> Tensor:
    """Train, and return the orders of all epochs."""
    orders, plain = list[Tensor](), RadiusWeightedSampler.order

    def order(self: RadiusWeightedSampler, run: Any, generator: torch.Generator) -> Tensor:
        orders.append(plain(self, run, generator))
        return orders[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "PIXELS_AT_ONCE", 1)  # several rows, which the processes divide among themselves
        patch.setattr(RadiusWeightedSampler, "order", order)
        data = mnist.load_sample("train").subset(torch.arange(256))
        train(weighted_recipe(epochs=4), data, folder, device="cpu")
    return torch.stack(orders)


@pytest.mark.slow
def test_two_processes_draw_the_images_of_one(tmp_path: Path) -> None:
    alone = record_orders(tmp_path / "one")
    assert alone[START].unique().numel() < 256
    for orders in run_together(record_orders, tmp_path / "two"):
        assert torch.equal(orders, alone)
