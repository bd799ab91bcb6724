"""metrics.jsonl, one line of JSON per epoch of training: appended, cut back where a run continues, read."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from smoothcert.errors import WorkError, write_error
from smoothcert.files import check_inside, write_text_atomically

METRICS = "metrics.jsonl"
Metrics = list[dict[str, float]]
Epoch = TypeVar("Epoch")
LARGEST = 1e30
"""Training stops long before a loss of this size; figures cannot show much more."""


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
