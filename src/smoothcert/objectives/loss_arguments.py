"""Checks of what users pass to the losses: each refusal is a RequestError of one line."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from smoothcert.classifier import Classifier, evaluating, logits_of
from smoothcert.errors import RequestError


def check_batch(model: object, inputs: Tensor, labels: Tensor, targets: Tensor | None) -> None:
    if not callable(model):
        raise RequestError(f"model: expected a callable, got {_described(model)}; pass the model, not its output")
    _check_tensor("inputs", inputs)
    if not inputs.is_floating_point() or inputs.ndim < 2 or not len(inputs):
        raise RequestError(
            f"inputs: expected floating-point numbers [batch, ...], got {_described(inputs)}; "
            "convert images to [0, 1] by x.float() / 255"
        )
    _check_labels(labels, inputs.shape[0], inputs.device)
    if targets is not None and (not isinstance(targets, Tensor) or targets.ndim != 2 or len(targets) != len(inputs)):
        raise RequestError(f"targets: expected votes [{len(inputs)}, classes], got {_described(targets)}")


def check_draws(
    draws: Mapping[str, tuple[Tensor | None, Sequence[int]]], generator: torch.Generator | None, device: torch.device
) -> None:
    """Refuse a generator on another device, and given draws of another shape than the one next to them."""
    if not isinstance(generator, torch.Generator | None):
        raise RequestError(
            f"generator: expected a torch.Generator or None, got {generator!r}; use torch.Generator().manual_seed(3)"
        )
    if generator is not None and generator.device.type != device.type:
        raise RequestError(
            f"generator: expected one on {device.type}, where the inputs are, got one on {generator.device.type}; "
            "make it with torch.Generator(device)"
        )
    for name, (draw, shape) in draws.items():
        given = list(draw.shape) if isinstance(draw, Tensor) else type(draw).__name__
        if draw is not None and given != list(shape):
            raise RequestError(f"{name}: expected the shape {list(shape)}, got {given}")


def check_noisy_logits(noisy_logits: Tensor, name: str = "noisy_logits") -> None:
    _check_tensor(name, noisy_logits)
    if not noisy_logits.is_floating_point() or noisy_logits.ndim != 3:
        raise RequestError(
            f"{name}: expected floating-point numbers [num_noise, batch, classes], got {_described(noisy_logits)}; "
            "stack the logits of all noise samples"
        )


def check_logits(noisy_logits: Tensor, labels: Tensor) -> None:
    check_noisy_logits(noisy_logits)
    _check_labels(labels, noisy_logits.shape[1], noisy_logits.device)
    classes = noisy_logits.shape[2]
    if _readable(labels) and int(labels.max()) >= classes:
        raise RequestError(f"labels: expected classes from 0 to {classes - 1}, got {_range(labels)}; renumber them")


def evaluated_teacher(teacher: object) -> Classifier:
    """Return a teacher that is in eval mode during each call, so that its batch statistics stay as they are."""
    if not callable(teacher):
        given = "none" if teacher is None else type(teacher).__name__
        raise RequestError(f"teacher: expected a trained classifier, got {given}; pass teacher=model")

    def answers(inputs: Tensor) -> Tensor:
        with evaluating(teacher):
            return logits_of(teacher(inputs))

    return answers


@contextmanager
def explained_labels(labels: Tensor) -> Iterator[None]:
    """Turn torch's error about a label that the model has no output for into a RequestError."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error):
            raise
        raise RequestError(
            f"labels: expected classes from 0 on, one per output of the model, got {_range(labels)}; renumber them, or "
            "give the model more outputs"
        ) from error


def warn_about_sigma(inputs: Tensor, text: str) -> None:
    """Give the warning `text` about sigma if the inputs are images in [0, 1]."""
    if inputs.ndim == 4 and _values_known(inputs) and _in_unit_interval(inputs):
        warnings.warn(text, stacklevel=4)


def warn_about_clipping(inputs: Tensor, name: str) -> None:
    """Warn if inputs are outside [0, 1], to which the adversarial examples of the method `name` are clipped."""
    if _values_known(inputs) and not _in_unit_interval(inputs):
        # The text is the same for all batches: then Python shows it once.
        warnings.warn(
            f"inputs: expected values in [0, 1], got others, and the attack of {name} clips to [0, 1]; put the "
            "normalisation into the model",
            stacklevel=4,
        )


def _values_known(inputs: Tensor) -> bool:
    """Whether this is neither a captured nor a compiled step, whose values are not known."""
    capturing = inputs.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return not (capturing or inputs.is_meta or torch.compiler.is_compiling())


def _in_unit_interval(inputs: Tensor) -> bool:
    """Waits for the device."""
    low, high = (float(end) for end in torch.aminmax(inputs.detach()))
    return low >= 0 and high <= 1


def _readable(labels: Tensor) -> bool:
    """Whether their values are at hand: on another device the check would wait for it."""
    return labels.device.type == "cpu" and len(labels) > 0 and not torch.compiler.is_compiling()


def _range(labels: Tensor) -> str:
    return f"{int(labels.min())} to {int(labels.max())}"


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise RequestError(f"{name}: expected a tensor, got {type(value).__name__}; use torch.as_tensor")


def _check_labels(labels: Tensor, batch: int, device: torch.device) -> None:
    _check_tensor("labels", labels)
    integers = not labels.is_floating_point() and not labels.is_complex()
    if not integers or labels.shape != (batch,) or labels.device != device:
        raise RequestError(
            f"labels: expected integer classes [{batch}] on {device}, got {_described(labels)}; "
            "pass one class per input"
        )
    if _readable(labels) and int(labels.min()) < 0:  # torch leaves -100 out of a cross-entropy
        raise RequestError(f"labels: expected classes from 0 on, got {_range(labels)}; leave such images out")


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
