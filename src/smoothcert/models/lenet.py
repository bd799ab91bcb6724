"""LeNet for MNIST, as in the papers: two convolutions, two fully connected layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothcert.models.small_convolutions import aligned_linear, convolve_windows, multiply_windows


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
        x = F.relu(convolve_and_halve(images, self.conv1))
        x = F.relu(convolve_and_halve(x, self.conv2))
        x = torch.flatten(x, 1)
        if on_matrix_units(x):
            return aligned_linear(F.relu(aligned_linear(x, self.fc1)), self.fc2)[:, : self.fc2.out_features]
        logits: Tensor = self.fc2(F.relu(self.fc1(x)))
        return logits


def on_matrix_units(x: Tensor) -> bool:
    """Whether a compiled step trains on a GPU: there what looks like more work is less time."""
    return x.device.type == "cuda" and torch.compiler.is_compiling() and torch.is_grad_enabled()


def convolve_and_halve(x: Tensor, convolution: nn.Conv2d) -> Tensor:
    """max_pool2d(convolution(x), 2), up to rounding, for odd kernels and even sizes: the fastest way on x's device."""
    if on_matrix_units(x):
        return multiply_windows(x, convolution)
    if x.device.type == "cuda" and not torch.is_grad_enabled():
        return convolve_windows(x, convolution)
    if x.device.type == "cpu" and not torch.is_grad_enabled():
        if x.dtype == torch.bfloat16 and convolution.in_channels == 1:
            return convolve_windows(x, convolution)
        # Two elementwise maxima, which CPUs vectorise: votes are counted twice as fast.
        y: Tensor = convolution(x)
        y = torch.maximum(y[:, :, ::2], y[:, :, 1::2])
        return torch.maximum(y[..., ::2], y[..., 1::2])
    return F.max_pool2d(convolution(x), 2)
