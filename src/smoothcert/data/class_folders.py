"""Images in one folder for each class, the most common layout of one's own data: which files there are, in order."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from smoothcert.data.image_files import FileList
from smoothcert.errors import RequestError

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


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
