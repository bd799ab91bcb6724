"""The training loop: steps against a transcription, determinism, several processes, divergence."""

import gc
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import run_together
from tiny import Killed, TinyNet, digest, killed_after_the_first_epoch, metrics, tiny_recipe
from torch import Tensor, distributed, nn

import smoothcert as sc
from smoothcert.data import ImageData, mnist
from smoothcert.distributed import Team
from smoothcert.errors import RequestError, WorkError
from smoothcert.noise import Gaussian as Noise
from smoothcert.objectives import (
    CatRs,
    Distillation,
    Gaussian,
    LossTerms,
    Macer,
    NoiseAttack,
    Progress,
    SmoothAdv,
    SmoothMix,
)
from smoothcert.training import resume as resume_module
from smoothcert.training.checkpoint import load_run
from smoothcert.training.divergence import stop_if_loss_diverged, stop_if_weights_diverged
from smoothcert.training.loop import fill_progress, learning_rate, train
from smoothcert.training.meter import Meter
from smoothcert.training.resume import load_state
from smoothcert.training.run_folder import MODEL
from smoothcert.training.seeds import derived_seed
from smoothcert.training.status import TrainingStatus
from smoothcert.training.step import training_step


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nesterov": True, "seed": 3},
        {"optimizer": "adamw", "momentum": 0.8, "learning_rate": 0.002, "weight_decay": 0.1, "ema": 0.9},
    ],
    ids=["sgd", "nesterov", "adamw-ema"],
)
def test_run_equals_a_transcription_of_the_protocol(
    tmp_path: Path, tiny_data: ImageData, changes: dict[str, object]
) -> None:
    """SGD or AdamW with weight decay and step decay on noisy images, and a moving average, written out by hand."""
    recipe = tiny_recipe(**changes)
    train(recipe, tiny_data, tmp_path / "run", device="cpu")
    torch.manual_seed(derived_seed(recipe.seed, 0))
    model = TinyNet(10)
    first, second = ([torch.zeros_like(p) for p in model.parameters()] for _ in range(2))
    average = [p.detach().clone() for p in model.parameters()]
    t = 0
    for epoch in range(2):
        rate = recipe.learning_rate if epoch < 1 else recipe.learning_rate / 10
        generator = torch.Generator().manual_seed(derived_seed(recipe.seed, 1, epoch))
        order = torch.randperm(256, generator=generator)
        for step in range(4):
            t += 1
            chosen = order[step * 64 : step * 64 + 64]
            noise = torch.randn(1, 64, 1, 28, 28, generator=generator)[0] * 0.5
            torch.rand(64, generator=generator)
            logits = model(tiny_data.images[chosen].float() / 255 + noise)
            loss = -logits.log_softmax(1)[torch.arange(64), tiny_data.labels[chosen]].mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g, m, v, e in zip(model.parameters(), gradients, first, second, average, strict=True):
                    if recipe.optimizer == "adamw":
                        m.mul_(0.8).add_(0.2 * g)
                        v.mul_(0.999).add_(0.001 * g**2)
                        p *= 1 - rate * recipe.weight_decay
                        p -= rate * (m / (1 - 0.8**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
                    else:
                        g = g + recipe.weight_decay * p
                        m.mul_(0.9).add_(g)
                        p -= rate * (g + 0.9 * m if recipe.nesterov else m)
                    decay = min(recipe.ema, (1 + t) / (10 + t))
                    e.mul_(decay).add_((1 - decay) * p)
    for mine, theirs in zip(average, load_run(tmp_path / "run").model.parameters(), strict=True):
        # AdamW divides gradients near zero by their own size: there rounding decides, in a few of 34,000 weights.
        allowed = 1e-4 if recipe.optimizer == "adamw" else 0.0
        assert ((mine - theirs).abs() > 1e-5).float().mean() <= allowed


def test_weights_depend_only_on_the_seed(tmp_path: Path, tiny_data: ImageData) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny_recipe(seed=seed, epochs=1), tiny_data, tmp_path / name, device="cpu")
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(784, 10), nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.used(images.flatten(1))
        return logits


def train_several_runs(folder: Path) -> list[str]:
    """Run after run in one process, or in each of several; return the notes of the last one."""
    destroy, several = distributed.destroy_process_group, "WORLD_SIZE" in os.environ

    def destroy_after_the_wrapper() -> None:
        # A wrapper that outlives its process group joins the group's threads, and may wait for them forever.
        assert not any(type(thing) is nn.parallel.DistributedDataParallel for thing in gc.get_objects())
        destroy()

    torch.manual_seed(0)
    data = mnist.load_sample("train").subset(torch.arange(128))
    attack = {"attack": "pgd", "steps": 2, "epsilon": 0.5}
    objectives = {
        "gaussian": Gaussian(),
        "smoothadv": SmoothAdv(num_noise=2, adversary=attack),  # type: ignore[arg-type]
        "smoothmix": SmoothMix(num_noise=2, steps=2),
        "distillation": Distillation(),
    }
    teacher, notes = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "destroy_process_group", destroy_after_the_wrapper)
        for name, objective in objectives.items():
            given = teacher if name == "distillation" else None
            train(tiny_recipe(objective=objective), data, folder / name, classifier=given, device="cpu")
            assert not distributed.is_initialized()
        votes = {"teacher": tiny_recipe(epochs=1, learning_rate_drops=()), "teacher_votes": 20}
        train(tiny_recipe(objective=CatRs(num_noise=2, steps=1), **votes), data, folder / "catrs", device="cpu")
        if several:
            distributed.init_process_group("gloo")
        train(tiny_recipe(model="mine", epochs=1), data, folder / "mine", model=HalfUsed(), device="cpu")
        assert distributed.is_initialized() == several, "the caller's own process group is kept"
        train(tiny_recipe(sigma=30.0, epochs=1), data, folder / "hidden", device="cpu", on_note=notes.append)
    return notes


