"""relu(max_pool2d(conv2d(x), 2)) and its gradients as Triton kernels; `pooled_convolution` launches them.

Images are stored channels last. A program computes a block of pooling cells. The four positions of a cell are four
matrix products with the same weights. Their maximum is taken in registers, so neither windows nor discarded values are
written to memory. For the gradients, `which` stores the position of the maximum, or 4 where the ReLU is zero.
"""

import triton
import triton.language as tl

DEAD = tl.constexpr(4)


@triton.jit
def pooled(
    x,
    weight,
    bias,
    out,
    which,
    cells,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    outputs: tl.constexpr,
    size: tl.constexpr,
    block_cells: tl.constexpr,
    block_outputs: tl.constexpr,
    block_taps: tl.constexpr,
):
    """x [n, height, width, channels], weight [outputs, size, size, channels] -> out, which [cells, outputs]."""
    taps: tl.constexpr = size * size * channels
    element_type = out.dtype.element_ty
    cell = tl.program_id(0) * block_cells + tl.arange(0, block_cells)
    corner = _corner(cell, height, width, channels, size)
    output = tl.arange(0, block_outputs)
    first = tl.zeros((block_cells, block_outputs), tl.float32)
    second = tl.zeros((block_cells, block_outputs), tl.float32)
    third = tl.zeros((block_cells, block_outputs), tl.float32)
    fourth = tl.zeros((block_cells, block_outputs), tl.float32)
    for start in range(0, taps, block_taps):
        tap = start + tl.arange(0, block_taps)
        mask = (tap < taps)[:, None] & (output < outputs)[None, :]
        kernels = tl.load(weight + output[None, :] * taps + tap[:, None], mask, other=0.0).to(element_type)
        pointers = x + corner[:, None] + _offset(tap, width, channels, size)[None, :]
        inside = (cell < cells)[:, None] & (tap < taps)[None, :]
        first = tl.dot(tl.load(pointers, inside, other=0.0).to(element_type), kernels, first)
        second = tl.dot(tl.load(pointers + channels, inside, other=0.0).to(element_type), kernels, second)
        third = tl.dot(tl.load(pointers + width * channels, inside, other=0.0).to(element_type), kernels, third)
        fourth = tl.dot(tl.load(pointers + (width + 1) * channels, inside, other=0.0).to(element_type), kernels, fourth)
    winner, largest = tl.zeros_like(first).to(tl.int32), first
    winner, largest = _larger(second, 1, winner, largest)
    winner, largest = _larger(third, 2, winner, largest)
    winner, largest = _larger(fourth, 3, winner, largest)
    value = largest + tl.load(bias + output, output < outputs, other=0.0).to(tl.float32)[None, :]
    dead = value <= 0  # not `~(value > 0)`: NaN must remain NaN
    out_offsets = cell[:, None].to(tl.int64) * outputs + output[None, :]
    mask = (cell < cells)[:, None] & (output < outputs)[None, :]
    tl.store(out + out_offsets, tl.where(dead, 0.0, value).to(element_type), mask)
    tl.store(which + out_offsets, tl.where(dead, DEAD, winner).to(tl.uint8), mask)


@triton.jit
def window_gradient(
    gradient,
    which,
    weight,
    out,
    cells,
    channels: tl.constexpr,
    outputs: tl.constexpr,
    size: tl.constexpr,
    block_cells: tl.constexpr,
    block_outputs: tl.constexpr,
    block_numbers: tl.constexpr,
):
    """gradient, which [cells, outputs] -> out [cells, (size + 1) * (size + 1) * channels]: the inputs of a cell."""
    row: tl.constexpr = (size + 1) * channels
    kernel_row: tl.constexpr = size * channels
    window: tl.constexpr = (size + 1) * row
    kind = out.dtype.element_ty
    cell = tl.program_id(0) * block_cells + tl.arange(0, block_cells)
    number = tl.program_id(1) * block_numbers + tl.arange(0, block_numbers)
    output = tl.arange(0, block_outputs)
    offsets = cell[:, None].to(tl.int64) * outputs + output[None, :]
    mask = (cell < cells)[:, None] & (output < outputs)[None, :]
    won = tl.load(which + offsets, mask, other=4).to(tl.int32)
    share = tl.load(gradient + offsets, mask, other=0.0).to(tl.float32)
    total = tl.zeros((block_cells, block_numbers), tl.float32)
    for position in tl.static_range(4):
        down, along = number // row - position // 2, number % row - position % 2 * channels
        seen = (down >= 0) & (down < size) & (along >= 0) & (along < kernel_row)
        place = output[:, None] * (size * kernel_row) + (down * kernel_row + along)[None, :]
        kernels = tl.load(weight + place, (output < outputs)[:, None] & seen[None, :], other=0.0).to(kind)
        total = tl.dot(tl.where(won == position, share, 0.0).to(kind), kernels, total)
    out_offsets = cell[:, None].to(tl.int64) * window + number[None, :]
    tl.store(out + out_offsets, total.to(kind), (cell < cells)[:, None] & (number < window)[None, :])


