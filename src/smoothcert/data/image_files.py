"""Images that stay in files and are decoded by worker processes when needed: for sets too large for memory."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from smoothcert.data.decoding import Decoder
from smoothcert.data.images import Normalization, in_unit_interval
from smoothcert.errors import RequestError, WorkError

MOST_WORKERS = 16
CPU = torch.device("cpu")
BATCHES_AHEAD = 4  # that each worker has ready


def default_workers() -> int:
    """One worker for each core that this process may use, at most 16, shared with the other processes of a run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), MOST_WORKERS))


@dataclass(frozen=True, slots=True)
class FileList:
    """Paths below one folder, kept as one block of bytes.

    A million Python strings would be copied bit by bit into every worker, since counting references writes to them.
    """

    root: Path
    names: NDArray[np.bytes_]

    @classmethod
    def of(cls, root: Path, names: Sequence[str]) -> "FileList":
        return cls(root, np.array([os.fsencode(name) for name in names], dtype=np.bytes_))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Path:
        return self.root / os.fsdecode(bytes(self.names[index]))


class _Batches(Dataset[Tensor | WorkError]):
    """Item i is batch i, decoded: uint8 [b, c, h, w]. What a worker does; holds nothing that cannot be pickled.

    Torch would hand on an exception of a worker with its traceback in the message, so a WorkError is returned.
    """

    def __init__(self, files: FileList, decoder: Decoder, rows: NDArray[np.int64], seed: int | None) -> None:
        self.files, self.decoder, self.rows, self.seed = files, decoder, rows, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> Tensor | WorkError:
        row = self.rows[position]
        pixels = torch.empty((len(row), *self.decoder.shape), dtype=torch.uint8)
        try:
            for place, index in zip(pixels, row.tolist(), strict=True):
                place.copy_(torch.from_numpy(self._decoded(index)))
        except WorkError as error:
            return error
        return pixels

    def _decoded(self, index: int) -> NDArray[np.uint8]:
        if self.seed is None:
            return self.decoder.centre(self.files[index])
        return self.decoder.random(self.files[index], np.random.default_rng((self.seed, index)))


@dataclass(frozen=True, slots=True, eq=False)
class ImageFiles:
    """One split of a data set in files: implements `Images`; pixels are decoded anew for each batch.

    `labels` is int64 [n] on the CPU, one class in [0, num_classes) for each of `files`. With `augment`, `batches`
    gives random crops, drawn from (seed, index of the image): neither processes nor workers change them. `batch`
    always gives the centre. `workers` processes decode ahead (None: `default_workers()`, 0: this process decodes).
    """

    files: FileList = field(repr=False)
    labels: Tensor = field(repr=False)
    num_classes: int
    name: str
    split: str
    decoder: Decoder
    normalization: Normalization | None = None
    augment: bool = False
    class_names: tuple[str, ...] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    relabelled: bool = field(default=False, repr=False)
    workers: int | None = None
    start_method: str | None = None
    """How workers are started (fork, spawn, forkserver); None: as the system usually does."""
    device: torch.device = CPU

    def __post_init__(self) -> None:
        title = f"data set {self.name!r}, split {self.split!r}"
        if len(self.labels) != len(self.files):
            raise RequestError(
                f"{title}: expected as many labels as files, got {len(self.files)} files and "
                f"{len(self.labels)} labels; give one label for each file"
            )
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < self.num_classes:
            raise RequestError(f"{title}: expected labels in 0..{self.num_classes - 1}, got others; correct them")
        if self.workers is not None and self.workers < 0:
            raise RequestError(f"workers: expected 0 (none) or more, got {self.workers}; raise it")

    def __len__(self) -> int:
        """The number of images."""
        return len(self.files)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (c, h, w) of one image as a batch gives it."""
        return self.decoder.shape

    def to(self, device: torch.device | str) -> "ImageFiles":
        """The same data, whose batches come on `device`."""
        return replace(self, device=torch.device(device))

    def subset(self, indices: Tensor) -> "ImageFiles":
        """The files and labels at `indices` (int64 [m]), in that order, as data of their own."""
        indices = indices.cpu()
        return replace(
            self, files=FileList(self.files.root, self.files.names[indices.numpy()]), labels=self.labels[indices]
        )

    def digest(self) -> str:
        """SHA-256 of shape and labels, and of names and sizes of the files, in order: pixels would take an epoch."""
        digest = hashlib.sha256(f"{list(self.shape)} {self.num_classes}\n".encode())
        digest.update(self.labels.contiguous().numpy().data)
        for index, name in enumerate(self.files.names):
            path = self.files[index]
            digest.update(b"%d %s\n" % (path.stat().st_size if path.is_file() else -1, bytes(name)))
        return digest.hexdigest()

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See `Images.batch`; decoded in this process: certification asks for few images at a time."""
        indices = indices.cpu()
        pixels = _Batches(self.files, self.decoder, indices.numpy()[None], None)[0]
        return self._on_device(pixels, indices)

    def batches(self, order: Tensor, share: slice, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Images.batches`."""
        rows = order[:, share].cpu()
        workers = default_workers() if self.workers is None else self.workers
        loader = DataLoader(
            _Batches(self.files, self.decoder, rows.numpy(), seed if self.augment else None),
            batch_size=None,  # an item is a batch already
            shuffle=False,
            num_workers=workers,
            prefetch_factor=BATCHES_AHEAD if workers else None,
            multiprocessing_context=self.start_method if workers else None,
            pin_memory=self.device.type == "cuda",
            # The loader draws a seed for its workers; from here, so that the caller's random numbers stay as they are.
            generator=torch.Generator().manual_seed(seed),
        )
        for row, pixels in zip(rows, _one_line_failures(loader), strict=True):
            yield self._on_device(pixels, row)

    def _on_device(self, pixels: Tensor | WorkError, indices: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(pixels, WorkError):
            raise pixels
        labels = self.labels.index_select(0, indices)
        # Bytes travel, a quarter of what floats would take.
        return in_unit_interval(pixels.to(self.device, non_blocking=True)), labels.to(self.device, non_blocking=True)


def _one_line_failures(loader: DataLoader[Tensor | WorkError]) -> Iterator[Tensor | WorkError]:
    """The batches of `loader`; a worker that dies, usually for want of memory, is one clear line."""
    try:
        yield from loader
    except RuntimeError as error:
        if isinstance(error, WorkError) or "DataLoader worker" not in str(error):
            raise
        raise WorkError(
            "expected the processes that decode images to go on, one of them was ended from outside, probably for "
            "want of memory or of shared memory; use fewer workers or smaller batches"
        ) from error
