"""Steps and projections in L2 for images of any shape, and the state of a classifier during an attack."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smoothcert.classifier import Classifier, evaluating, modules_with_mode
from smoothcert.errors import RequestError


@contextmanager
def attacked(classifier: Classifier) -> Iterator[None]:
    """Put a module into eval mode without parameter gradients; both are restored, also after an exception."""
    parameters = list(classifier.parameters()) if isinstance(classifier, nn.Module) else []
    wanted = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        with evaluating(classifier):
            yield
    finally:
        for parameter, requires_grad in zip(parameters, wanted, strict=True):
            parameter.requires_grad_(requires_grad)


def input_gradient(
    classifier: Classifier, loss: Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]], point: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the gradient of the first result of `loss` at `point`, and its other results.

    The classifier is in eval mode, and its parameters get no gradient.
    """
    if torch.compiler.is_compiling():
        # The compiler can follow this gradient; the one below works for networks that functorch refuses.
        with torch.no_grad(), _in_eval_mode(classifier):
            gradient, others = torch.func.grad(loss, has_aux=True)(point)
        return gradient, others
    if torch.is_inference_mode_enabled():
        raise RequestError(
            "attack: expected gradients, got torch.inference_mode(), which forbids them; use torch.no_grad(), in which "
            "the attack computes its own"
        )
    with torch.enable_grad(), attacked(classifier):
        moved = point.detach().requires_grad_(True)
        total, others = loss(moved)
        (gradient,) = torch.autograd.grad(total, moved)
    return gradient, tuple(other.detach() for other in others)


@contextmanager
def _in_eval_mode(classifier: Classifier) -> Iterator[None]:
    """`evaluating` for the compiler, which cannot follow a lock: a training step that it compiles has one thread."""
    modules = modules_with_mode(classifier)
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


def norms(batch: Tensor) -> Tensor:
    """Return the L2 norm of each image, shaped [batch, 1, ...] so that it multiplies a batch."""
    lengths: Tensor = torch.linalg.vector_norm(batch.flatten(1), dim=1)
    return lengths.view(-1, *[1] * (batch.ndim - 1))


def unit(gradient: Tensor) -> Tensor:
    """Return each image's gradient divided by its norm + 1e-8; a zero gradient stays zero."""
    return gradient / (norms(gradient) + 1e-8)


def project(images: Tensor, centre: Tensor, radius: float | Tensor) -> Tensor:
    """Return the nearest point of the ball of `radius` around its centre for each image."""
    offset = images - centre
    length = norms(offset)
    scale = torch.clamp(radius / length.clamp(min=1e-12), max=1.0)
    return centre + offset * scale
