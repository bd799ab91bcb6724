"""The loop: steps against a transcription, determinism, exact resume, kills, several processes, divergence."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import tiny_recipe
from torch import Tensor, nn

from smoothcert.data import ImageData, mnist
from smoothcert.errors import RequestError, WorkError
from smoothcert.models import LeNet
from smoothcert.training.checkpoint import load_run, tensors_digest
from smoothcert.training.dead_start import at_chance, constant_output
from smoothcert.training.loop import TrainingStatus, learning_rate, train
from smoothcert.training.metrics import METRICS
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.run_folder import MODEL, RECIPE, STATE
from smoothcert.training.setup import derived_seed
from smoothcert.training.several_runs import STEPS_AHEAD, Pace, train_together
from smoothcert.training.state import load_state

ROOT = Path(__file__).parents[2]


def digest(folder: Path) -> str:
    return tensors_digest(load_run(folder).model.state_dict())


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def without_times(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_run_equals_a_transcription_of_the_protocol(tmp_path: Path, tiny_data: ImageData, nesterov: bool) -> None:
    """SGD with momentum, weight decay and step decay on noisy images, written out by hand."""
    recipe = tiny_recipe(nesterov=nesterov)
    train(recipe, tiny_data, tmp_path / "run", device="cpu")
    torch.manual_seed(derived_seed(recipe.seed, 0))
    model = LeNet(10)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for epoch in range(2):
        rate = 0.05 if epoch < 1 else 0.005
        generator = torch.Generator().manual_seed(derived_seed(recipe.seed, 1, epoch))
        order = torch.randperm(256, generator=generator)
        for step in range(4):
            chosen = order[step * 64 : step * 64 + 64]
            noise = torch.randn(1, 64, 1, 28, 28, generator=generator)[0] * 0.5
            torch.rand(64, generator=generator)
            logits = model(tiny_data.images[chosen].float() / 255 + noise)
            loss = -logits.log_softmax(1)[torch.arange(64), tiny_data.labels[chosen]].mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g, v in zip(model.parameters(), gradients, velocity, strict=True):
                    g = g + 1e-4 * p
                    v.mul_(0.9).add_(g)
                    p -= rate * (g + 0.9 * v if nesterov else v)
    for mine, theirs in zip(model.parameters(), load_run(tmp_path / "run").model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_same_seed_same_run_and_another_seed_another(tmp_path: Path, tiny_data: ImageData) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny_recipe(seed=seed, epochs=1), tiny_data, tmp_path / name, device="cpu")
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, tiny_data: ImageData) -> None:
    recipe = tiny_recipe(epochs=3)
    train(recipe, tiny_data, tmp_path / "whole", device="cpu")

    def interrupt(status: TrainingStatus) -> None:
        if status.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tiny_data, tmp_path / "cut", device="cpu", on_progress=interrupt)
    assert load_run(tmp_path / "cut").epoch == 1
    train(recipe, tiny_data, tmp_path / "cut", resume=True, device="cpu")
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    assert without_times(metrics(tmp_path / "cut")) == without_times(metrics(tmp_path / "whole"))
    # A finished run has nothing left to do.
    train(recipe, tiny_data, tmp_path / "cut", resume=True, device="cpu")
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


SCRIPT = """
import sys, torch
sys.path.insert(0, "tests")
from pathlib import Path
from tiny import tiny_recipe
from smoothcert.data import mnist
from smoothcert.training.loop import train
data = mnist.load_sample("train").subset(torch.arange(256))
torch.set_num_threads(1)
train(tiny_recipe(epochs=int(sys.argv[2])), data, Path(sys.argv[1]), resume=True, device="cpu")
"""


@pytest.mark.slow
def test_kill_loses_at_most_the_epoch_in_flight(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    victim = subprocess.Popen([*command, str(tmp_path / "killed"), "8"], cwd=ROOT)
    path = tmp_path / "killed" / METRICS
    deadline = time.monotonic() + 120
    while not (path.exists() and len(path.read_text().splitlines()) >= 2):
        assert time.monotonic() < deadline
        assert victim.poll() is None
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    finished = load_run(tmp_path / "killed").epoch
    assert finished >= 1
    subprocess.run([*command, str(tmp_path / "killed"), "8"], cwd=ROOT, check=True)
    subprocess.run([*command, str(tmp_path / "whole"), "8"], cwd=ROOT, check=True)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert without_times(metrics(tmp_path / "killed")) == without_times(metrics(tmp_path / "whole"))
    assert not list((tmp_path / "killed").glob(".*.tmp"))


SEVERAL_RUNS = """
import os, sys, torch
sys.path.insert(0, "tests")
from pathlib import Path
from tiny import tiny_recipe
from torch import distributed, nn
from smoothcert.data import mnist
from smoothcert.objectives import Gaussian, SmoothAdv, SmoothMix
from smoothcert.training.loop import train

