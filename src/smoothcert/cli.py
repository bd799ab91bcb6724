"""The command line: parse, call, print. Exit codes: 0 done, 1 the work failed, 2 the request was wrong."""

import math
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, get_args

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from smoothcert.certificates import ABSTAIN
from smoothcert.errors import RequestError, WorkError

if TYPE_CHECKING:  # commands import torch only when they need it: --help answers at once
    from smoothcert.published import InputLayer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train image classifiers that can be certified by randomized smoothing, certify them, show the result.",
)
console = Console()

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Data folder.", envvar="SMOOTHCERT_DATA", show_default="a user cache folder"),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


# The base of all errors of the parser: typer brings its own or uses click, depending on its version.
PARSER_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
INTERRUPTED = 130


def main() -> None:
    """Run a command; a wrong request or failed work costs one line, never a traceback."""
    code: object = 0
    try:
        code = app(standalone_mode=False)
    except PARSER_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        # Called without arguments: the help has been printed, or is the message.
        if not message or "\n" in message:
            print(message)
            sys.exit(2)
        fail(message, 2)
    except RequestError as error:
        fail(str(error), 2)
    except WorkError as error:
        fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:
        fail(f"{error.filename or 'input/output'}: {error.strerror or error}", 1)
    if code == INTERRUPTED:
        fail(
            "interrupted; what is finished is kept: the same command goes on from there (train: add --resume)",
            INTERRUPTED,
        )
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> NoReturn:
    errors = Console(stderr=True)
    errors.print(
        Text("smoothcert: ", style="bold red") + Text(" ".join(message.split()), style="default"), soft_wrap=True
    )
    sys.exit(code)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Run folder to make.")],
    preset: Annotated[str | None, typer.Option(help="A published run: see `smoothcert presets`.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="A recipe in YAML instead of a preset.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise level.")] = None,
    model: Annotated[str | None, typer.Option(help="A network, or your own: package.module:function.")] = None,
    set_: Annotated[list[str], typer.Option("--set", help="key=value: overrides a field of the recipe.")] = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Train a model into a run folder."""
    from smoothcert.checkpoint import RECIPE
    from smoothcert.console import train_with_bar
    from smoothcert.data import load_dataset
    from smoothcert.presets import preset as find_preset
    from smoothcert.recipe import load_train_recipe, with_overrides

    if preset is not None and recipe is not None:
        raise RequestError("give --preset or --recipe, not both")
    if preset is not None:
        chosen = find_preset(preset, sigma)
    elif recipe is not None:
        chosen = load_train_recipe(recipe)
    elif resume and (out / RECIPE).exists():
        chosen = load_train_recipe(out / RECIPE)
    else:
        raise RequestError("give --preset NAME or --recipe FILE; `smoothcert presets` lists the presets")
    overrides = list(set_) if sigma is None or preset is not None else [f"sigma={sigma}", *set_]
    overrides += [f"model={model}"] if model is not None else []
    final = with_overrides(chosen, overrides)
    images = load_dataset(final.dataset, "train", data, image_size=final.image_size)
    train_with_bar(final, images, out, resume=resume, device=device)
    console.print(f"trained {out}; next: smoothcert certify {out}", soft_wrap=True)


@app.command()
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
    from smoothcert.certification import (
        certify_own_model,
        certify_run,
        chosen_images,
        complete_recipe,
        unreachable_radius,
    )
    from smoothcert.checkpoint import load_run
    from smoothcert.console import certification_bar
    from smoothcert.data import load_dataset
    from smoothcert.models import own_model
    from smoothcert.processes import find_device, team

    loaded = load_run(run, model) if run is not None else None
    folder = run if run is not None else out
    if loaded is None and (model is None or dataset is None or sigma is None):
        raise RequestError("give a run folder, or --model package.module:function --dataset NAME --sigma S --out DIR")
    if folder is None:
        raise RequestError("give --out DIR for the certificates of --model")
    if until_radius is not None and radii is not None:
        raise RequestError("give --until-radius or --radii, not both")
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
        indices = chosen_images(len(images), skip, max_images, part)
        network = own_model(str(model), images.num_classes) if loaded is None else None
        with certification_bar(folder.name, len(indices)) as show:
            if loaded is not None:
                certify_run(loaded, images, indices, recipe, path, where, show, group)
            elif network is not None:
                certify_own_model(str(model), network, images, indices, recipe, path, where, show, group)
        if group.leads:
            console.print(spent_votes(path, recipe.n), soft_wrap=True)
            console.print(f"wrote {path}; next: smoothcert report {folder}", soft_wrap=True)


def spent_votes(path: Path, n: int) -> str:
    """How many votes a file's images took, beside n for each."""
    from smoothcert.certificates import read_certificates

    rows = read_certificates(path).rows
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


@app.command()
def attack(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    certificates: Annotated[
        Path | None, typer.Option(help="Certificates to check and images to attack.", show_default="the run's, if one")
    ] = None,
    radii: Annotated[str | None, typer.Option(help="L2 radii by commas.", show_default="up to 4 sigma")] = None,
    steps: Annotated[int, typer.Option(help="Attack steps.")] = 20,
    num_noise: Annotated[int, typer.Option(help="Noises that the attack averages over.")] = 32,
    n: Annotated[int, typer.Option("--n", "--votes", help="Votes of a prediction.")] = 1000,
    alpha: Annotated[float, typer.Option(help="Probability that an image's row is wrong, at most.")] = 0.001,
    skip: Annotated[int, typer.Option(help="Attack every SKIP-th image.")] = 1,
    max_images: Annotated[int | None, typer.Option(help="Attack at most so many images.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="auto, fp32, bf16 or fp16.", show_default="as certified")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="For tests and replays.", show_default="fresh")] = None,
    name: Annotated[str, typer.Option(help="Name of the attacks file.")] = "pgd",
    model: Annotated[str | None, typer.Option(help="The run's own network, package.module:function.")] = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Attack the smoothed classifier: an upper bound on its robust accuracy, and a check of its certificates."""
    from smoothcert.attack_file import contradiction_p_value, empirical_accuracy
    from smoothcert.certificates import read_certificates
    from smoothcert.certification import chosen_images
    from smoothcert.checkpoint import load_run
    from smoothcert.console import attack_bar
    from smoothcert.data import load_dataset
    from smoothcert.empirical import AttackRecipe, attack_run, default_attack_radii
    from smoothcert.processes import find_device
    from smoothcert.recipe import parse_recipe
    from smoothcert.result_file import stored_settings
    from smoothcert.smoothing.precision import resolve_precision
    from smoothcert.smoothing.votes import default_batch_size

    loaded, where = load_run(run, model), find_device(device)
    found = sorted((run / "certificates").glob("*.tsv"))
    source = certificates if certificates is not None else found[0] if len(found) == 1 else None
    if source is None and found:
        names = ", ".join(path.name for path in found)
        raise RequestError(f"{run}: has several certificates files ({names}); choose one with --certificates")
    claims = read_certificates(source) if source is not None else None
    told = dict(claims.settings) if claims is not None else {}
    path = run / "attacks" / f"{name}.tsv"
    stored = stored_settings(path)
    sigma = told.get("sigma", loaded.recipe.sigma)
    images = load_dataset(told.get("dataset", loaded.recipe.dataset), "test", data, image_size=loaded.recipe.image_size)
    fields = {
        **{"sigma": sigma, "radii": parse_radii(radii) or default_attack_radii(sigma), "steps": steps, "n": n},
        **{"num_noise": num_noise, "alpha": alpha},
        "precision": resolve_precision(precision or told.get("precision", "auto"), where),
        "batch_size": stored.get("batch_size", default_batch_size(where, images.shape)),
        "seed": stored.get("seed", secrets.randbits(63)) if seed is None else seed,
    }
    recipe = parse_recipe(AttackRecipe, fields, "attack")
    indices = chosen_images(len(images), skip, max_images)
    if claims is not None:
        indices = sorted(row.index for row in claims.rows)[::skip][:max_images]
    with attack_bar(run.name, len(indices)) as show:
        file = attack_run(loaded, images, indices, recipe, path, where, claims, show)
    table = Table("radius", "accuracy under attack, at most")
    for radius in (0.0, *recipe.radii):
        table.add_row(f"{radius:g}", f"{empirical_accuracy(file.rows, radius):.1%}")
    console.print(table)
    console.print(f"wrote {path}; next: smoothcert report {run}", soft_wrap=True)
    for row in file.contradictions:
        console.print(
            f"CONTRADICTION: image {row.index}, certified to {row.certified_radius:.4f}, falls at {row.distance:.4f}",
            style="bold red",
        )
    chance = contradiction_p_value(file)
    if file.contradictions and chance is not None and chance < LIKELY_A_BUG:
        raise WorkError(
            f"{path}: {len(file.contradictions)} attacks succeeded inside certified radii; by chance that happens with "
            f"probability {chance:.1e}: the certificates are wrong"
        )


LIKELY_A_BUG = 1e-3
"""Contradictions less likely than this are not put down to alpha."""


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Certificates files of the shards.")],
    out: Annotated[Path, typer.Option(help="Certificates file to write.")],
) -> None:
    """Put the certificates files of shards together."""
    from smoothcert.certificates import merge_certificates

    rows = merge_certificates(files, out)
    console.print(f"wrote {rows} rows to {out}", soft_wrap=True)


@app.command()
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


@app.command()
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
        at_precision(loaded.model, kind, where),
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


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders or certificates files.")],
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    format_: Annotated[str, typer.Option("--format", help="Of md, csv, tex, png, pdf, svg; by commas.")] = "md,csv,png",
    radii: Annotated[str | None, typer.Option(help="Radii of the table, by commas.")] = None,
) -> None:
    """Tables and certified-accuracy curves from certificates."""
    from smoothcert.report import terminal_table, write_report

    written = write_report(runs, out, [f.strip() for f in format_.split(",")], parse_radii(radii))
    console.print(terminal_table(written.summaries, console.width))
    for path in written.written:
        console.print(f"wrote {path}", soft_wrap=True)


def parse_radii(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if min(values) < 0 or not all(map(math.isfinite, values)):
        raise RequestError(f"radii: expected numbers >= 0 by commas, such as 0,0.5,1.0, got {text}")
    return values


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A published checkpoint: .pth.tar, .pth or .pt.")],
    out: Annotated[Path, typer.Option(help="Run folder to make.")],
    sigma: Annotated[float, typer.Option(help="Noise level that it was trained with.")],
    arch: Annotated[str | None, typer.Option(help="Network: see `smoothcert models`.", show_default="guessed")] = None,
    dataset: Annotated[str | None, typer.Option(help="Its data set.", show_default="guessed")] = None,
    input_layer: Annotated[
        str | None, typer.Option(help="normalize, center or none.", show_default="the data set's")
    ] = None,
    method: Annotated[str, typer.Option(help="What tables call it.")] = "imported",
    data: Data = None,
) -> None:
    """Make a run folder from a published checkpoint; its pickled code is never run."""
    from smoothcert.data import load_dataset
    from smoothcert.published import import_checkpoint, input_layer_warning

    run = import_checkpoint(
        file, out, sigma=sigma, arch=arch, dataset=dataset, input_layer=check_input_layer(input_layer), method=method
    )
    for note in run.provenance["notes"]:
        console.print(f"note: {note}", soft_wrap=True, highlight=False)
    try:
        warning = input_layer_warning(run, load_dataset(run.recipe.dataset, "test", data))
    except (RequestError, WorkError) as error:
        warning = f"input layer: not checked, the data are not there ({error})"
    if warning:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, highlight=False)
    console.print(f"imported {out}; next: smoothcert certify {out}", soft_wrap=True)


def check_input_layer(name: str | None) -> "InputLayer | None":
    from smoothcert.published import InputLayer

    for known in get_args(InputLayer):
        if name == known:
            found: InputLayer = known
            return found
    if name is not None:
        raise RequestError(f"input-layer: expected one of {', '.join(get_args(InputLayer))}, got {name}")
    return None


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Print this preset's recipe.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise level.")] = None,
) -> None:
    """The published runs: all of them, or one recipe in full."""
    from smoothcert.presets import PRESETS, preset

    if name is not None and name in PRESETS:
        print(preset(name, sigma).to_yaml(), end="")
        return
    chosen = {key: found for key, found in PRESETS.items() if name is None or key.startswith(name)}
    if not chosen:
        preset(str(name))
    table = Table(Column("preset", overflow="fold"), "sigma", "published ACR")
    for key, found in chosen.items():
        values = (found.published_acr(s) for s in found.sigmas)
        shown = " / ".join("-" if value is None else f"{value:.3f}" for value in values)
        table.add_row(key, " / ".join(f"{s:g}" for s in found.sigmas), shown)
    console.print(table)


@app.command()
def datasets() -> None:
    """The data sets, one line each."""
    from smoothcert.data import DATASETS

    show_registry({name: spec.description for name, spec in DATASETS.items()})


@app.command()
def models() -> None:
    """The networks, one line each."""
    from smoothcert.models import MODELS

    show_registry({name: spec.description for name, spec in MODELS.items()})


@app.command()
def objectives(name: Annotated[str | None, typer.Argument(help="Show this method's fields.")] = None) -> None:
    """The training methods, one line each, or one with its hyper-parameters."""
    from smoothcert.objectives import OBJECTIVES

    if name is None:
        show_registry({key: (kind.__doc__ or "").splitlines()[0] for key, kind in OBJECTIVES.items()})
        return
    if name not in OBJECTIVES:
        raise RequestError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {name}")
    fields = OBJECTIVES[name].model_fields
    show_registry({f"objective.{key}": f"{f.description} (default {f.default})" for key, f in fields.items()})


def show_registry(entries: "dict[str, str]") -> None:
    table = Table(box=None, show_header=False)
    for key, text in entries.items():
        table.add_row(key, text)
    console.print(table)


@app.command()
def quickstart(out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = Path("quickstart")) -> None:
    """Bundled MNIST sample: models trained, certified, compared; report written."""
    from smoothcert.quickstart import run_quickstart

    run_quickstart(out)
