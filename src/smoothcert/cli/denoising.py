"""`smoothcert train-denoiser`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from smoothcert.cli.options import (
    DATASET,
    CompileTraining,
    Device,
    Epochs,
    ImageOptions,
    Overrides,
    Resume,
    command_line,
    console,
    optional,
)
from smoothcert.cli.recipes import refuse_twice
from smoothcert.data.datasets import is_data_code, refuse_absent_data
from smoothcert.errors import RequestError
from smoothcert.io.console import leads
from smoothcert.training.run_folder import refuse_existing_run


def train_denoiser(
    *,
    out: Annotated[Path, typer.Option(help="Run folder to make.")],
    dataset: Annotated[str, typer.Option(help=DATASET)],
    sigma: Annotated[float, typer.Option(help="Noise level of the later certification.")],
    model: Annotated[
        Literal["unet", "unet-small", "unet-large"] | None,
        typer.Option(help="Size of the denoiser.", show_default="unet"),
    ] = None,
    classifier: Annotated[
        str | None,
        typer.Option(
            help="Classifier that adds a term to the loss: a run folder, hf:NAME, timm:NAME or your own code."
        ),
    ] = None,
    classifier_init: Annotated[
        Path | None, typer.Option(help="Weights of your own --classifier: .safetensors or a PyTorch checkpoint.")
    ] = None,
    stability_weight: Annotated[
        float | None,
        typer.Option(help="Weight of the term that --classifier adds.", show_default="1 with --classifier"),
    ] = None,
    init: Annotated[Path | None, typer.Option(help="Denoiser to start from: a run folder.")] = None,
    epochs: Epochs = None,
    files: ImageOptions,
    set_: Overrides = [],  # noqa: B006
    resume: Resume = False,
    compile_: CompileTraining = "auto",
    device: Device = "auto",
) -> None:
    """Train a denoiser, which makes a classifier that was trained without noise certifiable."""
    if stability_weight is not None and classifier is None:
        raise RequestError(f"--stability-weight: expected --classifier with it, got {stability_weight:g} alone")
    if classifier_init is not None and classifier is None:
        raise RequestError(f"--classifier-init: expected --classifier with it, got {classifier_init} alone")
    named: dict[str, Any] = {"dataset": dataset, "sigma": sigma, "image_size": files.image_size}
    named |= {"model": model, "epochs": epochs}
    refuse_twice({**named, "stability_weight": stability_weight}, set_)
    refuse_absent_data(dataset)
    if not resume:
        refuse_existing_run(out)  # before data are downloaded or read
    from smoothcert.distributed import find_device, meet
    from smoothcert.report.progress import print_data_notes, train_with_bar
    from smoothcert.training.default_recipe import default_batch_size
    from smoothcert.training.denoiser import denoiser_recipe, load_classifier
    from smoothcert.training.recipe import with_overrides

    default_weight = 0.0 if classifier is None else 1.0
    weight = default_weight if stability_weight is None else stability_weight
    loss = {"name": "denoising", "stability_weight": weight}
    given = {name: value for name, value in named.items() if value is not None}
    recipe = with_overrides(denoiser_recipe(**given, objective=loss), set_)
    find_device(device)  # a missing GPU is reported before data are downloaded
    meet()
    images = files.load(recipe.dataset, "train", recipe.image_size)
    print_data_notes(console, images)
    if len(images) < recipe.batch_size and not any(text.startswith("batch_size=") for text in set_):
        recipe = recipe.model_copy(update={"batch_size": default_batch_size(len(images), recipe.dataset)})
        console.note(f"batch_size {recipe.batch_size}, for {len(images)} training images; --set changes it")
    network = None
    if classifier is not None:
        network = load_classifier(classifier, images.num_classes, classifier_init, console.note)
    train_with_bar(
        recipe,
        images,
        out,
        classifier=network,
        init=init,
        resume=resume,
        device=device,
        compiling=compile_,
    )
    if leads():
        console.print(f"trained {out}; {next_step(out, recipe.dataset, classifier, classifier_init, files)}")


def next_step(out: Path, dataset: str, classifier: str | None, init: Path | None, files: ImageOptions) -> str:
    """Return how to certify `classifier`, with the weights `init`, behind the denoiser in `out`."""
    if classifier is None:  # a line after "next:" runs as it is; this one does not
        return f"in front of a classifier RUN: {command_line('certify', 'RUN', '--denoiser', out, *files.words())}"
    subject: list[object] = [classifier, *(["--dataset", dataset] if is_data_code(dataset) else [])]
    if not Path(classifier).is_dir():
        subject = ["--model", classifier, *optional("--init", init), "--dataset", dataset]
        subject += [*optional("--image-size", files.image_size), "--out", f"{out}-certified"]
    return f"next: {command_line('certify', *subject, '--denoiser', out, *files.words())}"
