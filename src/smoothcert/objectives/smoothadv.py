"""SmoothAdv: adversarial training of the smoothed classifier (Salman et al. 2019, https://arxiv.org/abs/1906.04584).

mean_i CE(z(xhat + delta_i), y),   xhat found by attacking -log mean_i F_y(x' + delta_i) within epsilon
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from smoothcert.objectives.base import Classifier, LossTerms, Objective, Progress, noise_augmentation
from smoothcert.objectives.inner_attacks import Adversary

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class SmoothAdv(Objective):
    """Adversarial training against attacks on the smoothed classifier."""

    name: ClassVar[str] = "smoothadv"

    num_noise: int = Field(default=4, ge=1, description="noisy copies of an image in a step (m)")
    adversary: Adversary = Field(default=Adversary(), description="the attack: .attack, .steps, .epsilon")

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        adversarial = self.adversary.around(classifier, images, labels, noise, progress)
        return noise_augmentation(classifier, adversarial, labels, noise)
