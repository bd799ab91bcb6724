"""A run that is being trained: everything that the loop reads and changes, and the options of its training."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from smoothcert.data import Images
from smoothcert.distributed import Team
from smoothcert.models import is_code
from smoothcert.models.precision import resolve_precision
from smoothcert.noise import NOISES
from smoothcert.objectives import Denoising, Objective, Progress
from smoothcert.objectives.inputs_per_image import inputs_by_epoch
from smoothcert.training.captured_step import captured_step
from smoothcert.training.checkpoint import InputSpec, Run
from smoothcert.training.choices import Compiling
from smoothcert.training.dead_start import DEAD_EPOCHS
from smoothcert.training.denoiser import behind_denoiser
from smoothcert.training.device import weights_layout
from smoothcert.training.frozen_classifier import Teacher
from smoothcert.training.meter import Meter
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.resume import Start, State, restore
from smoothcert.training.step import StepLoss, make_optimizer
from smoothcert.training.versions import versions
from smoothcert.training.weight_average import AveragedWeights


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is trained, apart from its recipe."""

    model: nn.Module | None = None
    """A network to train instead of the one that the recipe names; `load_run(folder, model=...)` loads it."""
    init: Path | None = None
    """Weights to start from: a run folder, a `.safetensors` file or a PyTorch checkpoint."""
    classifier: nn.Module | None = None
    """A trained classifier that only contributes to the loss and stays as it is: the teacher of Distillation, or behind
    a denoiser that is trained."""
    classifier_folders: Sequence[str] = ()
    """Names of the run folders that `classifier` was loaded from, for the provenance."""
    test_data: Images | None = None
    """Images on which the accuracy under noise is measured every `evaluate_every` epochs."""
    evaluate_every: int = 1
    resume: bool = False
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    capture: bool | None = None
    """Whether steps are captured as CUDA graphs on one GPU. The default is True except for a user's own network,
    objective or `classifier`, whose decisions in Python would be made only once."""
    compiling: Compiling = "auto"
    sync_batch_norm: bool = False
    """Whether batch norm uses the statistics of a step's images in all processes, instead of those of each process."""
    on_progress: Callable[..., None] = lambda status: None
    """Called with a `TrainingStatus`."""
    on_epoch: Callable[[Run, dict[str, Any]], None] = lambda run, metrics: None
    """Called after each epoch with the run, whose model is the one that is being trained, and its metrics."""
    on_note: Callable[[str], None] = lambda text: None
    """Called with one line that a user may want to read."""
    runs_at_once: int = 1
    """How many runs are trained side by side at most (see `training/several_runs.py`)."""
    running: Callable[[], int] = lambda: 1
    """How many of them are being trained at the moment."""


