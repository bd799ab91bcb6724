"""The seam between the training loop and a method: what an objective is given and what it gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from smoothcert.classifier import Classifier as Classifier

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class Progress(NamedTuple):
    """What a loss may depend on besides its batch. Epoch-dependent factors are tensors, so that a captured step
    sees them change."""

    sigma: float
    warmup: Tensor
    """Scalar min(1, (epoch + 1) / 10)."""
    after_first_drop: Tensor
    """Scalar: 0 before the first learning-rate drop, 1 from it on."""
    uniform: Tensor
    """[batch] draws from U[0, 1), one an image, for methods that need randomness besides the noise."""


class LossTerms(NamedTuple):
    """`loss` is what is minimised; `terms` are its parts for the log; `noisy_logits` [num_noise, batch, classes]."""

    loss: Tensor
    terms: dict[str, Tensor]
    noisy_logits: Tensor


class Objective(BaseModel, ABC):
    """A method: a frozen record of its hyper-parameters and its loss.

    `loss` is a pure function of its arguments with static shapes: it never waits for the device (no `.item()`, no
    boolean indexing, no `if tensor`). It may switch the classifier's mode while it attacks, and restores it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    chunked: ClassVar[bool] = True
    """True: a batch is cut into num_noise chunks, each one step, so every step sees batch_size noisy inputs."""

    num_noise: int = Field(1, ge=1, description="noisy copies of an image in a step (m)")

    @abstractmethod
    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        """images [batch, c, h, w] in [0, 1], labels [batch], noise [num_noise, batch, c, h, w]."""


def logits_under_noise(classifier: Classifier, images: Tensor, noise: Tensor) -> Tensor:
    """Logits of images + noise[i] for all i in one forward pass: [num_noise, batch, classes]."""
    logits = classifier((images + noise).flatten(0, 1))
    return logits.view(*noise.shape[:2], -1)


def cross_entropy_under_noise(noisy_logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over noises and images of CE(z(x + delta_i), y), a scalar. noisy_logits [num_noise, batch, classes]."""
    import torch

    every_label = labels.expand(noisy_logits.shape[0], -1).flatten()
    return torch.nn.functional.cross_entropy(noisy_logits.flatten(0, 1), every_label)
