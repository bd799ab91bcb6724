"""`smoothcert certify`, `merge`, `recertify` and `predict`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from smoothcert.certificates import ABSTAIN, CertifiedImage, read_certificates
from smoothcert.cli.options import Data, Device, console, parse_radii
from smoothcert.errors import RequestError
from smoothcert.run_folder import check_run_folder


def certify(
    run: Annotated[Path | None, typer.Argument(help="Run folder.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="Your own network: package.module:function.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Data set, for --model; see `smoothcert datasets`.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images, for folder:PATH.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the certificates, for --model.")] = None,
    n: Annotated[int, typer.Option("--n", "--votes", help="Votes that bound the class's probability.")] = 100_000,
    n0: Annotated[int, typer.Option(help="Votes that choose the class.")] = 100,
    alpha: Annotated[float, typer.Option(help="Probability that a certificate is wrong, at most.")] = 0.001,
    sigma: Annotated[float | None, typer.Option(help="Noise level.", show_default="the run's")] = None,
    noise: Annotated[str | None, typer.Option(help="gaussian, laplace or uniform.", show_default="the run's")] = None,
    skip: Annotated[int, typer.Option(help="Certify every SKIP-th image.")] = 1,
    max_images: Annotated[int | None, typer.Option(help="Certify at most so many images.")] = None,
    shard: Annotated[
        str, typer.Option(help="i/k: the i-th of k shares of the images; see `smoothcert merge`.")
    ] = "1/1",
    until_radius: Annotated[float | None, typer.Option(help="Sample only until this radius is decided.")] = None,
    radii: Annotated[str | None, typer.Option(help="Sample only until these radii (by commas) are decided.")] = None,
    radius_loss: Annotated[float | None, typer.Option(help="Radius, in sigmas, to give up for fewer votes.")] = None,
    label_aware: Annotated[bool, typer.Option("--label-aware", help="Benchmarks only: skip wrong images.")] = False,
    bound: Annotated[str, typer.Option(help="one-sided or two-sided.")] = "one-sided",
    sound: Annotated[bool, typer.Option("--sound", help="Integer noise: sound in floating point.")] = False,
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    compile_: Annotated[bool, typer.Option("--compile", help="torch.compile the network.")] = False,
    batch_size: Annotated[int | None, typer.Option(help="Noisy images in a forward pass.")] = None,
    seed: Annotated[int | None, typer.Option(help="For tests and replays.", show_default="fresh")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the file.", show_default="test-nN and the rule")] = None,
    radius: Annotated[float | None, typer.Option(help="Warn if n cannot reach this radius.")] = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Certify test images of a run, or of your own model; an interrupted file is continued."""
    if run is not None:
        check_run_folder(run)  # before torch is imported, which takes seconds
    from smoothcert.certification import (
        certify_own_model,
        certify_run,
        chosen_images,
        complete_recipe,
        missing_classes,
        unreachable_radius,
    )
    from smoothcert.checkpoint import load_run
    from smoothcert.console import certification_bar, print_note
    from smoothcert.data import load_dataset
    from smoothcert.models import own_model
    from smoothcert.processes import find_device, meet, team

    meet()
    loaded = load_run(run, model) if run is not None else None
    folder = run if run is not None else out
    if loaded is None and (model is None or dataset is None or sigma is None):
        raise RequestError("give a run folder, or --model package.module:function --dataset NAME --sigma S --out DIR")
    if folder is None:
        raise RequestError("give --out DIR for the certificates of --model")
    if run is not None and out is not None:
        raise RequestError(
            f"--out: expected none with a run folder, whose certificates are in it, got {out}; use --name"
        )
    if name is not None and Path(name).name != name:
        raise RequestError(f"--name: expected a file's name without folders, got {name}; leave the folders out")
    if until_radius is not None and radii is not None:
        raise RequestError("give --until-radius or --radii, not both")
    for option, value in (("--radius", radius), ("--until-radius", until_radius)):
        if value is not None and not 0 <= value < math.inf:
            raise RequestError(f"{option}: expected a number >= 0, got {value}")
    if loaded is not None:
        if not loaded.finished:
            console.print(f"note: {run} has trained {loaded.epoch} of {loaded.recipe.epochs} epochs", style="yellow")
        sigma = loaded.recipe.sigma if sigma is None else sigma
        noise = loaded.recipe.noise if noise is None else noise
        dataset = loaded.recipe.dataset if dataset is None else dataset
        image_size = loaded.recipe.image_size if image_size is None else image_size
    elif precision == "auto":
        precision = "fp32"  # a network that we do not know may not stand reduced precision
    where = find_device(device)
    part = parse_shard(shard)
    grid = [until_radius] if until_radius is not None else parse_radii(radii)
    rule = {"two-sided": bound == "two-sided", "radii": grid, "loss": radius_loss, "label-aware": label_aware}
    words = [f"test-n{n}", *(word for word, used in (rule | {"sound": sound}).items() if used)]
    words += [noise] if noise not in (None, "gaussian") else []
    words += [f"shard{part[0]}of{part[1]}"] if part[1] > 1 else []
    path = folder / "certificates" / f"{name or '-'.join(words)}.tsv"
    images = load_dataset(str(dataset), "test", data, image_size=image_size)
    fields = {
        **{"n": n, "n0": n0, "alpha": alpha, "sigma": sigma, "noise": noise, "precision": precision, "bound": bound},
        **{"radii": grid or (), "hold_back": radii is not None, "radius_loss": radius_loss, "sound": sound},
        **{"label_aware": label_aware, "compile": compile_, "batch_size": batch_size, "seed": seed},
    }
    with team() as group:
        recipe = group.agree(complete_recipe(fields, path, where, images.shape))
        for asked in [radius] if radius is not None else recipe.radii[-1:]:
            if group.leads and (warning := unreachable_radius(recipe, asked)):
                console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
        if group.leads and (warning := missing_classes(images, chosen_images(len(images), skip, max_images))):
            console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
        indices = chosen_images(len(images), skip, max_images, part)
        network = own_model(str(model), images.num_classes) if loaded is None else None
        with certification_bar(folder.name, len(indices)) as show:
            if loaded is not None:
                certify_run(loaded, images, indices, recipe, path, where, show, group)
            elif network is not None:
                certify_own_model(str(model), network, images, indices, recipe, path, where, show, group)
        if group.leads:
            rows = read_certificates(path).rows
            console.print(spent_votes(rows, recipe.n), soft_wrap=True)
            if others := {row.index for row in rows}.difference(indices):
                told = f"{path.name} holds {len(others):,} images that an earlier call chose as well"
                apart = f"a report is about all {len(rows):,}: choose another --name to keep them apart"
                print_note(console, f"{told}; {apart}")
            all_shards = path.with_name(path.name.replace(f"shard{part[0]}of", "shard*of"))
            shards = f"merge {all_shards} --out merged.tsv, when all {part[1]} are done"
            onwards = f"report {folder}" if all_shards == path else shards
            console.print(f"wrote {path}; next: smoothcert {onwards}", soft_wrap=True)


