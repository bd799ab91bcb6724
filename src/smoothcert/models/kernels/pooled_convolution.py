"""relu(max_pool2d(conv2d(x), 2)) in one GPU kernel, with gradients, as operators for autograd and torch.compile.

The kernels are in `pooled_kernels`.
"""

from typing import Any

import torch
import triton
from torch import Tensor, nn

from smoothcert.models.kernels import pooled_kernels

PROGRAMS = 256
"""Approximate number of programs that sum weight gradients: enough to fill a GPU, few enough to add up quickly."""


@torch.library.custom_op("smoothcert::pooled_convolution", mutates_args=())
def pooled(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [n, h, w, c], weight [o, k, k, c] and bias [o] -> the pooled [n, h', w', o] of `dtype`, and which won."""
    (_, height, width, channels), (outputs, size, _, _) = x.shape, weight.shape
    out, which = _empty_outputs(x, weight, bias, dtype)
    cells = out.numel() // outputs
    small = cells * outputs < 2**19
    block = 32 if small else 64
    with torch.cuda.device_of(x):  # where Triton launches
        pooled_kernels.pooled[(triton.cdiv(cells, block),)](
            x.contiguous(),
            weight.contiguous(),
            bias,
            out,
            which,
            cells,
            height,
            width,
            channels,
            outputs,
            size,
            block_cells=block,
            block_outputs=_block(outputs),
            block_taps=min(64, _block(size * size * channels)),
            num_stages=3 if small else 2,
        )
    return out, which


@pooled.register_fake
def _empty_outputs(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (images, height, width, _), (outputs, size, _, _) = x.shape, weight.shape
    shape = (images, (height - size + 1) // 2, (width - size + 1) // 2, outputs)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=torch.uint8)


@torch.library.custom_op("smoothcert::pooled_convolution_input_gradient", mutates_args=())
def input_gradient(gradient: Tensor, which: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """The gradient with respect to x [n, height, width, c], of the dtype of `gradient`."""
    outputs, size, _, channels = weight.shape
    out: Tensor = _empty_input(gradient, which, weight, height, width)
    cells = which.numel() // outputs
    window = (size + 1) ** 2 * channels
    windows = gradient.new_empty((cells, window))
    block_cells = 64
    block_numbers = min(128, _block(window))
    block = 512
    with torch.cuda.device_of(gradient):  # where Triton launches
        pooled_kernels.window_gradient[(triton.cdiv(cells, block_cells), triton.cdiv(window, block_numbers))](
            gradient.contiguous(),
            which,
            weight.contiguous(),
            windows,
            cells,
            channels,
            outputs,
            size,
            block_cells=block_cells,
            block_outputs=_block(outputs),
            block_numbers=block_numbers,
        )
        pooled_kernels.overlap[(triton.cdiv(out.numel(), block),)](
            windows, out, out.numel(), height, width, channels, size, block=block
        )
    return out


@input_gradient.register_fake
def _empty_input(gradient: Tensor, which: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    return gradient.new_empty((gradient.shape[0], height, width, weight.shape[3]))


@torch.library.custom_op("smoothcert::pooled_convolution_weight_gradient", mutates_args=())
def weight_gradient(gradient: Tensor, which: Tensor, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The gradients with respect to weight [o, k, k, c] and bias [o], float32. Sums in a fixed order."""
    _, height, width, channels = x.shape
    outputs = gradient.shape[-1]
    taps = size * size * channels
    cells = gradient.numel() // outputs
    assert cells > 0, "an empty batch has no gradient"
    block = 32
    block_taps = min(128, _block(taps))
    chunks = triton.cdiv(taps, block_taps)
    blocks_a_part = triton.cdiv(cells, block * max(1, PROGRAMS // chunks))
    parts = triton.cdiv(cells, block * blocks_a_part)
    sums = gradient.new_empty((parts, outputs, taps), dtype=torch.float32)
    bias_sums = gradient.new_empty((parts, outputs), dtype=torch.float32)
    with torch.cuda.device_of(x):  # where Triton launches
        pooled_kernels.weight_gradient[(chunks, parts)](
            gradient.contiguous(),
            which,
            x.contiguous(),
            sums,
            bias_sums,
            cells,
            block * blocks_a_part,
            height,
            width,
            channels,
            outputs,
            size,
            block_cells=block,
            block_outputs=_block(outputs),
            block_taps=block_taps,
        )
    return sums.sum(0).view(outputs, size, size, channels), bias_sums.sum(0)


@weight_gradient.register_fake
def _empty_weight(gradient: Tensor, which: Tensor, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    outputs = gradient.shape[-1]
    channels = x.shape[-1]
    kernels = gradient.new_empty((outputs, size, size, channels), dtype=torch.float32)
    return kernels, gradient.new_empty(outputs, dtype=torch.float32)


def _block(size: int) -> int:
    """The smallest block size that is at least `size` and that matrix units accept."""
    return max(16, int(triton.next_power_of_2(size)))


class PooledConvolution(torch.autograd.Function):
    """The kernels above with their gradients: (x, weight, bias, dtype) -> pooled, which."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        out, which = pooled(x, weight, bias, dtype)
        return out, which

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, which = ctx.saved_tensors
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = input_gradient(gradients[0], which, weight, x.shape[1], x.shape[2]).to(x.dtype)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            for_weight, for_bias = weight_gradient(gradients[0], which, x, weight.shape[1])
            for_weight, for_bias = for_weight.to(weight.dtype), for_bias.to(weight.dtype)
        return for_x, for_weight, for_bias, None


def pooled_convolution(x: Tensor, convolution: nn.Conv2d, dtype: torch.dtype) -> Tensor:
    """relu(max_pool2d(convolution(x), 2)) for x [n, c, h, w] of even sizes and odd kernels, computed in `dtype` (bf16
    or fp16) and summed in float32; channels last."""
    assert convolution.bias is not None
    weight = convolution.weight.permute(0, 2, 3, 1)
    given = x.permute(0, 2, 3, 1), weight, convolution.bias, dtype
    out: Tensor = PooledConvolution.apply(*given)[0]  # type: ignore[no-untyped-call]
    return out.permute(0, 3, 1, 2)
