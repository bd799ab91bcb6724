"""What a classifier is to everything here, and the mode it is evaluated in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor

Classifier = Callable[["Tensor"], "Tensor"]
"""Images in [0, 1], float, NCHW -> logits."""


@contextmanager
def evaluating(classifier: Classifier) -> Iterator[None]:
    """A module in eval mode (batch statistics fixed), each submodule's mode restored afterwards."""
    from torch import nn

    modules = list(classifier.modules()) if isinstance(classifier, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training
