"""The Triton kernels compared with torch in float64: on a GPU, or on a CPU with TRITON_INTERPRET=1 (fp16 alone)."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="torch's builds for CPUs come without Triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

import smoothcert.models.kernels.residual_layers as residual_layers_module
from smoothcert.models import build_model
from smoothcert.models.kernels import has_kernels, kernels_work
from smoothcert.models.kernels.residual_layers import residual_layers
from smoothcert.models.resnet_cifar import CifarResNet

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALLEST = (2, 16, 5, 7)
SHAPES = [SMALLEST, (9, 16, 8, 8), (2, 32, 6, 10), (3, 64, 4, 4), (8, 16, 12, 12), (3, 32, 4, 5)]
"""Images, channels, height, width."""
OF_A_RESNET = (
    [(3, 16, 32, 32), (5, 32, 16, 16), (7, 64, 8, 8), (4, 16, 32, 32), (6, 32, 16, 16), (256, 64, 8, 8)]
    if DEVICE == "cuda"
    else []
)
"""Those of ResNets for CIFAR, which take the interpreter long."""
TYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
"""Triton's interpreter does not know bfloat16."""
Layers = list[tuple[nn.Conv2d, nn.BatchNorm2d]]


def cases(numbers: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
    """Each shape with each number of layers; the interpreter, which takes long, has all of them for one shape only."""
    if DEVICE == "cuda":
        return [(shape, number) for shape in SHAPES + OF_A_RESNET for number in numbers]
    alternating = [(shape, numbers[i % 2]) for i, shape in enumerate(SHAPES[1:])]
    return [*((SMALLEST, number) for number in numbers), *alternating]


def new_layers(channels: int, number: int) -> Layers:
    convolutions = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(number)]
    norms = [nn.BatchNorm2d(channels, eps=0.1, momentum=0.3) for _ in range(number)]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
        nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    assert all(map(has_kernels, convolutions))
    return [(c.to(DEVICE), n.to(DEVICE)) for c, n in zip(convolutions, norms, strict=True)]


