"""Gradient ascent on the loss of the smoothed classifier (Salman et al. 2019, https://arxiv.org/abs/1906.04584)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from smoothcert.attacks.l2 import Classifier, attacked, project, unit
from smoothcert.probability import log_probability, probabilities


def smoothed_loss_and_gradient(
    classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-log pbar_y of each image, its gradient with respect to the image, and pbar [batch, classes].

    pbar = mean_i F(x + noise[i]), all noises in one forward pass; noise [num_noise, batch, ...].
    """
    with torch.enable_grad(), attacked(classifier):
        moved = images.detach().requires_grad_(True)
        logits = classifier((moved + noise).flatten(0, 1)).view(*noise.shape[:2], -1)
        average = probabilities(logits).mean(0)
        chosen = average.gather(1, labels.unsqueeze(1)).squeeze(1)
        loss = -log_probability(chosen)
        (gradient,) = torch.autograd.grad(loss.sum(), moved)
    return loss.detach(), gradient, average.detach()


def smoothed_pgd(
    classifier: Classifier,
    images: Tensor,
    labels: Tensor,
    noise: Tensor,
    *,
    steps: int,
    step_size: float | Tensor,
    max_norm: float | Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the iterates x_1, ..., x_steps of normalised ascent on -log pbar_y, each in [0, 1].

    With `max_norm` every iterate is projected on that ball around `images` before the clamp (which only brings it
    closer). The classifier is in its own mode whenever an iterate is handed out.
    """
    current = images
    for _ in range(steps):
        _, gradient, _ = smoothed_loss_and_gradient(classifier, current, labels, noise)
        current = current + step_size * unit(gradient)
        if max_norm is not None:
            current = project(current, images, max_norm)
        current = current.clamp(0, 1)
        yield current
