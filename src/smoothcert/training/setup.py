"""What a training run starts with: device, precision, optimizer, its folder and the state in it."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smoothcert.data import Images
from smoothcert.distributed import Team
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import remove_temporaries
from smoothcert.io.text import one_line
from smoothcert.objectives import UnloadedObjective
from smoothcert.training.checkpoint import (
    MODEL,
    RECIPE,
    STATE,
    InputSpec,
    ModelFile,
    State,
    load_run,
    load_state,
    read_model_file,
    save_model,
)
from smoothcert.training.metrics import METRICS, epochs_in, keep_metrics_before
from smoothcert.training.recipe import TrainRecipe, load_run_recipe, parse_recipe, stored_fields
from smoothcert.training.run_folder import refuse_lost_recipe

STEPS_AHEAD = 8
"""Steps that a run may have asked for and not seen done: enough to keep a GPU busy, few to wait for."""


@contextmanager
def enough_memory() -> Iterator[None]:
    """Makes one line of whatever torch raises where memory is short."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise WorkError(
                "expected the memory for a training step, got too little of it; choose a smaller batch_size or "
                "objective.num_noise"
            ) from error
        raise


@contextmanager
def training_device(device: torch.device) -> Iterator[None]:
    """On a GPU: a stream of one's own, as captured steps need, the fastest convolutions, and TF32 for products too."""
    if device.type != "cuda":
        yield
        return
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    saved = cudnn.benchmark, products.fp32_precision
    cudnn.benchmark, products.fp32_precision = True, "tf32"
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.cuda.device(device), own_stream(device):
            yield
    finally:
        torch.cuda.synchronize(device)
        cudnn.benchmark, products.fp32_precision = saved


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Work inside goes to a new stream, which may be entered again and again; nothing on a CPU."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.synchronize(device)  # what was asked for before is there
    stream: AbstractContextManager[object] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)  # type: ignore[arg-type]


def weights_layout(own_network: bool) -> torch.memory_format:
    """Channels last, as a GPU's matrix units read images, and faster on CPUs too; a user's network may count on another
    order."""
    return torch.preserve_format if own_network else torch.channels_last


class Pace:
    """How far the host is ahead of a GPU's stream: it launches a step and continues. Nothing on a CPU, which waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.under_way: deque[torch.cuda.Event] = deque(maxlen=STEPS_AHEAD)

    def stepped(self) -> None:
        """To be called in the stream, after a step was asked for."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self.under_way.append(event)

    def far_ahead(self) -> bool:
        """Whether none of the last STEPS_AHEAD steps is done."""
        return len(self.under_way) == STEPS_AHEAD and not self.under_way[0].query()  # type: ignore[no-untyped-call]


