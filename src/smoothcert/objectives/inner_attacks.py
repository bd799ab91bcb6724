"""Attacks inside a training step, which several objectives use: on the images, and on the noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field

from smoothcert.io.records import Record
from smoothcert.objectives.base import Classifier, Objective, Progress

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class Adversary(Record):
    """An attack on the smoothed classifier inside an L2 ball whose radius warms up over ten epochs.

    xhat = argmax over ||x' - x||_2 <= epsilon * w(epoch) of -log pbar_y(x'),   pbar = mean_i F(x' + delta_i)
    (Salman et al. 2019, https://arxiv.org/abs/1906.04584)
    """

    attack: Literal["pgd", "ddn"] = Field(
        default="pgd", description="projected gradient, or decoupled direction and norm"
    )
    steps: int = Field(default=10, ge=1, description="attack steps (T)")
    epsilon: float = Field(default=1.0, gt=0, description="L2 radius of the ball")

    def around(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> Tensor:
        """Find adversarial examples [batch, ...] in [0, 1] under the same noise samples that the loss uses."""
        from smoothcert.attacks import ddn, smoothed_pgd

        radius = self.epsilon * progress.warmup
        if self.attack == "ddn":
            return ddn(classifier, images, labels, noise, steps=self.steps, max_norm=radius)
        iterates = smoothed_pgd(
            classifier, images, labels, noise, steps=self.steps, step_size=2 * radius / self.steps, max_norm=radius
        )
        return list(iterates)[-1]


class NoiseAttack(Record):
    """Move each noise on the sphere of its norm until the image is misclassified (Sun et al. 2024).

    T times, for each noise separately: where x + delta is classified correctly,
    delta <- |delta_0| * unit(delta + eps * unit(gradient of CE(z(x + delta), y)))
    """

    steps: int = Field(default=4, ge=1, description="attack steps (T)")
    step_size: float = Field(default=0.5, gt=0, description="L2 length of an attack step (eps)")
    first_epoch: int = Field(default=0, ge=0, description="noise is not attacked before this epoch (E)")

    def moved(self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Return the noise [num_noise, batch, ...] that the loss uses in place of `noise`."""
        from smoothcert.attacks import sphere_attack

        return sphere_attack(classifier, images, labels, noise, steps=self.steps, step_size=self.step_size)


class MovesNoise(Objective):
    """An objective that may attack its noise before it uses it."""

    noise_attack: NoiseAttack | None = Field(
        default=None, description="attack each noise sample before it is used: .steps .step_size .first_epoch"
    )

    def in_epoch(self, epoch: float) -> Self:
        waits = self.noise_attack is not None and epoch < self.noise_attack.first_epoch
        return self.model_copy(update={"noise_attack": None}) if waits else self

    def noises(self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Return `noise` [num_noise, batch, ...], moved if there is an attack."""
        return noise if self.noise_attack is None else self.noise_attack.moved(classifier, images, labels, noise)
