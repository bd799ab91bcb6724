"""relu(batch_norm(conv2d(x)) + shortcut) in training on a GPU, with its gradients: operators that autograd and
torch.compile know. The kernels themselves are in `normalised_kernels`."""

from typing import Any

import torch
import triton
from torch import Tensor, nn

from smoothcert.kernels import normalised_kernels

CONVOLUTION = {16: (128, 4, 1), 32: (128, 4, 1), 64: (64, 4, 3)}
"""Channels -> block of pixels, warps, stages."""
EVALUATION = {16: (128, 4, 1), 32: (128, 4, 1), 64: (128, 4, 3)}
"""The same for many images, in evaluation."""
WEIGHT_GRADIENT = {16: (128, 512, 4, 3), 32: (64, 512, 4, 3), 64: (64, 256, 8, 3)}
"""Channels -> block of pixels, pixels of a program, warps, stages."""
PROGRAMS = 512
"""About how many programs sum over all pixels: they keep a GPU busy, and their sums are few."""
BLOCK = 1024
"""Numbers of a program where each is by itself."""


@torch.library.custom_op("smoothcert::small_convolution", mutates_args=())
def small_convolution(x: Tensor, weight: Tensor, flipped: bool) -> tuple[Tensor, Tensor]:
    """x [n, h, w, c], weight [c, 3, 3, c] -> [n, h, w, c] and sums for its statistics [programs, 2, c].

    `flipped`: the transposed convolution, which takes a gradient back, without sums."""
    _, height, width, channels = x.shape
    block, warps, stages = CONVOLUTION[channels]
    out, sums = _convolved_like(x, weight, flipped)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # where Triton launches
        normalised_kernels.convolution[(triton.cdiv(_pixels(x), block),)](
            x.contiguous(),
            weight.contiguous(),
            out,
            sums,
            _pixels(x),
            *(height, width, channels),
            flipped=flipped,
            block=block,
            num_warps=warps,
            num_stages=stages,
        )
    return out, sums


@small_convolution.register_fake
def _convolved_like(x: Tensor, weight: Tensor, flipped: bool) -> tuple[Tensor, Tensor]:
    channels = x.shape[3]
    parts = 0 if flipped else triton.cdiv(_pixels(x), CONVOLUTION[channels][0])
    return x.new_empty(x.shape), x.new_empty((parts, 2, channels), dtype=torch.float32)


@torch.library.custom_op("smoothcert::batch_statistics", mutates_args=("running_mean", "running_variance", "batches"))
def batch_statistics(
    sums: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    batches: Tensor,
    pixels: int,
    momentum: float,
    epsilon: float,
) -> Tensor:
    """sums [parts, 2, c] over `pixels` -> [4, c]: mean, 1 / standard deviation, and the normalisation's factor and
    summand. The running statistics are updated as batch norm does."""
    parts, _, channels = sums.shape
    out = sums.new_empty((4, channels))
    with torch.cuda.device_of(sums):  # type: ignore[no-untyped-call]
        normalised_kernels.statistics[(1,)](
            sums,
            gamma,
            beta,
            running_mean,
            running_variance,
            batches,
            out,
            *(parts, pixels, momentum, epsilon),
            channels=channels,
            block=8192 // channels,
            num_warps=8,
        )
    return out


@batch_statistics.register_fake
def _statistics_like(
    sums: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    batches: Tensor,
    pixels: int,
    momentum: float,
    epsilon: float,
) -> Tensor:
    return sums.new_empty((4, sums.shape[2]))


@torch.library.custom_op("smoothcert::normalisation", mutates_args=())
def normalisation(y: Tensor, statistics: Tensor, shortcut: Tensor | None) -> Tensor:
    """relu(normalised y + shortcut) for y [n, h, w, c] and statistics [4, c]."""
    out = torch.empty_like(y)
    with torch.cuda.device_of(y):  # type: ignore[no-untyped-call]
        normalised_kernels.normalisation[(triton.cdiv(y.numel(), BLOCK),)](
            y,
            statistics,
            y if shortcut is None else shortcut.contiguous(),
            out,
            y.numel(),
            channels=y.shape[3],
            added=shortcut is not None,
            block=BLOCK,
        )
    return out


@normalisation.register_fake
def _normalised_like(y: Tensor, statistics: Tensor, shortcut: Tensor | None) -> Tensor:
    return torch.empty_like(y)


