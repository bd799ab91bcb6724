"""Sums over an epoch of training, kept on the device: adding never waits for it."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from smoothcert.errors import WorkError
from smoothcert.objectives import LossTerms

DIVERGED = 1e4
"""A loss above this (or not finite) stops the run; sound losses of all methods stay below 100."""


class Meter:
    """Sums of the loss, the noisy accuracy and the objective's terms, and the first bad step, since `restart`.

    All in place: a captured step adds to the same tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.names: list[str] = []
        self.sums = torch.zeros(0, device=device)
        self.steps = torch.zeros((), device=device)
        self.bad_step = torch.full((), -1.0, device=device)
        self.bad_values = torch.zeros(0, device=device)

    def restart(self) -> None:
        for tensor in (self.sums, self.steps, self.bad_values):
            tensor.zero_()
        self.bad_step.fill_(-1)

    def add(self, terms: LossTerms, labels: Tensor) -> None:
        accuracy = (terms.noisy_logits.argmax(-1) == labels).float().mean()
        values = torch.stack([v.detach().float() for v in (terms.loss, accuracy, *terms.terms.values())])
        if not self.names:
            self.names = ["loss", "noisy_accuracy", *terms.terms]
            self.sums, self.bad_values = torch.zeros_like(values), torch.zeros_like(values)
        # Remember the first bad step without asking the device about it now.
        first = ~(values[0].abs() < DIVERGED) & (self.bad_step < 0)
        self.bad_values.copy_(torch.where(first, values, self.bad_values))
        self.bad_step.copy_(torch.where(first, self.steps, self.bad_step))
        self.sums += values
        self.steps += 1

    def stop_if_diverged(self, epoch: int, folder: Path) -> None:
        step = int(self.bad_step)
        if step < 0:
            return
        terms = ", ".join(f"{n} {v:.4g}" for n, v in zip(self.names, self.bad_values.tolist(), strict=True))
        raise WorkError(
            f"{folder}: the loss diverged in epoch {epoch}, step {step} ({terms}); the last saved epoch is kept; "
            "lower learning_rate or the weight of the largest term"
        )

    def so_far(self) -> tuple[float, float]:
        """Mean loss and noisy accuracy of this process's share."""
        loss, accuracy = (self.sums[:2] / self.steps).tolist()
        return loss, accuracy

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """Means over the epoch, and over all processes."""
        values = accelerator.reduce(self.sums / self.steps, reduction="mean").tolist()
        return dict(zip(self.names, values, strict=True))
