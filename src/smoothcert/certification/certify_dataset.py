"""Certify a data set: which images, in which batches, by which process, into which file. Files are resumed."""

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smoothcert.certification.cascade import refuse_other_rules
from smoothcert.certification.certificates import (
    CertificatesFile,
    CertifiedImage,
    certificates_path,
    certificates_writer,
    read_certificates,
)
from smoothcert.certification.estimate import CertificationEstimate, faster_options, seconds_per_vote
from smoothcert.certification.file_parts import (
    existing_rows,
    join_parts,
    part_path,
    update_provenance,
    wait_for_settings,
)
from smoothcert.certification.inputs import checked_indices
from smoothcert.certification.prepare import Prepared
from smoothcert.certification.settings import CertifyRecipe, CertifySettings, images_at_once, make_counter
from smoothcert.certification.subject import Certifiable, Data, Subject, as_images, data_settings, missing_classes
from smoothcert.data import DATASETS, Images
from smoothcert.data.class_names import unknown_class
from smoothcert.data.images import in_parts, spread
from smoothcert.distributed import Team, find_device
from smoothcert.errors import RequestError
from smoothcert.io.compressed import existing_form, exists, plain_form, plain_while_written
from smoothcert.io.records import parse_recipe
from smoothcert.io.results import ResultWriter, only_writer, stored_settings, write_settings
from smoothcert.io.text import duration, rate
from smoothcert.smoothing.accuracy import NoiseAccuracy, accuracy_under_noise
from smoothcert.smoothing.votes import fitting_into_memory
from smoothcert.training.denoiser import Denoiser

ACCURACY_IMAGES = 100
"""Largest number of images on which accuracy is measured before certifying."""


@dataclass(frozen=True, slots=True)
class CertificationStatus:
    """Progress of this process; `done` and `average_certified_radius` include rows that the file already had."""

    done: int
    total: int
    average_certified_radius: float
    images_per_second: float
    votes_per_second: float

    @property
    def seconds_left(self) -> float | None:
        """Extrapolated from the images that this call has certified; None before the first."""
        return (self.total - self.done) / self.images_per_second if self.images_per_second > 0 else None

    def __str__(self) -> str:
        now = f"{self.done}/{self.total} ACR {self.average_certified_radius:.3f}"
        now += f" {duration(self.seconds_left)} left" if self.seconds_left else ""
        if self.images_per_second:  # none if the file was complete
            now += f" {rate(self.images_per_second)} img/s {rate(self.votes_per_second)} votes/s"
        return now


Report = Callable[[CertificationStatus], None]


