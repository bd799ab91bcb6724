"""SmoothMix (Jeong et al., NeurIPS 2021, https://arxiv.org/abs/2111.09277).

    xadv = x_T of normalised ascent on -log pbar_y from x, without a norm limit unless `max_norm` is given
    xc = x, or with `one_step` x_1, projected on the L2 ball of radius w(epoch) `one_step_radius` around x
    lam ~ U[0, 1/2];  xmix = (1 - lam) xc + lam xadv;  ymix = (1 - lam) pbar + lam / C,   pbar = mean_i F(xc + delta_i)
    mean_i CE(z(xc + delta_i), y) + eta * w(epoch) * mean_{x, i} [argmax pbar = y] KL(ymix || F(xmix + delta_i))

This follows the published runs, which differ from the paper's text: KL instead of CE, the mask (its zeros count in the
mean), the warm-up w, and ymix is not detached. With a `noise_attack` the noise is moved first, and the moved noise
replaces the drawn noise everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from smoothcert.classifier import divergence_from_logits, probabilities
from smoothcert.objectives.base import (
    Classifier,
    LossTerms,
    Progress,
    cross_entropy_under_noise,
    logits_under_noise,
)
from smoothcert.objectives.inner_attacks import MovesNoise

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class SmoothMix(MovesNoise):
    """Mix each image with an unrestricted adversarial example and train for uncertainty in between."""

    name: ClassVar[str] = "smoothmix"

    num_noise: int = Field(default=4, ge=1, description="noisy copies of an image in a step (m)")
    steps: int = Field(default=4, ge=1, description="attack steps (T)")
    step_size: float = Field(default=1.0, gt=0, description="L2 length of an attack step (alpha)")
    eta: float = Field(default=5.0, ge=0, description="weight of the mixed term, warmed up over ten epochs")
    one_step: bool = Field(
        default=False, description="replace the clean image by the image after the first attack step"
    )
    one_step_radius: float | None = Field(
        default=None, gt=0, description="limit of its L2 distance, warmed up over ten epochs; by default step_size"
    )
    max_norm: float | None = Field(
        default=None, gt=0, description="limit the attack to an L2 ball; by default no limit"
    )

    @model_validator(mode="after")
    def _radius_needs_one_step(self) -> SmoothMix:
        if self.one_step_radius is not None and not self.one_step:
            raise ValueError(f"objective.one_step_radius: expected none without one_step, got {self.one_step_radius}")
        return self

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        from smoothcert.attacks import project

        noise = self.noises(classifier, images, labels, noise)
        first, adversarial = self._attack(classifier, images, labels, noise)
        clean = images
        if self.one_step:
            radius = self.step_size if self.one_step_radius is None else self.one_step_radius
            clean = project(first, images, radius * progress.warmup)

        # Without `one_step` this repeats the attack's first forward pass, 4% of a step with T = 8. Sharing the pass
        # would make a compiled attack compute gradients of the weights too, and update batch norm once, not twice.
        noisy_logits = logits_under_noise(classifier, clean, noise)
        cross_entropy = cross_entropy_under_noise(noisy_logits, labels)
        average = probabilities(noisy_logits).mean(0)

        ratio = progress.uniform / 2
        mixed_images = _between(clean, adversarial, ratio).to(images.dtype)
        mixed_target = _between(average, average.new_full((), 1 / average.shape[-1]), ratio)
        divergence = divergence_from_logits(mixed_target, logits_under_noise(classifier, mixed_images, noise))
        right = (average.argmax(-1) == labels).to(divergence)
        mix = (right * divergence).mean()
        loss = cross_entropy + self.eta * progress.warmup * mix
        return LossTerms(loss, {"cross_entropy": cross_entropy, "mix": mix}, noisy_logits)

    def _attack(self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return x_1 and x_T only: with all iterates, the rest would be compiled again for each T."""
        from smoothcert.attacks import smoothed_pgd

        iterates = list(
            smoothed_pgd(
                classifier, images, labels, noise, steps=self.steps, step_size=self.step_size, max_norm=self.max_norm
            )
        )
        return iterates[0], iterates[-1]


def _between(first: Tensor, second: Tensor, ratio: Tensor) -> Tensor:
    """Compute (1 - ratio) * first + ratio * second, with one ratio per image."""
    ratio = ratio.view(-1, *[1] * (first.ndim - 1))
    return (1 - ratio) * first + ratio * second
