"""`training_step` as a CUDA graph, and whether its loss is compiled.

A kernel of a small network takes microseconds: launching the kernels one by one from Python takes several times longer
than computing them. A captured step is launched as a whole. Nothing in it waits for the device, and everything that
changes from step to step (images, learning rate, warm-up, noise) is in tensors that the graph reads.
"""

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from smoothcert.data import default_folder
from smoothcert.io.text import error_line
from smoothcert.models import CifarResNet
from smoothcert.models.kernels import kernels_work
from smoothcert.objectives import is_built_in
from smoothcert.training.choices import Compiling
from smoothcert.training.frozen_classifier import is_built_in_network
from smoothcert.training.step import training_step

if TYPE_CHECKING:
    from smoothcert.training.run_in_progress import RunInProgress

WARM_UP_STEPS = 3
"""Steps before a capture, in which libraries choose their kernels and memory. They are steps of the run."""
TIMED_STEPS = 10
SAVED_SHARE = 0.3
"""The share of a captured step that compiling saves; measured 0.2 (ResNet-110) to 0.4 (LeNet, SmoothMix)."""
COMPILE_SECONDS, COMPILE_SECONDS_PER_LAYER = 15.0, 0.35
"""The time that compiling takes without cached kernels, measured on LeNet and ResNet-110."""


def captured_step(run: "RunInProgress", network: nn.Module) -> "CapturedStep | None":
    """Return the captured step of a run that trains `network`; None if its steps are not captured."""
    if not is_captured(run):
        return None
    keep_compiled_kernels()
    kernels = run.precision == "bf16" and kernels_work(run.device.index or 0)
    worth = seconds_worth_compiling(network, run.options.compiling, by_kernels=kernels)
    return CapturedStep((run.recipe.epochs - run.first_epoch) * run.steps, worth)


def is_captured(run: "RunInProgress") -> bool:
    """Whether steps are captured as CUDA graphs: see `Options.capture`."""
    capture, classifier = run.options.capture, run.options.classifier
    if capture is None:
        known = classifier is None or is_built_in_network(classifier)
        capture = not run.own_network and is_built_in(run.recipe.objective) and known
    return capture and run.device.type == "cuda" and run.group.size == 1


@dataclass(eq=False)
class CapturedStep:
    """`training_step` as a CUDA graph: the first steps run without a graph, then one is captured and replayed.

    The results equal those of the plain step up to rounding: the same kernels use the same random numbers. If the
    `steps_left` will take `worth_compiling` seconds or more, the loss is compiled and captured again. A step that
    cannot be captured (for example because the network reads a value on the host) or compiled continues without, and
    a note of the run gives the reason. A captured step belongs to one run, and does not refer to it, so that the memory
    of a finished run is released at once.
    """

    steps_left: int
    worth_compiling: float
    warm_up: int = WARM_UP_STEPS
    graph: torch.cuda.CUDAGraph | None = None
    images: Tensor = field(default_factory=lambda: torch.empty(0))
    labels: Tensor = field(default_factory=lambda: torch.empty(0))
    timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    compiled: bool | None = None
    """None until this is decided."""

    def __call__(self, run: "RunInProgress", images: Tensor, labels: Tensor) -> None:
        self.steps_left -= 1
        if self.graph is not None:
            self.images.copy_(images)
            self.labels.copy_(labels)
            if self.compiled is None:
                self._replay_and_decide(run, self.graph)
            else:
                self.graph.replay()
            return
        self._run_plain(run, images, labels)
        self.warm_up -= 1
        if self.warm_up == 0:
            self._capture(run, images, labels)

    def loss_changed(self) -> None:
        """Capture a step anew, and decide again whether compiling pays; what could not be captured is not tried again.

        A part of the loss that starts late, such as an attack, makes the steps of the run more expensive.
        """
        if self.graph is not None:
            self.graph = None
            self.warm_up = WARM_UP_STEPS
            self.compiled = self.compiled or None
            self.timed = []

    def _run_plain(self, run: "RunInProgress", images: Tensor, labels: Tensor) -> None:
        if not self.compiled:
            training_step(run, images, labels)
            return
        state = run.generator.get_state()
        buffers = [buffer.clone() for buffer in run.loss.buffers()]
        try:
            training_step(run, images, labels)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            run.options.on_note(
                f"the loss cannot be compiled ({error_line(error)}); training continues without compiling it"
            )
            self.compiled = False
            run.loss.set_compiled(False)
            # Repeat the step from the values that it started with.
            run.optimizer.zero_grad()
            run.generator.set_state(state)
            for buffer, before in zip(run.loss.buffers(), buffers, strict=True):
                buffer.copy_(before)
            training_step(run, images, labels)

    def _capture(self, run: "RunInProgress", images: Tensor, labels: Tensor) -> None:
        """Capture a step on copies of this batch; capturing computes nothing."""
        self.images, self.labels = images.clone(), labels.clone()
        state = run.generator.get_state()
        try:
            self.graph = _recorded(lambda: training_step(run, self.images, self.labels), run.generator)
        except RuntimeError as error:
            run.options.on_note(
                f"steps are not captured as a CUDA graph ({error_line(error)}); training continues, more slowly"
            )
            run.optimizer.zero_grad()
            # A capture that fails leaves its generators and the default one in a state in which they cannot draw.
            # A capture that succeeds ends it.
            _recorded(self.images.zero_, run.generator)
            run.generator.set_state(state)

    def _replay_and_decide(self, run: "RunInProgress", graph: torch.cuda.CUDAGraph) -> None:
        """Time a few replays; then compile, warm up and capture again if that saves time."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # do not measure the work of other runs on this GPU
        start.record()
        graph.replay()
        end.record()
        self.timed.append((start, end))
        if len(self.timed) < TIMED_STEPS:
            return
        end.synchronize()
        step = statistics.median(start.elapsed_time(end) for start, end in self.timed) / 1000
        self.compiled = step * self.steps_left >= self.worth_compiling
        if self.compiled:
            run.loss.set_compiled(True)
            self.graph = None
            self.warm_up = WARM_UP_STEPS


def _recorded(call: Callable[[], object], generator: torch.Generator) -> torch.cuda.CUDAGraph:
    """What `call` launches on the current stream, as a graph."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    # thread_local: the threads that load images may pin memory meanwhile.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        call()
    return graph


def keep_compiled_kernels() -> None:
    """Keep compiled kernels across reboots: next to the data, unless the user has chosen another folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_folder() / "compiled"))


def seconds_worth_compiling(model: nn.Module, compiling: Compiling, *, by_kernels: bool = False) -> float:
    """The seconds that the rest of a run takes at least if compiling saves time.

    With `by_kernels`, layers use our own kernels. Compiling then saves nothing for a CIFAR ResNet (ResNet-20 with
    Consistency takes 1.69 ms per step, 1.76 ms if compiled), and compiled attacks do not use the kernels.
    """
    if compiling == "always":
        return 0.0
    if compiling == "never" or (by_kernels and any(isinstance(module, CifarResNet) for module in model.modules())):
        return math.inf
    layers = sum(1 for module in model.modules() if not list(module.children()))
    return (COMPILE_SECONDS + COMPILE_SECONDS_PER_LAYER * layers) / SAVED_SHARE
