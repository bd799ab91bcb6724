"""`smoothcert certify`, `merge` and `recertify`."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoothcert.cli.advice import accuracy_warning, next_step, noise_warning, spent_votes, training_command
from smoothcert.cli.options import (
    Bound,
    Classes,
    Data,
    Denoiser,
    Device,
    NoiseName,
    Precision,
    check_dataset,
    check_name,
    command_line,
    console,
    parse_radii,
)
from smoothcert.errors import RequestError
from smoothcert.io.console import leads
from smoothcert.training.run_folder import check_file, check_run_folder

LONGEST_NAME = 150
"""Characters in the name of the folder that is named after the members of an ensemble."""

if TYPE_CHECKING:  # commands import torch only when they need it: --help answers at once
    from smoothcert.smoothing.accuracy import NoiseAccuracy


def certify(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folder; several with --ensemble.", show_default=False)
    ] = None,
    ensemble: Annotated[bool, typer.Option("--ensemble", help="Certify all run folders as one classifier.")] = False,
    consensus: Annotated[
        int | None, typer.Option(help="Evaluate only this many members of --ensemble where they agree.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Your own network: package.module:function or FILE.py:function.")
    ] = None,
    denoiser: Denoiser = None,
    dataset: Annotated[str | None, typer.Option(help="Data set, for --model; see `smoothcert datasets`.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images, for folder:PATH.")] = None,
    classes: Classes = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the certificates, for --model and --ensemble.")] = None,
    n: Annotated[int, typer.Option("--n", "--votes", help="Votes that bound the class's probability.")] = 100_000,
    n0: Annotated[int, typer.Option(help="Votes that choose the class.")] = 100,
    alpha: Annotated[float, typer.Option(help="Probability that a certificate is wrong, at most.")] = 0.001,
    sigma: Annotated[float | None, typer.Option(help="Noise level.", show_default="the run's")] = None,
    noise: Annotated[NoiseName | None, typer.Option(help="Kind of noise.", show_default="the run's")] = None,
    skip: Annotated[int, typer.Option(help="Certify every SKIP-th image.")] = 1,
    max_images: Annotated[int | None, typer.Option(help="Certify at most this many images.")] = None,
    shard: Annotated[
        str, typer.Option(help="i/k: the i-th of k shares of the images; see `smoothcert merge`.")
    ] = "1/1",
    until_radius: Annotated[float | None, typer.Option(help="Sample only until this radius is decided.")] = None,
    radii: Annotated[
        str | None, typer.Option(help="Sample only until these radii, separated by commas, are decided.")
    ] = None,
    radius_loss: Annotated[float | None, typer.Option(help="Radius, in sigmas, to give up for fewer votes.")] = None,
    label_aware: Annotated[bool, typer.Option("--label-aware", help="Benchmarks only: skip wrong images.")] = False,
    bound: Annotated[Bound, typer.Option(help="Two-sided bounds the runner-up too.")] = "one-sided",
    sound: Annotated[bool, typer.Option("--sound", help="Integer noise: sound in floating point.")] = False,
    precision: Annotated[Precision, typer.Option(help="Precision of the network.")] = "auto",
    compile_: Annotated[bool, typer.Option("--compile", help="torch.compile the network.")] = False,
    batch_size: Annotated[int | None, typer.Option(help="Noisy images in a forward pass.")] = None,
    seed: Annotated[int | None, typer.Option(help="For tests and replays.", show_default="fresh")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the file.", show_default="test-nN and the rule")] = None,
    radius: Annotated[float | None, typer.Option(help="Warn if n cannot reach this radius.")] = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Certify test images of a run, an ensemble of runs or your own model; an interrupted file is continued."""
    folders = check_runs(runs or [], ensemble, consensus)  # before torch is imported, which takes seconds
    run = folders[0] if folders else None
    if dataset is not None:
        check_dataset(dataset)
    from smoothcert.certification.certify_dataset import certify_dataset
    from smoothcert.certification.ensemble import RunEnsemble
    from smoothcert.certification.settings import CertifySettings, unreachable_radius
    from smoothcert.certification.subject import missing_classes
    from smoothcert.data import load_dataset, read_class_names
    from smoothcert.distributed import find_device, meet, team
    from smoothcert.io.files import check_inside
    from smoothcert.models import own_model
    from smoothcert.report.progress import certification_bar, print_data_notes, print_note, print_warning
    from smoothcert.training.checkpoint import load_run
    from smoothcert.training.denoiser import load_denoiser
    from smoothcert.training.recipe import parse_recipe

    meet()
    front = load_denoiser(denoiser, sigma) if denoiser is not None else None
    sigma = front.sigma if front is not None and sigma is None else sigma
    members = [load_run(path, model) for path in folders]
    combined = RunEnsemble(members, consensus) if ensemble else None
    loaded = members[0] if members else None
    folder = out if run is None or (ensemble and out is not None) else ensemble_folder(folders) if ensemble else run
    if loaded is None and (model is None or dataset is None or sigma is None):
        raise RequestError("give a run folder, or --model package.module:function --dataset NAME --sigma S --out DIR")
    if folder is None:
        raise RequestError("give --out DIR for the certificates of --model")
    if run is not None and out is not None and not ensemble:
        raise RequestError(
            f"--out: expected none with a run folder, whose certificates are in it, got {out}; use --name"
        )
    if name is not None:
        check_name(name)
    if until_radius is not None and radii is not None:
        raise RequestError("give --until-radius or --radii, not both")
    for option, value in (("--radius", radius), ("--until-radius", until_radius)):
        if value is not None and not 0 <= value < math.inf:
            raise RequestError(f"{option}: expected a number >= 0, got {value}")
    for member in members:
        if not member.finished and leads():
            trained = f"{member.epoch} of {member.recipe.epochs} epochs"
            console.print(f"note: {member.folder} has trained {trained}", style="yellow")
    trained_with = None if loaded is None else loaded.recipe.sigma if combined is None else combined.sigma
    if loaded is not None:
        sigma = trained_with if sigma is None else sigma
        if combined is not None and sigma is None:
            raise RequestError(combined.missing_sigma("--sigma"))
        noise = loaded.recipe.noise if noise is None else noise
        dataset = loaded.recipe.dataset if dataset is None else dataset
        image_size = loaded.recipe.image_size if image_size is None else image_size
    where = find_device(device)
    fields = {
        **{"n": n, "n0": n0, "alpha": alpha, "sigma": sigma, "noise": noise, "precision": precision, "bound": bound},
        **{"radii": [until_radius] if until_radius is not None else parse_radii(radii) or (), "sound": sound},
        **{"hold_back": radii is not None, "radius_loss": radius_loss, "label_aware": label_aware, "seed": seed},
        **{"compile": compile_, "batch_size": batch_size, "skip": skip, "max_images": max_images},
        "shard": parse_shard(shard),
    }
    settings = parse_recipe(CertifySettings, fields, "certify")
    default = settings.default_path(folder, trained_with, consensus, denoised=front is not None)
    path = folder / "certificates" / f"{name}.tsv" if name else default
    check_inside(path, folder)
    outputs = read_class_names(classes) if classes is not None else None
    images = load_dataset(str(dataset), "test", data, image_size=image_size, classes=outputs)
    print_data_notes(console, images, loaded.recipe.dataset if loaded is not None else None)
    about = (model, str(dataset), image_size, settings, data)
    commands = [training_command(member, member.folder, *about) for member in members]
    retrain = commands[0] if commands else training_command(None, folder, *about)
    with team() as group:
        indices = settings.selection(len(images)).indices
        warnings = [
            unreachable_radius(settings, asked) for asked in ([radius] if radius is not None else settings.radii[-1:])
        ]
        warnings.append(missing_classes(images, replace(settings.selection(len(images)), shard=(1, 1)).indices))
        pairs = zip(members, commands, strict=True)
        # A classifier behind a denoiser need not know the noise.
        warnings += [noise_warning(member, settings, command) for member, command in pairs if front is None]
        for warning in warnings if group.leads else []:
            if warning is not None:
                print_warning(console, warning)
        network = combined or loaded or own_model(str(model), images.num_classes)
        with certification_bar(folder.name, len(indices)) as show:

            def judge(accuracy: "NoiseAccuracy") -> None:
                if (warning := accuracy_warning(accuracy, retrain)) is not None:
                    show.warn(warning)

            rows = certify_dataset(
                *(network, images, path, settings),
                name=model,
                denoiser=front,
                device=where,
                team=group,
                on_progress=show,
                on_accuracy=judge,
            ).rows
        if group.leads:
            console.print(spent_votes(rows, n), soft_wrap=True)
            if others := {row.index for row in rows}.difference(indices):
                more = f"{path.name} holds {len(others):,} images that an earlier call chose as well"
                apart = f"a report is about all {len(rows):,}: choose another --name to keep them apart"
                print_note(console, f"{more}; {apart}")
            console.print(f"wrote {path}; {next_step(path, folder, settings.shard)}", soft_wrap=True)


