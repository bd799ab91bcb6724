"""`smoothcert attack`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoothcert.cli.options import (
    NOISE_LEVEL,
    ClassifierOptions,
    Device,
    Precision,
    Seed,
    check_file_name,
    command_line,
    console,
    count_option,
    optional,
    parse_radii,
    show_table,
)
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.compressed import result_files
from smoothcert.io.files import check_inside
from smoothcert.io.results import stored_settings
from smoothcert.training.run_folder import ATTACKS, CERTIFICATES, RECIPE, check_file

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.certification.attack_file import AttacksFile

LIKELY_A_BUG = 1e-3
"""Contradictions less likely than this are not attributed to chance."""


def attack(
    *,
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folder, or those of --ensemble; none with --model or --hub.")
    ] = None,
    certificates: Annotated[
        Path | None,
        typer.Option(help="Certificates to check; their images are attacked.", show_default="the run's, if any"),
    ] = None,
    radii: Annotated[
        str | None,
        typer.Option(help="Comma-separated L2 radii.", show_default="up to 4 sigma", rich_help_panel="Attack"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Attack steps.")] = 20,
    num_noise: Annotated[int, typer.Option(help="Noise samples that the attack averages over.")] = 32,
    n: Annotated[int, count_option("--n", "--votes", help="Votes per prediction.")] = 1000,
    alpha: Annotated[float, typer.Option(help="Largest probability that the result of an image is wrong.")] = 0.001,
    skip: Annotated[int, count_option(help="Attack every SKIP-th certified image, or test image.")] = 1,
    max_images: Annotated[int | None, count_option(help="Attack at most this many images.")] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Precision of the network.", show_default="as certified")
    ] = None,
    seed: Seed = None,
    name: Annotated[str, typer.Option(help="Name of the attacks file.")] = "pgd",
    sigma: Annotated[float | None, typer.Option(help=NOISE_LEVEL, show_default="as certified")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results, as in certify.", show_default="the run's")
    ] = None,
    request: ClassifierOptions,
    device: Device = "auto",
) -> None:
    """Attack the smoothed classifier: an upper bound on its robust accuracy, and a check of its certificates."""
    folders = runs or []
    request.check(folders, {"--sigma S": "as certified" if sigma is None else sigma, "--out DIR": out})
    fields = {
        **{"radii": parse_radii(radii), "steps": steps, "num_noise": num_noise, "n": n, "alpha": alpha},
        **{"precision": precision, "seed": seed, "sigma": sigma},
    }
    if certificates is not None:
        check_file(certificates, "a certificates file")
    check_file_name(name)
    from smoothcert.certification.attack import attack_dataset
    from smoothcert.certification.attack_recipe import complete_attack_recipe
    from smoothcert.certification.certificates import read_certificates
    from smoothcert.certification.shards import Selection
    from smoothcert.cli.certify_targets import if_elsewhere, results_folder, subject_for_images
    from smoothcert.cli.classifiers import print_about_runs
    from smoothcert.distributed import find_device
    from smoothcert.report.progress import print_data_notes, status_bar

    torch_device = find_device(device)
    folder = out or results_folder(request.kind, folders)
    places = [folder, *(folders[:1] if not request.kind else ())]
    source = certificates or only_certificates(places, denoised=request.denoiser is not None)
    certified = None if source is None else read_certificates(source)
    level = certified.settings.get("sigma") if certified is not None and sigma is None else sigma
    subject = subject_for_images(request, folders, level, console)
    elsewhere = if_elsewhere(subject, request.init, folder)
    first = next(iter(subject.runs), None)
    path = folder / ATTACKS / f"{name}.tsv"
    check_inside(path, folder)
    # Not the name in the certificates: data of this name need not be those that were certified. It is compared later.
    images = request.images(first)
    print_data_notes(console, images, subject.trained_on)
    trained_sigma = subject.defaults.get("sigma")
    recipe = complete_attack_recipe(fields, path, torch_device, images.shape, certified, trained_sigma)
    print_about_runs(subject, console.note, console.warn)
    for text in subject.noise_warnings(recipe.sigma, "gaussian"):
        console.warn(text)
    known = range(len(images)) if certified is None else sorted(row.index for row in certified.rows)
    indices = [known[i] for i in Selection(len(known), skip, max_images).indices]
    with status_bar(f"attack {folder.name}") as show:
        file = attack_dataset(
            subject,
            images,
            indices,
            recipe,
            path,
            torch_device,
            certificates=certified,
            on_progress=show,
        )
    if elsewhere is not None:
        elsewhere.recipe.save(folder / RECIPE)  # which reports read
    words = [*folders, *request.network_words(), *request.words()]
    words += [*optional("--sigma", sigma if folders else recipe.sigma), *optional("--out", out)]
    done = result_files(folder / CERTIFICATES)
    onwards = command_line("report", folder) if done else command_line("certify", *words)
    print_attacks(file, recipe.radii, onwards)


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
    console.print(f"wrote {file.path}; next: {onwards}")
    for row in file.contradictions:
        radius = row.certified_radius or 0.0
        outcome = f"falls at {row.distance:.4f}" if row.distance < radius else "has another class as it is"
        console.print(f"CONTRADICTION: image {row.index}, certified to {radius:.4f}, {outcome}", style="bold red")
    chance = contradiction_p_value(file)
    if file.contradictions and chance is not None and chance < LIKELY_A_BUG:
        raise WorkError(
            f"{file.path}: {len(file.contradictions)} attacks succeeded inside certified radii; by chance that happens "
            f"with probability {chance:.1e}: the certificates are wrong"
        )
