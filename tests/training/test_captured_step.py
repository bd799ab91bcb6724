"""What a captured step does between its graphs, on a CPU: replaying a fake graph computes the step again.

The tests of test_loop_gpu.py compare real graphs, where there is a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_recipe

from smoothcert.data import ImageData
from smoothcert.objectives import Consistency, Gaussian, NoiseAttack, Objective
from smoothcert.training import captured_step
from smoothcert.training.loop import train
from smoothcert.training.metrics import METRICS, read_epochs


@dataclass
class FakeGraph:
    replay: Callable[[], object]


class FakeEvent:
    """A point in time; ten seconds later than any other."""

    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 10_000.0


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Capture on the CPU; "graph" for each capture, "compiled" for each compilation."""
    done: list[str] = []

    def recorded(call: Callable[[], object], generator: torch.Generator) -> FakeGraph:
        done.append("graph")
        return FakeGraph(call)

    def compiled(loss: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        done.append("compiled")
        return loss

    monkeypatch.setattr(captured_step, "_recorded", recorded)
    monkeypatch.setattr(captured_step, "is_captured", lambda run: run.options.capture is not False)
    monkeypatch.setattr(captured_step, "keep_compiled_kernels", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "compile", compiled)
    return done


LATE_ATTACK = Gaussian(num_noise=2, noise_attack=NoiseAttack(steps=2, step_size=1.0, first_epoch=4))


@pytest.mark.parametrize(
    ("objective", "compiling", "expected"),
    [
        (Consistency(), "never", ["graph"]),
        (Consistency(), "auto", ["graph", "compiled", "graph"]),
        (LATE_ATTACK, "never", ["graph", "graph"]),
        (LATE_ATTACK, "auto", ["graph", "compiled", "graph", "compiled", "graph"]),
    ],
)
def test_a_step_is_captured_again_when_its_loss_changes(
    tmp_path: Path, tiny_data: ImageData, captures: list[str], objective: Objective, compiling: str, expected: list[str]
) -> None:
    recipe = tiny_recipe(objective=objective, epochs=6, learning_rate=0.01, batch_size=8)
    data = tiny_data.subset(torch.arange(32))
    train(recipe, data, tmp_path / "captured", device="cpu", compiling=compiling)
    assert captures == expected
    train(recipe, data, tmp_path / "plain", device="cpu", capture=False)
    assert captures == expected
    captured, plain = (
        read_epochs(tmp_path / name / METRICS, lambda line: line["loss"]) for name in ("captured", "plain")
    )
    assert captured == plain
