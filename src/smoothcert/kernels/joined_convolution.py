"""relu(conv2d(x) + shortcut) as one operator: what a traced network computes in several is joined.

The kernels have no gradients. Where they do not apply, the operator does what the network did.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from smoothcert.kernels import has_kernels, kernel_dtype


def joined_convolution(x: Tensor, convolution: nn.Conv2d, shortcut: Tensor | None = None) -> Tensor:
    """relu(convolution(x) + shortcut), up to rounding: the fastest way on x's device."""
    if not torch.is_grad_enabled() and x.numel() < 2**31 and (dtype := kernel_dtype(x)) is not None:
        from smoothcert.kernels.residual_layers import evaluated_convolution  # needs Triton

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
    """`traced` with each relu(convolution) and relu(convolution + shortcut) that has kernels as one call; in place."""
    assert isinstance(traced, GraphModule)
    for node in list(traced.graph.nodes):
        if node.op != "call_function" or node.target not in (F.relu, torch.relu) or node.kwargs.get("inplace"):
            continue
        (before,) = node.args[:1]
        name, shortcut = _convolution_and_shortcut(traced, before)
        if name is None:
            continue
        convolution = traced.get_submodule(name)
        x = next(n for n in traced.graph.nodes if n.op == "call_module" and n.target == name).args[0]
        joined = f"{name.replace('.', '_')}_joined"
        traced.add_submodule(joined, JoinedConvolution(convolution))  # type: ignore[arg-type]
        with traced.graph.inserting_before(node):
            node.replace_all_uses_with(traced.graph.call_module(joined, (x, shortcut)))
    traced.graph.eliminate_dead_code()
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced


def _convolution_and_shortcut(traced: GraphModule, node: object) -> tuple[str | None, Node | None]:
    """The name of the convolution that `node` is, or adds something to, if nobody else needs it; and what is added."""

    def convolution(node: object) -> str | None:
        alone = isinstance(node, Node) and node.op == "call_module" and len(node.users) == 1
        return str(node.target) if alone and has_kernels(traced.get_submodule(str(node.target))) else None  # type: ignore[attr-defined]

    if (name := convolution(node)) is not None:
        return name, None
    if isinstance(node, Node) and node.target in (operator.add, torch.add) and len(node.users) == 1 and not node.kwargs:
        first, second = node.args
        for one, other in ((first, second), (second, first)):
            if (name := convolution(one)) is not None and isinstance(other, Node):
                return name, other
    return None, None
