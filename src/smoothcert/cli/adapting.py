"""`smoothcert adapt`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from smoothcert.cli.certification import chosen_or_trained_images
from smoothcert.cli.options import (
    DatasetName,
    Device,
    ImageOptions,
    OwnNetwork,
    Weights,
    check_dataset,
    check_own_weights,
    command_line,
    console,
    no_network,
    optional,
)
from smoothcert.errors import RequestError
from smoothcert.training.run_folder import check_run_folder

SUFFIX = ".safetensors"


def adapt(
    run: Annotated[Path | None, typer.Argument(help="A run folder; or --model and --dataset.")] = None,
    *,
    out: Annotated[Path, typer.Option(help="Run folder to make; for --model a file of weights, NAME.safetensors.")],
    sigma: Annotated[float | None, typer.Option(help="Noise level.", show_default="the run's")] = None,
    model: OwnNetwork = None,
    init: Weights = None,
    dataset: DatasetName = None,
    files: ImageOptions,
    device: Device = "auto",
) -> None:
    """Adapt batch norm to noisy images: it takes seconds, needs no labels and changes no weight."""
    if run is None and (model is None or dataset is None or sigma is None):
        raise no_network({"--model FILE.py:function": model, "--dataset NAME": dataset, "--sigma S": sigma})
    check_own_weights(init, own_network=run is None)
    if run is None and out.suffix != SUFFIX:
        raise RequestError(f"--out: expected a file of weights for --model, such as adapted{SUFFIX}, got {out}")
    if run is None and out.exists():
        raise RequestError(f"{out}: exists already; choose another --out")
    check_dataset(dataset)
    if run is not None:
        check_run_folder(run)
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.distributed import find_device
    from smoothcert.models import as_module
    from smoothcert.report.progress import print_data_notes, print_note
    from smoothcert.training.batch_norm import CHANGE, adapt_batch_norm, adapt_run
    from smoothcert.training.checkpoint import load_run, refuse_other_files, write_tensors
    from smoothcert.training.initial_weights import own_model_with_weights

    CertifySettings(sigma=sigma)  # refuses a wrong noise level before anything is loaded
    where, loaded = find_device(device), None if run is None else load_run(run, model)
    if loaded is not None:
        refuse_other_files(out)
    images = chosen_or_trained_images(files, dataset, loaded, "train")
    print_data_notes(console, images)
    code: list[object] = ["--model", model] if model is not None else []
    if loaded is not None:
        loaded.model.to(where)
        about = adapt_run(loaded, images.to(where), out, sigma)
        onwards = command_line("certify", out, *code, *optional("--sigma", sigma), *files.words())
    else:
        assert sigma is not None, "checked above"
        built = own_model_with_weights(str(model), images.num_classes, init, partial(print_note, console))
        network = as_module(built, str(model), "--model")
        about = adapt_batch_norm(network.to(where), images.to(where), sigma)
        write_tensors(out, network.state_dict(), {CHANGE: dict(about)})
        words = ["--init", out, "--dataset", dataset, *optional("--image-size", files.image_size), *files.words()]
        onwards = command_line("certify", *code, *words, "--sigma", sigma, "--out", out.with_suffix(""))
    console.print(f"adapted to {about['images']:,} images at sigma {about['sigma']:g}: {out}", soft_wrap=True)
    console.print(f"it is another network than before; next: {onwards}", soft_wrap=True)
