"""`smoothcert train`, `import` and `export`: commands that make run folders."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoothcert.cli.options import (
    DATASET,
    NOISE_LEVEL,
    CompileTraining,
    Device,
    ImageOptions,
    Overrides,
    OwnNetwork,
    Resume,
    command_line,
    console,
)
from smoothcert.cli.recipes import RecipeOptions, choose_recipe, split_values
from smoothcert.data.datasets import refuse_absent_data
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.console import leads
from smoothcert.training.choices import InputLayer, Tracker
from smoothcert.training.run_folder import (
    MODEL,
    RECIPE,
    check_file,
    check_run_folder,
    refuse_existing_run,
    refuse_lost_recipe,
    split_key,
    weights_in,
)

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.data import Images
    from smoothcert.training.checkpoint import Run
    from smoothcert.training.recipe import ImportRecipe, TrainRecipe


def train(
    *,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to make.", show_default="runs/ and a name for the recipe")
    ] = None,
    options: RecipeOptions,
    sigma: Annotated[float | None, typer.Option(help=NOISE_LEVEL)] = None,
    set_: Overrides = [],  # noqa: B006
    init: Annotated[
        Path | None, typer.Option(help="Weights to start from: a run folder, .safetensors or a PyTorch checkpoint.")
    ] = None,
    teacher: Annotated[
        list[Path],
        typer.Option(help="Run folder that --method distillation learns from; repeat it for several."),
    ] = [],  # noqa: B006
    evaluate_every: Annotated[
        int, typer.Option(min=0, help="Measure the test accuracy under noise every N epochs.", show_default="never")
    ] = 0,
    track: Annotated[Tracker | None, typer.Option(help="Also send the metrics to this tool.")] = None,
    resume: Resume = False,
    compile_: CompileTraining = "auto",
    capture: Annotated[
        bool | None, typer.Option(help="On a GPU, run steps as CUDA graphs.", show_default="not for your own code")
    ] = None,
    sync_batch_norm: Annotated[
        bool, typer.Option("--sync-batch-norm", help="Batch norm over the images of all processes; on GPUs.")
    ] = False,
    files: ImageOptions,
    device: Device = "auto",
) -> None:
    """Train a model into a run folder: from a preset, a recipe, or a data set and a method."""
    name = options.name(sigma)
    stored = None
    if resume and out is None and name is None:
        raise RequestError("--resume: expected the run to continue, got none; name it by --out")
    if out is None and name is not None:
        out = Path("runs") / name
    if out is not None and resume and options.preset is None and options.recipe is None:
        stored = stored_recipe(out, startable=name is not None)
        options = replace(options, recipe=stored)
    if out is not None and not resume:
        refuse_existing_run(out)  # before data are downloaded or read
    if init is not None:
        weights_in(init)
    trained, continued = init is not None, stored is not None
    try:
        recipe = choose_recipe(options, sigma, files, set_, trained=trained, continued=continued)
    except RequestError as error:
        if any(len(split_values(text.partition("=")[2])) > 1 for text in set_):
            raise RequestError(f"{error}; for one run per value of key=a,b use `smoothcert sweep`") from error
        raise
    from smoothcert.distributed import find_device, meet
    from smoothcert.report.progress import train_with_bar
    from smoothcert.training.checkpoint import in_order_of_run
    from smoothcert.training.distillation_teacher import load_teacher
    from smoothcert.training.tracking import tracker

    assert out is not None, "a recipe has a name"
    find_device(device)  # a missing GPU is reported before data are downloaded
    meet()
    images = in_order_of_run(files.load(recipe.dataset, "train", recipe.image_size), out if resume else None, init)
    print_notes(images)
    if options.preset is not None and sigma is None and not any(text.startswith("sigma=") for text in set_):
        console.note(f"sigma {recipe.sigma:g}, the default of the preset; --sigma changes it")
    classifier = None
    if teacher:
        classifier, images = load_teacher(teacher, recipe, images, console.warn)
    train_with_bar(
        recipe,
        images,
        out,
        classifier=classifier,
        classifier_folders=[folder.resolve().name for folder in teacher],
        resume=resume,
        device=device,
        capture=capture,
        compiling=compile_,
        sync_batch_norm=sync_batch_norm,
        init=init,
        test_data=files.load(recipe.dataset, "test", recipe.image_size) if evaluate_every else None,
        evaluate_every=evaluate_every or 1,
        on_epoch=tracker(track) if track is not None else lambda run, metrics: None,
    )
    if leads():
        console.print(f"trained {out}; next: {certify_next(recipe, out, files)}")


def certify_next(recipe: "TrainRecipe | ImportRecipe", out: Path, files: ImageOptions) -> str:
    """Return the command that certifies the run `out`; it names code, which certify refuses otherwise."""
    from smoothcert.data import is_data_code
    from smoothcert.models import is_code

    words: list[object] = ["--model", recipe.model] if is_code(recipe.model) else []
    words += ["--dataset", recipe.dataset] if is_data_code(recipe.dataset) else []
    return command_line("certify", out, *words, *replace(files, channels=None).words())


def print_notes(images: "Images") -> None:
    """Print what a user should know about the training images, and that none are left to certify if so."""
    from smoothcert.data import UNSPLIT
    from smoothcert.report.progress import print_data_notes

    print_data_notes(console, images)
    if images.split == UNSPLIT:
        text = f"{images.name} has no split: all {len(images):,} images are trained on; certify others"
        folders = ", or keep some apart: PATH/train/CLASS and PATH/test/CLASS"
        console.note(text + (folders if images.name.startswith("folder:") else ""))


def stored_recipe(out: Path, *, startable: bool) -> Path | None:
    """Return the recipe of the run in `out`, which is continued.

    None if there is no run yet and the request is `startable`, which means that it names a recipe: a process that ended
    before it made the folder starts again.
    """
    if (out / RECIPE).exists():
        return out / RECIPE
    refuse_lost_recipe(out)
    if not startable:
        raise RequestError(
            f"{out}: holds no run to continue; name its run by --out, or give --preset NAME for a new one"
        )
    return None


def import_(
    file: Annotated[
        Path,
        typer.Argument(help="A checkpoint: .pth.tar, .pth, .pt or .safetensors; FILE:KEY names weights in it."),
    ],
    *,
    out: Annotated[Path, typer.Option(help="Run folder to make.")],
    sigma: Annotated[float, typer.Option(help="Noise level that the checkpoint was trained with.")],
    arch: Annotated[
        str | None,
        typer.Option(
            help="A network, or your own: package.module:function or FILE.py:function.", show_default="guessed"
        ),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help=DATASET, show_default="guessed")] = None,
    input_layer: Annotated[
        InputLayer | None, typer.Option(help="What the network does to pixels first.", show_default="the data set's")
    ] = None,
    method: Annotated[str, typer.Option(help="Name of its training method in tables.")] = "imported",
    files: ImageOptions,
) -> None:
    """Make a run folder from a published checkpoint; its pickled code is never run."""
    if (file / MODEL).exists():
        raise RequestError(f"{file}: expected a checkpoint, got a run folder; use it as it is, without import")
    checkpoint = split_key(file)[0]
    check_file(checkpoint, "a checkpoint, such as checkpoint.pth.tar")
    if checkpoint.name == MODEL and (checkpoint.parent / RECIPE).exists():
        raise RequestError(f"{file}: expected a checkpoint, got the model of a run; use {checkpoint.parent} as it is")
    refuse_absent_data(dataset)
    from smoothcert.data import DATASETS
    from smoothcert.training.checkpoint import InputSpec
    from smoothcert.training.import_checkpoint import import_checkpoint

    size = files.image_size
    inputs = None
    if dataset is not None and dataset not in DATASETS:
        inputs = InputSpec.of(files.load(dataset, "test", size))
    elif (size, files.channels, files.classes) != (None, None, None):
        raise RequestError(
            "--image-size, --channels and --classes: expected your own --dataset with them, such as folder:PATH; leave "
            "them out"
        )
    run = import_checkpoint(
        file,
        out,
        sigma=sigma,
        arch=arch,
        dataset=dataset,
        inputs=inputs,
        image_size=size,
        input_layer=input_layer,
        method=method,
        on_read=lambda run: print_doubts(run, files),
    )
    console.print(f"imported {out}; next: {certify_next(run.recipe, out, files)}")


def print_doubts(run: "Run", files: ImageOptions) -> None:
    """Print what was guessed about an imported run, and what looks wrong; this may download images."""
    from smoothcert.models import is_code
    from smoothcert.noise import sigma_warning
    from smoothcert.training.input_layer import input_layer_warning

    for note in run.provenance["notes"]:
        console.note(note)
    if (warning := sigma_warning(run.recipe.sigma)) is not None:
        console.warn(warning)
    if not is_code(run.recipe.model):
        try:
            warning = input_layer_warning(run, files.load(run.recipe.dataset, "test", files.image_size))
        except (RequestError, WorkError) as error:
            warning = f"input layer: not checked ({error})"
        if warning is not None:
            console.warn(warning)


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    model: OwnNetwork = None,
) -> None:
    """Copy a run for publishing: its recipe, and its weights rounded to float16 (half the size)."""
    check_run_folder(run)
    from smoothcert.training.export import export_run

    exported = export_run(run, out, code=model)
    change = exported.provenance["weights"]["largest_change"]
    console.print(f"exported {out}; no weight changed by more than {change:.1e}")
    code = ["--model", model] if model is not None else []
    console.print(f"certificates of {run} do not hold for it; next: {command_line('certify', out, *code)}")
