"""Accuracy with and without noise: which classifiers are reported as poor, and that good ones are not."""

import pytest
import torch
from torch import Tensor, nn

from smoothcert.noise import Gaussian
from smoothcert.smoothing.accuracy import NoiseAccuracy, accuracy_under_noise
from smoothcert.smoothing.votes import VoteCounter


def bright(images: Tensor) -> Tensor:
    """Class 1 where the mean is above one half."""
    score = images.flatten(1).mean(1) - 0.5
    return torch.stack([-score, score], 1)


def checkerboard(images: Tensor) -> Tensor:
    """Right on clean images; under noise the sign of a tiny difference decides."""
    score = images[:, 0, 0, 0] - 0.5
    return torch.stack([-score, score], 1)


def measured(classifier, labels: Tensor, sigma: float = 0.25, classes: int = 2, side: int = 8) -> NoiseAccuracy:
    images = torch.full((len(labels), 1, side, side), 0.5)
    images += (labels.float().view(-1, 1, 1, 1) - 0.5) * 0.2
    return accuracy_under_noise(VoteCounter(classifier, Gaussian(sigma), classes, 7), images, labels)


BALANCED = torch.arange(100) % 2


def test_a_good_classifier_has_no_fault() -> None:
    found = measured(bright, BALANCED)
    assert (found.clean, found.fault) == (1.0, None)
    assert found.noisy > 0.9
    assert str(found).endswith("(100 images)")
    assert str(measured(bright, BALANCED[:1])).endswith("(1 image)")
    rare = (torch.arange(100) % 10 == 0).long()
    assert measured(bright, rare).fault is None, "nine in ten images are of one class"
    never = measured(lambda images: torch.tensor([[1.0, 0.0]]).expand(len(images), 2), rare)
    assert (never.clean, never.clean_chance) == pytest.approx((0.9, 0.9)), "what a constant answer reaches is chance"


def test_a_module_is_measured_in_eval_mode() -> None:
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(1.0), nn.Linear(64, 2, bias=False))
    with torch.no_grad():
        network[0].running_mean.fill_(0.5)
        network[3].weight.copy_(torch.tensor([[-1.0], [1.0]]).expand(2, 64))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = measured(network, BALANCED)
    assert found.clean == 1.0
    assert found.noisy > 0.9
    assert network.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_an_outer_autocast_does_not_change_the_precision() -> None:
    network, kinds = nn.Linear(64, 2), set()

    def classify(images: Tensor) -> Tensor:
        logits = network(images.flatten(1))
        kinds.add(logits.dtype)
        return logits

    with torch.autocast("cpu", torch.bfloat16):
        measured(classify, BALANCED)
    assert kinds == {torch.float32}


def test_a_classifier_that_fails_under_noise() -> None:
    found = measured(checkerboard, BALANCED, sigma=3.0)
    assert found.clean == 1.0
    assert found.noisy < 0.6
    assert found.fault == "noise"


def test_a_classifier_that_does_not_know_the_images() -> None:
    constant = measured(lambda images: torch.tensor([[1.0, 0.0]]).expand(len(images), 2), BALANCED)
    assert (constant.clean, constant.clean_chance, constant.fault) == (0.5, 0.5, "chance")
    swapped = measured(lambda images: -bright(images), BALANCED)
    assert swapped.fault == "chance", "labels in another order"


@pytest.mark.parametrize(
    ("accuracy", "fault"),
    [
        (NoiseAccuracy(100, 0.97, 0.1, 0.19, 0.12), "noise"),
        (NoiseAccuracy(40, 0.97, 0.1, 0.19, 0.12), "noise"),
        (NoiseAccuracy(100, 0.97, 0.1, 0.60, 0.1), "noise"),  # kept 62% of its accuracy
        (NoiseAccuracy(100, 0.45, 0.1, 0.30, 0.1), None),  # 67% of 45, which may be 75% by chance
        (NoiseAccuracy(100, 0.11, 0.1, 0.10, 0.1), "chance"),
        (NoiseAccuracy(100, 0.15, 0.1, 0.15, 0.1), "chance"),  # P(15 or more of 100 by chance) is 0.07
        (NoiseAccuracy(100, 0.16, 0.1, 0.16, 0.1), None),  # 0.04
        (NoiseAccuracy(100, 0.11, 0.1, 0.80, 0.1), None),  # trained with much noise, poor on clean images
        (NoiseAccuracy(100, 0.50, 0.1, 0.38, 0.1), None),  # as good as published runs at a large sigma
        (NoiseAccuracy(20, 0.40, 0.1, 0.30, 0.1), None),
        (NoiseAccuracy(20, 0.15, 0.1, 0.10, 0.1), None),  # neither clearly above chance nor clearly at chance
        (NoiseAccuracy(2, 0.5, 0.5, 0.4, 0.5), None),  # too few images to be sure
        (NoiseAccuracy(1, 0.0, 0.0, 0.0, 0.0), None),
    ],
)
def test_faults_by_numbers(accuracy: NoiseAccuracy, fault: str | None) -> None:
    assert accuracy.fault == fault
