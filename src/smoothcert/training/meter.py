"""The losses of an epoch, kept on the device until its end."""

import torch
from torch import Tensor

from smoothcert.distributed import Team
from smoothcert.errors import RequestError
from smoothcert.objectives import LossTerms
from smoothcert.training.metrics import ACCURACY, LARGEST, taken_name


class Meter:
    """The loss, the noisy accuracy if known, and the objective's terms of at most `steps` steps since `restart`.

    Values are written in place by few kernels, so a captured step can add them.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.names: list[str] = []
        self.values = torch.zeros((steps, 0), device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def restart(self) -> None:
        self.step.zero_()

    def add(self, terms: LossTerms, labels: Tensor) -> None:
        accuracy = {}
        if terms.noisy_logits is not None:
            accuracy = {ACCURACY: (terms.noisy_logits.argmax(-1) == labels).mean(dtype=torch.float32)}
        values = torch.stack([v.detach().float() for v in (terms.loss, *accuracy.values(), *terms.terms.values())])
        if not self.names:
            if (fault := taken_name(terms.terms)) is not None:  # of a term that starts late: see `try_loss`
                raise RequestError(f"objective: expected {fault}")
            self.names = ["loss", *accuracy, *terms.terms]
            self.values = self.values.new_zeros((len(self.values), len(values)))
        self.values.index_copy_(0, self.step, values.unsqueeze(0))
        self.step += 1

    def running_means(self) -> tuple[float, float | None]:
        """Mean loss and noisy accuracy over the share of this process; None for an objective without logits."""
        loss, *others = self.steps()[:, :2].mean(0).tolist()
        return loss, others[0] if self.names[1:2] == [ACCURACY] else None

    def means(self, team: Team) -> dict[str, float]:
        """Means over the epoch and over all processes; a term that is not finite, or beyond LARGEST, is left out."""
        values = team.mean(self.steps().mean(0)).tolist()
        return {name: mean for name, mean in zip(self.names, values, strict=True) if abs(mean) <= LARGEST}

    def steps(self) -> Tensor:
        """The values [steps, names] of the steps since `restart`; waits for the device."""
        return self.values[: int(self.step)]
