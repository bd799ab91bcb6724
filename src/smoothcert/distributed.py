"""The processes that torchrun starts, their devices, and what they exchange; a single process starts nothing."""

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import error_line

Value = TypeVar("Value")
PATIENCE = timedelta(days=7)
"""How long the fast processes wait for the slowest one, which may certify for days."""

CONNECT_SECONDS = 120
"""How long a process waits for the others to start; SMOOTHCERT_CONNECT_SECONDS overrides it."""
_stores: list[Any] = []
"""The store that connects the processes, once they have met. It lives as long as this process, which may serve it."""
_groups = itertools.count()
"""Numbers the process groups: one that reused the keys of an earlier group would read the addresses of that group."""


@dataclass(frozen=True, slots=True)
class Team:
    """This process is number `rank` of `size` processes, which all make the same calls in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes make this call."""
        if self.size > 1:
            dist.barrier()

    def agree(self, value: Value) -> Value:
        """Return the value of the first process, in every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the processes, in every process."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over the processes, in every process."""
        return values if self.size == 1 else self.total(values) / self.size

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite `tensors` with those of the first process, in every process."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


def environment_number(name: str, default: int, lowest: int = 0) -> int:
    """Return the whole number in an environment variable."""
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
            reason = error_line(error, 120)
            raise WorkError(
                f"process {rank} waited {seconds} s at most for the other {size - 1} of {size} processes, which did "
                f"not start; start them by torchrun, or set SMOOTHCERT_CONNECT_SECONDS to wait longer ({reason})"
            ) from error
        store.set_timeout(PATIENCE)
        _stores.append(store)
    return size


@contextmanager
def team(device: torch.device = torch.device("cpu")) -> Iterator[Team]:
    """The processes that torchrun has started with this one, connected as long as the context lasts.

    They exchange tensors on the CPU by gloo, and those on `device`, if it is a GPU that no other process uses, by NCCL.
    A process group that the caller has initialized is used and kept.
    """
    size = meet()
    if size == 1:
        yield Team()
    elif dist.is_initialized():
        yield Team(dist.get_rank(), dist.get_world_size())
    else:
        # NCCL refuses two processes on one GPU; gloo takes longer, but works.
        rank, on_this_machine = environment_number("RANK", 0), environment_number("LOCAL_WORLD_SIZE", size, 1)
        gpu_each = device.type == "cuda" and on_this_machine <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if gpu_each else "gloo"
        store = dist.PrefixStore(f"smoothcert/group{next(_groups)}", _stores[0])  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
        try:
            yield Team(rank, size)
        finally:
            dist.destroy_process_group()


def find_device(name: str) -> torch.device:
    """Return the device of this process for `name` (auto, cpu or cuda); cuda without a GPU is refused."""
    if name not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device: expected auto, cpu or cuda, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError("device: cuda was asked for, but torch sees no GPU; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", environment_number("LOCAL_RANK", 0) % torch.cuda.device_count())
