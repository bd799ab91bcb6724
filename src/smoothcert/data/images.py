"""Images and labels of one split, held as tensors on one device and cut into batches there."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from smoothcert.errors import RequestError

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True, eq=False)  # eq=False: comparing tensors gives tensors, not a truth value
class ImageData:
    """One split of a data set: `images` uint8 [n, c, h, w], `labels` int64 [n], on the same device.

    Every label lies in [0, num_classes); what breaks this is refused with a RequestError when the object is made.
    """

    images: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    num_classes: int
    name: str
    split: str

    def __post_init__(self) -> None:
        self._check_images()
        self._check_labels()

    def _check_images(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise RequestError(
                f"{self._title}: expected images of dtype uint8 and shape [n, c, h, w], got {_describe(self.images)}; "
                "convert pixels to 0..255 and put the channels before height and width"
            )

    def _check_labels(self) -> None:
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise RequestError(
                f"{self._title}: expected labels of dtype int64 and shape [n], got {_describe(self.labels)}; "
                "give one class index for each image"
            )
        if len(self.labels) != len(self.images):
            raise RequestError(
                f"{self._title}: expected as many labels as images, got {len(self.images)} images and "
                f"{len(self.labels)} labels; give one label for each image"
            )
        if self.labels.device != self.images.device:
            raise RequestError(
                f"{self._title}: expected images and labels on one device, got {self.images.device} and "
                f"{self.labels.device}; move them together with to(device)"
            )
        if self.num_classes < 1:
            raise RequestError(f"{self._title}: expected num_classes of at least 1, got {self.num_classes}; raise it")
        if len(self.labels) == 0:
            return
        lowest, highest = (int(bound) for bound in torch.aminmax(self.labels))
        if lowest < 0 or highest >= self.num_classes:
            raise RequestError(
                f"{self._title}: expected labels in 0..{self.num_classes - 1}, got labels in {lowest}..{highest}; "
                "correct the labels or num_classes"
            )

    @property
    def _title(self) -> str:
        return f"data set {self.name!r}, split {self.split!r}"

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (c, h, w) of one image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def to(self, device: torch.device | str) -> "ImageData":
        """The same data on `device`."""
        return self._with(self.images.to(device), self.labels.to(device))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images `indices` as float32 [b, c, h, w] in [0, 1] and their labels [b], where the data lives.

        `indices` is an int64 tensor [b]; with indices on the data's device nothing passes through the host.
        A pixel p becomes p / 255 correctly rounded, the same bits on every device.
        """
        device = self.images.device
        indices = indices.to(device)
        # CUDA divides by a Python number as a product with its reciprocal, which is off by one ulp for half of the
        # pixel values; a divisor that lives on the device is truly divided by.
        white = torch.full((), 255.0, dtype=torch.float32, device=device)
        images = self.images.index_select(0, indices).to(torch.float32).div_(white)
        return images, self.labels.index_select(0, indices)

    def subset(self, indices: Tensor) -> "ImageData":
        """The images and labels at `indices` (int64 [m]), in that order, as data of their own."""
        indices = indices.to(self.images.device)
        return self._with(self.images.index_select(0, indices), self.labels.index_select(0, indices))

    def _with(self, images: Tensor, labels: Tensor) -> "ImageData":
        return ImageData(images, labels, self.num_classes, self.name, self.split)


def _describe(tensor: Tensor) -> str:
    return f"dtype {str(tensor.dtype).removeprefix('torch.')} and shape {list(tensor.shape)}"
