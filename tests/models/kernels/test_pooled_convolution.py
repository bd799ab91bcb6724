"""The Triton kernels compared with torch in float64: on a GPU, or on a CPU with TRITON_INTERPRET=1 (fp16 alone)."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="torch's builds for CPUs come without Triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from smoothcert.models import LeNet
from smoothcert.models.kernels import kernels_work
from smoothcert.models.kernels.pooled_convolution import pooled_convolution

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(5, 1, 20, 28, 5), (3, 20, 50, 12, 5), (4, 3, 4, 8, 3), (70, 2, 17, 6, 3)]
"""Images, channels, outputs, height and width, size of the kernels."""


def reference(x: Tensor, convolution: nn.Conv2d, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """In float64, from numbers rounded to `dtype` as the kernels round them."""
    given = [x.to(dtype), convolution.weight.to(dtype), convolution.bias]
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in given]
    return F.relu(F.max_pool2d(F.conv2d(*leaves), 2)), leaves


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter does not know bfloat16")
    images, channels, outputs, size, kernel = shape
    torch.manual_seed(0)
    convolution = nn.Conv2d(channels, outputs, kernel).to(DEVICE)
    x = torch.randn(images, channels, size, size, device=DEVICE, requires_grad=True)
    expected, leaves = reference(x, convolution, dtype)
    found = pooled_convolution(x, convolution, dtype)
    gradient = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    wanted = torch.autograd.grad(expected, leaves, gradient.double())
    given = torch.autograd.grad(found, [x, convolution.weight, convolution.bias], gradient.to(DEVICE))
    unit = torch.finfo(dtype).eps
    assert_close(found, expected, 2 * unit)
    for one, other in zip(given, wanted, strict=True):
        assert_close(one, other, 4 * unit)
    assert given[1].dtype == torch.float32
    assert given[1].shape == convolution.weight.shape


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    largest = float(expected.detach().abs().max())
    assert float((found.detach().cpu().double() - expected.detach()).abs().max()) <= tolerance * largest


def test_the_first_of_equal_positions_gets_the_gradient() -> None:
    convolution = nn.Conv2d(1, 20, 5).to(DEVICE)
    x = torch.ones(2, 1, 28, 28, device=DEVICE, requires_grad=True)
    expected, leaves = reference(x, convolution, torch.float16)
    pooled_convolution(x, convolution, torch.float16).sum().backward()
    expected.sum().backward()
    assert_close(x.grad, leaves[0].grad, 1e-2)  # type: ignore[arg-type]


@pytest.mark.parametrize("pixel", [(0, 0), (0, 27), (27, 0), (27, 27), (14, 14), (15, 15)], ids=str)
def test_what_is_no_number_stays_one(pixel: tuple[int, int]) -> None:
    convolution = nn.Conv2d(1, 20, 5).to(DEVICE)
    x = torch.rand(1, 1, 28, 28, device=DEVICE)
    x[..., *pixel] = torch.nan
    expected, _ = reference(x, convolution, torch.float16)
    assert expected.isnan().any()
    assert torch.equal(pooled_convolution(x, convolution, torch.float16).isnan().cpu(), expected.isnan())


def test_sums_are_the_same_each_time() -> None:
    def gradients() -> list[Any]:
        torch.manual_seed(0)
        convolution = nn.Conv2d(20, 50, 5).to(DEVICE)
        x = torch.randn(9, 20, 12, 12, device=DEVICE, requires_grad=True)
        pooled_convolution(x, convolution, torch.float16).square().sum().backward()
        return [x.grad, convolution.weight.grad]

    assert all(torch.equal(one, other) for one, other in zip(gradients(), gradients(), strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lenet_with_and_without_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = LeNet(10).to(DEVICE), torch.rand(64, 1, 28, 28, device=DEVICE)

    def logits_and_gradients() -> list[Tensor]:
        network.zero_grad()
        with torch.autocast("cuda", dtype):
            logits = network(images)
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]

    assert kernels_work(0)
    ours = logits_and_gradients()
    monkeypatch.setattr("smoothcert.models.lenet.kernel_dtype", lambda x: None)
    for mine, theirs in zip(ours, logits_and_gradients(), strict=True):
        assert float((mine.float() - theirs.float()).norm()) <= 0.03 * float(theirs.float().norm())