def spent_votes(rows: Sequence[CertifiedImage], n: int) -> str:
    """How many votes the images took, beside n for each."""
    spent = sum(row.certificate.n0 + row.certificate.n for row in rows)
    most = sum(row.certificate.n0 + n for row in rows)
    return f"{spent:,} votes for {len(rows)} images" + (
        f", {most / spent:.1f} times fewer than n each" if most > spent else ""
    )


def parse_shard(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit()):
        raise RequestError(f"shard: expected i/k, such as 3/8, got {text}")
    return int(part), int(parts)


def merge(
    files: Annotated[list[Path], typer.Argument(help="Certificates files of the shards.")],
    out: Annotated[Path, typer.Option(help="Certificates file to write.")],
) -> None:
    """Put the certificates files of shards together."""
    from smoothcert.certificates import merge_certificates

    rows = merge_certificates(files, out)
    console.print(f"wrote {rows} rows to {out}", soft_wrap=True)


def recertify(
    file: Annotated[Path, typer.Argument(help="Certificates file that smoothcert wrote.")],
    alpha: Annotated[
        float | None, typer.Option(help="Probability of a wrong certificate.", show_default="the file's")
    ] = None,
    bound: Annotated[str | None, typer.Option(help="one-sided or two-sided.", show_default="the file's")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="beside the old one")] = None,
) -> None:
    """Other statistics from stored votes: no sampling, no model."""
    from smoothcert.recertification import recertify as recompute

    words = [
        file.name.removesuffix(".tsv"),
        *([f"alpha{alpha:g}"] if alpha is not None else []),
        *([bound] if bound else []),
    ]
    target = out if out is not None else file.with_name("-".join(words) + ".tsv")
    rows = recompute(file, target, alpha=alpha, bound=bound)
    console.print(f"wrote {rows} rows to {target}", soft_wrap=True)


def predict(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    images: Annotated[list[Path], typer.Argument(help="Image files of the size the run was trained on.")],
    n: Annotated[int, typer.Option(help="Votes that bound the class's probability.")] = 10_000,
    alpha: Annotated[float, typer.Option(help="Probability that a line is wrong, at most.")] = 0.001,
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    resize: Annotated[bool, typer.Option("--resize", help="Scale images that have another size.")] = False,
    model: Annotated[str | None, typer.Option(help="The run's own network, package.module:function.")] = None,
    device: Device = "auto",
) -> None:
    """Class, votes and certified radius of image files."""
    check_run_folder(run)
    from smoothcert.checkpoint import load_run
    from smoothcert.data.files import read_image_files
    from smoothcert.processes import find_device
    from smoothcert.smoothing.classifier import SmoothedClassifier
    from smoothcert.smoothing.precision import DTYPES, at_precision, resolve_precision

    loaded, where = load_run(run, model), find_device(device)
    spec = loaded.spec
    batch = read_image_files(images, spec.shape, resize=resize).to(where)
    kind = resolve_precision(precision, where)
    smoothed = SmoothedClassifier(
        at_precision(loaded.model, kind, where, spec.shape),
        sigma=loaded.recipe.sigma,
        num_classes=spec.num_classes,
        noise=loaded.recipe.noise,
        dtype=DTYPES[kind],
    )
    table = Table("image", "class", f"{smoothed.noise.norm} radius", f"votes of {n:,}")
    for path, certificate in zip(images, smoothed.certify(batch, n=n, alpha=alpha), strict=True):
        votes = ", ".join(f"{c}: {k}" for c, k in certificate.votes[:3])
        answer = "abstain" if certificate.predict == ABSTAIN else str(certificate.predict)
        table.add_row(str(path), answer, f"{math.floor(certificate.radius * 1000) / 1000:.3f}", votes)
    console.print(table)
