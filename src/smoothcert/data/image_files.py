"""Images in files, decoded when they are needed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smoothcert.data.decoding import Decoder, ImageBytes, Pixels, image_head
from smoothcert.data.images import indices_within, labels_digest
from smoothcert.data.streamed_images import StreamedImages
from smoothcert.errors import RequestError

COMPOSITED = "composited on black where transparent"


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

    def relative(self) -> tuple[str, ...]:
        """The names below the folder, such as "cat/12.png"."""
        return tuple(os.fsdecode(bytes(name)) for name in self.names)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageFiles(StreamedImages):
    """One split of a data set in files.

    With `random_parts`, `batches` gives random parts of the images, scaled and half of them mirrored, as papers train
    on ImageNet; without it, as `batch` always does, the centre.
    """

    files: FileList = field(repr=False)
    decoder: Decoder
    random_parts: bool = False

    def __len__(self) -> int:
        """The number of images."""
        return len(self.files)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (c, h, w) of one image in a batch."""
        return self.decoder.shape

    @cached_property
    def file_names(self) -> tuple[str, ...]:
        """The file of each image, such as "cat/12.png"."""
        return self.files.relative()

    def subset(self, indices: Tensor | Sequence[int]) -> Self:
        """See `ImageData.subset`."""
        indices = indices_within(indices, len(self))
        files = FileList(self.files.root, self.files.names[indices.numpy()])
        return replace(self, files=files, labels=self.labels[indices], split=f"part of {self.split}")

    def read(self, index: int, seed: int | None) -> Tensor:
        """See `StreamedImages.read`."""
        if seed is None or not self.random_parts:
            return torch.from_numpy(self.decoder.centre(self.files[index]))
        return torch.from_numpy(self.decoder.random(self.files[index], np.random.default_rng((seed, index))))

    def digest(self) -> str:
        """SHA-256 of shape and labels, and of names and sizes of the files, in order: pixels would take an epoch."""
        digest = labels_digest(self.shape, self.num_classes, self.labels)
        for index, name in enumerate(self.files.names):
            path = self.files[index]
            digest.update(b"%d %s\n" % (path.stat().st_size if path.is_file() else -1, bytes(name)))
        return digest.hexdigest()


def read_image_files(
    paths: Sequence[Path | str], shape: tuple[int, int, int], *, shorter_side: int | None = None
) -> tuple[Tensor, list[str]]:
    """The bytes uint8 [n, c, h, w] of images for `shape` (c, h, w), and notes on what was changed in them.

    With `shorter_side`, files of another size are scaled and cropped by `Decoder.centre`; without it they are refused.
    """
    decoder = Decoder(*shape, shorter_side)
    pixels: list[Pixels] = []
    changed: dict[str, list[Path]] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise RequestError(f"{path}: no such file; give an image file")
        image, changes = read_image(path, decoder, "pass --resize")
        pixels.append(image)
        for change in changes:
            changed.setdefault(change, []).append(path)
    notes = [note for change, files in changed.items() for note in note_about(files, change)]
    return torch.from_numpy(np.stack(pixels)), notes


def read_image(file: Path | ImageBytes, decoder: Decoder, otherwise: str) -> tuple[Pixels, list[str]]:
    """The centre of one image, and what was changed in it.

    A file of another size is refused if the decoder has no `shorter_side`; the message ends in `otherwise`.
    """
    size = (decoder.width, decoder.height)
    head = image_head(file)
    if head.size != size and decoder.shorter_side is None:
        raise RequestError(
            f"{file}: expected an image of {size[0]}x{size[1]} pixels, got {head.size[0]}x{head.size[1]}; "
            f"scale it, or {otherwise}"
        )
    changes = {
        f"scaled and cropped to {size[0]}x{size[1]} pixels: the radius is about the result": head.size != size,
        "converted to grey: the radius is about the result": decoder.channels == 1 and not head.grey,
        "grey and read as RGB: a change of a pixel counts in each of the three channels": (
            decoder.channels == 3 and head.grey
        ),
        COMPOSITED: head.transparent,
    }
    pixels = (decoder if head.size != size else replace(decoder, shorter_side=None)).centre(file)
    return pixels, [change for change, made in changes.items() if made]


def note_about(paths: Sequence[Path], change: str) -> list[str]:
    """A note that says what was changed in the files `paths`, if there are any."""
    if not paths:
        return []
    files = f"{paths[0]} is" if len(paths) == 1 else f"{len(paths)} files (first: {paths[0]}) are"
    return [f"{files} {change}"]
