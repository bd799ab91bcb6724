"""Losses under torch.compile give the same numbers, and the steps of an attack are compiled once."""

import copy

import pytest
import torch
from tiny import tiny_recipe
from torch import Tensor, fx

from smoothcert.models import LeNet
from smoothcert.models.ensemble import Ensemble
from smoothcert.objectives import (
    Adversary,
    Consistency,
    Distillation,
    Gaussian,
    NoiseAttack,
    Objective,
    Progress,
    SmoothAdv,
    SmoothMix,
)
from smoothcert.training.frozen_classifier import Teacher
from smoothcert.training.step import StepLoss


@pytest.mark.parametrize(
    ("objective", "graphs", "calls"),
    [
        (Consistency(num_noise=2), 1, 1),
        (SmoothMix(num_noise=2, steps=3), 2, 4),
        (SmoothAdv(num_noise=2, adversary=Adversary(steps=3)), 2, 4),
        (Gaussian(num_noise=2, noise_attack=NoiseAttack(steps=3)), 3, 5),
        (Distillation(num_noise=2), 1, 1),
    ],
    ids=["consistency", "smoothmix", "smoothadv", "noise attack", "distillation"],
)
def test_compiled_losses_equal_plain_ones(objective: Objective, graphs: int, calls: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    images, labels, noise = torch.rand(4, 1, 28, 28), torch.randint(10, (4,)), 0.5 * torch.randn(2, 4, 1, 28, 28)
    teacher = Teacher(Ensemble([LeNet(10), LeNet(10)]), tiny_recipe(), torch.device("cpu"), (1, 28, 28))
    progress = Progress(0.5, torch.ones(()), torch.ones(()), torch.rand(4), teacher=teacher)
    plain = StepLoss(LeNet(10).train(), objective)
    compiled = copy.deepcopy(plain)
    counts = {"graphs": 0, "calls": 0}

    def backend(graph: fx.GraphModule, examples: list[Tensor]):
        counts["graphs"] += 1

        def call(*inputs: Tensor):
            counts["calls"] += 1
            return graph.forward(*inputs)

        return call

    compiled.loss = torch.compile(objective.loss, dynamic=False, backend=backend)
    for step in (plain, compiled):
        terms = step(images, labels, noise, progress)
        terms.loss.backward()
    assert counts == {"graphs": graphs, "calls": calls}
    for expected, parameter in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(expected.grad, parameter.grad, rtol=1e-4, atol=1e-7)
    assert all(module.training for module in compiled.modules())


def test_runs_with_other_sigma_and_attack_steps_share_compiled_code() -> None:
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, examples: list[Tensor]):
        graphs.append(graph)
        return graph.forward

    for sigma, steps in ((0.25, 2), (1.0, 3)):
        objective = SmoothMix(num_noise=2, steps=steps, one_step=True)
        step = StepLoss(LeNet(10).train(), objective)
        step.loss = torch.compile(objective.loss, dynamic=False, backend=backend)
        progress = Progress(sigma, torch.ones(()), torch.ones(()), torch.rand(4))
        step(torch.rand(4, 1, 28, 28), torch.randint(10, (4,)), torch.randn(2, 4, 1, 28, 28), progress)
    assert len(graphs) == 2, "the step of the attack and the rest, once each"
