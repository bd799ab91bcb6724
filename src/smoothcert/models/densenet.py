"""DenseNet-40 for 32x32 images (Huang et al. 2017, https://arxiv.org/abs/1608.06993), with bottleneck layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothcert.models.logits import linear_logits

GROWTH, FIRST_CHANNELS, LAYERS = 12, 24, 6


class Bottleneck(nn.Module):
    """BN-ReLU-1x1 to 4 * growth channels, BN-ReLU-3x3 to growth channels, appended to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * GROWTH, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * GROWTH)
        self.conv2 = nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.bn1(x)))
        y = self.conv2(F.relu(self.bn2(y)))
        return torch.cat([x, y], dim=1)


class DenseNet40(nn.Module):
    """[n, 3, h, w] -> logits [n, num_classes]: three blocks of six bottleneck layers.

    Transitions only halve the resolution by average pooling: without compression, the released code builds no
    convolution and no batch norm there. Its checkpoints fit this network: 211,978 parameters for ten classes.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, FIRST_CHANNELS, 3, padding=1, bias=False)
        channels = FIRST_CHANNELS
        blocks: list[nn.Module] = []
        for _ in range(3):
            blocks.append(nn.Sequential(*(Bottleneck(channels + i * GROWTH) for i in range(LAYERS))))
            channels += LAYERS * GROWTH
        self.dense1, self.dense2, self.dense3 = blocks
        self.bn = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = F.avg_pool2d(self.dense1(self.conv1(images)), 2)
        x = F.avg_pool2d(self.dense2(x), 2)
        x = self.dense3(x)
        x = F.adaptive_avg_pool2d(F.relu(self.bn(x)), 1)
        return linear_logits(self.fc, torch.flatten(x, 1))
