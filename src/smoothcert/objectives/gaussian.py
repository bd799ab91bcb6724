"""Gaussian: train on noisy images (Cohen et al. 2019, https://arxiv.org/abs/1902.02918).

CE(z(x + delta), y), with `noise_attack` for noise that is moved first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from smoothcert.objectives.base import Classifier, LossTerms, Progress, noise_augmentation
from smoothcert.objectives.inner_attacks import MovesNoise

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class Gaussian(MovesNoise):
    """Noise augmentation: the baseline that every other method builds on."""

    name: ClassVar[str] = "gaussian"

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        return noise_augmentation(classifier, images, labels, self.noises(classifier, images, labels, noise))
