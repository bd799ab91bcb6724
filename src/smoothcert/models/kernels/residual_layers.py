"""Sequences of layers relu(batch_norm(conv2d(x)) + shortcut) on a GPU, in training and under attack.

Every second layer adds the input of the layer before it. The whole sequence is one autograd function, so that one
kernel takes a gradient through a convolution, a shortcut, a ReLU and the sums of a batch norm. The kernels
are in `residual_kernels`.
"""

import math
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn

from smoothcert.models.kernels import residual_kernels
from smoothcert.models.kernels.resnet_training import (
    evaluated_stage,
    evaluated_stage_gradient,
    fits,
    stage_gradients_like,
    trained_stage,
    trained_stage_gradient,
)

CONVOLUTION = {16: (256, 4, 1), 32: (256, 4, 3), 64: (128, 4, 4)}
"""Channels -> pixels per program, warps, pipeline stages."""
WEIGHT_GRADIENT = {16: (256, 64, 4, 3), 32: (128, 128, 4, 3), 64: (64, 32, 4, 3)}
"""Channels -> number of parts into which pixels are divided, pixels per step, warps, pipeline stages."""
NUMBERS, FEW = 16384, 8
"""Values that one program adds at once, and the number of channels that it adds."""
BLOCK = 1024
"""Values per program of elementwise kernels."""
KEPT_SHARE, LAYERS_AT_ONCE = 1 / 8, 12
"""Above this share of the GPU's memory for the activations of a stage, the backward pass recomputes them, a few layers
at a time, instead of keeping them. The stages of MACER on CIFAR-10 (4,096 inputs) have 10, 5 and 2 GB."""


class Layers(NamedTuple):
    """The tensors of all layers, grouped by kind: weights [c, 3, 3, c], batch counters, and the others [c]."""

    weights: list[Tensor]
    gammas: list[Tensor]
    betas: list[Tensor]
    means: list[Tensor]
    variances: list[Tensor]
    batches: list[Tensor]

    @classmethod
    def of(cls, layers: Sequence[tuple[nn.Conv2d, nn.BatchNorm2d]]) -> "Layers":
        norms = [norm for _, norm in layers]
        return cls(
            [convolution.weight.permute(0, 2, 3, 1) for convolution, _ in layers],
            [norm.weight for norm in norms],
            [norm.bias for norm in norms],
            [norm.get_buffer("running_mean") for norm in norms],
            [norm.get_buffer("running_var") for norm in norms],
            [norm.get_buffer("num_batches_tracked") for norm in norms],
        )

    @classmethod
    def from_kinds(cls, tensors: Sequence[Tensor]) -> "Layers":
        """The inverse of `chain(*layers)`."""
        number = len(tensors) // len(cls._fields)
        return cls(*(list(tensors[start : start + number]) for start in range(0, len(tensors), number)))


def residual_layers(
    x: Tensor, shortcut: Tensor | None, layers: Sequence[tuple[nn.Conv2d, nn.BatchNorm2d]], dtype: torch.dtype
) -> Tensor:
    """All `layers` on x [n, c, h, w], computed in `dtype` (bf16 or fp16) and summed in float32; channels last.

    The layers must satisfy `apply_to`. With a shortcut, layers 1, 3, 5, ... add one: the first layer adds `shortcut`,
    the others the input of the layer before them. Without it, layers 2, 4, 6, ... do. In training mode all gradients
    are computed; in evaluation (running statistics) only those of x and shortcut.
    """
    assert _adds(len(layers) - 1, shortcut is not None), "the last layer adds a shortcut"
    norm = layers[0][1]
    images = _channels_last(x, dtype)
    added = None if shortcut is None else _channels_last(shortcut, dtype)
    tensors = Layers.of(layers)
    out: Tensor
    if norm.training:
        assert norm.momentum is not None, "apply_to refuses cumulative averages"
        settings = (norm.momentum, norm.eps)
        if fits(images, training=True):
            out = TrainedStage.apply(images, added, *settings, *chain(*tensors))  # type: ignore[no-untyped-call]
        else:
            out = _trained_in_parts(images, added, *settings, tensors)
    else:
        evaluated = EvaluatedStage if fits(images, training=False) else EvaluatedLayers
        out = evaluated.apply(images, added, tensors, norm.eps)  # type: ignore[no-untyped-call]
    return out.permute(0, 3, 1, 2)


