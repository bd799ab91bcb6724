"""Denoising (Salman et al. 2020, https://arxiv.org/abs/2003.01908): a denoiser D in front of a frozen classifier.

    mean over pixels of (D(x + delta) - x)^2 + lambda * CE(target F(x), prediction F(D(x + delta)))

F are the probabilities of the classifier, whose weights do not change. Without a classifier the second term is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from smoothcert.classifier import logits_of, probabilities
from smoothcert.objectives.base import Classifier, LossTerms, Objective, Progress

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class Denoising(Objective):
    """Train a denoiser: remove the noise, and keep what a frozen classifier says about the clean image."""

    name: ClassVar[str] = "denoising"

    stability_weight: float = Field(default=0.0, ge=0, description="weight of the frozen classifier's term (lambda)")

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        """Compute the loss of `classifier`, a `Denoised` module, whose classifier is None or frozen."""
        import torch
        import torch.nn.functional as F

        network: Any = classifier
        copies = images.expand(noise.shape).flatten(0, 1)
        denoised = network.denoiser((images + noise).flatten(0, 1))
        error = F.mse_loss(denoised.to(images.dtype), copies)
        if network.classifier is None:
            return LossTerms(error, {"squared_error": error}, None)
        with torch.no_grad():
            target = probabilities(logits_of(network.classify(images)))
        logits = logits_of(network.classify(denoised))
        stability = F.cross_entropy(logits, target.repeat(len(noise), 1))
        terms = {"squared_error": error, "stability": stability}
        return LossTerms(error + self.stability_weight * stability, terms, logits.view(*noise.shape[:2], -1))
