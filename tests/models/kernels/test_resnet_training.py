"""The CUDA kernels that train a stage of a ResNet, on a CPU by `cuda_on_a_cpu.h`, compared with torch in float64."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from smoothcert.models.kernels.resnet_training import ROWS, THREADS, fragments, shared_bytes

HERE = Path(__file__).parent
KERNELS = Path(fragments.__code__.co_filename).parent
EPSILON = 1e-5
LAUNCHES = """
#include "cuda_on_a_cpu.h"
#include "resnet_training.cu"
typedef const uint4* In;
typedef const float* Numbers;
extern "C" void run_forward(int blocks, int shared, In x, In shortcut, In weights, Numbers gammas, Numbers betas,
    uint4* outs, uint4* ys, u32* masks, float* statistics, u64* pairs, int layers, int adds, float epsilon) {
    launch(blocks, 1, shared, [=] { forward(x, shortcut, weights, gammas, betas, outs, ys, masks, statistics, pairs,
                                            layers, adds, epsilon); });
}
extern "C" void run_backward(int blocks, int shared, In gradient, In ys, const u32* masks, Numbers statistics,
    Numbers gammas, In weights, uint4* for_ys, uint4* for_x, uint4* for_shortcut, float* totals, u64* pairs,
    int layers, int adds) {
    launch(blocks, 1, shared, [=] { backward(gradient, ys, masks, statistics, gammas, weights, for_ys, for_x,
                                             for_shortcut, totals, pairs, layers, adds); });
}
extern "C" void run_evaluation(int shared, In x, In shortcut, In weights, Numbers biases, uint4* out, u32* masks,
    int layers, int adds, int images) {
    launch((images + 1) / 2, 1, shared,
           [=] { evaluation(x, shortcut, weights, biases, out, masks, layers, adds, images); });
}
extern "C" void run_evaluation_gradient(int shared, In gradient, const u32* masks, In weights, uint4* for_x,
    uint4* for_shortcut, int layers, int adds, int images) {
    launch((images + 1) / 2, 1, shared,
           [=] { evaluation_gradient(gradient, masks, weights, for_x, for_shortcut, layers, adds, images); });
}
extern "C" void run_weight_gradients(int splits, int layers, int shared, In x, In outs, In for_ys, float* sums,
    int images) {
    launch(splits, layers, shared, [=] { weight_gradients(x, outs, for_ys, sums, images); });
}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture(scope="module", params=list(ROWS), ids=lambda size: f"{size[0]}-channels")
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int, Any]:
    """Channels, width, and the kernels of that stage."""
    channels, width = request.param
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "launches.cpp").write_text(LAUNCHES)
    macros = [f"-DCHANNELS={channels}", f"-DWIDTH={width}", f"-DROWS={ROWS[channels, width]}", "-DHALF=0"]
    options = ["-O1", "-std=c++17", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]  # checked jumps refuse other stacks
    command = ["g++", *options, *macros, f"-I{HERE}", f"-I{KERNELS}"]
    subprocess.run([*command, "launches.cpp", "-o", "kernels.so"], cwd=folder, check=True)
    return channels, width, ctypes.CDLL(str(folder / "kernels.so"))


