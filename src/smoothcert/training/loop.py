"""The only training loop: one function, `train`, readable from top to bottom.

All that the loop draws in epoch e comes from a generator seeded with (seed, e), so a resumed run needs no generator
state: it goes on at an epoch boundary exactly as the uninterrupted run did. Several processes draw the same order and
noise and each computes its share of every step, so their number changes nothing but rounding. Two kinds of networks are
outside these promises: those that draw for themselves (dropout), and, in several processes, those with batch norm,
whose statistics are of a share.
"""

import math
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from smoothcert.data import Images
from smoothcert.distributed import Team, find_device, team
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.results import alone
from smoothcert.models import check_outputs, is_code
from smoothcert.models.kernels import kernels_work
from smoothcert.models.precision import resolve_precision
from smoothcert.noise import NOISES
from smoothcert.objectives import Progress, is_built_in
from smoothcert.training.checkpoint import RECIPE, InputSpec, State, new_model, save_model, save_state, versions
from smoothcert.training.metrics import METRICS, Meter, append_metrics, keep_metrics_before
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.setup import (
    Pace,
    check_request,
    enough_memory,
    make_optimizer,
    open_run,
    own_stream,
    restore,
    set_learning_rate,
    start_again,
    training_device,
    weights_layout,
    write_missing_model,
)
from smoothcert.training.step import (
    CapturedStep,
    Compiling,
    Sampling,
    Step,
    TrainingStep,
    compile_pays,
    keep_compiled_kernels,
)

REPORT_SECONDS = 0.5
LOOK_AGAIN_SECONDS = 1e-4
"""Shorter than a step: how long the host rests when all streams have enough to do."""
WEIGHTS_DIVERGED = 1e8
LEARNT_BY = 5
"""Epochs after which a run that is still at chance is worth a note."""
DEAD_EPOCHS = (1, 2)
"""A start is dead if the output is constant in these epochs (the first is epoch 0, whose mean loss is still moving)."""
DEAD_TOLERANCE = 1e-3
"""Relative distance of the cross-entropy from that of the best constant output."""
RESTART_WARM_UP = 1
"""Epochs of learning-rate warm-up that a dead start is repeated with."""
SAVE_SECONDS = 1.0
"""Shorter epochs are not all saved: on a GPU, writing a small network takes a third of the time of its epoch."""


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


class Options(TypedDict, total=False):
    """How a run is trained, besides its recipe."""

    model: nn.Module | None
    """A network of one's own, in place of the one that the recipe names; `load_run(folder, model=...)` loads it."""
    resume: bool
    device: str
    """auto, cpu or cuda."""
    capture: bool | None
    """Whether steps are captured as CUDA graphs, on one GPU. By default not with a user's own network or objective:
    what their code decides in Python, it would decide once."""
    compiling: Compiling
    on_progress: Callable[[TrainingStatus], None]
    on_note: Callable[[str], None]
    """Hears of what a user may want to know."""


def train(recipe: TrainRecipe, data: Images, folder: Path, **options: Unpack[Options]) -> None:
    """Train `recipe` on `data` into the run folder `folder`.

    It is saved after each epoch, though at most once a second, and can be resumed from there. On one GPU a step is
    captured as a CUDA graph, and compiled if that pays (see `training/step.py`).
    """
    where = find_device(options.get("device", "auto"))
    with enough_memory(), training_device(where), team(where) as group:
        for _ in training_steps(recipe, data, folder, group, **options):
            pass


