"""Imports published checkpoints as run folders; code that is stored in such a file is never executed.

Layouts: {arch, epoch, state_dict, optimizer} of Cohen et al. (https://github.com/locuslab/smoothing) and of the work
that builds on it (SmoothAdv, Consistency, SmoothMix), with the network at index 1 after an input layer;
{net, epoch} of MACER (https://github.com/RuntianZ/macer); bare state dicts, such as torchvision's.
"""

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoothcert.data import DATASETS, Normalization
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import named_error
from smoothcert.models import MODELS
from smoothcert.training.checkpoint import InputSpec, Run, new_model, write_new_run
from smoothcert.training.choices import InputLayer
from smoothcert.training.input_layer import layer_normalization, network_of
from smoothcert.training.recipe import ImportRecipe, parse_recipe
from smoothcert.training.run_folder import check_file, split_key
from smoothcert.training.versions import versions

USUAL_DATASET = {"lenet": "mnist", "resnet50": "imagenet"}  # of the other networks: cifar10
CONTAINERS = ("state_dict", "net", "model_state_dict", "model")
INPUT_BUFFERS = (("means", "sds"), ("mean", "std"), ("mu", "sigma"))
"""Names of the mean and standard deviation in input layers that save them."""
COUNTER = "num_batches_tracked"
AVERAGE_COUNTER = "n_averaged"
"""What torch's AveragedModel saves next to the averaged weights."""

# Some files store an accuracy or an epoch as a numpy number. Reading one needs numpy's scalar function (also under its
# name in numpy 1) and a numeric dtype: a number from bytes, no code. Everything else that a file requests is refused.
_SCALAR = np.float64(0).__reduce__()[0]
_NUMBERS: list[Any] = [
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("float64", "float32", "int64", "int32", "bool")),
]


@dataclass(frozen=True)
class _Fit:
    """The tensors of a file matched to an architecture, which fits if there are no `problems`."""

    weights: Mapping[str, Tensor]
    num_classes: int
    prefix: str = ""
    buffers: Normalization | None = None
    """Mean and standard deviation of an input layer that saved them."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def import_checkpoint(
    file: Path,
    out: Path,
    *,
    sigma: float,
    arch: str | None = None,
    dataset: str | None = None,
    inputs: InputSpec | None = None,
    image_size: int | None = None,
    input_layer: InputLayer | None = None,
    method: str = "imported",
) -> Run:
    """Make the run folder `out` from a published checkpoint; its model gives the same logits as the source.

    `inputs` describes a `dataset` that is not one of DATASETS, and `image_size` is the side of its images in folders.

    This requires the input layer of the training: `normalize` (x - mean) / std, `center` x - mean, or `none`. Most
    files do not say which; `provenance["notes"]` lists what was guessed, and `input_layer_warning` tries the others.
    SmoothAdv's code has both, so its files may need `center`. Of a file with several sets of weights, such as
    `state_dict` and `state_dict_ema`, FILE:KEY chooses one. A refused file leaves nothing behind.
    """
    file, key = split_key(file)
    contents = read_checkpoint(file)
    layout, state, notes = find_state_dict(file, contents, key)
    name, fit = _architecture(file, arch, contents.get("arch"), state)
    notes += fit.notes
    dataset, inputs = _dataset(file, dataset, inputs, name, fit.num_classes, notes)
    layer, normalization = _input_layer(dataset, inputs.normalization, input_layer, fit, layout, notes)
    fields = {"dataset": dataset, "model": name, "sigma": sigma, "input_layer": layer, "image_size": image_size}
    source = file.name if key is None else f"{file.name}:{key}"
    recipe = parse_recipe(ImportRecipe, {**fields, "source": source, "method": method}, "import")
    spec = replace(inputs, normalization=normalization)
    with torch.random.fork_rng(devices=[]):
        model = new_model(name, spec)
    network_of(model, spec).load_state_dict(fit.weights)
    refuse_not_finite(file, model.state_dict())
    epoch = contents.get("epoch")
    epoch = int(epoch) if isinstance(epoch, int | np.integer) and epoch >= 0 else 0
    return write_import(Run(out, recipe, spec, model.eval(), epoch, {"notes": notes}), file)


def write_import(run: Run, file: Path) -> Run:
    """Write the run that was imported from `file`; return it with its provenance."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    about = {"versions": versions(torch.device("cpu")), "source_sha256": digest, **run.provenance}
    run = replace(run, provenance=about)
    write_new_run(run, run.model.state_dict())
    return run


