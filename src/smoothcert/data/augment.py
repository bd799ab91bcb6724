"""Augmentation of a whole batch at once, on its device."""

import torch
from torch import Tensor
from torch.nn import functional

PADDING = 4  # zeros on each side, so there are 2 * PADDING + 1 offsets in each direction


def flip_and_crop(images: Tensor, uniform: Tensor) -> Tensor:
    """Crop each image of [b, c, h, w] at random from its zero-padded copy, and mirror half of them.

    `uniform` [b, 3] in [0, 1) decides: [:, 0] < 0.5 mirrors left and right, [:, 1] and [:, 2] choose the vertical and
    the horizontal offset of the crop, uniformly from 0..8. Shapes are static, and no value is read from the device.
    """
    batch, channels, height, width = images.shape
    offsets = (uniform[:, 1:] * (2 * PADDING + 1)).long().clamp(max=2 * PADDING)
    columns = torch.arange(width, device=images.device)
    # A mirrored image is read from right to left, so that one pair of gathers does both.
    columns = torch.where(uniform[:, :1] < 0.5, columns.flip(0), columns) + offsets[:, 1:]
    rows = torch.arange(height, device=images.device) + offsets[:, :1]
    padded = functional.pad(images, (PADDING,) * 4)
    cropped = padded.gather(2, rows[:, None, :, None].expand(batch, channels, height, padded.shape[3]))
    return cropped.gather(3, columns[:, None, None, :].expand(batch, channels, height, width))
