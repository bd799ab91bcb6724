"""The trained model of a run: `model.safetensors` with the weights and, in its metadata, recipe and provenance.

A run therefore loads without further options. The file is replaced atomically and cannot run code when it is loaded.
"""

import hashlib
import json
import math
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from smoothcert.data import DatasetSpec, Images, Normalization, with_known_classes
from smoothcert.data.class_names import refuse_other_order
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import all_or_none, check_regular_file, remove_temporaries, replaced_atomically
from smoothcert.io.records import parse_recipe
from smoothcert.io.references import same_reference
from smoothcert.io.results import only_writer
from smoothcert.io.text import given_type, named_error
from smoothcert.models import (
    DENOISERS,
    build_model,
    code_digest,
    import_code,
    is_code,
    is_hub,
    is_known,
    is_own_code,
)
from smoothcert.training.device import default_float32
from smoothcert.training.metrics import METRICS, read_epochs
from smoothcert.training.own_code import NETWORK, recorded_code, same_name
from smoothcert.training.recipe import ImportRecipe, TrainRecipe
from smoothcert.training.run_folder import MODEL, RECIPE, check_run_folder

if TYPE_CHECKING:
    from smoothcert.certification.certificates import CertificatesFile
    from smoothcert.certification.smoothed_classifier import SmoothedClassifier

DIGEST, ORIGINAL = "weights_sha256", "original_weights_sha256"
MOST = 100_000
"""The largest side of an image, and the largest number of classes, that a file may request memory for."""


@dataclass(frozen=True)
class InputSpec:
    """Input and output of a model: image shape (c, h, w), number of classes, normalization (inside the model)."""

    shape: tuple[int, int, int]
    num_classes: int
    normalization: Normalization | None = None
    class_names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, data: Images | DatasetSpec) -> "InputSpec":
        return cls(data.shape, data.num_classes, data.normalization, data.class_names)

    @classmethod
    def from_mapping(cls, stored: Mapping[str, Any]) -> "InputSpec":
        """The inverse of `asdict`; raises ValueError, TypeError or KeyError for anything else."""
        channels, height, width = stored["shape"]
        num_classes = stored["num_classes"]
        layer = stored["normalization"]
        names = stored["class_names"]
        if not all(type(size) is int and 0 < size <= MOST for size in (channels, height, width, num_classes)):
            raise ValueError(f"expected sizes of 1 to {MOST}, got {stored['shape']} and {num_classes}")
        numbers = [tuple(map(float, layer[part])) for part in ("mean", "std")] if layer else []
        if any(len(part) != channels or not all(map(math.isfinite, part)) for part in numbers):
            raise ValueError(f"expected a mean and a standard deviation for each of {channels} channels")
        if names and len(names) != num_classes:
            raise ValueError(f"expected {num_classes} class names, got {len(names)}")
        normalization = Normalization(*numbers) if layer else None
        return cls((channels, height, width), num_classes, normalization, tuple(map(str, names)) if names else None)


