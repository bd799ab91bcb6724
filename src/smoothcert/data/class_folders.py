"""Images of users with one folder for each class: `folder:PATH`."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor

from smoothcert.data.datasets import UNSPLIT, Split, refuse_absent_data
from smoothcert.data.decoding import Decoder, ImageHead, image_head
from smoothcert.data.image_files import COMPOSITED, FileList, ImageFiles, note_about
from smoothcert.data.images import ImageData
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.console import PlainConsole, leads, terminal_bar
from smoothcert.io.files import with_home
from smoothcert.io.text import some_of

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
ENDINGS = ", ".join(EXTENSIONS)
IN_MEMORY_BYTES = 2_000_000_000
ANNOUNCED = 20_000
"""From this many files on, a line says that they are read: it takes seconds, or minutes for a million files."""
LISTED = 100
"""Most unreadable files that a message names."""
SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val")}


def load_folder(
    path: Path | str,
    split: Split,
    image_size: int | None = None,
    *,
    channels: int | None = None,
    skip_unreadable: bool = False,
    in_memory_bytes: int = IN_MEMORY_BYTES,
) -> ImageData | ImageFiles:
    """Load the images below `path`: PATH/train/<class> and PATH/test/<class> (or val), or PATH/<class> for any split.

    Data in PATH/<class> have no split: both requests give all images, and their `split` is UNSPLIT. Classes are the
    sorted folder names, of the training folder if there is one. Images are [c, s, s] for `image_size` s: the shorter
    side is scaled to s and the centre is cut out; without `image_size` all files must have one size, which they keep.
    Images have `channels` (1 grey, 3 RGB), by default 1 if all files are grey, else 3. Sets of up to `in_memory_bytes`
    are decoded at once into an ImageData, larger ones when needed (ImageFiles). Files that cannot be used are a
    WorkError that lists them; with `skip_unreadable` they are left out, for which all files are decoded once. The notes
    of the data say which files are skipped or changed.
    """
    if image_size is not None and image_size < 1:
        raise RequestError(f"image_size: expected at least 1 pixel, got {image_size}; raise it")
    if channels not in (None, 1, 3):
        raise RequestError(f"channels: expected 1 (grey) or 3 (RGB), got {channels}; choose one of these")
    path = with_home(path)
    root, classes = _split_folder(path, split)
    files, labels = list_images(root, subfolders(root), classes)
    heads, unreadable = _heads(files)
    if not heads:
        raise _unusable(files, unreadable)
    decoder = _decoder(files, heads, image_size, channels)
    in_memory = len(files) * math.prod(decoder.shape) <= in_memory_bytes
    images = torch.empty((len(files) if in_memory else 0, *decoder.shape), dtype=torch.uint8, device="cpu")
    if in_memory or skip_unreadable:
        unreadable |= _decode(files, heads, decoder, images if in_memory else None)
    skipped: tuple[str, ...] = ()
    if unreadable:
        readable = [index for index in heads if index not in unreadable]
        if not skip_unreadable or not readable:
            raise _unusable(files, unreadable)
        skipped = (f"{files.root}: {len(unreadable)} of {len(files)} files are skipped: {_reasons(files, unreadable)}",)
        images = images[readable] if in_memory else images
        labels = labels[readable]
        files = FileList(files.root, files.names[readable])
        heads = dict(enumerate(heads[index] for index in readable))
    about: dict[str, Any] = {
        "labels": labels,
        "num_classes": len(classes),
        "name": f"folder:{path}",
        "split": UNSPLIT if root == path else split,
        "class_names": tuple(classes),
        "notes": (*skipped, *_notes(files, heads, classes, decoder.channels), *_enlarged(files, heads, image_size)),
    }
    if in_memory:
        return ImageData(images=images, file_names=files.relative(), **about)
    return ImageFiles(files=files, decoder=decoder, **about)


def _split_folder(path: Path, split: Split) -> tuple[Path, list[str]]:
    """The folder with the class folders of `split`, and all classes."""
    refuse_absent_data(f"folder:{path}")
    # A folder called train is a split only if it contains folders: it may be the class of railway trains.
    splits = {name: subfolders(path / name) for names in SPLIT_FOLDERS.values() for name in names}
    if not any(splits.values()):
        if not (classes := subfolders(path)):
            raise RequestError(
                f"folder:{path}: expected a folder for each class with images ({ENDINGS}) in it, "
                "got no folders; make them, or train/<class> and test/<class>"
            )
        return path, _check_not_empty(path, classes)
    chosen = next((name for name in SPLIT_FOLDERS[split] if splits[name]), None)
    if chosen is None:
        given = ", ".join(name for name, classes in splits.items() if classes)
        wanted = " or ".join(SPLIT_FOLDERS[split])
        raise RequestError(f"folder:{path}: expected {wanted} with class folders, got {given} alone; add it")
    named_by = "train" if splits["train"] else chosen
    return path / chosen, _check_not_empty(path / named_by, splits[named_by])


def _check_not_empty(root: Path, classes: list[str]) -> list[str]:
    """`classes`; each must have an image in `root`, because an empty folder would shift the labels after it."""
    for name in classes:
        if not image_names(root / name):
            others = len(skipped_names(root / name))
            given = f"none but {others} other files or folders" if others else "none"
            raise RequestError(
                f"{root / name}: expected images ({ENDINGS}) of a class, got {given}; add some or remove it"
            )
    return classes


def subfolders(root: Path) -> list[str]:
    """The names of the folders in `root` except hidden ones, sorted; empty if there is no such folder."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:  # which knows folders without a request for each name
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def image_names(folder: Path) -> list[str]:
    """The names of the image files in `folder` except hidden ones, by their extensions, sorted."""
    return sorted(name for name in os.listdir(folder) if name.lower().endswith(EXTENSIONS) and name[0] != ".")


