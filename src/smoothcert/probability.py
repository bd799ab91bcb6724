"""Probabilities from logits, and their logarithms, as all methods and attacks take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor

SMALLEST_PROBABILITY = 1e-20


def probabilities(logits: Tensor, inverse_temperature: float = 1.0) -> Tensor:
    """Softmax of inverse_temperature * logits over the last dimension.

    In float32 at least, the product too: half precision would lose small probabilities.
    """
    import torch

    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide if inverse_temperature == 1.0 else wide * inverse_temperature).softmax(-1)


def log_probability(probability: Tensor) -> Tensor:
    """log(max(p, 1e-20)), as in the published runs."""
    return probability.clamp(min=SMALLEST_PROBABILITY).log()
