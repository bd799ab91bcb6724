"""relu(batch_norm(conv2d(x)) + shortcut) for 3x3 convolutions of few channels, and its gradients, as Triton kernels;
`residual_layers` launches them.

Images are stored channels last. A program computes a block of pixels, `wide` pixels per row of its matrices. With few
channels, memory traffic takes most of the time, so several of torch's kernels are fused: a convolution also computes
its statistics and sums, and a normalisation also adds the shortcut and applies the ReLU.
"""

import triton
import triton.language as tl


@triton.jit
def matrices(
    weight,
    factor,
    out,
    channels: tl.constexpr,
    transposed: tl.constexpr,
    scaled: tl.constexpr,
    wide: tl.constexpr,
):
    """Program (layer, product): weight [layers, out, 3, 3, in] in the layout of `_nine_taps`. With `scaled`, multiplied
    by factor [layers, out]; with `transposed`, for the gradient of the input."""
    layer, product = tl.program_id(0), tl.program_id(1)
    reach: tl.constexpr = 1 if wide == 1 else 4
    along: tl.constexpr = 3 if wide == 1 else 1
    source, output = tl.arange(0, reach * channels)[:, None], tl.arange(0, wide * channels)[None, :]
    tap = source // channels - output // channels + product % along
    place, channel, target = product // along * 3 + tap, source % channels, output % channels
    if transposed:
        place, channel, target = 8 - place, target, channel
    offsets = ((layer * channels + target) * 9 + place) * channels + channel
    values = tl.load(weight + offsets, (tap >= 0) & (tap <= 2), other=0.0).to(tl.float32)
    if scaled:
        values *= tl.load(factor + layer * channels + target)
    out_offsets = ((layer * (3 * along) + product) * (reach * channels) + source) * (wide * channels) + output
    tl.store(out + out_offsets, values.to(out.dtype.element_ty))


@triton.jit
def convolution(
    x,
    weight,
    out,
    sums,
    pixels,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    wide: tl.constexpr,
    rows: tl.constexpr,
    stages: tl.constexpr,
):
    """x [pixels, c], weight as in `_nine_taps` -> out [pixels, c], and sums [programs, 2, c] of out and of its squared
    differences from its mean in this program."""
    pixel, number = _places(pixels, channels, wide, rows)
    total = _nine_taps(x, weight, pixel, pixels, height, width, channels, wide, rows, stages)
    offsets, mask = pixel[:, None] * channels + number[None, :], (pixel < pixels)[:, None]
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + offsets, rounded, mask)
    rounded = rounded.to(tl.float32)  # zero beyond the last pixel
    count = tl.minimum(pixels - tl.program_id(0) * rows * wide, rows * wide)
    mean = tl.sum(tl.reshape(tl.sum(rounded, 0), (wide, channels)), 0) / count
    means = tl.reshape(tl.broadcast_to(mean[None, :], (wide, channels)), (wide * channels,))
    apart = tl.where(mask, rounded - means[None, :], 0.0)
    _store_sums(sums, rounded, apart * apart, channels, wide)


@triton.jit
def evaluation(
    x,
    weight,
    bias,
    shortcut,
    out,
    pixels,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    added: tl.constexpr,
    wide: tl.constexpr,
    rows: tl.constexpr,
    stages: tl.constexpr,
):
    """relu(convolution + bias [+ shortcut]), with batch norm folded into weight and bias."""
    pixel, number = _places(pixels, channels, wide, rows)
    value = _nine_taps(x, weight, pixel, pixels, height, width, channels, wide, rows, stages)
    value += tl.load(bias + number % channels).to(tl.float32)[None, :]
    offsets, mask = pixel[:, None] * channels + number[None, :], (pixel < pixels)[:, None]
    if added:
        value += tl.load(shortcut + offsets, mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, tl.where(value <= 0, 0.0, value).to(out.dtype.element_ty), mask)  # NaN stays


@triton.jit
def convolution_gradient(
    gradient,
    weight,
    carried,
    below,
    y,
    statistic,
    out,
    sums,
    pixels,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    added: tl.constexpr,
    masked: tl.constexpr,
    summed: tl.constexpr,
    wide: tl.constexpr,
    rows: tl.constexpr,
    stages: tl.constexpr,
):
    """The gradient with respect to a layer's input, computed with the weight of the transposed convolution.

    `added` adds the gradient that a shortcut has `carried`. `masked` sets it to zero where the ReLU `below` is zero.
    `summed` also writes sums [programs, 2, c] of the result and of its product with the normalised y of the layer
    below.
    """
    pixel, number = _places(pixels, channels, wide, rows)
    value = _nine_taps(gradient, weight, pixel, pixels, height, width, channels, wide, rows, stages)
    offsets, mask = pixel[:, None] * channels + number[None, :], (pixel < pixels)[:, None]
    if added:
        value += tl.load(carried + offsets, mask, other=0.0).to(tl.float32)
    if masked:
        value = tl.where(tl.load(below + offsets, mask, other=0.0) > 0, value, 0.0)
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + offsets, rounded, mask)
    if summed:
        rounded = rounded.to(tl.float32)
        _store_sums(sums, rounded, rounded * _normal(y, statistic, offsets, mask, number, channels), channels, wide)


