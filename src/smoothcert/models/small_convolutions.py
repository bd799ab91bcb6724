"""Convolution and pooling of few channels, rewritten for a GPU's matrix units: same numbers, up to rounding.

The four outputs of a 2x2 pooling window are four kernels, each shifted by a pixel, on one window of k + 1 pixels that
moves by two. Pixels that lie two apart become channels, so no stride is left: what was a convolution of 1 or 20
channels, which leaves matrix units idle, is one of 4 or 80 with four times the outputs, and a maximum over fours.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNMENT = 8
"""Matrix units want sizes that are multiples of this."""


def window_kernels(weight: Tensor) -> Tensor:
    """[o, c, k, k] with odd k -> [4 o, 4 c, (k + 1) / 2, (k + 1) / 2]: the four shifted kernels, for `pixel_unshuffle`d
    inputs."""
    outputs, inputs, size, _ = weight.shape
    half = (size + 1) // 2
    shifted = torch.stack([F.pad(weight, (dx, 1 - dx, dy, 1 - dy)) for dy in (0, 1) for dx in (0, 1)])
    pixels = shifted.view(4 * outputs, inputs, half, 2, half, 2).permute(0, 1, 3, 5, 2, 4)
    return pixels.reshape(4 * outputs, 4 * inputs, half, half)


def convolve_windows(x: Tensor, convolution: nn.Conv2d) -> Tensor:
    """max_pool2d(convolution(x), 2) as one convolution: the fastest forward pass."""
    kernels = window_kernels(convolution.weight).contiguous(memory_format=torch.channels_last)
    return _largest_of_four(F.conv2d(F.pixel_unshuffle(x, 2), kernels), 1, convolution.bias)


def multiply_windows(x: Tensor, convolution: nn.Conv2d) -> Tensor:
    """max_pool2d(convolution(x), 2) as one matrix product: the fastest with its gradient, compiled."""
    kernels = window_kernels(convolution.weight).permute(0, 2, 3, 1)
    pixels = F.pixel_unshuffle(x, 2).permute(0, 2, 3, 1)
    missing = -pixels.shape[-1] % ALIGNMENT
    windows = Windows.apply(F.pad(pixels, (0, missing)), kernels.shape[1])  # type: ignore[no-untyped-call]
    products = windows.flatten(0, 2).flatten(1) @ F.pad(kernels, (0, missing)).flatten(1).t()
    return _largest_of_four(products.view(*windows.shape[:3], -1), 3, convolution.bias).permute(0, 3, 1, 2)


def aligned_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """layer(x) with zeros appended to the outputs up to a multiple of ALIGNMENT; x may have zeros appended too."""
    missing, extra = -layer.out_features % ALIGNMENT, x.shape[-1] - layer.in_features
    return F.linear(x, F.pad(layer.weight, (0, extra, 0, missing)), F.pad(layer.bias, (0, missing)))


class Windows(torch.autograd.Function):
    """[n, h, w, c] -> [n, h - k + 1, w - k + 1, k, k, c]: all windows of k pixels, copied.

    The gradient is written as a sum of shifted slices, which a compiler fuses into one kernel: torch's own scatters.
    """

    @staticmethod
    def forward(pixels: Tensor, size: int) -> Tensor:
        return pixels.unfold(1, size, 1).unfold(2, size, 1).permute(0, 1, 2, 4, 5, 3).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.size = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), last = gradients, ctx.size - 1
        parts = [
            F.pad(gradient[:, :, :, i, j], (0, 0, j, last - j, i, last - i))
            for i in range(ctx.size)
            for j in range(ctx.size)
        ]
        return sum(parts[1:], parts[0]), None


def _largest_of_four(x: Tensor, dim: int, bias: Tensor | None) -> Tensor:
    """The maximum over the four quarters of `dim`, plus `bias` along it."""
    first, second, third, fourth = x.chunk(4, dim)
    largest = torch.maximum(torch.maximum(first, second), torch.maximum(third, fourth))
    return largest if bias is None else largest + bias.view(-1, *[1] * (x.ndim - 1 - dim))
