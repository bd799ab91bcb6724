"""The evaluation kernel of ResNets for CIFAR next to torch in float64 on a GPU, and what can be checked without one."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from smoothcert.models import CifarResNet, Normalize
from smoothcert.models.kernels import resnet_evaluation
from smoothcert.models.kernels.resnet_evaluation import FusedResNet, fused_resnet
from smoothcert.models.precision import Precision, at_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network(depth: int, classes: int = 10) -> nn.Sequential:
    """With batch norms that change something."""
    torch.manual_seed(depth)
    model = nn.Sequential(Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)), CifarResNet(depth, classes)).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
            nn.init.uniform_(module.weight, 0.3, 0.8)
            nn.init.normal_(module.bias, 0, 0.1)
    return model


def noisy_images(number: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(number, 3, 32, 32) + 0.5 * torch.randn(number, 3, 32, 32)).to(GPU, dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@needs_gpu
@pytest.mark.parametrize("depth", [8, 20, 110])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_logits_are_nearer_to_float64_than_those_of_torch(depth: int, precision: Precision) -> None:
    model = network(depth)
    ours = at_precision(model, precision, GPU, (3, 32, 32))
    assert isinstance(ours, FusedResNet)
    exact = copy.deepcopy(model).double().to(GPU)
    for number in (1, 2, 7, 129):
        images = noisy_images(number, ours.dtype)
        with torch.no_grad():
            expected, found, by_torch = exact(images.double()), ours(images), ours.network(images)
        assert found.dtype == torch.float32
        assert relative_error(found, expected) <= {8: 0.5, 20: 0.5, 110: 1.0}[depth] * torch.finfo(ours.dtype).eps
        assert number < 100 or relative_error(found, expected) <= 1.1 * relative_error(by_torch, expected)


@needs_gpu
def test_each_stage_alone() -> None:
    """Networks in which two of three stages only pass their input on, so that an error of one layer is seen."""
    for stage in (1, 2, 3):
        model = network(20)
        for other in {1, 2, 3} - {stage}:
            for block in model[1].get_submodule(f"layer{other}").children():
                nn.init.zeros_(block.bn2.weight)  # type: ignore[arg-type, union-attr]
                nn.init.zeros_(block.bn2.bias)  # type: ignore[arg-type, union-attr]
        ours = at_precision(model, "fp16", GPU, (3, 32, 32))
        images = noisy_images(5, torch.float16)
        with torch.no_grad():
            expected = copy.deepcopy(model).double().to(GPU)(images.double())
            assert relative_error(ours(images), expected) <= 0.5 * torch.finfo(torch.float16).eps


@needs_gpu
def test_no_other_image_changes_the_logits_of_an_image() -> None:
    ours = at_precision(network(20), "bf16", GPU, (3, 32, 32))
    images = noisy_images(9, torch.bfloat16)
    images[4, 1, 3, 5] = torch.nan
    with torch.no_grad():
        logits, alone = ours(images), torch.cat([ours(image[None]) for image in images])
        strided = ours(images.contiguous(memory_format=torch.channels_last))
    assert logits[4].isnan().all()
    assert not logits[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()
    assert torch.equal(logits.nan_to_num(), alone.nan_to_num())
    assert torch.equal(logits.nan_to_num(), strided.nan_to_num())


@needs_gpu
def test_other_inputs_are_left_to_torch() -> None:
    ours = at_precision(network(8, classes=3), "bf16", GPU, (3, 32, 32))
    assert isinstance(ours, FusedResNet)
    for images in (noisy_images(2, torch.bfloat16)[:, :, 4:, 4:], noisy_images(0, torch.bfloat16)):
        with torch.no_grad():
            assert torch.equal(ours(images), ours.network(images))
    images = noisy_images(2, torch.bfloat16).requires_grad_()
    (gradient,) = torch.autograd.grad(ours(images).sum(), images)
    assert gradient.any(), "the kernels have no gradients"


@needs_gpu
def test_a_compiler_takes_the_kernels_as_one_operator() -> None:
    ours = at_precision(network(8), "bf16", GPU, (3, 32, 32))
    images = noisy_images(6, torch.bfloat16)
    with torch.no_grad():
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)(images)
        assert torch.equal(compiled, ours(images))


@pytest.mark.parametrize("group", [16, 32])
def test_each_lane_finds_its_weights(group: int) -> None:
    """The right matrix [16, 8] of a product: a lane holds columns lane / 4, and rows 2 (lane % 4) + (0, 1, 8, 9)."""
    weights = torch.arange(2 * 32 * 32 * 9).double().view(2, 32, 32, 3, 3)
    read = iter(resnet_evaluation._fragments(weights, group, torch.float64).tolist())
    order = (range(n) for n in (32 // group, 2, 3, 2, 3, group // 16, 32, 2, 2, 2))
    for part, layer, dx, step, dy, pair, lane, tile, half, odd in itertools.product(*order):
        target = part * group + pair * 16 + tile * 8 + lane // 4
        source = step * 16 + half * 8 + lane % 4 * 2 + odd
        assert next(read) == weights[layer, target, source, dy, dx]
    assert len(list(read)) == 3 * 16 * group, "the kernel reads one phase ahead"


def test_first_layer_as_one_of_sixteen_channels() -> None:
    """Nine of its channels are those of the three rows around a pixel."""
    model = network(8)[1]
    stem = torch.zeros(16, 16, 3, 3)
    fragments = resnet_evaluation._packed(model, torch.float32)[0][: 16 * 16 * 9]
    lanes = resnet_evaluation._fragments(torch.arange(16 * 16 * 9.0).view(1, 16, 16, 3, 3), 16, torch.float32)
    stem.view(-1)[lanes[: len(fragments)].long()] = fragments
    images = torch.randn(2, 3, 32, 32)
    rows = nn.functional.pad(images, (0, 0, 1, 1))
    channels = torch.cat([rows[:, :, dy : dy + 32] for dy in range(3)] + [torch.zeros(2, 7, 32, 32)], 1)
    expected = model.bn1(model.conv1(images))
    bias = resnet_evaluation._packed(model, torch.float32)[1][0]
    found = nn.functional.conv2d(channels, stem, bias, padding=1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_networks_that_the_kernels_do_not_compute() -> None:
    """What differs from the network that the kernels compute is evaluated by torch; so is everything on a CPU."""
    usual = network(8)
    assert fused_resnet(usual, usual, torch.bfloat16, CPU) is usual
    assert fused_resnet(usual, usual, torch.float32, GPU) is usual
    changed = network(8)
    changed[1].layer2[0].bn1.eps = 0.1
    hooked = network(8)
    hooked[1].layer1.register_forward_hook(lambda *_: None)
    replaced = network(8)
    replaced[1].layer3 = nn.Sequential(replaced[1].layer3, nn.Identity())
    state = torch.get_rng_state()
    for model in (changed, hooked, replaced, nn.Sequential(nn.Identity(), replaced[1])):
        assert fused_resnet(model, model, torch.bfloat16, GPU) is model
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


def test_the_usual_network_is_computed_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as this can be seen without a GPU: up to the question whether the kernels can be built."""
    asked: list[tuple[int, torch.dtype]] = []
    monkeypatch.setattr(resnet_evaluation, "kernels_build", lambda *given: bool(asked.append(given)))
    for model in (network(8), network(20)[1]):
        assert fused_resnet(model, model, torch.bfloat16, GPU) is model
    assert asked == [(0, torch.bfloat16)] * 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_logits_are_float32(precision: Precision) -> None:
    """In 16 bits equal logits are frequent, and the lower class would get these votes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 10))
    evaluated = at_precision(model, precision, CPU, (3, 4, 4))
    images = torch.rand(200, 3, 4, 4)
    dtype = next(evaluated.parameters()).dtype
    with torch.no_grad():
        logits, expected = evaluated(images.to(dtype)), model(images)
    assert logits.dtype == torch.float32
    assert len(logits.unique()) > 0.99 * logits.numel()
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)


def test_a_linear_layer_that_does_not_give_the_logits_keeps_its_precision() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 10), nn.LogSoftmax(1))
    evaluated = at_precision(model, "bf16", CPU, (3, 4, 4))
    assert evaluated(torch.rand(2, 3, 4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
