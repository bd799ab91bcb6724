"""Certify a data set: which images, in which batches, by which process, into which file. Files are resumed."""

import glob
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from smoothcert.certification.certificates import (
    NEWER_SETTINGS,
    CertificatesFile,
    CertifiedImage,
    certificates_writer,
    read_certificates,
    write_certificates,
)
from smoothcert.certification.ensemble import RunEnsemble
from smoothcert.certification.settings import (
    CertifyRecipe,
    CertifySettings,
    images_at_once,
    make_counter,
    make_rule,
)
from smoothcert.certification.smoothed_classifier import SmoothedClassifier
from smoothcert.certification.subject import Data, Subject, as_images, images_digest
from smoothcert.data import DATASETS, UNSPLIT, Images
from smoothcert.distributed import Team, find_device
from smoothcert.errors import RequestError
from smoothcert.io.results import (
    ResultWriter,
    alone,
    read_settings,
    settings_path,
    stored_settings,
    write_settings,
)
from smoothcert.models.precision import has_batch_norm
from smoothcert.smoothing.accuracy import NoiseAccuracy, accuracy_under_noise
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import Classifier, VoteCounter, fitting_into_memory, noise_block
from smoothcert.training.checkpoint import Run
from smoothcert.training.recipe import parse_recipe

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
    votes: int

    @property
    def seconds_left(self) -> float | None:
        """Extrapolated from the images that this call has certified; None before the first."""
        return (self.total - self.done) / self.images_per_second if self.images_per_second > 0 else None


Report = Callable[[CertificationStatus], None]


def certify_dataset(
    model: Run | RunEnsemble | SmoothedClassifier | Classifier,
    data: Data,
    out: str | Path,
    settings: CertifySettings | None = None,
    *,
    name: str | None = None,
    indices: Sequence[int] | None = None,
    device: str | torch.device = "auto",
    team: Team = Team(),
    on_progress: Report = lambda status: None,
    on_accuracy: Callable[[NoiseAccuracy], None] = lambda accuracy: None,
    **fields: Any,
) -> CertificatesFile:
    """Certify images of `data` into the certificates file `out` (NAME.tsv), and return the file.

    `model` is a run, a RunEnsemble, a SmoothedClassifier, or a module or callable from images in [0, 1] to logits,
    which the file calls `name`. `data` is what `load_dataset` returns, a torch Dataset of (image, label) pairs, or a
    DataLoader of one. Settings (see CertifySettings) are given as an object, as keywords, or both, of which the
    keywords win. Images that the file already has are skipped; a file of other settings is refused. `indices` replaces
    the images that `skip`, `max_images` and `shard` choose.

    Several processes (`team`) share the images. Each appends to its own part, and the first one joins the parts: the
    rows are those of one process. Parts that an interrupted call left are used.

    Before the first image, the leading process measures the accuracy on some of the images with and without noise,
    records it in the file and passes it to `on_accuracy`.
    """
    path, device = Path(out), find_device(device) if isinstance(device, str) else device
    if path.suffix != ".tsv":
        raise RequestError(f"out: expected the path of a file that ends in .tsv, got {out}; add the ending")
    settings = parse_recipe(CertifySettings, {**(settings.model_dump() if settings else {}), **fields}, "certify")
    subject = Subject.of(model, name)
    images = as_images(data, subject, device)
    recipe = team.agree(settings.completed(path, device, images.shape, subject.defaults))
    subject.check(images)
    about = subject.about(images, device, recipe.batch_size)
    counter, recipe = make_counter(
        subject.classifier, images.shape, images.num_classes, recipe, device, stored=path.exists()
    )
    recipe = team.agree(recipe)
    work = Certification(replace(counter, batch_size=recipe.batch_size), images, recipe, device, team)
    work.rule.errors_at_radii(counter.noise)  # refuses radii that cannot be tested before there is a file
    folded = has_batch_norm(subject.classifier) and not has_batch_norm(counter.classifier)
    provenance = {**subject.provenance(device), **subject.training()}
    if indices is None:
        selection = recipe.selection(len(images))
        indices, provenance["selection"] = selection.indices, selection.to_mapping()
    with alone(path) if team.leads else nullcontext(), fitting_into_memory(recipe.batch_size):
        work.write(path, indices, {**about, **work.settings(folded)}, provenance, on_progress, on_accuracy)
    team.wait()
    return read_certificates(path)


