"""Images and labels: one reader for each data set, all of them in `DATASETS`; batches are cut on the device."""

from importlib import import_module
from typing import TYPE_CHECKING

from smoothcert.data.datasets import DATASETS as DATASETS
from smoothcert.data.datasets import OWN_DATA as OWN_DATA
from smoothcert.data.datasets import UNSPLIT as UNSPLIT
from smoothcert.data.datasets import DatasetReader as DatasetReader
from smoothcert.data.datasets import DatasetSpec as DatasetSpec
from smoothcert.data.datasets import Normalization as Normalization
from smoothcert.data.datasets import Split as Split
from smoothcert.data.datasets import default_folder as default_folder
from smoothcert.data.datasets import is_data_code as is_data_code
from smoothcert.data.datasets import known_class_names as known_class_names
from smoothcert.data.datasets import load_dataset as load_dataset
from smoothcert.data.datasets import refuse_data_code as refuse_data_code
from smoothcert.data.datasets import scaled_side as scaled_side

if TYPE_CHECKING:
    from smoothcert.data.class_folders import load_folder as load_folder
    from smoothcert.data.class_names import read_class_names as read_class_names
    from smoothcert.data.class_names import with_known_classes as with_known_classes
    from smoothcert.data.image_files import ImageFiles as ImageFiles
    from smoothcert.data.images import ImageData as ImageData
    from smoothcert.data.npz_file import load_npz as load_npz
    from smoothcert.data.streamed_images import Images as Images
    from smoothcert.data.torch_dataset import images_from_dataset as images_from_dataset

_MODULES = {
    "ImageData": "images",
    "ImageFiles": "image_files",
    "Images": "streamed_images",
    "images_from_dataset": "torch_dataset",
    "load_folder": "class_folders",
    "load_npz": "npz_file",
    "read_class_names": "class_names",
    "with_known_classes": "class_names",
}


def __getattr__(name: str) -> object:
    """Import names that need torch on first use: listing the data sets does not."""
    if name not in _MODULES:
        raise AttributeError(f"module 'smoothcert.data' has no attribute {name!r}")
    value: object = getattr(import_module(f"smoothcert.data.{_MODULES[name]}"), name)
    return value