class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(784, 10), nn.Linear(784, 10)

    def forward(self, images):
        return self.used(images.flatten(1))

torch.set_num_threads(1)
torch.manual_seed(0)
data = mnist.load_sample("train").subset(torch.arange(256))
folder = Path(sys.argv[1])
attack = {"attack": "pgd", "steps": 2, "epsilon": 0.5}
objectives = {"gaussian": Gaussian(), "smoothadv": SmoothAdv(num_noise=2, adversary=attack),
              "smoothmix": SmoothMix(num_noise=2, steps=2)}
for name, objective in objectives.items():
    train(tiny_recipe(objective=objective), data, folder / name, device="cpu")
    assert not distributed.is_initialized()
several = "WORLD_SIZE" in os.environ
if several:
    distributed.init_process_group("gloo")
train(tiny_recipe(model="mine", epochs=1), data, folder / "mine", model=HalfUsed(), device="cpu")
assert distributed.is_initialized() == several, "the caller's own process group is kept"
"""


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """torchrun with gloo on the CPU: the same losses and weights up to rounding, run after run in the same processes.

    Attacks switch parameter gradients off and on inside the wrapped step; the user's network has unused parameters.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = tmp_path / "script.py"
    script.write_text(SEVERAL_RUNS)
    for front, name in ((launch, "two"), ([sys.executable], "one")):
        command = [*front, str(script), str(tmp_path / name)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
    for run in ("gaussian", "smoothadv", "smoothmix", "mine"):
        for two, one in zip(metrics(tmp_path / "two" / run), metrics(tmp_path / "one" / run), strict=True):
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-4), run
            assert two["noisy_accuracy"] == pytest.approx(one["noisy_accuracy"], abs=0.01), run
        two_state, one_state = (load_state(tmp_path / name / run) for name in ("two", "one"))
        assert two_state is not None
        assert one_state is not None
        for a, b in zip(two_state.model.values(), one_state.model.values(), strict=True):
            assert torch.allclose(a, b, atol=1e-4), run


@pytest.mark.parametrize("noise", ["laplace", "uniform"])
def test_other_noise_trains_and_is_remembered(tmp_path: Path, tiny_data: ImageData, noise: str) -> None:
    train(tiny_recipe(epochs=1), tiny_data, tmp_path / "gaussian", device="cpu")
    train(tiny_recipe(epochs=1, noise=noise), tiny_data, tmp_path / noise, device="cpu")
    assert load_run(tmp_path / noise).recipe.noise == noise
    assert digest(tmp_path / noise) != digest(tmp_path / "gaussian")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where the processor does without bf16
