"""The data sets by name, and where their files are. Nothing here imports torch before a data set is loaded."""

import os
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from smoothcert.errors import RequestError
from smoothcert.io.files import with_home
from smoothcert.io.references import same_reference
from smoothcert.io.text import did_you_mean

if TYPE_CHECKING:
    from smoothcert.data.stored_images import StoredImages
    from smoothcert.data.streamed_images import Images

Split = Literal["train", "test"]
"""The splits that can be requested."""
UNSPLIT = "all"
"""The split of data without a division into training and test images, whichever split was requested."""
HELD_OUT = "-held-out"
"""Ending of the names of data sets whose test images are training images of another one."""
OTHER_NUMBERS = " (not the official set)"
"""Ending of the name of a data set whose images have other numbers than in results of others."""


def published_name(name: str) -> str:
    """The name of the published data set that `name` is a part of, or has in files that are not the official ones."""
    return name.partition(" (")[0].removesuffix(HELD_OUT).removesuffix("-sample")


@dataclass(frozen=True, slots=True)
class Normalization:
    """Mean and standard deviation of each channel, for pixels in [0, 1]: the first layer of a model."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, tuple(map(float, given)))  # also of a list, an array or a tensor
            except (TypeError, ValueError) as error:
                raise RequestError(
                    f"normalization: expected numbers, one per channel, as {name}, got {given!r}; give a tuple, such "
                    "as (0.5, 0.5, 0.5)"
                ) from error


@dataclass(frozen=True)
class DatasetSpec:
    """The properties of a data set that are known before it is read, and its reader: `load(split, folder)`."""

    title: str
    """The name that people use."""
    description: str
    shape: tuple[int, int, int]
    num_classes: int
    sizes: tuple[int, int]
    """Numbers of training and test images."""
    load: "Callable[[Split, Path], Images]"
    read: "Callable[[Split, Path], StoredImages] | None" = None
    """`load` without torch, and without a download; None if `load` downloads nothing."""
    normalization: Normalization | None = None
    augmented: bool = False
    """Whether the training images are augmented unless a recipe has another `augment`."""
    class_names: tuple[str, ...] | None = None
    """The names of the classes, if they do not depend on the files."""
    shorter_side: int | None = None
    """Size of the shorter side of a file before the centre is cut out; None: the side of the images."""
    trained_on_by: tuple[str, ...] = ()
    """The data sets whose training images contain the test images of this one."""


def _reader(module: str) -> Any:
    return import_module(f"smoothcert.data.{module}")


DATASETS: dict[str, DatasetSpec] = {
    "mnist": DatasetSpec(
        title="MNIST",
        description="handwritten digits, 60,000 training and 10,000 test images; downloaded when absent",
        shape=(1, 28, 28),
        num_classes=10,
        sizes=(60_000, 10_000),
        load=lambda split, folder: _reader("mnist").load(split, folder),
        read=lambda split, folder: _reader("mnist").read(split, folder),
    ),
    "mnist-sample": DatasetSpec(
        title="MNIST sample",
        description="the first 10,000 training and 2,000 test images of MNIST; bundled, needs no network",
        shape=(1, 28, 28),
        num_classes=10,
        sizes=(10_000, 2_000),
        load=lambda split, _folder: _reader("mnist").load_sample(split),
        read=lambda split, _folder: _reader("mnist").read_sample(split),
    ),
    "cifar10": DatasetSpec(
        title="CIFAR-10",
        description="photographs of ten classes, 50,000 training and 10,000 test images; downloaded when absent",
        shape=(3, 32, 32),
        num_classes=10,
        sizes=(50_000, 10_000),
        load=lambda split, folder: _reader("cifar10").load(split, folder),
        read=lambda split, folder: _reader("cifar10").read(split, folder),
        normalization=Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
        augmented=True,
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "imagenet": DatasetSpec(
        title="ImageNet",
        description="ILSVRC2012, 1,281,167 training and 50,000 validation images of 1,000 classes; never downloaded",
        shape=(3, 224, 224),
        num_classes=1000,
        sizes=(1_281_167, 50_000),
        load=lambda split, folder: _reader("imagenet").load(split, folder),
        normalization=Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        augmented=True,
        shorter_side=256,
    ),
}


def _held_out(name: str, count: int, others: tuple[str, ...] = ()) -> DatasetSpec:
    """The training images of the data set `name`; the last `count` of them take the place of the test images.

    The training images of `others` contain them, too.
    """
    whole = DATASETS[name]
    return replace(
        whole,
        title=f"held-out {whole.title}",
        description=f"the training images of {name}, the last {count:,} as test images: to choose settings by them",
        sizes=(whole.sizes[0] - count, count),
        load=lambda split, folder: _reader("held_out").load(name, split, folder),
        read=lambda split, folder: _reader("held_out").read(name, split, folder),
        trained_on_by=(name, *others),
    )


DATASETS |= {
    "mnist-held-out": _held_out("mnist", 10_000),
    "mnist-sample-held-out": _held_out("mnist-sample", 2_000, ("mnist", "mnist-held-out")),
    "cifar10-held-out": _held_out("cifar10", 5_000),
}
OWN_DATA: Mapping[str, str] = {
    "folder:PATH": "your own images, one folder per class",
    "npz:PATH": "your own images, a NumPy file with the arrays `images` and `labels`",
    "FILE.py:Name": "your own code, also as package.module:Name: a class or a function that gives a torch Dataset",
}
"""Names for data of users, each with a description."""


def default_folder() -> Path:
    """The folder of all data sets: $SMOOTHCERT_DATA, else `smoothcert` in $XDG_CACHE_HOME, else in ~/.cache."""
    if chosen := os.environ.get("SMOOTHCERT_DATA"):
        return with_home(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return with_home(cache) / "smoothcert"


def is_data_code(name: str) -> bool:
    """Whether `name` is a reference to a user's code; `torch:Name` is a Dataset that was given to `train` in Python."""
    kind, colon, _ = name.partition(":")
    return bool(colon) and not get_close_matches(kind, ("folder", "npz", "torch"), cutoff=0.8)  # nor a slip of these