@torch.library.custom_op("smoothcert::normalisation_gradient", mutates_args=())
def normalisation_gradient(
    gradient: Tensor, out: Tensor, y: Tensor, statistics: Tensor, shortcut: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to y, the shortcut (or nothing), and beta and gamma together [2, c]."""
    channels, pixels, gradient = y.shape[3], _pixels(y), gradient.contiguous()
    block = 2048 // channels
    part = triton.cdiv(pixels, PROGRAMS * block) * block
    for_y, for_shortcut, _ = _gradients_like(gradient, out, y, statistics, shortcut)
    sums = statistics.new_empty((triton.cdiv(pixels, part), 2, channels))
    with torch.cuda.device_of(y):  # type: ignore[no-untyped-call]
        normalised_kernels.normalisation_sums[(len(sums),)](
            gradient, out, y, statistics, sums, pixels, part, channels=channels, block=block
        )
        total = sums.sum(0)
        normalised_kernels.normalisation_gradient[(triton.cdiv(y.numel(), BLOCK),)](
            gradient,
            out,
            y,
            statistics,
            total,
            for_y,
            for_shortcut,
            *(y.numel(), pixels),
            channels=channels,
            added=shortcut,
            block=BLOCK,
        )
    return for_y, for_shortcut, total


@normalisation_gradient.register_fake
def _gradients_like(
    gradient: Tensor, out: Tensor, y: Tensor, statistics: Tensor, shortcut: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(y), y.new_empty(y.shape if shortcut else (0,)), statistics.new_empty((2, y.shape[3]))


@torch.library.custom_op("smoothcert::small_convolution_weight_gradient", mutates_args=())
def weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """[c, 3, 3, c] in float32, summed in a fixed order."""
    _, height, width, channels = x.shape
    block, part, warps, stages = WEIGHT_GRADIENT[channels]
    parts = triton.cdiv(_pixels(x), part)
    sums = x.new_empty((parts, channels, 3, 3, channels), dtype=torch.float32)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        normalised_kernels.weight_gradient[(parts, 3)](
            x.contiguous(),
            gradient.contiguous(),
            sums,
            *(_pixels(x), part),
            *(height, width, channels),
            block=block,
            num_warps=warps,
            num_stages=stages,
        )
    return sums.sum(0)


@weight_gradient.register_fake
def _weight_like(x: Tensor, gradient: Tensor) -> Tensor:
    return x.new_empty((x.shape[3], 3, 3, x.shape[3]), dtype=torch.float32)


def _pixels(x: Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[2]


class NormalisedConvolution(torch.autograd.Function):
    """The operators above with their gradients; images [n, h, w, c], weight [c, 3, 3, c]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gamma: Tensor,
        beta: Tensor,
        shortcut: Tensor | None,
        running_mean: Tensor,
        running_variance: Tensor,
        batches: Tensor,
        momentum: float,
        epsilon: float,
    ) -> Tensor:
        y, sums = small_convolution(x, weight, flipped=False)
        statistics = batch_statistics(
            sums, gamma, beta, running_mean, running_variance, batches, _pixels(x), momentum, epsilon
        )
        out: Tensor = normalisation(y, statistics, shortcut)
        ctx.save_for_backward(x, weight, y, statistics, out)
        ctx.has_shortcut = shortcut is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y, statistics, out = ctx.saved_tensors
        for_y, for_shortcut, sums = normalisation_gradient(gradients[0], out, y, statistics, ctx.has_shortcut)
        for_x = small_convolution(for_y, weight, flipped=True)[0] if ctx.needs_input_grad[0] else None
        for_weight = weight_gradient(x, for_y) if ctx.needs_input_grad[1] else None
        return for_x, for_weight, sums[1], sums[0], for_shortcut if ctx.has_shortcut else None, *[None] * 5


def normalised_convolution(
    x: Tensor, convolution: nn.Conv2d, norm: nn.BatchNorm2d, shortcut: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """relu(norm(convolution(x)) + shortcut), as in training, for x [n, c, h, w] and a convolution with kernels here and
    without a bias; computed in `dtype` (bf16 or fp16), summed in float32; channels last."""
    out: Tensor = NormalisedConvolution.apply(  # type: ignore[no-untyped-call]
        x.permute(0, 2, 3, 1).to(dtype),
        convolution.weight.permute(0, 2, 3, 1),
        norm.weight,
        norm.bias,
        None if shortcut is None else shortcut.permute(0, 2, 3, 1).to(dtype),
        *(norm.running_mean, norm.running_var, norm.num_batches_tracked),
        *(norm.momentum, norm.eps),
    )
    return out.permute(0, 3, 1, 2)


def evaluated_convolution(x: Tensor, convolution: nn.Conv2d, shortcut: Tensor | None, dtype: torch.dtype) -> Tensor:
    """relu(convolution(x) + shortcut) without gradients, for a convolution that has kernels; otherwise as above."""
    images, weight = x.permute(0, 2, 3, 1).to(dtype).contiguous(), convolution.weight.permute(0, 2, 3, 1)
    bias = weight.new_zeros(len(weight)) if convolution.bias is None else convolution.bias
    added = images if shortcut is None else shortcut.permute(0, 2, 3, 1).to(dtype).contiguous()
    _, height, width, channels = images.shape
    block, warps, stages = EVALUATION[channels]
    out = torch.empty_like(images)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        normalised_kernels.evaluation[(triton.cdiv(_pixels(images), block),)](
            images,
            weight.contiguous(),
            bias,
            added,
            out,
            _pixels(images),
            *(height, width, channels),
            added=shortcut is not None,
            block=block,
            num_warps=warps,
            num_stages=stages,
        )
    return out.permute(0, 3, 1, 2)
