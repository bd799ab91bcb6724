"""Weights in the files of other programs: how they are read without running code, found, and matched by name."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import named_error
from smoothcert.training.run_folder import check_file

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
        if isinstance(error, LookupError):  # its text is a number of the unpickler
            reason = "its bytes cannot be decoded"
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
        return key, state, [f"weights: read from {key}; {file.name}:{others[0]} reads {others[0]} instead"]
    named = [str(name) for name in contents if _state_dict(contents[name]) is not None]
    if wanted is not None:
        given = f"{', '.join(named)}; choose one of the keys" if named else "none; give another file"
        if _state_dict(contents) is not None:
            given = f"a file that holds one network; give {file.name} without :{wanted}"
        raise RequestError(f"{file}: expected weights under {wanted}, got {given}")
    raise RequestError(
        f"{file}: expected weights under {', '.join(CONTAINERS)} or a bare state dict, got a dict with the keys "
        f"{', '.join(map(str, list(contents)[:5])) or 'none'}; give "
        + (f"the key of the weights, such as {file.name}:{named[0]}" if named else "another file")
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


def refuse_not_finite(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise a WorkError if a weight is NaN or infinite: the logits would be, too."""
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WorkError(
                f"{file}: expected finite weights, got NaN or infinite ones in {name}; download the file again or give "
                "a checkpoint of an earlier epoch"
            )


def matched_by_name(names: Sequence[str], state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str, list[str]]:
    """The tensors of `state` whose names are `names` behind one prefix, this prefix, and the names that are missing.

    The prefix (`module.`, `1.`, `1.module.`, ..., or none) is the one that most names have. Counters may be missing.
    """
    first = names[0] if names else ""  # a network may have no weights
    prefixes = {name.removesuffix(first) for name in state if name.endswith("." + first)} | {""}
    prefix = max(prefixes, key=lambda prefix: (sum(prefix + name in state for name in names), -len(prefix)))
    matched = {name: state[prefix + name] for name in names if prefix + name in state}
    return matched, prefix, [name for name in names if name not in matched and not name.endswith(COUNTER)]


def describe_problems(names: Mapping[str, Sequence[str]]) -> list[str]:
    """A text such as "2 missing (a, b)" for each kind of problem with tensors."""
    return [
        f"{len(some)} {kind} ({', '.join(some[:3])}{', ...' if len(some) > 3 else ''})"
        for kind, some in names.items()
        if some
    ]