@pytest.mark.slow
def test_two_processes_give_the_losses_and_weights_of_one(tmp_path: Path) -> None:
    """With gloo on the CPU: the same losses and weights up to rounding, run after run in the same processes.

    Attacks switch parameter gradients off and on inside the wrapped step; the user's network has unused parameters.
    Each process gets the votes of the teacher for its own images.
    """
    notes, others = run_together(train_several_runs, tmp_path / "two")
    assert notes == train_several_runs(tmp_path / "one")
    assert [note.partition(";")[0] for note in notes] == ["sigma 30 hides images in [0, 1] completely"]
    assert others == [], "the first process alone reports"
    for run in ("gaussian", "smoothadv", "smoothmix", "distillation", "catrs", "mine"):
        for two, one in zip(metrics(tmp_path / "two" / run), metrics(tmp_path / "one" / run), strict=True):
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-4), run
            assert two["noisy_accuracy"] == pytest.approx(one["noisy_accuracy"], abs=0.01), run
        two_state, one_state = (load_state(tmp_path / name / run) for name in ("two", "one"))
        assert two_state is not None
        assert one_state is not None
        for a, b in zip(two_state.model.values(), one_state.model.values(), strict=True):
            assert torch.allclose(a, b, atol=1e-4), run


def train_and_load(folder: Path, resume: bool) -> int:
    """Train or continue a run, whose missing model takes a second to write; return its epoch."""
    data = mnist.load_sample("train").subset(torch.arange(128))
    write = resume_module.save_weights

    def write_slowly(*arguments: Any) -> None:
        time.sleep(1)
        write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_module, "save_weights", write_slowly)
        recipe = tiny_recipe(epochs=1, learning_rate_drops=())
        return sc.train(recipe, data, folder, resume=resume, device="cpu", on_note=print).epoch


@pytest.mark.slow
def test_each_process_returns_a_finished_run_whose_model_was_missing(tmp_path: Path) -> None:
    """The first process writes the model from the state; the others must not look for it before."""
    train_and_load(tmp_path, resume=False)
    (tmp_path / MODEL).unlink()
    assert run_together(train_and_load, tmp_path, True) == [1, 1]


