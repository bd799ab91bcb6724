"""Held-out images: the last training images of a data set take the place of its test images.

Settings that are chosen by test images fit these images, so results on them are too good. The last images are held out,
not random ones, so that the place of each image is known. MNIST and CIFAR-10 are not sorted by class.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from smoothcert.data.datasets import DATASETS, HELD_OUT, Split
from smoothcert.data.stored_images import StoredImages

if TYPE_CHECKING:
    from smoothcert.data.images import ImageData


def load(name: str, split: Split, folder: Path) -> "ImageData":
    """One split of the training images of the data set `name`; training images are augmented as those of `name`."""
    from smoothcert.data.images import ImageData

    whole = DATASETS[name].load("train", folder)
    assert isinstance(whole, ImageData), "data sets with held-out images are read into memory"
    augment = whole.augment if split == "train" else None
    part = whole.subset(_places(name, split, len(whole)))
    return replace(part, name=_held_out_name(whole.name), split=split, augment=augment)


def read(name: str, split: Split, folder: Path) -> StoredImages:
    """`load` without torch, and without a download."""
    reader = DATASETS[name].read
    assert reader is not None, "data sets with held-out images are read without torch"
    images, labels, found, class_names = reader("train", folder)
    places = list(_places(name, split, len(labels)))
    return StoredImages(images[places], labels[places], _held_out_name(found), class_names)


def _places(name: str, split: Split, images: int) -> range:
    """The places of a split among the training images; files that are not the official ones may have other numbers."""
    trained, held_out = DATASETS[f"{name}{HELD_OUT}"].sizes
    first_held_out = images * trained // (trained + held_out)
    return range(first_held_out) if split == "train" else range(first_held_out, images)


def _held_out_name(name: str) -> str:
    """The name of the divided data set; what follows a space says that the files are not the official ones."""
    known, space, rest = name.partition(" ")
    return f"{known}{HELD_OUT}{space}{rest}"
