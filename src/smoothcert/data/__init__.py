"""Images and labels: one reader for each data set, all of them in `DATASETS`; batches are cut on the device."""

from importlib import import_module
from typing import TYPE_CHECKING

from smoothcert.data.datasets import (
    DATASETS,
    OWN_DATA,
    UNSPLIT,
    DatasetSpec,
    Normalization,
    Split,
    default_folder,
    load_dataset,
    same_data,
    with_home,
)

if TYPE_CHECKING:
    from smoothcert.data.class_folders import load_folder
    from smoothcert.data.class_names import read_class_names, with_classes, with_known_classes
    from smoothcert.data.image_files import ImageFiles
    from smoothcert.data.images import ImageData, Images
    from smoothcert.data.npz_file import load_npz
    from smoothcert.data.torch_dataset import images_from_dataset

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
    "with_known_classes",
]
_MODULES = {
    "ImageData": "images",
    "ImageFiles": "image_files",
    "Images": "images",
    "images_from_dataset": "torch_dataset",
    "load_folder": "class_folders",
    "load_npz": "npz_file",
    "read_class_names": "class_names",
    "with_classes": "class_names",
    "with_known_classes": "class_names",
}


def __getattr__(name: str) -> object:
    """Import names that need torch on first use: listing the data sets does not."""
    if name not in _MODULES:
        raise AttributeError(f"module 'smoothcert.data' has no attribute {name!r}")
    value: object = getattr(import_module(f"smoothcert.data.{_MODULES[name]}"), name)
    return value
