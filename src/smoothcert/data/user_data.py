"""Images of users: `folder:PATH` with one folder for each class, `npz:PATH` with arrays."""

import math
import os
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from torch import Tensor

from smoothcert.data.decoding import Decoder, ImageHead, image_head, transparency_note
from smoothcert.data.image_files import FileList, ImageFiles
from smoothcert.data.images import UNSPLIT, ImageData, Split
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import check_regular_file

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
IN_MEMORY_BYTES = 2_000_000_000
NPZ_BYTES = 8_000_000_000
"""Arrays of an npz file that are larger than this together are refused: they are read into memory at once."""
MOST_CLASSES = 1_000_000
LISTED = 10
"""Unreadable files that a message names."""
SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val")}
CHANNELS = (1, 3)


def load_folder(
    path: Path, split: Split, image_size: int | None = None, *, in_memory_bytes: int = IN_MEMORY_BYTES
) -> ImageData | ImageFiles:
    """The images below `path`: PATH/train/<class> and PATH/test/<class> (or val), or PATH/<class> for either split.

    Data in PATH/<class> have no split: both requests give all images, and their `split` is UNSPLIT. Classes are the
    sorted folder names, of the training folder where there is one. Images are [c, s, s] for `image_size` s: the shorter
    side scaled to s and the centre cut out; without `image_size` all must have one size, which they keep. They are grey
    (c = 1) if all files are, else RGB. Sets of up to `in_memory_bytes` are decoded at once into an ImageData, larger
    ones when needed (ImageFiles). Files that cannot be used are a WorkError that lists them. The notes of the data say
    which files are skipped or changed.
    """
    if image_size is not None and image_size < 1:
        raise RequestError(f"image_size: expected at least 1 pixel, got {image_size}; raise it")
    root, classes = _split_folder(path, split)
    files, labels = list_images(root, subfolders(root), classes)
    heads, unreadable = _heads(files)
    if not heads:
        raise _unusable(files, unreadable)
    decoder = _decoder(files, heads, image_size)
    in_memory = len(files) * math.prod(decoder.shape) <= in_memory_bytes
    images = torch.empty((len(files) if in_memory else 0, *decoder.shape), dtype=torch.uint8)
    for index in heads if in_memory else ():
        try:
            images[index].copy_(torch.from_numpy(decoder.centre(files[index])))
        except WorkError as error:
            unreadable[index] = error
    if unreadable:
        raise _unusable(files, unreadable)
    data = ImageFiles(
        files=files,
        labels=labels,
        num_classes=len(classes),
        name=f"folder:{path}",
        split=UNSPLIT if root == path else split,
        decoder=decoder,
        class_names=tuple(classes),
        notes=_notes(files, heads, classes),
    )
    if not in_memory:
        return data
    return ImageData(
        images, labels, len(classes), data.name, data.split, class_names=data.class_names, notes=data.notes
    )


def _split_folder(path: Path, split: Split) -> tuple[Path, list[str]]:
    """The folder with the class folders of `split`, and all classes."""
    if not path.is_dir():
        raise RequestError(f"folder:{path}: expected a folder, got {'a file' if path.exists() else 'nothing'} there")
    # A folder called train is a split only if it has folders itself: it may be the class of railway trains.
    splits = {name: subfolders(path / name) for names in SPLIT_FOLDERS.values() for name in names}
    if not any(splits.values()):
        if not (classes := subfolders(path)):
            raise RequestError(
                f"folder:{path}: expected a folder for each class with images ({', '.join(EXTENSIONS)}) in it, "
                "got no folders; make them, or train/<class> and test/<class>"
            )
        return path, _with_images(path, classes)
    chosen = next((name for name in SPLIT_FOLDERS[split] if splits[name]), None)
    if chosen is None:
        given = ", ".join(name for name, classes in splits.items() if classes)
        wanted = " or ".join(SPLIT_FOLDERS[split])
        raise RequestError(f"folder:{path}: expected {wanted} with class folders, got {given} alone; add it")
    named_by = "train" if splits["train"] else chosen
    return path / chosen, _with_images(path / named_by, splits[named_by])


def _with_images(root: Path, classes: list[str]) -> list[str]:
    """`classes`, of which each must have an image in `root`: an empty folder would shift the labels after it."""
    for name in classes:
        if not image_names(root / name):
            others = len(skipped_names(root / name))
            given = f"none but {others} other files" if others else "none"
            raise RequestError(
                f"{root / name}: expected images ({', '.join(EXTENSIONS)}) of a class, got {given}; "
                "add some or remove it"
            )
    return classes


