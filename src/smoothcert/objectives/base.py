"""The interface between the training loop and a method: what an objective receives and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, NamedTuple, NoReturn, Self

from pydantic import ConfigDict, Field

from smoothcert.classifier import Classifier as Classifier
from smoothcert.classifier import logits_under_noise as logits_under_noise
from smoothcert.errors import RequestError
from smoothcert.io.records import Record

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class Progress(NamedTuple):
    """What a loss may depend on in addition to its batch.

    Epoch-dependent factors are tensors, so that a captured step sees them change.
    """

    sigma: float
    warmup: Tensor
    """Scalar: `warm_up` of the epoch."""
    after_first_drop: Tensor
    """Scalar: 0 before the first learning-rate drop, 1 from it on."""
    uniform: Tensor
    """[batch] draws from U[0, 1), in float32 at least, one per image, for methods that need more than the noise."""
    epoch: Tensor | None = None
    """Scalar: the epoch, counted from 0. None stands for a late one."""
    targets: Tensor | None = None
    """[batch, classes] shares of a teacher's votes for each image, if the recipe has a teacher."""
    teacher: Classifier | None = None
    """A trained classifier, which stays as it is, for a loss that learns its answers."""


LATER_FIELDS = ("noise_attack",)
"""Fields of objectives that recipes hold only if they are not at their defaults: files without them stay valid."""


def warm_up(epoch: float) -> float:
    """Compute the factor that rises over the first ten epochs, counted from 0."""
    return min(1.0, (epoch + 1) / 10)


class LossTerms(NamedTuple):
    """The `loss` to minimise, its `terms` for the log, and `noisy_logits` [num_noise, batch, classes], if any."""

    loss: Tensor
    terms: dict[str, Tensor]
    noisy_logits: Tensor | None


class Objective(Record, ABC):
    """A training method: a frozen record of its hyper-parameters, and its loss.

    `loss` is a pure function of its arguments with static shapes. It never waits for the device: no `.item()`, no
    boolean indexing, no `if tensor`. Attacks inside it may switch the classifier to eval mode, and restore the mode.
    """

    name: ClassVar[str]
    """Of a built-in method; others are known by a reference to their class."""
    chunked: ClassVar[bool] = True
    """If true, a batch is divided into num_noise steps, so that every step has batch_size noisy inputs."""

    uses_teacher: ClassVar[bool] = False
    """If true, the recipe may have a teacher, whose votes are `progress.targets`."""

    field_prefix = "objective."

    num_noise: int = Field(default=1, ge=1, description="noisy copies of an image in a step (m)")

    def in_epoch(self, epoch: float) -> Self:
        """Return the objective whose loss the steps of this epoch compute: itself, unless a part of it starts later.

        A step that was captured or compiled is made again when this changes.
        """
        return self

    def without_effect(self, epochs: int, first_drop: int) -> Iterable[str]:
        """Return a line for each hyper-parameter that changes nothing in a run of `epochs`, whose learning rate first
        drops in the epoch `first_drop`."""
        return ()

    @abstractmethod
    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        """Compute the loss of images [batch, ...] in [0, 1], labels [batch] and noise [num_noise, batch, ...]."""


class UnloadedObjective(Objective):
    """An objective outside the package whose code a recipe names and nobody has imported.

    Certificates and reports of a run need only this record: the reference and the hyper-parameters, whatever they are.
    Training needs the class itself, which `smoothcert.training.user_objective` imports with the user's consent.
    """

    model_config = ConfigDict(extra="allow", populate_by_name=True)
    # Both are unknown; the class itself is asked before training.
    chunked: ClassVar[bool] = False
    uses_teacher: ClassVar[bool] = True

    reference: str = Field(alias="name", exclude=True, description="package.module:Class or FILE.py:Class")

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        self.refuse()

    def refuse(self) -> NoReturn:
        raise RequestError(
            f"objective: the code {self.reference} is not loaded; allow it with --objective {self.reference}, or in "
            "Python with smoothcert.training.user_objective.load_objective(recipe)"
        )


def cross_entropy_under_noise(noisy_logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean of CE(z(x + delta_i), y) over noise and images. noisy_logits [num_noise, batch, classes]."""
    import torch

    every_label = labels.expand(noisy_logits.shape[0], -1).flatten()
    return torch.nn.functional.cross_entropy(noisy_logits.flatten(0, 1), every_label)


def noise_augmentation(classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor) -> LossTerms:
    """Compute the cross-entropy under noise as the only term of a loss."""
    noisy_logits = logits_under_noise(classifier, images, noise)
    loss = cross_entropy_under_noise(noisy_logits, labels)
    return LossTerms(loss, {"cross_entropy": loss}, noisy_logits)
