"""What `smoothcert certify` does with each classifier: a run, several runs as one, or the user's own model."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.certification.certify_dataset import certify_dataset
from smoothcert.certification.estimate import CertificationEstimate
from smoothcert.certification.settings import CertifySettings
from smoothcert.certification.subject import Subject
from smoothcert.cli.certification import CertifyOptions
from smoothcert.cli.classifiers import find_subject, noise_for, print_about_runs
from smoothcert.cli.options import ClassifierOptions, command_line
from smoothcert.data import Images
from smoothcert.distributed import Team
from smoothcert.errors import RequestError
from smoothcert.io.compressed import compressed_form, result_files
from smoothcert.io.console import PlainConsole
from smoothcert.io.files import check_inside
from smoothcert.io.records import parse_recipe
from smoothcert.io.text import counted
from smoothcert.report.progress import print_data_notes, status_bar
from smoothcert.report.summary import default_radii, summarize
from smoothcert.smoothing.accuracy import NoiseAccuracy
from smoothcert.training.checkpoint import Run
from smoothcert.training.run_folder import CERTIFICATES, MODEL, RECIPE

LONGEST_NAME = 150
"""Characters in the name of the folder that is named after several runs."""


@dataclass(frozen=True)
class Target:
    """A classifier with the settings and the file of its certificates."""

    subject: Subject
    folder: Path
    path: Path
    settings: CertifySettings
    elsewhere: Run | None
    """The run, if it is the only one and its certificates are written to another folder."""

    @property
    def first(self) -> Run | None:
        return next(iter(self.subject.runs), None)


def find_target(request: CertifyOptions, folders: Sequence[Path], fields: Mapping[str, Any]) -> Target:
    """Return the classifier of the run `folders` (none for the user's own model); wrong settings are refused."""
    subject = subject_for_images(request, folders, fields["sigma"], request.console)
    folder = request.out or results_folder(request.kind, folders)
    sigma, noise = noise_for(subject, fields["sigma"], fields["noise"])
    settings = parse_recipe(CertifySettings, {**fields, "sigma": sigma, "noise": noise}, "certify")
    stages = subject.stages or (subject,)
    trained_with = {run.recipe.sigma for run in stages[0].runs}
    path = settings.default_path(
        folder,
        trained_with.pop() if len(trained_with) == 1 else None,
        request.consensus,
        denoised=subject.denoiser is not None,
    )
    path = folder / CERTIFICATES / f"{request.name}.tsv" if request.name else path
    path = compressed_form(path) if request.compress_ else path
    check_inside(path, folder)
    return Target(subject, folder, path, settings, if_elsewhere(subject, request.init, folder))


def subject_for_images(
    request: ClassifierOptions, folders: Sequence[Path], sigma: float | None, console: PlainConsole
) -> Subject:
    """Return the classifier of `certify` and `attack`; a network that is no run has the classes of the images."""
    num_classes = None if folders else request.images(None).num_classes
    return find_subject(request, folders, sigma, num_classes, console.note)


def results_folder(kind: str, runs: Sequence[Path]) -> Path:
    """Return the folder for results without --out: that of a run, or for a `kind` of several runs a new one.

    The new one is next to the first run, and named after all.
    """
    if not kind:
        return runs[0]
    name = "-".join([kind, *(run.resolve().name for run in runs)])
    if len(name) > LONGEST_NAME:
        raise RequestError(f"--out: expected a folder for the certificates of {len(runs)} runs, got none; give one")
    return runs[0].parent / name


def if_elsewhere(subject: Subject, init: Path | None, folder: Path) -> Run | None:
    """Return the run of `subject` if it is a single one, and `folder`, for its results, is not its own; None otherwise.

    A folder that holds files of another classifier or another recipe is refused: reports would mix the two up. The
    weights `init` of a user's code may be those of the run in `folder`.
    """
    run = subject.run if isinstance(subject.run, Run) else None
    source = init if run is None else run.folder
    if source is not None and source.resolve() == folder.resolve():
        return None
    if run is None:
        if (folder / MODEL).exists():
            owner = f"the {subject.name}" if subject.runs else subject.name
            raise RequestError(f"--out: expected a folder for {owner} alone, got the run {folder}; give another")
        return None
    copy = folder / RECIPE
    same = copy.is_file() and copy.read_text(encoding="utf-8", errors="replace") == run.recipe.to_yaml()
    if (folder / MODEL).exists() or (not same and (copy.exists() or result_files(folder / CERTIFICATES))):
        raise RequestError(
            f"--out: expected a folder without files of another classifier than {run.folder}, got {folder}; "
            "choose another"
        )
    return run


def certify_target(
    request: CertifyOptions, target: Target, images: Images, device: torch.device, group: Team
) -> Target:
    """Certify the missing images of `target`; print warnings, notes and progress; return it with its final path."""
    settings, first = target.settings, target.first
    if group.leads:
        print_about_runs(target.subject, request.console.note, request.console.warn)
        print_data_notes(request.console, images, target.subject.trained_on)
    with status_bar(f"certify {target.folder.name}", request.console.quiet) as show:

        def on_accuracy(accuracy: NoiseAccuracy) -> None:
            # Nothing is refused from here on. Reports read the recipe next to the certificates.
            if target.elsewhere is not None:
                target.elsewhere.recipe.save(target.folder / RECIPE)
            if accuracy.warning is None and first is None:  # of a run, the training has shown it
                show.note(str(accuracy))

        def on_estimate(estimate: CertificationEstimate) -> None:
            if estimate.long:
                show.note(estimate.in_words(settings, len(images)))

        file = certify_dataset(
            target.subject,
            images,
            target.path,
            settings,
            device=device,
            team=group,
            on_progress=show,
            on_accuracy=on_accuracy,
            on_estimate=on_estimate,
            on_warning=show.warn,
            wanted_radius=request.radius,
        )
    target = replace(target, path=file.path)  # which may be the compressed form
    if group.leads:
        print_result(request, target, file, settings.selection(len(images)).indices)
    return target


def print_result(request: CertifyOptions, target: Target, file: CertificatesFile, indices: Sequence[int]) -> None:
    """Print the votes that were drawn, whether the file has other images than `indices`, and the JSON of --json."""
    rows, console = file.rows, request.console
    spent = sum(row.certificate.spent for row in rows)
    most = sum(row.certificate.n0 + target.settings.n for row in rows)
    fewer = f" instead of {most:,}" if most > spent else ""
    console.print(f"{spent:,} votes for {counted(len(rows), 'image')}{fewer}")
    if others := {row.index for row in rows}.difference(indices):
        more = f"{target.path.name} has {counted(len(others), 'more image')}, from an earlier call"
        console.note(f"{more}; a report uses all {len(rows):,}: choose another --name to keep them apart")
    if request.json_:
        print(json.dumps(for_machines(target, file, request.chosen_data(target.first)[0])), flush=True)


def for_machines(target: Target, file: CertificatesFile, dataset: str) -> dict[str, Any]:
    """Return the result of a certification for --json; accuracies and shares are in [0, 1]."""
    summary = summarize(file, target.folder.name, default_radii([file]))
    stored = ("sigma", "noise", "n0", "n", "alpha", "bound", "precision", "seed")
    runs = target.subject.runs
    run = runs[0].folder if len(runs) == 1 else target.folder
    return {
        **{"run": str(run), "certificates": str(target.path), "dataset": dataset},
        **{key: file.settings.get(key) for key in stored},
        **{"images": summary.images, "acr": summary.acr, "acr_standard_error": summary.acr_standard_error},
        "certified_accuracy": {f"{radius:g}": accuracy for radius, accuracy in summary.accuracy_at.items()},
        **{"abstained": summary.abstention, "largest_radius": summary.ceiling, "votes": summary.votes},
        "accuracy": file.provenance.get("accuracy"),
    }


def last_line(targets: Sequence[Target]) -> str:
    """Return what was written and the command to continue with."""
    written = f"wrote {', '.join(str(target.path) for target in targets)}"
    path = targets[0].path
    part, parts = targets[0].settings.shard
    before, marker, after = path.name.partition(f"shard{part}of")
    if len(targets) == 1 and parts > 1 and marker:
        shards = f"{shlex.quote(str(path.with_name(before + 'shard')))}*{shlex.quote('of' + after)}"
        return f"{written}; when all {parts} shards are finished, next: smoothcert merge {shards} --out merged.tsv"
    one_run = len(targets) == 1 and parts == 1
    reported = [targets[0].folder] if one_run else [target.path for target in targets]
    return f"{written}; next: {command_line('report', *reported)}"