def make_optimizer(model: nn.Module, recipe: TrainRecipe, device: torch.device) -> torch.optim.Optimizer:
    """SGD. On a GPU in one kernel that reads the learning rate from a tensor: a captured step sees it change."""
    gpu = device.type == "cuda"
    return torch.optim.SGD(
        model.parameters(),
        lr=torch.full((), recipe.learning_rate, device=device) if gpu else recipe.learning_rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
        fused=True if gpu else None,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def check_request(recipe: TrainRecipe, data: Images, folder: Path, team: Team) -> None:
    """Refuse what cannot be trained before anything is written."""
    if isinstance(recipe.objective, UnloadedObjective):
        recipe.objective.refuse()
    if len(data) < recipe.batch_size:
        raise RequestError(f"batch_size: expected at most the {len(data)} training images, got {recipe.batch_size}")
    if recipe.images_per_step % team.size:
        raise RequestError(
            f"batch_size: a step of {recipe.images_per_step} images does not divide among {team.size} processes; "
            "choose another batch_size"
        )
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if there.exists() and not there.is_dir():
        raise RequestError(f"{folder}: expected a folder or none, got the file {there}; choose another --out")


@dataclass(frozen=True)
class Start:
    """Where a run starts or continues."""

    epoch: int
    """The first epoch to train."""
    state: State | None
    digest: str
    """Of the training data."""
    model: ModelFile | None
    """The model that is in the folder."""
    warm_up: int
    dead_epochs: int


def open_run(
    recipe: TrainRecipe,
    data: Images,
    folder: Path,
    team: Team,
    resume: bool,
    on_note: Callable[[str], None] = lambda text: None,
) -> Start:
    """Make or reopen the folder. What does not belong together (recipe, data, state, model, metrics) is refused."""
    exists = (folder / RECIPE).exists()
    if exists and not resume:
        raise RequestError(f"{folder}: holds a run already; continue it with --resume or choose another --out")
    if not exists:
        refuse_lost_recipe(folder, compared=resume)
    else:
        refuse_other_recipe(load_run_recipe(folder / RECIPE), recipe, folder)
    model = read_model_file(folder / MODEL) if (folder / MODEL).exists() else None
    state, digest = load_state(folder), data.digest()
    if state is not None and state.data not in (None, digest):
        raise RequestError(
            f"{folder}: the training data have changed since its state was saved; restore them, or train on the new "
            "data into another --out"
        )
    # The same data elsewhere, and more or fewer epochs, change nothing in the epochs that have been trained.
    harmless = {"epochs"} | ({"dataset"} if state is not None and state.data else set())
    if model is not None:
        if not isinstance(model.recipe, TrainRecipe):
            raise RequestError(f"{folder}: expected a run to train, got an imported model; choose another --out")
        refuse_other_recipe(model.recipe, recipe, folder, MODEL, harmless)
    if state is not None and state.recipe is not None:
        stored = parse_recipe(TrainRecipe, stored_fields(state.recipe), str(folder / STATE))
        refuse_other_recipe(stored, recipe, folder, STATE, harmless)
    epoch = first_epoch(recipe, folder, state, model)
    # All processes have looked before the main one writes.
    team.wait()
    if team.leads:
        for name in (RECIPE, STATE, MODEL, METRICS):
            remove_temporaries(folder / name)
        if not exists:
            recipe.save(folder / RECIPE)
        keep_metrics_before(folder / METRICS, epoch)
        if state is not None and state.data is None:
            on_note(f"{folder}: its state does not record its training data: whether they are the same is not checked")
        if epoch and not (folder / METRICS).exists():
            on_note(f"{folder}: its {METRICS} is gone; that of epochs 0 to {epoch - 1} is lost")
        if epoch == recipe.epochs:
            on_note(f"{folder}: all {epoch} epochs are trained already")
    team.wait()
    warm_up = recipe.learning_rate_warm_up if state is None or state.warm_up is None else state.warm_up
    return Start(epoch, state, digest, model, warm_up, 0 if state is None else state.dead_epochs)


def first_epoch(recipe: TrainRecipe, folder: Path, state: State | None, model: ModelFile | None) -> int:
    """The first epoch to train: after the state's last one, or none where the model is finished and the state gone."""
    measured = epochs_in(folder / METRICS)
    if state is None:
        if model is not None and model.epoch == recipe.epochs:
            return recipe.epochs
        # The first epoch is always saved, so a kill leaves at most its metrics without a state.
        lost = max(measured if measured > 1 else 0, model.epoch if model is not None else 0)
        if lost:
            raise RequestError(
                f"{folder}: {STATE} is gone, so the run cannot continue after its {lost} of {recipe.epochs} epochs; "
                "restore it, or train again into another --out"
            )
        return 0
    if state.epoch > recipe.epochs:
        raise WorkError(
            f"{folder / STATE}: expected at most the {recipe.epochs} epochs of the recipe, got {state.epoch}; "
            "restore it, or train again into another folder"
        )
    if (folder / METRICS).exists() and measured < state.epoch:
        raise WorkError(
            f"{folder}: {STATE} is that of {state.epoch} epochs, {METRICS} holds {measured}; restore the files, or "
            "train again into another folder"
        )
    return state.epoch


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, start: Start, folder: Path) -> None:
    """Load the state of a run; a network that has changed since is refused."""
    state = start.state
    if state is None:
        if start.epoch:
            load_run(folder, model=model)
        return
    try:
        model.load_state_dict(state.model)
        # The settings are the recipe's and this device's; the momentum is the run's, laid out as the parameters are.
        own = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state.optimizer["state"], "param_groups": own})
        for parameter, kept in optimizer.state.items():
            for name, value in kept.items():
                if isinstance(value, Tensor):
                    if value.shape != parameter.shape:
                        raise ValueError(f"{name} of shape {list(value.shape)} for {list(parameter.shape)}")
                    kept[name] = torch.empty_like(parameter).copy_(value)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = one_line(error)[:160]
        raise RequestError(f"{folder}: its weights do not fit the network ({reason}); choose another --out") from error


def start_again(model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor]) -> None:
    """Go back to the initial `weights` and no momentum, in place: a captured step keeps reading the same tensors."""
    model.load_state_dict(weights)
    for kept in optimizer.state.values():
        if kept.get("momentum_buffer") is not None:
            kept["momentum_buffer"].zero_()


def write_missing_model(
    folder: Path,
    model: nn.Module,
    recipe: TrainRecipe,
    spec: InputSpec,
    start: Start,
    provenance: Mapping[str, Any],
) -> None:
    """Write the model of a finished run from its state, where the folder holds none, or that of an earlier epoch.

    `provenance` serves where the state, that of an earlier version, does not record one.
    """
    if start.state is None or start.epoch < recipe.epochs:
        return
    if start.model is None or (start.model.epoch, start.model.recipe) != (start.epoch, recipe):
        save_model(folder, model, recipe, spec, start.epoch, start.state.provenance or provenance)


def refuse_other_recipe(
    stored: TrainRecipe, wanted: TrainRecipe, folder: Path, file: str = RECIPE, harmless: Collection[str] = ()
) -> None:
    """A RequestError where the recipe in `file` of `folder` differs from `wanted` in fields that are not `harmless`."""
    before, now = stored.to_mapping(), wanted.to_mapping()
    differing = [
        f"{key}: the run has {before[key]}, the request {now[key]}"
        for key in now
        if before[key] != now[key] and key not in harmless
    ]
    if differing:
        where = "" if file == RECIPE else f"{file} says that it "
        raise RequestError(
            f"{folder}: {where}holds a run of another recipe ({'; '.join(differing)}); choose another --out"
        )