def kept_bytes(gpu: int | None) -> float:
    """Bytes of activations that a stage may keep for the backward pass; None stands for a CPU."""
    memory = math.inf if gpu is None else torch.cuda.get_device_properties(gpu).total_memory
    return KEPT_SHARE * memory


kept_bytes._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compile cannot trace it


def _trained_in_parts(x: Tensor, shortcut: Tensor | None, momentum: float, epsilon: float, layers: Layers) -> Tensor:
    """All layers at once, or a few blocks at a time if all of them would need too much memory."""
    number = len(layers.weights)
    again = 2 * number * x.numel() * x.element_size() > kept_bytes(x.device.index)
    # A part ends with a layer that adds a shortcut, so that the next part needs only the output of that layer.
    first = number if not again else LAYERS_AT_ONCE - (shortcut is not None)
    ends = [*range(first, number, LAYERS_AT_ONCE), number]
    for start, end in pairwise([0, *ends]):
        tensors = chain(*(kind[start:end] for kind in layers))
        x = TrainedLayers.apply(x, None if start else shortcut, momentum, epsilon, again, *tensors)  # type: ignore[no-untyped-call]
    return x


class TrainedLayers(torch.autograd.Function):
    """Images [n, h, w, c]; `tensors` is the concatenation of the fields of `Layers`. With `again`, the backward pass
    recomputes the outputs with the same batch statistics instead of keeping them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, momentum: float, epsilon: float, again: bool, *tensors: Tensor
    ) -> Tensor:
        layers = Layers.from_kinds(tensors)
        outs, ys, statistics = trained(x, shortcut, *layers, momentum, epsilon)
        added = shortcut if again else None
        ctx.save_for_backward(x, added, statistics, None if again else outs, None if again else ys, *layers.weights)
        ctx.has_shortcut = shortcut is not None
        out: Tensor = outs[-1].clone() if again else outs[-1]  # a copy: the view would keep all of `outs`
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, shortcut, statistics, outs, ys, *weights = ctx.saved_tensors
        if outs is None:
            outs, ys = trained_again(x, shortcut, statistics, weights)
        for_x, for_shortcut, for_weights, sums = trained_gradient(
            gradients[0], x, outs, ys, statistics, weights, ctx.has_shortcut
        )
        parameters = (*for_weights, *sums[:, 1], *sums[:, 0])
        shortcut_gradient = for_shortcut if ctx.has_shortcut else None
        return for_x, shortcut_gradient, None, None, None, *parameters, *[None] * len(parameters)


class TrainedStage(torch.autograd.Function):
    """`TrainedLayers` with one launch per direction, for batches that satisfy `fits`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, momentum: float, epsilon: float, *tensors: Tensor
    ) -> Tensor:
        layers = Layers.from_kinds(tensors)
        outs, ys, masks, statistics = trained_stage(x, shortcut, *layers, momentum, epsilon)
        ctx.save_for_backward(x, outs, ys, masks, statistics, *layers.weights, *layers.gammas)
        ctx.has_shortcut = shortcut is not None
        ctx.number = len(layers.weights)
        out: Tensor = outs[-1]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, outs, ys, masks, statistics, *parameters = ctx.saved_tensors
        weights, gammas = parameters[: ctx.number], parameters[ctx.number :]
        for_x, for_shortcut, for_weights, sums = trained_stage_gradient(
            gradients[0], x, outs, ys, masks, statistics, weights, gammas, ctx.has_shortcut
        )
        shortcut = for_shortcut if ctx.has_shortcut else None
        for_parameters = (*for_weights, *sums[:, 1], *sums[:, 0])
        return for_x, shortcut, None, None, *for_parameters, *[None] * len(for_parameters)


