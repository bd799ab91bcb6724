"""Runs functions in other processes: one that a test may kill, or several that work together as under torchrun."""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

# Processes are copies of one that has imported these: otherwise each of them would spend its time on imports.
CONTEXT = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
LOADED = ["pytest", "scipy.stats", "torch._dynamo", "smoothcert.cli", "smoothcert.training.loop"]
CONTEXT.set_forkserver_preload([*LOADED, "smoothcert.certification.certify_dataset"])
PATIENCE = 300
"""Seconds after which a process counts as hung: far more than a busy machine takes."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def start_process(function: Callable[..., Any], *arguments: object, **environment: object) -> BaseProcess:
    """Call `function`, which must be at the top of its module, in a new process with these environment variables."""
    variables = {name: str(value) for name, value in environment.items()}
    process = CONTEXT.Process(target=_call, args=(dict(os.environ) | variables, function, arguments))
    process.start()
    return process


def kill_when(condition: Callable[[], bool], function: Callable[..., Any], *arguments: object) -> None:
    """Start `function` in a new process, and kill the process as soon as `condition` holds."""
    victim, deadline = start_process(function, *arguments), time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        assert victim.is_alive()
        time.sleep(0.005)
    victim.kill()
    victim.join()


def print_to(path: Path) -> None:
    """Append what this process and its libraries print to the files `path`.out and `path`.err."""
    for number, suffix in ((1, ".out"), (2, ".err")):
        with path.with_suffix(suffix).open("a") as file:
            os.dup2(file.fileno(), number)


def run_together(function: Callable[..., Any], *arguments: object, count: int = 2) -> list[Any]:
    """What `function` returns in each of `count` processes; it must be at the top of its module.

    As under torchrun, the first process that fails ends the others, which may wait for it.
    """
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with ProcessPoolExecutor(count, CONTEXT) as pool:
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        tasks = [pool.submit(_call, dict(os.environ) | shared | rank, function, arguments) for rank in ranks]
        done, running = wait(tasks, PATIENCE, FIRST_EXCEPTION)
        if running:
            for process in list(pool._processes.values()):
                process.kill()  # leaving the pool would wait for them forever
    for task in done:
        task.result()
    assert not running, f"{len(running)} of {count} processes have not answered within {PATIENCE} s"
    return [task.result() for task in tasks]


def _call(environment: dict[str, str], function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # the usual one, as under torchrun; it is that of CONTEXT here
    torch.set_num_threads(1)
    return function(*arguments)