@pytest.mark.parametrize(("noise", "mean_length"), [("laplace", 0.5 / 2**0.5), ("uniform", 0.5 * 3**0.5 / 2)])
def test_a_run_trains_on_its_noise_and_records_it(tmp_path: Path, noise: str, mean_length: float) -> None:
    """Black images: the inputs of the network are the noise, whose mean absolute value tells the families apart."""
    inputs: list[Tensor] = []
    model = TinyNet(10)
    model.register_forward_pre_hook(lambda module, given: inputs.append(given[0].detach()))
    black = ImageData(torch.zeros(64, 1, 28, 28, dtype=torch.uint8), torch.arange(64) % 10, 10, "black", "train")
    train(tiny_recipe(epochs=1, noise=noise), black, tmp_path, model=model, device="cpu")
    assert float(inputs[-1].std()) == pytest.approx(0.5, rel=0.02)
    assert float(inputs[-1].abs().mean()) == pytest.approx(mean_length, rel=0.02)
    assert load_run(tmp_path, model=TinyNet(10)).recipe.noise == noise


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where the processor does without bf16
@pytest.mark.parametrize(("amx", "precision"), [(True, "bf16"), (False, "fp32")])
def test_auto_precision_is_bf16_only_where_it_is_fast(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch, amx: bool, precision: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    train(tiny_recipe(precision="auto", epochs=1), tiny_data.subset(torch.arange(64)), tmp_path, device="cpu")
    run = load_run(tmp_path)
    assert run.provenance["precision"] == precision
    assert all(weight.dtype == torch.float32 for weight in run.model.parameters())


def test_each_epoch_has_its_own_augmentation(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int | None] = []
    batches = ImageData.batches

    def recorded(self: ImageData, order: Tensor, share: slice, seed: int | None) -> object:
        seeds.append(seed)
        return batches(self, order, share, seed)

    monkeypatch.setattr(ImageData, "batches", recorded)
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        train(tiny_recipe(seed=seed), tiny_data.subset(torch.arange(64)), tmp_path / name, device="cpu")
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4
    assert seeds[:2] == [derived_seed(1, 2, epoch) for epoch in (0, 1)], "not those of the order and the noise"


def test_a_callback_that_evaluates_the_network_does_not_change_training(tmp_path: Path, tiny_data: ImageData) -> None:
    """Users call `model.eval()` after an epoch: the next one trains in training mode all the same."""
    modes: list[bool] = []
    model = TinyNet(10)
    model.register_forward_pre_hook(lambda module, inputs: modes.append(module.training))
    data = tiny_data.subset(torch.arange(64))
    train(tiny_recipe(), data, tmp_path, model=model, device="cpu", on_epoch=lambda run, line: run.model.eval())
    assert modes[-2:] == [True, True], "one step in each of two epochs"


def test_learning_rate_drops() -> None:
    recipe = tiny_recipe(learning_rate=0.1, learning_rate_drops=(3, 5), epochs=9)
    assert [round(learning_rate(recipe, e, 0), 9) for e in range(7)] == [0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]


def test_cosine_schedule_follows_its_formula(tmp_path: Path, tiny_data: ImageData) -> None:
    recipe = tiny_recipe(schedule="cosine", learning_rate=0.1, learning_rate_warm_up=1, epochs=5)
    expected = [0.05, 0.1, 0.1 * (1 + 2**-0.5) / 2, 0.05, 0.1 * (1 - 2**-0.5) / 2]
    assert [learning_rate(recipe, epoch, 1) for epoch in range(5)] == pytest.approx(expected)
    train(recipe, tiny_data.subset(torch.arange(64)), tmp_path / "run", device="cpu")
    assert [line["learning_rate"] for line in metrics(tmp_path / "run")] == pytest.approx(expected)


def test_learning_rate_warm_up(tmp_path: Path, tiny_data: ImageData) -> None:
    recipe = tiny_recipe(learning_rate=0.1, learning_rate_drops=(3,), learning_rate_warm_up=2, epochs=4)
    assert [round(learning_rate(recipe, e, 2), 9) for e in range(4)] == [0.01, 0.01, 0.1, 0.01]
    train(recipe, tiny_data, tmp_path / "run", device="cpu")
    assert [round(line["learning_rate"], 9) for line in metrics(tmp_path / "run")] == [0.01, 0.01, 0.1, 0.01]


def test_a_long_warm_up_of_the_learning_rate_is_saved(tmp_path: Path, tiny_data: ImageData) -> None:
    recipe = tiny_recipe(schedule="cosine", learning_rate_warm_up=101, epochs=1000)
    with pytest.raises(Killed):
        train(recipe, tiny_data, tmp_path / "run", device="cpu", on_epoch=killed_after_the_first_epoch)
    state = load_state(tmp_path / "run")
    assert state is not None
    assert state.warm_up == 101


def test_step_draws_other_noise_for_each_copy_from_its_generator() -> None:
    """Noise of all images of the step, of which a process takes its share, then one uniform number per image."""
    weight, seen = nn.Parameter(torch.ones(4, 3)), []

    def loss(images: Tensor, labels: Tensor, noise: Tensor, progress: Progress) -> LossTerms:
        seen.append((noise, progress.uniform))
        logits = (images + noise).flatten(2) @ weight
        return LossTerms(logits.mean(), {"a": logits.sum()}, logits)

    run: Any = SimpleNamespace(
        recipe=tiny_recipe(batch_size=15, objective=Gaussian(num_noise=3)),
        module=loss,
        optimizer=torch.optim.SGD([weight], 0.1),
        progress=Progress(0.5, torch.zeros(()), torch.zeros(()), torch.zeros(1)),
        meter=Meter(torch.device("cpu"), 2),
        noise=Noise(0.5),
        autocast=nullcontext,
        share=slice(2, 4),
        generator=torch.Generator().manual_seed(7),
    )
    generator = torch.Generator().manual_seed(7)
    for i in range(2):
        training_step(run, torch.rand(2, 1, 2, 2), torch.tensor([0, 1]))
        torch.testing.assert_close(seen[i][0], 0.5 * torch.randn(3, 5, 1, 2, 2, generator=generator)[:, 2:4])
        assert torch.equal(seen[i][1], torch.rand(5, generator=generator)[2:4])
    assert weight.grad is None


def test_meter_averages_the_steps_since_its_restart() -> None:
    meter, labels = Meter(torch.device("cpu"), 3), torch.tensor([0, 1])
    for losses in ((5.0, 1.0), (2.0,)):
        meter.restart()
        for value in losses:
            logits = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
            meter.add(LossTerms(torch.tensor(value), {"a": torch.tensor(2 * value)}, logits), labels)
        mean = sum(losses) / len(losses)
        assert meter.running_means() == (mean, 0.75)
        assert meter.means(Team()) == {"loss": mean, "noisy_accuracy": 0.75, "a": 2 * mean}


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e31])
def test_a_term_that_is_not_finite_leaves_metrics_that_can_be_read(value: float) -> None:
    meter = Meter(torch.device("cpu"), 1)
    meter.add(LossTerms(torch.tensor(1.0), {"a": torch.tensor(value), "b": torch.tensor(2.0)}, None), torch.zeros(1))
    assert meter.means(Team()) == {"loss": 1.0, "b": 2.0}