@triton.jit
def masked_gradient(
    gradient,
    out,
    y,
    statistic,
    passed,
    sums,
    pixels,
    channels: tl.constexpr,
    summed: tl.constexpr,
    rows: tl.constexpr,
):
    """The gradient, zero where out [pixels, c] is zero; sums as in `convolution_gradient`."""
    pixel, number = _places(pixels, channels, 1, rows)
    offsets, mask = pixel[:, None] * channels + number[None, :], (pixel < pixels)[:, None]
    value = tl.load(gradient + offsets, mask, other=0.0)
    value = tl.where(tl.load(out + offsets, mask, other=0.0) > 0, value, 0.0)
    tl.store(passed + offsets, value, mask)
    if summed:
        value = value.to(tl.float32)
        _store_sums(sums, value, value * _normal(y, statistic, offsets, mask, number, channels), channels, 1)


@triton.jit
def _places(pixels, channels: tl.constexpr, wide: tl.constexpr, rows: tl.constexpr):
    """The first pixel of each row of this program, and the positions within a row."""
    return (tl.program_id(0) * rows + tl.arange(0, rows)) * wide, tl.arange(0, wide * channels)


@triton.jit
def _nine_taps(
    x,
    weight,
    pixel,
    pixels,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    wide: tl.constexpr,
    rows: tl.constexpr,
    stages: tl.constexpr,
):
    """The convolution at `pixel` [rows] and, if `wide` is 2, the pixel after it: float32 [rows, wide * c], 0 beyond the
    last pixel. weight [9, c, c]: of each tap, from channels in to channels out. Two pixels side by side need four of
    a row: weight [3, 4 * c, 2 * c] has 0 where a tap does not reach."""
    reach: tl.constexpr = 1 if wide == 1 else 4  # pixels side by side in a product
    along: tl.constexpr = 3 if wide == 1 else 1  # products in a row of taps
    column, row = pixel % width, pixel // width % height
    source, output = tl.arange(0, reach * channels), tl.arange(0, wide * channels)
    matrix = weight + source[:, None] * (wide * channels) + output[None, :]
    total = tl.zeros((rows, wide * channels), tl.float32)
    for product in tl.range(0, 3 * along, num_stages=stages):
        down, start = product // along, product % along
        source_column = column[:, None] + (source // channels + start - 1)[None, :]
        mask = (pixel < pixels) & (row + down >= 1) & (row + down <= height)
        inside = mask[:, None] & (source_column >= 0) & (source_column < width)
        offsets = (pixel + (down - 1) * width + start - 1)[:, None] * channels + source[None, :]
        values = tl.load(x + offsets, inside, other=0.0)
        kernels = tl.load(matrix + product * (reach * wide * channels * channels))
        total = tl.dot(values, kernels, total)
    return total


@triton.jit
def _normal(y, statistic, offsets, mask, number, channels: tl.constexpr):
    """(y - mean) / standard deviation at these positions."""
    channel = number % channels
    centred = tl.load(y + offsets, mask, other=0.0).to(tl.float32) - tl.load(statistic + channel)[None, :]
    return centred * tl.load(statistic + channels + channel)[None, :]


@triton.jit
def _store_sums(sums, first, second, channels: tl.constexpr, wide: tl.constexpr):
    pointers = sums + tl.program_id(0) * (2 * channels) + tl.arange(0, channels)
    tl.store(pointers, tl.sum(tl.reshape(tl.sum(first, 0), (wide, channels)), 0))
    tl.store(pointers + channels, tl.sum(tl.reshape(tl.sum(second, 0), (wide, channels)), 0))


@triton.jit
def _added_up(sums, parts, channel, channels: tl.constexpr, few: tl.constexpr, block: tl.constexpr):
    """The two totals [few] of sums [parts, 2, c] for `channel`, always added in the same order."""
    part = tl.arange(0, block)
    first = tl.zeros((block, few), tl.float32)
    second = tl.zeros((block, few), tl.float32)
    for start in range(0, parts, block):
        pointers = sums + (start + part)[:, None] * (2 * channels) + channel[None, :]
        mask = (start + part < parts)[:, None]
        first += tl.load(pointers, mask, other=0.0)
        second += tl.load(pointers + channels, mask, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def totals(sums, out, parts, channels: tl.constexpr, few: tl.constexpr, block: tl.constexpr):
    """sums [parts, 2, c] -> out [2, c]; each program adds `few` channels."""
    channel = tl.program_id(0) * few + tl.arange(0, few)
    first, second = _added_up(sums, parts, channel, channels, few, block)
    tl.store(out + channel, first)
    tl.store(out + channels + channel, second)


@triton.jit
def statistics(
    sums,
    gamma,
    beta,
    running_mean,
    running_variance,
    batches,
    out,
    parts,
    size,
    pixels,
    momentum,
    epsilon,
    channels: tl.constexpr,
    few: tl.constexpr,
    block: tl.constexpr,
):
    """sums [parts, 2, c] of `size` pixels each (the last of the rest): sums, and sums of squared differences from the
    mean of the part -> out [4, c]: mean, 1 / standard deviation, and the factor and summand of the normalisation.

    Updates the running statistics in place. A program for `few` channels. Squares of numbers far from 0 are never
    subtracted from each other."""
    channel = tl.program_id(0) * few + tl.arange(0, few)
    scale, shift = tl.load(gamma + channel), tl.load(beta + channel)  # loaded early, so that nothing waits for them
    old_mean, old_variance = tl.load(running_mean + channel), tl.load(running_variance + channel)
    first, within = _added_up(sums, parts, channel, channels, few, block)
    mean = first / pixels
    between = tl.zeros((block, few), tl.float32)
    for start in range(0, parts, block):
        part = start + tl.arange(0, block)
        count = tl.maximum(tl.minimum(pixels - part * size, size), 1).to(tl.float32)[:, None]
        mask = (part < parts)[:, None]
        total = tl.load(sums + part[:, None] * (2 * channels) + channel[None, :], mask, other=0.0)
        apart = total / count - mean[None, :]
        between += tl.where(mask, apart * apart * count, 0.0)
    variance = (within + tl.sum(between, 0)) / pixels
    inverse = 1 / tl.sqrt(variance + epsilon)
    factor = scale * inverse
    tl.store(out + channel, mean)
    tl.store(out + channels + channel, inverse)
    tl.store(out + 2 * channels + channel, factor)
    tl.store(out + 3 * channels + channel, shift - mean * factor)
    tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean))
    unbiased = variance * (pixels / (pixels - 1))
    tl.store(running_variance + channel, old_variance + momentum * (unbiased - old_variance))
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def normalisation(
    y,
    statistic,
    shortcut,
    out,
    numbers,
    channels: tl.constexpr,
    added: tl.constexpr,
    block: tl.constexpr,
):
    """relu(factor * y + summand [+ shortcut]) for y [pixels, c]."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    mask, channel = number < numbers, number % channels
    value = tl.load(y + number, mask, other=0.0).to(tl.float32)
    value = value * tl.load(statistic + 2 * channels + channel) + tl.load(statistic + 3 * channels + channel)
    if added:
        value += tl.load(shortcut + number, mask, other=0.0).to(tl.float32)
    tl.store(out + number, tl.where(value <= 0, 0.0, value).to(out.dtype.element_ty), mask)  # NaN stays


@triton.jit
def normalisation_gradient(
    gradient,
    y,
    statistic,
    sums,
    out,
    numbers,
    pixels,
    channels: tl.constexpr,
    block: tl.constexpr,
):
    """The gradient with respect to y [pixels, c], from that of the normalised y and its sums [2, c]."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    mask, channel = number < numbers, number % channels
    given = tl.load(gradient + number, mask, other=0.0).to(tl.float32)
    centred = tl.load(y + number, mask, other=0.0).to(tl.float32) - tl.load(statistic + channel)
    normal = centred * tl.load(statistic + channels + channel)
    rest = tl.load(sums + channel) + normal * tl.load(sums + channels + channel)
    value = tl.load(statistic + 2 * channels + channel) * (given - rest / pixels)
    tl.store(out + number, value.to(out.dtype.element_ty), mask)


