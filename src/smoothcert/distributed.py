"""The processes that torchrun starts, their devices, and what they exchange; a single process starts nothing."""

import itertools
import json
import os
import secrets
import time
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
TRAINING_SECONDS, CERTIFICATION_SECONDS = 3600, 7 * 24 * 3600
"""How long a process waits for the others during the work; SMOOTHCERT_WAIT_SECONDS overrides both. Processes that train
exchange gradients at every step. Those that certify wait only at the end, for the slowest of them."""
CONNECT_SECONDS = 120
"""How long a process waits for the others to start; SMOOTHCERT_CONNECT_SECONDS overrides it."""
POLL_SECONDS = 0.05
_TOKEN = secrets.token_hex(8)
"""Identifies this process among those that torchrun starts one after the other with the same rank."""
_stores: list[Any] = []
"""The store that connects the processes, once they have met. It lives as long as this process, which may serve it."""
_failed_groups: list[Any] = []
"""Process groups in which an error was raised. Its traceback may hold a DistributedDataParallel, whose reducer must not
be the last to release the group (see `RunInProgress.leave_group`)."""
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
        deadline = time.monotonic() + seconds
        try:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
            prefix = _common_prefix(store, rank, size, deadline)
        except RuntimeError as error:
            reason = error_line(error, 120)
            raise WorkError(
                f"process {rank} waited {seconds} s at most for the other {size - 1} of {size} processes, which did "
                f"not start; start them by torchrun, or set SMOOTHCERT_CONNECT_SECONDS to wait longer ({reason})"
            ) from error
        _stores.append(dist.PrefixStore(prefix, store))  # type: ignore[attr-defined]
    return size


def _common_prefix(store: Any, rank: int, size: int, deadline: float) -> str:
    """Wait until the other processes have called this; return a prefix for keys that no earlier processes have used.

    The store of torchrun outlives the processes. After a restart it holds the keys of the killed processes, and two
    machines may count restarts differently. Each process therefore publishes its token. The first process publishes the
    list of tokens until every other process has found its own token in it.
    """
    store.set(f"smoothcert/started/{rank}", _TOKEN)
    others = range(1, size)
    while True:
        if rank == 0:
            tokens = [_TOKEN, *(_read(store, f"smoothcert/started/{other}", deadline) for other in others)]
            store.set("smoothcert/tokens", json.dumps(tokens))
            if store.check([f"smoothcert/{_TOKEN}/{other}" for other in others]):
                store.set(f"smoothcert/{_TOKEN}/complete", "")
                return f"smoothcert/{_TOKEN}"
        else:
            tokens = json.loads(_read(store, "smoothcert/tokens", deadline))
            if len(tokens) == size and tokens[rank] == _TOKEN:
                store.set(f"smoothcert/{tokens[0]}/{rank}", "")
                if store.check([f"smoothcert/{tokens[0]}/complete"]):
                    return f"smoothcert/{tokens[0]}"
        if time.monotonic() > deadline:
            raise RuntimeError("some have not answered")
        time.sleep(POLL_SECONDS)


def _read(store: Any, key: str, deadline: float) -> str:
    """Return the value of `key`, once there is one; raise a RuntimeError if there is none at the `deadline`."""
    store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    value: bytes = store.get(key)
    return value.decode()


@contextmanager
def team(device: torch.device = torch.device("cpu"), seconds: int = CERTIFICATION_SECONDS) -> Iterator[Team]:
    """The processes that torchrun has started with this one, connected as long as the context lasts.

    They exchange tensors on the CPU by gloo, and those on `device`, if it is a GPU that no other process uses, by NCCL.
    A process group that the caller has initialized is used and kept. Raises WorkError if another process ends, or does
    not answer within `seconds`.
    """
    size = meet()
    if size == 1:
        yield Team()
    elif dist.is_initialized():
        try:
            yield Team(dist.get_rank(), dist.get_world_size())
        except BaseException:
            _failed_groups.append(dist.group.WORLD)
            raise
    else:
        # NCCL refuses two processes on one GPU; gloo takes longer, but works.
        rank = environment_number("RANK", 0)
        on_this_machine = environment_number("LOCAL_WORLD_SIZE", size, 1)
        gpu_each = device.type == "cuda" and on_this_machine <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if gpu_each else "gloo"
        seconds = environment_number("SMOOTHCERT_WAIT_SECONDS", seconds, 1)
        store = dist.PrefixStore(f"group{next(_groups)}", _stores[0])  # type: ignore[attr-defined]
        patience = timedelta(seconds=seconds)
        store.set_timeout(patience)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
            yield Team(rank, size)
        except BaseException as error:
            _failed_groups.append(dist.group.WORLD)
            if not isinstance(error, RuntimeError) or not _is_lost_connection(error):
                raise
            raise WorkError(
                f"process {rank} lost another of the {size} processes: it ended, or did not answer within {seconds} s; "
                "finished work is kept: see the messages of the other processes, and start the job again, or set "
                f"SMOOTHCERT_WAIT_SECONDS to wait longer ({error_line(error, 120)})"
            ) from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _is_lost_connection(error: RuntimeError) -> bool:
    """Say whether `error` comes from the exchange of messages; gloo raises plain RuntimeErrors that name its files."""
    return isinstance(error, dist.DistError) or ("gloo/" in str(error) and not isinstance(error, WorkError))


@contextmanager
def enough_memory(otherwise: RequestError | WorkError) -> Iterator[None]:
    """Raise `otherwise` if memory runs out, on a GPU or on the host, where torch reports it as a RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            raise otherwise from error
        raise


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a GPU or on the host."""
    signs = ("allocate memory", "Storage size calculation overflowed", "not enough memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def find_device(name: str | torch.device) -> torch.device:
    """Return the device of this process for `name` (auto, cpu, cuda or mps); one that torch does not see is refused."""
    if isinstance(name, torch.device):
        return name
    if name not in ("auto", "cpu", "cuda", "mps"):
        number = str(name).removeprefix("cuda:")
        advice = f"; choose a GPU by CUDA_VISIBLE_DEVICES={number}" if number.isdecimal() else ""
        raise RequestError(f"device: expected auto, cpu, cuda or mps, got {name}{advice}")
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise RequestError("device: mps was asked for, but torch sees no Apple GPU; use cpu")
        return torch.device("mps")
    if name == "cuda" and not torch.cuda.is_available():
        raise RequestError("device: cuda was asked for, but torch sees no GPU; use cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", environment_number("LOCAL_RANK", 0) % torch.cuda.device_count())
