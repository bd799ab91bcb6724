"""The run folder: weights + recipe + provenance, and the state that a run resumes from.

`model.safetensors` carries the weights and, in its metadata, the recipe and provenance: a run loads without flags.
`state.pt` carries what training needs to continue, and what the model's file is made from: it is written first. Both
are replaced atomically; neither can run code when loaded.
"""

import hashlib
import io
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from smoothcert import __version__
from smoothcert.data import Images, Normalization
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import check_regular_file, replaced_atomically
from smoothcert.io.text import error_line
from smoothcert.models import build_model, is_code
from smoothcert.training.recipe import ImportRecipe, TrainRecipe, parse_recipe, stored_fields
from smoothcert.training.run_folder import MODEL as MODEL
from smoothcert.training.run_folder import RECIPE as RECIPE
from smoothcert.training.run_folder import STATE as STATE
from smoothcert.training.run_folder import check_run_folder

MOST = 100_000
"""The largest side of an image and number of classes that a file may ask memory for."""


@dataclass(frozen=True)
class InputSpec:
    """What a model takes and gives: image shape (c, h, w), number of classes, normalisation (inside the model)."""

    shape: tuple[int, int, int]
    num_classes: int
    normalization: Normalization | None = None
    class_names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, data: Images) -> "InputSpec":
        return cls(data.shape, data.num_classes, data.normalization, data.class_names)

    @classmethod
    def from_mapping(cls, stored: Mapping[str, Any]) -> "InputSpec":
        """From what `asdict` gives; a ValueError, TypeError or KeyError for anything else."""
        channels, height, width = stored["shape"]
        num_classes, layer = stored["num_classes"], stored["normalization"]
        names = stored.get("class_names")  # runs of earlier versions have none
        if not all(type(size) is int and 0 < size <= MOST for size in (channels, height, width, num_classes)):
            raise ValueError(f"expected sizes of 1 to {MOST}, got {stored['shape']} and {num_classes}")
        numbers = [tuple(map(float, layer[part])) for part in ("mean", "std")] if layer else []
        if any(len(part) != channels or not all(map(math.isfinite, part)) for part in numbers):
            raise ValueError(f"expected a mean and a standard deviation for each of {channels} channels")
        if names and len(names) != num_classes:
            raise ValueError(f"expected {num_classes} class names, got {len(names)}")
        normalization = Normalization(*numbers) if layer else None
        return cls((channels, height, width), num_classes, normalization, tuple(map(str, names)) if names else None)


@dataclass(frozen=True)
class Run:
    """A trained (or partly trained) model and where it comes from."""

    folder: Path
    recipe: TrainRecipe | ImportRecipe
    spec: InputSpec
    model: nn.Module
    epoch: int
    """Epochs that have been trained."""
    provenance: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        return self.epoch >= self.recipe.epochs

    def about(self) -> dict[str, Any]:
        """Which model this is and how it was trained, for the files of its results."""
        return {
            "model": self.recipe.model,
            "objective": self.recipe.method,
            "training_sigma": self.recipe.sigma,
            "weights_sha256": tensors_digest(self.model.state_dict()),
        }

    def refuse_other_images(self, data: Images) -> None:
        """A RequestError where `data` has another shape or number of classes than the model was made for."""
        if (data.shape, data.num_classes) != (self.spec.shape, self.spec.num_classes):
            fewer = data.shape == self.spec.shape and data.num_classes < self.spec.num_classes
            raise RequestError(
                f"{self.folder}: its model takes images {self.spec.shape} of {self.spec.num_classes} classes, "
                f"{data.name} has {data.shape} of {data.num_classes}; give the data that it was trained for"
                + (", or name the classes of all outputs with certify --classes FILE" if fewer else "")
            )


@cache
def source_commit(root: Path = Path(__file__).parents[2]) -> dict[str, str]:
    """{"commit": ...} where the package is a git checkout's, marked if it has changes; {} where that is not known."""
    if not (root / ".git").exists():
        return {}
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # Variables that git sets for its hooks would lead to another repository.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=clean).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": said} if said else {}


