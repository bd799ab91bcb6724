"""Images in files, decoded when they are needed."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smoothcert.data.decoding import Decoder
from smoothcert.data.streamed_images import StreamedImages


@dataclass(frozen=True, slots=True)
class FileList:
    """Paths below one folder, stored as one block of bytes.

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


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageFiles(StreamedImages):
    """One split of a data set in files. With `augment`, `batches` gives random crops; `batch` always the centre."""

    files: FileList = field(repr=False)
    decoder: Decoder
    augment: bool = False

    def __len__(self) -> int:
        """The number of images."""
        return len(self.files)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (c, h, w) of one image in a batch."""
        return self.decoder.shape

    def read(self, index: int, seed: int | None) -> Tensor:
        """See `StreamedImages.read`."""
        if seed is None or not self.augment:
            return torch.from_numpy(self.decoder.centre(self.files[index]))
        return torch.from_numpy(self.decoder.random(self.files[index], np.random.default_rng((seed, index))))

    def digest(self) -> str:
        """SHA-256 of shape and labels, and of names and sizes of the files, in order: pixels would take an epoch."""
        digest = hashlib.sha256(f"{list(self.shape)} {self.num_classes}\n".encode())
        digest.update(self.labels.contiguous().numpy().data)
        for index, name in enumerate(self.files.names):
            path = self.files[index]
            digest.update(b"%d %s\n" % (path.stat().st_size if path.is_file() else -1, bytes(name)))
        return digest.hexdigest()