def refuse_data_code(source: object, name: str, allow: str | None = None) -> None:
    """Refuse a data set that only the file or folder `source` names if it is a user's code, which would be run.

    `allow` says how the user names it, by default with --dataset.
    """
    if is_data_code(name):
        allow = allow or f"--dataset {shlex.quote(name)}"
        raise RequestError(f"{source}: its data set is the code {name}; allow it with {allow}")


def refuse_absent_data(name: str | None) -> None:
    """Refuse `folder:PATH` or `npz:PATH` with nothing at PATH; other names, and None, are not looked at.

    This needs no torch, whose import takes seconds: commands call it before they load anything.
    """
    kind, _, path = (name or "").partition(":")
    wanted = {"folder": ("folder", "the path of one with a folder per class"), "npz": ("file", "its path")}.get(kind)
    if wanted and path:
        place = with_home(path)
        given = None
        if not place.exists():
            given = "nothing"
        elif kind == "folder" and not place.is_dir():
            given = "a file"
        if given is not None:
            raise RequestError(f"{name}: expected a {wanted[0]}, got {given} at {place.absolute()}; give {wanted[1]}")


def were_trained_on(dataset: str, split: str, trained_on: str) -> bool:
    """Whether the images `split` of `dataset` are among the training images of a network trained on `trained_on`."""
    if split == UNSPLIT:
        return same_reference(trained_on, dataset)
    return split == "test" and dataset in DATASETS and trained_on in DATASETS[dataset].trained_on_by


def knows_test_images(source: object, trained_on: str, dataset: str) -> str | None:
    """The sentence that `source`, which was trained on `trained_on`, knows the test images of `dataset`, if it does."""
    known = were_trained_on(dataset, "test", trained_on)
    return f"{source} was trained on {trained_on}, so it knows the test images of {dataset}" if known else None


def known_class_names(dataset: str | None) -> tuple[str, ...] | None:
    """The names of the classes of a data set whose names do not depend on its files; None for others."""
    known = DATASETS.get(dataset or "")
    return None if known is None else known.class_names


def scaled_side(dataset: str | None, shape: tuple[int, int, int]) -> int:
    """The size of the shorter side of a file before the centre is cut out, for images (c, h, w) of a data set."""
    known = DATASETS.get(dataset or "")
    return (None if known is None else known.shorter_side) or min(shape[1:])


