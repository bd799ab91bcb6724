"""Probabilities from logits, their logarithms and divergences, as all methods and attacks compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor

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
