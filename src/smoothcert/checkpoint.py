"""The run folder: weights + recipe + provenance, and the state that a run resumes from.

`model.safetensors` carries the weights and, in its metadata, the recipe and provenance: a run loads without flags.
`state.pt` carries what training needs to go on. Both are replaced atomically; neither can run code when loaded.
"""

import hashlib
import json
import os
import pickle
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
from safetensors.torch import save_file
from torch import Tensor, nn

from smoothcert.data import Images, Normalization
from smoothcert.errors import RequestError, WorkError
from smoothcert.files import replaced_atomically
from smoothcert.model_provenance import MODEL as MODEL
from smoothcert.models import build_model, is_code
from smoothcert.recipe import ImportRecipe, TrainRecipe, parse_recipe
from smoothcert.version import __version__

RECIPE, STATE = "recipe.yaml", "state.pt"


@dataclass(frozen=True)
class InputSpec:
    """What a model takes and gives: image shape (c, h, w), number of classes, normalisation (inside the model)."""

    shape: tuple[int, int, int]
    num_classes: int
    normalization: Normalization | None = None

    @classmethod
    def of(cls, data: Images) -> "InputSpec":
        return cls(data.shape, data.num_classes, data.normalization)

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> "InputSpec":
        channels, height, width = fields["shape"]
        given = fields["normalization"]
        normalization = Normalization(tuple(given["mean"]), tuple(given["std"])) if given else None
        return cls((channels, height, width), fields["num_classes"], normalization)


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
            raise RequestError(
                f"{self.folder}: its model takes images {self.spec.shape} of {self.spec.num_classes} classes, "
                f"{data.name} has {data.shape} of {data.num_classes}; give the data that it was trained for"
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
    """Write `model.safetensors`."""
    about = {
        "recipe": recipe.to_mapping(),
        "input": asdict(spec),
        "epoch": epoch,
        "provenance": dict(provenance),
    }
    # Copies, because safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    with replaced_atomically(folder / MODEL) as temporary:
        save_file(tensors, temporary, metadata={"smoothcert": json.dumps(about)})


def load_run(folder: Path, code: str | None = None, *, model: nn.Module | None = None) -> Run:
    """The run in `folder`, its model on the CPU in eval mode; the weights are loaded into `model` if one is given.

    A run whose network is a user's own code is loaded only if `code` names it: opening a folder must not be enough
    to have its author choose what is imported.
    """
    path = folder / MODEL
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such run folder; `smoothcert train --out {folder}` makes one")
    if not path.exists() and not (folder / RECIPE).exists():
        raise RequestError(f"{folder}: expected a run folder, got one without {RECIPE} and {MODEL}; give another")
    if not path.exists():
        raise RequestError(
            f"{folder}: holds no {MODEL}: no epoch has finished, or it was left out; train it with --resume"
        )
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["smoothcert"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        recipe: TrainRecipe | ImportRecipe
        if "objective" in about["recipe"]:
            recipe = parse_recipe(TrainRecipe, about["recipe"], str(path))
        else:
            recipe = parse_recipe(ImportRecipe, about["recipe"], str(path))
        if model is None and is_code(recipe.model) and recipe.model != code:
            raise RequestError(
                f"{folder}: its network is the code {recipe.model}; allow it with --model {recipe.model}"
            )
        if model is None and code is not None and recipe.model != code:
            raise RequestError(f"{folder}: its network is {recipe.model}, got --model {code}; leave --model out")
        spec = InputSpec.from_mapping(about["input"])
        model = new_model(recipe, spec) if model is None else model
        model.load_state_dict(state)
    except RequestError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise WorkError(
            f"{path}: damaged or not a smoothcert model ({' '.join(str(error).split())[:160]}); "
            "it is left as it is: restore it, or train again into another folder"
        ) from error
    return Run(folder, recipe, spec, model.eval(), about["epoch"], about["provenance"])


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state.pt`: tensors, numbers and strings only."""
    with replaced_atomically(folder / STATE) as temporary:
        torch.save(dict(state), temporary)


def load_state(folder: Path) -> dict[str, Any] | None:
    """What `save_state` wrote, on the CPU; None where no epoch has finished. Loading cannot run code."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {"epoch": state["epoch"], "model": state["model"], "optimizer": state["optimizer"]}
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, OSError) as error:
        raise WorkError(
            f"{path}: damaged, the run cannot go on from it ({' '.join(str(error).split())[:120]}); "
            "it is left as it is: restore it, or train again into another folder"
        ) from error
