"""What a training run starts with: processes, device, precision, optimizer, its folder and the state in it."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from smoothcert.checkpoint import RECIPE, load_state
from smoothcert.data import Images
from smoothcert.errors import RequestError
from smoothcert.metrics_file import METRICS, keep_metrics_before
from smoothcert.processes import find_device, meet
from smoothcert.recipe import TrainRecipe, load_run_recipe

STEPS_AHEAD = 8
"""Steps that a run may have asked for and not seen done: enough to keep a GPU busy, few to wait for."""


def start_accelerator(device: str, own_network: bool) -> Accelerator:
    """Devices and processes, by accelerate. An earlier run of this Python process may have had others."""
    cpu = find_device(device).type == "cpu"
    meet()
    AcceleratorState._reset_state(reset_partial_state=True)
    # A user's network may have parameters that a loss does not reach.
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=own_network)]
    accelerator = Accelerator(mixed_precision="no", cpu=cpu, kwargs_handlers=handlers)
    assert (accelerator.device.type == "cpu") == cpu
    return accelerator


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
    """How far the host is ahead of a GPU's stream: it asks for a step and goes on. Nothing on a CPU, which waits."""

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


def check_request(recipe: TrainRecipe, data: Images, folder: Path, accelerator: Accelerator) -> None:
    """Refuse what cannot be trained before anything is written."""
    if len(data) < recipe.batch_size:
        raise RequestError(f"batch_size: expected at most the {len(data)} training images, got {recipe.batch_size}")
    if recipe.images_per_step % accelerator.num_processes:
        raise RequestError(
            f"batch_size: a step of {recipe.images_per_step} images does not divide among "
            f"{accelerator.num_processes} processes; choose another batch_size"
        )
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if there.exists() and not there.is_dir():
        raise RequestError(f"{folder}: expected a folder or none, got the file {there}; choose another --out")


def open_run(
    recipe: TrainRecipe, folder: Path, accelerator: Accelerator, resume: bool
) -> tuple[int, dict[str, Any] | None]:
    """Make or reopen the folder; the first epoch to train and the state to start from."""
    exists = (folder / RECIPE).exists()
    if exists and not resume:
        raise RequestError(f"{folder}: holds a run already; continue it with --resume or choose another --out")
    if exists:
        refuse_other_recipe(load_run_recipe(folder / RECIPE), recipe, folder)
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
        # The settings are the recipe's and this device's; the momentum is the run's, laid out as the parameters are.
        own = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": own})
        for parameter, kept in optimizer.state.items():
            kept.update({k: torch.empty_like(parameter).copy_(v) for k, v in kept.items() if isinstance(v, Tensor)})
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RequestError(f"{folder}: its weights do not fit the network ({reason}); choose another --out") from error


def start_again(model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor]) -> None:
    """Go back to the initial `weights` and no momentum, in place: a captured step keeps reading the same tensors."""
    model.load_state_dict(weights)
    for kept in optimizer.state.values():
        if kept.get("momentum_buffer") is not None:
            kept["momentum_buffer"].zero_()


def refuse_other_recipe(stored: TrainRecipe, wanted: TrainRecipe, folder: Path) -> None:
    before, now = stored.to_mapping(), wanted.to_mapping()
    differing = [f"{key}: the run has {before[key]}, the request {now[key]}" for key in now if before[key] != now[key]]
    if differing:
        raise RequestError(f"{folder}: holds a run of another recipe ({'; '.join(differing)}); choose another --out")
