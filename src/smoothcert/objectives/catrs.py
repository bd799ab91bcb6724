"""CAT-RS: confidence-aware training (Jeong et al., AAAI 2023).

    l_i = CE(z(x + delta_i), y);  w = share of i with argmax z(x + delta_i) = y;  K ~ Binomial(m, w), at least 1
    Llow  = (1 / m) * sum of the K smallest l_i
    Lhigh = max_i KL(phat || F(x + delta'_i)),   delta'_i found by attacking this KL around delta_i
    loss  = mean over images of Llow + lambda [K = m] Lhigh

phat are the votes of a teacher for the image; without a teacher, all votes are for the label. K is a constant for the
gradient, and comes from the image's one uniform draw by the inverse of the binomial distribution.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from smoothcert.classifier import divergence_from_logits
from smoothcert.objectives.base import Classifier, LossTerms, Objective, Progress, logits_under_noise

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class CatRs(Objective):
    """Drop the hardest noise samples of uncertain images, attack the noise of confident ones."""

    name: ClassVar[str] = "catrs"
    uses_teacher: ClassVar[bool] = True

    num_noise: int = Field(default=4, ge=1, description="noisy copies of an image in a step (m)")
    weight: float = Field(default=1.0, ge=0, description="weight of the term of confident images (lambda)")
    steps: int = Field(default=4, ge=1, description="attack steps (T)")
    epsilon: float = Field(default=1.0, gt=0, description="L2 radius of the ball around each noise sample")

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        from smoothcert.attacks import noise_ball_attack

        noisy_logits = logits_under_noise(classifier, images, noise)
        targets = progress.targets
        if targets is None:
            targets = all_votes_for(labels, noisy_logits)
        attacked = noise_ball_attack(classifier, images, targets, noise, steps=self.steps, epsilon=self.epsilon)
        attacked_logits = logits_under_noise(classifier, images, attacked)
        return self.from_logits(noisy_logits, attacked_logits, labels, targets, progress.uniform)

    def from_logits(
        self, noisy_logits: Tensor, attacked_logits: Tensor, labels: Tensor, targets: Tensor, uniform: Tensor
    ) -> LossTerms:
        """Compute the loss from logits [num_noise, batch, classes] under the noise and under the attacked noise."""
        import torch
        from torch.nn.functional import cross_entropy

        copies, batch = noisy_logits.shape[:2]
        every_label = labels.expand(copies, -1).flatten()
        losses = cross_entropy(noisy_logits.flatten(0, 1), every_label, reduction="none").view(copies, batch)
        right = (noisy_logits.argmax(-1) == labels).to(uniform.dtype).mean(0)
        kept = binomial(right, copies, uniform)
        counted = torch.arange(copies, device=losses.device).unsqueeze(1) < kept
        low = torch.where(counted, losses.sort(dim=0).values, 0.0).sum(0).mean() / copies
        divergence = divergence_from_logits(targets, attacked_logits).amax(0)
        high = torch.where(kept == copies, divergence, 0.0).mean()
        terms = {"cross_entropy": losses.mean(), "low": low, "high": high}
        return LossTerms(low + self.weight * high, terms, noisy_logits)


def binomial(share: Tensor, trials: int, uniform: Tensor) -> Tensor:
    """Return the quantiles `uniform` of Binomial(trials, share), at least 1, all [batch].

    A share of 1 gives `trials` and a share of 0 gives 1, whatever `uniform` in [0, 1) is.
    """
    import torch

    below = torch.zeros_like(share)
    kept = torch.zeros_like(share, dtype=torch.int64)
    for successes in range(trials):
        below = below + math.comb(trials, successes) * share**successes * (1 - share) ** (trials - successes)
        kept = kept + (uniform >= below)
    return kept.clamp(min=1)


def all_votes_for(labels: Tensor, logits: Tensor) -> Tensor:
    """Return the shares [batch, classes] of a teacher whose votes are all for the label, in float32 at least."""
    import torch

    wide = torch.promote_types(logits.dtype, torch.float32)
    return (torch.arange(logits.shape[-1], device=labels.device) == labels.unsqueeze(1)).to(wide)