@pytest.mark.parametrize(("amx", "precision"), [(True, "bf16"), (False, "fp32")])
def test_precision_is_what_the_processor_is_fast_in(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch, amx: bool, precision: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    train(tiny_recipe(precision="auto", epochs=1), tiny_data, tmp_path, device="cpu")
    run = load_run(tmp_path)
    assert run.provenance["precision"] == precision
    assert all(weight.dtype == torch.float32 for weight in run.model.parameters())


def test_learning_rate_drops() -> None:
    recipe = tiny_recipe(learning_rate=0.1, learning_rate_drops=(3, 5), epochs=9)
    assert [round(learning_rate(recipe, e, 0), 9) for e in range(7)] == [0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]


def test_learning_rate_warm_up(tmp_path: Path, tiny_data: ImageData) -> None:
    recipe = tiny_recipe(learning_rate=0.1, learning_rate_drops=(3,), learning_rate_warm_up=2, epochs=4)
    assert [round(learning_rate(recipe, e, 2), 9) for e in range(4)] == [0.01, 0.01, 0.1, 0.01]
    train(recipe, tiny_data, tmp_path / "run", device="cpu")
    assert [round(line["learning_rate"], 9) for line in metrics(tmp_path / "run")] == [0.01, 0.01, 0.1, 0.01]


class Constant(nn.Module):
    """One class for all images, or what else `logits` say."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits.expand(len(images), 10)


@pytest.mark.parametrize(("epochs", "warm_up", "notes"), [(6, 0, 1), (6, 2, 1), (4, 0, 0)])
def test_a_run_that_has_one_class_for_all_is_noted_once(
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


@pytest.mark.parametrize("interrupted_in", [None, 1, 2])
def test_a_dead_start_is_repeated_with_warm_up(
    tmp_path: Path, tiny_data: ImageData, interrupted_in: int | None
) -> None:
    """It then equals a run that had the warm-up from the beginning, also after an interruption before the restart."""
    notes: list[str] = []
    recipe = tiny_recipe(epochs=4, learning_rate=0.5, learning_rate_drops=())
    folder = tmp_path / "run"

    def interrupt(status: TrainingStatus) -> None:
        if status.epoch == interrupted_in and not notes:
            raise KeyboardInterrupt

    try:
        train(recipe, tiny_data, folder, model=dying(0.2), device="cpu", on_note=notes.append, on_progress=interrupt)
    except KeyboardInterrupt:
        train(recipe, tiny_data, folder, model=dying(0.2), device="cpu", on_note=notes.append, resume=True)
    assert len(notes) == 1
    assert "dead start" in notes[0]
    run = load_run(folder, model=dying(0.2))
    assert run.provenance["learning_rate_warm_up"] == 1
    assert run.recipe == recipe, "the recipe stays as requested"

    warm = tiny_recipe(epochs=4, learning_rate=0.5, learning_rate_drops=(), learning_rate_warm_up=1)
    train(warm, tiny_data, tmp_path / "warm", model=dying(0.2), device="cpu")
    expected = load_run(tmp_path / "warm", model=dying(0.2)).model.state_dict()
    assert tensors_digest(run.model.state_dict()) == tensors_digest(expected)
    assert [line["learning_rate"] for line in metrics(folder)] == pytest.approx([0.05, 0.5, 0.5, 0.5])
    assert metrics(folder)[-1]["noisy_accuracy"] > 0.3


def test_a_start_that_stays_dead_is_repeated_only_once(tmp_path: Path, tiny_data: ImageData) -> None:
    """Some published settings do collapse, and their rows are trained to the end."""
    notes: list[str] = []
    recipe = tiny_recipe(epochs=5, learning_rate_drops=())
    train(recipe, tiny_data, tmp_path / "run", model=dying(0.0), device="cpu", on_note=notes.append)
    assert ["dead start" in note for note in notes] == [True, False]
    assert "no better than one class for all images" in notes[1]
    assert len(metrics(tmp_path / "run")) == 5


def test_what_a_constant_output_is() -> None:
    """Its cross-entropy is ln C, or the entropy of the labels once it has learnt how common the classes are."""
    labels = torch.tensor([0] * 60 + [1] * 40)
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    for cross_entropy, expected in ((math.log(2), True), (entropy, True), (0.68, False), (0.3, False)):
        assert constant_output({"cross_entropy": cross_entropy, "noisy_accuracy": 0.6}, labels) == expected
        assert constant_output({"natural": cross_entropy, "noisy_accuracy": 0.6}, labels) == expected
    assert not constant_output({"cross_entropy": entropy, "noisy_accuracy": 0.9}, labels)
    assert not constant_output({"loss": entropy, "noisy_accuracy": 0.6}, labels), "no cross-entropy to judge by"


def test_what_is_at_chance() -> None:
    labels = torch.tensor([0] * 60 + [1] * 40)
    assert [at_chance(accuracy, labels) for accuracy in (0.0, 0.5, 0.6, 0.62, 0.64, 1.0)] == [True] * 4 + [False] * 2
    assert not at_chance(1.0, torch.zeros(5, dtype=torch.int64)), "one class: nothing to learn"


def test_a_run_that_learns_is_not_noted(tmp_path: Path, tiny_data: ImageData) -> None:
    heard: list[str] = []
    recipe = tiny_recipe(epochs=5, learning_rate_drops=())
    train(recipe, tiny_data, tmp_path / "run", device="cpu", on_note=heard.append)
    assert heard == []


def test_progress_is_reported(tmp_path: Path, tiny_data: ImageData) -> None:
    seen: list[TrainingStatus] = []
    train(tiny_recipe(epochs=1), tiny_data, tmp_path / "run", device="cpu", on_progress=seen.append)
    last = seen[-1]
    assert (last.epoch, last.epochs, last.step, last.steps, last.seconds_left) == (0, 1, 4, 4, 0.0)
    assert last.loss == pytest.approx(metrics(tmp_path / "run")[0]["loss"], rel=1e-5)
    assert 0 <= last.noisy_accuracy <= 1
    assert last.images_per_second > 0


def test_a_diverging_loss_stops_the_run_and_keeps_the_last_epoch(tmp_path: Path, tiny_data: ImageData) -> None:
    recipe = tiny_recipe(epochs=2, learning_rate=1e8, learning_rate_drops=())
    with pytest.raises(WorkError, match=r"diverged in epoch 0, step [123] \(loss .*cross_entropy") as caught:
        train(recipe, tiny_data, tmp_path / "run", device="cpu")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / MODEL).exists()


def test_an_existing_run_is_not_overwritten(tmp_path: Path, tiny_data: ImageData) -> None:
    train(tiny_recipe(epochs=1), tiny_data, tmp_path / "run", device="cpu")
    before = digest(tmp_path / "run")
    with pytest.raises(RequestError, match="holds a run already; continue it with --resume"):
        train(tiny_recipe(epochs=1), tiny_data, tmp_path / "run", device="cpu")
    with pytest.raises(RequestError, match=r"epochs: the run has 1, the request 2"):
        train(tiny_recipe(epochs=2), tiny_data, tmp_path / "run", resume=True, device="cpu")
    assert digest(tmp_path / "run") == before


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_damaged_state_is_refused_and_left_alone(tmp_path: Path, tiny_data: ImageData, content: bytes | None) -> None:
    train(tiny_recipe(epochs=1), tiny_data, tmp_path / "run", device="cpu")
    path = tmp_path / "run" / STATE
    path.write_bytes(path.read_bytes()[:-2000] if content is None else content)
    before = path.read_bytes()
    with pytest.raises(WorkError, match=r"state\.pt: damaged"):
        train(tiny_recipe(epochs=1), tiny_data, tmp_path / "run", resume=True, device="cpu")
    assert path.read_bytes() == before


def test_a_damaged_model_is_refused(tmp_path: Path, tiny_data: ImageData) -> None:
    train(tiny_recipe(epochs=1), tiny_data, tmp_path / "run", device="cpu")
    path = tmp_path / "run" / MODEL
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(WorkError, match=r"model\.safetensors: damaged") as caught:
        load_run(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    data = mnist.load_sample("train").subset(torch.arange(10))
    with pytest.raises(RequestError, match="expected at most the 10 training images, got 64"):
        train(tiny_recipe(), data, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def finished(trained_pair: Path, tmp_path: Path) -> Path:
    """A run of 2 epochs on `tiny_data`."""
    return Path(shutil.copytree(trained_pair / "finished", tmp_path / "finished"))


@pytest.fixture
def half(trained_pair: Path, tmp_path: Path) -> Path:
    """The same run, interrupted after its first epoch."""
    return Path(shutil.copytree(trained_pair / "half", tmp_path / "half"))


@pytest.fixture(scope="module")
def trained_pair(tmp_path_factory: pytest.TempPathFactory, tiny_data: ImageData) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    train(tiny_recipe(), tiny_data, folder / "finished", device="cpu")

    def interrupt(status: TrainingStatus) -> None:
        if status.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(), tiny_data, folder / "half", device="cpu", on_progress=interrupt)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused_and_unchanged(
    folder: Path, data: ImageData, match: str, recipe: TrainRecipe | None = None, resume: bool = True
) -> None:
    """Training in `folder` costs one line, and changes nothing in it."""
    before = contents(folder)
    with pytest.raises((RequestError, WorkError), match=match) as caught:
        train(recipe or tiny_recipe(), data, folder, resume=resume, device="cpu")
    assert "\n" not in str(caught.value)
    assert contents(folder) == before


def changed_state(folder: Path, **changes: object) -> None:
    state = torch.load(folder / STATE, weights_only=True)
    torch.save({k: v for k, v in {**state, **changes}.items() if v is not None}, folder / STATE)


def test_a_finished_run_without_its_state_is_not_trained_again(finished: Path, tiny_data: ImageData) -> None:
    (finished / STATE).unlink()
    before, notes, module = contents(finished), list[str](), LeNet(10)
    train(tiny_recipe(), tiny_data, finished, resume=True, device="cpu", on_note=notes.append, model=module)
    assert contents(finished) == before
    assert notes == [f"{finished}: all 2 epochs are trained already"]
    assert tensors_digest(module.state_dict()) == digest(finished)


def test_an_unfinished_run_without_its_state_is_refused(half: Path, tiny_data: ImageData) -> None:
    (half / STATE).unlink()
    refused_and_unchanged(half, tiny_data, r"state\.pt is gone, so the run cannot continue after its 1 of 2 epochs")


def test_metrics_of_several_epochs_without_a_state_are_refused(half: Path, tiny_data: ImageData) -> None:
    for name in (STATE, MODEL):
        (half / name).unlink()
    line = metrics(half)[0]
    (half / METRICS).write_text("".join(json.dumps(line | {"epoch": epoch}) + "\n" for epoch in range(3)))
    refused_and_unchanged(half, tiny_data, r"after its 3 of 2 epochs")


def test_a_kill_before_the_first_state_costs_one_epoch(finished: Path, half: Path, tiny_data: ImageData) -> None:
    for name in (STATE, MODEL):
        (half / name).unlink()
    train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
    assert digest(half) == digest(finished)
    assert without_times(metrics(half)) == without_times(metrics(finished))


@pytest.mark.parametrize("left", ["none", "of the epoch before"])
def test_a_missing_model_is_written_again_from_the_state(
    finished: Path, half: Path, tiny_data: ImageData, left: str
) -> None:
    """As after a kill between state and model."""
    before = (finished / MODEL).read_bytes()
    (finished / MODEL).unlink()
    if left != "none":
        shutil.copy(half / MODEL, finished / MODEL)
    train(tiny_recipe(), tiny_data, finished, resume=True, device="cpu")
    assert (finished / MODEL).read_bytes() == before


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("left", [(STATE,), (MODEL,), (METRICS,), (STATE, MODEL, METRICS)])
def test_a_folder_that_lost_its_recipe_is_refused(
    half: Path, tiny_data: ImageData, left: tuple[str, ...], resume: bool
) -> None:
    for name in contents(half):
        if name not in left:
            (half / name).unlink()
    match = r"but no recipe\.yaml; .* or choose another --out"
    if resume and MODEL in left:
        match = r"sigma: the run has 0\.5, the request 0\.25"
    refused_and_unchanged(half, tiny_data, match, tiny_recipe(sigma=0.25), resume)


def test_changed_training_data_are_refused(half: Path, tiny_data: ImageData) -> None:
    labels, images = tiny_data.labels.clone(), tiny_data.images.clone()
    labels[7] = (labels[7] + 1) % 10
    images[7, 0, 14, 14] ^= 1
    for data in (replace(tiny_data, labels=labels), replace(tiny_data, images=images)):
        refused_and_unchanged(half, data, "the training data have changed since its state was saved")


def test_a_state_of_an_earlier_version_continues_with_a_note(finished: Path, half: Path, tiny_data: ImageData) -> None:
    changed_state(half, about=None)
    notes: list[str] = []
    train(tiny_recipe(), tiny_data, half, resume=True, device="cpu", on_note=notes.append)
    assert notes == [f"{half}: its state does not record its training data: whether they are the same is not checked"]
    assert digest(half) == digest(finished)


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": (1,)},
        {"epoch": 0.5},
        {"epoch": True},
        {"epoch": 2**40},
        {"epoch": -1},
        {"epoch": 2},
        {"epoch": None},
        {"model": 3},
        {"model": {"a": 3}},
        {"model": None},
        {"optimizer": None},
        {"optimizer": 3},
        {"optimizer": {"state": 3}},
        {"optimizer": {"state": {0: {"momentum_buffer": 3}}}},
        {"optimizer": {"state": {0: 3}}},
        {"optimizer": {"state": {0: {"momentum_buffer": torch.zeros(())}}}},
        {"about": 3},
        {"about": "3"},
        {"about": "{"},
        {"about": '{"recipe": 3}'},
        {"about": '{"data": 3}'},
    ],
    ids=str,
)
def test_a_state_of_other_types_is_refused(half: Path, tiny_data: ImageData, changes: dict[str, object]) -> None:
    changed_state(half, **changes)
    match = r"state\.pt: damaged|state\.pt: expected at most|state\.pt is that of 2 epochs, .* holds 1|do not fit"
    refused_and_unchanged(half, tiny_data, match)


def test_a_state_cut_anywhere_is_refused(half: Path, tiny_data: ImageData) -> None:
    content = (half / STATE).read_bytes()
    for length in (0, 1, 10, 100, 1000, len(content) // 2, len(content) - 1):
        (half / STATE).write_bytes(content[:length])
        refused_and_unchanged(half, tiny_data, r"state\.pt: damaged")


@pytest.mark.parametrize("forgotten", ["none", "the state's"])
def test_a_recipe_edited_by_hand_is_refused(half: Path, tiny_data: ImageData, forgotten: str) -> None:
    edited = tiny_recipe(sigma=0.25)
    edited.save(half / RECIPE)
    if forgotten == "the state's":
        changed_state(half, about=None)
    refused_and_unchanged(half, tiny_data, r"sigma: the run has 0\.5, the request 0\.25", edited)
    (half / MODEL).unlink()
    if forgotten == "none":
        refused_and_unchanged(half, tiny_data, r"state\.pt says .*sigma: the run has 0\.5", edited)


def test_more_epochs_may_be_asked_for_by_editing_the_recipe(
    finished: Path, tmp_path: Path, tiny_data: ImageData
) -> None:
    """What was trained is the beginning of the longer run."""
    longer = tiny_recipe(epochs=3)
    longer.save(finished / RECIPE)
    train(longer, tiny_data, finished, resume=True, device="cpu")
    train(longer, tiny_data, tmp_path / "longer", device="cpu")
    assert digest(finished) == digest(tmp_path / "longer")
    assert load_run(finished).recipe == longer


@pytest.mark.parametrize(
    "line", ['{"epoch": 0, "lo', "[1]", '{"epoch": 5, "loss": 1.0}', '{"loss": 1}', "\udcff", "1e999"]
)
def test_damaged_metrics_are_refused_with_the_line(finished: Path, tiny_data: ImageData, line: str) -> None:
    lines = (finished / METRICS).read_bytes().splitlines()
    (finished / METRICS).write_bytes(b"\n".join([lines[0], line.encode("utf-8", "surrogateescape"), lines[1], b""]))
    refused_and_unchanged(finished, tiny_data, r"metrics\.jsonl, line 2: (damaged|expected epoch 1)")


def test_a_torn_last_line_of_metrics_is_dropped(half: Path, finished: Path, tiny_data: ImageData) -> None:
    with (half / METRICS).open("a") as file:
        file.write('{"epoch": 1, "lo')
    train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
    assert without_times(metrics(half)) == without_times(metrics(finished))


def test_fewer_metrics_than_epochs_are_refused_and_none_are_noted(finished: Path, tiny_data: ImageData) -> None:
    (finished / METRICS).write_text((finished / METRICS).read_text().splitlines()[0] + "\n")
    refused_and_unchanged(finished, tiny_data, r"state\.pt is that of 2 epochs, metrics\.jsonl holds 1")
    (finished / METRICS).unlink()
    notes: list[str] = []
    train(tiny_recipe(), tiny_data, finished, resume=True, device="cpu", on_note=notes.append)
    assert any("metrics.jsonl is gone" in note for note in notes)


@pytest.mark.parametrize("key", ["recipe", "provenance", "epoch", "input"])
def test_a_model_whose_metadata_lack_a_part_is_refused(finished: Path, tiny_data: ImageData, key: str) -> None:
    with safe_open(finished / MODEL, framework="pt") as file:
        about = json.loads(file.metadata()["smoothcert"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for value in (None, 3, "a", [1], {}, -1, 10**40):
        changed = {k: v for k, v in {**about, key: value}.items() if v is not None}
        if key == "provenance" and value == {}:
            continue
        save_file(tensors, finished / MODEL, metadata={"smoothcert": json.dumps(changed)})
        with pytest.raises(WorkError, match=r"model\.safetensors: ") as caught:
            load_run(finished)
        assert "\n" not in str(caught.value)
        refused_and_unchanged(finished, tiny_data, r"model\.safetensors: ")
    save_file(tensors, finished / MODEL)
    with pytest.raises(WorkError, match=r"model\.safetensors: damaged or not a smoothcert model"):
        load_run(finished)


def test_temporary_files_of_killed_saves_are_removed(half: Path, tiny_data: ImageData) -> None:
    for name in (RECIPE, STATE, MODEL, METRICS):
        (half / f".{name}.abcd1234.tmp").write_text("half of it")
    (half / ".mine.tmp").write_text("not ours")
    train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
    assert [path.name for path in half.glob(".*")] == [".mine.tmp"]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """As on a full disk: no file can grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_one_line_and_keeps_what_was_saved(half: Path, finished: Path, tiny_data: ImageData) -> None:
    before = contents(half)
    for size in (100_000, 3_000_000):
        with (
            file_size_limit(size),
            pytest.raises(WorkError, match=r"could not be written to .*File too large") as caught,
        ):
            train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
        assert "\n" not in str(caught.value)
        after = contents(half)
        assert {name: after[name] for name in (STATE, MODEL)} == {name: before[name] for name in (STATE, MODEL)}
        assert set(after) == set(before), "no temporary files"
    train(tiny_recipe(), tiny_data, half, resume=True, device="cpu")
    assert digest(half) == digest(finished)


def test_a_changed_network_is_refused_on_resume(tmp_path: Path, tiny_data: ImageData) -> None:
    def build(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, width), torch.nn.Linear(width, 10))

    train(tiny_recipe(model="mine", epochs=1), tiny_data, tmp_path / "run", model=build(4), device="cpu")
    with pytest.raises(RequestError, match="do not fit the network"):
        train(
            tiny_recipe(model="mine", epochs=1), tiny_data, tmp_path / "run", model=build(5), resume=True, device="cpu"
        )


