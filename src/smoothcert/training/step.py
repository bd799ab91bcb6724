"""One step of training: noise, attack, loss, backward, update, log. On a GPU it is captured once as a CUDA graph.

A small network keeps a GPU busy for microseconds a kernel: launching them one by one from Python takes several times
longer than computing them. A captured step is launched as a whole. Nothing in it waits for the device, and what
changes from step to step (images, learning rate, warm-up, noise) lives in tensors that the graph reads.
"""

import os
import statistics
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from smoothcert.data import default_folder
from smoothcert.models import CifarResNet
from smoothcert.noise import Noise
from smoothcert.objectives import LossTerms, Objective, Progress
from smoothcert.training.metrics import Meter

WARM_UP_STEPS = 3
"""Steps before a capture, as usual: libraries choose their kernels and memory in them. They are steps of the run."""
TIMED_STEPS = 10
Compiling = Literal["auto", "always", "never"]
SAVED_SHARE = 0.3
"""Of the time of a captured step; measured 0.2 (ResNet-110) to 0.4 (LeNet, SmoothMix)."""
SECONDS_AT_LEAST, SECONDS_A_LAYER = 15.0, 0.35
"""What compiling takes, measured on LeNet and ResNet-110, when nothing of it is kept on disk."""


class Step(nn.Module):
    """The loss of one step as a module: wrapped once for several processes, however often it calls the classifier."""

    def __init__(self, classifier: nn.Module, objective: Objective, *, device_type: str, bf16: bool) -> None:
        super().__init__()
        self.classifier = classifier
        self.objective = objective
        self.device_type = device_type
        self.bf16 = bf16
        self.compiled(False)

    def compiled(self, wanted: bool) -> None:
        """Whether torch.compile works on the loss: attack steps and the rest are compiled once each."""
        self.loss = self.objective.loss
        if wanted:
            # Runs of one process share the compiler, and each kind of run is compiled for itself.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            self.loss = torch.compile(self.objective.loss, dynamic=False)

    def forward(self, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress) -> LossTerms:
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.bf16):
            return self.loss(self.classifier, images, labels, noise, progress)


class Sampling(NamedTuple):
    """What a step draws: noise for `images` images, of which this process computes `share`."""

    noise: Noise
    num_noise: int
    images: int
    share: slice
    generator: torch.Generator


class TrainingStep:
    """Calls `step` on a batch, backpropagates, updates, and adds to the log of `meter`."""

    def __init__(
        self,
        step: Callable[[Tensor, Tensor, Tensor, Progress], LossTerms],
        optimizer: torch.optim.Optimizer,
        sampling: Sampling,
        progress: Progress,
        meter: Meter,
    ) -> None:
        self.step = step
        self.optimizer = optimizer
        self.sampling = sampling
        self.progress = progress
        self.meter = meter

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """images [share, c, h, w] in [0, 1], labels [share]."""
        drawn = self.sampling
        shape = (drawn.num_noise, drawn.images, *images.shape[1:])
        noise = drawn.noise.sample(shape, drawn.generator)[:, drawn.share]
        uniform = torch.rand(drawn.images, generator=drawn.generator, device=images.device)[drawn.share]
        terms = self.step(images, labels, noise, self.progress._replace(uniform=uniform))
        terms.loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.meter.add(terms, labels)


