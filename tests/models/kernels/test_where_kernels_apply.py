"""Which layers the kernels are used for; this is decided without a GPU."""

import pytest
import torch
from torch import nn

from smoothcert.models import CifarResNet
from smoothcert.models.kernels import apply_to, has_kernels


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
