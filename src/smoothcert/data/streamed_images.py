"""Images that are read again for each batch, by worker processes: for data sets that do not fit into memory."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from smoothcert.data.datasets import Normalization
from smoothcert.data.images import Augment, ImageData, check_labels, in_unit_interval, steps_at_once
from smoothcert.errors import RequestError, WorkError

MOST_WORKERS = 16
BATCHES_AHEAD = 4  # that each worker prepares
CPU = torch.device("cpu")

PixelsOrError = Tensor | WorkError | RequestError
"""A batch, or the reason why there is none."""


def default_workers() -> int:
    """One worker for each core that this process may use, at most 16, shared with the other processes of a run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), MOST_WORKERS))


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamedImages(Dataset[tuple[Tensor, int]], ABC):
    """One split of a data set whose images are read when they are needed, with the methods of `ImageData`.

    `labels` is int64 [n] on the CPU, with classes in [0, num_classes). `workers` processes read ahead (None:
    `default_workers()`, 0: this process reads).
    """

    labels: Tensor = field(repr=False)
    num_classes: int
    name: str
    split: str
    normalization: Normalization | None = None
    class_names: tuple[str, ...] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    relabelled: bool = field(default=False, repr=False)
    augment: Augment | None = field(default=None, repr=False)
    """Applied on the device to batches for training, after what `read` does."""
    workers: int | None = None
    device: torch.device = CPU

    def __post_init__(self) -> None:
        check_labels(f"data set {self.name!r}, split {self.split!r}", self.labels, len(self), self.num_classes)

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """See `ImageData.__getitem__`."""
        position = range(len(self))[index]  # refuses an index beyond the end
        images, labels = self.batch(torch.tensor([position], device="cpu"))
        return images[0], int(labels[0])

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]: ...

    @property
    def file_names(self) -> tuple[str, ...] | None:
        """See `ImageData.file_names`."""
        return None

    @abstractmethod
    def digest(self) -> str:
        """SHA-256 of labels and of what identifies the images."""

    @abstractmethod
    def subset(self, indices: Tensor | Sequence[int]) -> Self:
        """See `ImageData.subset`."""

    @abstractmethod
    def read(self, index: int, seed: int | None) -> Tensor:
        """Image `index`, uint8 or float32 [c, h, w]; None as seed: without augmentation, the same in every call.

        Random augmentation depends on (seed, index) alone: neither processes nor workers change it. An image that
        cannot be used is a WorkError or a RequestError.
        """

    def to(self, device: torch.device | str) -> Self:
        """The same data, whose batches are on `device`."""
        return replace(self, device=torch.device(device))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See `ImageData.batch`; read in this process: certification asks for few images at a time."""
        indices = torch.as_tensor(indices, device="cpu")
        return self._on_device(_Batches(self, indices.numpy()[None], None)[0], indices)

    def batches(self, order: Tensor, share: slice, seed: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """See `ImageData.batches`."""
        rows = order[:, share].cpu()
        workers = default_workers() if self.workers is None else self.workers
        loader = DataLoader(
            _Batches(self, rows.numpy(), seed),
            batch_size=None,  # an item is a batch already
            shuffle=False,
            num_workers=workers,
            prefetch_factor=BATCHES_AHEAD if workers else None,
            pin_memory=self.device.type == "cuda",
            # The loader draws a seed for its workers from here, so that the caller's random numbers do not change.
            generator=torch.Generator().manual_seed(seed or 0),
        )
        batches = (self._on_device(pixels, row) for row, pixels in zip(rows, _one_line_failures(loader), strict=True))
        if self.augment is None or seed is None:
            yield from batches
            return
        generator = torch.Generator(self.device).manual_seed(seed)
        draws = (  # in the order of `ImageData.batches`
            uniform
            for some in torch.split(order, steps_at_once(order, self.shape))
            for uniform in torch.rand((*some.shape, 3), generator=generator, device=self.device)[:, share]
        )
        for (images, labels), uniform in zip(batches, draws, strict=True):
            yield self.augment(images, uniform), labels

    def _on_device(self, pixels: PixelsOrError, indices: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(pixels, Tensor):
            raise pixels
        labels = self.labels.index_select(0, indices).to(self.device, non_blocking=True)
        images = pixels.to(self.device, non_blocking=True)  # bytes, where they are bytes: a quarter of the traffic
        return (in_unit_interval(images) if images.dtype == torch.uint8 else images), labels


Images = ImageData | StreamedImages
"""One split of a data set, as training and certification see it: on a device, or read when needed."""


class _Batches(Dataset[PixelsOrError]):
    """Item i is batch i: [b, c, h, w].

    Torch would pass on an exception of a worker with its traceback in the message, so our errors are returned.
    """

    def __init__(self, images: StreamedImages, rows: NDArray[np.int64], seed: int | None) -> None:
        self.images, self.rows, self.seed = images, rows, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> PixelsOrError:
        try:
            return torch.stack([self.images.read(index, self.seed) for index in self.rows[position].tolist()])
        except (WorkError, RequestError) as error:
            return error


def _one_line_failures(loader: DataLoader[PixelsOrError]) -> Iterator[PixelsOrError]:
    """The batches of `loader`; a worker that dies, usually for lack of memory, is one clear line."""
    try:
        with torch.device("cpu"):  # that of its seed, also where a user has chosen another default
            batches = iter(loader)
        yield from batches
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise WorkError(
            "expected the processes that read images to continue, but one of them was killed, probably because memory "
            "or shared memory ran out; use fewer workers or smaller batches"
        ) from error
