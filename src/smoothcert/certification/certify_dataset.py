"""A data set through CERTIFY: which images, in which batches, by which process, into which file; resumed where left."""

import glob
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smoothcert.certification.certificates import (
    NEWER_SETTINGS,
    CertifiedImage,
    certificates_writer,
    read_certificates,
    write_certificates,
)
from smoothcert.certification.shards import Selection as Selection
from smoothcert.certification.shards import chosen_images as chosen_images
from smoothcert.classifier import evaluating
from smoothcert.data import DATASETS, UNSPLIT, ImageData, Images
from smoothcert.distributed import Team
from smoothcert.io.results import (
    ResultWriter,
    alone,
    read_settings,
    settings_path,
    stored_settings,
    write_settings,
)
from smoothcert.models import check_outputs, is_code
from smoothcert.models.precision import DTYPES, at_precision, has_batch_norm, resolve_precision
from smoothcert.noise import NOISES
from smoothcert.smoothing.accuracy import NoiseAccuracy, accuracy_under_noise
from smoothcert.smoothing.bounds import smallest_error_bound, votes_needed
from smoothcert.smoothing.integer_noise import IntegerGaussian
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import (
    Classifier,
    VoteCounter,
    default_batch_size,
    fitting_batch_size,
    fitting_into_memory,
    noise_block,
)
from smoothcert.training.checkpoint import Run, tensors_digest, versions
from smoothcert.training.recipe import CertifyRecipe, parse_recipe

BATCHES_AT_ONCE = 20
"""Forward passes, about, between two writes to the file: what a kill can cost when n is small."""
TOLD_BY_IMAGES = 100
"""Number of images whose pixels and predicted classes identify data sets without a name and user code."""
LOOKED_AT = 100
"""Number of images, at most, on which accuracy is measured before certifying."""


@dataclass(frozen=True, slots=True)
class CertificationStatus:
    """Where this process stands; `done` and `average_certified_radius` include rows found in the file."""

    done: int
    total: int
    average_certified_radius: float
    images_per_second: float
    votes_per_second: float
    votes: int

    @property
    def seconds_left(self) -> float | None:
        """Extrapolated from the images that this call has certified; None before the first."""
        return (self.total - self.done) / self.images_per_second if self.images_per_second > 0 else None


Report = Callable[[CertificationStatus], None]


def missing_classes(data: Images, indices: Sequence[int]) -> str | None:
    """A warning when the chosen images lack a class that so many, had they been drawn, would have had.

    Of one draw in twenty it would be wrong."""
    counts = torch.bincount(data.labels.cpu(), minlength=data.num_classes)
    chosen = torch.bincount(data.labels.cpu()[list(indices)], minlength=data.num_classes)
    expected, classes = counts * (len(indices) / len(data)), int((counts > 0).sum())
    missing = ((chosen == 0) & (expected >= math.log(20 * classes))).nonzero().flatten().tolist()
    if not missing:
        return None
    some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
    return (
        f"the {len(indices):,} chosen images have none of {len(missing)} of the {classes} classes ({some}), "
        f"for such is the order of {data.name}; ACR and accuracies are those of the others: choose another --skip"
    )


def complete_recipe(
    fields: Mapping[str, Any], path: Path, device: torch.device, shape: tuple[int, int, int]
) -> CertifyRecipe:
    """The recipe of `fields`; what is None there fits the device, or comes from an existing file at `path`."""
    given = {key: value for key, value in fields.items() if value is not None}
    stored = stored_settings(path)
    if given.get("precision", "auto") == "auto":
        given["precision"] = stored.get("precision", "auto")
    given["precision"] = resolve_precision(given["precision"], device)
    given.setdefault("batch_size", stored.get("batch_size", default_batch_size(device, shape)))
    given.setdefault("seed", secrets.randbits(63) if stored.get("seed") is None else stored["seed"])
    return parse_recipe(CertifyRecipe, given, "certify")


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
    team: Team = Team(),
    on_progress: Report = lambda status: None,
    on_accuracy: Callable[[NoiseAccuracy], None] = lambda accuracy: None,
    selection: Selection | None = None,
) -> None:
    """Certify the images `indices` of `data` into the certificates file `path`, skipping those it holds.

    `about` says what is certified (model digest, method); with the recipe it must equal the file's settings. Several
    processes share the images, each appends to a part of its own, and the first one joins the parts: the same rows as
    one process gives. Parts that an interrupted call left behind are used.
    Before the first image, the leading process measures the accuracy on some of `indices` with and without noise; it
    is recorded in the file and passed to `on_accuracy`. `selection` says how `indices` were chosen, for the record.
    """
    counter, recipe = make_counter(model, data.shape, data.num_classes, recipe, device, stored=path.exists())
    recipe = team.agree(recipe)
    counter = replace(counter, batch_size=recipe.batch_size)
    make_rule(recipe, data.shape).errors_at_radii(counter.noise)  # refused before there is a file
    folded = has_batch_norm(model) and not has_batch_norm(counter.classifier)
    settings = {
        **about,
        "dataset": data.name,
        "split": data.split,
        # A name in DATASETS stands for its images; what a folder or a file of one's own holds may have changed.
        "images_sha256": None if data.name in DATASETS else images_digest(data),
        **({"classes": list(data.class_names or ())} if data.relabelled else {}),
        "num_classes": data.num_classes,
        **recipe.to_mapping(),
        "batch_norm_folded": folded,
        "noise_block": noise_block(device),
        "draws": counter.noise.draws(device),
        "device": device.type,
    }
    settings = recorded_settings(settings, stored_settings(path))
    if selection is not None:
        provenance = {**provenance, "selection": selection.to_mapping()}
    with alone(path) if team.leads else nullcontext(), fitting_into_memory(recipe.batch_size):
        if team.leads:
            take_up_parts(path, settings, provenance)
            known = {row.index for row in held_rows(path)}
            if any(index not in known for index in indices):
                accuracy = stored_accuracy(path) or look_at_images(counter, data, indices, device)
                provenance = {**provenance, "accuracy": accuracy.to_mapping()}
                on_accuracy(accuracy)
            update_provenance(path, provenance)
            if team.size > 1 and not path.exists():
                write_settings(path, settings, provenance)  # with the seed, which parts are continued with
        team.wait()
        held = held_rows(path)
        with certificates_writer(part_path(path, team), settings, provenance) as writer:
            certify_missing(counter, data, indices, recipe, device, writer, held, team, on_progress)
        team.wait()
        if team.leads and team.size > 1:
            take_up_parts(path, settings, provenance)


