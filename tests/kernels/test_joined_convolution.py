"""Layers of a traced network joined to one call: the same numbers, fewer layers."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from smoothcert.kernels import has_kernels
from smoothcert.kernels.joined_convolution import JoinedConvolution, join_convolutions
from smoothcert.models import build_model
from smoothcert.smoothing.precision import fold_batch_norm


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


def test_gradients_reach_the_images() -> None:
    network = build_model("resnet20", (3, 32, 32), 10).eval()
    images = torch.rand(2, 3, 32, 32, requires_grad=True)
    fold_batch_norm(network)(images).sum().backward()
    assert images.grad is not None
    assert float(images.grad.abs().max()) > 0


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