def skipped_names(folder: Path) -> list[str]:
    """The names in `folder`, also those of folders, that are neither images, by their extensions, nor hidden."""
    return [name for name in os.listdir(folder) if not name.lower().endswith(EXTENSIONS) and name[0] != "."]


def list_images(root: Path, present: Sequence[str], classes: Sequence[str]) -> tuple[FileList, Tensor]:
    """The images in the folders `present` of `root` and their labels int64 [n]: positions in `classes`.

    Sorted by class, then by name, so that an index means the same image everywhere. A folder that is not among
    `classes` and a split without images are a RequestError.
    """
    folders = set(present)
    if unknown := sorted(folders - set(classes)):
        raise RequestError(
            f"{root}: expected the classes of the training folder alone, got {some_of(unknown)} as well; "
            "remove what does not belong there"
        )
    pairs = [
        (f"{folder}/{name}", label)
        for label, folder in enumerate(classes)
        if folder in folders
        for name in image_names(root / folder)
    ]
    if not pairs:
        raise RequestError(
            f"{root}: expected images ({ENDINGS}) in its {len(present)} class folders, got none; add some"
        )
    names, labels = zip(*pairs, strict=True)
    return FileList.of(root, names), torch.tensor(labels, dtype=torch.int64, device="cpu")


def _heads(files: FileList) -> tuple[dict[int, ImageHead], dict[int, WorkError]]:
    """The header of each file, by index, and the errors of the files that cannot be used."""
    heads: dict[int, ImageHead] = {}
    unreadable: dict[int, WorkError] = {}
    if len(files) >= ANNOUNCED:
        PlainConsole(stderr=True).note(f"reading the headers of {len(files):,} files in {files.root}")
    with _bar() as bar:
        for index in bar.track(range(len(files)), description=f"reading headers in {files.root}"):
            try:
                heads[index] = image_head(files[index])
            except WorkError as error:
                unreadable[index] = error
    return heads, unreadable


def _decode(files: FileList, indices: Iterable[int], decoder: Decoder, images: Tensor | None) -> dict[int, WorkError]:
    """Decode the files with these `indices`, into `images` if given; return the errors of those that fail."""
    unreadable: dict[int, WorkError] = {}
    with _bar() as bar:
        for index in bar.track(indices, description=f"decoding {files.root}"):
            try:
                pixels = torch.from_numpy(decoder.centre(files[index]))
            except WorkError as error:
                unreadable[index] = error
                continue
            if images is not None:
                images[index].copy_(pixels)
    return unreadable


