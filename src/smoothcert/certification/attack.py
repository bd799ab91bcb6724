"""The empirical check: gradient ascent on the smoothed classifier bounds its robust accuracy from above.

The attack is that of SmoothAdv (Salman et al. 2019, https://arxiv.org/abs/1906.04584). A certified curve must lie
below what it leaves standing; a success inside a certified radius is a contradiction and is recorded as such.

Only a confident change of class counts as a success: PREDICT on fresh noise must name a class other than the label.
An abstention is not a success, though deployment would suffer from it: that the votes are close does not show that
the smoothed classifier is wrong, and the curve is to be an upper bound.
"""

import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from smoothcert.attacks import attacked, smoothed_pgd
from smoothcert.certification.attack_file import AttackedImage, AttacksFile, attacks_writer, read_attacks
from smoothcert.certification.certificates import CertificatesFile, CertifiedImage
from smoothcert.data import UNSPLIT, Images
from smoothcert.errors import RequestError
from smoothcert.io.results import alone, differing_settings
from smoothcert.models.precision import DTYPES, at_precision
from smoothcert.noise import Gaussian
from smoothcert.smoothing.bounds import top_two_p_value
from smoothcert.smoothing.certificate import ABSTAIN, MOST_VOTES
from smoothcert.smoothing.predict import class_from_votes
from smoothcert.smoothing.votes import Classifier, VoteCounter, noise_block
from smoothcert.training.checkpoint import Run, versions
from smoothcert.training.recipe import Recipe

# The norm of a float32 perturbation is off by some 1e-7 of itself: a ball smaller by this keeps it within the radius.
INSIDE = 1 - 1e-6
RELATIVE_STEP = 2.5
"""Step size * steps / radius: enough to reach the sphere and to move along it."""
SAME_CLASSIFIER = ("dataset", "split", "noise", "sigma", "sound", "precision", "weights_sha256")
"""Settings in which certificates and attack must agree, else they speak of different classifiers."""


class AttackRecipe(Recipe):
    """What an attack depends on besides the model and the image."""

    sigma: float = Field(gt=0, description="standard deviation of the noise")
    radii: tuple[float, ...] = Field(description="L2 norms of the attacks, rising")
    steps: int = Field(20, ge=1, le=10**6, description="gradient steps of an attack")
    num_noise: int = Field(32, ge=1, description="noises that the gradient is averaged over")
    n: int = Field(1000, ge=1, le=MOST_VOTES, description="fresh votes that decide whether an attack succeeded")
    alpha: float = Field(0.001, gt=0, lt=1, description="probability that an image falls wrongly, at most")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="of the votes; gradients are float32")
    batch_size: int = Field(500, ge=1, description="noisy images in a forward pass of the votes")
    gradient_batch_size: int = Field(256, ge=1, description="noisy images whose gradient is computed at once")
    seed: int = Field(ge=0, description="of the noise; drawn from the operating system by default")

    @model_validator(mode="after")
    def _can_attack(self) -> "AttackRecipe":
        given = ", ".join(f"{radius:g}" for radius in self.radii) or "none"
        if (
            not self.radii
            or self.radii[0] <= 0
            or any(b <= a for a, b in zip(self.radii, self.radii[1:], strict=False))
        ):
            raise ValueError(f"radii: expected rising numbers > 0, got {given}; give for example 0.25, 0.5, 1")
        if self.num_noise > self.gradient_batch_size:
            raise ValueError(
                f"num_noise: expected at most gradient_batch_size = {self.gradient_batch_size}, got {self.num_noise}; "
                "lower the one or raise the other"
            )
        if top_two_p_value(self.n, 0) > self.alpha_each:
            raise ValueError(
                f"n: {self.n} votes decide nothing at alpha {self.alpha:g} and {len(self.radii)} radii even if all "
                f"agree; give at least {math.ceil(1 - math.log2(self.alpha_each))}"
            )
        return self

    @property
    def alpha_each(self) -> float:
        """For one prediction: an image has one as it is and one a radius, together wrong with at most `alpha`."""
        return self.alpha / (1 + len(self.radii))

    @property
    def images_at_once(self) -> int:
        return self.gradient_batch_size // self.num_noise


