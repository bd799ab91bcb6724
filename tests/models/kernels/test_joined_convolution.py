"""Layers of a traced network joined to one call: the same numbers, fewer layers."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from smoothcert.models import CifarResNet, build_model
from smoothcert.models.kernels import apply_to, has_kernels
from smoothcert.models.kernels.joined_convolution import JoinedConvolution, join_convolutions, joined_convolution
from smoothcert.models.precision import fold_batch_norm


@pytest.mark.parametrize("name", ["resnet20", "densenet40"])
def test_a_network_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    network = build_model(name, (3, 32, 32), 10).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    images = torch.rand(3, 3, 32, 32)
    joined = fold_batch_norm(network)
    with torch.no_grad():
        torch.testing.assert_close(joined(images), network(images), rtol=1e-4, atol=1e-4)
    found = sum(isinstance(module, JoinedConvolution) for module in joined.modules())
    # Of three stages of three blocks of two convolutions, the first of two stages halves the image.
    assert found == (16 if name == "resnet20" else 0)


class Others(nn.Module):
    """What must stay as it is: a convolution that is needed twice, and sums of other things."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(torch.relu(y) + y)
        return torch.relu(torch.add(z, y, alpha=2)) + torch.relu(x + 1)


def test_what_is_needed_elsewhere_is_left_alone() -> None:
    network, images = Others(), torch.randn(2, 16, 4, 4)
    joined = join_convolutions(symbolic_trace(network))
    assert not any(isinstance(module, JoinedConvolution) for module in joined.modules())
    torch.testing.assert_close(joined(images), network(images))


def test_gradients_reach_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch, where kernels would be used otherwise: they have no gradients."""
    monkeypatch.setattr("smoothcert.models.kernels.joined_convolution.kernel_dtype", lambda x: torch.float16)
    torch.manual_seed(0)
    network = build_model("resnet20", (3, 32, 32), 10).eval().double()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    found, expected = (
        torch.autograd.grad(model(images).square().sum(), images)[0] for model in (fold_batch_norm(network), network)
    )
    torch.testing.assert_close(found, expected)


class Namesakes(nn.Module):
    """Names that one could take for each other, and a sum with what is repeated along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1))
        self.block_0 = nn.Conv2d(16, 16, 3, padding=1)
        self.always = nn.Parameter(torch.randn(1, 16, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.block_0(torch.relu(self.block(x))) + self.always)


def test_names_and_shapes_that_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    network, images = Namesakes(), torch.randn(3, 16, 4, 4)
    joined = join_convolutions(symbolic_trace(network))
    assert sum(isinstance(module, JoinedConvolution) for module in joined.modules()) == 2
    with torch.no_grad():
        torch.testing.assert_close(joined(images), network(images))
        # A kernel would read beyond the end of what is added.
        monkeypatch.setattr("smoothcert.models.kernels.joined_convolution.kernel_dtype", lambda x: torch.float16)
        convolution = network.block_0
        torch.testing.assert_close(
            joined_convolution(images, convolution, network.always), torch.relu(convolution(images) + network.always)
        )


def test_other_convolutions_are_left_to_torch() -> None:
    others = [
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.Conv2d(16, 16, 3, 2, padding=1, bias=False),
        nn.Conv2d(16, 16, 1, bias=False),
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.Conv2d(48, 48, 3, padding=1, bias=False),
        nn.Linear(16, 16),
    ]
    assert not any(map(has_kernels, others))


def layers(number: int) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    return [(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)) for _ in range(number)]


def test_where_kernels_give_all_that_is_asked() -> None:
    images = torch.rand(2, 16, 4, 4)
    assert apply_to(layers(2), images), "all gradients, in training"
    frozen = layers(2)
    frozen[0][1].eval()
    assert not apply_to(frozen, images), "one norm by running statistics, the other not"
    frozen[1][1].eval()
    assert not apply_to(frozen, images.clone().requires_grad_()), "parameters that want gradients"
    for module in (module for layer in frozen for module in layer):
        module.requires_grad_(False)
    assert not apply_to(frozen, images), "without gradients a network is folded"
    assert apply_to(frozen, images.clone().requires_grad_()), "an attack"
    assert not apply_to(layers(2), torch.rand(1, 16, 1, 1)), "one number has no variance"
    for change in ({"eps": 0.1}, {"momentum": 0.2}, {"momentum": None}):
        other = layers(2)
        for name, value in change.items():
            setattr(other[1][1], name, value)
        assert not apply_to(other, images)
    biased = [(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))]
    assert not apply_to(biased, images)
    hooked = layers(1)
    hooked[0][0].register_forward_hook(lambda *_: None)
    assert not apply_to(hooked, images)


def test_a_stage_with_something_else_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are not ours, or are listened to, are called one by one."""
    monkeypatch.setattr("smoothcert.models.resnet_cifar.kernel_dtype", lambda x: torch.float16)
    monkeypatch.setattr("smoothcert.models.resnet_cifar.apply_to", lambda *_: pytest.fail("kernels asked for"))
    network, called = CifarResNet(20, 10), []
    for stage in (network.layer1, network.layer2):
        stage[1] = nn.Sequential(stage[1], nn.Identity())
    network.layer3[2].register_forward_hook(lambda *_: called.append(True))
    network(torch.rand(2, 3, 32, 32))
    assert called
