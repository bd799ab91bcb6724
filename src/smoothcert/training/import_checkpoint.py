"""Imports checkpoints as run folders: published ones, and those of a user's own network, which their code builds.

Layouts: {arch, epoch, state_dict, optimizer} of Cohen et al. (https://github.com/locuslab/smoothing) and of the work
that builds on it (SmoothAdv, Consistency, SmoothMix), with the network at index 1 after an input layer;
{net, epoch} of MACER (https://github.com/RuntianZ/macer); bare state dicts, such as torchvision's.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoothcert.data import DATASETS, Normalization
from smoothcert.errors import RequestError
from smoothcert.io.files import file_digest
from smoothcert.io.records import parse_recipe
from smoothcert.models import MODELS, as_module, check_outputs, is_code
from smoothcert.training.checkpoint import InputSpec, Run, new_model, refuse_existing_folder, write_new_run
from smoothcert.training.choices import InputLayer
from smoothcert.training.initial_weights import own_model_with_weights
from smoothcert.training.input_layer import layer_normalization, network_of
from smoothcert.training.recipe import ImportRecipe
from smoothcert.training.run_folder import split_key
from smoothcert.training.versions import versions
from smoothcert.training.weights_file import (
    COUNTER,
    INPUT_BUFFERS,
    describe_problems,
    find_state_dict,
    matched_by_name,
    read_checkpoint,
    refuse_not_finite,
)

USUAL_DATASET = {"lenet": "mnist", "resnet50": "imagenet"}  # of the other networks: cifar10


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
    file: str | Path,
    out: str | Path,
    *,
    sigma: float,
    arch: str | None = None,
    dataset: str | None = None,
    inputs: InputSpec | None = None,
    image_size: int | None = None,
    input_layer: InputLayer | None = None,
    method: str = "imported",
    on_read: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Make the run folder `out` from a published checkpoint; its model gives the same logits as the source.

    `arch` may also name a user's code that builds the network, and runs: only the user may name it. The code contains
    the input layer of the network, if it has one, and `dataset` must be given with it.

    `inputs` describes a `dataset` that is not one of DATASETS, and `image_size` is the side of its images in folders.

    This requires the input layer of the training: `normalize` (x - mean) / std, `center` x - mean, or `none`. Most
    files do not say which; `provenance["notes"]` lists what was guessed, and `input_layer_warning` tries the others.
    SmoothAdv's code has both, so its files may need `center`. Of a file with several sets of weights, such as
    `state_dict` and `state_dict_ema`, FILE:KEY chooses one. `on_read` is called with the run before it is written. A
    refused file leaves nothing behind.
    """
    given, out = Path(file), Path(out)
    refuse_existing_folder(out)
    file, key = split_key(given)
    source = file.name if key is None else f"{file.name}:{key}"
    about = {"sigma": sigma, "image_size": image_size, "source": source, "method": method}
    if arch is not None and is_code(arch):
        run = _own_network(given, out, arch, dataset, inputs, input_layer, about)
        return _written(run, file, on_read)
    contents = read_checkpoint(file)
    layout, state, notes = find_state_dict(file, contents, key)
    name, fit = _architecture(file, arch, contents.get("arch"), state)
    notes += fit.notes
    dataset, inputs = _dataset(file, dataset, inputs, name, fit.num_classes, notes)
    layer, normalization = _input_layer(dataset, inputs.normalization, input_layer, fit, layout, notes)
    fields = {"dataset": dataset, "model": name, "input_layer": layer, **about}
    recipe = parse_recipe(ImportRecipe, fields, "import")
    spec = replace(inputs, normalization=normalization)
    with torch.random.fork_rng(devices=[]):
        model = new_model(name, spec)
    network_of(model, spec).load_state_dict(fit.weights)
    refuse_not_finite(file, model.state_dict())
    epoch = contents.get("epoch")
    epoch = int(epoch) if isinstance(epoch, int | np.integer) and epoch >= 0 else 0
    return _written(Run(out, recipe, spec, model.eval(), epoch, {"notes": notes}), file, on_read)


def _own_network(
    file: Path,
    out: Path,
    arch: str,
    dataset: str | None,
    inputs: InputSpec | None,
    input_layer: InputLayer | None,
    about: Mapping[str, Any],
) -> Run:
    """The run, not yet written, of the network that the user's code `arch` builds with its input layer, if any."""
    inputs = InputSpec.of(DATASETS[dataset]) if inputs is None and dataset in DATASETS else inputs
    if inputs is None and dataset is not None:
        raise RequestError(f"inputs: expected those of {dataset} with it, got none; give InputSpec.of(its images)")
    if inputs is None:
        raise RequestError(f"--arch {arch}: expected --dataset with it, got none; add --dataset NAME")
    if input_layer not in (None, "none"):
        raise RequestError(f"--input-layer: expected none with --arch {arch}, whose code contains it; leave it out")
    fields = {"dataset": dataset, "model": arch, "input_layer": "none", **about}
    recipe = parse_recipe(ImportRecipe, fields, "import")
    notes: list[str] = []
    network = as_module(own_model_with_weights(arch, inputs.num_classes, file, notes.append), arch, "arch")
    check_outputs(network, arch, inputs.shape, inputs.num_classes)
    spec = InputSpec(inputs.shape, inputs.num_classes, class_names=inputs.class_names)
    return Run(out, recipe, spec, network.eval(), 0, {"notes": notes})


def _written(run: Run, file: Path, on_read: Callable[[Run], None]) -> Run:
    """Call `on_read` with the run that was imported from `file` and write it; return it with its provenance."""
    on_read(run)
    about = {"versions": versions(torch.device("cpu")), "source_sha256": file_digest(file), **run.provenance}
    run = replace(run, provenance=about)
    write_new_run(run, run.model.state_dict())
    return run


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


def _fit(arch: str, state: Mapping[str, Tensor]) -> _Fit:
    """Match tensors by name."""
    names = list(_shapes(arch, 10))
    weights, prefix, missing = matched_by_name(names, state)
    if arch == "lenet" and missing and (by_order := _lenet_by_order(state)):
        return by_order
    num_classes = weights[names[-1]].numel() if names[-1] in weights else 10
    shapes = _shapes(arch, num_classes)
    differing = [name for name in weights if tuple(weights[name].shape) != shapes[name]]
    used = {prefix + name for name in weights}
    rest = {name: tensor for name, tensor in state.items() if name not in used}
    buffers, unexpected = _input_buffers(rest, channels=shapes[names[0]][1])
    problems = describe_problems({"missing": missing, "unexpected": unexpected, "of other shape": differing})
    # Files of torch before 0.4.1 have no counters, which evaluation does not use.
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    counters = {name: zero.clone() for name in names if name not in (*weights, *missing)}
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
