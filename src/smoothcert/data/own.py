"""One's own images: `folder:PATH` with a folder for each class, `npz:PATH` with arrays."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from smoothcert.data.class_folders import EXTENSIONS, image_names, list_images, subfolders
from smoothcert.data.decode import Decoder, opened_image
from smoothcert.data.image_files import FileList, ImageFiles
from smoothcert.data.images import ImageData, Split
from smoothcert.errors import RequestError, WorkError

IN_MEMORY_BYTES = 2_000_000_000
GREY_MODES = ("1", "L", "LA")
SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val")}
CHANNELS = (1, 3)


def load_folder(
    path: Path, split: Split, image_size: int | None = None, *, in_memory_bytes: int = IN_MEMORY_BYTES
) -> ImageData | ImageFiles:
    """The images below `path`: PATH/train/<class> and PATH/test/<class> (or val), or PATH/<class> for either split.

    Classes are the sorted folder names, of the training folder where there is one. Images are [c, s, s] for
    `image_size` s: the shorter side scaled to s and the centre cut out; without `image_size` all must have one size,
    which they keep. They are grey (c = 1) if all files are, else RGB. Sets of up to `in_memory_bytes` are decoded at
    once into an ImageData, larger ones when needed (ImageFiles).
    """
    if image_size is not None and image_size < 1:
        raise RequestError(f"image_size: expected at least 1 pixel, got {image_size}; raise it")
    root, classes = _split_folder(path, split)
    files, labels = list_images(root, subfolders(root), classes)
    decoder = _decoder(files, image_size)
    data = ImageFiles(
        files=files,
        labels=labels,
        num_classes=len(classes),
        name=f"folder:{path}",
        split=split,
        decoder=decoder,
        class_names=tuple(classes),
    )
    if len(files) * np.prod(decoder.shape) > in_memory_bytes:
        return data
    images = torch.empty((len(files), *decoder.shape), dtype=torch.uint8)
    for index, place in enumerate(images):
        place.copy_(torch.from_numpy(decoder.centre(files[index])))
    return ImageData(images, labels, len(classes), data.name, split, class_names=data.class_names)


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
            raise RequestError(
                f"{root / name}: expected images ({', '.join(EXTENSIONS)}) of a class, got none; add some or remove it"
            )
    return classes


def _decoder(files: FileList, image_size: int | None) -> Decoder:
    """Looks at the head of every file: size and colour."""
    grey, first = True, (0, 0)
    for index in range(len(files)):
        with opened_image(files[index]) as image:
            size, grey = image.size, grey and image.mode in GREY_MODES
        first = size if index == 0 else first
        if image_size is None and size != first:
            raise RequestError(
                f"{files.root}: expected images of one size or an image_size, got {files[0].name} of "
                f"{first[0]}x{first[1]} and {files[index].name} of {size[0]}x{size[1]} pixels; give image_size"
            )
    channels = 1 if grey else 3
    if image_size is None:
        return Decoder(channels, first[1], first[0], shorter_side=None)
    return Decoder(channels, image_size, image_size, shorter_side=image_size)


def load_npz(path: Path, split: Split) -> ImageData:
    """The arrays `images` and `labels` of an npz file, or `<split>_images` and `<split>_labels` where it has splits.

    Images are uint8 [n, h, w], [n, h, w, c] or [n, c, h, w] with c 1 or 3, labels integers [n]. The number of classes
    is that of `class_names`, if there is such an array, else one more than the largest label of any split. Arrays of
    objects are refused: reading them could run code.
    """
    arrays, prefix = _arrays(path, split)
    images, labels = arrays[f"{prefix}images"], arrays[f"{prefix}labels"]
    names = tuple(str(name) for name in arrays["class_names"].ravel()) if "class_names" in arrays else None
    all_labels = [_checked_labels(path, name, arrays[name]) for name in arrays if name.endswith("labels")]
    num_classes = len(names) if names else 1 + max(0, *(int(some.max(initial=0)) for some in all_labels))
    return ImageData(
        images=torch.from_numpy(_channels_first(path, f"{prefix}images", images)),
        labels=torch.from_numpy(labels.astype(np.int64)),
        num_classes=num_classes,
        name=f"npz:{path}",
        split=split,
        class_names=names,
    )


def _arrays(path: Path, split: Split) -> tuple[dict[str, NDArray[Any]], str]:
    """The images of `split`, all labels and the class names, by name; and what stands before the names of a split."""
    if not path.is_file():
        raise RequestError(f"npz:{path}: expected a file, got {'a folder' if path.exists() else 'nothing'} there")
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            prefix = f"{split}_" if f"{split}_images" in archive.files else ""
            if absent := {f"{prefix}images", f"{prefix}labels"}.difference(archive.files):
                raise RequestError(
                    f"npz:{path}: expected arrays images and labels, or {split}_images and {split}_labels, got "
                    f"{', '.join(archive.files) or 'none'}; add {' and '.join(sorted(absent))}"
                )
            wanted = {f"{prefix}images", "labels", "train_labels", "test_labels", "class_names"}
            return {name: archive[name] for name in archive.files if name in wanted}, prefix
    except RequestError:
        raise
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        problem = " ".join(str(error).split())
        raise WorkError(f"npz:{path}: expected an npz file of plain arrays, found: {problem}; write it anew") from None


def _checked_labels(path: Path, name: str, labels: NDArray[Any]) -> NDArray[Any]:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise RequestError(
            f"npz:{path}: expected {name} as integers [n], got {labels.dtype} {list(labels.shape)}; "
            "give one class index for each image"
        )
    return labels


def _channels_first(path: Path, name: str, images: NDArray[Any]) -> NDArray[np.uint8]:
    """uint8 [n, c, h, w] from any of the three forms; a shape that reads both ways is refused."""
    if images.ndim == 3:
        images = images[:, None]
    else:
        first, last = images.ndim == 4 and images.shape[1] in CHANNELS, images.shape[-1] in CHANNELS
        if images.ndim != 4 or first == last:
            raise RequestError(
                f"npz:{path}: expected {name} as [n, h, w], [n, h, w, c] or [n, c, h, w] with c 1 or 3, got shape "
                f"{list(images.shape)}; reorder the axes"
            )
        images = images if first else images.transpose(0, 3, 1, 2)
    if images.dtype != np.uint8:
        raise RequestError(f"npz:{path}: expected {name} of dtype uint8, got {images.dtype}; scale pixels to 0..255")
    return np.ascontiguousarray(images)
