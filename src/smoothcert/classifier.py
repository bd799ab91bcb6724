"""What a classifier is: any callable from images to logits. Its evaluation mode, its logits and their probabilities."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

from smoothcert.errors import RequestError
from smoothcert.io.text import named_error

if TYPE_CHECKING:  # records are read without torch
    import torch
    from torch import Tensor, nn

Classifier = Callable[["Tensor"], "Tensor"]
"""A float batch [n, ...], images in [0, 1] as a rule -> logits, as a tensor or as `logits_of` accepts them."""


@contextmanager
def evaluating(classifier: Classifier) -> Iterator[None]:
    """Put a module into eval mode (fixed batch statistics) and restore the mode of each submodule afterwards.

    The same applies to the modules that another callable uses, as far as they can be found. A module stays in eval mode
    while any call evaluates it, in this thread or another. A call restores the mode before it; if a later call has not
    ended yet, that call restores this mode instead.
    """
    modules = modules_with_mode(classifier)
    call = object()
    with _SWITCHING:
        # All modes are read before one changes: that of a compiled module is that of the module in it.
        modes = [module.training for module in modules]
        for module, training in zip(modules, modes, strict=True):
            _MODES.setdefault(id(module), {})[call] = training
            module.training = False
    try:
        yield
    finally:
        with _SWITCHING:
            for module in modules:
                calls = _MODES[id(module)]
                later = list(calls)[list(calls).index(call) + 1 :]
                mode = calls.pop(call)
                if later:
                    calls[later[0]] = mode
                else:
                    module.training = mode
                if not calls:
                    del _MODES[id(module)]


_MODES: dict[int, dict[object, bool]] = {}
"""id of a module -> for each call that evaluates it, in their order, the mode that the call restores."""
_SWITCHING = threading.Lock()


def modules_with_mode(classifier: Classifier) -> list[nn.Module]:
    """Return a module and its submodules, or those that another callable uses; a frozen TorchScript one has no mode."""
    roots = _modules_of(classifier)
    modules = [module for root in roots for module in root.modules()]
    if len(roots) > 1:  # which may share modules
        modules = list({id(module): module for module in modules}.values())
    return [module for module in modules if hasattr(module, "training")]


def _modules_of(classifier: object) -> list[nn.Module]:
    """Return a module itself, or the modules that another callable refers to, in a few steps at most."""
    from torch import nn

    modules: list[nn.Module] = []
    values = [classifier]
    for _ in range(STEPS_TO_A_MODULE + 1):
        modules += [value for value in values if isinstance(value, nn.Module)]
        others = {id(value): value for value in values if not isinstance(value, nn.Module)}
        values = [reference for value in others.values() for reference in _references(value)]
    return modules


STEPS_TO_A_MODULE = 3
"""A decorated function has its function, which names a helper, which names the network."""
LONGEST_COLLECTION = 100
"""A longer list or dictionary has data, not networks."""


def _references(value: object) -> list[object]:
    """Return what a function, a method, a partial, an object with attributes or a short collection refers to."""
    if isinstance(value, type | ModuleType):
        return []
    if isinstance(value, list | tuple | dict):
        return list(value.values() if isinstance(value, dict) else value) if len(value) <= LONGEST_COLLECTION else []
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType | BuiltinMethodType):
        return [value.__self__, getattr(value, "__func__", None)]
    references = list(getattr(value, "__dict__", {}).values())
    function = value if isinstance(value, FunctionType) else getattr_static(type(value), "__call__", None)
    if isinstance(function, FunctionType):
        cells = [cell for cell in function.__closure__ or () if cell != CellType()]  # without empty ones
        references += [function.__globals__.get(name) for name in _names(function.__code__)]
        references += [*(cell.cell_contents for cell in cells), *(function.__defaults__ or ())]
    return references


def _names(code: CodeType) -> list[str]:
    """Return the global names that `code` uses, with those of the comprehensions and functions inside it."""
    inside = [name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part)]
    return [*code.co_names, *inside]


def device_of(classifier: Classifier) -> torch.device | None:
    """Return the device of a module's parameters; None for other callables and modules without parameters."""
    from torch import nn

    parameter = next(classifier.parameters(), None) if isinstance(classifier, nn.Module) else None
    return None if parameter is None else parameter.device


