"""Pictures of a data set for the gallery of a report: read if they are on this machine, never downloaded."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from smoothcert.data import DATASETS, UNSPLIT, Split, default_folder
from smoothcert.data.stored_images import StoredImages
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.references import same_reference
from smoothcert.report.html_data import Pictures

if TYPE_CHECKING:
    from smoothcert.data import ImageData, ImageFiles, Images

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
    if split == UNSPLIT:
        split = "test"  # either request gives all images of such data
    if split not in get_args(Split):
        return f"No pictures: {dataset} has no split called {split}."
    try:
        if own_images(dataset) and not any(same_reference(dataset, name) for name in named):
            return f"No pictures: they are in {dataset}, which is read only on request; add --images {dataset}."
        known, data = _chosen(dataset, cast(Split, split), default_folder() if folder is None else folder, indices)
    except RequestError:
        return f"No pictures: the {split} images of {dataset} are not there, and a report downloads nothing."
    except WorkError:
        return f"No pictures: the {split} images of {dataset} are there, but damaged."
    if data is None:
        return f"No pictures: {dataset} is not a data set that smoothcert can read."
    if data.name != dataset:
        return f"No pictures: the certificates are of {dataset}, the files that were found are {data.name}."
    return Pictures(
        files={index: _encoded(image) for index, image in zip(known, data.images, strict=True)},
        labels=dict(zip(known, data.labels.tolist(), strict=True)),
        class_names=data.class_names,
    )


def own_images(dataset: str) -> bool:
    """Whether `dataset` names a path, not a data set in the data folder."""
    kind, colon, path = dataset.partition(":")
    return kind in ("folder", "npz") and bool(colon and path)


def _chosen(dataset: str, split: Split, folder: Path, indices: Sequence[int]) -> tuple[list[int], StoredImages | None]:
    """The `indices` that the data set has, and these images, if it is on this machine; None for an unknown name.

    Common data sets are read without torch, whose import takes longer than most reports.
    """
    spec = DATASETS.get(dataset.partition(" (")[0])  # the rest says that the files are not the official ones
    if spec is not None and spec.read is not None:
        stored = spec.read(split, folder)
        known = [index for index in indices if 0 <= index < len(stored.labels)]
        return known, stored._replace(images=stored.images[known], labels=stored.labels[known])
    if spec is None and not own_images(dataset):
        return [], None
    import torch

    from smoothcert.data import load_npz

    kind, _, path = dataset.partition(":")
    data: Images
    if spec is not None:
        data = spec.load(split, folder)
    else:
        data = _own_folder(Path(path), split) if kind == "folder" else load_npz(Path(path), split)
    known = [index for index in indices if 0 <= index < len(data)]
    images, labels = data.batch(torch.tensor(known, dtype=torch.int64, device="cpu"))
    pixels = (images * 255).round().to(torch.uint8).numpy()
    return known, StoredImages(pixels, labels.numpy(), data.name, data.class_names or ())


def _own_folder(path: Path, split: Split) -> "ImageData | ImageFiles":
    """Images of one size unchanged, others as thumbnails; only the requested ones are decoded."""
    from smoothcert.data import load_folder

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
