"""The only training loop: one function, `train`, readable from top to bottom.

Everything random in epoch e is drawn from a generator seeded with (seed, e), so a resumed run needs no generator
state: it goes on at an epoch boundary exactly as the uninterrupted run did. Several processes draw the same
order and noise and each computes its share of every step, so their number changes nothing but rounding.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from smoothcert.checkpoint import METRICS, RECIPE, InputSpec, load_state, new_model, save_model, save_state, versions
from smoothcert.data import Images
from smoothcert.errors import RequestError, WorkError
from smoothcert.files import write_text_atomically
from smoothcert.models import check_outputs
from smoothcert.noise import NOISES
from smoothcert.objectives import LossTerms, Objective, Progress
from smoothcert.processes import find_device
from smoothcert.recipe import TrainRecipe, load_train_recipe

REPORT_SECONDS = 0.5
DIVERGED = 1e4
"""A loss above this (or not finite) stops the run; sound losses of all methods stay below 100."""


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """Where training stands: means over the epoch so far."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    noisy_accuracy: float
    images_per_second: float
    seconds_left: float


class Step(nn.Module):
    """The loss of one step as a module: wrapped once for several processes, however often it calls the classifier."""

    def __init__(self, classifier: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.classifier = classifier
        self.objective = objective

    def forward(self, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress) -> LossTerms:
        return self.objective.loss(self.classifier, images, labels, noise, progress)


def train(
    recipe: TrainRecipe,
    data: Images,
    folder: Path,
    *,
    model: nn.Module | None = None,
    resume: bool = False,
    device: str = "auto",
    on_progress: Callable[[TrainingStatus], None] = lambda status: None,
) -> None:
    """Train `recipe` on `data` into the run folder `folder`; after each epoch the run can be resumed from there.

    A `model` of one's own is trained in place of the one that the recipe names; `load_run(folder, model=...)` loads it.
    """
    accelerator = start_accelerator(recipe, device)
    if model is not None:
        check_outputs(model, recipe.model, data.shape, data.num_classes)
    first_epoch, state = open_run(recipe, data, folder, accelerator, resume)
    data, spec = data.to(accelerator.device), InputSpec.of(data)
    noise = NOISES[recipe.noise](recipe.sigma)

    with torch.random.fork_rng():
        torch.manual_seed(derived_seed(recipe.seed, 0))
        model = (new_model(recipe, spec) if model is None else model).to(accelerator.device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=recipe.learning_rate,
        momentum=recipe.momentum,
        nesterov=recipe.momentum > 0,
        weight_decay=recipe.weight_decay,
    )
    if state is not None:
        restore(model, optimizer, state, folder)
    step_module, optimizer = accelerator.prepare(Step(model, recipe.objective), optimizer)

    per_step = recipe.images_per_step
    steps = len(data) // recipe.batch_size * (recipe.batch_size // per_step)
    share = slice_of_process(per_step, accelerator)
    started = time.perf_counter()

    for epoch in range(first_epoch, recipe.epochs):
        epoch_started = last_report = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, epoch)
        generator = torch.Generator(accelerator.device).manual_seed(derived_seed(recipe.seed, 1, epoch))
        order = torch.randperm(len(data), generator=generator, device=accelerator.device)
        progress = progress_at(recipe, epoch, accelerator.device)
        meter = Meter(accelerator.device)
        model.train()

        # The images that do not fill a last batch sit this epoch out: every step has the same shape.
        order = order[: steps * per_step].view(steps, per_step)
        batches = data.batches(order, share, derived_seed(recipe.seed, 2, epoch))
        for step, (images, labels) in enumerate(batches):
            noises = noise.sample((recipe.objective.num_noise, per_step, *data.shape), generator)[:, share]
            uniform = torch.rand(per_step, generator=generator, device=accelerator.device)[share]
            terms = step_module(images, labels, noises, progress._replace(uniform=uniform))
            accelerator.backward(terms.loss)
            optimizer.step()
            optimizer.zero_grad()
            meter.add(step, terms, labels)

            now = time.perf_counter()
            if now - last_report > REPORT_SECONDS or step + 1 == steps:
                last_report = now
                meter.stop_if_diverged(epoch, folder)
                if accelerator.is_main_process:
                    on_progress(status_of(meter, recipe, epoch, first_epoch, step, steps, started, now - epoch_started))

        metrics = meter.means(accelerator)
        seconds = time.perf_counter() - epoch_started
        if accelerator.is_main_process:
            line = {"epoch": epoch, "learning_rate": learning_rate(recipe, epoch), **metrics, "seconds": seconds}
            append_metrics(folder / METRICS, line)
            provenance = {"versions": versions(accelerator.device), "processes": accelerator.num_processes}
            # The model first: a kill in between costs this epoch, which is then trained again.
            save_model(folder, model, recipe, spec, epoch + 1, provenance)
            save_state(folder, {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
        accelerator.wait_for_everyone()


def start_accelerator(recipe: TrainRecipe, device: str) -> Accelerator:
    """Devices, precision and processes, by accelerate. An earlier run of this Python process may have had others."""
    cpu = find_device(device).type == "cpu"
    AcceleratorState._reset_state()
    return Accelerator(mixed_precision="bf16" if recipe.precision == "bf16" else "no", cpu=cpu)


def open_run(
    recipe: TrainRecipe, data: Images, folder: Path, accelerator: Accelerator, resume: bool
) -> tuple[int, dict[str, Any] | None]:
    """Check the request, make or reopen the folder; the first epoch to train and the state to start from."""
    if len(data) < recipe.batch_size:
        raise RequestError(f"batch_size: expected at most the {len(data)} training images, got {recipe.batch_size}")
    if recipe.images_per_step % accelerator.num_processes:
        raise RequestError(
            f"batch_size: a step of {recipe.images_per_step} images does not divide among "
            f"{accelerator.num_processes} processes; choose another batch_size"
        )
    exists = (folder / RECIPE).exists()
    if exists and not resume:
        raise RequestError(f"{folder}: holds a run already; continue it with --resume or choose another --out")
    if exists:
        refuse_other_recipe(load_train_recipe(folder / RECIPE), recipe, folder)
    state = load_state(folder)
    first_epoch = 0 if state is None else int(state["epoch"])
    # All processes have looked before the main one writes.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if not exists:
            recipe.save(folder / RECIPE)
        keep_metrics_before(folder / METRICS, first_epoch)
    accelerator.wait_for_everyone()
    return first_epoch, state


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], folder: Path) -> None:
    """Load the state of a run; a network that has changed since is refused."""
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RequestError(f"{folder}: its weights do not fit the network ({reason}); choose another --out") from error


