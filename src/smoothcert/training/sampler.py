"""Which images an epoch draws: `UniformSampler`, or `RadiusWeightedSampler`, which looks at the network.

A sampler is chosen by the field `sampler` of a recipe and works with every objective: the loop asks it for the order
of the images before each epoch. What it draws depends on the seed of the recipe, on the epoch and on its state, which
is part of the state that a run resumes from. Several processes draw the same order.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from smoothcert.errors import WorkError
from smoothcert.noise import NOISES, Noise
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.training.evaluate import correct_votes
from smoothcert.training.sampler_settings import RadiusWeighted
from smoothcert.training.seeds import Purpose, derived_seed

if TYPE_CHECKING:
    from smoothcert.training.run_in_progress import RunInProgress

ALPHA = 0.1
"""The confidence bounds of the weights are wrong with at most this probability."""


class UniformSampler:
    """Draws each image once per epoch, in random order. Other samplers are subclasses of it."""

    weights: Tensor | None = None
    """The probabilities of the images up to a factor, float64 [n] on the CPU; None: each image is drawn once. A run
    that is resumed restores them."""

    def order(self, run: "RunInProgress", generator: torch.Generator) -> Tensor:
        """The indices of the images of the epoch `run.epoch`, on the device: as many as the data contain."""
        return torch.randperm(len(run.data), generator=generator, device=run.device)

    def metrics(self) -> dict[str, int]:
        """What `metrics.jsonl` records of the epoch."""
        return {}


class RadiusWeightedSampler(UniformSampler):
    """Draws images that the network classifies correctly under noise, in proportion to their certified radius.

    Before the epoch `start` it is uniform. At `start` the images that are wrong too often are discarded for good. At
    `start`, and every `every` epochs from there, the others get new weights. An epoch keeps its number of steps:
    images are drawn with replacement.
    """

    def __init__(self, settings: RadiusWeighted) -> None:
        self.settings = settings

    def order(self, run: "RunInProgress", generator: torch.Generator) -> Tensor:
        settings, epoch = self.settings, run.epoch
        if epoch < settings.start:
            return super().order(run, generator)
        if self.weights is None:
            self.weights = self._without_discarded(run)
        if settings.votes and (epoch - settings.start) % settings.every == 0:
            kept = self.weights.nonzero().flatten()
            votes = correct_votes(run, settings.votes, kept, Purpose.WEIGHT_VOTES)
            table = radius_weights(settings.votes, NOISES[run.recipe.noise](1.0))
            self.weights[kept] = self.weights.new_tensor(table)[votes]
        # On the CPU, where the same seed gives the same images on every machine.
        draws = torch.Generator().manual_seed(derived_seed(run.recipe.seed, Purpose.WEIGHTED_DRAWS, epoch))
        kept = self.weights.nonzero().flatten()
        drawn = torch.multinomial(self.weights[kept], len(run.data), replacement=True, generator=draws)
        return kept[drawn].to(run.device)

    def metrics(self) -> dict[str, int]:
        return {"discarded_images": 0 if self.weights is None else int((self.weights == 0).sum())}

    def _without_discarded(self, run: "RunInProgress") -> Tensor:
        """Equal weights for the images that are correct often enough, 0 for the others."""
        settings = self.settings
        total = len(run.data)
        if not settings.discard_below:
            return torch.ones(total, dtype=torch.float64, device="cpu")
        every = torch.arange(total, device="cpu")
        votes = correct_votes(run, settings.discard_votes, every, Purpose.DISCARD_VOTES)
        weights = (votes.double() / settings.discard_votes >= settings.discard_below).double()
        kept = int(weights.sum())
        if not kept:
            raise WorkError(
                f"{run.folder}: the sampler would discard all {total:,} images in epoch {run.epoch}: each is correct "
                f"in less than {settings.discard_below:.0%} of its noisy copies; the last saved epoch is kept; train "
                "again with a later sampler.start or a lower sampler.discard_below"
            )
        if run.group.leads:
            labels = run.data.labels.cpu()
            left = torch.bincount(labels, weights, run.data.num_classes)
            lost = [str(number) for number in sorted(set(labels.tolist())) if not left[number]]
            classes = f", all of class {', '.join(lost)} among them" if lost else ""
            run.options.on_note(
                f"{run.folder}: discards {total - kept:,} of {total:,} images from epoch {run.epoch} on{classes}"
            )
        return weights


def radius_weights(votes: int, noise: Noise) -> list[float]:
    """The weight of an image with 0, 1, ..., `votes` correct votes: the radius that follows from them.

    It is computed from the Clopper-Pearson bound at ALPHA. Counts without a positive radius get the smallest positive
    one, so that no image disappears: with 16 votes and Gaussian noise of sigma 1, counts below 12 get the 0.154 of 12.
    """
    radii = [noise.radius(error_upper_bound(count, votes, ALPHA)) for count in range(votes + 1)]
    smallest = min(radius for radius in radii if radius > 0)
    return [max(radius, smallest) for radius in radii]
