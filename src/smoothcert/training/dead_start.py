"""Runs that do not learn: a dead start is repeated once with learning-rate warm-up, others are reported."""

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from smoothcert.training.metrics import ACCURACY, METRICS, keep_metrics_before
from smoothcert.training.resume import save_state

if TYPE_CHECKING:
    from smoothcert.training.run_in_progress import RunInProgress

DEAD_EPOCHS = (1, 2)
"""A start is dead if the output is constant in these epochs (in epoch 0 the mean loss is still changing)."""
LEARNT_BY = 5
"""Number of epochs after which a run that is still at chance is reported."""
DEAD_TOLERANCE = 1e-3
"""Relative distance of the cross-entropy from that of the best constant output."""
RESTART_WARM_UP = 1
"""Epochs of learning-rate warm-up after a dead start."""


def restart_if_dead(run: "RunInProgress", metrics: Mapping[str, float]) -> bool:
    """Start again from the initial weights, with warm-up, if the output was constant in all of DEAD_EPOCHS."""
    run.dead_epochs += run.epoch in DEAD_EPOCHS and constant_output(metrics, run.data.labels)
    if run.dead_epochs < len(DEAD_EPOCHS) or run.initial_weights is None:
        if run.epoch >= max(DEAD_EPOCHS):
            run.initial_weights = None
        return False
    # In place, because a captured step keeps reading the same tensors.
    run.model.load_state_dict(run.initial_weights)
    for kept in run.optimizer.state.values():
        for value in kept.values():
            if value is not None:  # momentum, or moments and number of steps
                value.zero_()
    if run.average is not None:
        run.average.load(run.initial_weights)
    run.initial_weights = None
    run.warm_up = RESTART_WARM_UP
    run.dead_epochs = 0
    run.epoch = run.first_epoch = 0
    run.started = time.perf_counter()
    run.next_save = -math.inf
    if run.group.leads:
        # The state is first: if the process is killed in between, resuming removes the metrics of the dead epochs.
        save_state(run.folder, run.state())
        keep_metrics_before(run.folder / METRICS, 0)
        run.options.on_note(
            f"{run.folder}: the network gives the same output for every image after {max(DEAD_EPOCHS) + 1} epochs "
            f"(a dead start); training starts again with {RESTART_WARM_UP} epoch of learning-rate warm-up, which "
            "model.safetensors records"
        )
    run.group.wait()
    return True


def constant_output(metrics: Mapping[str, float], labels: Tensor) -> bool:
    """Whether the losses of an epoch are those of a network with the same output for every image.

    The cross-entropy of such a network is ln C, or the entropy of the labels once the output equals the class
    frequencies, to three digits; and its accuracy is at most that of one class for all images. False without a
    cross-entropy or an accuracy in `metrics`.
    """
    cross_entropy = metrics.get("cross_entropy", metrics.get("natural"))
    accuracy = metrics.get(ACCURACY)
    if cross_entropy is None or accuracy is None:
        return False
    counts = torch.bincount(labels).double()
    entropy = float(torch.special.entr(counts / len(labels)).sum())
    near = any(abs(cross_entropy - dead) < DEAD_TOLERANCE * dead for dead in (entropy, math.log(max(len(counts), 2))))
    return near and no_better_than_majority(accuracy, labels)


def no_better_than_majority(accuracy: float, labels: Tensor) -> bool:
    """Whether predicting one class for all images is about as accurate; False if there is only one class."""
    majority = float(torch.bincount(labels).max()) / len(labels)
    return accuracy < 1.05 * majority < 1.05


def nothing_learnt(warm_up: int, accuracy: float) -> str:
    """The note about a run that is at chance after LEARNT_BY epochs, `warm_up` of them with learning-rate warm-up."""
    first = "" if warm_up else "--set learning_rate_warm_up=1, "
    return (
        f"after {LEARNT_BY} epochs the accuracy in training is {accuracy:.1%}, no better than one class for all "
        f"images; unless this is expected, start again with {first}a lower learning_rate, less weight on the "
        "objective's other terms or another seed"
    )
