"""The samplers of recipes and their settings: `training/sampler.py` draws the images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field

from smoothcert.io.records import Record

if TYPE_CHECKING:  # recipes are read without torch
    from smoothcert.training.sampler import UniformSampler

FEWEST_VOTES = 4
"""The fewest votes from which a positive radius follows: with 3 the lower bound of three agreeing votes is 0.46."""


def _enough_votes(votes: int) -> int:
    if 0 < votes < FEWEST_VOTES:
        raise ValueError(f"sampler.votes: expected 0 or at least {FEWEST_VOTES}, got {votes}")
    return votes


class SamplerSettings(Record, ABC):
    """A sampler as recipes name it, with its settings."""

    name: ClassVar[str]

    @abstractmethod
    def make(self) -> UniformSampler:
        """Make the object that draws the images. Only this needs torch."""


class Uniform(SamplerSettings):
    """Each image once per epoch, in random order."""

    name: ClassVar[str] = "uniform"

    def make(self) -> UniformSampler:
        from smoothcert.training.sampler import UniformSampler

        return UniformSampler()


class RadiusWeighted(SamplerSettings):
    """Discard images that the network gets wrong, and draw the others by their certified radius (Sun et al. 2024)."""

    name: ClassVar[str] = "radius-weighted"
    # A dead start, which epochs 1 and 2 show, would leave the images of one class.
    start: int = Field(default=70, ge=3, le=1_000_000, description="first epoch with discarded images and weights (E)")
    discard_below: float = Field(
        default=0.4,
        ge=0,
        le=1,
        description="share of correct noisy copies below which an image is discarded; 0: none is",
    )
    discard_votes: int = Field(default=100, ge=1, le=10_000, description="noisy copies of each image for this share")
    every: int = Field(default=10, ge=1, le=1_000_000, description="epochs between two updates of the weights")
    votes: Annotated[int, AfterValidator(_enough_votes)] = Field(
        default=16, ge=0, le=10_000, description="noisy copies of each image for the weights; 0: equal weights"
    )

    def make(self) -> UniformSampler:
        from smoothcert.training.sampler import RadiusWeightedSampler

        return RadiusWeightedSampler(self)


SAMPLERS: dict[str, type[SamplerSettings]] = {kind.name: kind for kind in (Uniform, RadiusWeighted)}
