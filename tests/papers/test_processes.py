"""Calls in processes: failures and kills are reported, at most `jobs` run at a time, none outlives its parent."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from smoothcert.errors import WorkError
from smoothcert.papers import processes
from smoothcert.papers.processes import LOG, call_in_processes


def print_threads() -> None:
    print(os.environ["OMP_NUM_THREADS"])


def fail(error: Exception) -> None:
    print("at epoch 3")
    raise error


def kill_itself() -> None:
    print("at epoch 4")
    os.kill(os.getpid(), signal.SIGKILL)


def print_surroundings() -> None:
    import colorsys  # the one of the standard library

    print(json.dumps([os.getcwd(), sys.path, processes.__file__, colorsys.__file__]))


def fill_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    print("at epoch 4")


def connect(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        time.sleep(60)


def call_all(calls: dict[Path, Callable[[], None]], jobs: int = 2) -> tuple[dict[Path, str], list[tuple[Path, bool]]]:
    """Return the failures, and (folder, success) in the order in which calls ended."""
    ended: list[tuple[Path, bool]] = []
    failed = call_in_processes(
        calls, jobs, {"OMP_NUM_THREADS": "3"}, lambda folder, reason, seconds: ended.append((folder, reason is None))
    )
    return failed, ended


def test_failures_are_reported_and_the_other_calls_finish(tmp_path: Path) -> None:
    """A file is in the place of the last folder: its call cannot start."""
    calls = {
        tmp_path / "known": partial(fail, WorkError("the loss\ndiverged")),
        tmp_path / "unknown": partial(fail, ValueError("a bug")),
        tmp_path / "killed": kill_itself,
        tmp_path / "good": print_threads,
        tmp_path / "file": print_threads,
    }
    (tmp_path / "file").write_text("in the way")
    failed, ended = call_all(calls)
    assert {folder.name: reason for folder, reason in failed.items() if folder.name != "file"} == {
        "known": "the loss diverged",
        "unknown": "ValueError: a bug",
        "killed": "killed by signal 9, last seen at: at epoch 4",
    }
    assert str(tmp_path / "file") in failed[tmp_path / "file"]
    assert dict(ended) == {folder: folder.name == "good" for folder in calls}
    assert (tmp_path / "good" / LOG).read_text() == "3\n"
    assert "Traceback" in (tmp_path / "unknown" / LOG).read_text()
    assert "Traceback" not in (tmp_path / "known" / LOG).read_text()


def test_a_full_disk_that_takes_not_even_the_log_is_named(tmp_path: Path) -> None:
    failed, _ = call_all({tmp_path / "run": fill_disk})
    assert re.fullmatch(
        rf"exit code \d+ and nothing in {tmp_path}/run/{LOG}; is the disk full\?", failed[tmp_path / "run"]
    )


def test_a_process_that_is_killed_while_it_starts_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = processes.start

    def start_and_kill_the_first(call: Callable[[], None], folder: Path, environment: dict[str, str]) -> BaseProcess:
        process = start(call, folder, environment)
        if folder.name == "first":
            process.kill()
        return process

    monkeypatch.setattr(processes, "start", start_and_kill_the_first)
    failed, ended = call_all({tmp_path / "first": print_threads, tmp_path / "second": print_threads}, jobs=1)
    assert failed == {tmp_path / "first": "killed by signal 9, before it printed anything"}
    assert ended == [(tmp_path / "first", False), (tmp_path / "second", True)]


def test_at_most_jobs_processes_run_and_an_interrupt_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[BaseProcess] = []
    start = processes.start

    def start_and_record(*arguments: object) -> BaseProcess:
        started.append(start(*arguments))  # type: ignore[arg-type]
        return started[-1]

    def interrupt(sentinels: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "start", start_and_record)
    monkeypatch.setattr(processes, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call_all({tmp_path / str(number): partial(time.sleep, 60) for number in range(5)})
    assert [process.exitcode for process in started] == [-signal.SIGTERM] * 2


def test_a_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """The process holds a connection to this one, which breaks when it ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        script = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_processes as t; "
            f"from functools import partial; from pathlib import Path; "
            f"t.call_all({{Path({str(tmp_path)!r}): partial(t.connect, {server.getsockname()[1]})}})"
        )
        with subprocess.Popen([sys.executable, "-c", script]) as parent:
            connection, _ = server.accept()
            parent.kill()
        with connection:
            connection.settimeout(30)
            assert connection.recv(1) == b""


def test_modules_of_the_current_folder_replace_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has the current folder and the module path of its parent."""
    monkeypatch.chdir(tmp_path)
    for module in ("smoothcert/__init__.py", "pickle.py", "signal.py", "socket.py", "json.py", "colorsys.py"):
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text("open('ran', 'w'); raise SystemExit(3)")
    assert call_all({tmp_path / "out": print_surroundings})[0] == {}
    assert not (tmp_path / "ran").exists()
    assert "PYTHONSAFEPATH" not in os.environ
    folder, path, ours, standard = json.loads((tmp_path / "out" / LOG).read_text())
    assert (folder, path, ours) == (os.getcwd(), sys.path, processes.__file__)
    assert not Path(standard).is_relative_to(tmp_path)
