"""Random flips and crops of training images, for images of any size."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from smoothcert.data.images import Augment

PADDED_SHARE = 8
"""Before a crop, a side of n pixels gets n // 8 zeros at each end: 4 for 32 pixels, 28 for 224."""


def flip_and_crop(images: Tensor, uniform: Tensor, *, flipped: bool = True, cropped: bool = True) -> Tensor:
    """Crop each image of [b, c, h, w] at random from its zero-padded copy, and mirror half of them.

    `uniform` [b, 3] in [0, 1) decides: [:, 0] < 0.5 mirrors left and right, [:, 1] and [:, 2] choose the vertical and
    the horizontal offset of the crop, uniformly from 0 to twice the padding. Shapes are static, and no value is read
    from the device.
    """
    batch, channels, height, width = images.shape
    down, across = (side // PADDED_SHARE if cropped else 0 for side in (height, width))
    columns = torch.arange(width, device=images.device).expand(batch, width)
    if flipped:
        # A mirrored image is read from right to left, so that one pair of gathers does both.
        columns = torch.where(uniform[:, :1] < 0.5, columns.flip(1), columns)
    columns = columns + _offsets(uniform[:, 2:], across)
    rows = torch.arange(height, device=images.device) + _offsets(uniform[:, 1:2], down)
    padded = functional.pad(images, (across, across, down, down))
    cut = padded.gather(2, rows[:, None, :, None].expand(batch, channels, height, padded.shape[3]))
    return cut.gather(3, columns[:, None, None, :].expand(batch, channels, height, width))


AUGMENTATIONS: Mapping[str, Augment | None] = {
    "flip-crop": flip_and_crop,
    "flip": partial(flip_and_crop, cropped=False),
    "crop": partial(flip_and_crop, flipped=False),
    "none": None,
}
"""By their names in recipes."""


def _offsets(uniform: Tensor, padding: int) -> Tensor:
    """Offsets of crops in 0 .. 2 * padding, all equally likely."""
    return (uniform * (2 * padding + 1)).long().clamp(max=2 * padding)
