"""Weights that training starts from: of a run, of a `.safetensors` file, or of a PyTorch checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from smoothcert.classifier import Classifier, device_of, evaluating, logits_of
from smoothcert.data import Images
from smoothcert.data.images import spread
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import file_digest
from smoothcert.io.text import error_line
from smoothcert.models import as_module, is_hub, own_model
from smoothcert.smoothing.accuracy import at_chance, independent_accuracy
from smoothcert.training.run_folder import weights_in
from smoothcert.training.weights_file import (
    INPUT_BUFFERS,
    describe_problems,
    find_state_dict,
    matched_by_name,
    read_checkpoint,
    refuse_not_finite,
)

START_IMAGES = 100
"""Number of training images, spread over the data, on which a network is tried before it is trained."""


def own_model_with_weights(
    reference: str, num_classes: int | None, init: Path | None, on_note: Callable[[str], None]
) -> Classifier:
    """Build the user's network `package.module:function` (see `own_model`) with the weights in `init`, if given."""
    model = own_model(reference, num_classes)
    if init is not None:
        load_initial_weights(as_module(model, reference, "--init"), init, reference, on_note)
    elif not is_hub(reference) and (not isinstance(model, nn.Module) or model.state_dict()):
        # The function may load weights or leave random ones: only its author knows.
        on_note(f"no --init: the weights are those that {reference} returns")
    return model


def load_initial_weights(
    model: nn.Module, path: Path, name: str, on_note: Callable[[str], None] = lambda text: None
) -> dict[str, str]:
    """Load the weights in `path` into `model`, called `name`; return the file and its SHA-256 for the provenance.

    Tensors are matched by name, after the prefix of the file (such as `module.`) and behind an input layer. `path` may
    be FILE:KEY for a checkpoint with several sets of weights.
    """
    path, key = weights_in(path)
    weights = _read(path, key, on_note)
    target = model.state_dict()
    matched = dict(weights)
    problems: list[str] = []
    if set(weights) != set(target):
        matched, problems = _match(weights, target)
    differing = [key for key in matched if matched[key].shape != target[key].shape]
    if differing:
        shapes = f"{list(matched[differing[0]].shape)} instead of {list(target[differing[0]].shape)}"
        problems.append(f"{len(differing)} of other shape ({differing[0]}: {shapes})")
    if problems:
        raise RequestError(
            f"{path}: expected the weights of {name}, got {'; '.join(problems)}; "
            f"{_advice_on_classes(matched, target, differing)}give weights of the same network, or let --model name a "
            "function of your own that loads those that fit"
        )
    refuse_not_finite(path, matched)
    model.load_state_dict({**target, **matched})
    source = {"file": path.name, "sha256": file_digest(path)}
    return source if key is None else {**source, "key": key}


def _advice_on_classes(weights: Mapping[str, Tensor], target: Mapping[str, Tensor], differing: Sequence[str]) -> str:
    """What to do first if only the number of outputs differs: a network is built for the classes of the data."""
    pairs = [(weights[key].shape, target[key].shape) for key in differing]
    numbers = {(given[:1].numel(), built[:1].numel()) for given, built in pairs}
    if len(numbers) != 1 or any(given[1:] != built[1:] for given, built in pairs):
        return ""
    given, built = numbers.pop()
    if given < built:
        return f"if the data have {given} classes that count from 1, number them from 0; otherwise "
    return f"if the data lack some of {given} classes, name all of them with --classes FILE; otherwise "


def start_notes(model: nn.Module, data: Images, *, trained: bool) -> list[str]:
    """What is wrong with a user's network before it is trained, by its outputs for some images.

    Weights that are `trained` and still at chance do not belong to these labels or this input scale.
    """
    images, labels = data.batch(spread(len(data), START_IMAGES))
    device = device_of(model)
    with torch.no_grad(), evaluating(model), torch.random.fork_rng(devices=[]):
        logits = torch.cat([logits_of(model(part.to(device))).float().cpu() for part in torch.split(images, 10)])
    notes = []
    classes = logits.argmax(1)
    labels = labels.cpu()
    one_hot = bool(((logits == 0) | (logits == 1)).all())  # votes, which have no softmax
    if not one_hot and bool(((logits >= 0) & (logits <= 1)).all()) and _are_probabilities(model, logits, trained):
        notes.append("the network returns probabilities, but losses expect logits; omit its last softmax or sigmoid")
    share = float((classes == labels).double().mean())
    if trained and at_chance(share, independent_accuracy(classes, labels, logits.shape[1]), len(labels)):
        notes.append(
            f"the weights that training starts from are at chance ({share:.0%} of {len(labels)} training images); "
            "check the normalisation and the order of the classes (--classes FILE), or let `smoothcert doctor` find "
            "the fault"
        )
    return notes


def _are_probabilities(model: nn.Module, outputs: Tensor, trained: bool) -> bool:
    """Whether `outputs` in [0, 1] are those of a softmax or sigmoid, and not logits of random weights."""
    *_, last = model.modules()
    softmax = bool(((outputs.sum(1) - 1).abs() < 1e-3).all())
    return softmax or trained or isinstance(last, nn.Sigmoid)


def _read(path: Path, key: str | None, on_note: Callable[[str], None]) -> Mapping[str, Tensor]:
    if path.suffix != ".safetensors":
        _, weights, notes = find_state_dict(path, read_checkpoint(path), key)
        for note in notes:
            on_note(note)
        return weights
    if key is not None:
        raise RequestError(f"{path}: expected no key for a .safetensors file, got {key}; leave :{key} out")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise WorkError(
            f"{path}: damaged or not a safetensors file ({error_line(error, 100)}); give another file"
        ) from error


def _match(weights: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of `weights` by the names in `target`, and what is missing or unexpected.

    A network behind an input layer (mean and std) also takes the weights of the network alone. An input layer in the
    file is never left out silently: it must be that of `target`.
    """
    matched, used, missing = _by_name(weights, target, "")
    if missing and (inner := _behind_input_layer(target)):
        matched, used, missing = _by_name(weights, target, inner)
    known = [target[key].flatten().cpu() for key in target if key not in matched]
    unexpected = [
        key
        for key in weights
        if key not in used
        and not (_is_buffer(key) and any(torch.equal(weights[key].flatten().to(v.dtype), v) for v in known))
    ]
    return matched, describe_problems({"missing": missing, "unexpected": unexpected})


def _by_name(
    weights: Mapping[str, Tensor], target: Mapping[str, Tensor], inner: str
) -> tuple[dict[str, Tensor], set[str], list[str]]:
    """Match what is behind `inner` in `target`: the tensors, their names in `weights`, and what is missing."""
    names = [key.removeprefix(inner) for key in target if key.startswith(inner)]
    matched, prefix, missing = matched_by_name(names, weights)
    return {inner + name: matched[name] for name in matched}, {prefix + name for name in names}, missing


def _behind_input_layer(target: Mapping[str, Tensor]) -> str:
    """The prefix, such as `1.`, of all tensors of a network that has a mean or std before it; otherwise nothing."""
    body = [key for key in target if not _is_buffer(key)]
    if not body or len(body) == len(target):
        return ""
    columns = zip(*(key.split(".")[:-1] for key in body), strict=False)
    return "".join(f"{parts[0]}." for parts in takewhile(lambda parts: len(set(parts)) == 1, columns))


def _is_buffer(name: str) -> bool:
    """Whether a tensor is called as the mean or standard deviation of an input layer."""
    return name.rpartition(".")[2] in {part for pair in INPUT_BUFFERS for part in pair}