@triton.jit
def weight_gradient(
    x,
    gradient,
    sums,
    pixels,
    part,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    wide: tl.constexpr,
    rows: tl.constexpr,
):
    """Program (row of taps, part, layer): sums [layers, parts, wide, c, 3, 3, c] of gradient[p] x[p + tap] over `part`
    pixels, those of each place in a row separately."""
    down, start, layer = tl.program_id(0), tl.program_id(1) * part, tl.program_id(2).to(tl.int64)
    x += layer * pixels * channels
    gradient += layer * pixels * channels
    sums += layer * tl.num_programs(1) * (wide * channels * 9 * channels)
    source, output = tl.arange(0, 4 * channels), tl.arange(0, wide * channels)
    along = source // channels - 1  # three or four adjacent pixels of a row
    total = tl.zeros((4 * channels, wide * channels), tl.float32)
    for offset in range(0, part, rows * wide):
        pixel = start + offset + tl.arange(0, rows) * wide
        column, row = pixel % width, pixel // width % height
        mask = (pixel < pixels) & (row + down >= 1) & (row + down <= height)
        source_column = column[:, None] + along[None, :]
        inside = mask[:, None] & (source_column >= 0) & (source_column < width) & (along <= wide)[None, :]
        values = tl.load(x + (pixel + (down - 1) * width - 1)[:, None] * channels + source[None, :], inside, other=0.0)
        pointers = gradient + pixel[:, None] * channels + output[None, :]
        share = tl.load(pointers, (pixel < pixels)[:, None], other=0.0)
        total = tl.dot(tl.trans(values), share, total)
    tap = (source // channels)[:, None] - (output // channels)[None, :]
    out_offsets = (tl.program_id(1) * (wide * channels) + output)[None, :] * (9 * channels)
    out_offsets += (down * 3 + tap) * channels + (source % channels)[:, None]
    tl.store(sums + out_offsets, total, (tap >= 0) & (tap <= 2))
