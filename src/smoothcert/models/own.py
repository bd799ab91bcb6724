"""A user's own network, named as `package.module:function`: imported and called, never registered."""

import importlib
import inspect
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from smoothcert.errors import RequestError
from smoothcert.modes import Classifier, evaluating


def is_code(name: str) -> bool:
    """Whether a model's name is a reference to code rather than an entry of MODELS."""
    return ":" in name


def own_model(reference: str, num_classes: int) -> Classifier:
    """What `package.module:function` returns: a module or any callable from images in [0, 1] to logits.

    The function is called with `num_classes` if it has a parameter of that name, else without arguments.
    """
    name, _, attribute = reference.partition(":")
    # Looked for where the command is called, too, but last: a file there must not stand in for an installed package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function: Any = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError, NameError) as error:
        raise RequestError(
            f"model: expected package.module:function, got {reference} ({error}); "
            "run where Python finds the module, or set PYTHONPATH"
        ) from error
    if not callable(function):
        raise RequestError(f"model: expected {reference} to be a function, got {type(function).__name__}")
    takes_classes = "num_classes" in inspect.signature(function).parameters
    try:
        model = function(num_classes=num_classes) if takes_classes else function()
    except Exception as error:  # a user's code may fail in any way
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise RequestError(
            f"model: {reference}() failed ({reason}); it is called with num_classes, if it takes that, and nothing else"
        ) from error
    if not callable(model):
        raise RequestError(
            f"model: expected {reference}() to return a module or a callable, got {type(model).__name__}"
        )
    found: Classifier = model
    return found


def check_outputs(model: Classifier, name: str, shape: tuple[int, int, int], num_classes: int) -> None:
    """Refuse a network that does not give [n, num_classes] for two black images of `shape`."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    try:
        with torch.no_grad(), evaluating(model):
            logits = model(torch.zeros(2, *shape, device=parameter.device if parameter is not None else None))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RequestError(f"model: {name} fails on images of shape {list(shape)} ({reason})") from error
    given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if given != [2, num_classes]:
        raise RequestError(
            f"model: {name} gives {given} for 2 images, expected logits [2, {num_classes}]: "
            f"the data has {num_classes} classes"
        )