def check_classifier(classifier: object, name: str) -> None:
    """Refuse what is no callable, and a class in place of an instance; `name` is that of the argument."""
    if isinstance(classifier, type):
        raise RequestError(
            f"{name}: expected a callable on batches, got the class {classifier.__name__}; give an instance "
            f"with its weights, such as {classifier.__name__}(...)"
        )
    if not callable(classifier):
        given = "a model, such as load(RUN).model of a run"
        if isinstance(classifier, Mapping):
            given = "the network after network.load_state_dict(...)"
        raise RequestError(f"{name}: expected a callable on batches, got {type(classifier).__name__}; give {given}")


def in_float32(classifier: Classifier) -> Classifier:
    """Return a copy in float32 of a module with floating-point weights of another type; else what was given."""
    import torch

    if not isinstance(classifier, torch.nn.Module):
        return classifier
    types = {tensor.dtype for tensor in classifier.parameters() if tensor.is_floating_point()}
    return classifier if types <= {torch.float32} else copy.deepcopy(classifier).float()


def logits_of(output: object) -> Tensor:
    """Return the logits in a model's output: a tensor, an object with `.logits` or a mapping with "logits"."""
    from torch import Tensor

    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    kind = type(output).__name__
    advice = "return the logits"
    if isinstance(output, Mapping):
        kind = f"{kind} with the keys {', '.join(map(str, output))[:80]}"
    elif isinstance(output, tuple | list):
        advice = "wrap it: lambda x: model(x)[0], if the logits are its first element"
    elif kind == "ndarray":
        advice = "return torch.as_tensor(array)"
    raise RequestError(
        f"model: expected a tensor of logits, an object with .logits or a mapping with 'logits', got {kind}; {advice}"
    )


def channels_last(shape: Sequence[int]) -> bool:
    """Whether `shape` is probably that of an image [h, w, c] instead of [c, h, w]."""
    return len(shape) == 3 and shape[2] in (1, 3) and shape[0] not in (1, 3)


CHANNELS_FIRST = "images [h, w, c] must be [c, h, w]: for a batch use images.permute(0, 3, 1, 2)"


