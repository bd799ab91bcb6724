"""Users' code, named as `package.module:name` or `FILE.py:name`: how it is imported, and how it builds a network."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from smoothcert.classifier import Classifier, check_logits, device_of, first_logits, in_float32
from smoothcert.errors import RequestError
from smoothcert.io.files import check_regular_file
from smoothcert.io.text import did_you_mean, named_error
from smoothcert.models.hub import is_hub, load_hub


def is_code(name: str) -> bool:
    """Tell a reference to code from the name of an entry of MODELS."""
    return ":" in name


def is_own_code(name: str) -> bool:
    """Whether `name` is a user's code, which runs only if the user names it, and not `hf:NAME` or `timm:NAME`."""
    return is_code(name) and not is_hub(name)


def own_model(reference: str, num_classes: int | None) -> Classifier:
    """Call `package.module:function`, which returns a module or any callable from images in [0, 1] to logits.

    The function is called with `num_classes` if it has a parameter of that name, else without arguments. It must be a
    function or a class that is written in Python: built-in ones are refused, because none of them builds a network and
    some of them end the process (`os:abort`). Everything that the import or the call raises becomes a RequestError,
    `SystemExit` too; only Ctrl-C passes. `hf:NAME` and `timm:NAME` are published classifiers (see `load_hub`).
    """
    if is_hub(reference):
        return load_hub(reference)
    function = import_code(reference, "model", "function")
    if not callable(function):
        raise RequestError(
            f"model: expected {reference} to be a function, got {type(function).__name__}; write a function that "
            "returns the network"
        )
    if not _is_python(function):
        raise RequestError(
            f"model: expected {reference} to be a function or a class written in Python that builds the network, "
            f"got {type(function).__name__}; write a function that returns it"
        )
    with reporting_failures(reference, "model", "num_classes, if it takes that,"):
        takes_classes = "num_classes" in inspect.signature(function).parameters
        if takes_classes and num_classes is None:
            raise RequestError(
                f"model: {reference} takes num_classes, which is not known; name the classes with --classes FILE, or "
                "a data set that has them with --dataset NAME"
            )
        model = function(num_classes=num_classes) if takes_classes else function()
    if not callable(model):
        raise RequestError(
            f"model: expected {reference}() to return a module or a callable, got {type(model).__name__}; return the "
            "network"
        )
    refuse_without_weights(model, reference)
    return in_float32(model)


def check_own_code(name: str) -> None:
    """Import a network's code that a request names, before images are read: a wrong name is reported at once."""
    if is_own_code(name):
        import_code(name, "model", "function")


