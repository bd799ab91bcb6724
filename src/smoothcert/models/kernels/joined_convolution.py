"""relu(conv2d(x) + shortcut) as one operator: what a traced network computes in several is joined.

The kernels have no gradients. Where they do not apply, the operator does what the network did.
"""

import operator
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from smoothcert.models.kernels import has_kernels, kernel_dtype


def joined_convolution(x: Tensor, convolution: nn.Conv2d, shortcut: Tensor | None = None) -> Tensor:
    """relu(convolution(x) + shortcut), up to rounding: the fastest way on x's device."""
    # A network of one's own may add something of another shape, which torch would repeat, or a number.
    fits = x.ndim == 4 and (shortcut is None or (isinstance(shortcut, Tensor) and shortcut.shape == x.shape))
    if fits and not torch.is_grad_enabled() and (dtype := kernel_dtype(x)) is not None:
        from smoothcert.models.kernels.residual_layers import evaluated_convolution  # needs Triton

        return evaluated_convolution(x, convolution, shortcut, dtype)
    y: Tensor = convolution(x)
    return F.relu(y if shortcut is None else y + shortcut)


class JoinedConvolution(nn.Module):
    """`joined_convolution` in a traced network, around the convolution that was there."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        return joined_convolution(x, self.convolution, shortcut)


def join_convolutions(traced: nn.Module) -> nn.Module:
    """`traced` with F.relu(convolution) and F.relu(convolution + shortcut) as one call each, where there are kernels;
    in place."""
    assert isinstance(traced, GraphModule)
    calls = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")

    def is_convolution(node: Node) -> bool:
        """With kernels, called once, and its result needed by nobody but what follows."""
        alone = node.op == "call_module" and calls[node.target] == 1 and len(node.users) == 1 and len(node.args) == 1
        return alone and has_kernels(traced.get_submodule(str(node.target)))

    def summands(node: object) -> list[Node]:
        """The two tensors of a sum that nobody else needs; else `node` alone."""
        if isinstance(node, Node) and node.target in (operator.add, torch.add) and len(node.users) == 1:
            tensors = [summand for summand in node.args if isinstance(summand, Node)]
            return tensors if len(tensors) == 2 and not node.kwargs else []
        return [node] if isinstance(node, Node) else []

    for node in list(traced.graph.nodes):
        if node.op != "call_function" or node.target not in (F.relu, torch.relu) or not node.args:
            continue
        found = summands(node.args[0])
        convolution = next(filter(is_convolution, found), None)
        if convolution is None:
            continue
        added = [summand for summand in found if summand is not convolution]
        name = str(convolution.target)
        traced.set_submodule(name, JoinedConvolution(traced.get_submodule(name)))  # type: ignore[arg-type]
        with traced.graph.inserting_before(node):
            node.replace_all_uses_with(traced.graph.call_module(name, (convolution.args[0], *added)))
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced
