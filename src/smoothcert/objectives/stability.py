"""Stability training (Li et al. 2019, https://arxiv.org/abs/1809.03113).

    CE(z(x), y) + lambda * CE(target F(x), prediction F(x + delta))

Gradients flow through the target too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from smoothcert.classifier import logits_of, probabilities
from smoothcert.objectives.base import Classifier, LossTerms, Objective, Progress, logits_under_noise

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class Stability(Objective):
    """Predictions under noise should agree with the clean prediction."""

    name: ClassVar[str] = "stability"
    chunked: ClassVar[bool] = False

    num_noise: Literal[1] = Field(default=1, description="noisy copies of an image in a step (always 1)")
    weight: float = Field(default=2.0, ge=0, description="weight of the stability term (lambda)")

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        clean_logits = logits_of(classifier(images))
        return self.from_logits(clean_logits, logits_under_noise(classifier, images, noise), labels)

    def from_logits(self, clean_logits: Tensor, noisy_logits: Tensor, labels: Tensor) -> LossTerms:
        """Compute the loss from clean logits [batch, classes] and noisy logits [1, batch, classes]."""
        import torch.nn.functional as F

        clean = F.cross_entropy(clean_logits, labels)
        stability = F.cross_entropy(noisy_logits[0], probabilities(clean_logits))
        loss = clean + self.weight * stability
        return LossTerms(loss, {"cross_entropy": clean, "stability": stability}, noisy_logits)