@contextmanager
def reporting_failures(
    reference: str, field: str, arguments: str, passed: tuple[type[Exception], ...] = (RequestError,)
) -> Iterator[None]:
    """Turn everything that a call of a user's code raises into a RequestError, but Ctrl-C and what is `passed`.

    `field` and `arguments` are for the message: the field of the recipe, and what the code is called with.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except passed:
        raise
    except BaseException as error:  # a user's code may fail in any way
        raise RequestError(
            f"{field}: {reference}() failed ({named_error(error)}); it is called with {arguments} and nothing else"
        ) from error


def as_module(network: Classifier, reference: str, field: str) -> nn.Module:
    """Return the network that `reference` built; refuse one that is not a torch module."""
    if not isinstance(network, nn.Module):
        raise RequestError(f"{field}: expected {reference} to return a torch module, got {type(network).__name__}")
    return network


def refuse_without_weights(model: Classifier, name: str) -> None:
    """Refuse a network on the device meta, which has shapes and no numbers."""
    if device_of(model) == torch.device("meta"):
        raise RequestError(f"model: expected {name} with weights, got one on the device meta, without any; load them")


def import_code(reference: str, field: str, kind: str) -> Any:
    """Import what `package.module:name` or `FILE.py:name` refers to; a file is imported from its folder.

    `field` and `kind` are for messages: the field of the recipe, and what the code is expected to be.
    """
    name, _, attribute = reference.rpartition(":")
    if not name or not attribute:
        raise RequestError(
            f"{field}: expected package.module:{kind} or FILE.py:{kind}, got {reference}; "
            f"add the name of the {kind.lower()} after a colon"
            + ("; weights in a file are --init FILE" if field == "model" else "")
        )
    try:
        module = _import_file(Path(name), field) if name.endswith(".py") else _import(name)
        found = getattr(module, attribute, None)
    except (KeyboardInterrupt, RequestError):
        raise
    except BaseException as error:  # the module is a user's code, which may fail in any way
        if name.endswith(".py"):
            place = line_in(str(Path(name).expanduser().resolve()), error)
            advice = f"install the module or set PYTHONPATH; code of a package is package.module:{kind}"
            advice = advice if isinstance(error, ImportError) else "correct it"
            raise RequestError(f"{field}: {name} failed{place} ({named_error(error)}); {advice}") from error
        raise RequestError(
            f"{field}: expected package.module:{kind} or FILE.py:{kind}, got {reference} ({named_error(error)}); "
            "run where Python finds the module, or set PYTHONPATH"
        ) from error
    if found is None:
        names = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        hint = did_you_mean(attribute, sorted(names), "correct the name")
        raise RequestError(f"{field}: expected a {kind.lower()} {attribute} in {name}, got none; {hint}")
    return found


def code_digest(code: Any) -> str | None:
    """SHA-256 of the file that defines a class or a function, as it was imported; None in a notebook or a script."""
    while isinstance(code, functools.partial):
        code = code.func
    module = sys.modules.get(code.__module__)
    if module is None or module.__name__ == "__main__":
        return None
    try:
        text = vars(module).get("__source__") or Path(str(module.__file__)).read_bytes()
    except (AttributeError, OSError):
        return None
    return hashlib.sha256(text).hexdigest()


def line_in(file: str, error: BaseException) -> str:
    """Where in a user's `file` the error was raised, as " in line 5"; empty if it was elsewhere."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""


def _import(name: str) -> ModuleType:
    # The current folder is searched too, but last: a file in it must not replace an installed package.
    _search_last(os.getcwd())
    return importlib.import_module(name)


def _import_file(path: Path, field: str) -> ModuleType:
    """Import the file `path`, which can import modules next to it; again only if its text has changed."""
    path = path.expanduser().resolve()
    check_regular_file(path)
    if not path.exists():
        raise RequestError(f"{field}: expected a Python file, got {path}, which does not exist; correct the path")
    _search_last(str(path.parent))
    # The module gets a unique name: a file called torch.py must not replace torch.
    name = f"smoothcert_user_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    text = path.read_bytes()
    if name in sys.modules and sys.modules[name].__dict__.get("__source__") == text:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise RequestError(f"{field}: expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by its name
    # Not by the loader, which takes stored bytecode of a text with the same length that was written in the same second.
    exec(compile(text, path, "exec", dont_inherit=True), vars(module))
    vars(module)["__source__"] = text  # only now: a module that failed is imported again
    return module


def _search_last(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _is_python(function: Any) -> bool:
    """Tell a Python function, method or class, perhaps wrapped or partly applied, from built-in functions."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return inspect.isfunction(function) or inspect.ismethod(function) or inspect.isclass(function)


def check_outputs(
    model: Classifier,
    name: str,
    shape: tuple[int, int, int],
    num_classes: int,
    device: torch.device | None = None,
) -> None:
    """Refuse a network that does not return logits [2, num_classes] for two grey images of `shape`.

    The images are on the device of its weights, or on `device` if it is a callable.
    """
    refuse_without_weights(model, name)
    images = torch.full((2, *shape), 0.5, dtype=torch.float32, device=device_of(model) or device)
    logits = first_logits(model, images, name)
    check_logits(logits, 2)
    given = list(logits.shape)
    if given != [2, num_classes]:
        more = len(given) == 2 and given[1] > num_classes
        raise RequestError(
            f"model: {name} gives {given} for 2 images, expected logits [2, {num_classes}], one per class of the data; "
            + ("name the classes of all outputs: --classes FILE" if more else "change the network")
        )
