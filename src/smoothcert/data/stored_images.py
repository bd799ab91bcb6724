"""Images and labels as they are in the files of a data set, read without torch."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smoothcert.data.datasets import DatasetSpec, Split

if TYPE_CHECKING:
    from smoothcert.data.images import Augment, ImageData


class StoredImages(NamedTuple):
    """One split: `images` uint8 [n, c, h, w], `labels` int64 [n]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    name: str
    class_names: tuple[str, ...] = ()

    def as_data(self, spec: DatasetSpec, split: Split, augment: "Augment | None" = None) -> "ImageData":
        """The same images as tensors on the CPU."""
        import torch

        from smoothcert.data.images import ImageData

        images, labels = torch.from_numpy(self.images), torch.from_numpy(self.labels)
        about = (spec.num_classes, self.name, split, spec.normalization, augment, self.class_names or None)
        return ImageData(images, labels, *about)
