"""Several processes that share a piece of work, as torchrun starts them (one is a team of one), and their devices."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from smoothcert.errors import RequestError

Value = TypeVar("Value")
PATIENCE = timedelta(days=7)
"""How long the fast processes wait for the slowest: certifying takes as long as it takes."""


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


@contextmanager
def team() -> Iterator[Team]:
    """The team that torchrun has started this process in; connected over the CPU, since little is said."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
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
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
