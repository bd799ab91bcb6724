"""MACER: maximise the certified radius (Zhai et al. 2020, https://arxiv.org/abs/2001.02378).

    Lnat = -log(mean_i F_y(x + delta_i) + 1e-10)
    q    = mean_i softmax(beta * z(x + delta_i)), its two largest q1 > q2;  R = Phi^-1(q1) - Phi^-1(q2)
    Lrob = sigma / 2 * (gamma - R)  where argmax q = y, R is finite and R <= gamma;  0 elsewhere
    loss = (sum Lnat + lambda * sum Lrob) / batch

Images with R > gamma are dropped, not clamped. The published MNIST runs and CIFAR-10 at sigma 1.0 keep lambda at 0
until the first learning-rate drop (`deferred`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from smoothcert.classifier import probabilities
from smoothcert.io.text import counted
from smoothcert.objectives.base import Classifier, LossTerms, Objective, Progress, logits_under_noise

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class Macer(Objective):
    """Maximise a differentiable certified radius; all noise samples of a whole batch are in one step."""

    name: ClassVar[str] = "macer"
    chunked: ClassVar[bool] = False

    num_noise: int = Field(default=16, ge=1, description="noisy copies of an image in a step (m)")
    weight: float = Field(default=16.0, ge=0, description="weight of the robustness term (lambda)")
    gamma: float = Field(
        default=8.0,
        gt=0,
        description="images with a larger radius (in units of sigma / 2) do not count in the robustness term",
    )
    beta: float = Field(default=16.0, gt=0, description="inverse temperature of the softmax whose radius is maximised")
    deferred: bool = Field(default=False, description="no robustness term before the first learning-rate drop")

    def without_effect(self, epochs: int, first_drop: int) -> Iterable[str]:
        if self.deferred and first_drop >= epochs:
            yield (
                "objective.weight: no effect; with deferred the robustness term starts at the first epoch of "
                f"learning_rate_drops, and the {counted(epochs, 'epoch')} of the recipe have none"
            )

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        switch = progress.after_first_drop if self.deferred else 1.0
        return self.from_logits(logits_under_noise(classifier, images, noise), labels, progress.sigma, switch)

    def from_logits(
        self, noisy_logits: Tensor, labels: Tensor, sigma: float, switch: float | Tensor = 1.0
    ) -> LossTerms:
        """Compute the loss from logits [num_noise, batch, classes]; `switch` multiplies the robustness term."""
        import torch

        average = probabilities(noisy_logits).mean(0)
        natural = -torch.log(average.gather(1, labels.unsqueeze(1)).squeeze(1) + 1e-10)

        sharp = probabilities(noisy_logits, self.beta).mean(0)
        top, classes = sharp.topk(2, dim=1)
        with torch.no_grad():
            radius = torch.special.ndtri(top[:, 0]) - torch.special.ndtri(top[:, 1])
            kept = (classes[:, 0] == labels) & (radius <= self.gamma)  # false for infinity and NaN
        # Dropped images get a harmless pair of probabilities: an infinite derivative times 0 would be NaN.
        first = torch.where(kept, top[:, 0], 0.75)
        second = torch.where(kept, top[:, 1], 0.25)
        missing = self.gamma - (torch.special.ndtri(first) - torch.special.ndtri(second))
        robust = torch.where(kept, sigma / 2 * missing, 0.0)

        weight = self.weight * switch
        natural, robust = natural.mean(), robust.mean()
        return LossTerms(natural + weight * robust, {"natural": natural, "robust": robust}, noisy_logits)
