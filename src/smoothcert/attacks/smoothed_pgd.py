"""Gradient ascent on the loss of the smoothed classifier (Salman et al. 2019, https://arxiv.org/abs/1906.04584)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from smoothcert.attacks.l2 import input_gradient, project, unit
from smoothcert.classifier import Classifier, log_probability, logits_under_noise, probabilities


def smoothed_loss_and_gradient(
    classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-log pbar_y of each image, its gradient with respect to the image, and pbar [batch, classes].

    pbar = mean_i F(x + noise[i]), all noise in one forward pass; noise [num_noise, batch, ...]. Parameters get no
    gradient.
    """

    def total_loss(moved: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        average = probabilities(logits_under_noise(classifier, moved, noise)).mean(0)
        chosen = average.gather(1, labels.unsqueeze(1)).squeeze(1)
        loss = -log_probability(chosen)
        return loss.sum(), (loss, average)

    gradient, (loss, average) = input_gradient(classifier, total_loss, images)
    return loss, gradient, average


def ascend(
    classifier: Classifier,
    current: Tensor,
    images: Tensor,
    labels: Tensor,
    noise: Tensor,
    step_size: float | Tensor,
    max_norm: float | Tensor | None,
) -> Tensor:
    """One step of `smoothed_pgd` from `current`."""
    _, gradient, _ = smoothed_loss_and_gradient(classifier, current, labels, noise)
    moved = (current + step_size * unit(gradient)).clamp(0, 1)
    # Projection shortens the offset from an image in [0, 1], so the result stays in [0, 1].
    return moved if max_norm is None else project(moved, images, max_norm)


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

    Each step is clamped to [0, 1] and, with `max_norm`, then projected on that ball around `images`: the order of the
    published runs. An image whose gradient is exactly zero stays where it is. The classifier is in its own mode
    whenever an iterate is handed out.
    """
    if torch.compiler.is_compiling():
        # The loop itself stays out of a compiled loss: then `ascend` is compiled once, not once a step.
        torch._dynamo.graph_break()
    current = images.clone()  # not `images` itself: a compiled `ascend` would be compiled again for that case
    for _ in range(steps):
        current = ascend(classifier, current, images, labels, noise, step_size, max_norm)
        yield current