def refuse_other_recipe(stored: TrainRecipe, wanted: TrainRecipe, folder: Path) -> None:
    before, now = stored.to_mapping(), wanted.to_mapping()
    differing = [f"{key}: the run has {before[key]}, the request {now[key]}" for key in now if before[key] != now[key]]
    if differing:
        raise RequestError(f"{folder}: holds a run of another recipe ({'; '.join(differing)}); choose another --out")


def derived_seed(seed: int, *parts: int) -> int:
    """An independent seed for each purpose of a run."""
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def learning_rate(recipe: TrainRecipe, epoch: int) -> float:
    """Step decay: divided by 10 at each drop."""
    return float(recipe.learning_rate * 0.1 ** sum(epoch >= drop for drop in recipe.learning_rate_drops))


def progress_at(recipe: TrainRecipe, epoch: int, device: torch.device) -> Progress:
    """The epoch-dependent factors of the objectives, as tensors on the device; each step puts its own draws in."""
    dropped = bool(recipe.learning_rate_drops) and epoch >= recipe.learning_rate_drops[0]
    warmup = torch.full((), min(1.0, (epoch + 1) / 10), device=device)
    after_first_drop = torch.full((), float(dropped), device=device)
    return Progress(recipe.sigma, warmup, after_first_drop, torch.empty(0, device=device))


def slice_of_process(images: int, accelerator: Accelerator) -> slice:
    """The share of a step that this process computes."""
    size = images // accelerator.num_processes
    return slice(size * accelerator.process_index, size * (accelerator.process_index + 1))


class Meter:
    """Sums over an epoch, kept on the device: adding never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []
        self.sums = torch.zeros(0, device=device)
        self.steps = 0
        self.bad_step = torch.full((), -1, device=device)
        self.bad_values = torch.zeros(0, device=device)

    def add(self, step: int, terms: LossTerms, labels: Tensor) -> None:
        accuracy = (terms.noisy_logits.argmax(-1) == labels).float().mean()
        values = torch.stack([v.detach().float() for v in (terms.loss, accuracy, *terms.terms.values())])
        if not self.names:
            self.names = ["loss", "noisy_accuracy", *terms.terms]
            self.sums = torch.zeros_like(values)
            self.bad_values = torch.zeros_like(values)
        # Remember the first bad step without asking the device about it now.
        first = ~(values[0].abs() < DIVERGED) & (self.bad_step < 0)
        self.bad_step = torch.where(first, step, self.bad_step)
        self.bad_values = torch.where(first, values, self.bad_values)
        self.sums += values
        self.steps += 1

    def stop_if_diverged(self, epoch: int, folder: Path) -> None:
        step = int(self.bad_step)
        if step < 0:
            return
        terms = ", ".join(f"{n} {v:.4g}" for n, v in zip(self.names, self.bad_values.tolist(), strict=True))
        raise WorkError(
            f"{folder}: the loss diverged in epoch {epoch}, step {step} ({terms}); the checkpoint of the last good "
            "epoch is kept; lower learning_rate or the weight of the largest term"
        )

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """Means over the epoch, and over all processes."""
        values = accelerator.reduce(self.sums / self.steps, reduction="mean").tolist()
        return dict(zip(self.names, values, strict=True))


def status_of(
    meter: Meter,
    recipe: TrainRecipe,
    epoch: int,
    first_epoch: int,
    step: int,
    steps: int,
    started: float,
    epoch_seconds: float,
) -> TrainingStatus:
    loss, accuracy = (meter.sums[:2] / meter.steps).tolist()
    done = (epoch - first_epoch) * steps + step + 1
    left = (recipe.epochs - epoch) * steps - step - 1
    return TrainingStatus(
        epoch=epoch,
        epochs=recipe.epochs,
        step=step + 1,
        steps=steps,
        loss=loss,
        noisy_accuracy=accuracy,
        images_per_second=(step + 1) * recipe.images_per_step / max(epoch_seconds, 1e-9),
        seconds_left=(time.perf_counter() - started) / done * left,
    )


def append_metrics(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def keep_metrics_before(path: Path, epoch: int) -> None:
    """Drop lines of epochs that will be trained again: a kill may fall between the metrics and the checkpoint."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["epoch"] < epoch:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line torn by a kill
    write_text_atomically(path, "".join(kept))