@contextmanager
def failures_reported(name: str, shape: Sequence[int]) -> Iterator[None]:
    """Turn what the code of a classifier, called `name`, raises for inputs of `shape` into a RequestError."""
    import torch

    try:
        yield
    except (RequestError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # a user's code may fail in any way
        problem = f"model: {name} fails on inputs of shape {list(shape)} ({named_error(error)})"
        advice = "give inputs of its shape (for folder:PATH, --image-size and --channels choose the shape)"
        if channels_last(shape):
            raise RequestError(f"{problem}; {CHANNELS_FIRST}") from error
        if re.search("half|bfloat16|double", str(error), re.IGNORECASE):
            advice = "let it cast inputs to the dtype of its weights, or use float32 (model.float(), precision fp32)"
        raise RequestError(f"{problem}; correct it, or {advice}") from error


def first_logits(classifier: Classifier, inputs: Tensor, name: str) -> Tensor:
    """Return the logits of `inputs` [n, ...]; refuse a classifier that fails or overwrites them."""
    import torch

    with failures_reported(name, inputs.shape[1:]), torch.no_grad(), evaluating(classifier):
        logits = logits_of(classifier(given := inputs.clone()))
    if not torch.equal(given, inputs):
        raise RequestError(
            "model: expected a classifier that leaves its input unchanged, got one that overwrites it; "
            "write x = (x - mean) / std instead of x.sub_(mean).div_(std) or x -= mean"
        )
    return logits


def check_logits(logits: Tensor, inputs: int, num_classes: int | None = None) -> None:
    """Refuse logits that are not real numbers, or not of shape [inputs, num_classes]; None stands for any number of
    classes above 1."""
    import torch

    if logits.dtype == torch.bool or logits.is_complex():
        raise RequestError(f"model: expected real numbers as logits, got {logits.dtype}; return floats")
    given = tuple(logits.shape)
    if len(given) == 2 and given[0] == inputs and given[1] == (num_classes or given[1]) and given[1] > 1:
        return
    expected = f"[{inputs}, {'classes' if num_classes is None else num_classes}]"
    advice = "return one row of logits per input"
    if given in ((inputs,), (inputs, 1)) and logits.is_floating_point():
        join = "cat" if len(given) == 2 else "stack"
        advice = (
            f"for one logit z of two classes return torch.{join}([torch.zeros_like(z), z], 1), for one probability p "
            f"torch.{join}([1 - p, p], 1)"
        )
    elif given in ((inputs,), (inputs, 1)):
        advice = "that is one class per input: return one score per class, such as one_hot(...).float()"
    elif len(given) == 2 and given[0] == inputs and num_classes is not None:
        advice = f"set num_classes to {given[1]}, the number of its outputs"
    raise RequestError(f"model: expected logits of shape {expected}, got {list(given)}; {advice}")


def refuse_nan(logits: Tensor) -> None:
    """Refuse logits of inputs without noise that are not numbers."""
    if bool(logits.isnan().any()):
        raise RequestError(
            "the classifier returned NaN for an input without noise, expected numbers; check its weights, or try "
            "precision fp32"
        )


MASKED = 30
"""Logits this many times the two largest are masks, such as -1e9: next to them all other differences look small."""


def unmasked(logits: Tensor) -> Tensor:
    """Return which of the `logits` [classes] are finite and no masks."""
    return logits.isfinite() & (logits.abs() <= MASKED * logits.topk(2).values.abs().max())


def below_largest(logits: Tensor) -> Tensor:
    """Return `logits` [..., classes] less the largest of each row."""
    largest = logits.amax(-1, keepdim=True)
    return logits - largest.where(largest.isfinite(), 0.0)


def scale_of(logits: Tensor) -> float:
    """Return the size of `logits` [..., classes]: the largest, or the largest distance below that of a row if this is
    less.

    Only differences between classes decide votes. Next to a constant in all logits, such as that of the
    log-likelihoods of a generative classifier, each of them would look small.
    """
    return min(float(values.nan_to_num().abs().max()) for values in (logits, below_largest(logits)))


def logits_under_noise(classifier: Classifier, images: Tensor, noise: Tensor) -> Tensor:
    """Compute the logits of images + noise[i] for all i in one forward pass: [num_noise, batch, classes]."""
    inputs = images + noise
    logits = logits_of(classifier(inputs.flatten(0, 1)))
    check_logits(logits, inputs.shape[0] * inputs.shape[1])
    return logits.view(*inputs.shape[:2], -1)


SMALLEST_PROBABILITY = 1e-20


def probabilities(logits: Tensor, inverse_temperature: float = 1.0) -> Tensor:
    """Compute the softmax of inverse_temperature * logits over the last dimension.

    Product and softmax are in float32 at least: half precision would lose small probabilities.
    """
    wide = _wide(logits)
    return (wide if inverse_temperature == 1.0 else wide * inverse_temperature).softmax(-1)


def log_probability(probability: Tensor) -> Tensor:
    """Compute log(max(p, 1e-20)), as in the published runs: for averaged probabilities, which have no logits."""
    return probability.clamp(min=SMALLEST_PROBABILITY).log()


def divergence_from_logits(target: Tensor, logits: Tensor) -> Tensor:
    """Compute KL(target || softmax(logits)) over the last dimension, in float32 at least.

    The logarithm of the softmax is computed from the logits: through a floored probability the gradient would vanish
    where it matters most, where `logits` give the target's classes less than 1e-20.
    """
    return (target * (log_probability(target) - _wide(logits).log_softmax(-1))).sum(-1)


def _wide(logits: Tensor) -> Tensor:
    """Convert logits of lower precision to float32."""
    import torch

    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def image_layout(classifier: Classifier) -> torch.memory_format:
    """Return the memory layout of the classifier's weights, which is the fastest one for its images."""
    import torch
    from torch import nn

    weights = classifier.parameters() if isinstance(classifier, nn.Module) else ()
    last = any(
        weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
        for weight in weights
    )
    return torch.channels_last if last else torch.contiguous_format