def test_runs_in_turn_give_what_they_give_alone(tmp_path: Path, tiny_data: ImageData) -> None:
    recipes = [tiny_recipe(seed=seed) for seed in range(3)]
    jobs = [(recipe, tiny_data, tmp_path / f"together{recipe.seed}") for recipe in recipes]
    assert train_together(jobs, 2, device="cpu") == {}
    for recipe in recipes:
        train(recipe, tiny_data, tmp_path / f"alone{recipe.seed}", device="cpu")
        assert digest(tmp_path / f"together{recipe.seed}") == digest(tmp_path / f"alone{recipe.seed}")


def test_a_run_that_fails_does_not_keep_the_others_from_theirs(tmp_path: Path, tiny_data: ImageData) -> None:
    (tmp_path / "blocked").write_text("a file where the run folder should be")
    jobs = [
        (tiny_recipe(batch_size=512), tiny_data, tmp_path / "large"),
        (tiny_recipe(epochs=1), tiny_data, tmp_path / "blocked"),
        (tiny_recipe(epochs=1), tiny_data, tmp_path / "good"),
    ]
    failures = train_together(jobs, 2, device="cpu")
    assert set(failures) == {tmp_path / "large", tmp_path / "blocked"}
    assert isinstance(failures[tmp_path / "large"], RequestError)
    assert load_run(tmp_path / "good").finished
    with pytest.raises(RequestError, match="at least 1, got 0"):
        train_together(jobs, 0, device="cpu")


