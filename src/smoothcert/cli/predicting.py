"""`smoothcert predict`."""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from smoothcert.cli.options import (
    NOISE_LEVEL,
    BoundName,
    Classes,
    Denoiser,
    Device,
    NetworkOptions,
    NoiseName,
    OwnNetwork,
    Precision,
    Weights,
    console,
    count_option,
)
from smoothcert.errors import RequestError
from smoothcert.io.console import PlainConsole
from smoothcert.io.text import csv_text, printable, radius_text
from smoothcert.training.run_folder import MODEL, RECIPE, check_file, check_run_folder

if TYPE_CHECKING:  # commands import torch only when they need it: --help answers at once
    import torch

    from smoothcert.certification.smoothed_classifier import SmoothedClassifier
    from smoothcert.classifier import Classifier
    from smoothcert.smoothing.certificate import Certificate
    from smoothcert.training.checkpoint import Run


def predict(
    paths: Annotated[
        list[Path],
        typer.Argument(help="A run folder and image files; with --model and --sigma, image files alone."),
    ],
    n: Annotated[int, count_option(help="Votes that bound the class's probability.")] = 10_000,
    alpha: Annotated[float, typer.Option(help="Largest probability that a line is wrong.")] = 0.001,
    sigma: Annotated[float | None, typer.Option(help=NOISE_LEVEL, show_default="the run's")] = None,
    noise: Annotated[NoiseName | None, typer.Option(help="Kind of noise.", show_default="the run's")] = None,
    bound: BoundName = "one-sided",
    precision: Annotated[Precision, typer.Option(help="Precision of the network.")] = "auto",
    resize: Annotated[bool, typer.Option("--resize", help="Scale and crop images that have another size.")] = False,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side of the images, for --model.", show_default="that of the first file")
    ] = None,
    classes: Classes = None,
    dataset: Annotated[
        str | None, typer.Option(help="Data set whose classes and image size --model has.", show_default="the run's")
    ] = None,
    model: OwnNetwork = None,
    init: Weights = None,
    denoiser: Denoiser = None,
    format_: Annotated[
        Literal["table", "json", "csv"], typer.Option("--format", help="What to print on standard output.")
    ] = "table",
    device: Device = "auto",
) -> None:
    """Print the class, the votes and the certified radius of image files."""
    without_run = model is not None and not paths[0].is_dir()
    images = checked_images(paths, model, without_run)
    if without_run and sigma is None and denoiser is None:
        raise RequestError(f"--sigma: missing; give the noise level for --model {model}, for instance --sigma 0.25")
    NetworkOptions(init=init, dataset=dataset).check(published=not without_run)
    if not without_run and (dataset is not None or image_size is not None):
        raise RequestError("--dataset and --image-size: expected none with a run folder, which has both; omit them")
    from smoothcert.certification.smoothed_classifier import SmoothedClassifier
    from smoothcert.certification.subject import Subject
    from smoothcert.data import read_class_names, scaled_side
    from smoothcert.data.image_files import read_image_files
    from smoothcert.distributed import find_device
    from smoothcert.report.progress import print_note, print_warning
    from smoothcert.training.denoiser import load_denoiser

    named = read_class_names(classes) if classes is not None else None
    front = load_denoiser(denoiser, sigma) if denoiser is not None else None
    note = partial(print_note, console if format_ == "table" else PlainConsole(stderr=True))
    network: Classifier | Run
    if without_run:
        network, expected = own_network(str(model), init, images[0], dataset, image_size, named, note)
    else:
        network, expected = trained_network(paths[0], model, named)
    torch_device, subject = find_device(device), Subject.of(network).behind(front)
    trained = subject.defaults or {}
    noise_level, kind = sigma if sigma is not None else trained["sigma"], noise or trained.get("noise", "gaussian")
    if front is not None:
        front.check(expected.shape, noise_level, kind)
    side = scaled_side(expected.dataset, expected.shape) if resize else None
    batch, notes = read_image_files(images, expected.shape, shorter_side=side)
    smoothed = SmoothedClassifier(
        subject.classifier,
        sigma=noise_level,
        num_classes=expected.num_classes,
        noise=kind,
        precision=precision,
    ).to(torch_device)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", UserWarning)
        certificates = smoothed.certify(batch.to(torch_device), n=n, alpha=alpha, bound=bound)
    texts = [str(one.message) for one in raised if issubclass(one.category, UserWarning)]
    if "sigma" in trained and (noise_level, kind) != (trained["sigma"], trained["noise"]):
        with_noise = f"{trained['noise']} noise at sigma {trained['sigma']:g}"
        texts.append(f"{paths[0]} was trained with {with_noise}, not with this noise")
    for text in texts:
        print_warning(PlainConsole(stderr=True), text)
    for text in notes:
        note(text)
    rows = [row_of(path, row, expected.names) for path, row in zip(images, certificates, strict=True)]
    about = about_radii(smoothed, n, alpha, bound, torch_device)
    if format_ == "table":
        print_table(rows, about, any(certificate.count == n for certificate in certificates))
    else:
        print_data(rows, about, format_)


def checked_images(paths: Sequence[Path], model: str | None, without_run: bool) -> Sequence[Path]:
    """Return the image files among `paths`; a folder that is no run, and missing files, are refused."""
    images = paths if without_run else paths[1:]
    if model is not None and not without_run and not any((paths[0] / file).exists() for file in (MODEL, RECIPE)):
        raise RequestError(
            f"{paths[0]}: expected a run folder or none, got one without {RECIPE} and {MODEL}; to predict with "
            "--model give --sigma S and image files alone"
        )
    if not without_run:
        check_run_folder(paths[0])
    if not images:
        raise RequestError(f"expected image files after {paths[0]}, got none; name some")
    for image in images:
        check_file(image, "an image file")
    return images


