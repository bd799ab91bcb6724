"""ResNet-20 and ResNet-110 for 32x32 images (He et al. 2016, https://arxiv.org/abs/1512.03385).

Parameter names are those of the checkpoints that the papers' authors released.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from smoothcert.models.kernels import apply_to, is_plain, kernel_dtype
from smoothcert.models.logits import linear_logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut around them; ReLU after the sum."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels_in != channels:
            shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + shortcut)


class Stage(nn.Sequential):
    """A sequence of blocks of one size, computed in the fastest way on the device of their input."""

    def forward(self, x: Tensor) -> Tensor:
        # The device is checked first: on a CPU, inspecting all layers takes 3% of the time of computing them.
        if isinstance(x, Proxy) or (dtype := kernel_dtype(x)) is None:
            return self._one_by_one(x)
        blocks = [block for block in self if isinstance(block, BasicBlock) and is_plain(block)]
        layers = [layer for block in blocks for layer in ((block.conv1, block.bn1), (block.conv2, block.bn2))]
        downsample = blocks[0].downsample if blocks else None
        fused = layers if downsample is None else layers[1:]  # torch computes a convolution with a stride
        if len(blocks) < len(self) or not apply_to(fused, x):
            return self._one_by_one(x)
        from smoothcert.models.kernels.residual_layers import residual_layers  # needs Triton

        if downsample is None:
            return residual_layers(x, None, fused, dtype)
        convolution, norm = layers[0]
        return residual_layers(F.relu(norm(convolution(x))), downsample(x), fused, dtype)

    def _one_by_one(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class CifarResNet(nn.Module):
    """[n, 3, h, w] -> logits [n, num_classes]; depth = 6 * blocks + 2."""

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        assert rest == 0, "depth must be 6n + 2"
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks, 1)
        self.layer2 = self._stage(16, 32, blocks, 2)
        self.layer3 = self._stage(32, 64, blocks, 2)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, 0, math.sqrt(2 / fan_out))

    @staticmethod
    def _stage(channels_in: int, channels: int, blocks: int, stride: int) -> Stage:
        first = BasicBlock(channels_in, channels, stride)
        return Stage(first, *(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return linear_logits(self.fc, torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
