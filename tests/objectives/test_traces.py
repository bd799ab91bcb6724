"""Compare twenty steps of every objective with stored losses, so that a change of numbers is noticed.

After an intended change of numbers, run `python tests/objectives/test_traces.py --write` and read the diff of
`traces.json`. A small smooth network in float64 and a tolerance of 1e-4 make the traces independent of the processor.
"""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from smoothcert.objectives import (
    OBJECTIVES,
    Adversary,
    Consistency,
    Gaussian,
    Macer,
    NoiseAttack,
    Objective,
    Progress,
    SmoothAdv,
    SmoothMix,
)

TRACES = Path(__file__).with_name("traces.json")
STEPS, BATCH, CLASSES, SHAPE, SIGMA, LEARNING_RATE = 20, 12, 4, (1, 4, 4), 0.25, 0.05

# Every registered objective with its defaults, and options that select other code.
TRACED: dict[str, Objective] = {name: kind() for name, kind in OBJECTIVES.items()} | {
    "smoothadv, ddn": SmoothAdv(num_noise=2, adversary=Adversary(attack="ddn", steps=4)),
    "macer, deferred": Macer(num_noise=8, gamma=2.0, deferred=True),
    "consistency, xent": Consistency(form="xent"),
    "consistency, kl": Consistency(form="kl"),
    "consistency, mse": Consistency(form="mse"),
    "consistency, adversary": Consistency(weight=1.0, adversary=Adversary(steps=4)),
    "smoothmix, one_step": SmoothMix(num_noise=2, one_step=True, one_step_radius=0.5),
    "smoothmix, max_norm": SmoothMix(num_noise=2, max_norm=0.5),
    "gaussian, noise_attack": Gaussian(num_noise=2, noise_attack=NoiseAttack(step_size=0.3)),
}


class Small(nn.Module):
    """Two layers with tanh between them, float64, drawn from `generator`."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        pixels, hidden = math.prod(SHAPE), 10
        self.first = nn.Parameter(_normal(generator, hidden, pixels) / 4)
        self.second = nn.Parameter(_normal(generator, CLASSES, hidden) / 2)

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(images.flatten(1) @ self.first.T) @ self.second.T


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def trace(objective: Objective) -> list[float]:
    """Return the loss before each step of plain SGD on images near four prototypes.

    Each epoch has two steps, and the learning rate drops at epoch 5.
    """
    generator = torch.Generator().manual_seed(20)
    network, teacher = Small(generator), Small(torch.Generator().manual_seed(21))
    prototypes = _uniform(generator, CLASSES, *SHAPE)
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        images = (prototypes[labels] + 0.1 * _normal(generator, BATCH, *SHAPE)).clamp(0, 1)
        noise = SIGMA * _normal(generator, objective.num_noise, BATCH, *SHAPE)
        epoch = step // 2
        progress = Progress(
            SIGMA,
            torch.tensor(min(1.0, (epoch + 1) / 10), dtype=torch.float64),
            torch.tensor(float(epoch >= 5), dtype=torch.float64),
            _uniform(generator, BATCH),
            teacher=teacher,
        )
        loss = objective.loss(network, images, labels, noise, progress).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", TRACED)
def test_losses_follow_the_stored_trace(name: str) -> None:
    stored = json.loads(TRACES.read_text(encoding="utf-8"))
    assert name in stored, f"no trace of {name} yet: python tests/objectives/test_traces.py --write"
    assert trace(TRACED[name]) == pytest.approx(stored[name], rel=1e-4)


def test_every_stored_trace_is_compared() -> None:
    assert set(json.loads(TRACES.read_text(encoding="utf-8"))) == set(TRACED), (
        "the traces are not those of TRACED: python tests/objectives/test_traces.py --write"
    )


def test_losses_change_along_every_stored_trace() -> None:
    """A constant trace would compare nothing."""
    stored = json.loads(TRACES.read_text(encoding="utf-8"))
    assert all(len(losses) == STEPS for losses in stored.values())
    assert all(max(losses) > 1.05 * min(losses) for losses in stored.values())


def write() -> None:
    """Replace the stored traces, with five digits more than the tests compare."""
    traces = {name: [float(f"{loss:.9g}") for loss in trace(objective)] for name, objective in TRACED.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(losses)}" for name, losses in traces.items())
    TRACES.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compute the traces of all objectives again.")
    parser.add_argument("--write", action="store_true", required=True, help=f"replace {TRACES.name}")
    parser.parse_args()
    write()
