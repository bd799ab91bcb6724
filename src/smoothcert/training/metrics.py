"""The metrics of a run: `Meter` keeps the losses of an epoch on the device, `metrics.jsonl` has one line per epoch.

Lines are appended, and cut back where a run continues. Reports read them without torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from smoothcert.errors import WorkError, write_error
from smoothcert.io.files import check_inside, write_text_atomically

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from smoothcert.distributed import Team
    from smoothcert.objectives import LossTerms

METRICS = "metrics.jsonl"
Metrics = list[dict[str, float]]
Epoch = TypeVar("Epoch")
LARGEST = 1e30
"""Training stops long before a loss of this size; figures cannot show much more."""
DIVERGED = 1e4
"""A loss above this (or not finite) stops the run; sound losses of all methods stay below 100."""


def append_metrics(path: Path, line: dict[str, Any]) -> None:
    """Add one line; it is on disk when this returns, before the state that counts on it."""
    check_inside(path, path.parent)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_error(path.parent, error) from error


def epochs_in(path: Path) -> int:
    """How many epochs the metrics hold, which must be epoch 0, 1, 2, ... in order; 0 where there is no file.

    A last line that was torn by a kill does not count; other damage is a WorkError that names the line.
    """
    numbers = read_epochs(path, lambda entry: entry["epoch"])
    for line, number in enumerate(numbers, start=1):
        if number != line - 1:
            raise WorkError(
                f"{path}, line {line}: expected epoch {line - 1}, got epoch {number}; restore the file, or train "
                "again into another folder"
            )
    return len(numbers)


def keep_metrics_before(path: Path, epoch: int) -> None:
    """Drop the lines from `epoch` on, which will be trained again: a kill may fall between metrics and state."""
    if not path.exists():
        return
    lines = read_epochs(path, lambda entry: json.dumps(entry) + "\n")
    write_text_atomically(path, "".join(lines[:epoch]))


def read_epochs(path: Path, taken_from: Callable[[Any], Epoch]) -> list[Epoch]:
    """What `taken_from` takes from each line; [] where there is no file.

    A last line that was torn by a kill is ignored, as training does when it resumes. Other damage is refused with a
    WorkError that names the line: what is not JSON, has no epoch, holds a number that is not finite or beyond 1e30,
    or makes `taken_from` raise a ValueError or fail.
    """
    if path.exists() and not path.is_file():  # reading a pipe could block forever
        raise WorkError(f"{path}: cannot be read (not a regular file); repair the file or move it")
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise WorkError(f"{path}: cannot be read ({error.strerror}); repair the file or move it") from error
    found: list[Epoch] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(taken_from(_checked(json.loads(line.decode("utf-8")))))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            # Whole lines end with a newline, so the piece after the last one is what a kill left.
            if number == len(lines):
                break
            raise WorkError(f"{path}, line {number}: damaged; repair the line or move the file") from error
    return found


def _checked(entry: Any) -> Mapping[str, Any]:
    """`entry`, if it is what training writes: an epoch, and numbers that are finite."""
    if not isinstance(entry, dict) or type(entry["epoch"]) is not int or entry["epoch"] < 0:
        raise ValueError("expected a mapping with an epoch")
    for name, value in entry.items():
        if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) <= LARGEST):
            raise ValueError(f"{name}: expected a finite number")
        if name in ("loss", "noisy_accuracy", "learning_rate", "seconds") and not isinstance(value, int | float):
            raise ValueError(f"{name}: expected a number")
    return entry


class Meter:
    """The loss, the noisy accuracy and the objective's terms of each step since `restart`, at most `steps` of them.

    All in place, in few kernels: a captured step adds to the same tensors.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        import torch

        self.names: list[str] = []
        self.values = torch.zeros((steps, 0), device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def restart(self) -> None:
        self.step.zero_()

    def add(self, terms: LossTerms, labels: Tensor) -> None:
        import torch

        accuracy = (terms.noisy_logits.argmax(-1) == labels).mean(dtype=torch.float32)
        values = torch.stack([v.detach().float() for v in (terms.loss, accuracy, *terms.terms.values())])
        if not self.names:
            self.names = ["loss", "noisy_accuracy", *terms.terms]
            self.values = self.values.new_zeros((len(self.values), len(values)))
        self.values.index_copy_(0, self.step, values.unsqueeze(0))
        self.step += 1

    def stop_if_diverged(self, epoch: int, folder: Path) -> None:
        values = self._so_far()
        bad_steps = (~(values[:, 0].abs() < DIVERGED)).nonzero().flatten().tolist()
        if not bad_steps:
            return
        step = bad_steps[0]
        terms = ", ".join(f"{n} {v:.4g}" for n, v in zip(self.names, values[step].tolist(), strict=True))
        raise WorkError(
            f"{folder}: the loss diverged in epoch {epoch}, step {step} ({terms}); the last saved epoch is kept; "
            "lower learning_rate or the weight of the largest term"
        )

    def so_far(self) -> tuple[float, float]:
        """Mean loss and noisy accuracy of this process's share."""
        loss, accuracy = self._so_far()[:, :2].mean(0).tolist()
        return loss, accuracy

    def means(self, team: Team) -> dict[str, float]:
        """Means over the epoch, and over all processes."""
        values = team.mean(self._so_far().mean(0)).tolist()
        return dict(zip(self.names, values, strict=True))

    def _so_far(self) -> Tensor:
        """Waits for the device."""
        return self.values[: int(self.step)]
