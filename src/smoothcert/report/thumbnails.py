"""Pictures of a data set for the gallery of a report: read if they are on this machine, never downloaded."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from smoothcert.data import (
    UNSPLIT,
    ImageData,
    ImageFiles,
    Split,
    cifar10,
    default_folder,
    imagenet,
    load_folder,
    load_npz,
    mnist,
)
from smoothcert.errors import RequestError, WorkError
from smoothcert.report.html_gallery import Pictures

THUMBNAIL = 96
EXACT = 48
"""Images with sides up to this many pixels are not reduced."""


def pictures(
    dataset: str, split: str, indices: Sequence[int], folder: Path | None = None, named: Sequence[str] = ()
) -> Pictures | str:
    """The images `indices` of a split, and their labels; or one line that says why there are none.

    `dataset` is the name in the certificates, `folder` the folder of data sets (None: `default_folder()`). Small images
    are PNG files with exactly their pixels, larger ones JPEG files of at most 96 pixels per side. Indices that the
    split does not have are left out.

    A certificates file may come from anyone and name any path. `folder:PATH` and `npz:PATH` are read only if the user
    names them in `named`, so that a report never shows pictures that its author did not choose to show.
    """
    if own_images(dataset) and not any(_same_images(dataset, name) for name in named):
        return f"No pictures: they are in {dataset}, which is read only on request; add --images {dataset}."
    if split == UNSPLIT:
        split = "test"  # either request gives all images of such data
    if split not in get_args(Split):
        return f"No pictures: {dataset} has no split called {split}."
    try:
        data = _loaded(dataset, cast(Split, split), default_folder() if folder is None else folder)
        if data is None:
            return f"No pictures: {dataset} is not a data set that smoothcert can read."
        if data.name != dataset:
            return f"No pictures: the certificates are of {dataset}, the files that were found are {data.name}."
        known = [index for index in indices if 0 <= index < len(data)]
        images, labels = data.batch(torch.tensor(known, dtype=torch.int64))
    except RequestError:
        return f"No pictures: the {split} images of {dataset} are not there, and a report downloads nothing."
    except WorkError:
        return f"No pictures: the {split} images of {dataset} are there, but damaged."
    pixels = (images * 255).round().to(torch.uint8).numpy()
    return Pictures(
        files={index: _encoded(image) for index, image in zip(known, pixels, strict=True)},
        labels=dict(zip(known, labels.tolist(), strict=True)),
        class_names=data.class_names or (),
    )


def own_images(dataset: str) -> bool:
    """Whether `dataset` names a path, not a data set in the data folder."""
    kind, colon, path = dataset.partition(":")
    return kind in ("folder", "npz") and bool(colon and path)


def _same_images(dataset: str, named: str) -> bool:
    """Whether both are of one kind and one path, relative to the current folder."""
    (kind, _, path), (other_kind, _, other) = dataset.partition(":"), named.partition(":")
    return kind == other_kind and os.path.abspath(path) == os.path.abspath(os.path.expanduser(other))


def _loaded(dataset: str, split: Split, folder: Path) -> ImageData | ImageFiles | None:
    """The data set, if it is on this machine; None for an unknown name.

    Each reader is listed here, because those of DATASETS may download.
    """
    kind, _, path = dataset.partition(":")
    if kind == "folder" and path:
        return _own_folder(Path(path), split)
    if kind == "npz" and path:
        return load_npz(Path(path), split)
    if kind == "mnist":
        return mnist.load(split, folder, download=False)
    if kind == "mnist-sample":
        return mnist.load_sample(split)
    if kind.startswith("cifar10"):  # files that are not the official ones say so in their name
        return cifar10.load(split, folder, download=False)
    return imagenet.load(split, folder) if kind == "imagenet" else None


def _own_folder(path: Path, split: Split) -> ImageData | ImageFiles:
    """Images of one size unchanged, others as thumbnails; only the requested ones are decoded."""
    try:
        return load_folder(path, split, in_memory_bytes=0)
    except RequestError:
        return load_folder(path, split, THUMBNAIL, in_memory_bytes=0)


def _encoded(pixels: NDArray[np.uint8]) -> bytes:
    """`pixels` [c, h, w], c 1 or 3, as a file."""
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    file = io.BytesIO()
    if max(image.size) <= EXACT:
        image.save(file, "PNG", optimize=True)
    else:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        image.save(file, "JPEG", quality=80)
    return file.getvalue()