def train_together(
    runs: Sequence[tuple[TrainRecipe, Images, Path]],
    jobs: int,
    *,
    device: str = "auto",
    compiling: Compiling = "auto",
    on_progress: Callable[[Path, TrainingStatus], None] = lambda folder, status: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> dict[Path, Exception]:
    """Train or continue `runs` (recipe, data, folder), `jobs` at a time in this process; the failures, by folder.

    The runs take turns, a step each, but for those whose last steps are still on the way: quick ones need not wait for
    slow ones. On a GPU each has a stream and a generator of its own, so that captured steps of small networks overlap.
    A run gives what it gives alone, but for its peak memory, which is that of all, and of n runs each is saved at most
    once in n seconds.
    """
    if jobs < 1:
        raise RequestError(f"jobs: expected at least 1, got {jobs}")
    where, at_once = find_device(device), min(jobs, len(runs))
    waiting, failures = list(runs), dict[Path, Exception]()
    active: list[tuple[Path, Generator[None, None, None], AbstractContextManager[object], Pace]] = []
    # The stack closes the runs, also after an exception, which must not leave their folders locked.
    with training_device(where), team(where) as group, ExitStack() as opened:
        while waiting or active:
            while waiting and len(active) < at_once:
                recipe, data, folder = waiting.pop(0)
                steps = training_steps(
                    recipe,
                    data,
                    folder,
                    group,
                    resume=(folder / RECIPE).exists(),
                    device=device,
                    compiling=compiling,
                    on_progress=partial(on_progress, folder),
                    on_note=on_note,
                    runs_at_once=at_once,
                    running=lambda: len(active),
                )
                opened.enter_context(closing(steps))
                active.append((folder, steps, own_stream(where), Pace(where)))
            ready = [run for run in active if not run[3].far_ahead()]
            if not ready:
                time.sleep(LOOK_AGAIN_SECONDS)
            for run in ready:
                folder, steps, stream, pace = run
                try:
                    with stream:
                        next(steps)
                        pace.stepped()
                except StopIteration:
                    active.remove(run)
                except Exception as error:  # whatever stops a run does not stop the others
                    # Its traceback would keep the run's model and data in memory.
                    traceback.clear_frames(error.__traceback__)
                    failures[folder] = error.with_traceback(None)
                    active.remove(run)
    return failures


def training_steps(
    recipe: TrainRecipe,
    data: Images,
    folder: Path,
    group: Team,
    *,
    model: nn.Module | None = None,
    resume: bool = False,
    device: str = "auto",
    capture: bool | None = None,
    compiling: Compiling = "auto",
    on_progress: Callable[[TrainingStatus], None] = lambda status: None,
    on_note: Callable[[str], None] = lambda text: None,
    runs_at_once: int = 1,
    running: Callable[[], int] = lambda: 1,
) -> Generator[None, None, None]:
    """The loop: what `train` does, handing over after each step to the other runs of `runs_at_once`, of which so many
    are `running`."""
    own_network = model is not None or is_code(recipe.model)
    where = find_device(device)
    if model is not None:
        check_outputs(model, recipe.model, data.shape, data.num_classes)
    check_request(recipe, data, folder, group)
    spec = InputSpec.of(data)
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
        torch.manual_seed(derived_seed(recipe.seed, 0))
        model = new_model(recipe, spec) if model is None else model
    if next(model.parameters(), None) is None:
        raise RequestError(f"model: {recipe.model} has no parameters to train; give a network that has some")
    # Only now is there a folder, and this process alone in it.
    with alone(folder / METRICS, "choose another --out") if group.leads else nullcontext():
        start = open_run(recipe, data, folder, group, resume, on_note)
        data = data.to(where)
        precision = resolve_precision(recipe.precision, where)
        model = model.to(where, memory_format=weights_layout(own_network))  # type: ignore[call-overload]
        optimizer = make_optimizer(model, recipe, where)
        initial_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        restore(model, optimizer, start, folder)
        loss = Step(model, recipe.objective, device_type=where.type, bf16=precision == "bf16")
        step_module: nn.Module = loss
        if group.size > 1:  # a user's network may have parameters that a loss does not reach
            step_module = DistributedDataParallel(loss, find_unused_parameters=own_network)

        per_step = recipe.images_per_step
        steps = len(data) // recipe.batch_size * (recipe.batch_size // per_step)
        share = slice_of_process(per_step, group)
        generator, meter = torch.Generator(where), Meter(where, steps)
        noise = NOISES[recipe.noise](recipe.sigma)
        sampling = Sampling(noise, recipe.objective.num_noise, per_step, share, generator)
        progress = Progress(recipe.sigma, torch.zeros((), device=where), torch.zeros((), device=where), torch.empty(0))
        run_step = TrainingStep(step_module, optimizer, sampling, progress, meter)
        captured = None
        if capture is None:
            capture = not own_network and is_built_in(recipe.objective)
        if capture and where.type == "cuda" and group.size == 1:
            keep_compiled_kernels()
            steps_left = (recipe.epochs - start.epoch) * steps
            pays = compile_pays(model, compiling, by_kernels=precision == "bf16" and kernels_work(where.index or 0))
            captured = CapturedStep(run_step, loss, steps_left, pays, on_note)
        computed_with = versions(where)
        if group.leads:
            write_missing_model(folder, model, recipe, spec, start, {"versions": computed_with, "precision": precision})
        trained = model

        def state_after(epochs: int, provenance: Mapping[str, Any] | None, warm_up: int, dead_epochs: int) -> State:
            weights, momentum = trained.state_dict(), optimizer.state_dict()
            fields = recipe.to_mapping()
            return State(epochs, weights, momentum, fields, start.digest, provenance, warm_up, dead_epochs)

        # A run that started again after a dead start has another warm-up than its recipe.
        warm_up, dead_epochs, epoch = start.warm_up, start.dead_epochs, start.epoch
        save_seconds = SAVE_SECONDS * runs_at_once  # all wait while one is saved
        started, last_save, first_epoch = time.perf_counter(), -math.inf, epoch

        while epoch < recipe.epochs:
            rate = learning_rate(recipe, epoch, warm_up)
            epoch_started = last_report = time.perf_counter()
            shared_by = running()
            set_learning_rate(optimizer, rate)
            fill_progress(progress, recipe, epoch)
            meter.restart()
            model.train()
            generator = run_step.sampling.generator.manual_seed(derived_seed(recipe.seed, 1, epoch))
            order = torch.randperm(len(data), generator=generator, device=where)

            # The last, smaller batch is left out (0.2% of MNIST and CIFAR-10, other images in each epoch): every step
            # has the same shape, as a captured step needs, and every image the same weight.
            order = order[: steps * per_step].view(steps, per_step)
            batches = data.batches(order, share, derived_seed(recipe.seed, 2, epoch))
            for step, (images, labels) in enumerate(batches):
                (run_step if captured is None else captured)(images, labels)
                yield
                shared_by = max(shared_by, running())

                if time.perf_counter() - last_report > REPORT_SECONDS or step + 1 == steps:
                    meter.stop_if_diverged(epoch, folder)
                    last_report = now = time.perf_counter()
                    if group.leads:
                        on_progress(
                            status_of(meter, recipe, epoch, first_epoch, step, steps, started, now - epoch_started)
                        )

            metrics = meter.means(group)
            seconds = time.perf_counter() - epoch_started
            if group.leads:
                line = {"epoch": epoch, "learning_rate": rate, **metrics, "seconds": seconds}
                # What the seconds depend on: a run may go on elsewhere, or beside others.
                conditions = {"device": computed_with["device"], "runs_at_once": shared_by, **peak_memory(where)}
                append_metrics(folder / METRICS, line | conditions)
                if epoch + 1 == LEARNT_BY and at_chance(metrics["noisy_accuracy"], data.labels):
                    on_note(f"{folder}: {nothing_learnt(warm_up, metrics['noisy_accuracy'])}")
            dead_epochs += epoch in DEAD_EPOCHS and constant_output(metrics, data.labels)
            if dead_epochs == len(DEAD_EPOCHS) and warm_up == 0:
                start_again(model, optimizer, initial_weights)
                warm_up, dead_epochs, epoch, first_epoch = RESTART_WARM_UP, 0, 0, 0
                started, last_save = time.perf_counter(), -math.inf
                if group.leads:
                    # The state first: after a kill in between, the metrics of the dead epochs are cut off.
                    save_state(folder, state_after(0, None, warm_up, dead_epochs))
                    keep_metrics_before(folder / METRICS, 0)
                    on_note(f"{folder}: {DEAD_START}")
                group.wait()
                continue
            if group.leads and (epoch + 1 == recipe.epochs or time.perf_counter() - last_save > save_seconds):
                provenance = {
                    "versions": computed_with,
                    "processes": group.size,
                    "precision": precision,
                    "runs_at_once": runs_at_once,
                    "captured": captured is not None and captured.graph is not None,
                    "compiled": captured is not None and bool(captured.compiled),
                    "learning_rate_warm_up": warm_up,
                }
                stop_if_weights_diverged(model, epoch, folder)
                # The state first: after a kill in between the model is written again from it.
                save_state(folder, state_after(epoch + 1, provenance, warm_up, dead_epochs))
                save_model(folder, model, recipe, spec, epoch + 1, provenance)
                last_save = time.perf_counter()
            group.wait()
            epoch += 1


def derived_seed(seed: int, *parts: int) -> int:
    """An independent seed for each purpose of a run."""
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def learning_rate(recipe: TrainRecipe, epoch: int, warm_up: int) -> float:
    """Step decay: divided by 10 in the `warm_up` first epochs and at each drop."""
    tenths = sum(epoch >= drop for drop in recipe.learning_rate_drops) + (epoch < warm_up)
    return float(recipe.learning_rate * 0.1**tenths)


def constant_output(metrics: Mapping[str, float], labels: Tensor) -> bool:
    """Whether an epoch's losses are those of a network with the same output for every image.

    Its cross-entropy is ln C, or the entropy of the labels once the output has become the class frequencies, to three
    digits; and it is right no more often than one class for all images. Without a cross-entropy there is no verdict.
    """
    cross_entropy = metrics.get("cross_entropy", metrics.get("natural"))
    if cross_entropy is None:
        return False
    counts = torch.bincount(labels).double()
    entropy = float(torch.special.entr(counts / len(labels)).sum())
    near = any(abs(cross_entropy - dead) < DEAD_TOLERANCE * dead for dead in (entropy, math.log(max(len(counts), 2))))
    return near and at_chance(metrics["noisy_accuracy"], labels)


DEAD_START = (
    f"the network gives the same output for every image after {max(DEAD_EPOCHS) + 1} epochs (a dead start); training "
    f"starts again with {RESTART_WARM_UP} epoch of learning-rate warm-up, which model.safetensors records"
)


def at_chance(accuracy: float, labels: Tensor) -> bool:
    """Whether one class for all images would be right about as often; never where there is one class only."""
    commonest = float(torch.bincount(labels).max()) / len(labels)
    return accuracy < 1.05 * commonest < 1.05


def nothing_learnt(warm_up: int, accuracy: float) -> str:
    """What to report about a run that is at chance after `warm_up` epochs of warm-up and some more."""
    first = "" if warm_up else "--set learning_rate_warm_up=1, "
    return (
        f"after {LEARNT_BY} epochs the accuracy in training is {accuracy:.1%}, no better than one class for all "
        f"images; unless this is expected, start again with {first}a lower learning_rate, less weight on the "
        "objective's other terms or another seed"
    )


def stop_if_weights_diverged(model: nn.Module, epoch: int, folder: Path) -> None:
    """A step may ruin the weights after a loss that was still sound: they do not replace the last checkpoint."""
    largest = torch.stack([parameter.detach().abs().max() for parameter in model.parameters()]).max()
    if not float(largest) < WEIGHTS_DIVERGED:
        raise WorkError(
            f"{folder}: the weights diverged in epoch {epoch} (one is {float(largest):.3g}); the last saved epoch is "
            "kept; lower learning_rate"
        )


def fill_progress(progress: Progress, recipe: TrainRecipe, epoch: int) -> None:
    """The epoch-dependent factors of the objectives, in the tensors that the steps read."""
    dropped = bool(recipe.learning_rate_drops) and epoch >= recipe.learning_rate_drops[0]
    progress.warmup.fill_(min(1.0, (epoch + 1) / 10))
    progress.after_first_drop.fill_(float(dropped))


def peak_memory(device: torch.device) -> dict[str, int]:
    """For the metrics of a GPU run: the most that this process has had allocated since it began to train."""
    return {"peak_memory_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


def slice_of_process(images: int, group: Team) -> slice:
    """The share of a step that this process computes."""
    size = images // group.size
    return slice(size * group.rank, size * (group.rank + 1))


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
    loss, accuracy = meter.so_far()
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
