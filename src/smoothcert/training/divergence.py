"""Training that has diverged is stopped before it is saved: by the losses of its steps, and by its weights."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from smoothcert.errors import WorkError
from smoothcert.training.run_folder import MODEL

if TYPE_CHECKING:
    from smoothcert.training.run_in_progress import RunInProgress

LARGEST_LOSS = 1e4
"""A loss above this (or not finite) stops the run; the losses of all methods normally stay below 100."""
LARGEST_WEIGHT = 1e8


def stop_if_loss_diverged(run: "RunInProgress") -> None:
    """Raise a WorkError that names the first step of the epoch whose loss is too large or not finite."""
    steps = run.meter.steps()
    bad_steps = (~(steps[:, 0].abs() < LARGEST_LOSS)).nonzero().flatten().tolist()
    if bad_steps:
        step = bad_steps[0]
        terms = ", ".join(f"{n} {v:.4g}" for n, v in zip(run.meter.names, steps[step].tolist(), strict=True))
        raise WorkError(
            f"{run.folder}: the loss diverged in epoch {run.epoch}, step {step} ({terms}); {_advice(run.folder)}, or a "
            "lower weight of the largest term"
        )


def stop_if_weights_diverged(run: "RunInProgress") -> None:
    """Raise a WorkError if the last step has ruined the weights, even though its loss was still small."""
    weights = [parameter.detach() for parameter in run.model.parameters() if parameter.numel()]
    largest = float(torch.stack([weight.abs().max() for weight in weights]).max())
    if not largest < LARGEST_WEIGHT:
        raise WorkError(
            f"{run.folder}: the weights diverged in epoch {run.epoch - 1} (one is {largest:.3g}); {_advice(run.folder)}"
        )


def _advice(folder: Path) -> str:
    """What to do: a run without a saved epoch is replaced by the next one."""
    saved = (folder / MODEL).exists()
    kept, out = ("saved epochs are kept", "another") if saved else ("no epoch was saved", "the same")
    return f"{kept}: train again into {out} --out with a lower learning_rate"
