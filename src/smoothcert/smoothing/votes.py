"""The hot loop: votes of a classifier under noise, counted on the device.

The noise of an image is divided into blocks; each block has its own key, which depends on (seed, image, stage, block)
alone. Blocks of several images fill one forward pass of a fixed shape, so the votes of an image do not depend on the
other images of a batch, on their order, on shards or on a resume. They do depend on the number of draws in a block:
NOISE_BLOCK, or the batch size or the number of votes if that is smaller.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from smoothcert.classifier import Classifier, check_logits, evaluating, image_layout, logits_of
from smoothcert.distributed import enough_memory, out_of_memory
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import named_error
from smoothcert.noise import Noise
from smoothcert.smoothing.integer_noise import IntegerGaussian, pixels

Vote = Callable[[Tensor, Tensor, Tensor | None, torch.memory_format], Tensor]
Stage = Literal["select", "estimate", "predict", "coin"]
STAGES: dict[Stage, int] = {"select": 0, "estimate": 1, "predict": 2, "coin": 3}
NOISE_BLOCK = {"cpu": 250, "cuda": 2000}
"""Number of draws that share a key, by device: on the CPU a core fills a block, on a GPU one launch does."""
BATCH_SIZE = {"cpu": 500, "cuda": 20_000}
"""Default number of noisy images per forward pass: what fits the caches of a CPU, what fills a GPU."""
PIXELS_AT_FULL_BATCH = 3 * 32 * 32


def noise_block(device: torch.device) -> int:
    """Number of draws in a noise block on `device`."""
    return NOISE_BLOCK.get(device.type, NOISE_BLOCK["cuda"])


def default_batch_size(device: torch.device, shape: Sequence[int] = (1, 28, 28)) -> int:
    """Default number of noisy images of `shape` per forward pass on `device`: fewer if they are large."""
    most = BATCH_SIZE.get(device.type, BATCH_SIZE["cuda"])
    return max(8, min(most, most * PIXELS_AT_FULL_BATCH // math.prod(shape)))


def fitting_batch_size(classifier: Classifier, batch_size: int, example: Tensor) -> int:
    """`batch_size`, halved until a forward pass over that many copies of `example` [...] fits into memory."""
    while True:
        try:
            with torch.no_grad(), evaluating(classifier):
                classifier(example.expand(batch_size, *example.shape).contiguous())
            return batch_size
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if batch_size == 1:
                raise
            batch_size //= 2


def fitting_into_memory(batch_size: int) -> AbstractContextManager[None]:
    """Report an allocation that fails as one line."""
    text = f"batch-size: {batch_size:,} noisy images in a forward pass do not fit into memory; "
    return enough_memory(RequestError(f"{text}give a smaller --batch-size"))


@contextmanager
def failures_of_a_batch(batch_size: int) -> Iterator[None]:
    """Report what the code of a classifier raises in a forward pass as one line, except that memory runs out."""
    try:
        yield
    except (RequestError, WorkError):
        raise
    except (Exception, SystemExit) as error:  # a user's code may fail in any way
        if out_of_memory(error):
            raise
        raise WorkError(
            f"the classifier failed on a batch of {batch_size:,} noisy images ({named_error(error)}); correct it: if "
            "it takes fewer at once, let it divide the batch, or give a smaller --batch-size (serve: --max-batch)"
        ) from error


def block_keys(seed: tuple[int, int], stage: Stage, blocks: int) -> list[int]:
    """A 64-bit key for each noise block of a stage of the image whose `seed` is (run seed, image index).

    Neither stages nor images share a key, except by chance (keys are 64-bit hashes), so their votes are independent.
    """
    run, index = seed
    if 2**32 <= index < 2**128:  # of a fixed width: the words of index and stage are not those of another pair
        index += 2**160
    return np.random.SeedSequence([run, index, STAGES[stage]]).generate_state(blocks, np.uint64).tolist()  # type: ignore[no-any-return]


def coin_of(seed: tuple[int, int]) -> float:
    """The coin of the image whose `seed` is (run seed, image index), for a randomized bound: independent of its votes.

    A multiple of 2^-53 in (0, 1], so that P(coin <= u) is at most u.
    """
    return ((block_keys(seed, "coin", 1)[0] >> 11) + 1) * 2.0**-53


@dataclass(frozen=True)
class VoteCounter:
    """Counts the votes of `classifier` (float inputs [n, ...] -> logits) under `noise`.

    Every forward pass has the shape [batch_size, ...]: slots that are not needed are computed and not counted.
    Counting stays on the device; the host waits once per call of `count`.
    """

    classifier: Classifier
    noise: Noise
    num_classes: int
    batch_size: int = BATCH_SIZE["cpu"]
    dtype: torch.dtype = torch.float32
    sound: IntegerGaussian | None = None
    """Integer noise instead of `noise`, for certificates that hold in floating point, too (see `integer_noise`)."""
    compiled: bool = False
    """Whether torch.compile compiles everything after the drawing of noise."""

    def block(self, device: torch.device, n: int) -> int:
        """Number of draws that share a key if n votes are drawn at once on `device`."""
        return min(noise_block(device), n, self.batch_size)

    @torch.no_grad()
    def count(
        self,
        images: Tensor,
        seeds: Sequence[tuple[int, int]],
        stage: Stage,
        n: int,
        *,
        first_block: int | Sequence[int] = 0,
    ) -> np.ndarray:
        """Votes per class, int64 [k, num_classes], n for each of `images` (float32 [k, ...], on the device).

        `first_block` skips noise blocks that earlier calls have drawn, for votes that are drawn in several looks: one
        number, or one per image.
        """
        block = self.block(images.device, n)
        slots = self.batch_size // block
        blocks = -(-n // block)
        first = [first_block] * len(seeds) if isinstance(first_block, int) else first_block
        keys = [
            key
            for seed, skipped in zip(seeds, first, strict=True)
            for key in block_keys(seed, stage, skipped + blocks)[skipped:]
        ]
        owner, size = _slot_plan(len(images), n, block, slots, images.device)
        position = torch.arange(block, device=images.device)
        shape = (slots, block, *images.shape[1:])
        noisy = torch.zeros(shape, device=images.device, dtype=torch.float32 if self.sound is None else torch.int16)
        base = images if self.sound is None else pixels(images)
        table = None if self.sound is None else self.sound.table(images.device)
        fill = self.noise.fill if self.sound is None else self.sound.fill
        bins = self.num_classes + 1
        counts = torch.zeros(len(images) * bins, dtype=torch.int64, device=images.device)
        layout = image_layout(self.classifier)
        # On the CPU one thread per core draws (numpy releases the interpreter lock); on a GPU a call launches a kernel.
        pool = ThreadPoolExecutor(torch.get_num_threads()) if images.device.type == "cpu" else None
        each: Callable[..., Iterable[None]] = map if pool is None else pool.map
        voting = failures_of_a_batch(self.batch_size)
        with voting, evaluating(self.classifier), _own_precision(images.device), pool or nullcontext():
            for batch in range(len(owner)):
                list(each(fill, noisy, keys[batch * slots : (batch + 1) * slots]))
                top = self._top_classes(noisy, base[owner[batch]].unsqueeze(1), table, layout)
                counted = (position < size[batch].unsqueeze(1)).long()
                counts.scatter_add_(0, (top + owner[batch].unsqueeze(1) * bins).flatten(), counted.flatten())
        votes: np.ndarray = counts.view(len(images), bins).cpu().numpy()
        if unknown := int(votes[:, -1].sum()):
            raise WorkError(
                f"the classifier gave NaN for {unknown:,} of {len(images) * n:,} noisy images, which is no vote; "
                "noisy pixels leave [0, 1]: clip them, x.clamp(0, 1), before a root or logarithm, or try precision fp32"
            )
        return np.ascontiguousarray(votes[:, :-1])

    @torch.no_grad()
    def classes(self, images: Tensor) -> Tensor:
        """The class of each of `images` (float32 [k, ...]) without noise, int64 [k]."""
        layout = image_layout(self.classifier)
        voting = failures_of_a_batch(min(len(images), self.batch_size))
        with voting, evaluating(self.classifier), _own_precision(images.device):
            return torch.cat([self._logits(part, layout).argmax(1) for part in torch.split(images, self.batch_size)])

    @cached_property
    def _top_classes(self) -> Vote:
        if not self.compiled:
            return self._vote
        compiled: Vote = torch.compile(self._vote, dynamic=False, mode="max-autotune-no-cudagraphs")
        return compiled

    def _vote(self, noise: Tensor, images: Tensor, table: Tensor | None, layout: torch.memory_format) -> Tensor:
        """The class of each noisy image [slots, block]; num_classes if a logit is NaN.

        `noise` [slots, block, ...] may be overwritten, `images` are [slots, 1, ...]. Integer noise is added as
        integers, and floats are looked up in `table`.
        """
        if self.sound is None or table is None:
            inputs = noise.add_(images)
        else:
            inputs = self.sound.noisy_floats(images, noise, table)
        logits = self._logits(inputs.flatten(0, 1), layout)
        top = logits.argmax(1, keepdim=True)  # the index of a NaN, if there is one
        return torch.where(logits.gather(1, top).isnan(), self.num_classes, top).view(inputs.shape[:2])

    def _logits(self, batch: Tensor, layout: torch.memory_format) -> Tensor:
        """Logits [batch_size, num_classes]; noise is added in float32, whatever the precision of the network."""
        logits = logits_of(self.classifier(batch.to(self.dtype, memory_format=layout)))
        check_logits(logits, len(batch), self.num_classes)
        return logits


def _own_precision(device: torch.device) -> torch.autocast:
    """Switch an autocast of the caller off: votes have the precision that their certificates record."""
    return torch.autocast(device.type, enabled=False)


def _slot_plan(images: int, n: int, block: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The image of each slot of each forward pass and the number of its votes that count, both int64 [passes, slots].

    The last block of an image may count fewer than `block` votes; slots that pad the last pass count none.
    """
    blocks = -(-n // block)
    passes = -(-images * blocks // slots)
    owner = torch.zeros(passes * slots, dtype=torch.int64, device="cpu")
    size = torch.zeros(passes * slots, dtype=torch.int64, device="cpu")
    owner[: images * blocks] = torch.arange(images, device="cpu").repeat_interleave(blocks)
    size[: images * blocks] = (n - block * torch.arange(blocks, device="cpu")).clamp(max=block).repeat(images)
    return owner.view(passes, slots).to(device), size.view(passes, slots).to(device)