def by_torch(x: Tensor, shortcut: Tensor | None, layers: Layers, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same layers, and how near to 0 each number of the last came before a ReLU, of the last or of one before.

    What the kernels store in `dtype` is rounded, so that a ReLU lets the same numbers through."""

    def stored(values: Tensor) -> Tensor:
        return values + (values.to(dtype).double() - values).detach()

    entry, nearest = shortcut, None
    for number, (convolution, norm) in enumerate(layers):
        adds = number % 2 == (0 if shortcut is not None else 1)
        y = convolution(x)
        before = norm(stored(y) if norm.training else y) + (entry if adds else 0)
        entry = x
        x, nearest = stored(F.relu(before)), before.abs() if nearest is None else torch.minimum(nearest, before.abs())
    assert nearest is not None
    return x, nearest


def rounded(layers: Layers, dtype: torch.dtype) -> Layers:
    for convolution, _ in layers:
        convolution.weight.data = convolution.weight.data.to(dtype).float()
    return layers


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("shape", "number"), cases((2, 3, 1, 4)), ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_values_gradients_and_statistics(
    shape: tuple[int, ...], dtype: torch.dtype, number: int, training: bool
) -> None:
    torch.manual_seed(0)
    layers = rounded(new_layers(shape[1], number), dtype)
    with_shortcut = number % 2 == 1
    x, shortcut = (torch.randn(shape, device=DEVICE).to(dtype).float().requires_grad_() for _ in range(2))
    theirs = [tuple(copy.deepcopy(module).cpu().double() for module in layer) for layer in layers]
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in (x, shortcut)]
    for modules in (*layers, *theirs):
        modules[1].train(training)
    found = residual_layers(x, shortcut if with_shortcut else None, layers, dtype)
    expected, _ = by_torch(leaves[0], leaves[1] if with_shortcut else None, theirs, dtype)  # type: ignore[arg-type]
    unit = torch.finfo(dtype).eps
    assert largest_error(found, expected) <= 2 * number * unit
    for (_, mine), (_, other) in zip(layers, theirs, strict=True):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert largest_error(getattr(mine, name), getattr(other, name)) <= 2 * number * unit

    gradient = torch.randn(shape, dtype=torch.float64).to(dtype)
    wanted = [(x, leaves[0]), *([(shortcut, leaves[1])] if with_shortcut else [])]
    if training:
        for (c, n), (c2, n2) in zip(layers, theirs, strict=True):
            wanted += [(c.weight, c2.weight), (n.weight, n2.weight), (n.bias, n2.bias)]  # type: ignore[list-item]
    mine_all = torch.autograd.grad(found, [mine for mine, _ in wanted], gradient.to(DEVICE, dtype))
    other_all = torch.autograd.grad(expected, [other for _, other in wanted], gradient.double())
    for mine, other in zip(mine_all, other_all, strict=True):
        assert mine.dtype == torch.float32
        # Rounding decides about a few numbers near 0 whether ReLU lets them through.
        assert relative_error(mine, other) <= 0.1


def largest_error(found: Tensor, expected: Tensor) -> float:
    largest = max(float(expected.detach().abs().max()), 1e-30)
    return float((found.detach().cpu().double() - expected.detach()).abs().max()) / largest


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("shape", "number"), [*cases((3, 2, 4)), (SHAPES[1], 11)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gradients_where_relu_is_certain(
    shape: tuple[int, ...], number: int, dtype: torch.dtype, training: bool
) -> None:
    """Far from 0 a ReLU passes what it passes in float64. An odd number of layers has a shortcut from outside.

    Gradients for weights are taken together for several layers: of 11, all cases occur."""
    torch.manual_seed(0)
    layers = new_layers(shape[1], number)
    for convolution, norm in layers:
        norm.train(training)
        nn.init.constant_(norm.bias, 20.0)
        convolution.weight.data *= 0.05
    rounded(layers, dtype)
    x, shortcut = (torch.randn(shape, device=DEVICE).to(dtype).float().requires_grad_() for _ in range(2))
    theirs = [tuple(copy.deepcopy(module).cpu().double() for module in layer) for layer in layers]
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in (x, shortcut)]
    inputs, wanted = ([x, shortcut], leaves) if number % 2 else ([x, None], [leaves[0], None])
    expected, nearest = by_torch(*wanted, theirs, dtype)  # type: ignore[arg-type, misc]
    assert float(nearest.detach().min()) > 1
    gradient = torch.randn(shape).to(dtype)
    found = residual_layers(*inputs, layers, dtype)  # type: ignore[arg-type, misc]
    ours, others = (list(filter(lambda leaf: leaf is not None, part)) for part in (inputs, wanted))
    if training:
        ours += [p for layer in layers for module in layer for p in module.parameters()]
        others += [p for layer in theirs for module in layer for p in module.parameters()]
    given = torch.autograd.grad(found, ours, gradient.to(DEVICE))  # type: ignore[arg-type]
    right = torch.autograd.grad(expected, others, gradient.double())  # type: ignore[arg-type]
    for mine, other in zip(given, right, strict=True):
        # bf16 rounds 8 times more, and sums that almost cancel (gradients of beta below a batch norm) keep that noise.
        assert relative_error(mine, other) <= (0.02 if dtype == torch.float16 else 0.06) * (1 if number < 5 else 2)


def test_running_statistics_of_few_pixels() -> None:
    """Where a variance over n and one over n - 1 are far apart."""
    torch.manual_seed(0)
    layers = new_layers(16, 1)
    convolution, norm = (copy.deepcopy(module).cpu().double() for module in layers[0])
    x = torch.randn(1, 16, 2, 3, device=DEVICE).half().float()
    residual_layers(x, x, layers, torch.float16)
    norm(convolution(x.cpu().double()))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert largest_error(getattr(layers[0][1], name), getattr(norm, name)) <= 2 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("shape", [(5, 16, 8, 8), (3, 64, 4, 5), *OF_A_RESNET], ids=str)
def test_statistics_of_numbers_far_from_zero(shape: tuple[int, ...]) -> None:
    """A mean of 1,000 standard deviations: the difference of two mean squares would have no correct digit."""
    torch.manual_seed(0)
    layers = new_layers(shape[1], 2)
    for convolution, _ in layers:
        nn.init.constant_(convolution.weight, 0)
        convolution.weight.data[:, :, 1, 1] = torch.eye(shape[1])
    x = (30 + 0.03 * torch.randn(shape, device=DEVICE)).half().permute(0, 2, 3, 1).contiguous()
    tensors = residual_layers_module.Layers.of(layers)
    _, ys, statistics = residual_layers_module.trained(x, None, *tensors, 0.1, 1e-9)
    first = ys[0].detach().cpu().double().flatten(0, 2)
    assert float((first.mean(0) / first.std(0)).min()) > 500
    torch.testing.assert_close(statistics[0, 0].detach().cpu().double(), first.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        statistics[0, 1].detach().cpu().double(), 1 / first.std(0, correction=0), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("shape", [(37, 9, 8, 64), (260, 8, 8, 32), (20, 30, 30, 16)], ids=str)
def test_weight_gradient_of_many_pixels(shape: tuple[int, ...]) -> None:
    """Of more pixels than there are parts at one time: each part goes round several times."""
    torch.manual_seed(0)
    x, gradient = (torch.randn(shape, device=DEVICE, dtype=torch.float16) for _ in range(2))
    parts, part = residual_layers_module._parts(x)
    assert part > residual_layers_module.WEIGHT_GRADIENT[shape[3]][1]
    wide, channels = residual_layers_module._wide(x, 32), shape[3]
    sums = torch.full((parts * wide, channels, 3, 3, channels), torch.nan, device=DEVICE)
    residual_layers_module._weight_gradient(x[None], gradient[None], sums[None], part)
    images, given = (tensor.cpu().double().permute(0, 3, 1, 2) for tensor in (x, gradient))
    of_torch = torch.nn.grad.conv2d_weight(images, (channels, channels, 3, 3), given, padding=1)
    assert largest_error(sums.sum(0).permute(0, 3, 1, 2), of_torch) <= 1e-5


def test_sums_of_many_parts() -> None:
    torch.manual_seed(0)
    sums, out = torch.randn(3000, 2, 16, device=DEVICE), torch.empty(2, 16, device=DEVICE)
    residual_layers_module._totals(sums, out)
    assert largest_error(out, sums.cpu().double().sum(0)) <= 1e-5


def test_no_second_derivatives_rather_than_wrong_ones() -> None:
    layers = new_layers(16, 2)
    for _, norm in layers:
        norm.eval()
    x = torch.randn(2, 16, 4, 4, device=DEVICE, requires_grad=True)
    total = residual_layers(x, None, layers, torch.float16).square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(total, x, create_graph=True)


def test_what_is_no_number_stays_one() -> None:
    layers = new_layers(16, 2)
    x = torch.rand(2, 16, 4, 4, device=DEVICE)
    x[0, 3, 1, 1] = torch.nan
    assert residual_layers(x, None, layers, torch.float16).isnan().all(), "as batch norm's"


def test_sums_are_the_same_each_time() -> None:
    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        layers = new_layers(32, 2)
        x = torch.randn(12, 32, 8, 8, device=DEVICE, requires_grad=True)
        parameters = [p for layer in layers for module in layer for p in module.parameters()]
        return list(torch.autograd.grad(residual_layers(x, None, layers, torch.float16).sum(), [x, *parameters]))

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


def test_inputs_and_gradients_that_are_not_contiguous() -> None:
    def numbers(x: Tensor, gradient: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        layers = new_layers(16, 3)
        given = x.detach().requires_grad_()
        out = residual_layers(given, given.detach(), layers, torch.float16)
        return [out, *torch.autograd.grad(out, [given, layers[0][0].weight], gradient)]

    torch.manual_seed(1)
    x, gradient = (torch.randn(3, 16, 6, 8, device=DEVICE).transpose(2, 3) for _ in range(2))
    for one, other in zip(numbers(x, gradient), numbers(x.contiguous(), gradient.contiguous()), strict=True):
        assert torch.equal(one, other)


def test_two_passes_before_one_gradient() -> None:
    """As an objective has it that sees clean and mixed images."""
    torch.manual_seed(0)
    layers = new_layers(16, 2)
    x, other = (torch.randn(3, 16, 8, 8, device=DEVICE) for _ in range(2))
    parameters = [p for layer in layers for module in layer for p in module.parameters()]

    def total(images: Tensor) -> Tensor:
        return residual_layers(images, None, layers, torch.float16).sum()

    together = torch.autograd.grad(total(x) + total(other), parameters)
    apart = [torch.autograd.grad(total(images), parameters) for images in (x, other)]
    for found, one, two in zip(together, *apart, strict=True):
        torch.testing.assert_close(found, one + two, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("number", [6, 7])
def test_layers_that_are_computed_again_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """And keep less memory. An odd number of layers has a shortcut from outside."""
    torch.manual_seed(0)
    layers = new_layers(16, number)
    x, shortcut = (torch.randn(3, 16, 8, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    inputs = (x, shortcut) if number % 2 else (x, None)

    def numbers() -> tuple[list[Tensor], int]:
        mine = copy.deepcopy(layers)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = residual_layers(*inputs, mine, torch.float16)
        leaves = [leaf for leaf in inputs if leaf is not None]
        leaves += [p for layer in mine for module in layer for p in module.parameters()]
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        return [out, *gradients, *(buffer for _, norm in mine for buffer in norm.buffers())], sum(kept.values())

    together, kept_together = numbers()
    monkeypatch.setattr(residual_layers_module, "kept_bytes", lambda gpu: 0)
    monkeypatch.setattr(residual_layers_module, "LAYERS_AT_ONCE", 2)
    again, kept_again = numbers()
    assert torch.equal(together[0], again[0])
    for one, other in zip(together, again, strict=True):  # gradients are rounded where a part ends
        assert (one - other).float().norm() <= 2e-3 * one.float().norm()
    outputs = 2 * number * 2 * x.numel()
    inputs_of_parts = (number // 2 + 1 + number % 2) * 2 * x.numel()
    assert kept_together - kept_again >= outputs - inputs_of_parts > 0


def test_compiled_training_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ResNet in training is traced without a break. Sums have a fixed order, so both ways round alike."""
    monkeypatch.setattr("smoothcert.models.resnet_cifar.kernel_dtype", lambda x: torch.float16)
    monkeypatch.setattr("torch.backends.cudnn.deterministic", True)
    torch.manual_seed(0)
    network = CifarResNet(8, 10).to(DEVICE)
    images = torch.rand(4, 3, 8, 8, device=DEVICE)

    def numbers(compiled: bool) -> list[Tensor]:
        mine = copy.deepcopy(network)

        def loss(images: Tensor) -> Tensor:
            with torch.autocast(DEVICE, torch.float16):
                return mine(images).float().square().mean()

        value = (torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss)(images)
        return [value.detach(), *torch.autograd.grad(value, list(mine.parameters())), *mine.buffers()]

    for one, other in zip(numbers(compiled=False), numbers(compiled=True), strict=True):
        within = 1e-3 if DEVICE == "cpu" else 2e-2
        assert (one - other).float().norm() <= within * one.float().norm() + 1e-5


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("training", [True, False])
def test_resnet_with_and_without_them(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    torch.manual_seed(0)
    network = build_model("resnet20", (3, 32, 32), 10).to(DEVICE, memory_format=torch.channels_last)
    images = torch.rand(64, 3, 32, 32, device=DEVICE)

    def numbers(bf16: bool) -> list[Tensor]:
        again, given = copy.deepcopy(network).train(training), images.clone().requires_grad_()
        again.requires_grad_(training)
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            logits = again(given)
        logits.square().mean().backward()
        gradients = [p.grad for p in (given, *again.parameters()) if p.grad is not None]
        return [logits.detach(), *gradients, *(b.float() for b in again.buffers())]

    assert kernels_work(0)
    exact, ours = numbers(bf16=False), numbers(bf16=True)
    monkeypatch.setattr("smoothcert.models.resnet_cifar.kernel_dtype", lambda x: None)
    for right, mine, theirs in zip(exact, ours, numbers(bf16=True), strict=True):
        # Twenty layers of 16 bits add up to a third and more, by chance: as near to float32 as torch's are.
        error, other = ((found - right).norm() / (right.norm() + 1e-6) for found in (mine, theirs))
        assert float(error) <= 2 * float(other) + 0.01