def refuse_not_finite(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise a WorkError if a weight is NaN or infinite: the logits would be, too."""
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WorkError(
                f"{file}: expected finite weights, got NaN or infinite ones in {name}; download the file again or give "
                "a checkpoint of an earlier epoch"
            )


def read_checkpoint(file: Path) -> Mapping[Any, Any]:
    """Read the mapping in `file` onto the CPU. Only tensors, containers and numbers are read; code is refused."""
    check_file(file, "a checkpoint, such as checkpoint.pth.tar")
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_NUMBERS):
            warnings.simplefilter("ignore")  # about old formats
            contents = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make the unpickler raise any exception
        if wanted := re.search(r"GLOBAL (\S+) (?:was not|whose module)|unrecognized function (\S+)", str(error)):
            raise WorkError(
                f"{file}: refused: expected tensors and numbers, got a file that asks to run {wanted[1] or wanted[2]} "
                "when it is read; if you trust its author, load it in a script and save its state_dict() alone"
            ) from None
        if "TorchScript" in str(error):
            raise WorkError(
                f"{file}: expected weights (a state dict), got a TorchScript model; load it by torch.jit.load in a "
                "function of your own, which --model names, or save its state_dict() alone"
            ) from None
        # torch's own text is about its arguments, which a user of this command does not give.
        reason = type(error).__name__ if "weights_only" in str(error) else named_error(error)
        raise WorkError(
            f"{file}: damaged or not a PyTorch checkpoint ({reason}); download it again or give another file"
        ) from error
    if not isinstance(contents, Mapping):
        raise RequestError(
            f"{file}: expected a checkpoint (a dict with state_dict or net, or a state dict), "
            f"got a {type(contents).__name__}; give another file"
        )
    return contents


def find_state_dict(
    file: Path, contents: Mapping[Any, Any], wanted: str | None = None
) -> tuple[str, dict[str, Tensor], list[str]]:
    """The key of the weights ("" for a bare state dict), the weights in the order of the file, and what to know.

    Without a `wanted` key, the usual ones are tried; other weights of the same network in the file are reported.
    """
    for key in (*CONTAINERS, "") if wanted is None else (wanted,):
        state = _state_dict(contents.get(key) if key else contents)
        if state is None:
            continue
        others = [str(name) for name in contents if name != key and _same_network(_state_dict(contents[name]), state)]
        if wanted is not None or not others:
            return key, state, []
        return key, state, [f"weights: those of {key}; {file.name}:{others[0]} gives those of {others[0]}"]
    if wanted is not None:
        named = ", ".join(str(name) for name in contents if _state_dict(contents[name]) is not None)
        raise RequestError(f"{file}: expected weights under {wanted}, got {named or 'none'}; choose one of the keys")
    raise RequestError(
        f"{file}: expected weights under {', '.join(CONTAINERS)} or a bare state dict, got a dict with the keys "
        f"{', '.join(map(str, list(contents)[:5])) or 'none'}; give another file"
    )


def _state_dict(value: object) -> dict[str, Tensor] | None:
    """The weights in a part of a file, without the counter of an average; None if it is something else."""
    if not isinstance(value, Mapping) or not value or not all(map(_is_dense, value.values())):
        return None
    return {str(name): tensor for name, tensor in value.items() if name != AVERAGE_COUNTER}


def _same_network(other: Mapping[str, Tensor] | None, state: Mapping[str, Tensor]) -> bool:
    """Whether two sets of weights have matrices and filters of the same shapes; the prefixes of names may differ."""
    shapes = [sorted(tuple(t.shape) for t in one.values() if t.ndim > 1) for one in (other or {}, state)]
    return shapes[0] == shapes[1] != []


def _is_dense(value: object) -> bool:
    """Whether `value` is a tensor that can be copied into a network: dense, real and not quantized."""
    if not isinstance(value, Tensor):
        return False
    plain = not value.is_quantized and not value.is_complex()
    return plain and value.layout == torch.strided and value.device.type == "cpu"


def _architecture(file: Path, given: str | None, stored: object, state: Mapping[str, Tensor]) -> tuple[str, _Fit]:
    """The requested architecture, or the one that the file names, or one that fits; and the matched tensors."""
    # The code of the papers uses the name cifar_resnet110 for our resnet110.
    name = str(stored if given is None else given).lower().removeprefix("cifar_")
    if given is not None and name not in MODELS:
        known = ", ".join(MODELS)
        raise RequestError(f"arch: expected one of {known}, or your own as FILE.py:function, got {given}; choose one")
    fits = {arch: _fit(arch, state) for arch in MODELS}
    fitting = next((arch for arch in MODELS if not fits[arch].problems), None)
    if name in MODELS and fits[name].problems:
        hint = f"give --arch {fitting}, which fits" if fitting else f"give --arch, one of {', '.join(MODELS)}"
        raise RequestError(f"{file}: expected the tensors of {name}, got {'; '.join(fits[name].problems)}; {hint}")
    if name in MODELS:
        return name, fits[name]
    if fitting is None:
        says = f" (the file says {stored!r})" if isinstance(stored, str) else ""
        raise RequestError(
            f"{file}: expected weights of one of {', '.join(MODELS)}, got {len(state)} tensors that fit none{says}, "
            f"such as {', '.join(list(state)[:3])}; with --arch the differences are listed; another network is "
            f"certified from code that builds it: `smoothcert certify --model FILE.py:function --init {file}`"
        )
    note = f"architecture: {fitting}, which the names and shapes of the tensors fit"
    return fitting, replace(fits[fitting], notes=(note, *fits[fitting].notes))


@cache
def _shapes(arch: str, num_classes: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of an architecture's tensors, those of the last layer last; allocates no memory."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in MODELS[arch].build(num_classes).state_dict().items()}


def best_prefix(names: Sequence[str], state: Mapping[str, Tensor]) -> str:
    """The prefix (`module.`, `1.`, `1.module.`, ..., or none) with which most of `names` are in `state`."""
    prefixes = {name.removesuffix(names[0]) for name in state if name.endswith("." + names[0])} | {""}
    return max(prefixes, key=lambda prefix: (sum(prefix + name in state for name in names), -len(prefix)))


def describe_problems(names: Mapping[str, Sequence[str]]) -> list[str]:
    """A text such as "2 missing (a, b)" for each kind of problem with tensors."""
    return [
        f"{len(some)} {kind} ({', '.join(some[:3])}{', ...' if len(some) > 3 else ''})"
        for kind, some in names.items()
        if some
    ]


def _fit(arch: str, state: Mapping[str, Tensor]) -> _Fit:
    """Match tensors by name."""
    names = list(_shapes(arch, 10))
    needed = [name for name in names if not name.endswith(COUNTER)]
    prefix = best_prefix(needed, state)
    weights = {name: state[prefix + name] for name in names if prefix + name in state}
    missing = [name for name in needed if name not in weights]
    if arch == "lenet" and missing and (by_order := _lenet_by_order(state)):
        return by_order
    num_classes = weights[names[-1]].numel() if names[-1] in weights else 10
    shapes = _shapes(arch, num_classes)
    differing = [name for name in weights if tuple(weights[name].shape) != shapes[name]]
    used = {prefix + name for name in weights}
    rest = {name: tensor for name, tensor in state.items() if name not in used}
    buffers, unexpected = _input_buffers(rest, channels=shapes[needed[0]][1])
    problems = describe_problems({"missing": missing, "unexpected": unexpected, "of other shape": differing})
    # Files of torch before 0.4.1 have no counters, which evaluation does not use.
    counters = {name: torch.zeros((), dtype=torch.int64) for name in names if name not in (*needed, *weights)}
    notes = (f"{COUNTER}: absent from the file, set to zero",) if counters else ()
    return _Fit({**weights, **counters}, num_classes, prefix, buffers, tuple(problems), notes)


def _lenet_by_order(state: Mapping[str, Tensor]) -> _Fit | None:
    """Match LeNet's tensors by shape, which is different for each, if the file has exactly these shapes in order."""
    num_classes = list(state.values())[-1].numel()
    shapes = _shapes("lenet", num_classes)
    if [tuple(tensor.shape) for tensor in state.values()] != list(shapes.values()):
        return None
    notes = ("layers: matched by order and shape, since the file has other names",)
    return _Fit(dict(zip(shapes, state.values(), strict=True)), num_classes, notes=notes)


def _input_buffers(rest: Mapping[str, Tensor], channels: int) -> tuple[Normalization | None, list[str]]:
    """Mean and std among the tensors that do not belong to the network, and the names of the remaining tensors."""
    ends = {name.rpartition(".")[2]: tensor for name, tensor in rest.items() if tensor.numel() == channels}
    for mean, std in INPUT_BUFFERS:
        stds = ends[std].flatten().tolist() if std in ends else [1.0] * channels
        if mean in ends and min(stds) > 0:
            unexpected = [name for name in rest if name.rpartition(".")[2] not in (mean, std)]
            return Normalization(tuple(ends[mean].flatten().tolist()), tuple(stds)), unexpected
    return None, list(rest)


def _dataset(
    file: Path, requested: str | None, inputs: InputSpec | None, arch: str, num_classes: int, notes: list[str]
) -> tuple[str, InputSpec]:
    """The requested data set, or the usual one for the architecture, which is noted; and its images and classes."""
    dataset = USUAL_DATASET.get(arch, "cifar10") if requested is None else requested
    if requested is None:
        notes.append(f"data set: {dataset}, the usual one for {arch}")
    if inputs is None and dataset not in DATASETS:
        raise RequestError(f"dataset: expected one of {', '.join(DATASETS)}, got {dataset}; choose one of these")
    inputs = InputSpec.of(DATASETS[dataset]) if inputs is None else inputs
    if num_classes != inputs.num_classes:
        raise RequestError(
            f"{file}: expected {inputs.num_classes} classes for {dataset}, got a network with {num_classes}; give the "
            "--dataset that it was trained on"
            + ("" if dataset in DATASETS else ", or the names of all its classes: --classes FILE")
        )
    return dataset, inputs


def _input_layer(
    dataset: str,
    published: Normalization | None,
    requested: InputLayer | None,
    fit: _Fit,
    layout: str,
    notes: list[str],
) -> tuple[InputLayer, Normalization | None]:
    """The input layer that the file saved, or the requested one, or the usual one, which is noted."""
    if fit.buffers is not None:
        layer: InputLayer = "center" if set(fit.buffers.std) == {1.0} else "normalize"
        instead = f"; {requested}, which was asked for, contradicts them" if requested not in (None, layer) else ""
        notes.append(f"input layer: {layer}, with the mean and std that the file holds{instead}")
        return layer, fit.buffers
    if requested is None:
        # MACER's code trains the network on unchanged pixels; an index in the names indicates a layer before it.
        bare_macer = layout == "net" and not re.search(r"(^|\.)\d+\.", fit.prefix)
        requested = "none" if published is None or bare_macer else "normalize"
        notes.append(f"input layer: {requested}, the usual one for {'MACER' if bare_macer else dataset}")
    if requested in ("normalize", "center") and published is None:
        raise RequestError(f"input layer: expected none for {dataset}, which has no published mean, got {requested}")
    return requested, layer_normalization(requested, published)
