"""The Triton kernels beside torch in float64: on a GPU, or on a CPU with TRITON_INTERPRET=1 (fp16 alone)."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="torch's builds for CPUs come without Triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from smoothcert.kernels import has_kernels, kernels_work
from smoothcert.kernels.normalised_convolution import evaluated_convolution, normalised_convolution
from smoothcert.models import build_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(9, 16, 8, 8), (2, 32, 6, 10), (3, 64, 4, 4), (40, 16, 12, 12)]
"""Images, channels, height, width."""


def layer(channels: int) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution, norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    assert has_kernels(convolution)
    return convolution.to(DEVICE), norm.to(DEVICE)


@pytest.mark.parametrize("with_shortcut", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_gradients_and_statistics(shape: tuple[int, ...], dtype: torch.dtype, with_shortcut: bool) -> None:
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter does not know bfloat16")
    torch.manual_seed(0)
    convolution, norm = layer(shape[1])
    convolution.weight.data = convolution.weight.data.to(dtype).float()
    x, shortcut = (torch.randn(shape, device=DEVICE).to(dtype).float().requires_grad_() for _ in range(2))
    theirs = [copy.deepcopy(module).cpu().double() for module in (convolution, norm)]
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in (x, shortcut)]
    found = normalised_convolution(x, convolution, norm, shortcut if with_shortcut else None, dtype)
    before = theirs[1](theirs[0](leaves[0])) + (leaves[1] if with_shortcut else 0)
    expected = F.relu(before)
    # Where rounding decides what ReLU lets through, nothing is asked of the gradient.
    gradient = torch.randn(shape, dtype=torch.float64).to(dtype) * (before.abs() > 0.02)
    ours = [x, convolution.weight, norm.weight, norm.bias, *([shortcut] if with_shortcut else [])]
    others = [leaves[0], theirs[0].weight, theirs[1].weight, theirs[1].bias, *([leaves[1]] if with_shortcut else [])]
    unit = torch.finfo(dtype).eps
    assert_close(found, expected, 2 * unit)
    given = torch.autograd.grad(found, ours, gradient.to(DEVICE, dtype))
    wanted = torch.autograd.grad(expected, others, gradient.double())
    for mine, other in zip(given, wanted, strict=True):
        assert_close(mine, other, 4 * unit)
        assert mine.dtype == torch.float32
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert_close(getattr(norm, name), getattr(theirs[1], name), 2 * unit)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    largest = float(expected.detach().abs().max())
    assert float((found.detach().cpu().double() - expected.detach()).abs().max()) <= tolerance * largest


def test_what_is_no_number_stays_one() -> None:
    convolution, norm = layer(16)
    x = torch.rand(2, 16, 4, 4, device=DEVICE)
    x[0, 3, 1, 1] = torch.nan
    assert normalised_convolution(x, convolution, norm, None, torch.float16).isnan().all(), "as batch norm's"


def test_sums_are_the_same_each_time() -> None:
    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        convolution, norm = layer(32)
        x = torch.randn(40, 32, 8, 8, device=DEVICE, requires_grad=True)
        normalised_convolution(x, convolution, norm, x, torch.float16).square().sum().backward()
        return [parameter.grad for parameter in (x, convolution.weight, norm.weight, norm.bias)]  # type: ignore[misc]

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("with_shortcut", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_evaluation(shape: tuple[int, ...], with_shortcut: bool) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(shape[1], shape[1], 3, padding=1).to(DEVICE, torch.float16)
    x, shortcut = (torch.randn(shape, device=DEVICE, dtype=torch.float16) for _ in range(2))
    with torch.no_grad():
        found = evaluated_convolution(x, convolution, shortcut if with_shortcut else None, torch.float16)
        expected = copy.deepcopy(convolution).cpu().double()(x.cpu().double())
        expected += shortcut.cpu().double() if with_shortcut else 0
    assert_close(found, F.relu(expected), 2 * torch.finfo(torch.float16).eps)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_resnet_with_and_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = build_model("resnet20", (3, 32, 32), 10).to(DEVICE, memory_format=torch.channels_last).train()
    images = torch.rand(64, 3, 32, 32, device=DEVICE)

    def numbers(bf16: bool) -> list[Tensor]:
        again = copy.deepcopy(network)
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            logits = again(images)
        logits.square().mean().backward()
        gradients = [p.grad for p in again.parameters() if p.grad is not None]
        return [logits.detach(), *gradients, *(b.float() for b in again.buffers())]

    assert kernels_work(0)
    exact, ours = numbers(bf16=False), numbers(bf16=True)
    monkeypatch.setattr("smoothcert.models.resnet_cifar.kernel_dtype", lambda x: None)
    for right, mine, theirs in zip(exact, ours, numbers(bf16=True), strict=True):
        # Twenty layers of 16 bits add up: as near to float32 as torch's are.
        error, other = ((found - right).norm() / (right.norm() + 1e-6) for found in (mine, theirs))
        assert float(error) <= 1.5 * float(other) + 0.01
