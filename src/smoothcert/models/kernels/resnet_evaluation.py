"""A ResNet for CIFAR from images to logits in three kernel launches, one per stage, without gradients.

The kernel is CUDA C++ (`resnet_stage.cu`), built for the GPU when it is first used by the compiler library that comes
with torch. Activations are 16-bit numbers and leave the chip only between stages. Sums, biases, the mean over the last
pixels and the logits are float32.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from smoothcert.models.kernels import can_build, cuda_source, is_plain

SIZES = ((16, 32), (32, 16), (64, 8))
"""Channels and image width of the three stages."""
TILES = {16: (16, 16, 3), 32: (8, 16, 4), 64: (8, 16, 4)}
"""Channels -> rows and output channels per warp, blocks per multiprocessor."""


class FusedResNet(nn.Module):
    """A CIFAR ResNet in eval mode on a GPU. The kernels compute its logits where they can, `network` elsewhere."""

    def __init__(self, network: nn.Module, resnet: Any, mean_and_scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = network
        self.layers = 2 * len(resnet.layer1)
        self.tensors = [tensor.to(mean_and_scale.device) for tensor in _packed(resnet, dtype)]
        self.mean_and_scale = mean_and_scale
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        fits = images.shape[1:] == (3, 32, 32) and 0 < images.numel() < 2**31 and images.dtype == self.dtype
        if not fits or images.device != self.mean_and_scale.device or torch.is_grad_enabled():
            return self.network(images)  # type: ignore[no-any-return]
        pixels = images.permute(0, 2, 3, 1).contiguous()
        return resnet_logits(pixels, self.mean_and_scale, self.tensors, self.layers)  # type: ignore[no-any-return]


def fused_resnet(network: nn.Module, original: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """`network` (`original` as it is evaluated, in `dtype` on `device`) with the kernels, if they can replace it."""
    from smoothcert.models.normalize import Normalize
    from smoothcert.models.resnet_cifar import CifarResNet

    first: Any
    resnet: Any
    first, resnet = original if type(original) is nn.Sequential and len(original) == 2 else (None, original)
    known = type(resnet) is CifarResNet and type(first) in (type(None), Normalize)
    if not known or device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return network
    with torch.device("meta"):  # without numbers, and without drawing any
        same = CifarResNet(6 * len(resnet.layer1) + 2, resnet.fc.out_features)
    plain = all(is_plain(module) for module in original.modules()) and repr(same) == repr(resnet)
    if not plain or not kernels_build(device.index or 0, dtype):
        return network
    mean, std = (torch.zeros(3), torch.ones(3)) if first is None else (first.mean, first.std)
    return FusedResNet(network, resnet, torch.stack([mean.flatten(), 1 / std.flatten()]).float().to(device), dtype)


@cache
def kernels_build(gpu: int, dtype: torch.dtype) -> bool:
    """True if the kernels for `dtype` can be built and this GPU can run them."""

    def build() -> None:
        for channels, _ in SIZES:
            _kernel(channels, dtype, gpu)

    return can_build(gpu, build, "ResNets are evaluated more slowly, without our CUDA kernels")


@cache
def _kernel(channels: int, dtype: torch.dtype, gpu: int) -> tuple[Any, int, int]:
    """The kernel of a stage, its threads per block and its bytes of shared memory."""
    width = dict(SIZES)[channels]
    rows, group, resident = TILES[channels]
    macros = {"CHANNELS": channels, "WIDTH": width, "ROWS": rows, "GROUP": group, "RESIDENT": resident}
    options = [f"-D{name}={value}" for name, value in (macros | {"HALF": int(dtype == torch.float16)}).items()]
    shared = 2 * _images(width) * channels * 2 * ((width + 2) * (width + 1) + 1)
    with torch.cuda.device(gpu):
        kernel = torch.cuda._compile_kernel(cuda_source("resnet_stage.cu"), "stage", nvcc_options=options)
        kernel.set_shared_memory_config(shared)
    return kernel, 32 * (channels // group) * max(1, width // 16) * (width // rows), shared


def _images(width: int) -> int:
    """Images per block."""
    return 2 if width == 8 else 1


@torch.library.custom_op("smoothcert::resnet_logits", mutates_args=())
def resnet_logits(images: Tensor, mean_and_scale: Tensor, tensors: list[Tensor], layers: int) -> Tensor:
    """Logits [n, classes] of images [n, 32, 32, 3], by the tensors of `_packed` for `layers` layers per stage."""
    logits: Tensor = _logits_like(images, mean_and_scale, tensors, layers)
    x = y = images
    for number, (channels, width) in enumerate(SIZES):
        weights, biases, exit_weights, exit_biases = tensors[4 * number : 4 * number + 4]
        kernel, threads, shared = _kernel(channels, images.dtype, images.device.index or 0)
        following = (len(images), width // 2, width // 2, 2 * channels) if number < 2 else (0,)
        next_y, next_x = images.new_empty(following), images.new_empty(following)
        inputs = (x, y, mean_and_scale, weights, biases, layers + 1 if number == 0 else layers - 1)
        outputs = (next_y, next_x, logits, logits.shape[1], len(images))
        with torch.cuda.device_of(images):
            grid = (-(-len(images) // _images(width)), 1, 1)
            kernel(grid, (threads, 1, 1), [*inputs, exit_weights, exit_biases, *outputs], shared)
        x, y = next_x, next_y
    return logits


@resnet_logits.register_fake
def _logits_like(images: Tensor, mean_and_scale: Tensor, tensors: list[Tensor], layers: int) -> Tensor:
    return images.new_empty((len(images), len(tensors[-1])), dtype=torch.float32)


def _packed(resnet: Any, dtype: torch.dtype) -> list[Tensor]:
    """Weights, biases, exit weights and exit biases of each stage, in the layout of the kernel, on the CPU."""
    stages = [list(stage) for stage in (resnet.layer1, resnet.layer2, resnet.layer3)]
    tensors = []
    for number, stage in enumerate(stages):
        folded = [_folded(pair) for block in stage for pair in ((block.conv1, block.bn1), (block.conv2, block.bn2))]
        if number == 0:
            weight, bias = _folded((resnet.conv1, resnet.bn1))
            stem = torch.zeros(16, 16, 3, 3)
            stem[:, :9, 1] = weight.permute(0, 2, 1, 3).reshape(16, 9, 3)  # see the kernel: rows are channels
            folded.insert(0, (stem, bias))
        weights = torch.stack([weight for weight, _ in (folded if number == 0 else folded[1:])])
        biases = torch.stack([bias for _, bias in (folded if number == 0 else folded[1:])])
        tensors += [_fragments(weights, TILES[weights.shape[1]][1], dtype), biases]
        if number < 2:
            after = stages[number + 1][0]
            (weight, bias), (shortcut, shortcut_bias) = _folded((after.conv1, after.bn1)), _folded(after.downsample)
            taps = torch.cat([weight.flatten(2), shortcut.flatten(2)], 2)
            tensors += [
                _lanes(taps, 16).permute(0, 4, 1, 2, 3).to(dtype).contiguous(),
                torch.cat([bias, shortcut_bias]),
            ]
    head = [tensor.detach().float().contiguous().cpu() for tensor in (resnet.fc.weight, resnet.fc.bias)]
    return [*tensors, *head]


def _folded(pair: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution with the following batch norm folded in, float32 on the CPU."""
    convolution, norm = pair
    numbers = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    weight, bias = fuse_conv_bn_weights(convolution.weight.double(), None, *numbers)
    return weight.detach().float().cpu(), bias.detach().float().cpu()


def _fragments(weights: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """[layers, o, i, 3, 3] in the order in which warps of `group` channels out read it, and one phase more."""
    lanes = torch.stack([_lanes(weight, group) for weight in weights]).permute(1, 0, 6, 2, 5, 3, 4)
    return torch.cat([lanes.flatten(), lanes.new_zeros(3 * 16 * group)]).to(dtype)


def _lanes(weight: Tensor, group: int) -> Tensor:
    """[o, i, ...] -> [o / group, i / 16, group / 16, 256, ...]: 8 numbers for each lane, two right matrices of 16x8."""
    outputs, inputs, *taps = weight.shape
    parts = weight.reshape(outputs // group, group // 16, 2, 8, inputs // 16, 2, 4, 2, *taps)
    return parts.permute(0, 4, 1, 3, 6, 2, 5, 7, *range(8, parts.ndim)).flatten(3, 7)
