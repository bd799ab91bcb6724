"""Images and labels of one split, as tensors on one device, and what all kinds of data share."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from smoothcert.data.datasets import Normalization
from smoothcert.errors import RequestError
from smoothcert.io.text import counted

Augment = Callable[[Tensor, Tensor], Tensor]
"""(images float [b, c, h, w] in [0, 1], uniform [b, 3] in [0, 1)) -> images of the same shape, on their device."""

STEPS_AT_ONCE, PIXELS_AT_ONCE = 16, 2**23
"""Most batches and pixels that are prepared at once: a GPU would wait for the host if small batches came singly."""


@dataclass(frozen=True, slots=True, eq=False)  # eq=False: comparing tensors gives tensors, not a truth value
class ImageData(Dataset[tuple[Tensor, int]]):
    """One split of a data set: `images` uint8 [n, c, h, w], `labels` int64 [n], on the same device.

    Every label is in [0, num_classes). Wrong tensors are a RequestError when the object is created.
    """

    images: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    num_classes: int
    name: str
    split: str
    normalization: Normalization | None = None
    augment: Augment | None = field(default=None, repr=False)
    class_names: tuple[str, ...] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    """Notes for the user about how the files were read, one line each."""
    relabelled: bool = field(default=False, repr=False)
    """Whether labels are positions in a list of classes that a user gave (see `with_classes`)."""
    file_names: tuple[str, ...] | None = field(default=None, repr=False)
    """The file of each image, such as "cat/12.png", if the data come from a folder of images."""

    def __post_init__(self) -> None:
        title = f"data set {self.name!r}, split {self.split!r}"
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise RequestError(
                f"{title}: expected images of dtype uint8 and shape [n, c, h, w], got {describe(self.images)}; "
                "convert pixels to 0..255 and put the channels before height and width"
            )
        check_labels(title, self.labels, len(self.images), self.num_classes)

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Image `index`, float32 [c, h, w] in [0, 1], and its label, so that a torch `DataLoader` takes the data."""
        return in_unit_interval(self.images[index]), int(self.labels[index])

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (c, h, w) of one image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def to(self, device: torch.device | str) -> "ImageData":
        """The same data on `device`."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images `indices` as float32 [b, c, h, w] in [0, 1] and their labels [b], on the device of the data.

        `indices` are integers; if they are a tensor on the same device, nothing passes through the host.
        """
        indices = torch.as_tensor(indices, device=self.images.device)
        images = in_unit_interval(self.images.index_select(0, indices))
        return images, self.labels.index_select(0, indices)

    def batches(self, order: Tensor, share: slice, seed: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """For each row of `order` (int64 [steps, b]) the images `row[share]`, augmented if the split is, and labels.

        Augmentation depends on (seed, order) and not on `share`: several processes with a share each see the same
        images as one process. With None as seed nothing is augmented.
        """
        generator = torch.Generator(self.images.device).manual_seed(seed or 0)
        for rows in torch.split(order, steps_at_once(order, self.shape)):
            chosen = rows[:, share]
            images, labels = self.batch(chosen.flatten())
            if self.augment is not None and seed is not None:
                uniform = torch.rand((*rows.shape, 3), generator=generator, device=self.images.device)
                images = self.augment(images, uniform[:, share].flatten(0, 1))
            each = chosen.shape[1]
            yield from zip(torch.split(images, each), torch.split(labels, each), strict=True)

    def subset(self, indices: Tensor | Sequence[int]) -> "ImageData":
        """The images and labels at `indices` (int64 [m]), in that order, which are numbered from 0."""
        indices = indices_within(indices, len(self)).to(self.images.device)
        images, labels = (values.index_select(0, indices) for values in (self.images, self.labels))
        names = None if self.file_names is None else tuple(self.file_names[index] for index in indices.tolist())
        return replace(self, images=images, labels=labels, split=f"part of {self.split}", file_names=names)

    def digest(self) -> str:
        """SHA-256 of shape, labels and pixels, in order."""
        digest = labels_digest(self.images.shape, self.num_classes, self.labels)
        digest.update(self.images.cpu().contiguous().numpy().data)
        return digest.hexdigest()


def steps_at_once(order: Tensor, shape: tuple[int, int, int]) -> int:
    """The number of rows of `order`, which are batches of images of `shape`, that are prepared together."""
    return max(1, min(STEPS_AT_ONCE, PIXELS_AT_ONCE // (order.shape[1] * math.prod(shape))))


def in_unit_interval(pixels: Tensor) -> Tensor:
    """uint8 -> float32 in [0, 1]: p becomes p / 255 correctly rounded, the same bits on every device."""
    # CUDA replaces division by a Python number with multiplication by its reciprocal, which is off by one ulp for half
    # of the pixel values; with a divisor on the device it divides.
    white = torch.full((), 255.0, dtype=torch.float32, device=pixels.device)
    return pixels.to(torch.float32).div_(white)


def check_labels(title: str, labels: Tensor, num_images: int, num_classes: int) -> None:
    """Refuse labels that are not int64 [num_images] in [0, num_classes)."""
    if labels.dtype != torch.int64 or labels.shape != (num_images,):
        raise RequestError(
            f"{title}: expected labels of dtype int64 and shape [{num_images}], got {describe(labels)}; "
            "give one class index for each image"
        )
    if num_classes < 1:
        raise RequestError(f"{title}: expected num_classes of at least 1, got {num_classes}; raise it")
    lowest, highest = (int(bound) for bound in torch.aminmax(labels)) if num_images else (0, 0)
    if lowest < 0 or highest >= num_classes:
        raise RequestError(
            f"{title}: expected labels in 0..{num_classes - 1}, got labels in {lowest}..{highest}; "
            "correct the labels or num_classes"
        )


def check_normalization(title: str, normalization: Normalization | None, channels: int) -> None:
    """Refuse a normalization that is not one for `channels` channels of pixels in [0, 1]."""
    if normalization is None:
        return
    mean, std = normalization.mean, normalization.std
    if len(mean) != channels or len(std) != channels:
        raise RequestError(
            f"{title}: expected a normalization of {counted(channels, 'channel')}, got mean {mean} and std {std}; give "
            "one number per channel"
        )
    if not all(0 <= number <= 1 for number in mean) or not all(0 < number <= 1 for number in std):
        raise RequestError(
            f"{title}: expected a normalization of pixels in [0, 1], with std above 0, got mean {mean} and std {std}; "
            "divide numbers for pixels in 0..255 by 255"
        )


def indices_within(indices: Tensor | Sequence[int], count: int) -> Tensor:
    """`indices` of some of `count` images as int64 [m] on the CPU; others are a RequestError."""
    given = indices if isinstance(indices, Tensor) else torch.tensor(list(indices), device="cpu")
    if not given.numel():
        return torch.empty(0, dtype=torch.int64, device="cpu")
    whole = given.dtype != torch.bool and not given.is_floating_point() and not given.is_complex()
    if given.ndim != 1 or not whole:
        raise RequestError(
            f"subset: expected whole numbers [m], the indices of images, got {describe(given)}; give "
            "mask.nonzero().flatten() of a mask"
        )
    lowest, highest = (int(bound) for bound in torch.aminmax(given))
    if lowest < 0 or highest >= count:
        raise RequestError(
            f"subset: expected indices from 0 to {count - 1:,} of {counted(count, 'image')}, got some from "
            f"{lowest:,} to {highest:,}; correct them"
        )
    return given.cpu().long()


def labels_digest(shape: Sequence[int], num_classes: int, labels: Tensor) -> "hashlib._Hash":
    """The SHA-256 of shape and labels, which is continued with what identifies the images."""
    digest = hashlib.sha256(f"{list(shape)} {num_classes}\n".encode())
    digest.update(labels.cpu().contiguous().numpy().data)
    return digest


def labels_from(lowest: int) -> str:
    """The note on labels without names of which the lowest is above 0."""
    return f"no image has a label below {lowest}; if your classes count from {lowest}, subtract it"


def spread(total: int, most: int) -> Tensor:
    """At most `most` of the indices 0..total - 1, int64, in even steps: data may be sorted."""
    count = min(most, total)
    return torch.arange(count, device="cpu") * total // max(count, 1)


def in_parts(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Divide `indices` into parts of at most `size`."""
    return (indices[start : start + size] for start in range(0, len(indices), size))


def describe(tensor: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"dtype {str(tensor.dtype).removeprefix('torch.')} and shape {list(tensor.shape)}"