@triton.jit
def overlap(
    windows,
    out,
    numbers,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
):
    """windows [cells, (size + 1) * (size + 1) * channels] -> out [n, height, width, channels]: overlapping windows
    are added."""
    rows: tl.constexpr = (height - size + 1) // 2
    columns: tl.constexpr = (width - size + 1) // 2
    number = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    channel, x = number % channels, number // channels % width
    y, image = number // (channels * width) % height, number // (channels * width * height)
    total = tl.zeros((block,), tl.float32)
    for back in tl.static_range((size + 1) // 2):
        for left in tl.static_range((size + 1) // 2):
            v, u = y // 2 - back, x // 2 - left
            saw = (number < numbers) & (v >= 0) & (v < rows) & (u >= 0) & (u < columns)
            place = ((y - 2 * v) * (size + 1) + x - 2 * u) * channels + channel
            cell = (image * rows + v) * columns + u
            total += tl.load(windows + cell * ((size + 1) * (size + 1) * channels) + place, saw, other=0.0).to(
                tl.float32
            )
    tl.store(out + number, total.to(out.dtype.element_ty), number < numbers)


@triton.jit
def weight_gradient(
    gradient,
    which,
    x,
    parts,
    bias_parts,
    cells,
    cells_a_part,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    outputs: tl.constexpr,
    size: tl.constexpr,
    block_cells: tl.constexpr,
    block_outputs: tl.constexpr,
    block_taps: tl.constexpr,
):
    """Sums over a part of the cells: parts [parts, outputs, size * size * channels] and bias_parts [parts, outputs]."""
    taps: tl.constexpr = size * size * channels
    element_type = gradient.dtype.element_ty
    part = tl.program_id(1)
    output = tl.arange(0, block_outputs)
    tap = tl.program_id(0) * block_taps + tl.arange(0, block_taps)
    offset = _offset(tap, width, channels, size)
    total = tl.zeros((block_outputs, block_taps), tl.float32)
    bias_total = tl.zeros((block_outputs,), tl.float32)
    for start in range(0, cells_a_part, block_cells):
        cell = part * cells_a_part + start + tl.arange(0, block_cells)
        corner = _corner(cell, height, width, channels, size)
        offsets = cell[:, None].to(tl.int64) * outputs + output[None, :]
        mask = (cell < cells)[:, None] & (output < outputs)[None, :]
        won = tl.load(which + offsets, mask, other=4).to(tl.int32)
        share = tl.load(gradient + offsets, mask, other=0.0).to(tl.float32)
        seen = x + corner[:, None] + offset[None, :]
        inside = (cell < cells)[:, None] & (tap < taps)[None, :]
        for position in tl.static_range(4):
            moved = position // 2 * width * channels + position % 2 * channels
            pixels = tl.load(seen + moved, inside, other=0.0).to(element_type)
            total = tl.dot(tl.trans(tl.where(won == position, share, 0.0).to(element_type)), pixels, total)
        bias_total += tl.sum(tl.where(won == DEAD, 0.0, share), 0)
    out_offsets = (part * outputs + output)[:, None] * taps + tap[None, :]
    tl.store(parts + out_offsets, total, (output < outputs)[:, None] & (tap < taps)[None, :])
    if tl.program_id(0) == 0:
        tl.store(bias_parts + part * outputs + output, bias_total, output < outputs)


@triton.jit
def _larger(candidate, position: tl.constexpr, winner, largest):
    """The larger of `largest` and `candidate`, the first of equals; NaN wins, as in torch."""
    better = (candidate > largest) | (candidate != candidate)
    return tl.where(better, position, winner), tl.where(better, candidate, largest)


@triton.jit
def _corner(cell, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, size: tl.constexpr):
    """The offset of the first input of each cell."""
    rows: tl.constexpr = (height - size + 1) // 2
    columns: tl.constexpr = (width - size + 1) // 2
    image, y, x = cell // (rows * columns), cell // columns % rows, cell % columns
    return ((image.to(tl.int64) * height + 2 * y) * width + 2 * x) * channels


@triton.jit
def _offset(tap, width: tl.constexpr, channels: tl.constexpr, size: tl.constexpr):
    """The offsets of a kernel's taps (row, column, channel) from the first one."""
    return tap // (size * channels) * (width * channels) + tap % (size * channels)
