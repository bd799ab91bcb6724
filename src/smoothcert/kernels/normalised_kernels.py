"""relu(batch_norm(conv2d(x)) + shortcut) for 3x3 convolutions of few channels, and its gradients, as Triton kernels;
`normalised_convolution` launches them.

Images lie pixel by pixel, channels last; a program takes a block of pixels. Where torch takes a kernel each for the
convolution, the statistics, the normalisation, the sum and ReLU, the statistics are summed here while the convolution
is still in the registers, and the rest is one kernel: with 16 channels the time goes into reading and writing.
"""

import triton
import triton.language as tl


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
    flipped: tl.constexpr,
    block: tl.constexpr,
):
    """x [pixels, c], weight [c, 3, 3, c] -> out [pixels, c], and sums [programs, 2, c] of out and its squares.

    `flipped` is the transposed convolution, which takes gradients back, and sums nothing."""
    pixel, output = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, channels)
    total = _nine_taps(x, weight, pixel, pixels, height, width, channels, flipped, block)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + pixel[:, None] * channels + output[None, :], rounded, (pixel < pixels)[:, None])
    if not flipped:
        rounded = rounded.to(tl.float32)  # 0 beyond the last pixel
        to = sums + tl.program_id(0) * (2 * channels) + output
        tl.store(to, tl.sum(rounded, 0))
        tl.store(to + channels, tl.sum(rounded * rounded, 0))


@triton.jit
def _nine_taps(
    x,
    weight,
    pixel,
    pixels,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    flipped: tl.constexpr,
    block: tl.constexpr,
):
    """The convolution at `pixel` [block]: float32 [block, channels], 0 beyond the last pixel."""
    column, row = pixel % width, pixel // width % height
    channel, output = tl.arange(0, channels), tl.arange(0, channels)
    total = tl.zeros((block, channels), tl.float32)
    for tap in tl.static_range(9):
        down, along = tap // 3 - 1, tap % 3 - 1
        inside = (row + down >= 0) & (row + down < height) & (column + along >= 0) & (column + along < width)
        at = (pixel + down * width + along)[:, None] * channels + channel[None, :]
        values = tl.load(x + at, (inside & (pixel < pixels))[:, None], other=0.0)
        if flipped:
            kernels = tl.load(weight + (channel[:, None] * 9 + 8 - tap) * channels + output[None, :])
        else:
            kernels = tl.load(weight + (output[None, :] * 9 + tap) * channels + channel[:, None])
        total = tl.dot(values, kernels.to(values.dtype), total)
    return total


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
    block: tl.constexpr,
):
    """relu(convolution + bias [+ shortcut]), for a network whose batch norm is in its weights."""
    pixel, output = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, channels)
    value = _nine_taps(x, weight, pixel, pixels, height, width, channels, False, block)
    value += tl.load(bias + output).to(tl.float32)[None, :]
    at, there = pixel[:, None] * channels + output[None, :], (pixel < pixels)[:, None]
    if added:
        value += tl.load(shortcut + at, there, other=0.0).to(tl.float32)
    tl.store(out + at, tl.where(value <= 0, 0.0, value).to(out.dtype.element_ty), there)  # NaN stays


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
    pixels,
    momentum,
    epsilon,
    channels: tl.constexpr,
    block: tl.constexpr,
):
    """sums [parts, 2, c] -> out [4, c]: mean, 1 / standard deviation, and the factor and summand of the normalisation.

    Updates the running statistics in place."""
    channel, part = tl.arange(0, channels), tl.arange(0, block)
    first = tl.zeros((block, channels), tl.float32)
    second = tl.zeros((block, channels), tl.float32)
    for start in range(0, parts, block):
        at = sums + (start + part)[:, None] * (2 * channels) + channel[None, :]
        there = (start + part < parts)[:, None]
        first += tl.load(at, there, other=0.0)
        second += tl.load(at + channels, there, other=0.0)
    mean = tl.sum(first, 0) / pixels
    variance = tl.maximum(tl.sum(second, 0) / pixels - mean * mean, 0.0)
    inverse = 1 / tl.sqrt(variance + epsilon)
    factor = tl.load(gamma + channel) * inverse
    tl.store(out + channel, mean)
    tl.store(out + channels + channel, inverse)
    tl.store(out + 2 * channels + channel, factor)
    tl.store(out + 3 * channels + channel, tl.load(beta + channel) - mean * factor)
    old = tl.load(running_mean + channel)
    tl.store(running_mean + channel, old + momentum * (mean - old))
    old = tl.load(running_variance + channel)
    unbiased = variance * (pixels / (pixels - 1))
    tl.store(running_variance + channel, old + momentum * (unbiased - old))
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
    there, channel = number < numbers, number % channels
    value = tl.load(y + number, there, other=0.0).to(tl.float32)
    value = value * tl.load(statistic + 2 * channels + channel) + tl.load(statistic + 3 * channels + channel)
    if added:
        value += tl.load(shortcut + number, there, other=0.0).to(tl.float32)
    tl.store(out + number, tl.where(value <= 0, 0.0, value).to(out.dtype.element_ty), there)  # NaN stays


