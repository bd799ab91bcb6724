"""The metrics of a run: `metrics.jsonl` has one line per epoch.

Lines are appended; those of epochs that are trained again are removed. Reports read the file without torch. The file
of a finished run may be compressed (`metrics.jsonl.gz`); if training continues, it becomes plain text again.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from smoothcert.errors import WorkError, write_error
from smoothcert.io.compressed import compress, compressed_form, existing_form, exists, read_content
from smoothcert.io.files import check_inside, write_text_atomically
from smoothcert.io.results import only_writer

METRICS = "metrics.jsonl"
ACCURACY = "noisy_accuracy"
MEASUREMENTS = (
    *("epoch", "learning_rate", "loss", ACCURACY, "test_noisy_accuracy", "discarded_images"),
    *("seconds", "device", "runs_at_once", "peak_memory_bytes"),
)
"""The keys of a line; all others are terms of the objective."""
Metrics = list[dict[str, float]]
Epoch = TypeVar("Epoch")
LARGEST = 1e30
"""The largest number that is read: training stops long before, and figures cannot show much more."""


def append_metrics(path: Path, line: dict[str, Any]) -> None:
    """Append one line; it is on disk when this returns, before the state that relies on it."""
    check_inside(path, path.parent)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_error(path.parent, error) from error


def epochs_in(path: Path) -> int:
    """Count the epochs of a file, which must be 0, 1, 2, ... in order; 0 without a file.

    An incomplete last line, left by a killed process, does not count; other damage is a WorkError that names the line.
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
    """Remove the lines from `epoch` on: a killed process may have written metrics without the state."""
    if not exists(path):
        return
    lines = read_epochs(path, lambda entry: json.dumps(entry) + "\n")
    write_text_atomically(path, "".join(lines[:epoch]))
    compressed_form(path).unlink(missing_ok=True)


def compress_metrics(path: Path, epochs: int) -> bool:
    """Compress the metrics of a run that has trained all its `epochs`; return whether this was done."""
    if not path.exists():
        return False
    with only_writer(path, "compress it afterwards"):
        finished = epochs_in(path) >= epochs
        if finished:
            compress(path)
    return finished


def read_epochs(path: Path, convert: Callable[[Any], Epoch]) -> list[Epoch]:
    """The result of `convert` for each line, also of the compressed form; [] without a file.

    An incomplete last line, left by a killed process, is ignored. Other damage is a WorkError that names the line: a
    line that is not JSON, has no epoch, holds a number that is not finite or beyond 1e30, or that `convert` refuses.
    """
    path = existing_form(path)
    if not path.exists():
        return []
    lines = read_content(path, "a run folder").split(b"\n")
    epochs: list[Epoch] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            epochs.append(convert(_checked(json.loads(line.decode("utf-8")))))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            # Complete lines end with a newline, so text after the last one is an incomplete line.
            if number == len(lines):
                break
            raise WorkError(f"{path}, line {number}: damaged; repair the line or move the file") from error
    return epochs


def _checked(entry: Any) -> Mapping[str, Any]:
    """`entry` if it holds an epoch and finite numbers, as training writes them."""
    if not isinstance(entry, dict) or type(entry["epoch"]) is not int or entry["epoch"] < 0:
        raise ValueError("expected a mapping with an epoch")
    for name, value in entry.items():
        if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) <= LARGEST):
            raise ValueError(f"{name}: expected a finite number")
        if name in ("loss", "noisy_accuracy", "learning_rate", "seconds") and not isinstance(value, int | float):
            raise ValueError(f"{name}: expected a number")
    return entry


def taken_name(terms: Mapping[str, object]) -> str | None:
    """What was expected of the names of terms, and the first one that a line of metrics has already; or None."""
    name = next((name for name in terms if name in MEASUREMENTS), None)
    return name and f"terms with names of their own, got {name!r}, which {METRICS} has already; rename it"