def _bar() -> Progress:
    """A progress bar for many files, if this is a terminal; it disappears at the end."""
    return terminal_bar(MofNCompleteColumn(), TimeRemainingColumn(), shown=leads(), transient=True)


def _decoder(files: FileList, heads: dict[int, ImageHead], image_size: int | None, channels: int | None) -> Decoder:
    """How the files become images of one shape."""
    first = next(iter(heads))
    width, height = heads[first].size
    for index, head in heads.items():
        if image_size is None and head.size != (width, height):
            names = [files[number].relative_to(files.root) for number in (first, index)]
            raise RequestError(
                f"{files.root}: expected images of one size, got {names[0]} of {width}x{height} and {names[1]} of "
                f"{head.size[0]}x{head.size[1]} pixels; give --image-size S, the side to scale and crop them to"
            )
    channels = channels or (1 if all(head.grey for head in heads.values()) else 3)
    return Decoder(channels, image_size or height, image_size or width, shorter_side=image_size)


def _unusable(files: FileList, errors: dict[int, WorkError]) -> WorkError:
    """One line about all files that cannot be used."""
    if len(errors) == 1:
        return WorkError(f"{next(iter(errors.values()))}, or pass --skip-unreadable")
    return WorkError(
        f"{files.root}: {len(errors)} of {len(files)} files cannot be used: {_reasons(files, errors)}; "
        "replace or delete them, or pass --skip-unreadable"
    )


def _reasons(files: FileList, errors: dict[int, WorkError]) -> str:
    """The files that cannot be used, each with the reason."""
    reasons = []
    for index in sorted(errors)[:LISTED]:
        path = files[index]
        reason = str(errors[index]).removeprefix(f"{path}: ").rpartition("; ")[0]
        reasons.append(f"{path.relative_to(files.root)} ({reason})")
    return ", ".join(reasons) + (f" and {len(errors) - LISTED} more" if len(errors) > LISTED else "")


def _enlarged(files: FileList, heads: dict[int, ImageHead], size: int | None) -> tuple[str, ...]:
    """A note if files are smaller than the images of `size`: radii are then larger than in the files."""
    count = sum(size is not None and min(head.size) < size for head in heads.values())
    if count == 0:
        return ()
    files_are = f"{count} of {len(heads)} files {'is' if count == 1 else 'are'}"
    return (
        f"{files.root}: {files_are} enlarged to {size}x{size} pixels before noise is added: radii are lengths in "
        "enlarged images; a smaller --image-size and a model that enlarges avoid this",
    )


def _notes(files: FileList, heads: dict[int, ImageHead], classes: list[str], channels: int) -> tuple[str, ...]:
    """Notes about files that are skipped, read in colour, or composited."""
    notes = []
    folders = [files.root / name for name in classes]
    skipped = [folder / name for folder in folders if folder.is_dir() for name in skipped_names(folder)]
    if skipped:
        endings = Counter("folder" if path.is_dir() else path.suffix.lower() or "no extension" for path in skipped)
        kinds = ", ".join(ending for ending, _ in endings.most_common(5))
        files_are = "file or folder is" if len(skipped) == 1 else "files or folders are"
        notes.append(
            f"{files.root}: {len(skipped)} {files_are} skipped ({kinds}): images end in {ENDINGS} and are directly "
            "in the folder of their class"
        )
    coloured = next((index for index, head in heads.items() if not head.grey), None)
    grey = sum(head.grey for head in heads.values())
    if coloured is not None and channels == 1:
        notes.append(f"{files.root}: {len(heads) - grey} of {len(heads)} files are in colour and are read as grey")
    elif coloured is not None and grey:
        notes.append(
            f"{files.root}: all images are read as RGB, although {grey} of {len(heads)} files "
            f"{'is' if grey == 1 else 'are'} grey, because {files[coloured].relative_to(files.root)} is in colour "
            f"(mode {heads[coloured].mode})"
        )
    return (*notes, *note_about([files[index] for index, head in heads.items() if head.transparent], COMPOSITED))
