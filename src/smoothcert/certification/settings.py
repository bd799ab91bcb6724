"""The settings of a certification, the recipe that a file records, and the vote counter and rule of a recipe."""

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import nn

from smoothcert.certification.shards import Selection
from smoothcert.classifier import Classifier, failures_reported
from smoothcert.errors import RequestError
from smoothcert.io.records import Recipe, parse_recipe
from smoothcert.models.denoised import Denoised
from smoothcert.models.ensemble import Ensemble
from smoothcert.models.precision import DTYPES, at_precision, resolve_precision
from smoothcert.noise import NOISES
from smoothcert.smoothing.certificate import MOST_VOTES
from smoothcert.smoothing.integer_noise import IntegerGaussian
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import VoteCounter, default_batch_size, fitting_batch_size
from smoothcert.training.choices import LARGEST_SIGMA, SMALLEST_ALPHA, Bound, NoiseName
from smoothcert.training.run_folder import CERTIFICATES

BATCHES_AT_ONCE = 20
"""Approximate number of forward passes between two writes to the file: the work that a kill loses when n is small."""
SELECTION = ("skip", "max_images", "shard")
"""Fields that choose images: a certificate does not depend on them."""


class CertifySettings(Recipe):
    """All options of a certification. None and "auto" are filled in when it starts (see `completed`)."""

    sigma: float | None = Field(
        default=None,
        gt=0,
        le=LARGEST_SIGMA,
        description="standard deviation of the noise; default: that of training",
    )
    noise: NoiseName | None = Field(default=None, description="gaussian certifies in L2, laplace and uniform in L1")
    n0: int = Field(default=100, ge=1, le=MOST_VOTES, description="votes that choose the class")
    n: int = Field(default=100_000, ge=1, le=MOST_VOTES, description="fresh votes that bound its probability")
    alpha: float = Field(
        default=0.001, ge=SMALLEST_ALPHA, lt=1, description="probability that a certificate is wrong, at most"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="of the network; noise is float32"
    )
    bound: Bound = Field(
        default="one-sided",
        description="two-sided also bounds the second class; randomized draws a number per image",
    )
    radii: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(), description="stop as soon as these are decided"
    )
    hold_back: bool | None = Field(
        default=None,
        description="keep part of alpha for the full radius of images that reach n votes; default: with radii",
    )
    radius_loss: float | None = Field(
        default=None, gt=0, le=LARGEST_SIGMA, description="radius, in sigmas, that may be given up for fewer votes"
    )
    label_aware: bool = Field(default=False, description="no further votes for wrong images: for benchmarks only")
    sound: bool = Field(default=False, description="integer noise: certificates that hold in floating point too")
    compile: bool = Field(default=False, description="torch.compile the network")
    batch_size: int | None = Field(default=None, ge=1, le=MOST_VOTES, description="noisy images in a forward pass")
    seed: int | None = Field(default=None, ge=0, description="of the noise; drawn from the operating system by default")
    skip: int = Field(default=1, description="certify every skip-th image")
    max_images: int | None = Field(default=None, description="certify at most this many images")
    shard: tuple[int, int] = Field(default=(1, 1), description="(i, k): certify the i-th of k shares of the images")

    @model_validator(mode="before")
    @classmethod
    def _until_radius(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Replace `until_radius`, if it is given, by the two fields that it stands for."""
        others = dict(fields)
        radii = fields.get("radii", ())
        if (until := others.pop("until_radius", None)) is None:
            return others
        if not hasattr(radii, "__len__") or len(radii):
            raise ValueError("give until_radius or radii, not both")
        if isinstance(until, int | float) and not 0 < until < math.inf:
            raise ValueError(f"until_radius: expected a number above 0, got {until}")
        return {**others, "radii": (until,), "hold_back": False}

    @field_validator("radii", mode="before")
    @classmethod
    def _several_radii(cls, value: object) -> object:
        """Accept a single number, and arrays and tensors."""
        value = value.tolist() if hasattr(value, "tolist") else value
        return (value,) if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _one_rule(self) -> "CertifySettings":
        if list(self.radii) != sorted(set(self.radii)):
            raise ValueError(f"radii: expected rising radii, got {list(self.radii)}")
        if self.radii and self.radius_loss is not None:
            raise ValueError("radius_loss: expected none together with radii or until_radius; choose one of the rules")
        if self.bound != "one-sided" and self.radii:
            raise ValueError(f"bound: expected one-sided together with radii or until_radius, got {self.bound}")
        if self.bound == "two-sided" and self.noise not in (None, "gaussian"):
            raise ValueError(f"bound: expected one-sided for {self.noise} noise, got two-sided")
        if self.sound and self.noise not in (None, "gaussian"):
            raise ValueError(f"sound: expected gaussian noise, got {self.noise}")
        self.selection(0)  # refuses what selects nothing
        return self

    def selection(self, images: int) -> Selection:
        """Return which of the `images` of a data set are certified."""
        return Selection(images, self.skip, self.max_images, self.shard)

    def default_path(
        self, folder: Path, training_sigma: float | None, consensus: int | None = None, *, denoised: bool = False
    ) -> Path:
        """Return the certificates file in `folder`, named after n and the settings that change certificates.

        A sigma other than that of training is part of the name.
        """
        part, parts = self.shard
        options = {
            self.bound: self.bound != "one-sided",
            "radii": bool(self.radii),
            "loss": self.radius_loss is not None,
            "label-aware": self.label_aware,
            "sound": self.sound,
            str(self.noise): self.noise not in (None, "gaussian"),
            f"consensus{consensus}": consensus is not None,
            "denoised": denoised,
            f"sigma{self.sigma or 0:g}": training_sigma not in (None, self.sigma),
            f"shard{part}of{parts}": parts > 1,
        }
        words = [f"test-n{self.n}", *(word for word, used in options.items() if used)]
        return folder / CERTIFICATES / f"{'-'.join(words)}.tsv"

    def to_mapping(self) -> dict[str, Any]:
        """Return what a certificate depends on: all fields but those that choose images."""
        return {name: value for name, value in super().to_mapping().items() if name not in SELECTION}

    def completed(
        self,
        stored: Mapping[str, Any],
        device: torch.device,
        shape: tuple[int, ...],
        defaults: Mapping[str, Any] | None = None,
    ) -> "CertifyRecipe":
        """Return the recipe for images of `shape` on `device`; open fields come from the settings `stored` in a file.

        If there is no file yet, they come from `defaults`, or fit the device; the seed is random.
        """
        defaults = defaults or {}
        fields = {key: defaults[key] for key in ("sigma", "noise") if key in defaults}
        fields |= {key: value for key, value in self.model_dump().items() if value is not None}
        if self.precision == "auto":
            fields["precision"] = stored.get("precision", defaults.get("precision", "auto"))
        fields["precision"] = resolve_precision(fields["precision"], device)
        fields.setdefault("hold_back", bool(self.radii))
        fields["compile"] = self.compile or defaults.get("compile", False)
        size = defaults.get("batch_size") or default_batch_size(device, shape)
        fields.setdefault("batch_size", stored.get("batch_size", size))
        fields.setdefault("seed", secrets.randbits(63) if stored.get("seed") is None else stored["seed"])
        return parse_recipe(CertifyRecipe, fields, "certify")


class CertifyRecipe(CertifySettings):
    """Settings with nothing left open: what a certificate depends on besides the model and the image."""

    sigma: float = Field(gt=0, le=LARGEST_SIGMA)
    noise: NoiseName = "gaussian"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    hold_back: bool = False
    batch_size: int = Field(default=500, ge=1, le=MOST_VOTES)
    seed: int = Field(ge=0)


def make_counter(
    model: Classifier,
    shape: tuple[int, ...],
    num_classes: int,
    recipe: CertifyRecipe,
    device: torch.device,
    *,
    stored: bool = False,
) -> VoteCounter:
    """Return the vote counter of a recipe; on a GPU its batch size is halved until it fits into memory.

    A batch size that is `stored` in a file is known to fit.
    """
    inner = model.classifier if isinstance(model, Denoised) else model
    if recipe.compile and isinstance(inner, Ensemble) and inner.consensus is not None:
        raise RequestError("compile: expected false with consensus, whose passes vary in number; leave one of them out")
    dtype = DTYPES[recipe.precision]
    size = recipe.batch_size
    with failures_reported("the classifier", shape):
        evaluated = at_precision(model, recipe.precision, device, shape) if isinstance(model, nn.Module) else model
        if device.type == "cuda" and not stored:
            size = fitting_batch_size(evaluated, size, torch.zeros(shape, device=device, dtype=dtype))
    noise = NOISES[recipe.noise](recipe.sigma)
    sound = IntegerGaussian(recipe.sigma) if recipe.sound else None
    compiled = recipe.compile and isinstance(evaluated, nn.Module)
    return VoteCounter(evaluated, noise, num_classes, size, dtype, sound, compiled)


def make_rule(recipe: CertifyRecipe, shape: tuple[int, ...]) -> Rule:
    """Return the rule of a recipe, which decides how many votes an image gets."""
    return Rule(
        n0=recipe.n0,
        n=recipe.n,
        alpha=recipe.alpha,
        bound=recipe.bound,
        radii=recipe.radii,
        hold_back=recipe.hold_back,
        radius_loss=recipe.radius_loss,
        label_aware=recipe.label_aware,
        slack=IntegerGaussian(recipe.sigma).slack(math.prod(shape)) if recipe.sound else 0.0,
    )


def images_at_once(recipe: CertifyRecipe) -> int:
    """Return how many images fill the forward passes of both stages; few enough to write rows often."""
    fill_selection = recipe.batch_size // recipe.n0
    # Sequential tests of several images share forward passes, and most of them end early.
    votes = recipe.n if not recipe.radii else min(recipe.n, 5000)
    keep_short = BATCHES_AT_ONCE * recipe.batch_size // votes
    return max(1, min(fill_selection, keep_short))
