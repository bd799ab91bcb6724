"""An attack on each noise separately, on the sphere of its norm (Sun et al. 2024)."""

import torch
from torch import Tensor

from smoothcert.attacks.l2 import Classifier, input_gradient, norms
from smoothcert.classifier import logits_of

SMALLEST_GRADIENT = 1e-15
"""The smallest norm that a gradient is divided by; below it, squares underflow in float32."""


def sphere_step(
    classifier: Classifier, noise: Tensor, images: Tensor, labels: Tensor, length: Tensor, step_size: float | Tensor
) -> Tensor:
    """One step of `sphere_attack` on noises [n, ...], whose norm is set to `length`."""

    def total_loss(moved: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        logits = logits_of(classifier(images + moved))
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), (logits,)

    gradient, (logits,) = input_gradient(classifier, total_loss, noise)
    moved = noise + step_size * gradient / norms(gradient).clamp(min=SMALLEST_GRADIENT)
    moved = moved * (length / norms(moved).clamp(min=SMALLEST_GRADIENT))
    wrong = (logits.argmax(-1) != labels).view_as(length)
    return torch.where(wrong, noise, moved)


def sphere_attack(
    classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, *, steps: int, step_size: float | Tensor
) -> Tensor:
    """Move each of the noises [num_noise, batch, ...] along the gradient of CE(z(x + delta), y); norms are kept.

    In each step, a noise with which the image is misclassified stays as it is. The others move by `step_size` along
    their unit gradient and are rescaled to their first norm.
    """
    copies, flat = len(noise), noise.flatten(0, 1)
    points = images.expand(copies, *images.shape).flatten(0, 1)
    every_label, length = labels.expand(copies, -1).flatten(), norms(flat)
    current = flat.clone()  # see `smoothed_pgd`
    for _ in range(steps):
        if torch.compiler.is_compiling():
            # The loop itself stays out of a compiled loss: then a step is compiled once.
            torch._dynamo.graph_break()
        current = sphere_step(classifier, current, points, every_label, length, step_size)
    return current.view_as(noise)
