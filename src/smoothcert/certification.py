"""A data set through CERTIFY: which images, in which batches, into which file; resumed where it was left."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smoothcert.bounds import smallest_error_bound, votes_needed
from smoothcert.certificates import CertificatesWriter, CertifiedImage
from smoothcert.checkpoint import Run, versions, weights_digest
from smoothcert.data import Images
from smoothcert.errors import RequestError
from smoothcert.models import check_outputs
from smoothcert.noise import Gaussian
from smoothcert.recipe import CertifyRecipe
from smoothcert.smoothing.certify import certificate_from_votes
from smoothcert.smoothing.precision import DTYPES, at_precision
from smoothcert.smoothing.votes import Classifier, VoteCounter, noise_block, select_and_estimate

BATCHES_AT_ONCE = 20
"""Forward passes, about, between two writes to the file: what a kill can cost when n is small."""


@dataclass(frozen=True, slots=True)
class CertificationStatus:
    """Where certification stands; `done` and `average_certified_radius` include rows found in the file."""

    done: int
    total: int
    average_certified_radius: float
    images_per_second: float
    votes_per_second: float


def chosen_images(total: int, skip: int, max_images: int | None) -> list[int]:
    """Every `skip`-th image, at most `max_images` of them."""
    if skip < 1:
        raise RequestError(f"skip: expected at least 1 (every image), got {skip}")
    if max_images is not None and max_images < 1:
        raise RequestError(f"max-images: expected at least 1, got {max_images}")
    return list(range(0, total, skip))[:max_images]


def certify_dataset(
    model: Classifier,
    data: Images,
    indices: Sequence[int],
    recipe: CertifyRecipe,
    path: Path,
    device: torch.device,
    *,
    about: Mapping[str, Any],
    provenance: Mapping[str, Any],
    on_progress: Callable[[CertificationStatus], None] = lambda status: None,
) -> None:
    """Certify the images `indices` of `data` into the certificates file `path`, skipping those it holds.

    `about` says what is certified (data set, model digest); with the recipe it must equal the file's settings.
    """
    noise = Gaussian(recipe.sigma)
    settings = {
        **about,
        "dataset": data.name,
        "split": data.split,
        "noise": noise.name,
        "bound": "clopper-pearson one-sided",
        **recipe.to_mapping(),
        "noise_block": noise_block(device),
        "device": device.type,
    }
    evaluated = at_precision(model, recipe.precision, device) if isinstance(model, nn.Module) else model
    counter = VoteCounter(evaluated, noise, data.num_classes, recipe.batch_size, DTYPES[recipe.precision])
    with CertificatesWriter(path, settings, provenance) as writer:
        wanted = set(indices)
        radii = [row.radius_if_correct for row in writer.done if row.index in wanted]
        held = {row.index for row in writer.done}
        todo = [index for index in indices if index not in held]
        started, resumed = time.perf_counter(), len(radii)
        report(on_progress, radii, resumed, len(indices), started, recipe)
        group = images_at_once(recipe)
        for start in range(0, len(todo), group):
            rows = certify_images(counter, data, todo[start : start + group], recipe, device)
            writer.append(rows)
            radii += [row.radius_if_correct for row in rows]
            report(on_progress, radii, resumed, len(indices), started, recipe)


def certify_run(
    run: Run,
    data: Images,
    indices: Sequence[int],
    recipe: CertifyRecipe,
    path: Path,
    device: torch.device,
    on_progress: Callable[[CertificationStatus], None] = lambda status: None,
) -> None:
    """`certify_dataset` for a run folder: the file says which model it was and how it was trained."""
    if (data.shape, data.num_classes) != (run.spec.shape, run.spec.num_classes):
        raise RequestError(
            f"{run.folder}: its model takes images {run.spec.shape} of {run.spec.num_classes} classes, "
            f"{data.name} has {data.shape} of {data.num_classes}; give the data that it was trained for"
        )
    about = {
        "model": run.recipe.model,
        "objective": run.recipe.method,
        "training_sigma": run.recipe.sigma,
        "weights_sha256": weights_digest(run.model.state_dict()),
    }
    provenance = {"versions": versions(device), "threads": torch.get_num_threads(), "epoch": run.epoch}
    certify_dataset(
        run.model, data, indices, recipe, path, device, about=about, provenance=provenance, on_progress=on_progress
    )


def certify_own_model(
    name: str,
    model: Classifier,
    data: Images,
    indices: Sequence[int],
    recipe: CertifyRecipe,
    path: Path,
    device: torch.device,
    on_progress: Callable[[CertificationStatus], None] = lambda status: None,
) -> None:
    """`certify_dataset` for a user's own module or callable, called `name` in the file."""
    check_outputs(model, name, data.shape, data.num_classes)
    weights = weights_digest(model.state_dict()) if isinstance(model, nn.Module) else None
    about = {"model": name, "objective": name, "weights_sha256": weights}
    provenance = {"versions": versions(device), "threads": torch.get_num_threads()}
    certify_dataset(
        model, data, indices, recipe, path, device, about=about, provenance=provenance, on_progress=on_progress
    )


def images_at_once(recipe: CertifyRecipe) -> int:
    """As many images as fill the forward passes of both stages, but few enough to write rows often."""
    fill_selection = recipe.batch_size // recipe.n0
    keep_short = BATCHES_AT_ONCE * recipe.batch_size // recipe.n
    return max(1, min(fill_selection, keep_short))


def certify_images(
    counter: VoteCounter, data: Images, indices: Sequence[int], recipe: CertifyRecipe, device: torch.device
) -> list[CertifiedImage]:
    """CERTIFY on a few images; their time is shared out evenly."""
    started = time.perf_counter()
    images, labels = data.batch(torch.tensor(indices))
    seeds = [(recipe.seed, index) for index in indices]
    selection, estimation = select_and_estimate(counter, images.to(device), seeds, recipe.n0, recipe.n)
    seconds = (time.perf_counter() - started) / len(indices)
    rows = zip(indices, labels.tolist(), selection.tolist(), estimation.tolist(), strict=True)
    return [
        CertifiedImage(index, label, certificate_from_votes(chosen, fresh, counter.noise, recipe.alpha), seconds)
        for index, label, chosen, fresh in rows
    ]


def report(
    on_progress: Callable[[CertificationStatus], None],
    radii: Sequence[float],
    resumed: int,
    total: int,
    started: float,
    recipe: CertifyRecipe,
) -> None:
    rate = (len(radii) - resumed) / max(time.perf_counter() - started, 1e-9)
    mean = sum(radii) / len(radii) if radii else 0.0
    on_progress(CertificationStatus(len(radii), total, mean, rate, rate * (recipe.n0 + recipe.n)))


def unreachable_radius(recipe: CertifyRecipe, radius: float) -> str | None:
    """A warning when n votes cannot certify `radius` even if all agree, with the n that can; else None."""
    noise = Gaussian(recipe.sigma)
    ceiling = noise.radius(smallest_error_bound(recipe.n, recipe.alpha))
    if radius < ceiling:
        return None
    q = noise.error_at(radius)
    enough = f"n = {votes_needed(q, recipe.alpha):,} can" if q > 1e-15 else f"no n can at sigma {recipe.sigma}"
    most = math.floor(ceiling * 1000) / 1000
    return f"n = {recipe.n:,} votes cannot certify radius {radius:g} (at most {most:.3f}); {enough}"
