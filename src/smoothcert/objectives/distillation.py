"""Distillation: a student learns the answers of a teacher under noise.

    mean_i KL(G(x + delta_i) || F(x + delta_i)),     G and F: softmax of the teacher and of the student

The teacher is a trained network, or several of them as one, and stays as it is. Labels are not used. Without a teacher
all of its probability is on the label, and the loss is the cross-entropy under noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from smoothcert.classifier import divergence_from_logits, probabilities
from smoothcert.errors import RequestError
from smoothcert.objectives.base import (
    Classifier,
    LossTerms,
    Objective,
    Progress,
    cross_entropy_under_noise,
    logits_under_noise,
    noise_augmentation,
)

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class Distillation(Objective):
    """Learn the answers of trained networks under noise: one network in place of an ensemble."""

    name: ClassVar[str] = "distillation"

    num_noise: int = Field(default=2, ge=1, description="noisy copies of an image in a step (m)")

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        import torch

        if progress.teacher is None:
            return noise_augmentation(classifier, images, labels, noise)
        with torch.no_grad():
            teacher_logits = logits_under_noise(progress.teacher, images, noise)
        noisy_logits = logits_under_noise(classifier, images, noise)
        result = self.from_logits(noisy_logits, teacher_logits)
        # Not a part of the loss: it shows whether the network learns.
        cross_entropy = cross_entropy_under_noise(noisy_logits.detach(), labels)
        return LossTerms(result.loss, {**result.terms, "cross_entropy": cross_entropy}, result.noisy_logits)

    def from_logits(self, noisy_logits: Tensor, teacher_logits: Tensor) -> LossTerms:
        """Compute the loss from logits of student and teacher, both [num_noise, batch, classes]."""
        if noisy_logits.shape != teacher_logits.shape:
            raise RequestError(
                f"teacher_logits: expected the shape {list(noisy_logits.shape)}, got {list(teacher_logits.shape)}; "
                "give a teacher with the classes of the model"
            )
        divergence = divergence_from_logits(probabilities(teacher_logits), noisy_logits).mean()
        return LossTerms(divergence, {"kl": divergence}, noisy_logits)
