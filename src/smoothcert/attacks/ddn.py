"""Decoupled direction and norm (Rony et al. 2019, https://arxiv.org/abs/1811.09600) on the smoothed classifier."""

import math

import torch
from torch import Tensor

from smoothcert.attacks.l2 import norms, unit
from smoothcert.attacks.smoothed_pgd import smoothed_loss_and_gradient
from smoothcert.classifier import Classifier

FIRST_NORM, FIRST_STEP, LAST_STEP = 1.0, 1.0, 0.01


def ddn(
    classifier: Classifier,
    images: Tensor,
    labels: Tensor,
    noise: Tensor,
    *,
    steps: int,
    max_norm: float | Tensor,
    gamma: float = 0.05,
) -> Tensor:
    """Return the closest misclassified point of each image, or the last point if there is none; in [0, 1].

    Each step moves along the unit gradient by a cosine-annealed length, then sets the norm of the whole offset: a
    little smaller (1 - gamma) where the smoothed prediction is wrong, larger (1 + gamma) where it is not, at most
    `max_norm`.
    """
    limit = torch.as_tensor(max_norm, device=images.device, dtype=images.dtype)
    norm = torch.full_like(norms(images), FIRST_NORM)
    offset = torch.zeros_like(images)
    best = torch.zeros_like(images)
    best_norm = torch.full_like(norm, math.inf)
    for step in range(steps):
        _, gradient, average = smoothed_loss_and_gradient(classifier, images + offset, labels, noise)
        fooled = (average.argmax(1) != labels).view_as(norm)
        length = norms(offset)
        closer = fooled & (length < best_norm)
        best, best_norm = torch.where(closer, offset, best), torch.where(closer, length, best_norm)
        step_size = LAST_STEP + (FIRST_STEP - LAST_STEP) * (1 + math.cos(math.pi * step / steps)) / 2
        offset = offset + step_size * unit(gradient)
        norm = torch.minimum(torch.where(fooled, norm * (1 - gamma), norm * (1 + gamma)), limit)
        offset = offset * norm / norms(offset).clamp(min=1e-12)
        offset = (images + offset).clamp(0, 1) - images
    return (images + torch.where(best_norm.isfinite(), best, offset)).clamp(0, 1)