@dataclass(frozen=True, slots=True)
class AttackStatus:
    """Where the attack stands; counts include rows found in the file."""

    done: int
    total: int
    withstood: int
    contradictions: int
    images_per_second: float


@dataclass(frozen=True, slots=True)
class Example:
    """A class, how far from the image the point with that class lies, and the ball it was searched in."""

    predict: int
    distance: float
    radius: float


class Purpose(IntEnum):
    """What noise is for: the gradient and the votes at the point it leads to must not share any."""

    GRADIENT = 0
    VOTES = 1


def noise_key(seed: int, index: int, purpose: Purpose, radius: float) -> int:
    """64 bits that depend on the arguments alone, for the noise of one image at one radius (0: the image itself)."""
    place = (index, int(purpose), *struct.unpack("<II", struct.pack("<d", radius)))
    return int(np.random.SeedSequence(seed, spawn_key=place).generate_state(1, np.uint64)[0])


def default_attack_radii(sigma: float) -> tuple[float, ...]:
    """sigma/2, sigma, ..., 4 sigma: beyond that, 100,000 votes certify nothing (3.8 sigma at alpha 0.001)."""
    return tuple(sigma * half / 2 for half in range(1, 9))


@dataclass(frozen=True)
class Attacker:
    """Attacks images of a smoothed classifier; what happens to an image does not depend on its neighbours.

    `classifier` is differentiated, `counter` votes: the same network, the one in float32 (half precision loses small
    gradients), the other at the precision that is deployed and certified.
    """

    classifier: Classifier
    counter: VoteCounter
    recipe: AttackRecipe

    def examples(self, images: Tensor, labels: Tensor, indices: Sequence[int]) -> list[Example]:
        """For each image the example at the smallest radius that gave one; infinite numbers where none did.

        With probability at least 1 - alpha over the votes of an image, the smoothed classifier is indeed wrong there.
        """
        wanted = labels.tolist()
        found = [
            Example(c, *(0.0, 0.0) if _wrong(c, y) else (math.inf, math.inf))
            for c, y in zip(self.classes(images, indices, 0.0), wanted, strict=True)
        ]
        for radius in self.recipe.radii:
            standing = [i for i, example in enumerate(found) if math.isinf(example.radius)]
            if not standing:
                break
            names = [indices[i] for i in standing]
            moved = self.ascend(images[standing], labels[standing], names, radius)
            offsets = moved.double() - images[standing].double()
            distances = torch.linalg.vector_norm(offsets.flatten(1), dim=1).tolist()
            for i, c, distance in zip(standing, self.classes(moved, names, radius), distances, strict=True):
                if _wrong(c, wanted[i]):
                    found[i] = Example(c, distance, radius)
        return found

    def classes(self, images: Tensor, indices: Sequence[int], radius: float) -> list[int]:
        """PREDICT on noise that nothing else uses; at the images' own radius 0, at attacked points theirs."""
        seeds = [(noise_key(self.recipe.seed, index, Purpose.VOTES, radius), index) for index in indices]
        votes = self.counter.count(images, seeds, "predict", self.recipe.n)
        return [class_from_votes(v, self.recipe.alpha_each) for v in votes.tolist()]

    def ascend(self, images: Tensor, labels: Tensor, indices: Sequence[int], radius: float) -> Tensor:
        """The last iterate of the attack in the ball of `radius`, started at each image.

        Every forward pass has the same shape, as for votes: slots without an image repeat the last one.
        """
        recipe, slots = self.recipe, self.recipe.images_at_once
        noise = torch.zeros((slots, recipe.num_noise, *images.shape[1:]), device=images.device)
        for slot, index in zip(noise, indices, strict=False):
            self.counter.noise.fill(slot, noise_key(recipe.seed, index, Purpose.GRADIENT, radius))
        owner = torch.arange(slots, device=images.device).clamp(max=len(images) - 1)
        ball = radius * INSIDE
        iterates = smoothed_pgd(
            self.classifier,
            images[owner],
            labels[owner],
            noise.transpose(0, 1),
            steps=recipe.steps,
            step_size=RELATIVE_STEP * radius / recipe.steps,
            max_norm=ball,
        )
        *_, last = iterates
        return last[: len(images)]


