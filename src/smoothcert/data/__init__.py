"""Images and labels: one reader a data set, all of them in `DATASETS`, batches cut on the device."""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from smoothcert.data import cifar10, imagenet, mnist, mnist_sample
from smoothcert.data.image_files import ImageFiles
from smoothcert.data.images import ImageData, Images, Normalization, Split
from smoothcert.data.own import load_folder, load_npz
from smoothcert.errors import RequestError

__all__ = [
    "DATASETS",
    "OWN_DATA",
    "DatasetSpec",
    "ImageData",
    "ImageFiles",
    "Images",
    "Normalization",
    "Split",
    "default_folder",
    "load_dataset",
    "load_folder",
    "load_npz",
]


@dataclass(frozen=True)
class DatasetSpec:
    """What is known of a data set before it is read, and its reader: `load(split, folder)`."""

    description: str
    shape: tuple[int, int, int]
    num_classes: int
    load: Callable[[Split, Path], Images]
    normalization: Normalization | None = None


DATASETS: dict[str, DatasetSpec] = {
    "mnist": DatasetSpec(
        description="handwritten digits, 60,000 training and 10,000 test images; downloaded when absent",
        shape=mnist.SHAPE,
        num_classes=mnist.NUM_CLASSES,
        load=mnist.load,
    ),
    "mnist-sample": DatasetSpec(
        description="the first 10,000 training and 2,000 test images of MNIST; bundled, needs no network",
        shape=mnist_sample.SHAPE,
        num_classes=mnist_sample.NUM_CLASSES,
        load=lambda split, _folder: mnist_sample.load(split),
    ),
    "cifar10": DatasetSpec(
        description="photographs of ten classes, 50,000 training and 10,000 test images; downloaded when absent",
        shape=cifar10.SHAPE,
        num_classes=cifar10.NUM_CLASSES,
        load=cifar10.load,
        normalization=cifar10.NORMALIZATION,
    ),
    "imagenet": DatasetSpec(
        description="ILSVRC2012, 1,281,167 training and 50,000 validation images of 1,000 classes; never downloaded",
        shape=imagenet.SHAPE,
        num_classes=imagenet.NUM_CLASSES,
        load=imagenet.load,
        normalization=imagenet.NORMALIZATION,
    ),
}


OWN_DATA: Mapping[str, str] = {
    "folder:PATH": "your own images, a folder for each class",
    "npz:PATH": "your own, as arrays",
}
"""Names for data of one's own, each with a description."""


def default_folder() -> Path:
    """Where data sets are kept: $SMOOTHCERT_DATA, else `smoothcert` in $XDG_CACHE_HOME, else in ~/.cache."""
    if chosen := os.environ.get("SMOOTHCERT_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "smoothcert"


def load_dataset(name: str, split: Split, folder: Path | None = None, *, image_size: int | None = None) -> Images:
    """The split `split` of the data set `name`, on the CPU; `folder` is where its files are or will be kept.

    `name` is one of DATASETS, or `folder:PATH` or `npz:PATH` for one's own images (see `load_folder`, `load_npz`).
    `image_size` is for `folder:PATH` alone: the others have a size.
    """
    kind, _, path = name.partition(":")
    own = kind in ("folder", "npz") and path != ""
    if not own and name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS)
        hint = f"did you mean {' or '.join(near)}?" if near else "choose one of these"
        known = ", ".join([*DATASETS, *OWN_DATA])
        raise RequestError(f"expected a data set among {known}, got {name!r}; {hint}")
    if split not in get_args(Split):
        raise RequestError(f"expected a split among {', '.join(get_args(Split))}, got {split!r}; choose one of these")
    if own and kind == "folder":
        return load_folder(Path(path).expanduser(), split, image_size)
    if image_size is not None:
        raise RequestError(f"image_size: expected none for {name}, whose images have a size, got {image_size}; omit it")
    if own:
        return load_npz(Path(path).expanduser(), split)
    return DATASETS[name].load(split, folder if folder is not None else default_folder())