@dataclass(frozen=True, repr=False)
class Run:
    """A run folder: its recipe, its model in eval mode, its metrics and its certificates."""

    folder: Path
    recipe: TrainRecipe | ImportRecipe
    spec: InputSpec
    model: nn.Module
    epoch: int
    """Number of trained epochs."""
    provenance: Mapping[str, Any]
    code_changed: bool = False
    """Whether the file with the user's own network has changed since the network was trained."""

    def __repr__(self) -> str:
        """One line for notebooks; `recipe` and `model` print the rest."""
        recipe = self.recipe
        network = (
            f"{recipe.model} on {recipe.dataset}, method {recipe.method}, {recipe.noise} noise, sigma {recipe.sigma:g}"
        )
        return f"Run({self.folder}: {network}, epoch {self.epoch})"

    @property
    def finished(self) -> bool:
        return self.epoch >= self.recipe.epochs

    @property
    def is_denoiser(self) -> bool:
        """Whether the model maps images to images, instead of logits."""
        return self.recipe.model in DENOISERS

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, one per epoch; [] for an imported model."""
        return read_epochs(self.folder / METRICS, dict)

    @property
    def certificates(self) -> "CertificatesFile":
        """The certificates of the run; if it has several files, choose one with `read_certificates`."""
        return self.read_certificates()

    def read_certificates(self, name: str | None = None) -> "CertificatesFile":
        """The certificates file called `name`, such as "test-n100000"; by default the only one.

        Certificates of other weights, from before training continued, give a warning.
        """
        # An import from a higher layer: tables and figures belong to reports, and users expect them here.
        from smoothcert.report import certificates_of_run

        file = certificates_of_run(self.folder, name)
        if file.settings.get(DIGEST) not in (None, self.about()[DIGEST]):
            warnings.warn(f"{file.path}: is about other weights than those of the run now; certify again", stacklevel=2)
        return file

    def smoothed(self, sigma: float | None = None, **options: Any) -> "SmoothedClassifier":
        """The smoothed classifier of the model with the noise of its training, or with another `sigma`."""
        from smoothcert.certification.ensemble import smoothed_runs

        self.refuse_denoiser()
        return smoothed_runs([self], self.model, self.recipe.sigma if sigma is None else sigma, options)

    def about(self) -> dict[str, Any]:
        """Identifies the model and its training in result files."""
        return {
            "model": self.recipe.model,
            "objective": self.recipe.method,
            "training_sigma": self.recipe.sigma,
            "weights_sha256": tensors_digest(self.model.state_dict()),
        }

    def noise_warning(self, sigma: float, noise: str) -> str | None:
        """Return a warning if the run was trained with other noise than this; else None."""
        if (self.recipe.sigma, self.recipe.noise) == (sigma, noise):
            return None
        trained = f"{self.recipe.noise} noise at sigma {self.recipe.sigma:g}"
        return f"{self.folder} was trained with {trained}, not with {noise} noise at sigma {sigma:g}"

    def refuse_denoiser(self) -> None:
        """Raise a RequestError if the model is a denoiser, which gives no classes."""
        if self.is_denoiser:
            raise RequestError(
                f"{self.folder}: expected a classifier, got the denoiser {self.recipe.model}; put it in front of a "
                f"classifier with --denoiser {self.folder}"
            )

    def reading(self, dataset: str) -> dict[str, Any]:
        """Options of `load_dataset` with which `dataset` fits the model; only images in folders have any."""
        if not dataset.startswith("folder:"):
            return {}
        return {"image_size": self.recipe.image_size, "channels": self.spec.shape[0]}

    def refuse_other_images(self, data: Images) -> None:
        """Raise a RequestError if `data` does not have the shape and the classes of the model, in its order."""
        self.refuse_denoiser()
        if (data.shape, data.num_classes) != (self.spec.shape, self.spec.num_classes):
            fewer = data.shape == self.spec.shape and data.num_classes < self.spec.num_classes
            raise RequestError(
                f"{self.folder}: its model takes images {self.spec.shape} of {self.spec.num_classes} classes, "
                f"{data.name} has {data.shape} of {data.num_classes}; give the data that it was trained for"
                + (", or name the classes of all outputs: --classes FILE" if fewer else "")
            )
        refuse_other_order(data, self.spec.class_names, self.folder)


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names, types, shapes and bytes of all tensors, sorted by name; what `get_extra_state` of a module
    adds to a state dict is left out if it is no tensor."""
    digest = hashlib.sha256()
    for name in sorted(name for name, value in tensors.items() if isinstance(value, Tensor)):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def refuse_extra_state(state: Mapping[str, object]) -> None:
    """Raise a RequestError if the state dict of a network holds anything but tensors, which files can hold."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise RequestError(
                f"model: expected a network whose state_dict() holds tensors only, got {name}, a "
                f"{type(value).__name__}; return a tensor from get_extra_state, or remove it"
            )


def new_model(name: str, spec: InputSpec) -> nn.Module:
    """Build the network that a recipe calls `name` on the CPU in float32, initialized by the global torch generator."""
    with default_float32(), torch.device("cpu"):
        return build_model(name, spec.shape, spec.num_classes, spec.normalization)


def save_weights(run: Run, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the `model.safetensors` of `run`, with `weights` instead of those of its model if they are given.

    On a full disk this raises a WorkError and keeps the old file.
    """
    tensors = run.model.state_dict() if weights is None else weights
    about = {"recipe": run.recipe.to_mapping(), "input": asdict(run.spec), "epoch": run.epoch}
    about |= {"provenance": dict(run.provenance), DIGEST: tensors_digest(tensors)}
    write_tensors(run.folder / MODEL, tensors, about)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a safetensors file with `about` in its metadata, atomically."""
    refuse_extra_state(tensors)
    # Copies, because safetensors refuses tensors that share memory, as tied weights do.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    content = safetensors_bytes(copies, metadata={"smoothcert": json.dumps(about)})
    with replaced_atomically(path) as temporary:
        temporary.write_bytes(content)


@dataclass(frozen=True)
class ModelFile:
    """The metadata of a `model.safetensors`."""

    recipe: TrainRecipe | ImportRecipe
    spec: InputSpec
    epoch: int
    provenance: Mapping[str, Any]
    digest: str | None
    """The digest of the weights; None for files of earlier versions."""


def read_model_file(path: Path) -> ModelFile:
    """Read the metadata of the model file `path`, without the weights; raise a WorkError if it is damaged."""
    check_regular_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["smoothcert"])
        kind: type[TrainRecipe | ImportRecipe] = TrainRecipe if "objective" in about["recipe"] else ImportRecipe
        recipe = parse_recipe(kind, about["recipe"], str(path))
        spec = InputSpec.from_mapping(about["input"])
        epoch = about["epoch"]
        provenance = about["provenance"]
        most = recipe.epochs if isinstance(recipe, TrainRecipe) else math.inf
        if type(epoch) is not int or not 0 <= epoch <= most or not isinstance(provenance, dict):
            raise ValueError(f"epoch {epoch!r}, provenance {type(provenance).__name__}")
    except RequestError as error:
        raise WorkError(f"{error}; the file is damaged: restore it, or train again into another folder") from error
    except DAMAGE as error:
        raise _damaged_model(path, error) from error
    return ModelFile(recipe, spec, epoch, provenance, about.get(DIGEST))


def class_names_of(folder: Path | None) -> tuple[str, ...] | None:
    """The class names of the model in `folder`; None for weights in a file, and for a run without a saved epoch."""
    if folder is None or not (folder / MODEL).exists():
        return None
    return read_model_file(folder / MODEL).spec.class_names


def in_order_of_run(data: Images, continued: Path | None, init: Path | None) -> Images:
    """`data` with labels in the order of the run that training continues, else of the one that it starts from."""
    return with_known_classes(data, class_names_of(continued) or class_names_of(init))


DAMAGE = (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError, OSError)
"""The exceptions that reading a damaged file may raise; a RecursionError is a RuntimeError."""


def _damaged_model(path: Path, error: Exception) -> WorkError:
    return WorkError(
        f"{path}: damaged or not a smoothcert model ({named_error(error)}); "
        "it is left as it is: restore it, or train again into another folder"
    )


def refuse_code(source: Path, model: str, code: str | None) -> None:
    """Raise a RequestError if `model`, from the file `source`, is a user's code that `code` does not name.

    Opening a folder or a recipe must not be enough for its author to choose what is imported.
    """
    if code is not None and same_reference(model, code):
        return
    instead = f"--model {shlex.quote(code or '')} --init {shlex.quote(str(source))}"
    moved = f"; if it has moved, give {instead} in place of the run" if code is not None and is_code(model) else ""
    if is_own_code(model):
        allow = f'--model {shlex.quote(model)} (Python: code="{model}")'
        raise RequestError(f"{source}: its network is the code {model}; allow it with {allow}{moved}")
    if code is not None:
        option = "--hub" if is_hub(code) else "--model"
        raise RequestError(f"{source}: its network is {model}, got {option} {code}; leave {option} out{moved}")


def load_run(folder: Path, code: str | None = None, *, model: nn.Module | None = None) -> Run:
    """Load the run in `folder`, its model on the CPU in eval mode; `model`, if given, receives the weights.

    A run whose network is a user's own code is loaded only if `code` names it (see `refuse_code`).
    """
    check_run_folder(folder)
    if not isinstance(model, nn.Module | None):
        raise RequestError(
            f"model: expected a torch module that receives the weights, got {given_type(model)}; give an nn.Module"
        )
    path = folder / MODEL
    file = read_model_file(path)
    built_in = model is None and code is None
    name, same_code = _allowed_network(folder, file, code) if model is None else ("", None)
    try:
        if model is None:
            with torch.random.fork_rng(devices=[]):  # the weights that it draws are replaced
                model = new_model(name, file.spec)
        weights = load_file(path)
        if file.digest not in (None, tensors_digest(weights)):
            raise ValueError("the weights have changed since they were saved")
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:  # of torch, for missing, unknown or other tensors
            if built_in:
                raise
            raise RequestError(
                f"{folder}: its weights do not fit the network {type(model).__name__} ({named_error(error)}); give the "
                "network of its training"
            ) from error
    except RequestError:
        raise
    except DAMAGE as error:
        raise _damaged_model(path, error) from error
    return Run(folder, file.recipe, file.spec, model.eval(), file.epoch, file.provenance, same_code is False)


def _allowed_network(folder: Path, file: ModelFile, code: str | None) -> tuple[str, bool | None]:
    """The network to build for the run in `folder`, which `code` may name elsewhere; and what `_is_same_code` says.

    A network that was given to `train` in Python, and code that `code` does not name, are refused.
    """
    name = file.recipe.model
    if not is_known(name):
        raise RequestError(
            f"{folder}: expected a built-in network or named code, got {name}, which was given to `train` in "
            "Python; load it with load(PATH, model=network), or use its weights on the command line: --model "
            f"FILE.py:function --init {folder}"
        )
    same_code = _is_same_code(file, code)
    if code is not None and same_code:
        name = code  # wherever the file is now
    refuse_code(folder, name, code)
    return name, same_code


def _is_same_code(file: ModelFile, code: str | None) -> bool | None:
    """Whether the file of `code`, which the user names, has the content of the run's own network; None if unknown."""
    name, recorded = file.recipe.model, recorded_code(file.provenance).get(NETWORK)
    if code is None or recorded is None or not (is_own_code(name) and is_own_code(code) and same_name(name, code)):
        return None
    return bool(recorded == code_digest(import_code(code, "model", "function")))


