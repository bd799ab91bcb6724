"""Whether torch.compile pays for a training run: what it takes, from measurements, against what it saves."""

import os
from collections.abc import Callable
from typing import Literal

from torch import nn

from smoothcert.data import default_folder
from smoothcert.models import CifarResNet

Compiling = Literal["auto", "always", "never"]
SAVED_SHARE = 0.3
"""Of the time of a captured step; measured 0.2 (ResNet-110) to 0.4 (LeNet, SmoothMix)."""
SECONDS_AT_LEAST, SECONDS_A_LAYER = 15.0, 0.35
"""What compiling takes, measured on LeNet and ResNet-110, when nothing of it is kept on disk."""


def keep_compiled_kernels() -> None:
    """Kernels outlive a reboot: they are kept beside the data, unless the user has chosen a folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_folder() / "compiled"))


def compile_pays(model: nn.Module, compiling: Compiling, *, by_kernels: bool = False) -> Callable[[float], bool]:
    """A judge of the seconds that the rest of a run takes without compiling.

    `by_kernels`: layers that have kernels of our own use them. They leave a compiler nothing of a ResNet for CIFAR
    (ResNet-20 with consistency 1.69 ms a step without, 1.76 compiled), and compiled attacks do not use them.
    """
    if compiling != "auto":
        return lambda seconds: compiling == "always"
    if by_kernels and any(isinstance(module, CifarResNet) for module in model.modules()):
        return lambda seconds: False
    layers = sum(1 for module in model.modules() if not list(module.children()))
    cost = SECONDS_AT_LEAST + SECONDS_A_LAYER * layers
    return lambda seconds: SAVED_SHARE * seconds > cost