def addresses(*tensors: Tensor) -> list[ctypes.c_void_p]:
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def by_torch(x: Tensor, shortcut: Tensor | None, weights: Tensor, gammas: Tensor, betas: Tensor) -> Tensor:
    """The layers on [n, c, h, w], with what the kernels store rounded to bfloat16."""

    def stored(values: Tensor) -> Tensor:
        return values + (values.detach().bfloat16().double() - values.detach())

    entry = shortcut
    for number, (weight, gamma, beta) in enumerate(zip(weights, gammas, betas, strict=True)):
        adds = number % 2 == (0 if shortcut is not None else 1)
        y = stored(F.conv2d(x, weight.permute(0, 3, 1, 2), padding=1))
        before = F.batch_norm(y, None, None, gamma, beta, True, 0.1, EPSILON) + (entry if adds else 0)
        entry, x = x, stored(F.relu(before))
    return x


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_outputs_statistics_and_gradients(stage: tuple[int, int, Any]) -> None:
    """Two layers without a shortcut from outside, or three with one, as in a ResNet; four images in two blocks."""
    channels, width, kernels = stage
    layers = 2 if channels == 16 else 3
    rows, images, with_shortcut = ROWS[channels, width], 4, layers % 2 == 1
    torch.manual_seed(0)
    x, shortcut, gradient = (torch.randn(images, width, width, channels).bfloat16() for _ in range(3))
    weights = (torch.randn(layers, channels, 3, 3, channels) * (2 / (9 * channels)) ** 0.5).bfloat16().float()
    gammas, betas = torch.rand(layers, channels) + 0.5, torch.randn(layers, channels)
    betas[:, 0] += 3  # ReLUs of one channel are mostly open
    outs, ys = x.new_empty(layers, *x.shape), x.new_empty(layers, 2, rows, THREADS, 8)
    masks = torch.empty(layers, 2, max(rows // 4, 1), THREADS, dtype=torch.int32)
    statistics, pairs = torch.empty(layers, 3, channels), torch.zeros(2, 2, channels, 2)
    tensors = (x, shortcut, fragments(weights, x.dtype), gammas, betas, outs, ys, masks, statistics, pairs)
    kernels.run_forward(
        2,
        shared_bytes("forward", channels, width),
        *addresses(*tensors),
        *(layers, int(with_shortcut), ctypes.c_float(EPSILON)),
    )
    leaves = [t.permute(0, 3, 1, 2).double().requires_grad_() for t in (x, shortcut)]
    parameters = [t.double().requires_grad_() for t in (weights, gammas, betas)]
    expected = by_torch(leaves[0], leaves[1] if with_shortcut else None, *parameters)
    assert relative_error(outs[-1].permute(0, 3, 1, 2), expected.detach()) < 0.002
    first = F.conv2d(leaves[0], parameters[0][0].permute(0, 3, 1, 2), padding=1).detach().bfloat16().double()
    for found, wanted in zip(
        statistics[0],
        (first.mean((0, 2, 3)), (first.var((0, 2, 3), correction=0) + EPSILON).rsqrt(), first.var((0, 2, 3))),
        strict=True,
    ):
        assert relative_error(found, wanted) < 1e-5

    for_ys, for_x, for_shortcut = torch.empty_like(outs), torch.empty_like(x), torch.empty_like(x)
    totals, transposed = torch.empty(layers, 2, channels), fragments(weights, x.dtype, transposed=True)
    tensors = (gradient, ys, masks, statistics, gammas, transposed, for_ys, for_x, for_shortcut, totals)
    shared = shared_bytes("backward", channels, width)
    kernels.run_backward(2, shared, *addresses(*tensors, pairs.zero_()), layers, int(with_shortcut))
    expected.backward(gradient.permute(0, 3, 1, 2).double())
    assert relative_error(for_x.permute(0, 3, 1, 2), leaves[0].grad) < 0.03
    if with_shortcut:
        assert relative_error(for_shortcut.permute(0, 3, 1, 2), leaves[1].grad) < 0.03
    assert relative_error(totals[:, 1], parameters[1].grad) < 0.03
    assert relative_error(totals[:, 0], parameters[2].grad) < 0.03

    sums = torch.full((layers, 2 * (16 // (channels // 16) ** 2), channels, 3, 3, channels), torch.nan)
    shared = shared_bytes("weight_gradients", channels, width)
    kernels.run_weight_gradients(2, layers, shared, *addresses(x, outs, for_ys, sums), images)
    assert relative_error(sums.sum(1), parameters[0].grad) < 0.03


def test_evaluation_and_its_gradients(stage: tuple[int, int, Any]) -> None:
    """Three images: the second block has one."""
    channels, width, kernels = stage
    layers, images = 3 if channels == 16 else 2, 3
    with_shortcut = layers % 2 == 1
    torch.manual_seed(0)
    x, shortcut, gradient = (torch.randn(images, width, width, channels).bfloat16() for _ in range(3))
    weights = (torch.randn(layers, channels, 3, 3, channels) * (2 / (9 * channels)) ** 0.5).bfloat16().float()
    biases, out = torch.randn(layers, channels), torch.empty_like(x)
    masks = torch.empty(layers, 2, max(ROWS[channels, width] // 4, 1), THREADS, dtype=torch.int32)
    tensors = (x, shortcut, fragments(weights, x.dtype), biases, out, masks)
    numbers = (layers, int(with_shortcut), images)
    kernels.run_evaluation(shared_bytes("evaluation", channels, width), *addresses(*tensors), *numbers)
    leaves = [t.permute(0, 3, 1, 2).double().requires_grad_() for t in (x, shortcut)]
    entry, expected = leaves[1], leaves[0]
    for number, (weight, bias) in enumerate(zip(weights.double(), biases.double(), strict=True)):
        adds = number % 2 == (0 if with_shortcut else 1)
        before = F.conv2d(expected, weight.permute(0, 3, 1, 2), bias, padding=1) + (entry if adds else 0)
        entry, expected = expected, F.relu(before)
    assert relative_error(out.permute(0, 3, 1, 2), expected.detach()) < 0.01

    for_x, for_shortcut = torch.empty_like(x), torch.empty_like(x)
    tensors = (gradient, masks, fragments(weights, x.dtype, transposed=True), for_x, for_shortcut)
    shared = shared_bytes("evaluation_gradient", channels, width)
    kernels.run_evaluation_gradient(shared, *addresses(*tensors), *numbers)
    expected.backward(gradient.permute(0, 3, 1, 2).double())
    assert relative_error(for_x.permute(0, 3, 1, 2), leaves[0].grad) < 0.05  # rounding decides a few ReLUs
    if with_shortcut:
        assert relative_error(for_shortcut.permute(0, 3, 1, 2), leaves[1].grad) < 0.05
