"""Attacks on each noise: in a ball around it (Jeong et al. 2023), or on the sphere of its norm (Sun et al. 2024)."""

import torch
from torch import Tensor

from smoothcert.attacks.l2 import input_gradient, norms, project, unit
from smoothcert.classifier import Classifier, divergence_from_logits, logits_of

SMALLEST_GRADIENT = 1e-15
"""The smallest norm that a gradient is divided by; below it, squares underflow in float32."""


def with_moments_of(first: Tensor, moved: Tensor) -> Tensor:
    """Return mu + rho (moved - mean(moved)) / rms(moved), mu and rho the mean and root mean square of `first`.

    As in the published runs, the root mean square of `moved` is taken before its mean is subtracted.
    """
    pixels = tuple(range(1, first.ndim))
    scale = norms(first) / norms(moved).clamp(min=1e-12)
    return first.mean(pixels, keepdim=True) + scale * (moved - moved.mean(pixels, keepdim=True))


def noise_ball_step(
    classifier: Classifier, current: Tensor, first: Tensor, images: Tensor, targets: Tensor, steps: int, epsilon: float
) -> Tensor:
    """One step of `noise_ball_attack` from the noise `current` [n, ...], which started as `first`."""

    def total_loss(moved: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return divergence_from_logits(targets, logits_of(classifier(images + moved))).sum(), ()

    gradient, _ = input_gradient(classifier, total_loss, current)
    moved = project(current + 2 * epsilon / steps * unit(gradient), first, epsilon)
    return with_moments_of(first, moved)


def noise_ball_attack(
    classifier: Classifier, images: Tensor, targets: Tensor, noise: Tensor, *, steps: int, epsilon: float
) -> Tensor:
    """Move each noise sample of [num_noise, batch, ...] along the gradient of KL(target || F(x + delta)).

    A step has the length 2 epsilon / steps. It is projected on the ball of radius `epsilon` around the first noise,
    whose mean and root mean square over the pixels are then restored by `with_moments_of`. targets [batch, classes].
    """
    copies = len(noise)
    first = noise.flatten(0, 1)
    points = images.expand(copies, *images.shape).flatten(0, 1)
    every_target = targets.expand(copies, *targets.shape).flatten(0, 1)
    current = first.clone()  # see `smoothed_pgd`
    for _ in range(steps):
        if torch.compiler.is_compiling():
            # The loop itself stays out of a compiled loss: then a step is compiled once.
            torch._dynamo.graph_break()
        current = noise_ball_step(classifier, current, first, points, every_target, steps, epsilon)
    return current.view_as(noise)


def sphere_step(
    classifier: Classifier, noise: Tensor, images: Tensor, labels: Tensor, length: Tensor, step_size: float | Tensor
) -> Tensor:
    """One step of `sphere_attack` on noise [n, ...], whose norms are set to `length`."""

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
    """Move each noise sample of [num_noise, batch, ...] along the gradient of CE(z(x + delta), y); norms are kept.

    In each step, a noise with which the image is misclassified stays as it is. The others move by `step_size` along
    their unit gradient and are rescaled to their first norm.
    """
    copies = len(noise)
    flat = noise.flatten(0, 1)
    points = images.expand(copies, *images.shape).flatten(0, 1)
    every_label = labels.expand(copies, -1).flatten()
    length = norms(flat)
    current = flat.clone()  # see `smoothed_pgd`
    for _ in range(steps):
        if torch.compiler.is_compiling():
            # The loop itself stays out of a compiled loss: then a step is compiled once.
            torch._dynamo.graph_break()
        current = sphere_step(classifier, current, points, every_label, length, step_size)
    return current.view_as(noise)
