"""`smoothcert predict`."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from smoothcert.cli.options import Classes, Denoiser, Device, Precision, console
from smoothcert.errors import RequestError
from smoothcert.io.text import printable
from smoothcert.smoothing.certificate import ABSTAIN
from smoothcert.training.run_folder import check_file, check_run_folder


def predict(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    images: Annotated[list[Path], typer.Argument(help="Image files of the size the run was trained on.")],
    n: Annotated[int, typer.Option(help="Votes that bound the class's probability.")] = 10_000,
    alpha: Annotated[float, typer.Option(help="Probability that a line is wrong, at most.")] = 0.001,
    precision: Annotated[Precision, typer.Option(help="Precision of the network.")] = "auto",
    resize: Annotated[bool, typer.Option("--resize", help="Scale and crop images that have another size.")] = False,
    classes: Classes = None,
    model: Annotated[str | None, typer.Option(help="The run's own network, package.module:function.")] = None,
    denoiser: Denoiser = None,
    sigma: Annotated[float | None, typer.Option(help="Noise level.", show_default="the denoiser's or run's")] = None,
    device: Device = "auto",
) -> None:
    """Print the class, the votes and the certified radius of image files."""
    check_run_folder(run)
    for image in images:
        check_file(image, "an image file")
    from smoothcert.data import DATASETS, read_class_names
    from smoothcert.data.image_files import read_image_files
    from smoothcert.distributed import find_device
    from smoothcert.models import Denoised
    from smoothcert.report.progress import print_note
    from smoothcert.smoothing.bounds import smallest_error_bound
    from smoothcert.training.checkpoint import load_run
    from smoothcert.training.denoiser import load_denoiser

    loaded, where = load_run(run, model), find_device(device)
    spec, dataset = loaded.spec, DATASETS.get(loaded.recipe.dataset)
    names = read_class_names(classes) if classes is not None else spec.class_names
    names = dataset.class_names if names is None and dataset is not None else names
    if names is not None and len(names) != spec.num_classes:
        raise RequestError(f"--classes: expected {spec.num_classes} names, one per output of {run}, got {len(names)}")
    side = (dataset.shorter_side if dataset is not None else None) or min(spec.shape[1:])
    batch, notes = read_image_files(images, spec.shape, shorter_side=side if resize else None)
    if denoiser is not None:
        front = load_denoiser(denoiser, sigma)
        sigma = front.sigma if sigma is None else sigma
        front.check(spec.shape, sigma, loaded.recipe.noise)
        loaded.refuse_denoiser()
        loaded = replace(loaded, model=Denoised(front.model, loaded.model))
    loaded.model.to(where)
    smoothed = loaded.smoothed(sigma, precision=precision)
    certificates = smoothed.certify(batch.to(where), n=n, alpha=alpha)
    table = Table("image", "class", f"{smoothed.noise.norm} radius", f"votes of {n:,}")
    for path, certificate in zip(images, certificates, strict=True):
        votes = ", ".join(f"{c}: {k}" for c, k in certificate.votes[:3])
        answer = "abstain" if certificate.predict == ABSTAIN else with_name(certificate.predict, names)
        table.add_row(str(path), answer, f"{math.floor(certificate.radius * 1000) / 1000:.3f}", votes)
    console.print(table)
    for note in notes:
        print_note(console, note)
    ceiling = math.floor(smoothed.noise.radius(smallest_error_bound(n, alpha)) * 1000) / 1000
    reached = any(certificate.count == n for certificate in certificates)
    console.print(
        f"radius: every image closer than this in {smoothed.noise.norm} (pixels in [0, 1]) gets the same class, with "
        f"probability at least {1 - alpha:.6g} for each row; {ceiling:.3f} is the most that n = {n:,} votes can show"
        + ("; it is reached here: raise --n for more" if reached else ""),
        soft_wrap=True,
        highlight=False,
    )


def with_name(number: int, names: Sequence[str] | None) -> str:
    """Return a class as a number and, if it is known, its name in printable characters."""
    if names is None:
        return str(number)
    return f"{number} {printable(names[number])}"