class Huge(nn.Module):
    """Asks for a petabyte in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LeNet(10)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            torch.empty(2**50, dtype=torch.uint8)
        return self.inner(images)


def test_too_little_memory_costs_one_line(tmp_path: Path, tiny_data: ImageData) -> None:
    with pytest.raises(WorkError, match=r"choose a smaller batch_size or objective\.num_noise"):
        train(tiny_recipe(model="huge"), tiny_data, tmp_path / "run", model=Huge(), device="cpu")


def test_ruined_weights_do_not_replace_the_last_checkpoint(tmp_path: Path, tiny_data: ImageData) -> None:
    """One step with an absurd rate: its own loss is still sound, the weights after it are not."""
    data = tiny_data.subset(torch.arange(64))
    with pytest.raises(WorkError, match="the weights diverged in epoch 0"):
        train(tiny_recipe(learning_rate=1e15), data, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run" / MODEL).exists()


def test_the_host_stays_a_few_steps_ahead_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        done = False

        def record(self) -> None:
            events.append(self)

        def query(self) -> bool:
            return self.done

    events: list[Event] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    pace, on_cpu = Pace(torch.device("cuda")), Pace(torch.device("cpu"))
    for step in range(STEPS_AHEAD):
        assert not pace.far_ahead(), step
        pace.stepped()
        on_cpu.stepped()
    assert pace.far_ahead()
    assert not on_cpu.far_ahead()
    events[-1].done = True
    assert pace.far_ahead(), "streams do their work in order: only the oldest counts"
    events[0].done = True
    assert not pace.far_ahead()
    pace.stepped()
    assert pace.far_ahead()
    events[1].done = True
    assert not pace.far_ahead(), "one step done, one may be asked for"


def test_a_second_process_in_the_folder_is_refused(tmp_path: Path, tiny_data: ImageData) -> None:
    recipe, folder = tiny_recipe(epochs=2), tmp_path / "run"

    def second(status: TrainingStatus) -> None:
        with pytest.raises(RequestError, match=r"another process is writing it; .* choose another --out"):
            train(recipe, tiny_data, folder, device="cpu", resume=True)

    train(recipe, tiny_data, folder, device="cpu", on_progress=second)
    assert [line["epoch"] for line in metrics(folder)] == [0, 1]
    train(recipe, tiny_data, tmp_path / "alone", device="cpu")
    assert digest(folder) == digest(tmp_path / "alone")
    assert not list(folder.glob(".*"))


def test_a_run_that_joins_within_an_epoch_counts(tmp_path: Path, tiny_data: ImageData) -> None:
    """The first ends with the second's first epoch; the third takes its place after the second's next has begun."""
    runs = [(tiny_recipe(epochs=epochs), tiny_data, tmp_path / str(i)) for i, epochs in enumerate((1, 2, 1))]
    assert train_together(runs, 2, device="cpu") == {}
    assert [line["runs_at_once"] for line in metrics(tmp_path / "1")] == [2, 2]


def test_runs_side_by_side_leave_their_folders_when_interrupted(tmp_path: Path, tiny_data: ImageData) -> None:
    runs = [(tiny_recipe(epochs=2, seed=seed), tiny_data, tmp_path / str(seed)) for seed in range(3)]

    def interrupt(folder: Path, status: TrainingStatus) -> None:
        if folder.name == "1":
            raise KeyboardInterrupt

    try:
        train_together(runs, 3, device="cpu", on_progress=interrupt)
    except KeyboardInterrupt:  # while it is alive, so are the frames that it went through
        assert train_together(runs, 3, device="cpu") == {}
    for seed in range(3):
        assert [line["epoch"] for line in metrics(tmp_path / str(seed))] == [0, 1]


class Ten(nn.Module):
    """The same logits for every image, and nothing to learn."""

    def forward(self, images: Tensor) -> Tensor:
        return images.new_zeros(len(images), 10)


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path, tiny_data: ImageData) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in ("file", "file/run"):
        with pytest.raises(RequestError, match="expected a folder or none, got the file"):
            train(tiny_recipe(), tiny_data, tmp_path / folder, device="cpu")
    with pytest.raises(RequestError, match="batch_size"):
        train(tiny_recipe(batch_size=10**6), tiny_data, tmp_path / "run", device="cpu")
    with pytest.raises(RequestError, match="has no parameters to train"):
        train(tiny_recipe(), tiny_data, tmp_path / "run", device="cpu", model=Ten())
    with pytest.raises(RequestError, match="lenett"):
        train(tiny_recipe(model="lenett"), tiny_data, tmp_path / "run", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_quick_runs_do_not_wait_for_a_slow_first_one(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run is far ahead until the other has ended."""
    recipe, ended = tiny_recipe(epochs=2), []

    class SlowFirst:
        made = 0

        def __init__(self, device: torch.device) -> None:
            self.slow, self.steps = SlowFirst.made == 0, 0
            SlowFirst.made += 1

        def far_ahead(self) -> bool:
            return self.slow and self.steps > 0 and "quick" not in ended

        def stepped(self) -> None:
            self.steps += 1

    def look(folder: Path, status: TrainingStatus) -> None:
        if (status.epoch + 1, status.step) == (status.epochs, status.steps):
            ended.append(folder.name)

    monkeypatch.setattr("smoothcert.training.several_runs.Pace", SlowFirst)
    runs = [(recipe, tiny_data, tmp_path / name) for name in ("slow", "quick")]
    assert train_together(runs, 2, device="cpu", on_progress=look) == {}
    assert ended == ["quick", "slow"]
    assert load_run(tmp_path / "slow").provenance["runs_at_once"] == 2
    train(recipe, tiny_data, tmp_path / "alone", device="cpu")
    for name, numbers in (("slow", [2, 1]), ("quick", [2, 2]), ("alone", [1, 1])):
        device = load_run(tmp_path / name).provenance["versions"]["device"]
        told = [(line["runs_at_once"], line["device"]) for line in metrics(tmp_path / name)]
        assert told == [(number, device) for number in numbers], f"{name}: the second epoch of the slow one was alone"
