"""Runs a function in several processes that work together, with the variables that torchrun would set."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

# Processes are copies of one that has imported these: otherwise each of them would spend its time on imports.
CONTEXT = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
CONTEXT.set_forkserver_preload(["pytest", "scipy.stats", "torch._dynamo", "smoothcert.cli", "smoothcert.training.loop"])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def run_together(function: Callable[..., Any], *arguments: object, count: int = 2) -> list[Any]:
    """What `function` returns in each of `count` processes; it must be at the top of its module."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with ProcessPoolExecutor(count, CONTEXT) as pool:
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        done = [pool.submit(_call, dict(os.environ) | shared | rank, function, arguments) for rank in ranks]
        return [each.result(timeout=240) for each in done]


def _call(environment: dict[str, str], function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
    os.environ.update(environment)
    torch.set_num_threads(1)
    return function(*arguments)
