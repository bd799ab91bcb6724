"""Consistency regularization (Jeong & Shin, NeurIPS 2020, https://arxiv.org/abs/2006.04062).

    mean_i CE(z(x + delta_i), y) + lambda * mean_i KL(pbar || p_i) + eta * H(pbar),     pbar = mean_i p_i

Gradients flow through pbar everywhere. With an adversary the noisy copies are of xhat instead of x; with a
`noise_attack` the noise is moved first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from smoothcert.classifier import divergence_from_logits, log_probability, probabilities
from smoothcert.objectives.base import (
    Classifier,
    LossTerms,
    Progress,
    cross_entropy_under_noise,
    logits_under_noise,
)
from smoothcert.objectives.inner_attacks import Adversary, MovesNoise

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor

Form = Literal["kl_entropy", "xent", "kl", "mse"]


class Consistency(MovesNoise):
    """Predictions for different noise samples of an image should agree: cheap, and strong at large radii."""

    name: ClassVar[str] = "consistency"

    num_noise: int = Field(
        default=2, ge=2, description="noisy copies of an image in a step (m), at least two to compare"
    )
    weight: float = Field(default=10.0, ge=0, description="weight of the consistency term (lambda)")
    entropy_weight: float = Field(
        default=0.5, ge=0, description="weight of the entropy H(pbar) in the form kl_entropy (eta)"
    )
    form: Form = Field(
        default="kl_entropy",
        description="kl_entropy as published; xent (KL + H), kl or mse (m = 2) as in the ablation",
    )
    adversary: Adversary | None = Field(
        default=None, description="noisy copies of an attacked image: .attack .steps .epsilon"
    )

    @model_validator(mode="after")
    def _mse_compares_two(self) -> Consistency:
        if self.form == "mse" and self.num_noise != 2:
            raise ValueError(f"objective.num_noise: expected 2 for form mse, got {self.num_noise}")
        return self

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        noise = self.noises(classifier, images, labels, noise)
        if self.adversary is not None:
            images = self.adversary.around(classifier, images, labels, noise, progress)
        return self.from_logits(logits_under_noise(classifier, images, noise), labels)

    def from_logits(self, noisy_logits: Tensor, labels: Tensor) -> LossTerms:
        """Compute the loss from logits [num_noise, batch, classes]."""
        cross_entropy = cross_entropy_under_noise(noisy_logits, labels)
        regularizer, terms = self._regularizer(noisy_logits)
        return LossTerms(cross_entropy + regularizer, {"cross_entropy": cross_entropy, **terms}, noisy_logits)

    def _regularizer(self, noisy_logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted regulariser and its parts."""
        p = probabilities(noisy_logits)
        if self.form == "mse":
            squared = (p[0] - p[1]).square().sum(-1).mean()
            return self.weight * squared, {"mse": squared}
        average = p.mean(0)
        entropy = -(average * log_probability(average)).sum(-1).mean()
        divergence = divergence_from_logits(average, noisy_logits).mean()
        terms = {"kl": divergence, "entropy": entropy}
        if self.form == "kl":
            return self.weight * divergence, terms
        if self.form == "xent":
            return self.weight * (divergence + entropy), terms
        return self.weight * divergence + self.entropy_weight * entropy, terms
