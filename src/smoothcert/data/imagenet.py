"""ImageNet (ILSVRC2012): 1,281,167 training and 50,000 validation photographs of 1,000 classes, 3 x 224 x 224.

Russakovsky et al.: "ImageNet Large Scale Visual Recognition Challenge", https://arxiv.org/abs/1409.0575.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from smoothcert.data.class_folders import image_names, list_images, subfolders
from smoothcert.data.datasets import DATASETS, OTHER_NUMBERS, Split
from smoothcert.data.decoding import Decoder
from smoothcert.data.image_files import FileList, ImageFiles
from smoothcert.errors import RequestError, WorkError

SPEC = DATASETS["imagenet"]
DECODER = Decoder(*SPEC.shape, SPEC.shorter_side, upright=False)
"""As in the scripts of papers, EXIF orientation is not applied."""
FOLDERS: dict[Split, str] = {"train": "train", "test": "val"}
WNID = re.compile(r"n\d{8}")
FLAT_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG", re.IGNORECASE)
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
META = "meta.mat"
TRAINING_IMAGES, VALIDATION_IMAGES = SPEC.sizes
VALIDATION_NAME = re.compile(rb"ILSVRC2012_val_(\d{8})(?!\d)", re.IGNORECASE)


def load(split: Split, folder: Path) -> ImageFiles:
    """One split of ImageNet; "test" is the validation set, whose labels are public. Nothing is downloaded.

    Searched for in `folder`/imagenet, `folder`/ILSVRC2012 and `folder` itself: train/<wnid>/*.JPEG and
    val/<wnid>/*.JPEG, or val/ILSVRC2012_val_*.JPEG with the ground truth and the class list of the development kit.
    A class is the position of its wnid among the sorted wnids of the training set (or of the validation set, if that
    is all there is); with fewer than 1,000 of them it is a subset and `num_classes` is their number. Test images are
    sorted by class, then by name, so that every 100th of them is the subset that papers certify. Other sets of images
    are read, too, with a note; but then the data set is called "imagenet (not the official set)", also in every result,
    because its image numbers are not those of other results.
    """
    place = _place(split, folder)
    root = place / FOLDERS[split]
    present = _wnids(root)
    classes = _wnids(place / FOLDERS["train"])
    if present:
        classes = classes or present
        files, labels = list_images(root, present, classes)
    else:
        classes, files, labels = _flat_validation_set(place, classes)
    problem = difference(split, files, labels, classes)
    return ImageFiles(
        files=files,
        labels=labels,
        num_classes=len(classes),
        name="imagenet" if problem is None else f"imagenet{OTHER_NUMBERS}",
        split=split,
        decoder=DECODER,
        normalization=SPEC.normalization,
        random_parts=split == "train",
        class_names=tuple(classes),
        notes=() if problem is None else (f"{root}: {problem}",),
    )


def difference(split: Split, files: FileList, labels: Tensor, classes: Sequence[str]) -> str | None:
    """How the images differ from those of ImageNet, in one line; None if they do not.

    The numbers of validation images are their positions by class and name, so each number must be there once.
    """
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    got = f"got {len(files):,} of {sum(map(bool, counts)):,} classes"
    if split == "train":
        if len(files) == TRAINING_IMAGES and len(counts) == SPEC.num_classes and all(counts):
            return None
        return f"expected {TRAINING_IMAGES:,} training images of {SPEC.num_classes:,} classes, {got}"
    matches = [VALIDATION_NAME.match(bytes(name).rpartition(b"/")[2]) for name in files.names]
    numbers = {int(match[1]) for match in matches if match}
    each = VALIDATION_IMAGES // SPEC.num_classes
    if counts == [each] * SPEC.num_classes and numbers == set(range(1, VALIDATION_IMAGES + 1)):
        return None
    others = len(files) - len(numbers)
    renamed = f", {others:,} with other names, or the number of another" if others else ""
    return (
        f"expected the {VALIDATION_IMAGES:,} validation images ILSVRC2012_val_00000001 to {VALIDATION_IMAGES:08} of "
        f"{SPEC.num_classes:,} classes, {each} of each, {got}{renamed}; image numbers are not those of "
        f"published certificates, so results call the data set imagenet{OTHER_NUMBERS}"
    )


def _wnids(root: Path) -> list[str]:
    return [name for name in subfolders(root) if WNID.fullmatch(name)]


def _place(split: Split, folder: Path) -> Path:
    """The folder of the data set: the first one with class folders, or with a flat validation set."""
    for place in (folder / "imagenet", folder / "ILSVRC2012", folder):
        root = place / FOLDERS[split]
        if _wnids(root) or (split == "test" and root.is_dir() and _flat_names(root)):
            return place
    flat = f" or val/ILSVRC2012_val_*.JPEG with {GROUND_TRUTH}" if split == "test" else ""
    raise RequestError(
        f"expected ImageNet in {folder / 'imagenet'} as {FOLDERS[split]}/<wnid>/*.JPEG{flat}, got nothing of the kind; "
        "download it from https://image-net.org (an account is needed) and put it there"
    )


def _flat_names(root: Path) -> list[tuple[int, str]]:
    """(number, name) of the validation images that lie in `root` itself."""
    matches = (FLAT_NAME.fullmatch(name) for name in image_names(root))
    return [(int(match[1]), match[0]) for match in matches if match]


def _flat_validation_set(place: Path, classes: list[str]) -> tuple[list[str], FileList, Tensor]:
    """(classes, files, labels) of a validation set without class folders, in the order that it has with them."""
    root = place / FOLDERS["test"]
    meta_path, truth_path = (_in_devkit(place, name) for name in (META, GROUND_TRUTH))
    if meta_path is None or truth_path is None:
        raise RequestError(
            f"{root}: expected class folders, or the files {META} and {GROUND_TRUTH} of the development kit in "
            f"{place / 'devkit' / 'data'}, got no {META if meta_path is None else GROUND_TRUTH}; add it, or sort the "
            "images into <wnid> folders"
        )
    wnids = _read_meta(meta_path)
    truth = _ground_truth(truth_path, len(wnids))
    classes = classes or sorted(wnids)
    position = {wnid: label for label, wnid in enumerate(classes)}
    rows: list[tuple[int, str]] = []
    for number, name in _flat_names(root):
        if not 1 <= number <= len(truth):
            raise WorkError(f"{truth_path}: expected a line for {name}, found {len(truth)} lines; replace the file")
        wnid = wnids[truth[number - 1] - 1]
        if wnid not in position:
            raise RequestError(f"{root / name}: expected a class of the training folder, got {wnid}; remove the image")
        rows.append((position[wnid], name))
    rows.sort()
    labels = torch.tensor([label for label, _ in rows], dtype=torch.int64, device="cpu")
    return classes, FileList.of(root, [name for _, name in rows]), labels


def _in_devkit(place: Path, name: str) -> Path | None:
    kits = (place / "devkit", place / "ILSVRC2012_devkit_t12")
    folders = (*(kit / "data" for kit in kits), *kits, place, place / FOLDERS["test"])
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _ground_truth(path: Path, num_ids: int) -> list[int]:
    try:
        ids = [int(word) for word in path.read_text(encoding="ascii").split()]
    except (OSError, ValueError) as error:
        raise WorkError(f"{path}: expected one number per line, found something else ({error}); replace it") from None
    if not ids or not 1 <= min(ids) <= max(ids) <= num_ids:
        found = f"{min(ids)}..{max(ids)}" if ids else "an empty file"
        raise WorkError(f"{path}: expected ILSVRC ids in 1..{num_ids}, found {found}; replace it")
    return ids


def _read_meta(path: Path) -> list[str]:
    """The wnid of each ILSVRC id, from id 1 on, which is not the sorted order."""
    from scipy.io import loadmat

    try:
        synsets = loadmat(path, squeeze_me=True, variable_names=["synsets"])["synsets"]
        leaves = [row for row in synsets if int(row["num_children"]) == 0]  # the others are groups of classes
        by_id = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in leaves}
        wnids = [by_id[number] for number in range(1, len(leaves) + 1)]
    except Exception as error:  # scipy raises what its parsers happen to meet
        raise WorkError(
            f"{path}: expected the classes of ILSVRC2012, found a file that cannot be read "
            f"({type(error).__name__}); replace it"
        ) from None
    if not wnids or not all(WNID.fullmatch(wnid) for wnid in wnids):
        raise WorkError(f"{path}: expected wnids such as n01440764, found others; replace it")
    return wnids
