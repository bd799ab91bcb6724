"""Losses with several forward passes on a model that several processes train."""

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class OneSynchronizedPass(nn.Module):
    """A DistributedDataParallel model whose wrapper sees one forward pass per step; other passes go to its module.

    Gradients are synchronized once per backward pass, whichever forward passes they come from. Attacks need no
    synchronization, and a second pass through the wrapper overwrites the buffers of batch norm in place, which the
    backward pass of the first one refuses in some versions of torch (https://github.com/pytorch/pytorch/issues/22095).
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__()
        self.model = model
        self.synchronized = False

    def forward(self, inputs: Tensor) -> Any:
        attacked = not any(parameter.requires_grad for parameter in self.model.parameters())
        if attacked or self.synchronized:
            return self.model.module(inputs)
        self.synchronized = True
        return self.model(inputs)