def recorded_settings(settings: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without those that are not known, or that an earlier version did not write into the file."""
    if settings.get("split") == UNSPLIT and stored.get("split") == "test":
        settings = {**settings, "split": "test"}  # what an earlier version wrote for data without a split
    return {
        key: value
        for key, value in settings.items()
        if key not in NEWER_SETTINGS or (value is not None and (not stored or key in stored))
    }


def held_rows(path: Path) -> list[CertifiedImage]:
    """The rows of a file, none where there is no file yet."""
    return list(read_certificates(path).rows) if path.exists() else []


def look_at_images(counter: VoteCounter, data: Images, indices: Sequence[int], device: torch.device) -> NoiseAccuracy:
    """The accuracy on the first of `indices`, with and without noise."""
    images, labels = data.batch(torch.tensor(indices[:LOOKED_AT]))
    return accuracy_under_noise(counter, images.to(device), labels)


def stored_accuracy(path: Path) -> NoiseAccuracy | None:
    """What an earlier call on the same file measured."""
    return NoiseAccuracy.from_mapping(read_settings(path)["provenance"].get("accuracy")) if path.exists() else None


def update_provenance(path: Path, provenance: Mapping[str, Any]) -> None:
    """Record the selection and the accuracy of this call in an existing file; what else it records stays."""
    if not path.exists():
        return
    stored = read_settings(path)
    fresh = {key: provenance[key] for key in ("selection", "accuracy") if key in provenance}
    if {**stored["provenance"], **fresh} != stored["provenance"]:
        write_settings(path, stored["settings"], {**stored["provenance"], **fresh})


def part_path(path: Path, team: Team) -> Path:
    """Where a process writes: the file itself, or a part of its own beside it."""
    return path if team.size == 1 else path.with_name(f".{path.name.removesuffix('.tsv')}.part{team.rank}.tsv")


def take_up_parts(path: Path, settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Make `path` hold all rows that it and its parts have, and remove the parts."""
    rows: dict[int, CertifiedImage] = {}
    parts = sorted(path.parent.glob(f".{glob.escape(path.name.removesuffix('.tsv'))}.part*.tsv"))
    for file in (path, *parts) if path.exists() else parts:
        with certificates_writer(file, settings, provenance) as writer:
            rows |= {row.index: row for row in writer.done}
    if parts:
        kept = read_settings(path)["provenance"] if settings_path(path).exists() else provenance
        write_certificates(path, rows.values(), settings, kept)
    for part in parts:
        part.unlink()
        settings_path(part).unlink(missing_ok=True)


def make_counter(
    model: Classifier,
    shape: tuple[int, int, int],
    num_classes: int,
    recipe: CertifyRecipe,
    device: torch.device,
    *,
    stored: bool = False,
) -> tuple[VoteCounter, CertifyRecipe]:
    """The vote counter of a recipe, and the recipe with a batch size that fits into memory (a `stored` one does)."""
    dtype = DTYPES[recipe.precision]
    evaluated = at_precision(model, recipe.precision, device, shape) if isinstance(model, nn.Module) else model
    if device.type == "cuda" and not stored:
        example = torch.zeros(shape, device=device, dtype=dtype)
        size = fitting_batch_size(evaluated, recipe.batch_size, example)
        recipe = recipe.model_copy(update={"batch_size": size})
    noise = NOISES[recipe.noise](recipe.sigma)
    sound = IntegerGaussian(recipe.sigma) if recipe.sound else None
    compiled = recipe.compile and isinstance(evaluated, nn.Module)
    return VoteCounter(evaluated, noise, num_classes, recipe.batch_size, dtype, sound, compiled), recipe


def make_rule(recipe: CertifyRecipe, shape: tuple[int, int, int]) -> Rule:
    """How votes are spent, as the recipe says."""
    return Rule(
        n0=recipe.n0,
        n=recipe.n,
        alpha=recipe.alpha,
        two_sided=recipe.bound == "two-sided",
        radii=recipe.radii,
        hold_back=recipe.hold_back,
        radius_loss=recipe.radius_loss,
        label_aware=recipe.label_aware,
        slack=IntegerGaussian(recipe.sigma).slack(math.prod(shape)) if recipe.sound else 0.0,
    )


def certify_missing(
    counter: VoteCounter,
    data: Images,
    indices: Sequence[int],
    recipe: CertifyRecipe,
    device: torch.device,
    writer: ResultWriter[CertifiedImage],
    held: Sequence[CertifiedImage],
    team: Team,
    on_progress: Report,
) -> None:
    """This process's share of the images that are not `held` yet, a group at a time."""
    wanted, known = set(indices), {row.index for row in held}
    mine = [row for row in held if row.index in wanted] if team.leads else []
    todo = [index for index in indices if index not in known][team.rank :: team.size]
    total, started = len(mine) + len(todo), time.perf_counter()
    rule, group = make_rule(recipe, data.shape), images_at_once(recipe)
    done, fresh, votes, radii = len(mine), 0, 0, sum(row.radius_if_correct for row in mine)

    def show() -> None:
        seconds = max(time.perf_counter() - started, 1e-9)
        mean = radii / done if done else 0.0
        on_progress(CertificationStatus(done, total, mean, fresh / seconds, votes / seconds, votes))

    show()
    for start in range(0, len(todo), group):
        rows = certify_images(counter, data, todo[start : start + group], recipe.seed, rule, device)
        writer.append(rows)
        done, fresh = done + len(rows), fresh + len(rows)
        votes += sum(row.certificate.n0 + row.certificate.n for row in rows)
        radii += sum(row.radius_if_correct for row in rows)
        show()


def certify_run(
    run: Run,
    data: Images,
    indices: Sequence[int],
    recipe: CertifyRecipe,
    path: Path,
    device: torch.device,
    on_progress: Report = lambda status: None,
    team: Team = Team(),
    on_accuracy: Callable[[NoiseAccuracy], None] = lambda accuracy: None,
    selection: Selection | None = None,
) -> None:
    """`certify_dataset` for a run folder: the file says which model it was and how it was trained."""
    run.refuse_other_images(data)
    about = run.about()
    if is_code(run.recipe.model):
        about["classes_sha256"] = classes_digest(run.model, data, device, recipe.batch_size)
    computed = {"versions": versions(device), "threads": torch.get_num_threads(), "epoch": run.epoch}
    provenance = {**computed, "model": dict(run.provenance)}
    certify_dataset(
        run.model,
        data,
        indices,
        recipe,
        path,
        device,
        about=about,
        provenance=provenance,
        team=team,
        on_progress=on_progress,
        on_accuracy=on_accuracy,
        selection=selection,
    )


def certify_own_model(
    name: str,
    model: Classifier,
    data: Images,
    indices: Sequence[int],
    recipe: CertifyRecipe,
    path: Path,
    device: torch.device,
    on_progress: Report = lambda status: None,
    team: Team = Team(),
    on_accuracy: Callable[[NoiseAccuracy], None] = lambda accuracy: None,
    selection: Selection | None = None,
) -> None:
    """`certify_dataset` for a user's own module or callable, called `name` in the file."""
    check_outputs(model, name, data.shape, data.num_classes)
    about: dict[str, Any] = {
        "model": name,
        "objective": name,
        "weights_sha256": tensors_digest(model.state_dict()) if isinstance(model, nn.Module) else None,
        "classes_sha256": classes_digest(model, data, device, recipe.batch_size),
    }
    provenance = {"versions": versions(device), "threads": torch.get_num_threads()}
    certify_dataset(
        model,
        data,
        indices,
        recipe,
        path,
        device,
        about=about,
        provenance=provenance,
        team=team,
        on_progress=on_progress,
        on_accuracy=on_accuracy,
        selection=selection,
    )


def classes_digest(model: Classifier, data: Images, device: torch.device, batch_size: int) -> str:
    """SHA-256 of the classes that user code gives to some of the images: whether it is still the code that a file was
    begun with. Code that differs on other images only is not recognised."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    where = device if parameter is None else parameter.device
    # Few at once: the memory that the code takes is not known yet.
    batches = torch.split(_some_images(data), min(batch_size, 10))
    with torch.no_grad(), evaluating(model):
        classes = [model(batch.to(where)).argmax(1) for batch in batches]
    return tensors_digest({"classes": torch.cat(classes) if classes else torch.empty(0)})


def images_digest(data: Images) -> str:
    """SHA-256 of all labels and, where they are in memory, of some of the images: one more or less shows, one that was
    edited may not."""
    images = {"images": _some_images(data)} if isinstance(data, ImageData) else {}
    return tensors_digest({"labels": data.labels, **images})


def _some_images(data: Images) -> Tensor:
    """Float32 [n, c, h, w], spread over the data."""
    count = min(TOLD_BY_IMAGES, len(data))
    return data.batch(torch.arange(count) * len(data) // max(count, 1))[0]


def images_at_once(recipe: CertifyRecipe) -> int:
    """As many images as fill the forward passes of both stages, but few enough to write rows often."""
    fill_selection = recipe.batch_size // recipe.n0
    # Sequential tests of several images share forward passes, and most of them end early.
    votes = recipe.n if not recipe.radii else min(recipe.n, 5000)
    keep_short = BATCHES_AT_ONCE * recipe.batch_size // votes
    return max(1, min(fill_selection, keep_short))


def certify_images(
    counter: VoteCounter, data: Images, indices: Sequence[int], seed: int, rule: Rule, device: torch.device
) -> list[CertifiedImage]:
    """`rule` on a few images; their time is shared out evenly."""
    started = time.perf_counter()
    images, labels = data.batch(torch.tensor(indices))
    certificates = rule.certify(counter, images.to(device), [(seed, index) for index in indices], labels.tolist())
    seconds = (time.perf_counter() - started) / len(indices)
    rows = zip(indices, labels.tolist(), certificates, strict=True)
    return [CertifiedImage(index, label, certificate, seconds) for index, label, certificate in rows]


def unreachable_radius(recipe: CertifyRecipe, radius: float) -> str | None:
    """A warning when n votes cannot certify `radius` even if all agree, with the n that can; else None."""
    noise = NOISES[recipe.noise](recipe.sigma)
    ceiling = noise.radius(smallest_error_bound(recipe.n, recipe.alpha))
    if radius <= ceiling:
        return None
    q = noise.error_at(radius)
    enough = f"n = {votes_needed(q, recipe.alpha):,} can" if q > 1e-15 else f"no n can at sigma {recipe.sigma}"
    most = math.floor(ceiling * 1000) / 1000
    return f"n = {recipe.n:,} votes cannot certify radius {radius:g} (at most {most:.3f}); {enough}"
