"""LeNet for MNIST, as in the papers: two convolutions, two fully connected layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def halve_by_maximum(x: Tensor) -> Tensor:
    """2x2 max-pooling of an even-sized [n, c, h, w]."""
    if x.device.type == "cpu" and not x.requires_grad:
        # The same numbers from two elementwise maxima, which CPUs vectorise: votes are counted twice as fast.
        x = torch.maximum(x[:, :, ::2], x[:, :, 1::2])
        return torch.maximum(x[..., ::2], x[..., 1::2])
    return F.max_pool2d(x, 2)


class LeNet(nn.Module):
    """[n, 1, 28, 28] -> logits [n, num_classes]."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(50 * 4 * 4, 500)
        self.fc2 = nn.Linear(500, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        # ReLU and maximum commute: ReLU after the pooling gives the same numbers for a quarter of the work.
        x = F.relu(halve_by_maximum(self.conv1(images)))
        x = F.relu(halve_by_maximum(self.conv2(x)))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        logits: Tensor = self.fc2(x)
        return logits
