"""Steps and projections in L2 for images of any shape, and the state of a classifier during an attack."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smoothcert.classifier import Classifier as Classifier
from smoothcert.classifier import evaluating


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
