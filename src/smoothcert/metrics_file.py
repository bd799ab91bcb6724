"""metrics.jsonl, one line of JSON an epoch of training: appended, cut back where a run goes on, read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from smoothcert.errors import WorkError
from smoothcert.files import check_inside, write_text_atomically

METRICS = "metrics.jsonl"
Metrics = list[dict[str, float]]
Epoch = TypeVar("Epoch")


def append_metrics(path: Path, line: dict[str, Any]) -> None:
    check_inside(path, path.parent)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def keep_metrics_before(path: Path, epoch: int) -> None:
    """Drop lines of epochs that will be trained again: a kill may fall between the metrics and the checkpoint."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["epoch"] < epoch:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line torn by a kill
    write_text_atomically(path, "".join(kept))


def read_epochs(path: Path, taken_from: Callable[[Any], Epoch]) -> list[Epoch]:
    """What `taken_from` takes from each line; [] where there is no file.

    A last line that was torn by a kill is ignored, as training does when it resumes; other damage, which `taken_from`
    tells by a ValueError or by stumbling over it, is refused with a WorkError that names the line.
    """
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
            found.append(taken_from(json.loads(line.decode("utf-8"))))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            # Whole lines end with a newline, so the piece after the last one is what a kill left.
            if number == len(lines):
                break
            raise WorkError(f"{path}, line {number}: damaged; repair the line or move the file") from error
    return found
