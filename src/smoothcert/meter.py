"""The losses of an epoch of training, kept on the device: adding never waits for it."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from smoothcert.errors import WorkError
from smoothcert.objectives import LossTerms

DIVERGED = 1e4
"""A loss above this (or not finite) stops the run; sound losses of all methods stay below 100."""


class Meter:
    """The loss, the noisy accuracy and the objective's terms of each step since `restart`, at most `steps` of them.

    All in place, in few kernels: a captured step adds to the same tensors.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.names: list[str] = []
        self.values = torch.zeros((steps, 0), device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def restart(self) -> None:
        self.step.zero_()

    def add(self, terms: LossTerms, labels: Tensor) -> None:
        accuracy = (terms.noisy_logits.argmax(-1) == labels).mean(dtype=torch.float32)
        values = torch.stack([v.detach().float() for v in (terms.loss, accuracy, *terms.terms.values())])
        if not self.names:
            self.names = ["loss", "noisy_accuracy", *terms.terms]
            self.values = self.values.new_zeros((len(self.values), len(values)))
        self.values.index_copy_(0, self.step, values.unsqueeze(0))
        self.step += 1

    def stop_if_diverged(self, epoch: int, folder: Path) -> None:
        values = self._so_far()
        bad_steps = (~(values[:, 0].abs() < DIVERGED)).nonzero().flatten().tolist()
        if not bad_steps:
            return
        step = bad_steps[0]
        terms = ", ".join(f"{n} {v:.4g}" for n, v in zip(self.names, values[step].tolist(), strict=True))
        raise WorkError(
            f"{folder}: the loss diverged in epoch {epoch}, step {step} ({terms}); the last saved epoch is kept; "
            "lower learning_rate or the weight of the largest term"
        )

    def so_far(self) -> tuple[float, float]:
        """Mean loss and noisy accuracy of this process's share."""
        loss, accuracy = self._so_far()[:, :2].mean(0).tolist()
        return loss, accuracy

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """Means over the epoch, and over all processes."""
        values = accelerator.reduce(self._so_far().mean(0), reduction="mean").tolist()
        return dict(zip(self.names, values, strict=True))

    def _so_far(self) -> Tensor:
        """Waits for the device."""
        return self.values[: int(self.step)]
