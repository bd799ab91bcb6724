"""Check the inputs of a smoothed classifier, and name what the noise of each is drawn from."""

import hashlib
import operator
import secrets
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from smoothcert.errors import RequestError

Seeds = list[tuple[int, int]]
"""(seed, number) of each input; inputs with the same pair share their noise."""


def checked_inputs(x: object, *, strict: bool) -> Tensor:
    """`x` in float32 without a gradient, or a RequestError that says what to change."""
    if not isinstance(x, Tensor):
        advice = "use torch.as_tensor, or certify_loader for a DataLoader"
        if isinstance(x, list | tuple) and any(isinstance(part, Tensor) for part in x):
            advice = "use torch.stack for a list of images"
        raise RequestError(f"inputs: expected a tensor [n, ...], got {type(x).__name__}; {advice}")
    x = x.detach()
    if not x.is_floating_point():
        raise RequestError(
            f"inputs: expected floats, images in [0, 1], got {x.dtype}; divide bytes by 255: x.float() / 255"
        )
    if x.ndim < 2:
        raise RequestError(
            f"inputs: expected a batch [n, ...], got shape {list(x.shape)}; add a batch dimension with x[None]"
        )
    if x.numel() == 0:
        raise RequestError(f"inputs: expected at least one, got shape {list(x.shape)}")
    if not bool(x.isfinite().all()):
        raise RequestError("inputs: expected finite values, got NaN or infinity")
    low, high = float(x.min()), float(x.max())
    if (low < 0 or high > 1) and (strict or x.ndim == 4):
        advice = "normalisation belongs inside the classifier, after the noise"
        if low >= 0 and high > 2:
            advice = "divide bytes by 255; the classifier may multiply them again, after the noise"
        message = f"inputs: expected values in [0, 1], got [{low:.3g}, {high:.3g}]; {advice}"
        if strict:
            raise RequestError(message)
        warnings.warn(f"{message}; sigma and radii are in units of these values", stacklevel=4)
    return x.float()


def check_integer(name: str, value: object, least: int) -> None:
    """Refuse an argument, called `name`, that is no integer of at least `least`; those of numpy are integers, too."""
    if not hasattr(value, "__index__") or operator.index(value) < least:
        raise RequestError(f"{name}: expected an integer of at least {least}, got {value!r}")


def checked_indices(indices: Iterable[Any]) -> list[int]:
    """`indices` as a list of integers; anything else is refused."""
    listed = indices.tolist() if isinstance(indices, Tensor) else indices
    numbers = list(listed) if isinstance(listed, Iterable) else [None]
    if not all(hasattr(number, "__index__") and not isinstance(number, bool) for number in numbers):
        given = f"{indices.dtype} {list(indices.shape)}" if isinstance(indices, Tensor) else f"{indices!r:.60}"
        raise RequestError(f"indices: expected integers >= 0, such as range(10) or [3, 5], got {given}")
    return [operator.index(number) for number in numbers]


def noise_seeds(inputs: Tensor, seed: int | None, indices: Sequence[int] | Tensor | None) -> Seeds:
    """What the noise of each input is drawn from: (seed, index), or (seed, hash of its content) without indices."""
    if seed is not None:
        check_integer("seed", seed, 0)
    if indices is not None:
        numbers = checked_indices(indices)
        if len(set(numbers)) != len(inputs) or len(numbers) != len(inputs) or min(numbers) < 0:
            raise RequestError(
                f"indices: expected {len(inputs)} different integers >= 0, one per input, got {numbers[:10]}"
            )
    elif seed is None:
        numbers = list(range(len(inputs)))
    else:
        contents = inputs.cpu().contiguous().numpy()
        hashes = (hashlib.sha256(str(content.shape).encode() + content.tobytes()).digest() for content in contents)
        numbers = [2**128 + int.from_bytes(digest[:16], "little") for digest in hashes]  # no index is as large
    seed = secrets.randbits(63) if seed is None else operator.index(seed)
    return [(seed, number) for number in numbers]
