"""An empirical check: gradient ascent on the smoothed classifier bounds its robust accuracy from above.

The attack is that of SmoothAdv (Salman et al. 2019, https://arxiv.org/abs/1906.04584). Certified accuracy must be below
the accuracy under attack; a success inside a certified radius is recorded as a contradiction.

Only a confident change of class is a success: PREDICT on fresh noise must return a class other than the label. An
abstention is not: close votes do not show that the smoothed classifier is wrong, and the curve must be an upper bound.
"""

import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from smoothcert.attacks import attacked, smoothed_pgd
from smoothcert.certification.attack_file import (
    SAME_IF_BOTH_HAVE_IT,
    SAME_OR_IN_NEITHER,
    AttackedImage,
    AttacksFile,
    attacks_writer,
    read_attacks,
)
from smoothcert.certification.attack_recipe import AttackRecipe
from smoothcert.certification.certificates import CertificatesFile, CertifiedImage
from smoothcert.certification.subject import Certifiable, Subject, as_images, data_settings
from smoothcert.classifier import Classifier, failures_reported, logits_of
from smoothcert.data import Images
from smoothcert.data.images import in_parts
from smoothcert.errors import RequestError
from smoothcert.io.compressed import plain_form
from smoothcert.io.results import differing_settings, only_writer
from smoothcert.io.text import rate
from smoothcert.models.precision import DTYPES, at_precision
from smoothcert.noise import Gaussian
from smoothcert.smoothing.certificate import ABSTAIN, class_from_votes
from smoothcert.smoothing.votes import VoteCounter, noise_block

INSIDE = 1 - 1e-6
"""Factor on the radius of the ball, because the norm of a float32 perturbation has a relative error of about 1e-7."""
RELATIVE_STEP = 2.5
"""Step size * steps / radius: enough to reach the sphere and to move along it."""


@dataclass(frozen=True, slots=True)
class AttackStatus:
    """Progress of an attack; counts include rows that the file already had."""

    done: int
    total: int
    withstood: int
    contradictions: int
    images_per_second: float

    def __str__(self) -> str:
        loud = f" {self.contradictions} CONTRADICTIONS" if self.contradictions else ""
        return f"{self.done}/{self.total} withstood {self.withstood} {rate(self.images_per_second)} img/s{loud}"


def noise_key(seed: int, index: int, purpose: Literal["gradient", "votes"], radius: float) -> int:
    """Return 64 bits for the noise of one image at one radius (0: the image itself), which depend on nothing else.

    The gradient and the votes at the point that it leads to never share noise.
    """
    place = (index, int(purpose == "votes"), *struct.unpack("<II", struct.pack("<d", radius)))
    return int(np.random.SeedSequence(seed, spawn_key=place).generate_state(1, np.uint64)[0])


class Outcome(NamedTuple):
    """The first point with a wrong class that attacks on an image found."""

    prediction: int
    """The class at the point; that of the image itself if no attack changed it."""
    distance: float
    """From the image: 0 for one that is wrong without attack, infinite for one that no attack changed."""
    radius: float
    """Of the ball that was searched; 0 and infinite as above."""
    own_class: int
    """The class of the image itself, or ABSTAIN."""