def test_factors_of_the_loss_follow_the_epoch() -> None:
    """Warm-up over ten epochs, the switch of the first drop, and the epoch itself, written into the same tensors."""
    progress = Progress(0.5, torch.zeros(()), torch.zeros(()), torch.zeros(1), torch.zeros(()))
    for drops, switched in (((3, 5), [0.0, 0.0, 1.0, 1.0, 1.0]), ((), [0.0] * 5)):
        recipe, filled = tiny_recipe(learning_rate_drops=drops, epochs=20), []
        for epoch in (0, 2, 3, 9, 15):
            fill_progress(progress, recipe, epoch)
            filled.append((float(progress.warmup), float(progress.after_first_drop), float(progress.epoch)))
        assert [warm for warm, _, _ in filled] == pytest.approx([0.1, 0.3, 0.4, 1.0, 1.0])
        assert [switch for _, switch, _ in filled] == switched
        assert [epoch for _, _, epoch in filled] == [0, 2, 3, 9, 15]


def test_progress_is_reported(tmp_path: Path, tiny_data: ImageData) -> None:
    seen: list[TrainingStatus] = []
    train(tiny_recipe(epochs=1), tiny_data, tmp_path / "run", device="cpu", on_progress=seen.append)
    last = seen[-1]
    assert (last.epoch, last.epochs, last.step, last.steps, last.seconds_left) == (0, 1, 4, 4, 0.0)
    assert last.loss == pytest.approx(metrics(tmp_path / "run")[0]["loss"], rel=1e-5)
    assert 0 <= last.noisy_accuracy <= 1
    assert last.images_per_second > 0


