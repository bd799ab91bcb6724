"""The exponential moving average of a network's weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class AveragedWeights:
    """The moving average of all floating-point tensors of `model`; other tensors are copied.

    After step t the average moves by 1 - min(decay, (1 + t) / (10 + t)) towards the weights, so that the first steps
    do not count too much. It works on the tensors in place, next to a captured step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live: dict[str, Tensor] = dict(model.state_dict())
        self.tensors = {name: tensor.clone() for name, tensor in self.live.items()}
        self._floating = [name for name, tensor in self.live.items() if tensor.is_floating_point()]
        self._others = [name for name in self.live if name not in self._floating]

    def update(self, step: int) -> None:
        """Include the weights after `step` steps."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        average, live = ([tensors[name] for name in self._floating] for tensors in (self.tensors, self.live))
        torch._foreach_lerp_(average, live, weight)
        for name in self._others:
            self.tensors[name].copy_(self.live[name])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from `tensors`; raises KeyError or RuntimeError if they do not fit."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])
