"""Gaussian: train on noisy images (Cohen et al. 2019, https://arxiv.org/abs/1902.02918).

CE(z(x + delta), y), with `noise_attack` for noises that are moved first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from smoothcert.objectives.base import Classifier, LossTerms, Objective, Progress, noise_augmentation
from smoothcert.objectives.inner_attacks import OptionalNoiseAttack

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class Gaussian(Objective):
    """Noise augmentation: the baseline that every other method builds on."""

    name: ClassVar[str] = "gaussian"

    noise_attack: OptionalNoiseAttack = None

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        if self.noise_attack is not None:
            noise = self.noise_attack.moved(classifier, images, labels, noise, progress)
        return noise_augmentation(classifier, images, labels, noise)
