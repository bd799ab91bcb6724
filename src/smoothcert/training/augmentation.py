"""The augmentation of training images that a recipe has, and notes about data without one."""

from dataclasses import replace
from typing import Any

from smoothcert.data import DATASETS, ImageFiles, Images
from smoothcert.data.augmentation import AUGMENTATIONS
from smoothcert.data.torch_dataset import DatasetImages
from smoothcert.training.choices import Augmentation
from smoothcert.training.recipe import TrainRecipe


def with_augmentation(data: Images, name: Augmentation | None) -> Images:
    """The training images `data` with the augmentation `name` in place of their own; None: as they are.

    Transforms inside a torch Dataset are part of its images: they stay, and the augmentation follows them.
    """
    if name is None:
        return data
    changes: dict[str, Any] = {"random_parts": False} if isinstance(data, ImageFiles) else {}
    return replace(data, augment=AUGMENTATIONS[name], **changes)


def lacks_augmentation(data: Images) -> bool:
    """Whether training would see the images as they are; a torch Dataset may have transforms of its own."""
    augmented = data.augment is not None or (isinstance(data, ImageFiles) and data.random_parts)
    return not augmented and not isinstance(data, DatasetImages)


def default_augmentation(data: Images, dataset: str) -> Augmentation | None:
    """The augmentation for the training images of `dataset` without a preset; None if they have what suits them."""
    if dataset in DATASETS or not lacks_augmentation(data):
        return None
    return "flip-crop" if data.shape[0] == 3 else "none"


def without_augmentation(name: str) -> bool:
    """Whether the images of the data set `name`, which need not be read for this, are not augmented by default."""
    known = DATASETS.get(name)
    return name.partition(":")[0] in ("folder", "npz") if known is None else not known.augmented


def augmentation_note(planned: str, recipe: TrainRecipe, dataset: str) -> str | None:
    """A note if `recipe`, made for the data set `planned`, is used with `dataset`, which has no augmentation."""
    known = DATASETS.get(planned)
    if known is None or not known.augmented or recipe.augment is not None:
        return None
    return (
        f"the recipe was made for {planned}, whose training images are flipped and cropped at random; those of "
        f"{dataset} are used as they are: --set augment=flip-crop changes this, augment=none keeps it without this note"
    )