class EvaluatedLayers(torch.autograd.Function):
    """Layers with running statistics; gradients of x and shortcut only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shortcut: Tensor | None, layers: Layers, epsilon: float) -> Tensor:
        weight, factor, bias = _folded(layers, epsilon)
        outs = x.new_empty((len(weight), *x.shape))
        with torch.cuda.device_of(x):
            matrices = _matrices(weight, x, factor=factor)
            for number in range(len(outs)):
                added = _added(number, x, shortcut, outs)
                _evaluation(_input(number, x, outs), matrices[number], bias[number], added, outs[number])
        ctx.save_for_backward(outs, weight, factor)
        ctx.has_shortcut = shortcut is not None
        return outs[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        outs, weight, factor = ctx.saved_tensors
        with torch.cuda.device_of(outs):
            matrices = _matrices(weight, outs[0], factor=factor, transposed=True)
            carried = gradient = _masked_gradient(gradients[0].contiguous(), outs[-1], None)[0]
            for number in reversed(range(len(outs))):
                adds = _adds(number, ctx.has_shortcut)
                carried = gradient if adds else carried
                below = outs[number - 1] if number else None
                gradient, _ = _convolution_gradient(gradient, matrices[number], None if adds else carried, below, None)
        return gradient, carried if ctx.has_shortcut else None, None, None


class EvaluatedStage(torch.autograd.Function):
    """`EvaluatedLayers` with one launch per direction, for images that satisfy `fits`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shortcut: Tensor | None, layers: Layers, epsilon: float) -> Tensor:
        weight, factor, bias = _folded(layers, epsilon)
        scaled = weight * factor[:, :, None, None, None]
        out, masks = evaluated_stage(x, shortcut, scaled, bias)
        ctx.save_for_backward(masks, scaled)
        ctx.has_shortcut = shortcut is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        masks, scaled = ctx.saved_tensors
        return *evaluated_stage_gradient(gradients[0].contiguous(), masks, scaled, ctx.has_shortcut), None, None


def _folded(layers: Layers, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [layers, c, 3, 3, c], and the factors and biases [layers, c] that batch norm applies in evaluation."""
    weight, gamma, beta, mean, variance = (torch.stack(tensors) for tensors in layers[:5])
    factor = gamma / (variance + epsilon).sqrt()
    return weight, factor, beta - mean * factor


def _refuse_second_derivatives() -> None:
    """Raise an error: second derivatives would be silently wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError("these kernels have no second derivatives; set precision=fp32 for them")


def _channels_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, c, h, w] -> contiguous [n, h, w, c], the layout of the kernels."""
    return x.permute(0, 2, 3, 1).to(dtype).contiguous()


def _adds(number: int, has_shortcut: bool) -> bool:
    """True if the layer `number` adds a shortcut."""
    return number % 2 == (0 if has_shortcut else 1)


def _input(number: int, x: Tensor, outs: Tensor) -> Tensor:
    return outs[number - 1] if number else x


def _added(number: int, x: Tensor, shortcut: Tensor | None, outs: Tensor) -> Tensor | None:
    """The shortcut that the layer `number` adds, or None."""
    if not _adds(number, shortcut is not None):
        return None
    return shortcut if number == 0 else _input(number - 1, x, outs)


@torch.library.custom_op("smoothcert::trained", mutates_args=("means", "variances", "batches"))
def trained(
    x: Tensor,
    shortcut: Tensor | None,
    weights: list[Tensor],
    gammas: list[Tensor],
    betas: list[Tensor],
    means: list[Tensor],
    variances: list[Tensor],
    batches: list[Tensor],
    momentum: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, h, w, c] -> outputs and convolutions of all layers, both [layers, n, h, w, c], and statistics
    [layers, 4, c]. Updates the running statistics as batch norm does."""
    layers = Layers(weights, gammas, betas, means, variances, batches)
    outs, ys, statistics = _trained_like(x, shortcut, weights)
    with torch.cuda.device_of(x):  # where Triton launches
        matrices = _matrices(torch.stack(weights), x)
        for number, (_, *norm) in enumerate(zip(*layers, strict=True)):
            sums, size = _convolution(_input(number, x, outs), matrices[number], ys[number])
            _statistics(sums, size, norm, statistics[number], _pixels(x), momentum, epsilon)
            _normalisation(ys[number], statistics[number], _added(number, x, shortcut, outs), outs[number])
    return outs, ys, statistics


