"""An attack on the noises of a step, which several objectives can use (Sun et al. 2024).

T times, for each noise separately: where x + delta is classified correctly,
delta <- |delta_0| * unit(delta + eps * unit(gradient of CE(z(x + delta), y)))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from smoothcert.objectives.base import Classifier, Progress

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class NoiseAttack(BaseModel):
    """Move each noise on the sphere of its norm until the image is misclassified."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    steps: int = Field(default=4, ge=1, description="attack steps (T)")
    step_size: float = Field(default=0.5, gt=0, description="L2 length of an attack step (eps)")
    first_epoch: int = Field(default=0, ge=0, description="the noises are not attacked before this epoch (E)")

    def moved(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> Tensor:
        """Return the noises [num_noise, batch, ...] that the loss uses in place of `noise`."""
        import torch

        from smoothcert.attacks import sphere_attack

        attacked = sphere_attack(classifier, images, labels, noise, steps=self.steps, step_size=self.step_size)
        if self.first_epoch == 0 or progress.epoch is None:
            return attacked
        # A captured step computes the attack in every epoch.
        return torch.where(progress.epoch >= self.first_epoch, attacked, noise)
