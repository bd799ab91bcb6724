"""Runs one command in this process under a time and a memory limit, and says what is wrong with the outcome."""

import contextlib
import csv
import io
import json
import os
import pickle
import select
import signal
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open

import smoothcert
from smoothcert import cli
from smoothcert.certification.attack_file import read_attacks
from smoothcert.certification.certificates import read_certificates

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

SECONDS = 20.0
"""No command of these tests works for longer than a second or so, on a busy machine too."""
MEMORY = 1 << 30
"""Bytes that a command may take on top of what the process has."""
GRACE = 2.0
"""Seconds after which a process that an alarm did not stop is killed."""
TOO_LONG = "takes too long"
PACKAGE = str(Path(smoothcert.__file__).parent)


class TooLong(BaseException):
    """Not an Exception: no handler in a command may take it for a failure of its own."""


@dataclass(frozen=True)
class Outcome:
    """What a command did: its exit code, or the signature of what escaped (and the whole traceback)."""

    code: object
    out: str
    err: str
    escaped: str = ""
    trace: str = ""


def call(arguments: Sequence[str], seconds: float = SECONDS) -> Outcome:
    """`smoothcert` with these arguments, its streams as strict about characters as real ones."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    code: object = None
    escaped = trace = ""
    stopped: list[bool] = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", ["smoothcert", *arguments])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        try:
            with limited(seconds) as stopped:
                cli.main()
        except SystemExit as end:
            code = 0 if end.code is None else end.code
        except BaseException as error:
            escaped, trace = signature(error), traceback.format_exc()
        if stopped:  # whatever a library made of the exception that was raised inside it
            escaped = TOO_LONG
    return Outcome(code, _text(out), _text(err), escaped, trace)


def call_apart(arguments: Sequence[str], seconds: float = SECONDS) -> Outcome:
    """`call` in a process of its own where the system can fork: for work that no signal interrupts, and crashes."""
    if not hasattr(os, "fork"):
        return call(arguments, seconds)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads of this process, which the other one does not use
        child = os.fork()
    if child == 0:
        try:
            os.write(writing, pickle.dumps(call(arguments, seconds)))
        finally:
            os._exit(0)
    os.close(writing)
    pieces = []
    while select.select([reading], [], [], seconds + GRACE)[0] and (piece := os.read(reading, 1 << 16)):
        pieces.append(piece)
    ended, status = os.waitpid(child, os.WNOHANG) if pieces else (0, 0)
    if not pieces:
        os.kill(child, signal.SIGKILL)
    if not ended:
        _, status = os.waitpid(child, 0)
    os.close(reading)
    if pieces:
        outcome: Outcome = pickle.loads(b"".join(pieces))
        return outcome
    crashed = os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL
    return Outcome(None, "", "", f"crashes by signal {os.WTERMSIG(status)}" if crashed else TOO_LONG)


def _text(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8", "replace")


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[list[bool]]:
    """Raise TooLong after `seconds`, and MemoryError (or torch's error) beyond MEMORY, where the system can.

    The list that it yields is empty unless the time ran out.
    """
    stopped: list[bool] = []

    def stop(*_: object) -> NoReturn:
        stopped.append(True)
        raise TooLong

    alarm = hasattr(signal, "setitimer")
    before = signal.signal(signal.SIGALRM, stop) if alarm else None
    statm = Path("/proc/self/statm")
    limits = resource.getrlimit(resource.RLIMIT_AS) if resource is not None and statm.exists() else None
    try:
        if limits is not None:
            size = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (size, limits[1]))
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        yield stopped
    finally:
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, limits)


def signature(error: BaseException) -> str:
    """Kind of the error and the innermost function of the package that it passed through."""
    inside = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]
    last = next((frame for frame in reversed(inside) if not frame.filename.endswith("cli/__init__.py")), None)
    where = f"{last.filename.removeprefix(PACKAGE + os.sep)}:{last.name}" if last is not None else "the parser"
    return f"{type(error).__name__} in {where}"


Snapshot = dict[str, bytes | str]


def snapshot(folder: Path) -> Snapshot:
    """The files below `folder`: their content, or for large ones what shows that they were written."""
    found: Snapshot = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() or not path.is_file():
            found[name] = "folder" if path.is_dir() else "special"
        elif (state := path.stat()).st_size > 100_000:
            found[name] = f"{state.st_size} {state.st_mtime_ns} {state.st_ino}"
        else:
            found[name] = path.read_bytes()
    return found


def problems(outcome: Outcome, before: Snapshot, folder: Path, *, damaged: Sequence[str], may_write: bool) -> list[str]:
    """What every command keeps, whatever it is given. `may_write`: failed work may leave files, but no damage."""
    if outcome.escaped:
        return [outcome.escaped]
    found: list[str] = []
    if outcome.code not in (0, 1, 2):
        found.append(f"exit code {outcome.code}")
    after = snapshot(folder)
    changed = [name for name in after if name not in before or after[name] != before[name]]
    changed = [name for name in changed if not (name.endswith(".lock") or after[name] == "folder")]
    if some := [name for name in after if name.endswith(".tmp") and name not in before]:
        found.append(f"leaves temporary files ({Path(some[0]).suffixes[-2:]})")
    if control := control_characters(outcome.out):
        found.append(f"control characters in the output ({control})")
    if outcome.code == 0:
        found += [problem for name in changed if (problem := unreadable(folder / name))]
        return found
    lines = outcome.err.splitlines()
    if len(lines) != 1 or not lines[0].startswith("smoothcert: "):
        found.append("the refusal is not one line" if lines else "no line says why")
    if control := control_characters(outcome.err):
        found.append(f"control characters in the message ({control})")
    if gone := [name for name in before if name not in after]:
        found.append(f"a refusal removes {Path(gone[0]).name}")
    for name in changed:
        if name in damaged or (name in before and not may_write):
            found.append(f"a refusal changes {Path(name).name}")
        elif name not in before and not may_write:
            found.append(f"a refusal leaves a new {Path(name).suffix or 'file'} file")
    return found


def control_characters(text: str) -> str:
    """Those that a terminal may act on, by their code."""
    return " ".join(sorted({f"U+{ord(c):04X}" for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cs")}))


def unreadable(path: Path) -> str:
    """What is wrong with a file that a command has written, "" if nothing."""
    try:
        match path.suffix:
            case ".tsv":
                (read_attacks if path.parent.name == "attacks" else read_certificates)(path)
            case ".json":
                json.loads(path.read_text("utf-8"), parse_constant=_refuse)
            case ".jsonl":
                for line in path.read_text("utf-8").splitlines():
                    json.loads(line)
            case ".yaml":
                yaml.safe_load(path.read_text("utf-8"))
            case ".csv":
                with path.open(encoding="utf-8", newline="") as file:
                    cells = [cell for row in csv.reader(file) for cell in row]
                if formulas := [cell for cell in cells if cell[:1] in ("=", "+", "@", "-") and not _is_number(cell)]:
                    return f"a .csv cell that a spreadsheet computes ({formulas[0][:1]})"
            case ".html" | ".md" | ".tex" | ".svg":
                if control := control_characters(path.read_text("utf-8").replace("\r", "")):
                    return f"control characters in a {path.suffix} file ({control})"
            case ".png":
                with Image.open(path) as image:
                    image.load()
            case ".safetensors":
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        file.get_tensor(name)
            case ".pt":
                torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        return f"a written {path.suffix} file cannot be read ({type(error).__name__})"
    return ""


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
