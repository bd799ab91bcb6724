"""Damaged files and wrong options for every command: a clear line or a correct result, never a traceback.

Each case damages one valid file (or changes options), runs one command in this process and checks that

- it ends with exit code 0, 1 or 2, in time and in bounded memory, and no exception escapes;
- a refusal is one line without control characters, changes no file and leaves none behind;
- what a successful command wrote can be read, and the target's oracle holds: no radius that its votes cannot show, no
  run called trained with epochs missing.

The seed and the number of cases are fixed and small, so results do not depend on the speed of a machine; `make fuzz`
tries other cases for ten minutes. Environment variables:

- SMOOTHCERT_FUZZ_SECONDS: work for so long instead, divided evenly among the targets;
- SMOOTHCERT_FUZZ_SEED: other cases;
- SMOOTHCERT_FUZZ_CASE: this case alone (a failure names the command that replays it).
"""

import gzip
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import typer
from fuzz_files import make_base
from fuzz_mutations import Mutator
from fuzz_runner import TOO_LONG, call, call_apart, problems, snapshot
from fuzz_targets import BASE_COMMANDS, CASE, DAMAGED, NOT_FUZZED, TARGETS, Target, command_options, option_targets

from smoothcert import cli
from smoothcert.data import mnist
from smoothcert.papers.reproduce import estimate

SEED = os.environ.get("SMOOTHCERT_FUZZ_SEED", "17")
TIME = os.environ.get("SMOOTHCERT_FUZZ_SECONDS")
ONLY = os.environ.get("SMOOTHCERT_FUZZ_CASE")
OPTIONS = list(option_targets())
ALL = [*TARGETS, *OPTIONS]
HANGS = 2
"""Number of cases without an end after which a target stops."""
ACCEPTED: set[tuple[Sequence[str], str]] = set()
"""Files and commands that `test_undamaged_files_are_accepted` has run: several targets share them."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that all cases run in, with the valid files in `base`."""
    folder = tmp_path_factory.mktemp("fuzz")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.delenv("SMOOTHCERT_DATA", raising=False)
        patch.setenv("COLUMNS", "200")
        patch.setattr(cli, "app", typer.main.get_command(cli.app))  # built once: half of the time of a short command
        patch.setattr(socket.socket, "connect", _no_network)
        # How fast the machine is does not matter, and measuring takes seconds.
        patch.setattr(estimate, "_seconds_per_trained_input", lambda *_: 1e-4)
        patch.setattr(estimate, "_seconds_per_vote", lambda *_: 1e-4)
        make_base(folder / "base")
        patch.setitem(mnist.FILES, "test", _digests_of(folder / "base" / "idx" / "MNIST" / "raw"))  # type: ignore[arg-type]
        yield folder
    torch.set_num_threads(threads)


def _no_network(*_: object) -> None:
    raise ConnectionRefusedError("no network in these tests")


def _digests_of(folder: Path) -> mnist.SplitFiles:
    """The files in `folder` in place of MNIST."""
    paths = sorted(folder.iterdir())  # images, labels
    contents = [gzip.decompress(path.read_bytes()) for path in paths]
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    images, labels = (mnist.MnistFile(path.name, "0" * 64, d) for path, d in zip(paths, digests, strict=True))
    return images, labels


def run_case(target: Target, number: int, base: Path) -> tuple[list[str], str]:
    """What is wrong in this case, and a description of it."""
    mutator = Mutator(f"{SEED}/{target.name}/{number}")
    paths = target.prepare(base, mutator)
    arguments = target.arguments(number, mutator, paths)
    before = snapshot(CASE)
    outcome = (call_apart if target.apart else call)(arguments, target.seconds)
    if outcome.escaped == TOO_LONG and target.long_work:
        return [], ""
    found = problems(
        outcome,
        before,
        CASE,
        damaged=[str(path.relative_to(CASE)) for path in paths],
        may_write=target.may_write,
    )
    if not found and outcome.code == 0 and (wrong := target.oracle(outcome, arguments)):
        found = [wrong]
    shown = [argument if len(argument) < 200 else argument[:200] + "..." for argument in arguments]
    message = (
        f"smoothcert {' '.join(map(ascii, shown))}\n{outcome.out[-300:]}{outcome.err[-500:]}{outcome.trace[-1500:]}"
    )
    return found, message


def numbers(target: Target) -> Iterator[int]:
    if ONLY is not None:
        yield int(ONLY)
    elif TIME is None:
        yield from range(target.cases)
    else:
        end, number = time.monotonic() + float(TIME) / len(ALL), 0
        while time.monotonic() < end:
            yield number
            number += 1


@pytest.mark.parametrize("target", ALL, ids=lambda target: target.name)
def test_fuzz(target: Target, work: Path) -> None:
    for command in target.warm_up:  # what it imports is then in memory for all cases
        Target("", 0, (), files=target.files).prepare(work / "base", Mutator(""))
        assert call(command.split()).code == 0, command
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for number in numbers(target):
        (work / "running.txt").write_text(f"{target.name} seed {SEED} case {number}\n")  # a crash leaves it behind
        found, message = run_case(target, number, work / "base")
        for problem in found:
            counts[problem] = counts.get(problem, 0) + 1
            if problem not in first:
                kept = work / "failures" / f"{target.name}-{SEED}-{number}"
                shutil.copytree(CASE, kept, symlinks=True, dirs_exist_ok=True)
                first[problem] = f"case {number}, its files: {kept}\n{replay(target, number)}\n{message}"
        if counts.get(TOO_LONG, 0) >= HANGS:
            break
    if counts:
        report = [
            f"\n=== {target.name}: {problem} ({times} cases)\n{first[problem]}" for problem, times in counts.items()
        ]
        pytest.fail("".join(report), pytrace=False)


def replay(target: Target, number: int) -> str:
    variables = f"SMOOTHCERT_FUZZ_SEED={SEED} SMOOTHCERT_FUZZ_CASE={number}"
    return f"replay: {variables} python -m pytest tests/fuzz -k 'test_fuzz[{target.name}]'"


def test_every_command_has_a_target() -> None:
    assert set(command_options()) == {*BASE_COMMANDS, *NOT_FUZZED}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_undamaged_files_are_accepted(target: Target, work: Path) -> None:
    """Otherwise a refusal would not be caused by the damage."""
    for command in sorted({command for command in target.commands if isinstance(command, str)}):
        if DAMAGED in command or (target.files, command) in ACCEPTED:
            continue
        ACCEPTED.add((target.files, command))
        Target("", 0, (), files=target.files).prepare(work / "base", Mutator("undamaged"))
        before = snapshot(CASE)
        outcome = call(command.split())
        assert outcome.code == 0, (command, outcome)
        assert problems(outcome, before, CASE, damaged=(), may_write=target.may_write) == [], command
        assert target.oracle(outcome, command.split()) == "", command
