"""How long a certification takes on this machine, measured in forward passes of its own network before it starts."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from smoothcert.certification.settings import CertifySettings
from smoothcert.io.text import counted, duration, rate
from smoothcert.models.ensemble import Ensemble
from smoothcert.models.precision import resolve_precision
from smoothcert.smoothing.votes import VoteCounter

LONG_ENOUGH = 0.3
"""Seconds of a reliable measurement."""
STALLED = 3.0
LONG = 600.0
"""Seconds of a certification that is worth a warning; shorter ones are measured only roughly."""
SHORT = 300.0
"""Seconds that a cheaper alternative takes at most."""
FEWEST_IMAGES = 100
"""Images of an alternative, at least: fewer say little about a data set."""
SKIPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True, slots=True)
class CertificationEstimate:
    """The largest time that `images` take with `votes` votes each: rules that stop early need less."""

    images: int
    votes: int
    seconds_per_vote: float
    faster_options: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.images * self.votes * self.seconds_per_vote

    @property
    def long(self) -> bool:
        return self.seconds > LONG

    def in_words(self, settings: CertifySettings, images: int) -> str:
        """Return how long a certification of the data set with `images` images takes, and a cheaper alternative."""
        most = "at most " if settings.radii or settings.radius_loss is not None or settings.label_aware else ""
        text = (
            f"{most}about {duration(self.seconds)} on this machine ({counted(self.images, 'image')}, "
            f"{self.votes:,} votes each, {rate(1 / self.seconds_per_vote)} votes/s)"
        )
        if self.faster_options:
            text += f"; {' '.join(self.faster_options)} may be several times faster"
        cheaper = cheaper_settings(settings, images, self.seconds_per_vote)
        if cheaper is None:
            return f"{text}; a GPU or several machines (--shard) are faster"
        fewer, seconds = cheaper
        return f"{text}; --skip {fewer.skip} --n {fewer.n}: about {duration(seconds)}"


def faster_options(counter: VoteCounter, device: torch.device) -> tuple[str, ...]:
    """The options with which `counter` usually votes faster on `device`, if this is a GPU.

    A certificate is about the network in the precision in which it votes, so no option is chosen without the user.
    """
    if device.type != "cuda" or not isinstance(counter.classifier, nn.Module):
        return ()
    from smoothcert.models.kernels.resnet_evaluation import FusedResNet  # registers an operator, which takes a while

    precision = resolve_precision("auto", device)
    modules = list(counter.classifier.modules())
    has_kernels = any(isinstance(module, FusedResNet) for module in modules)
    has_consensus = any(isinstance(module, Ensemble) and module.consensus is not None for module in modules)
    bits = () if counter.dtype != torch.float32 or precision == "fp32" else ("--precision", precision)
    return bits if counter.compiled or has_kernels or has_consensus else (*bits, "--compile")


def seconds_per_vote(counter: VoteCounter, image: Tensor, votes: int) -> float:
    """Return the measured seconds of one of `votes` votes on `image` (float32 [1, ...], on the device).

    The measurement takes about a second, and a few milliseconds if all votes together clearly take less than LONG.
    """

    def vote(size: int) -> None:
        replace(counter, batch_size=size).count(image, [(0, 0)], "estimate", size)

    # A compiled network is compiled anew for each size.
    start = counter.batch_size if counter.compiled else 2
    return seconds_per_input(vote, counter.batch_size, image.device, start, lambda each: each * votes < LONG)


def seconds_per_input(
    work: Callable[[int], None],
    most: int,
    device: torch.device,
    start: int = 2,
    enough: Callable[[float], bool] = lambda seconds: False,
) -> float:
    """Double the batch, from `start` to `most`, until a call takes LONG_ENOUGH; return its seconds per input.

    Small batches take more time per input. If `enough` of this time is true, the measurement ends with it. A call with
    STALLED times as much per input as one with fewer inputs does not count: other programs have held it up.
    """
    size, each = min(start, most), math.inf
    work(size)  # the first call sets things up
    while True:
        seconds = min(_timed(work, size, device) for _ in range(2))
        stalled = seconds / size > STALLED * each
        each = each if stalled else seconds / size
        if (seconds >= LONG_ENOUGH and not stalled) or size == most or enough(each):
            return each
        size = min(2 * size, most)


def _timed(work: Callable[[int], None], size: int, device: torch.device) -> float:
    started = time.perf_counter()
    work(size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def cheaper_settings(
    settings: CertifySettings, images: int, seconds_per_vote: float
) -> tuple[CertifySettings, float] | None:
    """Return settings that certify some of the `images` of the data set in at most SHORT seconds, and their seconds.

    n is 10,000 or, if that takes too long, 1,000, and skip is as small as possible. None if no such settings are
    cheaper.
    """
    for n in (10_000, 1_000):
        for skip in SKIPS:
            fewer = settings.model_copy(update={"n": min(n, settings.n), "skip": skip * settings.skip})
            chosen = len(fewer.selection(images).indices)
            seconds = chosen * (fewer.n0 + fewer.n) * seconds_per_vote
            if chosen < FEWEST_IMAGES:
                break
            if seconds <= SHORT:
                return fewer, seconds
    return None
