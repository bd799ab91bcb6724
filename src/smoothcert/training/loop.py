"""The training loop: `training_steps`, and the three parts of an epoch below it, in the order in which they run.

Everything random in epoch e comes from a generator seeded with (seed, e). A resumed run therefore needs no generator
state: from an epoch boundary it continues exactly as the uninterrupted run. Several processes draw the same order and
noise, and each computes its share of every step, so their number changes only rounding. Two kinds of networks are
exceptions: those that draw random numbers themselves (dropout) and, in several processes, those with batch norm, which
sees one share only.
"""

import math
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smoothcert.data import Images
from smoothcert.distributed import TRAINING_SECONDS, Team, enough_memory, find_device, team
from smoothcert.errors import WorkError
from smoothcert.objectives import Progress
from smoothcert.objectives.base import warm_up
from smoothcert.training.checkpoint import save_weights
from smoothcert.training.dead_start import LEARNT_BY, no_better_than_majority, nothing_learnt, restart_if_dead
from smoothcert.training.device import default_float32, training_device
from smoothcert.training.divergence import stop_if_loss_diverged, stop_if_weights_diverged
from smoothcert.training.evaluate import noisy_accuracy, recompute_statistics
from smoothcert.training.metrics import ACCURACY, METRICS, append_metrics
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.resume import save_state
from smoothcert.training.run_in_progress import Options, RunInProgress
from smoothcert.training.seeds import Purpose, derived_seed
from smoothcert.training.setup import set_up
from smoothcert.training.status import REPORT_SECONDS, TrainingStatus
from smoothcert.training.step import take_step
from smoothcert.training.teacher_votes import teacher_shares

SAVE_SHARE = 0.03
"""Largest share of the time that saving takes: writing a ResNet-110 takes 0.15 s, and an epoch 1.5 s on an H200."""
SAVE_SECONDS = 60.0
"""Longest pause between two saves of a run that is trained alone; it lasts until the current epoch ends."""
TOO_LITTLE_MEMORY = (
    "expected the memory for a training step, got too little of it; choose a smaller batch_size or objective.num_noise"
)


def train(recipe: TrainRecipe, data: Images, folder: Path, **options: Any) -> None:
    """Train `recipe` on `data` into the run folder `folder`; `options` are the fields of `Options`.

    The run is saved after an epoch, as often as 3% of the time allow, but after no more than a minute and the rest of
    an epoch, and can be resumed from there. On one GPU a step is captured as a CUDA graph, and compiled if that saves
    time (see `training/captured_step.py`).
    """
    chosen = Options(**options)
    device = find_device(chosen.device)
    with (
        enough_memory(WorkError(TOO_LITTLE_MEMORY)),
        training_device(device),
        default_float32(),
        torch.inference_mode(False),  # with gradients, in whatever mode the caller is
        team(device, TRAINING_SECONDS) as group,
        closing(training_steps(recipe, data, folder, group, chosen)) as steps,
    ):
        for _ in steps:
            pass


def training_steps(
    recipe: TrainRecipe, data: Images, folder: Path, group: Team, options: Options
) -> Generator[None, None, None]:
    """Train step by step; between two steps, other runs may take their turns (see `training/several_runs.py`)."""
    with set_up(recipe, data, folder, group, options) as run:
        if recipe.teacher is not None and run.epoch < recipe.epochs:
            run.set_targets(*teacher_shares(run, recipe.teacher, train))
        while run.epoch < recipe.epochs:
            for images, labels in start_epoch(run):
                take_step(run, images, labels)
                yield
                report_progress(run)
            finish_epoch(run)


def start_epoch(run: RunInProgress) -> Iterator[tuple[Tensor, Tensor]]:
    """Set what depends on the epoch, and return the batches of the images that the sampler draws."""
    recipe, epoch = run.recipe, run.epoch
    run.steps_done = 0
    run.epoch_started = time.perf_counter()
    run.last_report = run.epoch_started
    run.active_runs = run.options.running()
    run.learning_rate = learning_rate(recipe, epoch, run.warm_up)
    run.meter.restart()
    run.model.train()
    for group in run.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # which a captured step reads
            group["lr"].fill_(run.learning_rate)
        else:
            group["lr"] = run.learning_rate
    run.set_objective(recipe.objective.in_epoch(epoch))
    fill_progress(run.progress, recipe, epoch)

    generator = run.generator.manual_seed(derived_seed(recipe.seed, Purpose.ORDER_AND_NOISE, epoch))
    order = run.sampler.order(run, generator)
    # The last, smaller batch is left out (0.2% of MNIST and CIFAR-10, different images in each epoch): all steps then
    # have the same shape, as a captured step needs, and all images the same weight.
    order = order[: run.steps * recipe.images_per_step].view(run.steps, recipe.images_per_step)
    batches = run.data.batches(order, run.share, derived_seed(recipe.seed, Purpose.AUGMENTATION, epoch))
    return batches if run.targets is None else with_targets(run, batches, order[:, run.share])


