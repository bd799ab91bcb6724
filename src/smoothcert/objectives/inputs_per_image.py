"""How many inputs of the network training takes: what estimates of its time are proportional to."""

from itertools import groupby

import torch
from torch import Tensor

from smoothcert.objectives import OBJECTIVES, Objective, Progress


def inputs_by_epoch(objective: Objective, epochs: range) -> list[int]:
    """Return the inputs per training image in each of `epochs`: a part of the loss may start late."""
    by_epoch = groupby(map(objective.in_epoch, epochs))
    return [inputs for objective, equal in by_epoch for inputs in [inputs_per_image(objective)] * len(list(equal))]


def inputs_per_image(objective: Objective) -> int:
    """Return the inputs of the network, forward and backward, per image of a step: attacks, noise and mixtures.

    They are counted in the loss of one tiny image, so a new method needs no formula here. Of other objectives, whose
    loss may need more than a classifier of any images, the noisy copies are counted.
    """
    if type(objective) not in OBJECTIVES.values():
        return objective.num_noise
    count = 0

    def classifier(images: Tensor) -> Tensor:
        nonlocal count
        count += len(images)
        return images.flatten(1)

    noise = torch.zeros(objective.num_noise, 1, 1, 1, 2)
    progress = Progress(1.0, torch.ones(()), torch.ones(()), torch.full((1,), 0.5))
    objective.loss(classifier, torch.full((1, 1, 1, 2), 0.5), torch.zeros(1, dtype=torch.int64), noise, progress)
    return count
