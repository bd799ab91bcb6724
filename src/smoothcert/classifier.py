"""What a classifier is: any callable from images to logits. Its evaluation mode, and probabilities from its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # records are read without torch
    import torch
    from torch import Tensor

Classifier = Callable[["Tensor"], "Tensor"]
"""Images in [0, 1], float, NCHW -> logits."""


@contextmanager
def evaluating(classifier: Classifier) -> Iterator[None]:
    """A module in eval mode (batch statistics fixed), each submodule's mode restored afterwards."""
    from torch import nn

    modules = list(classifier.modules()) if isinstance(classifier, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


SMALLEST_PROBABILITY = 1e-20


def probabilities(logits: Tensor, inverse_temperature: float = 1.0) -> Tensor:
    """Softmax of inverse_temperature * logits over the last dimension.

    In float32 at least, the product too: half precision would lose small probabilities.
    """
    wide = _wide(logits)
    return (wide if inverse_temperature == 1.0 else wide * inverse_temperature).softmax(-1)


def log_probability(probability: Tensor) -> Tensor:
    """log(max(p, 1e-20)): for averaged probabilities, which have no logits. As in the published runs."""
    return probability.clamp(min=SMALLEST_PROBABILITY).log()


def divergence_from_logits(target: Tensor, logits: Tensor) -> Tensor:
    """KL(target || softmax(logits)) over the last dimension, in float32 at least.

    The logarithm of the softmax comes from the logits themselves: through a floored probability the gradient would
    vanish where it matters most, where `logits` give the target's classes less than 1e-20.
    """
    return (target * (log_probability(target) - _wide(logits).log_softmax(-1))).sum(-1)


def _wide(logits: Tensor) -> Tensor:
    """The logits in float32 at least."""
    import torch

    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def image_layout(classifier: Classifier) -> torch.memory_format:
    """How images are best laid out for `classifier`: as its weights are."""
    import torch
    from torch import nn

    weights = classifier.parameters() if isinstance(classifier, nn.Module) else ()
    last = any(
        weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
        for weight in weights
    )
    return torch.channels_last if last else torch.contiguous_format