def _wrong(predict: int, label: int) -> bool:
    """A confident class other than the label; an abstention is not."""
    return predict not in (label, ABSTAIN)


def attack_dataset(
    model: Classifier,
    data: Images,
    indices: Sequence[int],
    recipe: AttackRecipe,
    path: Path,
    device: torch.device,
    *,
    certificates: CertificatesFile | None = None,
    about: Mapping[str, Any],
    provenance: Mapping[str, Any],
    on_progress: Callable[[AttackStatus], None] = lambda status: None,
) -> AttacksFile:
    """Attack the images `indices` of `data` into the attacks file `path`, skipping those it holds; return that file.

    `about` says what is attacked (model digest, ...); with the recipe it must equal the file's settings. An example
    inside the radius of its image in `certificates`, with another class, is marked as a contradiction.
    """
    settings = attack_settings(about, data, recipe, device, certificates)
    claims = _claims(certificates, settings)
    if indices and max(indices) >= len(data):
        raise RequestError(
            f"image {max(indices)}: expected an index below {len(data)}, the number of images in {data.name}; "
            "give the data that were certified"
        )
    attacker = _attacker(model, data, recipe, device)
    with alone(path), attacks_writer(path, settings, provenance) as writer:
        wanted = set(indices)
        rows = [row for row in writer.done if row.index in wanted]
        held = {row.index for row in writer.done}
        todo = [index for index in indices if index not in held]
        started, resumed = time.perf_counter(), len(rows)
        on_progress(_status(rows, resumed, len(indices), started))
        for start in range(0, len(todo), recipe.images_at_once):
            fresh = attack_images(attacker, data, todo[start : start + recipe.images_at_once], claims, device)
            writer.append(fresh)
            rows += fresh
            on_progress(_status(rows, resumed, len(indices), started))
    return read_attacks(path)


def attack_run(
    run: Run,
    data: Images,
    indices: Sequence[int],
    recipe: AttackRecipe,
    path: Path,
    device: torch.device,
    certificates: CertificatesFile | None = None,
    on_progress: Callable[[AttackStatus], None] = lambda status: None,
) -> AttacksFile:
    """`attack_dataset` for a run folder: the file says which model it was and how it was trained."""
    run.refuse_other_images(data)
    return attack_dataset(
        run.model,
        data,
        indices,
        recipe,
        path,
        device,
        certificates=certificates,
        about=run.about(),
        provenance={"versions": versions(device), "threads": torch.get_num_threads(), "epoch": run.epoch},
        on_progress=on_progress,
    )


def attack_settings(
    about: Mapping[str, Any],
    data: Images,
    recipe: AttackRecipe,
    device: torch.device,
    certificates: CertificatesFile | None,
) -> dict[str, Any]:
    """Everything that a row depends on besides its image."""
    compared = None
    if certificates is not None:
        kept = {key: certificates.settings.get(key) for key in ("n", "alpha", "seed")}
        compared = {"file": certificates.path.name, **kept}
    return {
        **about,
        "dataset": data.name,
        "split": data.split,
        "noise": Gaussian.name,
        "sound": False,  # an attack leaves the grid of pixel values, on which alone integer noise is defined
        "attack": "PGD on the smoothed classifier, L2",
        **recipe.to_mapping(),
        "noise_block": noise_block(device),
        "device": device.type,
        "certificates": compared,
    }


