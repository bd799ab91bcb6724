"""The captured step compared with the plain one, on a GPU."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_recipe
from torch import Tensor, nn

from smoothcert.data import ImageData
from smoothcert.distributed import Team
from smoothcert.models import CifarResNet, Denoised, LeNet, Normalize
from smoothcert.models.ensemble import Ensemble
from smoothcert.models.precision import Precision, at_precision
from smoothcert.models.unet import UNet
from smoothcert.noise import NOISES
from smoothcert.objectives import (
    Adversary,
    Consistency,
    Denoising,
    Distillation,
    Gaussian,
    Macer,
    NoiseAttack,
    Objective,
    SmoothAdv,
    SmoothMix,
    Stability,
)
from smoothcert.papers.reproduce import estimate
from smoothcert.training import evaluate
from smoothcert.training.checkpoint import InputSpec, load_run
from smoothcert.training.denoiser import denoiser_recipe
from smoothcert.training.loop import train
from smoothcert.training.metrics import METRICS
from smoothcert.training.several_runs import train_together
from smoothcert.training.status import TrainingStatus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OBJECTIVES = [
    Gaussian(),
    Stability(),
    Consistency(),
    Macer(num_noise=4),
    SmoothAdv(num_noise=2, adversary=Adversary(steps=2)),
    SmoothAdv(num_noise=2, adversary=Adversary(steps=2, attack="ddn")),
    SmoothMix(num_noise=2, steps=2),
    Gaussian(num_noise=2, noise_attack=NoiseAttack(steps=2, step_size=1.0, first_epoch=6)),
    SmoothMix(num_noise=2, steps=2, one_step=True),
]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def losses(folder: Path) -> Tensor:
    return torch.tensor([line["loss"] for line in metrics(folder)])


@pytest.mark.parametrize(
    ("objective", "compiled"),
    [*((objective, False) for objective in OBJECTIVES), *((objective, True) for objective in OBJECTIVES[-1:])],
    ids=str,
)
def test_captured_equals_plain(tmp_path: Path, tiny_data: ImageData, objective: Objective, compiled: bool) -> None:
    compiling = "always" if compiled else "never"
    recipe = tiny_recipe(objective=objective, epochs=12, learning_rate=0.01, batch_size=32)
    notes: list[str] = []
    train(recipe, tiny_data, tmp_path / "fast", device="cuda", compiling=compiling, on_note=notes.append)
    train(recipe, tiny_data, tmp_path / "plain", device="cuda", capture=False)
    assert not [note for note in notes if "CUDA graph" in note or "be compiled" in note]
    recorded = load_run(tmp_path / "fast").provenance
    assert (recorded["captured"], recorded["compiled"]) == (True, compiled)
    assert torch.allclose(losses(tmp_path / "fast"), losses(tmp_path / "plain"), rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_denoiser_is_captured_also_with_a_classifier(tmp_path: Path, precision: Precision, weight: float) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (64, 3, 32, 32), generator=generator, dtype=torch.uint8)
    data = ImageData(pixels, torch.arange(64) % 10, 10, "toy", "train")
    torch.manual_seed(0)
    classifier = nn.Sequential(Normalize([0.5] * 3, [0.25] * 3), CifarResNet(20, 10)).eval() if weight else None
    fields = {"epochs": 10, "batch_size": 32, "precision": precision, "model": "unet-small"}
    recipe = denoiser_recipe("toy", 0.25, objective=Denoising(stability_weight=weight), **fields)
    for name, capture in (("fast", None), ("plain", False)):
        train(recipe, data, tmp_path / name, device="cuda", compiling="never", capture=capture, classifier=classifier)
    assert load_run(tmp_path / "fast").provenance["captured"]
    assert torch.allclose(losses(tmp_path / "fast"), losses(tmp_path / "plain"), rtol=5e-3, atol=1e-4)
    assert losses(tmp_path / "fast")[-1] < losses(tmp_path / "fast")[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_student_is_captured_with_an_ensemble_as_its_teacher(tmp_path: Path, precision: Precision) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (64, 3, 32, 32), generator=generator, dtype=torch.uint8)
    data = ImageData(pixels, torch.arange(64) % 10, 10, "toy", "train")
    torch.manual_seed(0)
    members = [nn.Sequential(Normalize([0.5] * 3, [0.25] * 3), CifarResNet(20, 10)).eval() for _ in range(2)]
    fields = {"dataset": "toy", "model": "resnet20", "epochs": 10, "batch_size": 32, "precision": precision}
    recipe = tiny_recipe(objective=Distillation(), learning_rate=0.01, **fields)
    for name, capture in (("fast", None), ("plain", False)):
        options = {"compiling": "never", "capture": capture, "classifier": Ensemble(members)}
        train(recipe, data, tmp_path / name, device="cuda", **options)
    assert load_run(tmp_path / "fast").provenance["captured"]
    assert torch.allclose(losses(tmp_path / "fast"), losses(tmp_path / "plain"), rtol=2e-2, atol=1e-3)
    assert losses(tmp_path / "fast")[-1] < losses(tmp_path / "fast")[0]


def test_votes_behind_a_denoiser_in_bf16_are_those_of_float32() -> None:
    torch.manual_seed(0)
    denoiser, classifier = UNet(3, 16, 1), nn.Sequential(Normalize([0.5] * 3, [0.25] * 3), CifarResNet(20, 10))
    nn.init.normal_(denoiser.tail.weight, std=0.01)
    whole, images = Denoised(denoiser, classifier).eval(), torch.rand(256, 3, 32, 32, device="cuda")
    device = torch.device("cuda")
    exact, fast = (at_precision(whole, precision, device, (3, 32, 32)) for precision in ("fp32", "bf16"))
    with torch.no_grad():
        logits = exact(images)
        error = (fast(images.bfloat16()).float() - logits).norm() / logits.norm()
    assert type(fast.classifier).__name__ == "FusedResNet"
    assert error < 0.03


def test_a_captured_run_resumes_exactly_where_it_was(tmp_path: Path, tiny_data: ImageData) -> None:
    train(tiny_recipe(epochs=4), tiny_data, tmp_path / "whole", device="cuda")
    with pytest.raises(Stop):
        train(tiny_recipe(epochs=4), tiny_data, tmp_path / "cut", device="cuda", on_progress=stop_after(2))
    train(tiny_recipe(epochs=4), tiny_data, tmp_path / "cut", device="cuda", resume=True)
    assert torch.allclose(losses(tmp_path / "whole"), losses(tmp_path / "cut"), rtol=1e-3)


class Stop(Exception):
    pass


def stop_after(epochs: int) -> Callable[[TrainingStatus], None]:
    def look(status: TrainingStatus) -> None:
        if status.epoch == epochs:
            raise Stop

    return look


class Asking(nn.Module):
    """A network that asks the host about its input, which a capture cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.network = LeNet(10)

    def forward(self, images: Tensor) -> Tensor:
        assert images.mean().item() < 10
        return self.network(images)