@dataclass(frozen=True)
class Certification:
    """The images of a data set and all that their certificates depend on; `team` shares the work."""

    counter: VoteCounter
    data: Images
    recipe: CertifyRecipe
    device: torch.device
    team: Team = field(default_factory=Team)

    @property
    def rule(self) -> Rule:
        return make_rule(self.recipe, self.data.shape)

    def settings(self, batch_norm_folded: bool) -> dict[str, Any]:
        """Return the settings of the file, except those of the model."""
        data = self.data
        return {
            "dataset": data.name,
            "split": data.split,
            # A name in DATASETS stands for its images; the content of user data may change.
            "images_sha256": None if data.name in DATASETS else images_digest(data),
            **({"classes": list(data.class_names or ())} if data.relabelled else {}),
            "num_classes": data.num_classes,
            **self.recipe.to_mapping(),
            "batch_norm_folded": batch_norm_folded,
            "noise_block": noise_block(self.device),
            "draws": self.counter.noise.draws(self.device),
            "device": self.device.type,
        }

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
        team, settings = self.team, comparable_settings(settings, stored_settings(path))
        if team.leads:
            join_parts(path, settings, provenance)
            known = {row.index for row in existing_rows(path)}
            if any(index not in known for index in indices):
                accuracy = stored_accuracy(path) or self.accuracy(indices)
                provenance = {**provenance, "accuracy": accuracy.to_mapping()}
                on_accuracy(accuracy)
            update_provenance(path, provenance)
            if team.size > 1 and not path.exists():
                write_settings(path, settings, provenance)  # includes the seed, with which parts are continued
        team.wait()
        with certificates_writer(part_path(path, team), settings, provenance) as writer:
            self.append(indices, writer, existing_rows(path), on_progress)
        team.wait()
        if team.leads and team.size > 1:
            join_parts(path, settings, provenance)

    def accuracy(self, indices: Sequence[int]) -> NoiseAccuracy:
        """Return the accuracy on the first of `indices`, with and without noise."""
        images, labels = self.data.batch(torch.tensor(indices[:ACCURACY_IMAGES]))
        return accuracy_under_noise(self.counter, images.to(self.device), labels)

    def rows(self, indices: Sequence[int]) -> list[CertifiedImage]:
        """Certify a few images; their time is divided evenly."""
        started = time.perf_counter()
        images, labels = self.data.batch(torch.tensor(indices))
        seeds = [(self.recipe.seed, index) for index in indices]
        certificates = self.rule.certify(self.counter, images.to(self.device), seeds, labels.tolist())
        seconds = (time.perf_counter() - started) / len(indices)
        triples = zip(indices, labels.tolist(), certificates, strict=True)
        return [CertifiedImage(index, label, certificate, seconds) for index, label, certificate in triples]

    def append(
        self,
        indices: Sequence[int],
        writer: ResultWriter[CertifiedImage],
        existing: Sequence[CertifiedImage],
        on_progress: Report,
    ) -> None:
        """Certify this process's share of the images that are not among the `existing` rows, a group at a time."""
        team, wanted, known = self.team, set(indices), {row.index for row in existing}
        counted = [row for row in existing if row.index in wanted] if team.leads else []
        todo = [index for index in indices if index not in known][team.rank :: team.size]
        total, started, group = len(counted) + len(todo), time.perf_counter(), images_at_once(self.recipe)
        done, fresh, votes, radii = len(counted), 0, 0, sum(row.radius_if_correct for row in counted)

        def report() -> None:
            seconds = max(time.perf_counter() - started, 1e-9)
            mean = radii / done if done else 0.0
            on_progress(CertificationStatus(done, total, mean, fresh / seconds, votes / seconds, votes))

        report()
        for start in range(0, len(todo), group):
            rows = self.rows(todo[start : start + group])
            writer.append(rows)
            done, fresh = done + len(rows), fresh + len(rows)
            votes += sum(row.certificate.n0 + row.certificate.n for row in rows)
            radii += sum(row.radius_if_correct for row in rows)
            report()


def comparable_settings(settings: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` without those that are unknown, or that an earlier version did not write into the file."""
    if settings.get("split") == UNSPLIT and stored.get("split") == "test":
        settings = {**settings, "split": "test"}  # what an earlier version wrote for data without a split
    return {
        key: value
        for key, value in settings.items()
        if key not in NEWER_SETTINGS or (value is not None and (not stored or key in stored))
    }


def existing_rows(path: Path) -> tuple[CertifiedImage, ...]:
    """Return the rows of a file, none if there is no file yet."""
    return read_certificates(path).rows if path.exists() else ()


def stored_accuracy(path: Path) -> NoiseAccuracy | None:
    """Return what an earlier call on the same file measured."""
    return NoiseAccuracy.from_mapping(read_settings(path)["provenance"].get("accuracy")) if path.exists() else None


def update_provenance(path: Path, provenance: Mapping[str, Any]) -> None:
    """Record the selection and the accuracy of this call in an existing file; everything else stays."""
    if not path.exists():
        return
    stored = read_settings(path)
    fresh = {key: provenance[key] for key in ("selection", "accuracy") if key in provenance}
    if {**stored["provenance"], **fresh} != stored["provenance"]:
        write_settings(path, stored["settings"], {**stored["provenance"], **fresh})


def part_path(path: Path, team: Team) -> Path:
    """Return where a process writes: the file itself, or its own part next to it."""
    return path if team.size == 1 else path.with_name(f".{path.name.removesuffix('.tsv')}.part{team.rank}.tsv")


def join_parts(path: Path, settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write all rows of `path` and its parts into `path`, and remove the parts."""
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