def attack_images(
    attacker: Attacker,
    data: Images,
    indices: Sequence[int],
    claims: Mapping[int, CertifiedImage],
    device: torch.device,
) -> list[AttackedImage]:
    """Rows for at most `images_at_once` images; their time is shared out evenly."""
    started = time.perf_counter()
    images, labels = (tensor.to(device) for tensor in data.batch(torch.tensor(indices)))
    for index, label in zip(indices, labels.tolist(), strict=True):
        if index in claims and claims[index].label != label:
            raise RequestError(
                f"image {index}: expected its certified label {claims[index].label}, got {label} in {data.name}; "
                "give the data that were certified"
            )
    examples = attacker.examples(images, labels, indices)
    seconds = (time.perf_counter() - started) / len(indices)
    triples = zip(indices, labels.tolist(), examples, strict=True)
    return [_row(index, label, example, claims.get(index), seconds) for index, label, example in triples]


def _row(index: int, label: int, example: Example, claim: CertifiedImage | None, seconds: float) -> AttackedImage:
    """The example beside what is claimed for its image: one class everywhere closer than the certified radius."""
    certificate = None if claim is None else claim.certificate
    inside = certificate is not None and example.distance < certificate.radius
    other = certificate is not None and example.predict != certificate.predict
    certified = None if certificate is None else certificate.radius
    return AttackedImage(
        index, label, example.predict, example.distance, certified, inside and other, example.radius, seconds
    )


def _claims(certificates: CertificatesFile | None, settings: Mapping[str, Any]) -> dict[int, CertifiedImage]:
    """Certified rows by image, if they speak of the classifier that `settings` describe."""
    if certificates is None:
        return {}
    shared = [key for key in SAME_CLASSIFIER if key in certificates.settings and key in settings]
    stored = {key: certificates.settings[key] for key in shared}
    if settings["split"] == UNSPLIT and stored.get("split") == "test":
        stored["split"] = UNSPLIT  # what an earlier version wrote for data without a split
    if differences := differing_settings(stored, {key: settings[key] for key in shared}):
        raise RequestError(
            f"{certificates.path}: certifies another classifier than the one to attack ({'; '.join(differences)}); "
            "attack what was certified or give no certificates"
        )
    return {row.index: row for row in certificates.rows}


def _attacker(model: Classifier, data: Images, recipe: AttackRecipe, device: torch.device) -> Attacker:
    voting = differentiated = model
    if isinstance(model, nn.Module):
        voting = at_precision(model, recipe.precision, device, data.shape)
        differentiated = voting if recipe.precision == "fp32" else at_precision(model, "fp32", device, data.shape)
    _check_differentiable(differentiated, data.shape, device)
    noise, dtype = Gaussian(recipe.sigma), DTYPES[recipe.precision]
    return Attacker(differentiated, VoteCounter(voting, noise, data.num_classes, recipe.batch_size, dtype), recipe)


def _check_differentiable(classifier: Classifier, shape: tuple[int, int, int], device: torch.device) -> None:
    """Refuse a callable whose logits PyTorch cannot trace back to the image: ascent would have no direction."""
    image = torch.full((1, *shape), 0.5, device=device, requires_grad=True)
    with torch.enable_grad(), attacked(classifier):
        logits = classifier(image)
        traced = isinstance(logits, Tensor) and logits.requires_grad
        (gradient,) = torch.autograd.grad(logits.sum(), image, allow_unused=True) if traced else (None,)
    if gradient is None:
        raise RequestError(
            "the classifier's logits have no gradient with respect to the image, expected a differentiable classifier; "
            "compute them with torch operations, without no_grad and detach"
        )


def _status(rows: Sequence[AttackedImage], resumed: int, total: int, started: float) -> AttackStatus:
    rate = (len(rows) - resumed) / max(time.perf_counter() - started, 1e-9)
    withstood, contradictions = sum(row.withstood for row in rows), sum(row.contradiction for row in rows)
    return AttackStatus(len(rows), total, withstood, contradictions, rate)
