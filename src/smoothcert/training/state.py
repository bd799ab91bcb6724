"""The state that a run resumes from: `state.pt`.

It is written before the model, whose file can be made from it, and replaced atomically.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smoothcert.errors import WorkError
from smoothcert.io.files import check_regular_file, replaced_atomically
from smoothcert.io.text import error_line
from smoothcert.training.run_folder import STATE


@dataclass(frozen=True)
class State:
    """Training after `epoch` epochs. Earlier versions wrote no recipe, data and provenance."""

    epoch: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    recipe: Mapping[str, Any] | None = None
    data: str | None = None
    """The digest of the training data."""
    provenance: Mapping[str, Any] | None = None
    warm_up: int | None = None
    """Epochs of learning-rate warm-up, which a dead start changes."""
    average: Mapping[str, Tensor] | None = None
    """The moving average of the weights, if the recipe has one."""
    dead_epochs: int = 0
    """Number of epochs with a constant output, among those that decide whether the start was dead."""
    sampler: Tensor | None = None
    """The weight of each image in the draws of the sampler, 0 for a discarded image; None: it draws uniformly."""


def save_state(folder: Path, state: State) -> None:
    """Write `state.pt`: tensors, numbers and strings only. On a full disk raise a WorkError and keep the old file."""
    content = io.BytesIO()
    # The rest is JSON, which can hold every kind of string and number that torch's safe loading refuses.
    fields = ("recipe", "data", "provenance", "warm_up", "dead_epochs")
    about = json.dumps({name: getattr(state, name) for name in fields})
    optional = {"average": state.average, "sampler": state.sampler}
    tensors: dict[str, Any] = {"model": state.model, "optimizer": state.optimizer}
    tensors |= {name: value for name, value in optional.items() if value is not None}
    torch.save({"epoch": state.epoch, **tensors, "about": about}, content)
    with replaced_atomically(folder / STATE) as temporary:
        temporary.write_bytes(content.getbuffer())


def load_state(folder: Path) -> State | None:
    """Read the state onto the CPU; None if no epoch has finished. Loading cannot run code."""
    path = folder / STATE
    check_regular_file(path)
    if not path.exists():
        return None
    try:
        return _checked_state(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file can make the unpickler raise any exception
        # The messages of torch about such files are several lines of advice.
        reason = error_line(error) if isinstance(error, ValueError) else type(error).__name__
        raise WorkError(
            f"{path}: damaged, the run cannot continue from it ({reason}); it is left as it is: restore it, or "
            "train again into another folder"
        ) from error


def _checked_state(stored: Any) -> State:
    """`stored` as a State; raises ValueError if types are wrong."""
    about = json.loads(stored.get("about", "{}"))
    optional: dict[str, Any] = {name: about.get(name) for name in ("recipe", "data", "provenance", "warm_up")}
    state = State(
        *(stored["epoch"], stored["model"], stored["optimizer"]),
        **optional,
        average=stored.get("average"),
        dead_epochs=about.get("dead_epochs", 0),
        sampler=stored.get("sampler"),
    )
    if not all(type(number) is int and 0 <= number <= 100 for number in (state.warm_up or 0, state.dead_epochs)):
        raise ValueError(f"warm_up and dead_epochs: expected numbers, got {state.warm_up!r}, {state.dead_epochs!r}")
    if type(state.epoch) is not int or state.epoch < 0:
        raise ValueError(f"epoch: expected a number of epochs, got {state.epoch!r}")
    if not all(isinstance(tensor, Tensor) for tensor in (*state.model.values(), *(state.average or {}).values())):
        raise ValueError("model: expected tensors")
    if not isinstance(state.sampler, Tensor | None):
        raise ValueError("sampler: expected a tensor")
    for number, momentum in state.optimizer["state"].items():
        if not all(value is None or isinstance(value, Tensor) for value in momentum.values()):
            raise ValueError(f"optimizer: expected tensors for parameter {number}")
    if not isinstance(state.recipe, dict | None) or not isinstance(state.provenance, dict | None):
        raise ValueError("expected mappings for recipe and provenance")
    if not isinstance(state.data, str | None):
        raise ValueError("data: expected a digest")
    return state