class RunInProgress:
    """A run that is being trained: what the loop reads and changes."""

    def __init__(
        self,
        recipe: TrainRecipe,
        data: Images,
        tested: Images | None,
        folder: Path,
        group: Team,
        device: torch.device,
        model: nn.Module,
        start: Start,
        options: Options,
    ) -> None:
        # The request and the data.
        self.recipe = recipe
        self.folder = folder
        self.group = group
        self.device = device
        self.options = options
        self.own_network = options.model is not None or is_code(recipe.model)
        self.spec = InputSpec.of(data)
        self.data_digest = start.digest
        self.versions = versions(device)
        self.data = data.to(device)
        self.test_data = None if tested is None else tested.to(device)
        self.precision = resolve_precision(recipe.precision, device)

        # The network and what is saved with it; all of it is restored if the run continues.
        self.model: nn.Module = model.to(device, memory_format=weights_layout(self.own_network))  # type: ignore[call-overload]
        if options.sync_batch_norm and group.size > 1:  # our own kernels leave such layers to torch
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.optimizer = make_optimizer(self.model, recipe, device)
        self.initial_weights: dict[str, Tensor] | None = None  # for a restart, as long as one can follow
        self.origin = start.origin
        # A dead start changes these two: see `State`.
        self.warm_up = recipe.learning_rate_warm_up if start.state is None else start.state.warm_up
        self.dead_epochs = 0 if start.state is None else start.state.dead_epochs
        if self.warm_up == 0 and start.epoch <= max(DEAD_EPOCHS) and "init" not in self.origin:
            self.initial_weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.average = AveragedWeights(self.model, recipe.ema) if recipe.ema else None
        restore(self.model, self.optimizer, self.average, start, folder)
        self.sampler = recipe.sampler.make()
        self.sampler.weights = None if start.state is None else start.state.sampler
        self.epoch = self.first_epoch = start.epoch

        # The clock, and the state of the current epoch.
        self.active_runs = 1  # the largest number of runs side by side in this epoch
        self.started = time.perf_counter()
        self.next_save = -math.inf
        self.epoch_started = self.last_report = 0.0
        self.learning_rate = 0.0
        self.steps_done = 0

        # A step on `images_per_step` images, of which this process computes its share.
        per_step = recipe.images_per_step
        self.steps = len(data) // recipe.batch_size * (recipe.batch_size // per_step)
        each = per_step // group.size
        self.share = slice(each * group.rank, each * (group.rank + 1))
        self.inputs = inputs_by_epoch(recipe.objective, range(recipe.epochs))  # what a step of each epoch takes
        self.meter = Meter(device, self.steps)
        self.generator = torch.Generator(device)
        self.noise = NOISES[recipe.noise](recipe.sigma)

        # The loss, and the step that minimizes it.
        zero = torch.zeros((), device=device)
        self.targets: Tensor | None = None  # the shares of a teacher's votes [images, classes]
        self.targets_origin: dict[str, Any] | None = None
        self.progress = Progress(recipe.sigma, zero, zero.clone(), torch.empty(0), zero.clone())
        network = self.model
        if isinstance(recipe.objective, Denoising):
            network = behind_denoiser(self.model, options.classifier, device)
        elif options.classifier is not None:
            self.progress = self.progress._replace(teacher=Teacher(options.classifier, recipe, device, data.shape))
        self.loss = StepLoss(network, recipe.objective)
        self.module: nn.Module = self.loss
        if group.size > 1:  # their gradients are averaged; a user's network may have parameters that the loss ignores
            self.module = DistributedDataParallel(self.loss, find_unused_parameters=self.own_network)
        self.captured = captured_step(self, network)

    def without_effect(self) -> Iterator[str]:
        """What was asked for and changes nothing here, one line each."""
        if self.captured is None and self.options.capture:
            yield "capture: no effect here; only the steps of a single process on a GPU are captured"
        if self.captured is None and self.options.compiling == "always":
            yield "compile: no effect here; only captured steps on a GPU are compiled"
        if self.recipe.teacher is None and "teacher_votes" in self.recipe.to_mapping():  # it is not the default
            yield "teacher_votes: no effect; the recipe has no teacher"
        first_drop = min(self.recipe.learning_rate_drops, default=self.recipe.epochs)
        yield from self.recipe.objective.without_effect(self.recipe.epochs, first_drop)

    def set_objective(self, objective: Objective) -> None:
        """Train by this objective from the next step on."""
        if objective == self.loss.objective:
            return
        self.loss.set_objective(objective)
        self.meter = Meter(self.device, self.steps)  # its terms may be others
        if self.captured is not None:
            self.captured.loss_changed()

    def autocast(self) -> torch.autocast:
        """The precision of the run, for forward passes."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def leave_group(self) -> None:
        """Release what DistributedDataParallel holds, while the process group still exists.

        Its reducer would otherwise hold the last reference to the group, and join the group's threads without
        releasing Python's interpreter lock, for which one of these threads may be waiting: a deadlock.
        """
        self.module = self.loss

    def set_targets(self, shares: Tensor, origin: dict[str, Any]) -> None:
        """Use these shares of a teacher's votes [images, classes] in every step; call it before the first one."""
        self.targets = shares.to(self.device)
        self.targets_origin = origin
        # A captured step reads this tensor.
        rows = self.targets.new_empty(self.share.stop - self.share.start, shares.shape[1])
        self.progress = self.progress._replace(targets=rows)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights that are saved as the model: those of the network, or their moving average."""
        return self.model.state_dict() if self.average is None else self.average.tensors

    def provenance(self) -> dict[str, Any]:
        """How the weights were computed, for the file of the model."""
        return {
            "versions": self.versions,
            "processes": self.group.size,
            "precision": self.precision,
            "runs_at_once": self.options.runs_at_once,
            "captured": self.captured is not None and self.captured.graph is not None,
            "compiled": self.captured is not None and bool(self.captured.compiled),
            "learning_rate_warm_up": self.warm_up,
            **self.origin,
            **({} if self.targets_origin is None else {"teacher": self.targets_origin}),
        }

    def as_run(self) -> Run:
        """The run as it is now; its model keeps changing."""
        return Run(self.folder, self.recipe, self.spec, self.model, self.epoch, self.provenance())

    def state(self) -> State:
        """What training continues from after `epoch` epochs."""
        return State(
            epoch=self.epoch,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict()["state"],
            recipe=self.recipe.to_mapping(),
            data=self.data_digest,
            provenance=self.provenance(),
            warm_up=self.warm_up,
            dead_epochs=self.dead_epochs,
            average=None if self.average is None else self.average.tensors,
            sampler=self.sampler.weights,
        )