@trained.register_fake
def _trained_like(
    x: Tensor, shortcut: Tensor | None, weights: list[Tensor], *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (len(weights), *x.shape)
    statistics = (len(weights), 4, x.shape[3])
    return x.new_empty(shape), x.new_empty(shape), x.new_empty(statistics, dtype=torch.float32)


@torch.library.custom_op("smoothcert::trained_again", mutates_args=())
def trained_again(
    x: Tensor, shortcut: Tensor | None, statistics: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The outputs and convolutions of `trained`, recomputed from its statistics."""
    outs, ys = _trained_again_like(x, shortcut, statistics, weights)
    with torch.cuda.device_of(x):
        for number, matrix in enumerate(_matrices(torch.stack(weights), x)):
            _convolution(_input(number, x, outs), matrix, ys[number])
            _normalisation(ys[number], statistics[number], _added(number, x, shortcut, outs), outs[number])
    return outs, ys


@trained_again.register_fake
def _trained_again_like(
    x: Tensor, shortcut: Tensor | None, statistics: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor]:
    shape = (len(weights), *x.shape)
    return x.new_empty(shape), x.new_empty(shape)


@torch.library.custom_op("smoothcert::trained_gradient", mutates_args=())
def trained_gradient(
    gradient: Tensor,
    x: Tensor,
    outs: Tensor,
    ys: Tensor,
    statistics: Tensor,
    weights: list[Tensor],
    has_shortcut: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients with respect to x, the shortcut (or nothing), the weights [layers, c, 3, 3, c], and beta and gamma
    together [layers, 2, c]."""
    channels = x.shape[3]
    parts = _parts(x)
    # The parts of all layers are added in one kernel: one sum per layer would take half as long as the gradients.
    for_weights = x.new_empty((len(weights), parts[0] * _wide(x, 32), channels, 3, 3, channels), dtype=torch.float32)
    totals = statistics.new_empty((len(weights), 2, channels))
    with torch.cuda.device_of(x):
        matrices = _matrices(torch.stack(weights), x, transposed=True)
        gradient, sums = _masked_gradient(gradient.contiguous(), outs[-1], (ys[-1], statistics[-1]))
        carried = gradient
        together = min(channels // 8, len(weights))
        end = len(weights)
        for_ys = x.new_empty((together, *x.shape))
        for number in reversed(range(len(weights))):
            # Weight gradients of several layers are computed in one launch: their inputs are contiguous.
            first = max(1, end - together) if number else 0
            adds = _adds(number, has_shortcut)
            carried = gradient if adds else carried
            _totals(sums, totals[number])
            for_y = for_ys[number - first]
            _normalisation_gradient(gradient, ys[number], statistics[number], totals[number], for_y)
            below = (ys[number - 1], statistics[number - 1]) if number else None
            gradient, sums = _convolution_gradient(
                for_y, matrices[number], None if adds else carried, outs[number - 1] if number else None, below
            )
            if number == first:
                inputs = outs[first - 1 : end - 1] if number else x[None]
                _weight_gradient(inputs, for_ys, for_weights[first:end], parts[1])
                end = first
    return gradient, carried if has_shortcut else x.new_empty(0), for_weights.sum(1), totals


trained_gradient.register_fake(stage_gradients_like)


# Launches. Images are contiguous [n, h, w, c]; a matrix holds the weights of one layer.


def _matrices(weights: Tensor, x: Tensor, *, factor: Tensor | None = None, transposed: bool = False) -> Tensor:
    """weights [layers, c, 3, 3, c], multiplied by factor [layers, c], in the kernels' layout for images like x."""
    layers = len(weights)
    channels = x.shape[3]
    wide = _wide(x)
    shape = (9, channels, channels) if wide == 1 else (3, 4 * channels, 2 * channels)
    out = x.new_empty((layers, *shape))
    residual_kernels.matrices[(layers, shape[0])](
        weights.contiguous(),
        weights if factor is None else factor,
        out,
        channels=channels,
        transposed=transposed,
        scaled=factor is not None,
        wide=wide,
    )
    return out


def _convolution(x: Tensor, matrix: Tensor, out: Tensor) -> tuple[Tensor, int]:
    """Write out; return sums [programs, 2, c] of out and of its squared deviations, and pixels per program."""
    grid, blocks = _blocks(x)
    sums = x.new_empty((*grid, 2, x.shape[3]), dtype=torch.float32)
    residual_kernels.convolution[grid](x, matrix, out, sums, _pixels(x), *x.shape[1:], **blocks)
    return sums, blocks["rows"] * blocks["wide"]


def _evaluation(x: Tensor, matrix: Tensor, bias: Tensor, shortcut: Tensor | None, out: Tensor) -> None:
    """Write out."""
    grid, blocks = _blocks(x)
    added = x if shortcut is None else shortcut
    residual_kernels.evaluation[grid](
        x, matrix, bias, added, out, _pixels(x), *x.shape[1:], added=shortcut is not None, **blocks
    )


def _convolution_gradient(
    gradient: Tensor,
    matrix: Tensor,
    carried: Tensor | None,
    below: Tensor | None,
    normal: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The gradient of the input of a convolution, plus what a shortcut `carried`, masked by the ReLU `below`; and its
    sums with the normalised (y, statistics) of the layer below."""
    grid, blocks = _blocks(gradient)
    out = torch.empty_like(gradient)
    sums = out.new_empty((*grid, 2, gradient.shape[3]) if normal else 0, dtype=torch.float32)
    residual_kernels.convolution_gradient[grid](
        gradient,
        matrix,
        gradient if carried is None else carried,
        gradient if below is None else below,
        *(normal or (gradient, sums)),
        out,
        sums,
        _pixels(gradient),
        *gradient.shape[1:],
        added=carried is not None,
        masked=below is not None,
        summed=normal is not None,
        **blocks,
    )
    return out, sums


def _masked_gradient(gradient: Tensor, out: Tensor, normal: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The gradient masked by the ReLU of `out`, and its sums with the normalised (y, statistics), if given."""
    channels = out.shape[3]
    pixels = _pixels(out)
    rows = 4096 // channels
    grid = (triton.cdiv(pixels, rows),)
    passed = torch.empty_like(out)
    sums = out.new_empty((*grid, 2, channels) if normal else 0, dtype=torch.float32)
    residual_kernels.masked_gradient[grid](
        gradient.to(out.dtype),
        out,
        *(normal or (out, sums)),
        passed,
        sums,
        pixels,
        channels=channels,
        summed=normal is not None,
        rows=rows,
    )
    return passed, sums


def _statistics(
    sums: Tensor, size: int, norm: Sequence[Tensor], out: Tensor, pixels: int, momentum: float, epsilon: float
) -> None:
    """Sums of `size` pixels each -> out [4, c]. Updates the running statistics in `norm`: gamma, beta, mean, variance,
    batches."""
    grid, blocks = _few_channels(sums)
    residual_kernels.statistics[grid](sums, *norm, out, len(sums), size, pixels, momentum, epsilon, **blocks)


def _totals(sums: Tensor, out: Tensor) -> None:
    """sums [parts, 2, c] -> out [2, c]."""
    grid, blocks = _few_channels(sums)
    residual_kernels.totals[grid](sums, out, len(sums), **blocks)


def _few_channels(sums: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and the block sizes of programs that each add a few channels of sums [parts, 2, c]."""
    block = min(int(triton.next_power_of_2(len(sums))), NUMBERS // FEW)
    return (sums.shape[2] // FEW,), {"channels": sums.shape[2], "few": FEW, "block": block, "num_warps": 8}


def _normalisation(y: Tensor, statistics: Tensor, shortcut: Tensor | None, out: Tensor) -> None:
    added = y if shortcut is None else shortcut
    residual_kernels.normalisation[(triton.cdiv(y.numel(), BLOCK),)](
        y, statistics, added, out, y.numel(), channels=y.shape[3], added=shortcut is not None, block=BLOCK
    )


def _normalisation_gradient(gradient: Tensor, y: Tensor, statistics: Tensor, totals: Tensor, out: Tensor) -> None:
    residual_kernels.normalisation_gradient[(triton.cdiv(y.numel(), BLOCK),)](
        gradient, y, statistics, totals, out, y.numel(), _pixels(y), channels=y.shape[3], block=BLOCK
    )


def _weight_gradient(x: Tensor, gradient: Tensor, sums: Tensor, part: int) -> None:
    """x and gradient [layers or more, n, h, w, c] -> sums [layers, parts * wide, c, 3, 3, c], of `part` pixels each."""
    _, pixels, warps, stages = WEIGHT_GRADIENT[x.shape[4]]
    wide = _wide(x[0], 32)
    residual_kernels.weight_gradient[(3, sums.shape[1] // wide, len(sums))](
        x,
        gradient,
        sums,
        _pixels(x[0]),
        part,
        *x.shape[2:],
        wide=wide,
        rows=pixels // wide,
        num_warps=warps,
        num_stages=stages,
    )


def _parts(x: Tensor) -> tuple[int, int]:
    """The number of parts into which weight gradients are divided, and the pixels of a part."""
    most, pixels, *_ = WEIGHT_GRADIENT[x.shape[3]]
    part = triton.cdiv(_pixels(x), most * pixels) * pixels
    return triton.cdiv(_pixels(x), part), part


def _blocks(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and the block sizes of a program."""
    pixels, warps, stages = CONVOLUTION[x.shape[3]]
    wide = _wide(x)
    blocks = {"wide": wide, "rows": pixels // wide, "stages": stages, "num_warps": warps}
    return (triton.cdiv(_pixels(x), pixels),), blocks


def _wide(x: Tensor, few: int = 16) -> int:
    """Adjacent pixels that share one row of a matrix: two if there are few channels and the width is even."""
    return 2 if x.shape[3] <= few and x.shape[2] % 2 == 0 else 1


def _pixels(x: Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[2]
