"""`smoothcert train-denoiser`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from smoothcert.cli.options import (
    Channels,
    Classes,
    Compiling,
    Data,
    Device,
    ImageSize,
    SkipUnreadable,
    check_dataset,
    command_line,
    console,
    file_options,
    optional,
)
from smoothcert.errors import RequestError
from smoothcert.io.console import leads


def train_denoiser(
    out: Annotated[Path, typer.Option(help="Run folder to make.")],
    dataset: Annotated[str, typer.Option(help="Data set; see `smoothcert datasets`.")],
    sigma: Annotated[float, typer.Option(help="Noise level that is certified later.")],
    model: Annotated[Literal["unet", "unet-small", "unet-large"], typer.Option(help="Size of the denoiser.")] = "unet",
    classifier: Annotated[
        str | None, typer.Option(help="A classifier that adds a term to the loss: a run folder, or your own code.")
    ] = None,
    stability_weight: Annotated[
        float | None, typer.Option(help="Weight of that term.", show_default="1 with --classifier")
    ] = None,
    init: Annotated[Path | None, typer.Option(help="Denoiser to start from: a run folder.")] = None,
    image_size: ImageSize = None,
    channels: Channels = None,
    classes: Classes = None,
    skip_unreadable: SkipUnreadable = False,
    set_: Annotated[list[str], typer.Option("--set", help="key=value: overrides a field of the recipe.")] = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    compile_: Annotated[
        Compiling, typer.Option("--compile", help="torch.compile on a GPU; auto: if it pays.")
    ] = "auto",
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Train a denoiser, which makes a classifier that was trained without noise certifiable."""
    if stability_weight is not None and classifier is None:
        raise RequestError(f"--stability-weight: expected --classifier with it, got {stability_weight:g} alone")
    check_dataset(dataset)
    from smoothcert.data import load_dataset, read_class_names
    from smoothcert.distributed import meet
    from smoothcert.report.progress import print_data_notes, train_with_bar
    from smoothcert.training.denoiser import denoiser_recipe, load_classifier
    from smoothcert.training.recipe import with_overrides

    weight = (1.0 if classifier is not None else 0.0) if stability_weight is None else stability_weight
    fields = {"model": model, "image_size": image_size, "objective": {"name": "denoising", "stability_weight": weight}}
    recipe = with_overrides(denoiser_recipe(dataset, sigma, **fields), set_)
    meet()
    images = load_dataset(
        *(recipe.dataset, "train", data),
        image_size=recipe.image_size,
        classes=None if classes is None else read_class_names(classes),
        channels=channels,
        skip_unreadable=skip_unreadable,
    )
    print_data_notes(console, images)
    judge = load_classifier(classifier, images.num_classes) if classifier is not None else None
    train_with_bar(
        *(recipe, images, out),
        classifier=judge,
        init=init,
        resume=resume,
        device=device,
        compiling=compile_,
    )
    if leads():
        # A line after "next:" runs as it is; without a classifier there is none.
        subject: list[object] = ["RUN"] if classifier is None else [classifier]
        if classifier is not None and not Path(classifier).is_dir():
            subject = ["--model", classifier, "--dataset", recipe.dataset, *optional("--image-size", image_size)]
            subject += ["--out", f"{out}-certified"]
        words = ["--denoiser", out, *file_options(channels, classes, skip_unreadable), *optional("--data", data)]
        step = command_line("certify", *subject, *words)
        onwards = f"next: {step}" if classifier is not None else f"in front of a classifier RUN: {step}"
        console.print(f"trained {out}; {onwards}", soft_wrap=True)