def load_dataset(
    name: str,
    split: Split,
    folder: Path | str | None = None,
    *,
    image_size: int | None = None,
    classes: Sequence[str] | None = None,
    channels: int | None = None,
    skip_unreadable: bool = False,
    allow_code: bool = False,
    on_note: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=3),
) -> "Images":
    """Load the split `split` of the data set `name` on the CPU; `folder` is where its files are or will be stored.

    `name` is one of DATASETS, or your own images: `folder:PATH` (see `load_folder`), `npz:PATH` (see `load_npz`), or
    code that gives a torch Dataset, `package.module:Name` or `FILE.py:Name` (see `load_user_dataset`). Code runs only
    with `allow_code`: `name` may come from the recipe of somebody else. `image_size`, `channels` and `skip_unreadable`
    are for `folder:PATH` only: the others have a shape. With `classes`, the names of a model's outputs in order, labels
    are positions in that list (see `with_classes`).
    `on_note` is called with each note on how the files were read, such as files that were left out; by default it
    warns.
    """
    if not isinstance(name, str):
        raise RequestError(f"dataset: expected a name, got {type(name).__name__}; see `smoothcert datasets`")
    if not allow_code:
        refuse_data_code("load_dataset", name, "allow_code=True")
    options = {"image_size": image_size, "channels": channels, "skip_unreadable": skip_unreadable or None}
    data = _load(name, split, folder, {key: value for key, value in options.items() if value is not None})
    for note in data.notes:
        on_note(note)
    if classes is None:
        return data
    from smoothcert.data.class_names import with_classes

    return with_classes(data, classes)


@dataclass(frozen=True)
class DatasetReader:
    """Reads data sets with these options of `load_dataset`, each part of a data set once; a copy has read nothing.

    Code runs: callers refuse what only a file names (see `refuse_data_code`).
    """

    folder: Path | None = None
    classes: tuple[str, ...] | None = None
    channels: int | None = None
    skip_unreadable: bool = False
    _images: dict[tuple[object, ...], "Images"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, name: str, split: Split, image_size: int | None = None, channels: int | None = None) -> "Images":
        """Return a part of a data set, without notes; `channels` is used if the reader has none."""
        key = (name, split, image_size, channels)
        if key not in self._images:
            self._images[key] = load_dataset(
                name,
                split,
                self.folder,
                image_size=image_size,
                classes=self.classes,
                channels=self.channels or channels,
                skip_unreadable=self.skip_unreadable,
                allow_code=True,
                on_note=lambda text: None,  # callers print the notes of the images themselves
            )
        return self._images[key]


def _load(name: str, split: Split, folder: Path | str | None, options: Mapping[str, Any]) -> "Images":
    kind, _, path = name.partition(":")
    users = kind in ("folder", "npz") and path != ""
    if kind == "torch" and path:
        raise RequestError(f"{name}: `train` was given this Dataset in Python; name it: --dataset FILE.py:{path}")
    if name.endswith(".py"):
        raise RequestError(f"dataset: expected FILE.py:Name, got {name}; add the name of the class after a colon")
    if not users and not is_data_code(name) and name not in DATASETS:
        kind = "npz" if name.endswith(".npz") else "folder"
        exists = Path(name).is_file() if kind == "npz" else Path(name).is_dir()
        hint = did_you_mean(name, DATASETS, "choose one of these", [f"{kind}:{name}"] if exists else [])
        known = ", ".join([*DATASETS, *OWN_DATA])
        raise RequestError(f"expected a data set among {known}, got {name!r}; {hint}")
    if split not in get_args(Split):
        raise RequestError(f"expected a split among {', '.join(get_args(Split))}, got {split!r}; choose one of these")
    if users and kind == "folder":
        from smoothcert.data.class_folders import load_folder

        return load_folder(path, split, **options)
    for option, value in options.items():
        raise RequestError(f"{option}: expected none for {name}, which is no folder of images, got {value}; omit it")
    if users:
        from smoothcert.data.npz_file import load_npz

        return load_npz(path, split)
    if is_data_code(name):
        from smoothcert.data.user_dataset import load_user_dataset

        return load_user_dataset(name, split)
    return DATASETS[name].load(split, with_home(folder) if folder is not None else default_folder())
