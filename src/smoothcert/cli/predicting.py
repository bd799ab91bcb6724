"""`smoothcert predict`."""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from smoothcert.cli.options import Alpha, BoundName, ClassifierOptions, Device, Noise, Precision, Sigma, Votes, console
from smoothcert.errors import RequestError
from smoothcert.io.console import PlainConsole
from smoothcert.io.text import csv_text, printable, radius_text
from smoothcert.training.run_folder import RECIPE, check_file

if TYPE_CHECKING:  # commands import torch only when they need it: --help answers at once
    import torch

    from smoothcert.certification.smoothed_classifier import RuleOptions, SmoothedClassifier
    from smoothcert.smoothing.certificate import Certificate

IMAGES_AT_ONCE = 8
"""Number of images whose results are printed together; an interruption loses no more than these."""


def predict(
    *,
    paths: Annotated[
        list[Path],
        typer.Argument(help="A run folder and image files; with --model or --hub, and --sigma, image files alone."),
    ],
    n: Votes = 10_000,
    alpha: Alpha = 0.001,
    sigma: Sigma = None,
    noise: Noise = None,
    bound: BoundName = "one-sided",
    sound: Annotated[bool, typer.Option("--sound", help="Integer noise, for certificates made with --sound.")] = False,
    precision: Annotated[Precision, typer.Option(help="Precision of the network.")] = "auto",
    resize: Annotated[bool, typer.Option("--resize", help="Scale and crop images that have another size.")] = False,
    request: ClassifierOptions,
    format_: Annotated[
        Literal["table", "json", "csv"], typer.Option("--format", help="What to print on standard output.")
    ] = "table",
    device: Device = "auto",
) -> None:
    """Print the class, the votes and the certified radius of image files."""
    runs, images = runs_and_images(paths, request)
    request.check_noise_level(runs, sigma)
    if resize and not runs and request.dataset is None and request.image_size is None:
        raise RequestError("--resize: expected --image-size S with it, the side of the images that the network takes")
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from smoothcert.certification.settings import CertifySettings
    from smoothcert.certification.smoothed_classifier import SmoothedClassifier
    from smoothcert.cli.classifiers import named_classifier, noise_for, print_about_runs
    from smoothcert.data import scaled_side
    from smoothcert.data.image_files import read_image_files
    from smoothcert.data.images import in_unit_interval
    from smoothcert.distributed import find_device

    torch_device = find_device(device)
    note = (console if format_ == "table" else PlainConsole(stderr=True)).note
    named = named_classifier(request, runs, sigma, note, images[0])
    spec = named.spec
    noise_level, kind = noise_for(named.subject, sigma, noise)
    CertifySettings(n=n, alpha=alpha, sigma=noise_level, noise=kind, bound=bound, sound=sound)  # refuses wrong ones
    if named.subject.denoiser is not None:
        named.subject.denoiser.check(spec.shape, noise_level, kind)
    side = scaled_side(named.dataset, spec.shape) if resize else None
    pixels, notes = read_image_files(images, spec.shape, shorter_side=side)
    for text in notes:
        note(text)
    model = SmoothedClassifier(
        named.subject.classifier, sigma=noise_level, num_classes=spec.num_classes, noise=kind, precision=precision
    )
    warn = PlainConsole(stderr=True).warn
    print_about_runs(named.subject, note, warn)
    with printing_warnings(named.subject.noise_warnings(noise_level, kind), warn):
        smoothed = model.to(torch_device)
        # All files were read before the first is certified. They stay bytes: as floats they are four times as large.
        loader = DataLoader(
            TensorDataset(pixels),
            batch_size=IMAGES_AT_ONCE,
            collate_fn=lambda items: in_unit_interval(torch.stack([image for (image,) in items])),
        )
        votes: RuleOptions = {"n": n, "alpha": alpha, "bound": bound, "sound": sound}
        parts = smoothed.certify_loader(loader, progress=len(pixels) > IMAGES_AT_ONCE, **votes)
        certified = zip(images, chain.from_iterable(parts), strict=True)
        rows = (row_of(path, certificate, spec.class_names) for path, certificate in certified)
        print_rows(rows, about_radii(smoothed, votes, torch_device), format_)


@contextmanager
def printing_warnings(first: Sequence[str], warn: Callable[[str], None]) -> Iterator[None]:
    """Print the warnings `first`, and others that the library raises inside as soon as it does."""
    for text in first:
        warn(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)  # each once
        warnings.showwarning = lambda message, *_: None if str(message) in first else warn(str(message))
        yield


