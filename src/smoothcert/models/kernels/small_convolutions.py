"""Convolution and pooling of few channels, rewritten for a GPU's matrix units: same numbers, up to rounding.

The four values of a 2x2 pooling cell are outputs of four kernels, each shifted by one pixel, on a window of k + 1
pixels with stride 2. Pixels at distance two become channels, which removes the stride: a convolution of 1 or 20
channels, which leaves matrix units idle, becomes one of 4 or 80 channels with four times the outputs, and a maximum
over four.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNMENT = 8
"""Matrix units are fastest for multiples of this size."""


def window_kernels(weight: Tensor) -> Tensor:
    """[o, c, k, k] with odd k -> [4 o, 4 c, (k + 1) / 2, (k + 1) / 2]: the four shifted kernels, for `pixel_unshuffle`d
    inputs."""
    outputs, inputs, size, _ = weight.shape
    half = (size + 1) // 2
    shifted = torch.stack([F.pad(weight, (dx, 1 - dx, dy, 1 - dy)) for dy in (0, 1) for dx in (0, 1)])
    pixels = shifted.view(4 * outputs, inputs, half, 2, half, 2).permute(0, 1, 3, 5, 2, 4)
    return pixels.reshape(4 * outputs, 4 * inputs, half, half)


def convolve_windows(x: Tensor, convolution: nn.Conv2d) -> Tensor:
    """max_pool2d(convolution(x), 2) as one convolution."""
    kernels = window_kernels(convolution.weight).contiguous(memory_format=torch.channels_last)
    first, second, third, fourth = F.conv2d(F.pixel_unshuffle(x, 2), kernels).chunk(4, 1)
    largest = torch.maximum(torch.maximum(first, second), torch.maximum(third, fourth))
    return largest if convolution.bias is None else largest + convolution.bias.view(-1, 1, 1)


def aligned_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """layer(x) with zeros appended to the outputs up to a multiple of ALIGNMENT; x may have zeros appended too."""
    missing = -layer.out_features % ALIGNMENT
    extra = x.shape[-1] - layer.in_features
    return F.linear(x, F.pad(layer.weight, (0, extra, 0, missing)), F.pad(layer.bias, (0, missing)))
