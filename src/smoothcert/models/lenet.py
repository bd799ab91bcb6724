"""LeNet for MNIST, as in the papers: two convolutions, two fully connected layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothcert.models.kernels import kernel_dtype
from smoothcert.models.kernels.small_convolutions import aligned_linear, convolve_windows


class LeNet(nn.Module):
    """[n, 1, 28, 28] -> logits [n, num_classes]."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(50 * 4 * 4, 500)
        self.fc2 = nn.Linear(500, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = convolve_and_halve(convolve_and_halve(images, self.conv1), self.conv2)
        x = torch.flatten(x, 1)
        if x.device.type == "cuda" and torch.compiler.is_compiling() and torch.is_grad_enabled():
            # In a compiled step, padded layers are faster.
            return aligned_linear(F.relu(aligned_linear(x, self.fc1)), self.fc2)[:, : self.fc2.out_features]
        logits: Tensor = self.fc2(F.relu(self.fc1(x)))
        return logits


def convolve_and_halve(x: Tensor, convolution: nn.Conv2d) -> Tensor:
    """Compute relu(max_pool2d(convolution(x), 2)), up to rounding, in the fastest way on the device of x.

    For kernels of odd size and images of even size.
    """
    if (dtype := kernel_dtype(x)) is not None:
        from smoothcert.models.kernels.pooled_convolution import pooled_convolution  # needs Triton

        return pooled_convolution(x, convolution, dtype)
    # ReLU and maximum commute: ReLU after the pooling gives the same numbers with a quarter of the work.
    if torch.is_grad_enabled():
        return F.relu(F.max_pool2d(convolution(x), 2))
    if x.device.type == "cuda" or (x.dtype == torch.bfloat16 and convolution.in_channels == 1):
        return F.relu(convolve_windows(x, convolution))
    # CPUs vectorise two elementwise maxima: votes are counted twice as fast.
    y: Tensor = convolution(x)
    y = torch.maximum(y[:, :, ::2], y[:, :, 1::2])
    return F.relu(torch.maximum(y[..., ::2], y[..., 1::2]))
