"""`smoothcert adapt`."""

from pathlib import Path
from typing import Annotated

import typer

from smoothcert.cli.options import (
    DatasetName,
    Device,
    ImageOptions,
    OwnNetwork,
    Weights,
    check_dataset,
    command_line,
    console,
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
    """Give a network the batch-norm statistics of noisy images: seconds, without labels; the weights stay."""
    if run is None and (model is None or dataset is None or sigma is None):
        raise RequestError("adapt: expected a run folder, or --model, --dataset and --sigma; give one or the other")
    if run is not None and init is not None:
        raise RequestError("--init: expected none with a run folder, which has weights; leave it out")
    if run is None and out.suffix != SUFFIX:
        raise RequestError(f"--out: expected a file of weights for --model, such as adapted{SUFFIX}, got {out}")
    if out.exists():
        raise RequestError(f"{out}: exists already; choose another --out")
    if sigma is not None and not 0 < sigma < float("inf"):
        raise RequestError(f"--sigma: expected a number above 0, got {sigma:g}; it is for pixels in [0, 1]")
    check_dataset(dataset)
    if run is not None:
        check_run_folder(run)
    from smoothcert.data import with_known_classes
    from smoothcert.distributed import find_device
    from smoothcert.models import own_module
    from smoothcert.report.progress import print_data_notes
    from smoothcert.training.batch_norm import adapt_batch_norm, adapt_run
    from smoothcert.training.checkpoint import load_run, write_tensors
    from smoothcert.training.initial_weights import load_initial_weights

    where, load = find_device(device), files.loader()
    code: list[object] = ["--model", model] if model is not None else []
    if run is not None:
        loaded = load_run(run, model)
        name = dataset or loaded.recipe.dataset
        size = files.image_size if dataset is not None else loaded.recipe.image_size
        images = with_known_classes(load(name, "train", size), loaded.spec.class_names)
        print_data_notes(console, images)
        loaded.model.to(where)
        about = adapt_run(loaded, images.to(where), out, sigma)
        onwards = command_line("certify", out, *code, *optional("--sigma", sigma), *files.words())
    else:
        assert dataset is not None, "checked above"
        assert sigma is not None, "checked above"
        images = load(dataset, "train", files.image_size)
        print_data_notes(console, images)
        network = own_module(str(model), images.num_classes, "--model")
        if init is not None:
            load_initial_weights(network, init, str(model))
        about = adapt_batch_norm(network.to(where), images.to(where), sigma)
        weights = {key: tensor.detach().cpu().contiguous() for key, tensor in network.state_dict().items()}
        write_tensors(out, weights, {"batch_norm": dict(about)})
        words = ["--init", out, "--dataset", dataset, *optional("--image-size", files.image_size), *files.words()]
        onwards = command_line("certify", *code, *words, "--sigma", sigma, "--out", out.with_suffix(""))
    console.print(f"adapted to {about['images']:,} images at sigma {about['sigma']:g}: {out}", soft_wrap=True)
    console.print(f"it is another network than before; next: {onwards}", soft_wrap=True)
