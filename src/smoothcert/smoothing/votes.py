"""The hot loop: how a classifier votes under noise, counted on the device.

The noise of an image is cut into blocks; each block has a key of its own that depends on
(seed, image, stage, block) alone. Blocks of several images fill one forward pass of a fixed shape, so the votes
of an image do not depend on which images stand beside it, on the order, on shards or on a resume.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from smoothcert.classifier import Classifier as Classifier
from smoothcert.classifier import evaluating, image_layout
from smoothcert.errors import RequestError, WorkError
from smoothcert.noise import Noise
from smoothcert.smoothing.certificate import MOST_VOTES
from smoothcert.smoothing.integer_noise import IntegerGaussian, pixels

Vote = Callable[[Tensor, Tensor, Tensor | None, torch.memory_format], Tensor]
Stage = Literal["select", "estimate", "predict"]
STAGES: dict[Stage, int] = {"select": 0, "estimate": 1, "predict": 2}
NOISE_BLOCK = {"cpu": 250, "cuda": 2000}
"""Noise draws that share a key, by device: on the CPU each core fills a block, on a GPU each block is a launch."""
BATCH_SIZE = {"cpu": 500, "cuda": 20_000}
"""Noisy images in a forward pass by default: what stays in the caches of a CPU, what fills a GPU."""
PIXELS_AT_FULL_BATCH = 3 * 32 * 32


def noise_block(device: torch.device) -> int:
    """Draws in a noise block on `device`."""
    return NOISE_BLOCK.get(device.type, NOISE_BLOCK["cuda"])


def default_batch_size(device: torch.device, shape: Sequence[int] = (1, 28, 28)) -> int:
    """Noisy images of `shape` in a forward pass on `device`: fewer of them the larger they are."""
    most = BATCH_SIZE.get(device.type, BATCH_SIZE["cuda"])
    return max(8, min(most, most * PIXELS_AT_FULL_BATCH // math.prod(shape)))


def fitting_batch_size(classifier: Classifier, batch_size: int, example: Tensor) -> int:
    """`batch_size`, halved until a forward pass over so many copies of `example` [c, h, w] fits into memory."""
    while True:
        try:
            with torch.no_grad(), evaluating(classifier):
                classifier(example.expand(batch_size, -1, -1, -1).contiguous())
            return batch_size
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if batch_size == 1:
                raise
            batch_size //= 2


@contextmanager
def fitting_into_memory(batch_size: int) -> Iterator[None]:
    """Turns an allocation that fails into one line for the user."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        signs = ("allocate memory", "Storage size calculation overflowed", "not enough memory")
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in signs):
            raise RequestError(
                f"batch-size: {batch_size:,} noisy images in a forward pass do not fit into memory; "
                "give a smaller --batch-size"
            ) from error
        raise


def block_keys(seed: tuple[int, int], stage: Stage, blocks: int) -> list[int]:
    """A 64-bit key for each noise block of a stage of the image whose `seed` is (run seed, image index).

    Stages never share a key, so their votes are independent.
    """
    words = np.random.SeedSequence([*seed, STAGES[stage]]).generate_state(blocks, np.uint64)
    return [int(word) for word in words]


