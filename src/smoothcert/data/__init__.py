"""Images and labels: one reader a data set, all of them in `DATASETS`, batches cut on the device."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from smoothcert.data import cifar10, imagenet, mnist
from smoothcert.data.image_files import ImageFiles
from smoothcert.data.images import UNSPLIT, ImageData, Images, Normalization, Split
from smoothcert.data.torch_dataset import images_from_dataset
from smoothcert.data.user_data import load_folder, load_npz
from smoothcert.errors import RequestError
from smoothcert.io.files import check_regular_file
from smoothcert.io.text import did_you_mean

__all__ = [
    "DATASETS",
    "OWN_DATA",
    "UNSPLIT",
    "DatasetSpec",
    "ImageData",
    "ImageFiles",
    "Images",
    "Normalization",
    "Split",
    "default_folder",
    "images_from_dataset",
    "load_dataset",
    "load_folder",
    "load_npz",
    "read_class_names",
    "same_data",
    "with_classes",
    "with_home",
]

CLASS_FILE_CHARACTERS = 10_000_000


@dataclass(frozen=True)
class DatasetSpec:
    """What is known of a data set before it is read, and its reader: `load(split, folder)`."""

    description: str
    shape: tuple[int, int, int]
    num_classes: int
    load: Callable[[Split, Path], ImageData | ImageFiles]
    normalization: Normalization | None = None
    class_names: tuple[str, ...] | None = None
    """The names of the classes, where they are the same wherever the data set is read from."""
    shorter_side: int | None = None
    """What the shorter side of a file is scaled to before the centre is cut out; None: the side of the images."""


DATASETS: dict[str, DatasetSpec] = {
    "mnist": DatasetSpec(
        description="handwritten digits, 60,000 training and 10,000 test images; downloaded when absent",
        shape=mnist.SHAPE,
        num_classes=mnist.NUM_CLASSES,
        load=mnist.load,
    ),
    "mnist-sample": DatasetSpec(
        description="the first 10,000 training and 2,000 test images of MNIST; bundled, needs no network",
        shape=mnist.SHAPE,
        num_classes=mnist.NUM_CLASSES,
        load=lambda split, _folder: mnist.load_sample(split),
    ),
    "cifar10": DatasetSpec(
        description="photographs of ten classes, 50,000 training and 10,000 test images; downloaded when absent",
        shape=cifar10.SHAPE,
        num_classes=cifar10.NUM_CLASSES,
        load=cifar10.load,
        normalization=cifar10.NORMALIZATION,
        class_names=cifar10.CLASS_NAMES,
    ),
    "imagenet": DatasetSpec(
        description="ILSVRC2012, 1,281,167 training and 50,000 validation images of 1,000 classes; never downloaded",
        shape=imagenet.SHAPE,
        num_classes=imagenet.NUM_CLASSES,
        load=imagenet.load,
        normalization=imagenet.NORMALIZATION,
        shorter_side=imagenet.DECODER.shorter_side,
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
        return with_home(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return with_home(cache) / "smoothcert"


def with_home(path: str | Path) -> Path:
    """`path` with a leading ~ or ~user replaced by the home folder; an unknown user is a RequestError."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise RequestError(
            f"{path}: expected ~ or ~ and a known user, got an unknown one; write the path out"
        ) from None


def same_data(one: str, other: str) -> bool:
    """Whether two names, such as folder:PATH, are of the same data, however their paths are written."""
    (kind, _, path), (other_kind, _, other_path) = one.partition(":"), other.partition(":")
    return kind == other_kind and with_home(path).resolve() == with_home(other_path).resolve()


def load_dataset(
    name: str,
    split: Split,
    folder: Path | None = None,
    *,
    image_size: int | None = None,
    classes: Sequence[str] | None = None,
) -> Images:
    """The split `split` of the data set `name`, on the CPU; `folder` is where its files are or will be kept.

    `name` is one of DATASETS, or `folder:PATH` or `npz:PATH` for one's own images (see `load_folder`, `load_npz`).
    `image_size` is for `folder:PATH` alone: the others have a size. With `classes`, the names of a model's outputs in
    order, labels are positions in that list (see `with_classes`).
    """
    if not isinstance(name, str):
        raise RequestError(f"dataset: expected a name, got {type(name).__name__}; see `smoothcert datasets`")
    data = _load(name, split, folder, image_size)
    return data if classes is None else with_classes(data, classes)


def _load(name: str, split: Split, folder: Path | None, image_size: int | None) -> ImageData | ImageFiles:
    kind, _, path = name.partition(":")
    own = kind in ("folder", "npz") and path != ""
    if not own and name not in DATASETS:
        hint = did_you_mean(name, DATASETS, "choose one of these")
        known = ", ".join([*DATASETS, *OWN_DATA])
        raise RequestError(f"expected a data set among {known}, got {name!r}; {hint}")
    if split not in get_args(Split):
        raise RequestError(f"expected a split among {', '.join(get_args(Split))}, got {split!r}; choose one of these")
    if own and kind == "folder":
        return load_folder(with_home(path), split, image_size)
    if image_size is not None:
        raise RequestError(f"image_size: expected none for {name}, whose images have a size, got {image_size}; omit it")
    if own:
        return load_npz(with_home(path), split)
    return DATASETS[name].load(split, with_home(folder) if folder is not None else default_folder())


def with_classes(data: ImageData | ImageFiles, names: Sequence[str]) -> ImageData | ImageFiles:
    """`data` with labels that are positions in `names`, matched by name; `names` may have classes without images.

    Data without names of classes keep their labels, which must be positions in `names` already.
    """
    if data.class_names is None:
        if data.num_classes > len(names):
            raise RequestError(
                f"classes: expected at least the {data.num_classes} classes of {data.name}, got {len(names)} names"
            )
        return replace(data, num_classes=len(names), class_names=tuple(names), relabelled=True)
    position = {name: index for index, name in enumerate(names)}
    if unknown := [name for name in data.class_names if name not in position]:
        some = ", ".join(unknown[:10]) + (f" and {len(unknown) - 10} more" if len(unknown) > 10 else "")
        raise RequestError(
            f"classes: expected the names of all classes of {data.name}, got a list without {some}; "
            "add them, or remove those images"
        )
    moved = torch.tensor([position[name] for name in data.class_names], dtype=torch.int64)
    return replace(
        data,
        labels=moved[data.labels.cpu()].to(data.labels.device),
        num_classes=len(names),
        class_names=tuple(names),
        relabelled=True,
    )


def read_class_names(path: Path) -> tuple[str, ...]:
    """The names in a text file with one class per line, in the order of a model's outputs."""
    check_regular_file(path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(CLASS_FILE_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RequestError(f"{path}: expected one class name per line, got a file that fails ({reason})") from None
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if not names or twice or len(text) > CLASS_FILE_CHARACTERS:
        long = f"more than {CLASS_FILE_CHARACTERS:,} characters"
        given = long if len(text) > CLASS_FILE_CHARACTERS else f"{twice[0]} twice" if twice else "none"
        raise RequestError(f"{path}: expected one class name per line, each once, got {given}; correct the file")
    return names