@dataclass(frozen=True)
class Attacker:
    """Attacks images of a smoothed classifier; the result of an image does not depend on the other images.

    `classifier` is differentiated and `counter` votes: the same network, once in float32 (half precision loses small
    gradients) and once at the precision that is deployed and certified.
    """

    classifier: Classifier
    counter: VoteCounter
    recipe: AttackRecipe

    def attack(self, images: Tensor, labels: Tensor, indices: Sequence[int]) -> list[Outcome]:
        """Attack each of `images` [k, c, h, w], with rising radii until its class is wrong.

        With probability at least 1 - alpha over the votes of an image, the smoothed classifier is wrong at its point.
        """
        true_classes = labels.tolist()
        own_classes = self.classes(images, indices, 0.0)
        lengths = [0.0 if _wrong(c, y) else math.inf for c, y in zip(own_classes, true_classes, strict=True)]
        outcomes = [Outcome(c, length, length, c) for c, length in zip(own_classes, lengths, strict=True)]
        for radius in self.recipe.radii:
            standing = [i for i, outcome in enumerate(outcomes) if math.isinf(outcome.distance)]
            if not standing:
                break
            names = [indices[i] for i in standing]
            moved = self.ascend(images[standing], labels[standing], names, radius)
            offsets = moved.double() - images[standing].double()
            distances = torch.linalg.vector_norm(offsets.flatten(1), dim=1).tolist()
            for i, c, distance in zip(standing, self.classes(moved, names, radius), distances, strict=True):
                if _wrong(c, true_classes[i]):
                    outcomes[i] = Outcome(c, distance, radius, own_classes[i])
        return outcomes

    def classes(self, images: Tensor, indices: Sequence[int], radius: float) -> list[int]:
        """Return PREDICT on noise that nothing else uses; `radius` is 0 for images that are not attacked."""
        seeds = [(noise_key(self.recipe.seed, index, "votes", radius), index) for index in indices]
        votes = self.counter.count(images, seeds, "predict", self.recipe.n)
        return [class_from_votes(v, self.recipe.alpha_each) for v in votes.tolist()]

    def ascend(self, images: Tensor, labels: Tensor, indices: Sequence[int], radius: float) -> Tensor:
        """Return the last iterate of the attack in the ball of `radius`, started at each image.

        Every forward pass has the same shape, as for votes: slots without an image repeat the last one.
        """
        recipe = self.recipe
        slots = self.recipe.images_at_once
        noise = images.new_zeros((slots, recipe.num_noise, *images.shape[1:]))
        for slot, index in zip(noise, indices, strict=False):
            self.counter.noise.fill(slot, noise_key(recipe.seed, index, "gradient", radius))
        owner = torch.arange(slots, device=images.device).clamp(max=len(images) - 1)
        iterates = smoothed_pgd(
            self.classifier,
            images[owner],
            labels[owner],
            noise.transpose(0, 1),
            steps=recipe.steps,
            step_size=RELATIVE_STEP * radius / recipe.steps,
            max_norm=radius * INSIDE,
        )
        *_, last = iterates
        return last[: len(images)]


def _wrong(predict: int, label: int) -> bool:
    """Return whether the class is confident and not the label."""
    return predict not in (label, ABSTAIN)


@torch.inference_mode(False)  # a caller may be in inference mode, which has no gradients
def attack_dataset(
    model: Certifiable | Subject,
    data: Images,
    indices: Sequence[int],
    recipe: AttackRecipe,
    path: Path,
    device: torch.device,
    *,
    certificates: CertificatesFile | None = None,
    on_progress: Callable[[AttackStatus], None] = lambda status: None,
) -> AttacksFile:
    """Attack the images `indices` of `data` into the attacks file `path`, except those that it has; return that file.

    A point inside the radius of its image in `certificates`, with another class, is marked as a contradiction. The
    gradient of the attack goes through the denoiser of a `Subject`.
    """
    subject = Subject.of(model)
    if subject.stages:
        raise RequestError("model: expected one classifier, got a cascade; attack each of its stages alone")
    data = as_images(data, subject, device)
    subject.check(data, recipe.sigma, Gaussian.name, device)
    about = subject.about(data, device, recipe.batch_size)
    settings = {**about, **attack_settings(data, recipe, device, certificates)}
    claims = _claims(certificates, settings)
    if indices and max(indices) >= len(data):
        raise RequestError(
            f"image {max(indices)}: expected an index below {len(data)}, the number of images in {data.name}; "
            "give the data that were certified"
        )
    attacker = _attacker(subject.classifier, data, recipe, device)
    subject.check_votes(attacker.counter, data, device)
    with only_writer(path), attacks_writer(path, settings, subject.provenance(device)) as writer:
        wanted = set(indices)
        known = {row.index for row in writer.done}
        rows = [row for row in writer.done if row.index in wanted]
        todo = [index for index in indices if index not in known]
        started = time.perf_counter()
        resumed = len(rows)

        def report() -> None:
            speed = (len(rows) - resumed) / max(time.perf_counter() - started, 1e-9)
            withstood = sum(row.withstood for row in rows)
            contradictions = sum(row.contradiction for row in rows)
            on_progress(AttackStatus(len(rows), len(indices), withstood, contradictions, speed))

        report()
        for part in in_parts(todo, recipe.images_at_once):
            fresh = _attack_images(attacker, data, part, claims, device)
            writer.append(fresh)
            rows += fresh
            report()
    return read_attacks(path)