def code_warning(run: Run) -> str | None:
    """A warning if the code of the network of `run` has been edited since it was trained; else None."""
    if not run.code_changed:
        return None
    return (
        f"{run.folder}: the code of its network {run.recipe.model} has changed since it was trained; restore the code"
    )


def load_runs(folders: Sequence[Path], code: str | None = None) -> list[Run]:
    """Load runs, of which some may have a built-in network and the others the user's own, which `code` names."""
    for folder in folders:
        check_run_folder(folder)
    networks = {folder: read_model_file(folder / MODEL).recipe.model for folder in folders}
    with_own_code = [folder for folder, network in networks.items() if is_own_code(network)]
    # Without a network of the user's own, `code` is refused.
    return [load_run(folder, code if folder in (with_own_code or folders) else None) for folder in folders]


def write_new_run(run: Run, weights: Mapping[str, Tensor]) -> None:
    """Write an imported or changed model into the folder of `run`, which must be new; an error leaves no part of it."""
    files = run.folder / MODEL, run.folder / RECIPE
    with only_writer(run.folder / METRICS, "choose another --out"):
        refuse_existing_folder(run.folder)
        for file in files:
            remove_temporaries(file)  # of a process that was killed
        with all_or_none(*files):
            save_weights(run, weights)
            run.recipe.save(run.folder / RECIPE)


def refuse_existing_folder(out: Path) -> None:
    """Raise a RequestError if `out` is a file or a folder that is not empty; hidden files in it do not count."""
    if out.is_dir() and all(path.name[0] == "." for path in out.iterdir()):
        return
    if os.path.lexists(out):
        raise RequestError(f"{out}: exists already; choose another --out")
