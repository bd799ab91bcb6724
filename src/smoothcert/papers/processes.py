"""Call functions in processes, several at a time, each with a log file.

A call that fails, or whose process is killed, does not stop the others. No process outlives the one that started it.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import one_line

LOG = "reproduce.log"
Failures = dict[Path, str]
"""Folder of a run -> why it failed."""


def reason_of(error: Exception) -> str:
    """Return the message of `error` in one line, with its type if it is none of ours."""
    known = isinstance(error, RequestError | WorkError | OSError)
    return one_line(error if known else f"{type(error).__name__}: {error}")


def call_in_processes(
    calls: Mapping[Path, Callable[[], None]],
    jobs: int,
    environment: Mapping[str, str],
    on_end: Callable[[Path, str | None, float], None],
) -> Failures:
    """Call each function in a process of its own, at most `jobs` at a time, and return the calls that failed.

    `calls` maps a folder, which gets the log, to a function that can be pickled. `environment` is set before the
    function and its modules are imported. `on_end` receives the folder, the reason of a failure, and the seconds.
    """
    waiting = dict(calls)
    failed = Failures()
    running: dict[BaseProcess, tuple[Path, float]] = {}

    def end(folder: Path, started: float, reason: str | None) -> None:
        if reason is not None:
            failed[folder] = reason
        on_end(folder, reason, time.perf_counter() - started)

    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                folder = next(iter(waiting))
                started = time.perf_counter()
                try:
                    running[start(waiting.pop(folder), folder, environment)] = folder, started
                except OSError as error:  # a file is in the place of the folder
                    end(folder, started, reason_of(error))
            if running:
                wait([process.sentinel for process in running])
            for process in [process for process in running if process.exitcode is not None]:
                folder, started = running.pop(process)
                end(folder, started, failure_of(folder / LOG, process.exitcode))
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.join()
    return failed


def start(call: Callable[[], None], folder: Path, environment: Mapping[str, str]) -> BaseProcess:
    """Start a process that calls `call`, and prints to the log in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = pickle.dumps(call), folder / LOG, dict(environment)
    process = multiprocessing.get_context("spawn").Process(target=run_call, args=arguments)
    with safe_path():
        process.start()
    return process


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep processes that start here from importing modules of the current folder, which may contain anything.

    They import from where this process does: multiprocessing hands `sys.path` over.
    """
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ |= {} if before is None else {name: before}


def run_call(pickled: bytes, log: Path, environment: Mapping[str, str]) -> None:
    """Run a call in a new process: print to `log`, end with the parent, exit with code 1 after a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    os.environ |= environment
    sys.stdout = sys.stderr = log.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        pickle.loads(pickled)()  # from the parent; unpickled here, where its imports print to the log
    except Exception as error:
        if not isinstance(error, RequestError | WorkError | OSError):
            traceback.print_exc()
        print(reason_of(error))
        sys.exit(1)


def end_with_parent() -> None:
    """End this process, whatever it does, when its parent has ended. Files are never half written."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this function is called in started processes"
    parent.join()
    os._exit(1)


def failure_of(log: Path, code: int | None) -> str | None:
    """Return None for exit code 0, else the last line of `log`: the error, or the progress of a killed process.

    A process that was killed while it started has no log.
    """
    if code is None or code == 0:
        return None
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    last = lines[-1] if lines else ""
    if code > 0:
        return last or f"exit code {code} and nothing in {log}; is the disk full?"
    return f"killed by signal {-code}, " + (f"last seen at: {last}" if last else "before it printed anything")