def runs_and_images(paths: Sequence[Path], request: ClassifierOptions) -> tuple[Sequence[Path], Sequence[Path]]:
    """Return the run folders and the image files in `paths`; refuse a folder that is no run, and missing files."""
    first = paths if request.kind else paths[:1]
    if request.network is not None and not (paths[0] / RECIPE).exists():
        first = []  # a folder is meant as one of images
    runs = [*takewhile(Path.is_dir, first)] or ([] if request.network is not None else [*paths[:1]])
    images = paths[len(runs) :]
    request.check(runs)
    if not images:
        raise RequestError(f"expected image files after {paths[0]}, got none; name some")
    for image in images:
        if image.is_dir():
            raise RequestError(
                f"{image}: expected an image file, got a folder; give its files, such as {image}/*.png, and --ensemble "
                "for several runs"
            )
        check_file(image, "an image file" if runs or image != paths[0] else "a run folder or an image file")
    return runs, images


def about_radii(smoothed: "SmoothedClassifier", votes: "RuleOptions", device: "torch.device") -> dict[str, Any]:
    """Return what all radii depend on, and the largest one that n votes can show."""
    from smoothcert.models.precision import resolve_precision
    from smoothcert.smoothing.bounds import SLACK
    from smoothcert.smoothing.certificate import largest_radius

    noise = smoothed.noise
    slack = SLACK if votes["sound"] else 0.0
    ceiling = largest_radius(votes["n"], noise, votes["alpha"], votes["bound"], slack)
    about = {**votes, "sigma": noise.sigma, "noise": noise.name}
    precision = resolve_precision(smoothed.precision, device)
    return {**about, "norm": noise.norm, "largest_radius": ceiling, "precision": precision}


def row_of(path: Path, certificate: "Certificate", names: Sequence[str] | None) -> dict[str, Any]:
    """Return the result for one image; an image without a proved class has the class None and the radius 0."""
    number = None if certificate.abstained else certificate.prediction
    name = printable(names[number]) if names is not None and number is not None else None
    votes = {str(c): k for c, k in certificate.votes}
    return {"image": str(path), "class": number, "name": name, "radius": certificate.radius, "votes": votes}


def votes_text(row: dict[str, Any], most: int | None = None) -> str:
    return ", ".join(f"{c}: {k}" for c, k in [*row["votes"].items()][:most])


def print_rows(rows: Iterable[dict[str, Any]], about: dict[str, Any], format_: Literal["table", "json", "csv"]) -> None:
    """Print the results: a line of CSV as soon as it is known, a table or JSON when all are.

    In CSV what all radii depend on is in each line.
    """
    if format_ == "table":
        print_table(list(rows), about)
    elif format_ == "json":
        print(json.dumps({**about, "images": list(rows)}, indent=2))
    else:
        # All digits of the radii: ten of them, rounded, may be more than was proved.
        shared = {**about, "largest_radius": repr(about["largest_radius"])}
        for number, row in enumerate(rows):
            written = {**row, "radius": repr(row["radius"]), "votes": votes_text(row), **shared}
            lines = [written.values()] if number else [written, written.values()]
            print(csv_text(lines), end="", flush=True)


def print_table(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
    """Print one line per image, and what its radius means."""
    randomized = about["bound"] == "randomized"
    reached = any(about["n"] in row["votes"].values() for row in rows)
    images = "image of bytes" if about["sound"] else "image"
    kind = "" if about["bound"] == "one-sided" else f" ({about['bound']} bound)"
    table = Table("image", "class", f"{about['norm']} radius{kind}", f"votes of {about['n']:,}")
    for row in rows:
        answer = "abstain" if row["class"] is None else " ".join(filter(None, [str(row["class"]), row["name"]]))
        table.add_row(row["image"], answer, radius_text(row["radius"]), votes_text(row, 3))
    console.print(table)
    console.print(
        f"radius: the smoothed classifier (network in {about['precision']}) gives this class to every {images} closer "
        f"than this in {about['norm']} (pixels in [0, 1]); each row is wrong with probability at most "
        f"{about['alpha']}; {radius_text(about['largest_radius'])} is the most that n = {about['n']:,} votes can show"
        + ("; it is reached here: raise --n for more" if reached and not randomized else "")
        + ("; each radius depends on a coin: do not choose among repeated calls" if randomized else ""),
    )
