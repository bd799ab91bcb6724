"""Probabilities from logits, and their logarithms, as all methods and attacks take them."""

import torch
from torch import Tensor

SMALLEST_PROBABILITY = 1e-20


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, in float32 at least: half precision would lose small probabilities."""
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def log_probability(probability: Tensor) -> Tensor:
    """log(max(p, 1e-20)), as in the published runs."""
    return torch.log(probability.clamp(min=SMALLEST_PROBABILITY))