class CapturedStep:
    """`TrainingStep` as a CUDA graph: the first steps run as they are, then one is captured and replayed.

    Gives what the plain step gives, to floating-point noise: the same kernels on the same random numbers. If
    `compile_pays` says so of the seconds that the rest of the run will take (`steps` in all), the loss is compiled and
    captured again. What cannot be captured (a network that asks the host something, say) or compiled goes on without,
    and `note` is told why.
    """

    def __init__(
        self,
        plain: TrainingStep,
        loss: Step,
        steps: int,
        compile_pays: Callable[[float], bool],
        note: Callable[[str], None],
    ) -> None:
        self.plain = plain
        self.loss = loss
        self.compile_pays = compile_pays
        self.note = note
        self.steps_left = steps
        self.warm_up = WARM_UP_STEPS
        self.graph: torch.cuda.CUDAGraph | None = None
        self.images, self.labels = torch.empty(0), torch.empty(0)
        self.timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.compiled: bool | None = None
        """None until it is decided."""

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.steps_left -= 1
        if self.graph is not None:
            self.images.copy_(images)
            self.labels.copy_(labels)
            if self.compiled is None:
                self._replay_and_decide(self.graph)
            else:
                self.graph.replay()
            return
        self._run_plain(images, labels)
        self.warm_up -= 1
        if self.warm_up == 0:
            self._capture(images, labels)

    def _run_plain(self, images: Tensor, labels: Tensor) -> None:
        if not self.compiled:
            self.plain(images, labels)
            return
        generator = self.plain.sampling.generator
        state, buffers = generator.get_state(), [buffer.clone() for buffer in self.loss.buffers()]
        try:
            self.plain(images, labels)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.note(f"the loss cannot be compiled ({_first_line(error)}); training goes on without")
            self.compiled = False
            self.loss.compiled(False)
            # The same step again, from what it began with.
            self.plain.optimizer.zero_grad()
            generator.set_state(state)
            for buffer, before in zip(self.loss.buffers(), buffers, strict=True):
                buffer.copy_(before)
            self.plain(images, labels)

    def _capture(self, images: Tensor, labels: Tensor) -> None:
        """Record a step on copies of this batch; recording computes nothing."""
        self.images, self.labels = images.clone(), labels.clone()
        generator = self.plain.sampling.generator
        state = generator.get_state()
        try:
            self.graph = _recorded(lambda: self.plain(self.images, self.labels), generator)
        except RuntimeError as error:
            self.note(f"steps are not captured as a CUDA graph ({_first_line(error)}); training goes on, slower")
            self.plain.optimizer.zero_grad()
            # A capture that fails leaves its generators and the default one in a state in which they cannot draw.
            # A capture that succeeds ends it.
            _recorded(self.images.zero_, generator)
            generator.set_state(state)

    def _replay_and_decide(self, graph: torch.cuda.CUDAGraph) -> None:
        """Time a few replays; then compile, warm up and capture again, if that pays."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the work of other runs on this GPU is not this one's
        start.record()
        graph.replay()
        end.record()
        self.timed.append((start, end))
        if len(self.timed) < TIMED_STEPS:
            return
        end.synchronize()
        step = statistics.median(start.elapsed_time(end) for start, end in self.timed) / 1000
        self.compiled = self.compile_pays(step * self.steps_left)
        if self.compiled:
            self.loss.compiled(True)
            self.graph, self.warm_up = None, WARM_UP_STEPS


def _recorded(call: Callable[[], object], generator: torch.Generator) -> torch.cuda.CUDAGraph:
    """What `call` launches on the current stream, as a graph."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    # thread_local: the threads that load images may pin memory meanwhile.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        call()
    return graph


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def keep_compiled_kernels() -> None:
    """Kernels outlive a reboot: they are kept beside the data, unless the user has chosen a folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_folder() / "compiled"))


def compile_pays(model: nn.Module, compiling: Compiling, *, by_kernels: bool = False) -> Callable[[float], bool]:
    """A judge of the seconds that the rest of a run takes without compiling.

    `by_kernels`: layers that have kernels of our own use them. They leave a compiler nothing of a ResNet for CIFAR
    (ResNet-20 with consistency 1.69 ms a step without, 1.76 compiled), and compiled attacks do not use them.
    """
    if compiling != "auto":
        return lambda seconds: compiling == "always"
    if by_kernels and any(isinstance(module, CifarResNet) for module in model.modules()):
        return lambda seconds: False
    layers = sum(1 for module in model.modules() if not list(module.children()))
    cost = SECONDS_AT_LEAST + SECONDS_A_LAYER * layers
    return lambda seconds: SAVED_SHARE * seconds > cost
