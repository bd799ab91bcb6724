"""The state that a run resumes from: `state.pt`.

It is written before the model, whose file can be made from it, and replaced atomically.
"""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from smoothcert.errors import WorkError
from smoothcert.io.files import check_regular_file, replaced_atomically
from smoothcert.training.run_folder import STATE

TENSORS = ("epoch", "model", "average", "sampler")
"""Fields that torch saves; the optimizer is saved as in its `state_dict`, and the other fields as JSON."""


class State(BaseModel):
    """Training after `epoch` epochs; wrong types are a ValidationError."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True)

    epoch: int = Field(ge=0)
    model: dict[str, Tensor]
    optimizer: dict[int, dict[str, Tensor | None]]
    """What the optimizer remembers of each parameter; its settings are those of the recipe."""
    recipe: dict[str, Any]
    data: str
    """The digest of the training data."""
    provenance: dict[str, Any]
    warm_up: int = Field(ge=0, le=100)
    """Epochs of learning-rate warm-up, which a dead start changes."""
    dead_epochs: int = Field(ge=0, le=100)
    """Number of epochs with a constant output, among those that decide whether the start was dead."""
    average: dict[str, Tensor] | None = None
    """The moving average of the weights, if the recipe has one."""
    sampler: Tensor | None = None
    """The weight of each image in the draws of the sampler, 0 for a discarded image; None: it draws uniformly."""


def save_state(folder: Path, state: State) -> None:
    """Write `state.pt`: tensors, numbers and strings only. On a full disk raise a WorkError and keep the old file."""
    content = io.BytesIO()
    tensors = {name: value for name in TENSORS if (value := getattr(state, name)) is not None}
    # The rest is JSON, which can hold every kind of string and number that torch's safe loading refuses.
    about = json.dumps(state.model_dump(exclude={*TENSORS, "optimizer"}))
    torch.save({**tensors, "optimizer": {"state": state.optimizer}, "about": about}, content)
    with replaced_atomically(folder / STATE) as temporary:
        temporary.write_bytes(content.getbuffer())


def load_state(folder: Path) -> State | None:
    """Read the state onto the CPU; None if no epoch has finished. Loading cannot run code; a changed bit is refused."""
    path = folder / STATE
    check_regular_file(path)
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums
            if (part := archive.testzip()) is not None:
                raise ValueError(f"checksum of {part}")
        stored = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {name: stored[name] for name in TENSORS if name in stored}
        return State(**tensors, optimizer=stored["optimizer"]["state"], **json.loads(stored["about"]))
    except Exception as error:  # a damaged file can make the unpickler raise any exception
        # The messages of torch and pydantic about such files are several lines.
        wrong = error.errors()[0]["loc"] if isinstance(error, ValidationError) else ()
        reason = f"wrong {'.'.join(map(str, wrong))}" if wrong else type(error).__name__
        raise WorkError(
            f"{path}: damaged, the run cannot continue from it ({reason}); it is left as it is: restore it, or "
            "train again into another folder"
        ) from error
