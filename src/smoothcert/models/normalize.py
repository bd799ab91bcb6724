"""Normalisation as the first layer of a model: it follows the noise and is part of the checkpoint."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from smoothcert.classifier import CHANNELS_FIRST, channels_last
from smoothcert.errors import RequestError


class Normalize(nn.Module):
    """Compute (x - mean) / std per channel for x [n, c, h, w] in [0, 1]. Mean and std are saved with the weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):  # copies, because a tensor may change later
            self.register_buffer(name, torch.as_tensor(value).detach().clone().reshape(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        if not is_scripting():  # TorchScript cannot compile the check
            self._check_channels(images)
        return (images - self.mean) / self.std

    def _check_channels(self, images: Tensor) -> None:
        channels = self.mean.shape[1]
        if images.shape[1] == channels or channels == 1:
            return
        shape = list(images.shape[1:])  # torch would repeat one channel
        advice = f"read them so: --channels {channels} (Python: load_dataset(..., channels={channels}))"
        raise RequestError(
            f"model: expected images with {channels} channels, as many as its Normalize layer has, got {shape}; "
            + (CHANNELS_FIRST if channels_last(shape) else advice)
        )
