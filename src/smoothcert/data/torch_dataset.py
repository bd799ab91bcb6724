"""A torch `Dataset` as training data: images are read when a batch needs them."""

import hashlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from smoothcert.data.images import Normalization
from smoothcert.errors import RequestError

HASHED_IMAGES = 64
"""Number of images, spread over the data set, whose pixels are part of the digest."""


@dataclass(frozen=True, eq=False)
class DatasetImages:
    """One split of images that a map-style torch `Dataset` yields as (image, label).

    An image is a tensor [c, h, w]: floats in [0, 1], or uint8, which is divided by 255. Random transforms draw from
    torch's generator, which is seeded for each image of each epoch, so a resumed run sees the same images.
    """

    dataset: Dataset[Any] = field(repr=False)
    labels: Tensor = field(repr=False)
    num_classes: int
    shape: tuple[int, int, int]
    name: str
    split: str = "train"
    normalization: Normalization | None = None
    class_names: tuple[str, ...] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    relabelled: bool = False
    device: torch.device | str = "cpu"

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "DatasetImages":
        return replace(self, device=device, labels=self.labels.to(device))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._read(indices, [(0, int(index)) for index in indices])

    def batches(self, order: Tensor, share: slice, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for step, row in enumerate(order):
            places = range(len(row))[share]
            yield self._read(row[share], [(seed, step * len(row) + place) for place in places])

    def _read(self, indices: Tensor, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            images = []
            for index, key in zip(indices.tolist(), keys, strict=True):
                torch.default_generator.manual_seed(
                    int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
                )
                images.append(_image(self.dataset[index], index, self.name))
        wrong = next((image for image in images if tuple(image.shape) != self.shape), None)
        if wrong is not None:
            raise RequestError(
                f"{self.name}: expected images of shape {self.shape}, as the first one has, got {tuple(wrong.shape)}; "
                "resize them in the data set"
            )
        labels = self.labels[indices.to(self.labels.device)]
        return torch.stack(images).to(self.device), labels

    def digest(self) -> str:
        """SHA-256 of the shape, all labels, and the pixels of some images."""
        digest = hashlib.sha256(f"{len(self)} {list(self.shape)} {self.num_classes}\n".encode())
        digest.update(self.labels.cpu().numpy().tobytes())
        some = torch.linspace(0, len(self) - 1, min(HASHED_IMAGES, len(self))).long()
        digest.update(self.batch(some)[0].cpu().numpy().tobytes())
        return digest.hexdigest()


def from_torch_dataset(dataset: Dataset[Any]) -> DatasetImages:
    """Check a map-style `dataset`; labels come from its `targets`, if it has them, or from reading all of it."""
    name = f"torch:{type(dataset).__name__}"
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise RequestError(f"{name}: expected a data set with a length and an index, got an iterable one; index it")
    if len(dataset) == 0:
        raise RequestError(f"{name}: expected at least one image, got an empty data set")
    first = _image(dataset[0], 0, name)
    targets = getattr(dataset, "targets", None)
    if targets is None or len(targets) != len(dataset):
        targets = [_label(dataset[index], index, name) for index in range(len(dataset))]
    labels = torch.as_tensor(targets).long().cpu()
    names = getattr(dataset, "classes", None)
    classes = tuple(map(str, names)) if isinstance(names, list | tuple) and len(names) > int(labels.max()) else None
    if int(labels.min()) < 0:
        raise RequestError(f"{name}: expected labels from 0 on, got {int(labels.min())}; number the classes from 0")
    num_classes = len(classes) if classes else int(labels.max()) + 1
    channels, height, width = first.shape
    return DatasetImages(dataset, labels, num_classes, (channels, height, width), name, class_names=classes)


def _pair(item: Any, index: int, name: str) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise RequestError(
            f"{name}[{index}]: expected (image, label), got {type(item).__name__}; wrap the data set so that it "
            "returns these two"
        )
    return item[0], item[1]


def _label(item: Any, index: int, name: str) -> int:
    label = _pair(item, index, name)[1]
    try:
        return int(label)
    except (TypeError, ValueError):
        raise RequestError(
            f"{name}[{index}]: expected a class index, got {type(label).__name__}; return an integer"
        ) from None


def _image(item: Any, index: int, name: str) -> Tensor:
    """The image as floats in [0, 1]."""
    image = _pair(item, index, name)[0]
    if not isinstance(image, Tensor) or image.ndim != 3:
        shape = f" of shape {list(image.shape)}" if isinstance(image, Tensor) else ""
        raise RequestError(
            f"{name}[{index}]: expected a tensor [c, h, w], got {type(image).__name__}{shape}; convert images in the "
            "data set, for example with torchvision's ToTensor"
        )
    if image.dtype == torch.uint8:
        return image.float() / 255
    low, high = float(image.min()), float(image.max())
    if not image.is_floating_point() or not (low >= 0 and high <= 1):
        raise RequestError(
            f"{name}[{index}]: expected floats in [0, 1] or uint8, got {str(image.dtype).removeprefix('torch.')} in "
            f"[{low:g}, {high:g}]; remove normalization from the data set and put it into the network"
        )
    return image.float()