@dataclass(frozen=True)
class Inputs:
    """The images that a classifier takes and the classes that it knows.

    None is not known; the number of classes is found by a forward pass.
    """

    shape: tuple[int, int, int]
    num_classes: int | None
    names: Sequence[str] | None
    dataset: str | None


def with_names(known: Inputs, named: Sequence[str] | None, source: object) -> Inputs:
    """Return the names of the classes as well: those of --classes, else those of the data set."""
    from smoothcert.data import known_class_names

    names = named or known.names or known_class_names(known.dataset)
    if names is not None and known.num_classes is not None and len(names) != known.num_classes:
        raise RequestError(
            f"--classes: expected {known.num_classes} names, one per output of {source}, got {len(names)}"
        )
    return replace(known, names=names)


def own_network(
    reference: str,
    init: Path | None,
    first: Path,
    dataset: str | None,
    image_size: int | None,
    named: Sequence[str] | None,
    on_note: Callable[[str], None],
) -> "tuple[Classifier, Inputs]":
    """Return the user's own network and its images, of the size of `dataset`, of `image_size`, or of the first file."""
    from smoothcert.data import DATASETS, load_dataset, silent
    from smoothcert.data.decoding import image_head
    from smoothcert.training.checkpoint import InputSpec
    from smoothcert.training.initial_weights import own_model_with_weights

    names, num_classes = named, None if named is None else len(named)
    if dataset is not None:
        known = DATASETS.get(dataset)
        spec = (
            InputSpec(known.shape, known.num_classes, known.normalization)
            if known is not None
            else InputSpec.of(load_dataset(dataset, "test", image_size=image_size, on_note=silent))
        )
        shape, num_classes, names = spec.shape, spec.num_classes, spec.class_names
    else:
        head = image_head(first)
        width, height = (image_size, image_size) if image_size is not None else head.size
        shape = (1 if head.grey else 3, height, width)
    classifier = own_model_with_weights(reference, num_classes, init, on_note)
    return classifier, with_names(Inputs(shape, num_classes, names, dataset), named, reference)


def trained_network(folder: Path, model: str | None, named: Sequence[str] | None) -> "tuple[Run, Inputs]":
    """Return the run in `folder`, whose own network is named by `model`, and its images."""
    from smoothcert.training.checkpoint import load_run

    run = load_run(folder, model)
    run.refuse_denoiser()
    expected = Inputs(run.spec.shape, run.spec.num_classes, run.spec.class_names, run.recipe.dataset)
    return run, with_names(expected, named, folder)


def about_radii(
    smoothed: "SmoothedClassifier", n: int, alpha: float, bound: str, device: "torch.device"
) -> dict[str, Any]:
    """Return what all radii depend on, and the largest one that n votes can show."""
    from smoothcert.models.precision import resolve_precision
    from smoothcert.smoothing.certificate import certified_radius

    noise, coin = smoothed.noise, 0.0 if bound == "randomized" else None
    ceiling = certified_radius(n, 0, n, noise, alpha, two_sided=bound == "two-sided", coin=coin)
    about = {"n": n, "alpha": alpha, "bound": bound, "sigma": noise.sigma, "noise": noise.name}
    precision = resolve_precision(smoothed.precision, device)
    return {**about, "norm": noise.norm, "largest_radius": ceiling, "precision": precision}


def row_of(path: Path, certificate: "Certificate", names: Sequence[str] | None) -> dict[str, Any]:
    """Return the result for one image; an image without a proved class has the class None and the radius 0."""
    number = None if certificate.abstained else certificate.predict
    name = printable(names[number]) if names is not None and number is not None else None
    votes = {str(c): k for c, k in certificate.votes}
    return {"image": str(path), "class": number, "name": name, "radius": certificate.radius, "votes": votes}


def votes_text(row: dict[str, Any], most: int | None = None) -> str:
    return ", ".join(f"{c}: {k}" for c, k in [*row["votes"].items()][:most])


def print_data(rows: Sequence[dict[str, Any]], about: dict[str, Any], format_: Literal["json", "csv"]) -> None:
    """Print the results for programs; in CSV what all radii depend on is in each line."""
    if format_ == "json":
        print(json.dumps({**about, "images": rows}, indent=2))
        return
    # All digits of the radius: ten of them, rounded, may be more than was proved.
    written = ({**row, "radius": repr(row["radius"]), "votes": votes_text(row)} for row in rows)
    cells = [[*row.values(), *about.values()] for row in written]
    print(csv_text([[*rows[0], *about], *cells]), end="")


def print_table(rows: Sequence[dict[str, Any]], about: dict[str, Any], reached: bool) -> None:
    """Print one line per image, and what its radius means."""
    randomized = about["bound"] == "randomized"
    kind = "" if about["bound"] == "one-sided" else f" ({about['bound']} bound)"
    table = Table("image", "class", f"{about['norm']} radius{kind}", f"votes of {about['n']:,}")
    for row in rows:
        answer = "abstain" if row["class"] is None else " ".join(filter(None, [str(row["class"]), row["name"]]))
        table.add_row(row["image"], answer, radius_text(row["radius"]), votes_text(row, 3))
    console.print(table)
    console.print(
        f"radius: the smoothed classifier (network in {about['precision']}) gives this class to every image closer "
        f"than this in {about['norm']} (pixels in [0, 1]); each row is wrong with probability at most "
        f"{about['alpha']}; {radius_text(about['largest_radius'])} is the most that n = {about['n']:,} votes can show"
        + ("; it is reached here: raise --n for more" if reached and not randomized else "")
        + ("; each radius depends on a coin: do not choose among repeated calls" if randomized else ""),
        soft_wrap=True,
        highlight=False,
    )