def versions(device: torch.device) -> dict[str, str]:
    """What a result was computed with."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    packages = {
        "smoothcert": __version__,
        **source_commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
    return {**packages, "python": platform.python_version(), "device": f"{device.type} ({hardware})"}


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, in order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def new_model(recipe: TrainRecipe | ImportRecipe, spec: InputSpec) -> nn.Module:
    """The recipe's network, initialised by the global torch generator."""
    normalization = spec.normalization
    mean, std = (normalization.mean, normalization.std) if normalization else (None, None)
    return build_model(recipe.model, spec.shape, spec.num_classes, mean, std)


def save_model(
    folder: Path,
    model: nn.Module,
    recipe: TrainRecipe | ImportRecipe,
    spec: InputSpec,
    epoch: int,
    provenance: Mapping[str, Any],
) -> None:
    """Write `model.safetensors`; a full disk is a WorkError and leaves the file as it was."""
    about = {
        "recipe": recipe.to_mapping(),
        "input": asdict(spec),
        "epoch": epoch,
        "provenance": dict(provenance),
    }
    # Copies, because safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    content = safetensors_bytes(tensors, metadata={"smoothcert": json.dumps(about)})
    with replaced_atomically(folder / MODEL) as temporary:
        temporary.write_bytes(content)


@dataclass(frozen=True)
class ModelFile:
    """What the metadata of a `model.safetensors` say."""

    recipe: TrainRecipe | ImportRecipe
    spec: InputSpec
    epoch: int
    provenance: Mapping[str, Any]


def read_model_file(path: Path) -> ModelFile:
    """The metadata of the model's file `path`, whose weights are not read; a WorkError where it is damaged."""
    check_regular_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["smoothcert"])
        recipe: TrainRecipe | ImportRecipe
        if "objective" in about["recipe"]:
            recipe = parse_recipe(TrainRecipe, stored_fields(about["recipe"]), str(path))
        else:
            recipe = parse_recipe(ImportRecipe, about["recipe"], str(path))
        spec, epoch, provenance = InputSpec.from_mapping(about["input"]), about["epoch"], about["provenance"]
        most = recipe.epochs if isinstance(recipe, TrainRecipe) else math.inf
        if type(epoch) is not int or not 0 <= epoch <= most or not isinstance(provenance, dict):
            raise ValueError(f"epoch {epoch!r}, provenance {type(provenance).__name__}")
    except RequestError as error:
        raise WorkError(f"{error}; the file is damaged: restore it, or train again into another folder") from error
    except DAMAGE as error:
        raise _damaged_model(path, error) from error
    return ModelFile(recipe, spec, epoch, provenance)


def recipe_of_model(path: Path) -> TrainRecipe:
    """The recipe in the metadata of a `model.safetensors`."""
    recipe = read_model_file(path).recipe
    if not isinstance(recipe, TrainRecipe):
        raise RequestError(f"{path}: expected a model that was trained here, got an imported one; give another file")
    return recipe


DAMAGE = (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError, OSError)
"""What reading a damaged file may raise; a RecursionError is a RuntimeError."""


def _damaged_model(path: Path, error: Exception) -> WorkError:
    return WorkError(
        f"{path}: damaged or not a smoothcert model ({type(error).__name__}: {error_line(error)}); "
        "it is left as it is: restore it, or train again into another folder"
    )


def refuse_code(source: Path, model: str, code: str | None) -> None:
    """A RequestError where `model`, as the file `source` names it, is a user's code that `code` does not name.

    Opening a folder or a recipe must not be enough to have its author choose what is imported.
    """
    if is_code(model) and model != code:
        raise RequestError(f"{source}: its network is the code {model}; allow it with --model {model}")
    if code not in (None, model):
        raise RequestError(f"{source}: its network is {model}, got --model {code}; leave --model out")