@triton.jit
def normalisation_sums(
    gradient,
    out,
    y,
    statistic,
    sums,
    pixels,
    part,
    channels: tl.constexpr,
    block: tl.constexpr,
):
    """For the gradient of out [pixels, c]: sums [programs, 2, c] of what ReLU lets through, and of its product with the
    normalised y."""
    channel = tl.arange(0, channels)
    mean, inverse = tl.load(statistic + channel), tl.load(statistic + channels + channel)
    first = tl.zeros((block, channels), tl.float32)
    second = tl.zeros((block, channels), tl.float32)
    start = tl.program_id(0) * part
    for offset in range(0, part, block):
        pixel = start + offset + tl.arange(0, block)
        at, there = pixel[:, None] * channels + channel[None, :], (pixel < pixels)[:, None]
        passed = tl.load(gradient + at, there, other=0.0).to(tl.float32)
        passed = tl.where(tl.load(out + at, there, other=0.0) > 0, passed, 0.0)
        first += passed
        second += passed * (tl.load(y + at, there, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
    to = sums + tl.program_id(0) * (2 * channels) + channel
    tl.store(to, tl.sum(first, 0))
    tl.store(to + channels, tl.sum(second, 0))


@triton.jit
def normalisation_gradient(
    gradient,
    out,
    y,
    statistic,
    sums,
    for_y,
    for_shortcut,
    numbers,
    pixels,
    channels: tl.constexpr,
    added: tl.constexpr,
    block: tl.constexpr,
):
    """From sums [2, c] over all pixels: the gradients with respect to y and the shortcut, [pixels, c] each."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    there, channel = number < numbers, number % channels
    passed = tl.load(gradient + number, there, other=0.0)
    passed = tl.where(tl.load(out + number, there, other=0.0) > 0, passed, 0.0)
    if added:
        tl.store(for_shortcut + number, passed, there)
    centred = tl.load(y + number, there, other=0.0).to(tl.float32) - tl.load(statistic + channel)
    normal = centred * tl.load(statistic + channels + channel)
    rest = tl.load(sums + channel) + normal * tl.load(sums + channels + channel)
    value = tl.load(statistic + 2 * channels + channel) * (passed.to(tl.float32) - rest / pixels)
    tl.store(for_y + number, value.to(for_y.dtype.element_ty), there)


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
    block: tl.constexpr,
):
    """Program (part, row of taps): sums [parts, c, 3, 3 * c] of gradient[p] x[p + tap] over `part` pixels."""
    start, down = tl.program_id(0) * part, tl.program_id(1) - 1
    number, output = tl.arange(0, 4 * channels), tl.arange(0, channels)
    along = number // channels - 1  # three pixels in a row lie side by side; a fourth makes a power of two
    total = tl.zeros((channels, 4 * channels), tl.float32)
    for offset in range(0, part, block):
        pixel = start + offset + tl.arange(0, block)
        column, row = pixel % width, pixel // width % height
        there = (pixel < pixels) & (row + down >= 0) & (row + down < height)
        beside = column[:, None] + along[None, :]
        inside = there[:, None] & (beside >= 0) & (beside < width) & (along < 2)[None, :]
        values = tl.load(x + (pixel + down * width - 1)[:, None] * channels + number[None, :], inside, other=0.0)
        at = gradient + pixel[None, :] * channels + output[:, None]
        share = tl.load(at, (pixel < pixels)[None, :], other=0.0)
        total = tl.dot(share, values.to(share.dtype), total)
    to = ((tl.program_id(0) * channels + output[:, None]) * 3 + down + 1) * (3 * channels) + number[None, :]
    tl.store(sums + to, total, (number < 3 * channels)[None, :])
