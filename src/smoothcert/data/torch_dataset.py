"""Turn a torch `Dataset` of (image, label) pairs into `Images`, as training and certification need them."""

import random
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from smoothcert.classifier import channels_last
from smoothcert.data.datasets import Normalization
from smoothcert.data.images import describe, indices_within, labels_digest, labels_from, spread
from smoothcert.data.streamed_images import StreamedImages
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import named_error

DIGEST_IMAGES = 100
"""Images whose pixels enter the digest: all of them would take as long as an epoch."""


def images_from_dataset(
    dataset: Dataset[Any],
    *,
    name: str | None = None,
    split: str = "train",
    num_classes: int | None = None,
    normalization: Normalization | None = None,
    workers: int = 0,
) -> "DatasetImages":
    """Make `Images` from a map-style `dataset` whose items are (image, label).

    An image is a tensor [c, h, w], either uint8, which is divided by 255, or floating-point with values in [0, 1],
    which becomes float32; all have one shape and one kind. A label is an integer. Items are read again for each batch,
    by `workers` processes, so random transforms of the dataset stay random: their random numbers (`random`, numpy and
    torch) are seeded with the seed of the run and the index of the image. For certification they are the same in every
    call.

    Class names come from `dataset.classes` if it has one name per class, labels from `dataset.targets` if that fits,
    otherwise every item is read once. `num_classes` defaults to the number of class names, else to one more than the
    largest label. Do not normalize images in the dataset: give `normalization`, which becomes part of the model.
    """
    total = checked_length(dataset)
    classes = _class_names(dataset)
    image, _ = _read_item(dataset, 0)
    labels = _known_labels(dataset)
    if labels is None:
        labels = torch.tensor([_read_item(dataset, index)[1] for index in range(total)], device="cpu")
    name = name or type(dataset).__name__
    lowest = int(labels.min())
    if num_classes is None:
        num_classes = len(classes) if classes else 1 + int(labels.max())
    return DatasetImages(
        dataset=dataset,
        first=image,
        labels=labels,
        num_classes=num_classes,
        name=name,
        split=split,
        normalization=normalization,
        class_names=classes if classes and len(classes) == num_classes else None,
        workers=workers,
        notes=() if classes or lowest <= 0 else (f"{name}: {labels_from(lowest)}",),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class DatasetImages(StreamedImages):
    """The items of a torch `Dataset`, checked when they are read."""

    dataset: Any = field(repr=False)
    first: Tensor = field(repr=False)
    """The first image, [c, h, w]; the others have its shape and dtype."""

    def __len__(self) -> int:
        """The number of images."""
        return len(self.dataset)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (c, h, w) of one image."""
        channels, height, width = self.first.shape
        return channels, height, width

    def subset(self, indices: Tensor | Sequence[int]) -> Self:
        """See `ImageData.subset`."""
        indices = indices_within(indices, len(self))
        part = Subset(self.dataset, indices.tolist())
        return replace(self, dataset=part, labels=self.labels[indices], split=f"part of {self.split}")

    def read(self, index: int, seed: int | None) -> Tensor:
        """See `StreamedImages.read`; whatever in the dataset is random depends on (seed, index)."""
        image, label = _read_item(self.dataset, index, seed or 0)
        if image.shape != self.first.shape or image.dtype != self.first.dtype:
            raise RequestError(
                f"dataset item {index}: expected an image like the first one, of {describe(self.first)}, got "
                f"{describe(image)}; resize or convert the images in the dataset"
            )
        if not self.relabelled and label != self.labels[index]:
            raise RequestError(
                f"dataset item {index}: expected label {int(self.labels[index])} as in dataset.targets or an earlier "
                f"reading, got {label}; give each item one label"
            )
        return image

    def digest(self) -> str:
        """SHA-256 of shape and labels, and of some images, spread over the data set."""
        digest = labels_digest(self.shape, self.num_classes, self.labels)
        for index in spread(len(self), DIGEST_IMAGES).tolist():
            digest.update(self.read(index, None).contiguous().numpy().data)
        return digest.hexdigest()


def checked_length(dataset: object) -> int:
    """The number of items of a map-style dataset; anything else is refused."""
    no_list = isinstance(dataset, IterableDataset | Mapping | str) or not hasattr(dataset, "__getitem__")
    if no_list or not isinstance(dataset, Sized):
        raise RequestError(
            f"dataset: expected a map-style torch Dataset with __len__ and __getitem__, got {type(dataset).__name__}; "
            "give that of a loader as loader.dataset, or collect the items in a list"
        )
    if len(dataset) == 0:
        raise RequestError("dataset: expected at least one item, got none; add images")
    return len(dataset)


def _class_names(dataset: Any) -> tuple[str, ...] | None:
    """`dataset.classes`, also of the dataset inside a Subset."""
    if isinstance(dataset, Subset):
        return _class_names(dataset.dataset)
    classes = getattr(dataset, "classes", None)
    return tuple(map(str, classes)) if isinstance(classes, list | tuple) and classes else None


def _known_labels(dataset: Any) -> Tensor | None:
    """All labels without reading images: `dataset.targets`; None if there are none or a transform changes them."""
    if isinstance(dataset, Subset):
        labels = _known_labels(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices, dtype=torch.int64, device="cpu")]
    targets = getattr(dataset, "targets", None)
    if getattr(dataset, "target_transform", None) is not None or not isinstance(targets, list | tuple | Tensor):
        return None
    try:
        labels = torch.as_tensor(targets, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None
    plain = labels.shape == (len(dataset),) and not labels.is_floating_point() and not labels.is_complex()
    return labels.to("cpu", torch.int64) if plain and labels.dtype != torch.bool else None


def _read_item(dataset: Any, index: int, seed: int = 0) -> tuple[Tensor, int]:
    """Item `index` as (image uint8 or float32 [c, h, w], label), or a RequestError that says what to change."""
    try:
        with _seeded(seed, index):
            item = dataset[index]
    except (RequestError, WorkError):
        raise
    except Exception as error:  # a user's code may fail in any way
        raise RequestError(f"dataset item {index}: failed ({named_error(error)}); correct __getitem__") from error
    if isinstance(item, Tensor) and item.ndim == 4:
        raise RequestError(
            f"dataset item {index}: expected (image, label), got a tensor of shape {list(item.shape)}; for tensors of "
            "all images and labels give torch.utils.data.TensorDataset(images, labels)"
        )
    if not isinstance(item, list | tuple) or len(item) != 2:
        given = f"{len(item)} values" if isinstance(item, list | tuple) else type(item).__name__
        raise RequestError(
            f"dataset item {index}: expected (image, label), got {given}; wrap the dataset in one whose __getitem__ "
            "returns these two"
        )
    return _checked_image(item[0], index), _checked_label(item[1], index)


def _checked_image(image: object, index: int) -> Tensor:
    if not isinstance(image, Tensor):
        raise RequestError(
            f"dataset item {index}: expected the image as a tensor [c, h, w], got {type(image).__name__}; convert it, "
            "for example with torchvision.transforms.ToTensor()"
        )
    image = image.detach().cpu()
    if image.ndim != 3 or 0 in image.shape:
        raise RequestError(f"dataset item {index}: expected an image [c, h, w], got {describe(image)}; reshape it")
    if channels_last(image.shape):
        raise RequestError(
            f"dataset item {index}: expected an image [c, h, w], got {describe(image)}, which looks like [h, w, c]; "
            "use permute(2, 0, 1)"
        )
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point():
        raise RequestError(
            f"dataset item {index}: expected an image of dtype uint8 or floating-point values in [0, 1], got "
            f"{describe(image)}; convert it"
        )
    lowest, highest = (float(bound) for bound in torch.aminmax(image))
    if not (lowest >= 0 and highest <= 1):  # also true for NaN
        raise RequestError(
            f"dataset item {index}: expected pixels in [0, 1], got {lowest:.4g} to {highest:.4g}; remove Normalize "
            "from the transforms (the normalization belongs to the model), or divide by 255"
        )
    return image.to(torch.float32)


def _checked_label(label: object, index: int) -> int:
    value = label.item() if isinstance(label, Tensor | np.generic) and np.prod(label.shape) == 1 else label
    if isinstance(value, bool) or not isinstance(value, int):
        given = describe(label) if isinstance(label, Tensor) else type(label).__name__
        raise RequestError(
            f"dataset item {index}: expected an integer as label, got {given}; return the number of the class"
        )
    if value < 0:
        raise RequestError(f"dataset item {index}: expected a label of at least 0, got {value}; correct it")
    return value


@contextmanager
def _seeded(seed: int, index: int) -> Iterator[None]:
    """Seed the global random numbers that a dataset may use by (seed, index), and restore them afterwards."""
    number = int(np.random.SeedSequence((seed, index)).generate_state(1)[0])
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(number)
        np.random.seed(number)
        torch.default_generator.manual_seed(number)  # torch.manual_seed would change the generators of GPUs, too
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