def test_speed_and_time_follow_the_clock(tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of four steps on 64 images each; every step takes two seconds, and nothing else takes any."""
    clock = [0.0]

    def step(run: Any, images: Tensor, labels: Tensor) -> None:
        training_step(run, images, labels)
        clock[0] += 2

    monkeypatch.setattr("smoothcert.training.step.training_step", step)
    for module in ("run_in_progress", "loop"):
        monkeypatch.setattr(f"smoothcert.training.{module}.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    seen: list[TrainingStatus] = []
    train(tiny_recipe(), tiny_data, tmp_path / "run", device="cpu", on_progress=seen.append)
    assert [(status.epoch, status.step) for status in seen] == [(e, s) for e in (0, 1) for s in (1, 2, 3, 4)]
    assert [status.images_per_second for status in seen] == [32.0] * 8
    assert [status.seconds_left for status in seen] == pytest.approx([14, 12, 10, 8, 6, 4, 2, 0])
    assert [line["seconds"] for line in metrics(tmp_path / "run")] == [8.0, 8.0]


def test_the_time_left_foresees_an_attack_that_starts_late(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smoothcert.training.run_in_progress.time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr("smoothcert.training.loop.time", SimpleNamespace(perf_counter=lambda: 8.0))
    late = Gaussian(noise_attack=NoiseAttack(steps=9, first_epoch=3))
    seen: list[TrainingStatus] = []
    train(tiny_recipe(objective=late, epochs=4), tiny_data, tmp_path / "run", device="cpu", on_progress=seen.append)
    # The epochs take 1, 1, 1 and 10 inputs of the network for each image, and 8 seconds have always passed.
    expected = [8 * 12 / 1, 8 * 11 / 2, 8 * 10 / 3, 0]
    assert [status.seconds_left for status in seen] == pytest.approx(expected)


def test_diverging_loss_stops_the_run_before_it_is_saved(tmp_path: Path, tiny_data: ImageData) -> None:
    recipe = tiny_recipe(epochs=2, learning_rate=1e8, learning_rate_drops=())
    with pytest.raises(WorkError, match=r"diverged in epoch 0, step [123] \(loss .*cross_entropy") as caught:
        train(recipe, tiny_data, tmp_path / "run", device="cpu")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / MODEL).exists()


@pytest.mark.parametrize("number", [math.nan, math.inf, -1e9])
def test_a_loss_or_weight_that_is_no_number_or_too_large_stops_the_run(tmp_path: Path, number: float) -> None:
    meter = SimpleNamespace(names=["loss"], steps=lambda: torch.tensor([[1.0], [number], [1.0]]))
    run: Any = SimpleNamespace(folder=tmp_path, epoch=3, meter=meter, model=nn.Linear(3, 2))
    with pytest.raises(WorkError, match="the loss diverged in epoch 3, step 1"):
        stop_if_loss_diverged(run)
    stop_if_weights_diverged(run)
    with torch.no_grad():
        run.model.weight[1, 2] = number
    with pytest.raises(WorkError, match="the weights diverged in epoch 2"):
        stop_if_weights_diverged(run)


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    data = mnist.load_sample("train").subset(torch.arange(10))
    with pytest.raises(RequestError, match="expected at most the 10 training images, got 64"):
        train(tiny_recipe(), data, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


class Huge(nn.Module):
    """Asks for a petabyte in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyNet(10)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            torch.empty(2**50, dtype=torch.uint8)
        return self.inner(images)


def test_running_out_of_memory_is_one_line(tmp_path: Path, tiny_data: ImageData) -> None:
    with pytest.raises(WorkError, match=r"choose a smaller batch_size or objective\.num_noise"):
        train(tiny_recipe(model="huge"), tiny_data, tmp_path / "run", model=Huge(), device="cpu")


def test_diverged_weights_are_not_saved(tmp_path: Path, tiny_data: ImageData) -> None:
    """One step with an absurd rate: its own loss is still sound, the weights after it are not."""
    data = tiny_data.subset(torch.arange(64))
    with pytest.raises(WorkError, match="the weights diverged in epoch 0"):
        train(tiny_recipe(learning_rate=1e15), data, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run" / MODEL).exists()


def test_a_parameter_without_numbers_is_saved(tmp_path: Path, tiny_data: ImageData) -> None:
    network = TinyNet(10)
    network.register_parameter("empty", nn.Parameter(torch.empty(0)))
    train(tiny_recipe(epochs=1, learning_rate_drops=()), tiny_data, tmp_path / "run", model=network, device="cpu")
    assert (tmp_path / "run" / MODEL).exists()


class Ten(nn.Module):
    """The same logits for every image, and nothing to learn."""

    def forward(self, images: Tensor) -> Tensor:
        return images.new_zeros(len(images), 10)


def test_settings_without_effect_are_reported(tmp_path: Path, tiny_data: ImageData) -> None:
    data, notes = tiny_data.subset(torch.arange(64)), list[str]()
    for name, changes, options in (
        ("asked", {"teacher_votes": 5}, {"capture": True, "compiling": "always"}),
        ("other", {}, {"capture": False, "compiling": "never"}),
        ("deferred", {"objective": Macer(num_noise=1, deferred=True), "learning_rate_drops": ()}, {}),
        ("dropped", {"objective": Macer(num_noise=1, deferred=True), "epochs": 2}, {}),
        ("at once", {"objective": Macer(num_noise=1), "learning_rate_drops": ()}, {}),
    ):
        recipe = tiny_recipe(**{"epochs": 1, **changes})
        train(recipe, data, tmp_path / name, device="cpu", on_note=notes.append, **options)
    assert [note.partition(";")[0] for note in notes] == [
        "capture: no effect here",
        "compile: no effect here",
        "teacher_votes: no effect",
        "objective.weight: no effect",
    ]


def test_refused_requests_write_nothing(tmp_path: Path, tiny_data: ImageData) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in ("file", "file/run"):
        with pytest.raises(RequestError, match="expected a folder or none, got the file"):
            train(tiny_recipe(), tiny_data, tmp_path / folder, device="cpu")
    with pytest.raises(RequestError, match="batch_size"):
        train(tiny_recipe(batch_size=10**6), tiny_data, tmp_path / "run", device="cpu")
    with pytest.raises(RequestError, match="has no parameters to train"):
        train(tiny_recipe(), tiny_data, tmp_path / "run", device="cpu", model=Ten())
    with pytest.raises(RequestError, match="TinyNet has no parameters to train, or all are frozen"):
        sc.train(tiny_recipe(), tiny_data, tmp_path / "run", device="cpu", model=TinyNet(10).requires_grad_(False))
    with pytest.raises(RequestError, match="model: expected a torch module to train, got method"):
        sc.train(tiny_recipe(), tiny_data, tmp_path / "run", device="cpu", model=TinyNet(10).forward)
    with pytest.raises(RequestError, match="lenett"):
        train(tiny_recipe(model="lenett"), tiny_data, tmp_path / "run", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_an_attack_on_the_noise_starts_in_its_epoch_also_after_a_resume(tmp_path: Path, tiny_data: ImageData) -> None:
    def attacked_from(epoch: int) -> dict[str, object]:
        return {"epochs": 3, "objective": Gaussian(noise_attack=NoiseAttack(steps=2, step_size=2.0, first_epoch=epoch))}

    def interrupt(status: TrainingStatus) -> None:
        if status.epoch == 2:
            raise KeyboardInterrupt

    train(tiny_recipe(epochs=3), tiny_data, tmp_path / "never", device="cpu")
    train(tiny_recipe(**attacked_from(2)), tiny_data, tmp_path / "late", device="cpu")
    train(tiny_recipe(**attacked_from(0)), tiny_data, tmp_path / "always", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(**attacked_from(2)), tiny_data, tmp_path / "cut", device="cpu", on_progress=interrupt)
    train(tiny_recipe(**attacked_from(2)), tiny_data, tmp_path / "cut", device="cpu", resume=True)
    never, late, always = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("never", "late", "always"))
    assert late[:2] == never[:2]
    assert late[2] > never[2] + 0.01, "attacked noises have a larger loss"
    assert always[0] != never[0]
    assert digest(tmp_path / "cut") == digest(tmp_path / "late")
