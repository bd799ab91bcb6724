"""Accuracy of the base classifier with and without noise: a cheap check before many votes are drawn."""

from dataclasses import dataclass
from typing import Literal

import torch
from scipy import special
from torch import Tensor

from smoothcert.io.text import counted
from smoothcert.smoothing.votes import VoteCounter

COPIES = 5
"""Number of noisy copies of each image."""
KEPT = 0.75
"""Share of the clean accuracy that a network trained under noise keeps at least."""
LEVEL = 0.05
"""Significance level of the tests that distinguish a poor classifier from too few images."""


@dataclass(frozen=True, slots=True)
class NoiseAccuracy:
    """Accuracy of the base classifier on the first `images`, in [0, 1], without and with noise.

    The `chance` of each is the accuracy if predictions and labels were independent: the share of its label for a
    constant classifier, 1 / classes for a random one on balanced data.
    """

    images: int
    clean: float
    clean_chance: float
    noisy: float
    noisy_chance: float

    @classmethod
    def of(cls, labels: Tensor, clean: Tensor, noisy: Tensor, num_classes: int) -> "NoiseAccuracy":
        """From the classes of the images without noise, and of one or several noisy copies of all of them."""
        repeated = labels.repeat(len(noisy) // len(labels))
        return cls(
            len(labels),
            float((clean == labels).double().mean()),
            independent_accuracy(clean, labels, num_classes),
            float((noisy == repeated).double().mean()),
            independent_accuracy(noisy, repeated, num_classes),
        )

    @property
    def fault(self) -> Literal["chance", "noise"] | None:
        """ "chance": the classifier is at chance with and without noise. "noise": it fails under this noise only.

        None also if there are too few images to be sure. A poor clean accuracy alone is no fault: networks that are
        trained with much noise may have it.
        """
        noisy_at_chance = at_chance(self.noisy, self.noisy_chance, self.images)
        if noisy_at_chance and at_chance(self.clean, self.clean_chance, self.images):
            return "chance"
        lost = noisy_at_chance and above_chance(self.clean, self.clean_chance, self.images)
        return "noise" if lost or clearly_below(self.noisy, KEPT * self.clean, self.images) else None

    def __str__(self) -> str:
        return f"clean accuracy {self.clean:.0%}, under noise {self.noisy:.0%} ({counted(self.images, 'image')})"

    @property
    def warning(self) -> str | None:
        """What to do about the fault; None without one."""
        if self.fault == "chance":
            return (
                f"accuracy at chance: {self}; check the normalisation (it belongs inside the model), the input range "
                "[0, 1] and the order of the labels, or let `smoothcert doctor` find the fault"
            )
        doctor = "`smoothcert doctor` says how to train"
        return None if self.fault is None else f"not robust to this noise: {self}; choose a smaller sigma; {doctor}"


def accuracy_under_noise(counter: VoteCounter, images: Tensor, labels: Tensor) -> NoiseAccuracy:
    """Measure the accuracy on `images` (float32 [k, ...] on the device) and on a few noisy copies of each.

    The noise comes from a separate generator with a fixed seed, so the votes of certificates are not affected.
    """
    generator = torch.Generator(images.device).manual_seed(0)
    labels = labels.to(images.device)
    clean = counter.classes(images)
    copies = [counter.classes(images + counter.noise.sample(images.shape, generator)) for _ in range(COPIES)]
    return NoiseAccuracy.of(labels, clean, torch.cat(copies), counter.num_classes)


def independent_accuracy(classes: Tensor, labels: Tensor, num_classes: int) -> float:
    """The expected accuracy if `classes` were assigned to the images at random."""
    shares = [torch.bincount(t.long(), minlength=num_classes).double() / len(t) for t in (classes, labels)]
    return min(1.0, float((shares[0] * shares[1]).sum()))


def at_chance(share: float, chance: float, images: int) -> bool:
    """Whether the accuracy is not above chance and clearly not that of a usable classifier, by binomial tests.

    Copies of an image are not independent, so the number of images is the sample size.
    """
    usable = chance + (1 - chance) / 4
    return not above_chance(share, chance, images) and clearly_below(share, usable, images)


def above_chance(share: float, chance: float, images: int) -> bool:
    """Whether the accuracy behind `share` is above chance, by a binomial test."""
    correct = round(share * images)
    return correct > 0 and float(special.bdtrc(correct - 1, images, chance)) <= LEVEL


def clearly_below(share: float, level: float, images: int) -> bool:
    """Whether the accuracy behind `share` is below `level`, by a binomial test."""
    return float(special.bdtr(round(share * images), images, level)) <= LEVEL