def load_run(folder: Path, code: str | None = None, *, model: nn.Module | None = None) -> Run:
    """The run in `folder`, its model on the CPU in eval mode; the weights are loaded into `model` if one is given.

    A run whose network is a user's own code is loaded only if `code` names it (see `refuse_code`).
    """
    check_run_folder(folder)
    path = folder / MODEL
    file = read_model_file(path)
    if model is None:
        refuse_code(folder, file.recipe.model, code)
    try:
        model = new_model(file.recipe, file.spec) if model is None else model
        with safe_open(path, framework="pt") as opened:
            model.load_state_dict({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    except RequestError:
        raise
    except DAMAGE as error:
        raise _damaged_model(path, error) from error
    return Run(folder, file.recipe, file.spec, model.eval(), file.epoch, file.provenance)


@dataclass(frozen=True)
class State:
    """Where training is after `epoch` epochs. Earlier versions wrote neither recipe, nor data, nor provenance."""

    epoch: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    recipe: Mapping[str, Any] | None = None
    data: str | None = None
    """The digest of the training data."""
    provenance: Mapping[str, Any] | None = None
    warm_up: int | None = None
    """Epochs of learning-rate warm-up, which a dead start changes."""
    dead_epochs: int = 0
    """Epochs so far in which the output was constant, of those that decide whether the start is dead."""


def save_state(folder: Path, state: State) -> None:
    """Write `state.pt`: tensors, numbers and strings only. A full disk is a WorkError and leaves the file as it was."""
    content = io.BytesIO()
    # The rest as JSON: whatever kinds of strings and numbers it holds, it can be loaded again.
    fields = ("recipe", "data", "provenance", "warm_up", "dead_epochs")
    about = json.dumps({name: getattr(state, name) for name in fields})
    torch.save({"epoch": state.epoch, "model": state.model, "optimizer": state.optimizer, "about": about}, content)
    with replaced_atomically(folder / STATE) as temporary:
        temporary.write_bytes(content.getbuffer())


def load_state(folder: Path) -> State | None:
    """What `save_state` wrote, on the CPU; None where no epoch has finished. Loading cannot run code."""
    path = folder / STATE
    check_regular_file(path)
    if not path.exists():
        return None
    try:
        return _checked_state(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # on a damaged file the unpickler raises whatever it happens to meet
        # What torch says about files that it cannot read is several lines of advice.
        reason = error_line(error) if isinstance(error, ValueError) else type(error).__name__
        raise WorkError(
            f"{path}: damaged, the run cannot continue from it ({reason}); it is left as it is: restore it, or "
            "train again into another folder"
        ) from error


def _checked_state(stored: Any) -> State:
    """`stored` as a State; a ValueError where it has other types."""
    about = json.loads(stored.get("about", "{}"))
    optional: dict[str, Any] = {name: about.get(name) for name in ("recipe", "data", "provenance", "warm_up")}
    state = State(
        stored["epoch"], stored["model"], stored["optimizer"], **optional, dead_epochs=about.get("dead_epochs", 0)
    )
    if not all(type(number) is int and 0 <= number <= 100 for number in (state.warm_up or 0, state.dead_epochs)):
        raise ValueError(f"warm_up and dead_epochs: expected numbers, got {state.warm_up!r}, {state.dead_epochs!r}")
    if type(state.epoch) is not int or state.epoch < 0:
        raise ValueError(f"epoch: expected a number of epochs, got {state.epoch!r}")
    if not all(isinstance(tensor, Tensor) for tensor in state.model.values()):
        raise ValueError("model: expected tensors")
    for number, momentum in state.optimizer["state"].items():
        if not all(value is None or isinstance(value, Tensor) for value in momentum.values()):
            raise ValueError(f"optimizer: expected tensors for parameter {number}")
    if not isinstance(state.recipe, dict | None) or not isinstance(state.provenance, dict | None):
        raise ValueError("expected mappings for recipe and provenance")
    if not isinstance(state.data, str | None):
        raise ValueError("data: expected a digest")
    return state
