"""Several processes that share a piece of work, as torchrun starts them (one is a team of one), and their devices."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from smoothcert.errors import RequestError, WorkError

Value = TypeVar("Value")
PATIENCE = timedelta(days=7)
"""How long the fast processes wait for the slowest: certifying takes as long as it takes."""

CONNECT_SECONDS = 120
"""How long a process waits for the others to start; SMOOTHCERT_CONNECT_SECONDS overrides it."""
_stores: list[object] = []
"""Through which the processes met: it must live as long as they do, since the first process may serve it."""


@dataclass(frozen=True, slots=True)
class Team:
    """Which of how many processes this one is."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            dist.barrier()

    def agree(self, value: Value) -> Value:
        """The first process's value, in all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def environment_number(name: str, default: int, lowest: int = 0) -> int:
    """The whole number in an environment variable."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and int(text) >= lowest):
        raise RequestError(f"{name}: expected a whole number >= {lowest}, got {text!r}; unset it, or start by torchrun")
    return int(text)


def meet() -> int:
    """Wait until all processes that torchrun starts have started; return how many they are (1 without torchrun).

    Raises WorkError if one of them is missing after SMOOTHCERT_CONNECT_SECONDS.
    """
    size, rank = environment_number("WORLD_SIZE", 1, 1), environment_number("RANK", 0)
    environment_number("LOCAL_RANK", 0)
    if size == 1:
        return size
    if missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise RequestError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} not set; start the processes by "
            f"`torchrun --nproc-per-node {size} -m smoothcert ...`, or unset WORLD_SIZE"
        )
    environment_number("MASTER_PORT", 0)
    if rank >= size:
        raise RequestError(f"RANK: expected a number below WORLD_SIZE = {size}, got {rank}; start by torchrun")
    if not _stores:
        from torch.distributed.rendezvous import rendezvous

        seconds = environment_number("SMOOTHCERT_CONNECT_SECONDS", CONNECT_SECONDS, 1)
        patience = timedelta(seconds=seconds)
        try:
            store, _, _ = next(rendezvous("env://", timeout=patience))
            store.set(f"smoothcert/{rank}", "started")
            store.wait([f"smoothcert/{other}" for other in range(size)], patience)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:120]
            raise WorkError(
                f"process {rank} waited {seconds} s at most for the other {size - 1} of {size} processes, in vain; "
                f"start them by torchrun, or set SMOOTHCERT_CONNECT_SECONDS to wait longer ({reason})"
            ) from error
        _stores.append(store)
    return size


@contextmanager
def team() -> Iterator[Team]:
    """The team that torchrun has started this process in; connected over the CPU, since little is said."""
    size = meet()
    if size == 1:
        yield Team()
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield Team(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


def find_device(name: str) -> torch.device:
    """The device of this process that `name` (auto, cpu or cuda) stands for; refused where there is none."""
    if name not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device: expected auto, cpu or cuda, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError("device: cuda was asked for, but torch sees no GPU; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", environment_number("LOCAL_RANK", 0) % torch.cuda.device_count())