def attack_settings(
    data: Images, recipe: AttackRecipe, device: torch.device, certificates: CertificatesFile | None
) -> dict[str, Any]:
    """Return everything that a row depends on besides its image and the model."""
    compared = None
    if certificates is not None:
        kept = {key: certificates.settings.get(key) for key in ("n", "alpha", "seed")}
        compared = {"file": plain_form(certificates.path).name, **kept}
    return {
        **data_settings(data),
        "noise": Gaussian.name,
        "sound": False,  # an attack leaves the grid of pixel values, the only place where integer noise is defined
        "attack": "PGD on the smoothed classifier, L2",
        **recipe.to_mapping(),
        "noise_block": noise_block(device),
        "device": device.type,
        "certificates": compared,
    }


def _attack_images(
    attacker: Attacker,
    data: Images,
    indices: Sequence[int],
    claims: Mapping[int, CertifiedImage],
    device: torch.device,
) -> list[AttackedImage]:
    """Return the rows of at most `images_at_once` images; their time is divided evenly.

    A certificate claims one class for all points that are closer than its radius, and for the image itself.
    """
    started = time.perf_counter()
    images, labels = (tensor.to(device) for tensor in data.batch(torch.tensor(indices, device="cpu")))
    for index, label in zip(indices, labels.tolist(), strict=True):
        if index in claims and claims[index].label != label:
            raise RequestError(
                f"image {index}: expected its certified label {claims[index].label}, got {label} in {data.name}; "
                "give the data that were certified"
            )
    outcomes = attacker.attack(images, labels, indices)
    seconds = (time.perf_counter() - started) / len(indices)
    rows = []
    for index, label, outcome in zip(indices, labels.tolist(), outcomes, strict=True):
        claim = claims[index].certificate if index in claims else None
        contradiction = claim is not None and (
            (outcome.distance < claim.radius and outcome.prediction != claim.prediction)
            or (claim.radius > 0 and outcome.own_class not in (claim.prediction, ABSTAIN))
        )
        rows.append(
            AttackedImage(
                index=index,
                label=label,
                prediction=outcome.prediction,
                distance=outcome.distance,
                certified_radius=None if claim is None else claim.radius,
                contradiction=contradiction,
                radius=outcome.radius,
                seconds=seconds,
            )
        )
    return rows


def _claims(certificates: CertificatesFile | None, settings: Mapping[str, Any]) -> dict[int, CertifiedImage]:
    """Return the certified rows by image; certificates of another classifier are refused."""
    if certificates is None:
        return {}
    both = certificates.settings.keys() & settings.keys()
    shared = [*(key for key in SAME_IF_BOTH_HAVE_IT if key in both), *SAME_OR_IN_NEITHER]
    stored = {key: certificates.settings.get(key) for key in shared}
    if differences := differing_settings(stored, {key: settings.get(key) for key in shared}):
        raise RequestError(
            f"{certificates.path}: certifies another classifier, or other images, than those to attack "
            f"({'; '.join(differences)}); attack what was certified, or certify this and give its file (--certificates)"
        )
    return {row.index: row for row in certificates.rows}


def _attacker(model: Classifier, data: Images, recipe: AttackRecipe, device: torch.device) -> Attacker:
    """Return the attacker of a model, with copies of a module on `device`."""
    voting = differentiated = model
    if isinstance(model, nn.Module):
        with failures_reported("the classifier", data.shape):
            voting = at_precision(model, recipe.precision, device, data.shape)
            differentiated = voting if recipe.precision == "fp32" else at_precision(model, "fp32", device, data.shape)
    _check_differentiable(differentiated, data.shape, device)
    noise = Gaussian(recipe.sigma)
    dtype = DTYPES[recipe.precision]
    return Attacker(differentiated, VoteCounter(voting, noise, data.num_classes, recipe.batch_size, dtype), recipe)


def _check_differentiable(classifier: Classifier, shape: tuple[int, int, int], device: torch.device) -> None:
    """Refuse a callable whose logits have no gradient with respect to the image."""
    image = torch.full((1, *shape), 0.5, dtype=torch.float32, device=device, requires_grad=True)
    with torch.enable_grad(), attacked(classifier):
        logits = logits_of(classifier(image))
        (gradient,) = torch.autograd.grad(logits.sum(), image, allow_unused=True) if logits.requires_grad else (None,)
    if gradient is None:
        raise RequestError(
            "the classifier's logits have no gradient with respect to the image, expected a differentiable classifier; "
            "compute them with torch operations, without no_grad and detach"
        )