def with_targets(
    run: RunInProgress, batches: Iterator[tuple[Tensor, Tensor]], indices: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches; before each one, set `progress.targets` to those of its images `indices` [steps, images]."""
    assert run.targets is not None
    assert run.progress.targets is not None
    for batch, rows in zip(batches, indices, strict=True):
        torch.index_select(run.targets, 0, rows, out=run.progress.targets)
        yield batch


def fill_progress(progress: Progress, recipe: TrainRecipe, epoch: int) -> None:
    """Set the factors of the losses that depend on the epoch, in tensors that a captured step reads."""
    progress.warmup.fill_(warm_up(epoch))
    if progress.epoch is not None:
        progress.epoch.fill_(epoch)
    progress.after_first_drop.fill_(float(epoch >= min(recipe.learning_rate_drops, default=math.inf)))


def report_progress(run: RunInProgress) -> None:
    """Every half second, and after the last step, check the losses and report the progress."""
    run.active_runs = max(run.active_runs, run.options.running())
    now = time.perf_counter()
    if now - run.last_report <= REPORT_SECONDS and run.steps_done < run.steps:
        return
    stop_if_loss_diverged(run)
    run.last_report = time.perf_counter()
    if run.group.leads:
        run.options.on_progress(status_of(run))


def finish_epoch(run: RunInProgress) -> None:
    """Write the metrics of the epoch; save the run, or start it again if its start was dead."""
    metrics = run.meter.means(run.group)
    seconds = time.perf_counter() - run.epoch_started
    line: dict[str, Any] = {"epoch": run.epoch, "learning_rate": run.learning_rate, **metrics, "seconds": seconds}
    # The seconds depend on these: a run may continue on another machine, or next to other runs.
    line |= {"device": run.versions["device"], "runs_at_once": run.active_runs}
    if run.device.type == "cuda":  # the most memory that this process has allocated since training began
        line["peak_memory_bytes"] = torch.cuda.max_memory_allocated(run.device)
    line |= run.sampler.metrics()
    if run.group.leads:
        recompute_statistics(run)
        if run.test_data is not None and (run.epoch + 1) % run.options.evaluate_every == 0:
            line["test_noisy_accuracy"] = noisy_accuracy(run, run.test_data)
        append_metrics(run.folder / METRICS, line)
        accuracy = metrics.get(ACCURACY)
        if run.epoch + 1 == LEARNT_BY and accuracy is not None and no_better_than_majority(accuracy, run.data.labels):
            run.options.on_note(f"{run.folder}: {nothing_learnt(run.warm_up, accuracy)}")
    if restart_if_dead(run, metrics):
        return
    run.epoch += 1
    if run.group.leads:
        if run.epoch == run.recipe.epochs or time.perf_counter() >= run.next_save:
            save(run)
        run.options.on_epoch(run.as_run(), line)
    run.group.wait()


def save(run: RunInProgress) -> None:
    """Write state and model. The state is first: if the process is killed in between, the model is made from it."""
    started = time.perf_counter()
    stop_if_weights_diverged(run)
    save_state(run.folder, run.state())
    save_weights(run.as_run(), run.weights())
    ended = time.perf_counter()
    pause = min((ended - started) / SAVE_SHARE, SAVE_SECONDS)
    run.next_save = ended + pause * run.options.runs_at_once  # all runs wait while one is saved


def learning_rate(recipe: TrainRecipe, epoch: int, warm_up: int) -> float:
    """The rate of an epoch, with `warm_up` first epochs at a lower rate."""
    if recipe.schedule == "cosine":
        if epoch < warm_up:
            return recipe.learning_rate * (epoch + 1) / (warm_up + 1)
        return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * (epoch - warm_up) / (recipe.epochs - warm_up)))
    tenths = sum(epoch >= drop for drop in recipe.learning_rate_drops) + (epoch < warm_up)
    return float(recipe.learning_rate * 0.1**tenths)


def status_of(run: RunInProgress) -> TrainingStatus:
    """The progress after `run.steps_done` steps of the epoch."""
    loss, accuracy = run.meter.running_means()
    this_epoch = run.inputs[run.epoch] * run.steps_done
    done = sum(run.inputs[run.first_epoch : run.epoch]) * run.steps + this_epoch
    left = sum(run.inputs[run.epoch :]) * run.steps - this_epoch
    epoch_seconds = max(run.last_report - run.epoch_started, 1e-9)
    return TrainingStatus(
        epoch=run.epoch,
        epochs=run.recipe.epochs,
        step=run.steps_done,
        steps=run.steps,
        loss=loss,
        noisy_accuracy=accuracy,
        images_per_second=run.steps_done * run.recipe.images_per_step / epoch_seconds,
        seconds_left=(time.perf_counter() - run.started) / done * left,
    )