def check_runs(runs: list[Path], ensemble: bool, consensus: int | None) -> list[Path]:
    """Return the run folders of a request; refuse several without --ensemble, and what is not a run folder."""
    if ensemble and len(runs) < 2:
        raise RequestError(f"--ensemble: expected at least two run folders, got {len(runs)}; name its members")
    if len(runs) > 1 and not ensemble:
        raise RequestError(f"run: expected one run folder, got {len(runs)}; add --ensemble to certify them as one")
    if consensus is not None and not ensemble:
        raise RequestError(f"--consensus: expected none without --ensemble, got {consensus}; leave it out")
    for run in runs:
        check_run_folder(run)
    return runs


def ensemble_folder(runs: list[Path]) -> Path:
    """Return the default folder for the certificates of an ensemble: next to its first member, named after all."""
    name = "-".join(["ensemble", *(run.resolve().name for run in runs)])
    if len(name) > LONGEST_NAME:
        raise RequestError(f"--out: expected a folder for the certificates of {len(runs)} runs, got none; give one")
    return runs[0].parent / name


def parse_shard(text: str) -> tuple[int, int]:
    found = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
    if found is None:
        raise RequestError(f"shard: expected i/k, such as 3/8, got {text}")
    return int(found[1]), int(found[2])


def merge(
    files: Annotated[list[Path], typer.Argument(help="Certificates files of the shards.")],
    out: Annotated[Path, typer.Option(help="Certificates file to write.")],
    partial: Annotated[bool, typer.Option("--partial", help="Merge incomplete shards, too.")] = False,
) -> None:
    """Merge the certificates files of shards; missing and incomplete shards are refused."""
    from smoothcert.certification.shards import merge_certificates
    from smoothcert.report.progress import print_note

    rows = merge_certificates(files, out, partial=partial, on_note=lambda text: print_note(console, text))
    console.print(f"wrote {rows} rows to {out}; next: {command_line('report', out)}", soft_wrap=True)


def recertify(
    file: Annotated[Path, typer.Argument(help="Certificates file that smoothcert wrote.")],
    alpha: Annotated[
        float | None, typer.Option(help="Probability of a wrong certificate.", show_default="the file's")
    ] = None,
    bound: Annotated[Bound | None, typer.Option(help="Confidence bound.", show_default="the file's")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="next to the old one")] = None,
) -> None:
    """Compute certificates for another alpha or bound from stored votes, without sampling or a model."""
    check_file(file, "a certificates file")
    from smoothcert.certification.recertify import recertify as recompute

    words = [
        file.name.removesuffix(".tsv"),
        *([f"alpha{alpha:g}"] if alpha is not None else []),
        *([bound] if bound else []),
    ]
    target = out if out is not None else file.with_name("-".join(words) + ".tsv")
    rows = recompute(file, target, alpha=alpha, bound=bound)
    console.print(f"wrote {rows} rows to {target}", soft_wrap=True)
