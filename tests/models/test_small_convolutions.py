"""The rewritten layers equal torch's in double precision: values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothcert.models.kernels.small_convolutions import aligned_linear, convolve_windows


def values_and_gradients(function, *inputs: Tensor) -> list[Tensor]:
    output = function()
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize(("inputs", "outputs", "size", "side"), [(1, 20, 5, 28), (3, 2, 3, 8), (2, 5, 5, 12)])
def test_convolution_and_pooling(inputs: int, outputs: int, size: int, side: int) -> None:
    torch.manual_seed(size + side)
    layer = nn.Conv2d(inputs, outputs, size).double()
    x = torch.randn(3, inputs, side, side, dtype=torch.float64, requires_grad=True)
    tensors = (x, layer.weight, layer.bias)
    ours = values_and_gradients(lambda: convolve_windows(x, layer), *tensors)
    torchs = values_and_gradients(lambda: F.max_pool2d(layer(x), 2), *tensors)
    for value, expected in zip(ours, torchs, strict=True):
        assert torch.allclose(value, expected, rtol=1e-10, atol=1e-12)


def test_aligned_layers_give_the_same_logits_padded_with_zeros() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(6, 13).double(), nn.Linear(13, 3).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    hidden = aligned_linear(x, first)
    assert hidden.shape == (4, 16)
    assert torch.equal(hidden[:, 13:], torch.zeros(4, 3, dtype=torch.float64))
    logits = aligned_linear(hidden, second)
    assert torch.allclose(logits[:, :3], second(first(x)))