def subfolders(root: Path) -> list[str]:
    """The names of the folders in `root`, sorted, hidden ones left out; none where there is no such folder."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def image_names(folder: Path) -> list[str]:
    """The names of the image files in `folder`, sorted; judged by their extensions, hidden ones left out."""
    return sorted(name for name in _visible_names(folder) if name.lower().endswith(EXTENSIONS))


def skipped_names(folder: Path) -> list[str]:
    """The names in `folder` that are neither images, by their extensions, nor hidden, nor folders; sorted."""
    others = (name for name in _visible_names(folder) if not name.lower().endswith(EXTENSIONS))
    return sorted(name for name in others if not (folder / name).is_dir())


def _visible_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if not entry.name.startswith(".")]


def list_images(root: Path, present: Sequence[str], classes: Sequence[str]) -> tuple[FileList, Tensor]:
    """The images in the folders `present` of `root` and their labels int64 [n]: positions in `classes`.

    Sorted by class, then by name, so an index means the same image everywhere. A folder that is not among `classes`
    and a split without images are a RequestError.
    """
    if unknown := sorted(set(present) - set(classes)):
        raise RequestError(
            f"{root}: expected the classes of the training folder alone, got {_few(unknown)} as well; "
            "remove what does not belong there"
        )
    names: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(classes):
        inside = image_names(root / folder) if folder in present else []
        names += [f"{folder}/{name}" for name in inside]
        labels += [label] * len(inside)
    if not names:
        endings = ", ".join(EXTENSIONS)
        raise RequestError(
            f"{root}: expected images ({endings}) in its {len(present)} class folders, got none; add some"
        )
    return FileList.of(root, names), torch.tensor(labels, dtype=torch.int64)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _heads(files: FileList) -> tuple[dict[int, ImageHead], dict[int, WorkError]]:
    """What each file says of itself, by index, and what is wrong with the others."""
    heads: dict[int, ImageHead] = {}
    unreadable: dict[int, WorkError] = {}
    for index in range(len(files)):
        try:
            heads[index] = image_head(files[index])
        except WorkError as error:
            unreadable[index] = error
    return heads, unreadable


def _decoder(files: FileList, heads: dict[int, ImageHead], image_size: int | None) -> Decoder:
    """How the files become images of one shape."""
    first = next(iter(heads))
    width, height = heads[first].size
    for index, head in heads.items():
        if image_size is None and head.size != (width, height):
            raise RequestError(
                f"{files.root}: expected images of one size, got {files[first].name} of {width}x{height} and "
                f"{files[index].name} of {head.size[0]}x{head.size[1]} pixels; give --image-size S "
                "(train: --set image_size=S), the side to scale and crop them to"
            )
    channels = 1 if all(head.grey for head in heads.values()) else 3
    if image_size is None:
        return Decoder(channels, height, width, shorter_side=None)
    return Decoder(channels, image_size, image_size, shorter_side=image_size)


def _unusable(files: FileList, errors: dict[int, WorkError]) -> WorkError:
    """One line about all files that cannot be used."""
    if len(errors) == 1:
        return next(iter(errors.values()))
    reasons = []
    for index in sorted(errors)[:LISTED]:
        path = files[index]
        reason = str(errors[index]).removeprefix(f"{path}: ").rpartition("; ")[0]
        reasons.append(f"{path.relative_to(files.root)} ({reason})")
    more = f" and {len(errors) - LISTED} more" if len(errors) > LISTED else ""
    return WorkError(
        f"{files.root}: {len(errors)} of {len(files)} files cannot be used: {', '.join(reasons)}{more}; "
        "replace or delete them"
    )


def _notes(files: FileList, heads: dict[int, ImageHead], classes: list[str]) -> tuple[str, ...]:
    """What a user should know of the folder: files that are skipped, read in colour, or composited."""
    notes = []
    folders = [files.root / name for name in classes]
    skipped = [name for folder in folders if folder.is_dir() for name in skipped_names(folder)]
    if skipped:
        endings = Counter(Path(name).suffix.lower() or "no extension" for name in skipped)
        kinds = ", ".join(ending for ending, _ in endings.most_common(5))
        notes.append(
            f"{files.root}: {len(skipped)} {'files are' if len(skipped) > 1 else 'file is'} skipped ({kinds}): "
            f"images end in {', '.join(EXTENSIONS)}"
        )
    coloured = next((index for index, head in heads.items() if not head.grey), None)
    grey = sum(head.grey for head in heads.values())
    if coloured is not None and grey:
        notes.append(
            f"{files.root}: all images are read as RGB, although {grey} of {len(heads)} files are grey, because "
            f"{files[coloured].relative_to(files.root)} is in colour (mode {heads[coloured].mode})"
        )
    transparent = [files[index] for index, head in heads.items() if head.transparent]
    return (*notes, *([transparency_note(transparent)] if transparent else []))


def load_npz(path: Path, split: Split, *, most_bytes: int = NPZ_BYTES) -> ImageData:
    """The arrays `images` and `labels` of an npz file, or `<split>_images` and `<split>_labels` where it has splits.

    Without splits both requests give all images, and their `split` is UNSPLIT. Images are uint8 [n, h, w], [n, h, w, c]
    or [n, c, h, w] with c 1 or 3, labels integers [n]. The number of classes is that of `class_names`, if there is such
    an array, else one more than the largest label of any split. Arrays of objects are refused, because reading them
    could run code, and so are more than `most_bytes`.
    """
    arrays, prefix = _arrays(path, split, most_bytes)
    images, labels = arrays[f"{prefix}images"], arrays[f"{prefix}labels"]
    names = tuple(str(name) for name in arrays["class_names"].ravel()) if "class_names" in arrays else None
    largest = max(_largest_label(path, name, arrays[name]) for name in arrays if name.endswith("labels"))
    return ImageData(
        images=torch.from_numpy(_channels_first(path, f"{prefix}images", images)),
        labels=torch.from_numpy(labels.astype(np.int64)),
        num_classes=len(names) if names else 1 + max(0, largest),
        name=f"npz:{path}",
        split=split if prefix else UNSPLIT,
        class_names=names,
    )


def _arrays(path: Path, split: Split, most_bytes: int) -> tuple[dict[str, NDArray[Any]], str]:
    """The images of `split`, all labels and the class names, by name; and the prefix of the names of a split."""
    check_regular_file(path)
    if not path.exists():
        raise RequestError(f"npz:{path}: expected a file, got nothing there")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): name for name in archive.namelist()}
            prefix = f"{split}_" if f"{split}_images" in members else ""
            if absent := {f"{prefix}images", f"{prefix}labels"}.difference(members):
                raise RequestError(
                    f"npz:{path}: expected arrays images and labels, or {split}_images and {split}_labels, got "
                    f"{', '.join(members) or 'none'}; add {' and '.join(sorted(absent))}"
                )
            wanted = {f"{prefix}images", "labels", "train_labels", "test_labels", "class_names"}
            chosen = {name: member for name, member in members.items() if name in wanted}
            claimed = sum(_claimed_bytes(archive, member) for member in chosen.values())
            if claimed > most_bytes:
                raise RequestError(
                    f"npz:{path}: expected at most {most_bytes:,} bytes of arrays, which are read into memory at once, "
                    f"got {claimed:,}; give a smaller file, or folder:PATH, whose images are read when needed"
                )
            arrays = {}
            for name, member in chosen.items():
                with archive.open(member) as file:
                    arrays[name] = npy_format.read_array(file, allow_pickle=False)
            return arrays, prefix
    except RequestError:
        raise
    except Exception as error:  # a damaged archive can fail in nearly any way
        problem = " ".join(str(error).split())[:160] or type(error).__name__
        raise WorkError(f"npz:{path}: expected an npz file of plain arrays, found: {problem}; write it anew") from None


def _claimed_bytes(archive: zipfile.ZipFile, member: str) -> int:
    """How much memory the array `member` would take, read from its header alone."""
    with archive.open(member) as file:
        version = npy_format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = npy_format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, _, dtype = npy_format.read_array_header_2_0(file)
        else:
            raise ValueError(f"{member} of npy version {version[0]}.{version[1]}")
    if dtype.hasobject:
        raise ValueError(f"{member} holds Python objects")
    if min(shape, default=1) < 0:
        raise ValueError(f"{member} of shape {shape}")
    return math.prod(shape) * int(dtype.itemsize)


def _largest_label(path: Path, name: str, labels: NDArray[Any]) -> int:
    """The largest class number; -1 where there are no labels."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise RequestError(
            f"npz:{path}: expected {name} as integers [n], got {labels.dtype} {list(labels.shape)}; "
            "give one class index for each image"
        )
    largest = int(labels.max(initial=0)) if len(labels) else -1
    if largest >= MOST_CLASSES:
        raise RequestError(
            f"npz:{path}: expected {name} below {MOST_CLASSES:,}, got {largest}; number the classes from 0"
        )
    return largest


def _channels_first(path: Path, name: str, images: NDArray[Any]) -> NDArray[np.uint8]:
    """uint8 [n, c, h, w] from any of the three forms; a shape that reads both ways is refused."""
    shape = list(images.shape)
    first = images.ndim == 4 and images.shape[1] in CHANNELS
    last = images.ndim == 4 and images.shape[3] in CHANNELS
    if images.ndim not in (3, 4) or (images.ndim == 4 and first == last):
        raise RequestError(
            f"npz:{path}: expected {name} as [n, h, w], [n, h, w, c] or [n, c, h, w] with c 1 or 3, got shape "
            f"{shape}; reorder the axes"
        )
    if 0 in shape:
        raise RequestError(f"npz:{path}: expected {name} with at least one image and one pixel, got shape {shape}")
    if images.dtype != np.uint8:
        raise RequestError(f"npz:{path}: expected {name} of dtype uint8, got {images.dtype}; scale pixels to 0..255")
    if images.ndim == 3:
        return np.ascontiguousarray(images[:, None])
    return np.ascontiguousarray(images if first else images.transpose(0, 3, 1, 2))