def _warn(text: str) -> None:
    """Warn at the line that called this module."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals is globals():
        level += 1
        frame = frame.f_back
    warnings.warn(text, stacklevel=level)


def certify_dataset(
    model: Certifiable | Subject,
    data: Data,
    out: str | Path,
    settings: CertifySettings | None = None,
    *,
    name: str | None = None,
    denoiser: Denoiser | None = None,
    indices: Sequence[int] | Tensor | None = None,
    device: str | torch.device = "auto",
    team: Team = Team(),
    on_progress: Report = lambda status: None,
    on_accuracy: Callable[[NoiseAccuracy], None] = lambda accuracy: None,
    on_estimate: Callable[[CertificationEstimate], None] | None = None,
    on_warning: Callable[[str], None] = _warn,
    wanted_radius: float | None = None,
    **fields: Any,
) -> CertificatesFile:
    """Certify images of `data` into the certificates file `out` (NAME.tsv), and return the file.

    A file NAME.tsv.gz is compressed when all images are certified; until then it is the plain text NAME.tsv.

    `model` is a run, a RunEnsemble, a Cascade, a SmoothedClassifier, or a module or callable from images in [0, 1] to
    logits, which the file calls `name`. A `denoiser` is put in front of it (see `Denoised` for the guarantee). `data`
    is what `load_dataset` returns, a torch Dataset of (image, label) pairs, or a DataLoader of one. Settings (see
    CertifySettings) are given as an object, as keywords, or both: then keywords override the object. Images that the
    file already has are skipped; a file of other settings is refused. `indices` replaces the images that `skip`,
    `max_images` and `shard` choose.

    Several processes (`team`) share the images. Each appends to its own part, and the first one joins the parts: the
    rows are those of one process. Parts that an interrupted call left are used.

    Before the first image, the leading process measures the accuracy on some of the images with and without noise,
    records it in the file and passes it to `on_accuracy`. With `on_estimate` it also measures how long the missing
    images take at most, and calls `on_estimate` with the result. `on_warning` is called with what makes certificates
    worse than they could be: a low accuracy, other noise than that of training, classes without an image, too few votes
    for any certificate or for `wanted_radius`.
    """
    path = certificates_path(out)
    device = find_device(device)
    if not isinstance(settings, CertifySettings | None):
        given_type = type(settings).__name__
        raise RequestError(f"settings: expected CertifySettings, got {given_type}; use CertifySettings(n=...)")
    given = settings.model_dump() if settings else {}
    given |= {"radii": (), **fields} if fields.get("until_radius") is not None else fields
    settings = parse_recipe(CertifySettings, given, "certify")
    subject = Subject.of(model, name).behind(denoiser)
    if subject.stages:
        refuse_other_rules(settings, subject.defaults["sigma"])
    images = as_images(data, subject, device)
    recipe = team.agree(settings.completed(stored_settings(path), device, images.shape, subject.defaults))
    subject.check(images, recipe.sigma, recipe.noise, device)
    about = subject.about(images, device, recipe.batch_size)
    prepared = prepared_for(subject, images, recipe, device, team, stored=exists(path))
    about |= {**data_settings(images), **prepared.settings(subject.classifier)}
    provenance = {**subject.provenance(device), **subject.training()}
    if images.class_names is not None and images.name not in DATASETS:  # whose names reports know
        provenance["class_names"] = list(images.class_names)
    if indices is None:
        selection = prepared.recipe.selection(len(images))
        chosen = selection.indices
        provenance["selection"] = selection.to_mapping()
        whole = replace(selection, shard=(1, 1)).indices
    else:
        chosen = whole = indices_in(images, indices)
    for text in warnings_about(subject, prepared, images, whole, wanted_radius) if team.leads else ():
        on_warning(text)

    def report_accuracy(accuracy: NoiseAccuracy) -> None:
        if accuracy.warning is not None:
            on_warning(accuracy.warning)
        on_accuracy(accuracy)

    with ExitStack() as stack:
        if team.leads:
            stack.enter_context(only_writer(path))
            stack.enter_context(plain_while_written(path))
        stack.enter_context(fitting_into_memory(prepared.recipe.batch_size))
        work = Certification(prepared, images, team, on_estimate)
        work.write(plain_form(path), chosen, about, provenance, on_progress, report_accuracy)
    team.wait()
    return read_certificates(existing_form(path))


def prepared_for(
    subject: Subject, images: Images, recipe: CertifyRecipe, device: torch.device, team: Team, *, stored: bool
) -> Prepared:
    """Return the classifier, or all stages of a cascade, ready to vote with one batch size in all processes.

    A classifier whose votes are not independent, and radii that cannot be tested, are refused.
    A batch size that is `stored` in a file is known to fit into memory.
    """
    counters = []
    for stage in subject.stages or (subject,):
        sigma = recipe.sigma if stage is subject else stage.defaults["sigma"]
        of_stage = recipe.model_copy(update={"sigma": sigma})
        counter = make_counter(stage.classifier, images.shape, images.num_classes, of_stage, device, stored=stored)
        stage.check_votes(counter, images, device)
        counters.append(counter)
        # The next stage starts from the size that fits into memory here.
        recipe = recipe.model_copy(update={"batch_size": counter.batch_size})
    recipe = team.agree(recipe)
    first, *later = (replace(counter, batch_size=recipe.batch_size) for counter in counters)
    prepared = Prepared(first, recipe, images.shape, device, tuple(later))
    prepared.rule.errors_at_radii(first.noise)
    return prepared


def indices_in(images: Images, indices: Sequence[int] | Tensor) -> list[int]:
    """Return the `indices` that a user has given; repeated ones, and those of no image, are refused."""
    chosen = checked_indices(indices)
    if len(set(chosen)) < len(chosen) or not all(0 <= index < len(images) for index in chosen):
        raise RequestError(
            f"indices: expected different integers from 0 to {len(images) - 1}, got {str(chosen)[:60]}; "
            "name images of the data set"
        )
    return chosen


def warnings_about(
    subject: Subject, prepared: Prepared, images: Images, indices: Sequence[int], wanted_radius: float | None
) -> list[str]:
    """Return what a user should know before votes on the images `indices` are drawn."""
    recipe = prepared.recipe
    warnings_or_none = (
        prepared.unreachable(wanted_radius),
        missing_classes(images, indices),
        *(unknown_class(images, run.spec.class_names, run.folder) for run in subject.runs),
        *subject.noise_warnings(recipe.sigma, recipe.noise),
    )
    return [text for text in warnings_or_none if text is not None]


@dataclass(frozen=True)
class Certification:
    """The images of a data set and all that their certificates depend on; `team` shares the work."""

    prepared: Prepared
    data: Images
    team: Team = field(default_factory=Team)
    on_estimate: Callable[[CertificationEstimate], None] | None = None

    def write(
        self,
        path: Path,
        indices: Sequence[int],
        settings: Mapping[str, Any],
        provenance: Mapping[str, Any],
        on_progress: Report,
        on_accuracy: Callable[[NoiseAccuracy], None],
    ) -> None:
        """Certify the images that `path` and the parts of an interrupted call do not have."""
        team = self.team
        if team.leads:
            join_parts(path, settings, provenance)
            known = {row.index for row in existing_rows(path)}
            missing = [index for index in indices if index not in known]
            if missing and not self.prepared.later:  # of a cascade, no stage alone needs to be accurate
                accuracy = self.accuracy(indices)
                provenance = {**provenance, "accuracy": asdict(accuracy)}
                on_accuracy(accuracy)
                if self.on_estimate is not None:
                    self.on_estimate(self.estimate(missing))
            update_provenance(path, provenance, more=bool(missing))
            if team.size > 1 and not path.exists():
                write_settings(path, settings, provenance)  # includes the seed, with which parts are continued
        team.wait()
        if team.size > 1:
            wait_for_settings(path, team)
        with certificates_writer(part_path(path, team), settings, provenance) as writer:
            self.append(indices, writer, existing_rows(path), on_progress)
        team.wait()
        if team.leads and team.size > 1:
            join_parts(path, settings, provenance)

    def accuracy(self, indices: Sequence[int]) -> NoiseAccuracy:
        """Return the accuracy with and without noise on some of `indices`, spread evenly."""
        images, labels = self.data.batch(torch.tensor(indices, device="cpu")[spread(len(indices), ACCURACY_IMAGES)])
        return accuracy_under_noise(self.prepared.counter, images.to(self.prepared.device), labels)

    def estimate(self, indices: Sequence[int]) -> CertificationEstimate:
        """Measure how long `indices` take, shared by all processes, if no image stops early."""
        recipe = self.prepared.recipe
        image, _ = self.data.batch(torch.tensor(indices[:1], device="cpu"))
        image = image.to(self.prepared.device)
        images = -(-len(indices) // self.team.size)
        votes, counter = recipe.n0 + recipe.n, self.prepared.counter
        seconds = seconds_per_vote(counter, image, images * votes)
        return CertificationEstimate(images, votes, seconds, faster_options(counter, self.prepared.device))

    def rows(self, indices: Sequence[int]) -> list[CertifiedImage]:
        """Certify a few images; their time is divided evenly."""
        started = time.perf_counter()
        images, labels = self.data.batch(torch.tensor(indices, device="cpu"))
        seeds = [(self.prepared.recipe.seed, index) for index in indices]
        return self.prepared.rows(images, labels.tolist(), indices, seeds, started)

    def append(
        self,
        indices: Sequence[int],
        writer: ResultWriter[CertifiedImage],
        existing: Sequence[CertifiedImage],
        on_progress: Report,
    ) -> None:
        """Certify this process's share of the images that are not among the `existing` rows, a group at a time."""
        team = self.team
        wanted = set(indices)
        known = {row.index for row in existing}
        counted = [row for row in existing if row.index in wanted] if team.leads else []
        todo = [index for index in indices if index not in known][team.rank :: team.size]
        total = len(counted) + len(todo)
        started = time.perf_counter()
        done = len(counted)
        fresh = 0
        votes = 0
        radii = sum(row.radius_if_correct for row in counted)

        def report() -> None:
            seconds = max(time.perf_counter() - started, 1e-9)
            mean = radii / done if done else 0.0
            on_progress(CertificationStatus(done, total, mean, fresh / seconds, votes / seconds))

        report()
        for part in in_parts(todo, images_at_once(self.prepared.recipe)):
            rows = self.rows(part)
            writer.append(rows)
            done += len(rows)
            fresh += len(rows)
            votes += sum(row.certificate.spent for row in rows)
            radii += sum(row.radius_if_correct for row in rows)
            report()
