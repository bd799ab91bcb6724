"""Probabilities from logits, their logarithms and divergences, as all methods and attacks compute them."""

import torch
from torch import Tensor

SMALLEST_PROBABILITY = 1e-20


def probabilities(logits: Tensor, inverse_temperature: float = 1.0) -> Tensor:
    """Softmax of inverse_temperature * logits over the last dimension.

    In float32 at least, the product too: half precision would lose small probabilities.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide if inverse_temperature == 1.0 else wide * inverse_temperature).softmax(-1)


def log_probability(probability: Tensor) -> Tensor:
    """log(max(p, 1e-20)): for averaged probabilities, which have no logits. As in the published runs."""
    return torch.log(probability.clamp(min=SMALLEST_PROBABILITY))


def divergence_from_logits(target: Tensor, logits: Tensor) -> Tensor:
    """KL(target || softmax(logits)) over the last dimension, in float32 at least.

    The logarithm of the softmax comes from the logits themselves: through a floored probability the gradient would
    vanish where it matters most, where `logits` give the target's classes less than 1e-20.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (target * (log_probability(target) - wide.log_softmax(-1))).sum(-1)