@dataclass(frozen=True)
class VoteCounter:
    """Counts votes of `classifier` (images in [0, 1], NCHW float -> logits) under `noise`.

    Every forward pass has the shape [batch_size, c, h, w]: slots beyond the work at hand are computed and not
    counted. Counting stays on the device; the host waits once per call of `count`.
    """

    classifier: Classifier
    noise: Noise
    num_classes: int
    batch_size: int = BATCH_SIZE["cpu"]
    dtype: torch.dtype = torch.float32
    sound: IntegerGaussian | None = None
    """Integer noise in place of `noise`, for certificates that hold in floating point too (see `integer_noise`)."""
    compiled: bool = False
    """Whether torch.compile works on all that follows the drawing of noise."""

    @torch.no_grad()
    def count(
        self, images: Tensor, seeds: Sequence[tuple[int, int]], stage: Stage, n: int, *, first_block: int = 0
    ) -> np.ndarray:
        """Votes per class, int64 [k, num_classes], n for each of `images` (float32 [k, c, h, w], on the device).

        `first_block` skips noise blocks that earlier calls have drawn, for votes that come in several looks.
        """
        if not 1 <= n <= MOST_VOTES:
            raise RequestError(f"n: expected 1 to {MOST_VOTES:,} votes, got {n}")
        block = min(noise_block(images.device), n, self.batch_size)
        slots = self.batch_size // block
        blocks = -(-n // block)
        keys = [key for seed in seeds for key in block_keys(seed, stage, first_block + blocks)[first_block:]]
        owner, size = _slot_plan(len(images), n, block, slots, images.device)
        position = torch.arange(block, device=images.device)
        shape = (slots, block, *images.shape[1:])
        noisy = torch.zeros(shape, device=images.device, dtype=torch.float32 if self.sound is None else torch.int16)
        base = images if self.sound is None else pixels(images)
        table = None if self.sound is None else self.sound.table(device=images.device)
        fill = self.noise.fill if self.sound is None else self.sound.fill
        bins = self.num_classes + 1
        counts = torch.zeros(len(images) * bins, dtype=torch.int64, device=images.device)
        layout = image_layout(self.classifier)
        with evaluating(self.classifier), _each_slot(images.device) as each_slot:
            for batch in range(len(owner)):
                each_slot(fill, noisy, keys[batch * slots : (batch + 1) * slots])
                top = self._top_classes(noisy, base[owner[batch]].unsqueeze(1), table, layout)
                counted = (position < size[batch].unsqueeze(1)).long()
                counts.scatter_add_(0, (top + owner[batch].unsqueeze(1) * bins).flatten(), counted.flatten())
        found: np.ndarray = counts.view(len(images), bins).cpu().numpy()
        if unknown := int(found[:, -1].sum()):
            raise WorkError(
                f"the classifier gave NaN for {unknown:,} of {len(images) * n:,} noisy images, which is no vote; "
                "certify a network that gives numbers, or try precision fp32"
            )
        return np.ascontiguousarray(found[:, :-1])

    @torch.no_grad()
    def classes(self, images: Tensor) -> Tensor:
        """The class of each of `images` (float32 [k, c, h, w]) as it is, int64 [k]: no noise is added."""
        layout = image_layout(self.classifier)
        with evaluating(self.classifier):
            return torch.cat([self._logits(part, layout).argmax(1) for part in torch.split(images, self.batch_size)])

    @cached_property
    def _top_classes(self) -> Vote:
        if not self.compiled:
            return self._vote
        compiled: Vote = torch.compile(self._vote, dynamic=False, mode="max-autotune-no-cudagraphs")
        return compiled

    def _vote(self, noise: Tensor, images: Tensor, table: Tensor | None, layout: torch.memory_format) -> Tensor:
        """The class of each noisy image [slots, block], num_classes where a logit is NaN.

        `noise` [slots, block, c, h, w] may be overwritten, `images` are [slots, 1, c, h, w]. The sound path adds
        integers and looks floats up in `table`.
        """
        if self.sound is None or table is None:
            inputs = noise.add_(images)
        else:
            inputs = self.sound.noisy_floats(images, noise, table)
        logits = self._logits(inputs.flatten(0, 1), layout)
        top = logits.argmax(1, keepdim=True)  # that of a NaN, if there is one
        return torch.where(logits.gather(1, top).isnan(), self.num_classes, top).view(inputs.shape[:2])

    def _logits(self, batch: Tensor, layout: torch.memory_format) -> Tensor:
        """Logits [batch_size, num_classes]; the noise was added in float32 whatever the network's precision."""
        logits = self.classifier(batch.to(self.dtype, memory_format=layout))
        expected = (len(batch), self.num_classes)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected:
            given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise RequestError(
                f"the classifier gave {given} for {len(batch)} images, expected logits of shape {list(expected)}; "
                "set num_classes to the number of its outputs"
            )
        return logits


def _slot_plan(images: int, n: int, block: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which image owns each slot of each forward pass and how many of its votes count, both int64 [passes, slots].

    An image's last block may count fewer than `block` votes; slots that fill up the last pass count none.
    """
    blocks = -(-n // block)
    passes = -(-images * blocks // slots)
    owner = torch.zeros(passes * slots, dtype=torch.int64)
    size = torch.zeros(passes * slots, dtype=torch.int64)
    owner[: images * blocks] = torch.arange(images).repeat_interleave(blocks)
    size[: images * blocks] = (n - block * torch.arange(blocks)).clamp(max=block).repeat(images)
    return owner.view(passes, slots).to(device), size.view(passes, slots).to(device)


@contextmanager
def _each_slot(
    device: torch.device,
) -> Iterator[Callable[[Callable[[Tensor, int], None], Tensor, Sequence[int]], None]]:
    """A function that calls fill(noisy[slot], key) for each key: on the CPU one thread a core draws (numpy draws
    outside the interpreter lock), elsewhere the calls only launch kernels."""
    if device.type != "cpu":
        yield lambda fill, noisy, keys: _run(map(fill, noisy, keys))
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        yield lambda fill, noisy, keys: _run(pool.map(fill, noisy, keys))


def _run(results: Iterable[None]) -> None:
    for _ in results:
        pass


def select_and_estimate(
    counter: VoteCounter, images: Tensor, seeds: Sequence[tuple[int, int]], n0: int, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The two vote counts of CERTIFY, each [k, num_classes]: n0 that choose the class, then n fresh ones."""
    return counter.count(images, seeds, "select", n0), counter.count(images, seeds, "estimate", n)
