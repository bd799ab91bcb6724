"""The attack of SmoothAdv, which Consistency can use too (Salman et al. 2019, https://arxiv.org/abs/1906.04584).

xhat = argmax over ||x' - x||_2 <= epsilon * w(epoch) of -log pbar_y(x'),   pbar = mean_i F(x' + delta_i)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from smoothcert.objectives.base import Classifier, Progress

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class Adversary(BaseModel):
    """An attack on the smoothed classifier inside an L2 ball whose radius warms up over ten epochs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    attack: Literal["pgd", "ddn"] = Field(
        default="pgd", description="projected gradient, or decoupled direction and norm"
    )
    steps: int = Field(default=10, ge=1, description="attack steps (T)")
    epsilon: float = Field(default=1.0, gt=0, description="L2 radius of the ball")

    def around(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> Tensor:
        """Find adversarial examples [batch, ...] in [0, 1] under the same noises that the loss uses."""
        from smoothcert.attacks import ddn, smoothed_pgd

        radius = self.epsilon * progress.warmup
        if self.attack == "ddn":
            return ddn(classifier, images, labels, noise, steps=self.steps, max_norm=radius)
        iterates = smoothed_pgd(
            classifier, images, labels, noise, steps=self.steps, step_size=2 * radius / self.steps, max_norm=radius
        )
        return list(iterates)[-1]
