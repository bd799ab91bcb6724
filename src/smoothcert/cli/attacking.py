"""`smoothcert attack`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoothcert.cli.options import (
    NOISE_LEVEL,
    ClassifierOptions,
    Device,
    Precision,
    Seed,
    check_name,
    command_line,
    console,
    count_option,
    no_network,
    optional,
    parse_radii,
    show_table,
)
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.compressed import result_files
from smoothcert.io.files import check_inside
from smoothcert.io.results import stored_settings
from smoothcert.training.run_folder import CERTIFICATES, RECIPE, check_file

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.certification.attack_file import AttacksFile
    from smoothcert.certification.cascade import Cascade
    from smoothcert.certification.certificates import CertificatesFile
    from smoothcert.certification.ensemble import RunEnsemble
    from smoothcert.training.checkpoint import Run
    from smoothcert.training.denoiser import Denoiser

LIKELY_A_BUG = 1e-3
"""Contradictions less likely than this are not attributed to chance."""


def attack(
    *,
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folder, or those of --ensemble; none with --model or --hub.")
    ] = None,
    certificates: Annotated[
        Path | None, typer.Option(help="Certificates to check and images to attack.", show_default="the run's, if one")
    ] = None,
    radii: Annotated[
        str | None,
        typer.Option(help="Comma-separated L2 radii.", show_default="up to 4 sigma", rich_help_panel="Attack"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Attack steps.", rich_help_panel="Attack")] = 20,
    num_noise: Annotated[int, typer.Option(help="Noises that the attack averages over.")] = 32,
    n: Annotated[int, count_option("--n", "--votes", help="Votes of a prediction.")] = 1000,
    alpha: Annotated[float, typer.Option(help="Largest probability that the result of an image is wrong.")] = 0.001,
    skip: Annotated[int, count_option(help="Attack every SKIP-th certified image; without certificates, of all.")] = 1,
    max_images: Annotated[int | None, count_option(help="Attack at most this many images.")] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Precision of the network.", show_default="as certified")
    ] = None,
    seed: Seed = None,
    name: Annotated[str, typer.Option(help="Name of the attacks file.")] = "pgd",
    sigma: Annotated[float | None, typer.Option(help=NOISE_LEVEL, show_default="as certified")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the attacks, as in certify.", show_default="the run's")
    ] = None,
    request: ClassifierOptions,
    device: Device = "auto",
) -> None:
    """Attack the smoothed classifier: an upper bound on its robust accuracy, and a check of its certificates."""
    folders = runs or []
    if not folders and not request.kind and None in (request.network, request.dataset, out):
        given = {"--sigma S": sigma if sigma is not None else "as certified", "--out DIR": out}
        raise no_network({"--model FILE.py:function": request.network, "--dataset NAME": request.dataset, **given})
    request.check_classifier(folders)
    fields = {
        **{"radii": parse_radii(radii), "steps": steps, "num_noise": num_noise, "n": n, "alpha": alpha},
        **{"precision": precision, "seed": seed, "sigma": sigma},
    }
    if certificates is not None:
        check_file(certificates, "a certificates file")
    check_name(name)
    from smoothcert.certification.attack import attack_dataset, complete_attack_recipe
    from smoothcert.certification.shards import Selection
    from smoothcert.distributed import find_device
    from smoothcert.report.progress import attack_bar, print_data_notes, print_note

    torch_device = find_device(device)
    target = find_target(request, folders, out, certificates, sigma)
    certified, path = target.certificates, target.folder / "attacks" / f"{name}.tsv"
    check_inside(path, target.folder)
    # Not the name in the certificates: data of this name need not be those that were certified. It is compared later.
    images = request.images(target.first)
    print_data_notes(console, images, target.first.recipe.dataset if target.first is not None else None)
    recipe = complete_attack_recipe(fields, path, torch_device, images.shape, certified, target.sigma)
    known = range(len(images)) if certified is None else sorted(row.index for row in certified.rows)
    indices = [known[i] for i in Selection(len(known), skip, max_images).indices]
    classifier = target.classifier or request.own_network(images.num_classes, partial(print_note, console))
    with attack_bar(target.folder.name, len(indices)) as show:
        file = attack_dataset(
            *(classifier, images, indices, recipe, path, torch_device),
            certificates=certified,
            denoiser=target.denoiser,
            on_progress=show,
        )
    if target.elsewhere is not None:
        target.elsewhere.recipe.save(target.folder / RECIPE)  # which reports read
    words = [*folders, *request.network_words(), *request.data_words()]
    words += [*optional("--sigma", sigma if folders else recipe.sigma), *optional("--out", out)]
    done = result_files(target.folder / CERTIFICATES)
    onwards = command_line("report", target.folder) if done else command_line("certify", *words)
    print_attacks(file, recipe.radii, onwards)


@dataclass(frozen=True)
class AttackTarget:
    """The classifier to attack (None for a network that is no run), what is known about it, and its folder."""

    classifier: "Run | RunEnsemble | Cascade | None"
    first: "Run | None"
    denoiser: "Denoiser | None"
    sigma: float | None
    """The noise level that it was made for."""
    folder: Path
    elsewhere: "Run | None"
    """The run, if `folder` is not its own."""
    certificates: "CertificatesFile | None"


def find_target(
    request: ClassifierOptions,
    folders: Sequence[Path],
    out: Path | None,
    certificates: Path | None,
    sigma: float | None,
) -> AttackTarget:
    """Return the classifier of the run `folders` with the certificates that it is compared with, if there are any."""
    from smoothcert.certification.certificates import read_certificates
    from smoothcert.certification.subject import Subject
    from smoothcert.cli.certify_targets import default_folder, if_elsewhere
    from smoothcert.cli.classifiers import load_runs
    from smoothcert.training.denoiser import load_denoiser

    members, classifier = load_runs(request, folders)
    first, folder = members[0] if members else None, out or default_folder(request.kind, folders)
    elsewhere = if_elsewhere(classifier, folder)
    places = [folder, *([first.folder] if first is not None and not request.kind else [])]
    source = certificates or only_certificates(places, denoised=request.denoiser is not None)
    claims = None if source is None else read_certificates(source)
    defaults = {} if classifier is None else Subject.of(classifier).defaults or {}
    level, denoiser = defaults.get("sigma"), None
    if request.denoiser is not None:
        certified = None if claims is None else claims.settings.get("sigma")
        denoiser = load_denoiser(request.denoiser, certified if sigma is None else sigma)
        level = denoiser.sigma
    return AttackTarget(classifier, first, denoiser, level, folder, elsewhere, claims)


def only_certificates(folders: Sequence[Path], *, denoised: bool) -> Path | None:
    """Return the certificates file, behind a denoiser if `denoised`, of the first of `folders` that has such a file.

    None if none has; several are refused.
    """
    files: list[Path] = []
    for stored in (result_files(folder / CERTIFICATES) for folder in folders):
        files = files or [path for path in stored if bool(stored_settings(path).get("denoiser")) == denoised]
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise RequestError(
            f"{files[0].parent}: has several certificates files ({names}); choose one with --certificates"
        )
    return files[0] if files else None


def print_attacks(file: "AttacksFile", radii: Sequence[float], onwards: str) -> None:
    """Print the accuracy under attack, the next command and contradictions; too many of these are an error."""
    from smoothcert.certification.attack_file import contradiction_p_value, empirical_accuracy

    accuracies = [(f"{r:g}", f"{empirical_accuracy(file.rows, r):.1%}") for r in (0.0, *radii)]
    show_table(["radius", "accuracy under attack, at most"], accuracies)
    console.print(f"wrote {file.path}; next: {onwards}", soft_wrap=True)
    for row in file.contradictions:
        radius = row.certified_radius or 0.0
        found = f"falls at {row.distance:.4f}" if row.distance < radius else "has another class as it is"
        console.print(f"CONTRADICTION: image {row.index}, certified to {radius:.4f}, {found}", style="bold red")
    chance = contradiction_p_value(file)
    if file.contradictions and chance is not None and chance < LIKELY_A_BUG:
        raise WorkError(
            f"{file.path}: {len(file.contradictions)} attacks succeeded inside certified radii; by chance that happens "
            f"with probability {chance:.1e}: the certificates are wrong"
        )