def test_what_cannot_be_captured_trains_all_the_same(tmp_path: Path, tiny_data: ImageData) -> None:
    notes: list[str] = []
    recipe = tiny_recipe(epochs=3)
    torch.manual_seed(0)
    network = Asking()
    twin = copy.deepcopy(network)
    train(recipe, tiny_data, tmp_path / "asking", model=network, device="cuda", capture=True, on_note=notes.append)
    train(recipe, tiny_data, tmp_path / "plain", model=twin, device="cuda")
    assert len(notes) == 1
    assert "not captured" in notes[0]
    assert len(torch.randn(3, device="cuda")) == 3, "the default generator can draw"
    assert torch.allclose(losses(tmp_path / "asking"), losses(tmp_path / "plain"), rtol=1e-3)
    assert not load_run(tmp_path / "plain", model=twin).provenance["captured"], "own networks are not, unless asked for"


def test_runs_side_by_side_give_what_they_give_alone(tmp_path: Path, tiny_data: ImageData) -> None:
    recipes = [tiny_recipe(seed=i, objective=SmoothMix(num_noise=2, steps=2)) for i in range(3)]
    jobs = [(recipe, tiny_data, tmp_path / f"together{recipe.seed}") for recipe in recipes]
    assert train_together(jobs, 3, device="cuda") == {}
    for recipe in recipes:
        train(recipe, tiny_data, tmp_path / f"alone{recipe.seed}", device="cuda")
        together, alone = (losses(tmp_path / f"{kind}{recipe.seed}") for kind in ("together", "alone"))
        assert torch.allclose(together, alone, rtol=1e-3)
        assert load_run(tmp_path / f"together{recipe.seed}").provenance["captured"]


@pytest.mark.parametrize(("model", "shape"), [("lenet", (1, 28, 28)), ("resnet20", (3, 32, 32))])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_is_estimated_by_captured_steps(
    model: str, shape: tuple[int, int, int], precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, replays = torch.cuda.CUDAGraph.replay, list[torch.cuda.CUDAGraph]()
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph)))
    estimate._seconds_per_trained_input.cache_clear()
    recipe = tiny_recipe(model=model, precision=precision)
    assert 0 < estimate.training_seconds(recipe, InputSpec(shape, 10), 640, 1, torch.device("cuda")) < 600
    assert len(replays) > 2
    assert len(set(replays)) == 1


def test_the_sampler_counts_the_votes_of_a_resnet_by_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels round otherwise than autocast: a few of the votes near a decision boundary differ."""
    torch.manual_seed(0)
    network = nn.Sequential(Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)), CifarResNet(20, 10)).cuda()
    colours = torch.randint(0, 256, (300, 3, 1, 1), dtype=torch.uint8, device="cuda").expand(-1, -1, 32, 32)
    noise = NOISES["gaussian"](0.05)
    noisy = colours / 255 + noise.sample(colours.shape, torch.Generator("cuda").manual_seed(0))
    with torch.no_grad():
        for _ in range(20):  # in training mode: statistics of batch norm as after some steps
            network(noisy)
        network.eval()
        network[1].fc.bias -= network(noisy).mean(0)  # every class is the largest for some colours
        labels = network(noisy).argmax(1)
        network.train()
    data = ImageData(colours.contiguous(), labels, 10, "toy", "train")
    run = SimpleNamespace(
        **{"recipe": tiny_recipe(sigma=0.05), "epoch": 3, "data": data, "model": network, "group": Team()},
        **{"device": torch.device("cuda"), "precision": "bf16", "noise": noise},
        autocast=lambda: torch.autocast("cuda", torch.bfloat16),
    )
    fast = evaluate.correct_votes(run, 20, torch.arange(300), 4)  # type: ignore[arg-type]
    monkeypatch.setattr(evaluate, "with_kernels", lambda model, *_: (model, torch.float32))
    slow = evaluate.correct_votes(run, 20, torch.arange(300), 4)  # type: ignore[arg-type]
    assert 2000 < int(slow.sum()) < 5500, "most of the 6,000 votes are right, and many are wrong"
    assert int((fast - slow).abs().sum()) < 0.05 * 6000
    assert network.training
