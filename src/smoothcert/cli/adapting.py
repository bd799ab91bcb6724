"""`smoothcert adapt`."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoothcert.cli.options import Device, NetworkOptions, Sigma, command_line, console, optional
from smoothcert.errors import RequestError

if TYPE_CHECKING:  # commands import torch only when they need it
    from collections.abc import Mapping

    from torch import nn

    from smoothcert.data import Images

SUFFIX = ".safetensors"
ACCURACY_IMAGES = 200


def adapt(
    run: Annotated[Path | None, typer.Argument(help="A run folder; or --model and --dataset.")] = None,
    *,
    out: Annotated[Path, typer.Option(help="Run folder to make; for --model a file of weights, NAME.safetensors.")],
    sigma: Sigma = None,
    request: NetworkOptions,
    device: Device = "auto",
) -> None:
    """Adapt batch norm to noisy images: it takes seconds, needs no labels and changes no weight."""
    request.check([] if run is None else [run], {"--sigma S": sigma})
    if run is None and out.suffix != SUFFIX:
        raise RequestError(f"--out: expected a file of weights for --model, such as adapted{SUFFIX}, got {out}")
    if run is None and out.exists():
        raise RequestError(f"{out}: exists already; choose another --out")
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.distributed import find_device
    from smoothcert.models import as_module
    from smoothcert.training.batch_norm import CHANGE, adapt_batch_norm, adapt_run
    from smoothcert.training.checkpoint import load_run, refuse_existing_folder, write_tensors

    CertifySettings(sigma=sigma)  # refuses a wrong noise level before anything is loaded
    model = request.network
    loaded = None if run is None else load_run(run, model)
    if loaded is not None:
        refuse_existing_folder(out)
    built, images = request.network_and_images(loaded, "train", device)
    images = images.to(find_device(device))
    network = as_module(built, str(model), "--model")
    before = copy.deepcopy(network)
    if loaded is not None:
        about = adapt_run(loaded, images, out, sigma)
        words = [*request.network_words(), *optional("--sigma", sigma), *request.words()]
        onwards = command_line("certify", out, *words)
    else:
        assert sigma is not None, "checked above"
        about = adapt_batch_norm(network, images, sigma)
        write_tensors(out, network.state_dict(), {CHANGE: dict(about)})
        words = ["--model", model, "--init", out, *request.words(), "--sigma", sigma]
        onwards = command_line("certify", *words, "--out", out.with_suffix(""))
    console.print(f"adapted to {about['images']:,} images at sigma {about['sigma']:g}: {out}")
    if (change := change_of_accuracy(before, network, images, about)) is not None:
        console.print(change)
    console.print(f"earlier certificates do not hold for the adapted network; next: {onwards}")


def change_of_accuracy(
    before: "nn.Module", after: "nn.Module", images: "Images", about: "Mapping[str, Any]"
) -> str | None:
    """Return the accuracies of a network before and after it was adapted, as `about` says, on some of the images.

    It is None if the outputs of the network are not the classes of the images.
    """
    from smoothcert.classifier import first_logits
    from smoothcert.data.images import spread
    from smoothcert.noise import NOISES
    from smoothcert.smoothing.accuracy import accuracy_under_noise
    from smoothcert.smoothing.votes import VoteCounter, default_batch_size

    inputs, labels = images.batch(spread(len(images), ACCURACY_IMAGES).to(images.labels.device))
    if first_logits(after, inputs[:2], "the network").shape[1] != images.num_classes:
        return None
    noise, size = NOISES[about["noise"]](about["sigma"]), default_batch_size(inputs.device, images.shape)
    old, new = (
        accuracy_under_noise(VoteCounter(network, noise, images.num_classes, size), inputs, labels)
        for network in (before, after)
    )
    return (
        f"accuracy on {new.images} training images: {old.clean:.0%} before, {new.clean:.0%} now; under noise "
        f"{old.noisy:.0%} before, {new.noisy:.0%} now"
    )
