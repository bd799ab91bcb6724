"""What an attack depends on, checked and completed: noise level, radii, gradient steps, votes."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.errors import RequestError
from smoothcert.io.records import Recipe, parse_recipe
from smoothcert.io.results import stored_settings
from smoothcert.models.precision import resolve_precision
from smoothcert.smoothing.certificate import MOST_VOTES, fewest_deciding_votes
from smoothcert.smoothing.votes import default_batch_size
from smoothcert.training.choices import LARGEST_SIGMA, SMALLEST_ALPHA


class AttackRecipe(Recipe):
    """What an attack depends on besides the model and the image."""

    sigma: float = Field(gt=0, le=LARGEST_SIGMA, description="standard deviation of the noise")
    radii: tuple[float, ...] = Field(description="L2 norms of the attacks, rising")
    steps: int = Field(20, ge=1, le=10**6, description="gradient steps of an attack")
    num_noise: int = Field(32, ge=1, description="noise samples that the gradient is averaged over")
    n: int = Field(1000, ge=1, le=MOST_VOTES, description="fresh votes that decide whether an attack succeeded")
    alpha: float = Field(
        0.001, ge=SMALLEST_ALPHA, lt=1, description="probability that a success is wrongly reported, at most"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="of the votes; gradients are float32")
    batch_size: int = Field(500, ge=1, description="noisy images in a forward pass of the votes")
    gradient_batch_size: int = Field(256, ge=1, description="noisy images whose gradient is computed at once")
    seed: int = Field(ge=0, description="of the noise; drawn from the operating system by default")

    @model_validator(mode="after")
    def _can_attack(self) -> "AttackRecipe":
        if not self.radii or self.radii[0] <= 0 or list(self.radii) != sorted(set(self.radii)):
            given = ", ".join(f"{radius:g}" for radius in self.radii) or "none"
            raise ValueError(f"radii: expected rising numbers > 0, got {given}; give for example 0.25, 0.5, 1")
        if self.num_noise > self.gradient_batch_size:
            raise ValueError(
                f"num_noise: expected at most gradient_batch_size = {self.gradient_batch_size}, got {self.num_noise}; "
                "lower the one or raise the other"
            )
        if self.n < (least := fewest_deciding_votes(self.alpha_each)):
            raise ValueError(
                f"n: {self.n} votes decide nothing at alpha {self.alpha:g} and {len(self.radii)} radii even if all "
                f"agree; give at least {least}"
            )
        return self

    @property
    def alpha_each(self) -> float:
        """Alpha of one prediction: an image has one without attack and one per radius, together at most `alpha`."""
        return self.alpha / (1 + len(self.radii))

    @property
    def images_at_once(self) -> int:
        return self.gradient_batch_size // self.num_noise


def complete_attack_recipe(
    fields: Mapping[str, Any],
    path: Path,
    device: torch.device,
    shape: tuple[int, int, int],
    certificates: CertificatesFile | None,
    trained_sigma: float | None = None,
) -> AttackRecipe:
    """Return the recipe of `fields`; missing ones come from the certificates, the file at `path`, or the training.

    `shape` is that of the images. A sigma that nothing gives is a RequestError.

    The radii default to sigma/2, sigma, ..., 4 sigma: 100,000 votes certify at most 3.8 sigma at alpha 0.001.
    """
    stored = stored_settings(path)
    certified = {} if certificates is None else certificates.settings
    given = {key: value for key, value in fields.items() if value is not None}
    sigma = given.get("sigma") or certified.get("sigma") or trained_sigma
    if sigma is None:
        raise RequestError("--sigma: missing; give the noise level of the classifier, for instance --sigma 0.25")
    defaults = {
        "sigma": sigma,
        "radii": tuple(sigma * half / 2 for half in range(1, 9)),
        "batch_size": stored.get("batch_size", default_batch_size(device, shape)),
        "seed": stored.get("seed", secrets.randbits(63)),
    }
    precision = resolve_precision(given.get("precision") or certified.get("precision") or "auto", device)
    return parse_recipe(AttackRecipe, {**defaults, **given, "precision": precision}, "attack")
