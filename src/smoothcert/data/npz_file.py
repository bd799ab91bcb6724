"""Images of users in an npz file: `npz:PATH`."""

import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from smoothcert.data.datasets import UNSPLIT, Split, refuse_absent_data
from smoothcert.data.images import ImageData, labels_from
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import check_regular_file, with_home
from smoothcert.io.text import error_line

NPZ_BYTES = 8_000_000_000
"""Arrays of an npz file that are larger than this together are refused: they are read into memory at once."""
MOST_CLASSES = 1_000_000
CHANNELS = (1, 3)


def load_npz(path: Path | str, split: Split) -> ImageData:
    """The arrays `images` and `labels` of an npz file, or `<split>_images` and `<split>_labels` where it has splits.

    Without splits both requests give all images, and their `split` is UNSPLIT. Images are uint8 [n, h, w], [n, h, w, c]
    or [n, c, h, w] with c 1 or 3, labels integers [n]. The number of classes is that of `class_names`, if there is such
    an array, else one more than the largest label of any split. Arrays of objects are refused, because reading them
    could run code, and so are more than NPZ_BYTES.
    """
    path = with_home(path)
    arrays, prefix = _arrays(path, split)
    images, labels = arrays[f"{prefix}images"], arrays[f"{prefix}labels"]
    largest = max(_largest_label(path, name, arrays[name]) for name in arrays if name.endswith("labels"))
    names = _class_names(path, arrays["class_names"], largest) if "class_names" in arrays else None
    return ImageData(
        images=torch.from_numpy(_channels_first(path, f"{prefix}images", images)),
        labels=torch.from_numpy(labels.astype(np.int64)),
        num_classes=len(names) if names else 1 + max(0, largest),
        name=f"npz:{path}",
        split=split if prefix else UNSPLIT,
        class_names=names,
        notes=tuple(f"npz:{path}: {note}" for note in _notes(arrays, prefix, named=names is not None)),
    )


def _notes(arrays: Mapping[str, NDArray[Any]], prefix: str, *, named: bool) -> Iterator[str]:
    """What looks wrong about the labels."""
    trained, tested = (arrays.get(name) for name in ("train_labels", "test_labels"))
    unknown = [] if not prefix or trained is None or tested is None else np.setdiff1d(tested, trained).tolist()
    lowest = min(
        (int(arrays[name].min()) for name in arrays if name.endswith("labels") and len(arrays[name])), default=0
    )
    if lowest > 0 and not named:
        yield labels_from(lowest)
    if unknown:
        some = ", ".join(map(str, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        yield f"no training image has the test labels {some}; a network cannot learn these classes"


def _class_names(path: Path, names: NDArray[Any], largest: int) -> tuple[str, ...]:
    """The names of the classes as text; a name that is missing or used twice is a RequestError."""
    texts = tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names.ravel())
    twice = next((name for name, count in Counter(texts).items() if count > 1), None)
    if twice is not None or len(texts) <= largest:
        given = f"{len(texts)} names" if twice is None else f"{twice!r} twice"
        raise RequestError(
            f"npz:{path}: expected class_names with a name for each label from 0 to {max(0, largest)}, each once, got "
            f"{given}; correct them"
        )
    return texts


def _arrays(path: Path, split: Split) -> tuple[dict[str, NDArray[Any]], str]:
    """The images of `split`, all labels and the class names, by name; and the prefix of the names of a split."""
    check_regular_file(path)
    refuse_absent_data(f"npz:{path}")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): name for name in archive.namelist()}
            prefix = f"{split}_" if {f"{name}_images" for name in get_args(Split)} & members.keys() else ""
            if absent := {f"{prefix}images", f"{prefix}labels"}.difference(members):
                raise RequestError(
                    f"npz:{path}: expected arrays images and labels, or {split}_images and {split}_labels, got "
                    f"{', '.join(members) or 'none'}; add {' and '.join(sorted(absent))}"
                )
            wanted = {f"{prefix}images", "labels", "train_labels", "test_labels", "class_names"}
            chosen = {name: member for name, member in members.items() if name in wanted}
            total = sum(archive.getinfo(member).file_size for member in chosen.values())
            if total > NPZ_BYTES:
                raise RequestError(
                    f"npz:{path}: expected at most {NPZ_BYTES:,} bytes of arrays, which are read into memory at once, "
                    f"got {total:,}; give a smaller file, or folder:PATH, whose images are read when needed"
                )
            arrays = {}
            for name, member in chosen.items():
                with archive.open(member) as file:
                    arrays[name] = npy_format.read_array(file, allow_pickle=False)
            return arrays, prefix
    except RequestError:
        raise
    except Exception as error:  # a damaged archive can fail in nearly any way
        problem = error_line(error)
        raise WorkError(f"npz:{path}: expected an npz file of plain arrays, found: {problem}; write it again") from None


def _largest_label(path: Path, name: str, labels: NDArray[Any]) -> int:
    """The largest class number; -1 where there are no labels."""
    integers = labels.ndim == 1 and labels.dtype.kind in "iu"
    lowest, largest = (int(labels.min()), int(labels.max())) if integers and len(labels) else (0, -1)
    if not integers or lowest < 0 or largest >= MOST_CLASSES:
        given = f"{lowest} to {largest}" if integers else f"{labels.dtype} {list(labels.shape)}"
        raise RequestError(
            f"npz:{path}: expected {name} as integers [n] from 0 to {MOST_CLASSES - 1:,}, got {given}; number the "
            "classes from 0, and leave images without a class out"
        )
    return largest


def _channels_first(path: Path, name: str, images: NDArray[Any]) -> NDArray[np.uint8]:
    """uint8 [n, c, h, w] from any of the three forms; a shape that reads both ways is refused."""
    shape = list(images.shape)
    first = images.ndim == 4 and images.shape[1] in CHANNELS
    last = images.ndim == 4 and images.shape[3] in CHANNELS
    wrong_axes = images.ndim not in (3, 4) or (images.ndim == 4 and first == last) or 0 in shape
    if wrong_axes or images.dtype != np.uint8:
        advice = "add images" if 0 in shape else "reorder the axes, and convert pixels to uint8 in 0..255"
        raise RequestError(
            f"npz:{path}: expected {name} of dtype uint8 as [n, h, w], [n, h, w, c] or [n, c, h, w] with c 1 or 3, got "
            f"{images.dtype} of shape {shape}; {advice}"
        )
    if images.ndim == 3:
        return np.ascontiguousarray(images[:, None])
    return np.ascontiguousarray(images if first else images.transpose(0, 3, 1, 2))
