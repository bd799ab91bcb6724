"""`smoothcert doctor`: what keeps a classifier from good certificates, and what to do about it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from smoothcert.cli.advice import training_command
from smoothcert.cli.certification import run_channels
from smoothcert.cli.options import (
    Channels,
    Classes,
    Data,
    Device,
    Hub,
    ImageSize,
    OwnNetwork,
    SkipUnreadable,
    check_dataset,
    chosen_model,
    command_line,
    console,
)
from smoothcert.errors import RequestError
from smoothcert.training.run_folder import check_run_folder

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.analysis.doctor import Diagnosis

FINE_TUNING = ("epochs=10", "learning_rate=0.01", "learning_rate_drops=[]", "schedule=cosine")
NOISES_PER_IMAGE, PASSES = 2, 3
"""Noisy copies of an image in a step of Consistency, and the cost of a step in forward passes."""


def doctor(
    run: Annotated[Path | None, typer.Argument(help="Run folder.", show_default=False)] = None,
    model: OwnNetwork = None,
    hub: Hub = None,
    init: Annotated[Path | None, typer.Option(help="Weights of --model: .safetensors or a PyTorch checkpoint.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Data set; see `smoothcert datasets`.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise level.", show_default="the run's, or 0.25")] = None,
    images: Annotated[int, typer.Option(help="Number of images to examine.", min=1)] = 200,
    image_size: ImageSize = None,
    channels: Channels = None,
    classes: Classes = None,
    skip_unreadable: SkipUnreadable = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figure and its numbers.", show_default="doctor, or RUN/doctor")
    ] = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Examine a network: accuracy under noise, and what keeps it from good certificates."""
    model = chosen_model(model, hub)
    if run is not None:
        check_run_folder(run)
    elif model is None or dataset is None:
        raise RequestError(
            "give a run folder, or --model package.module:function (or --hub hf:NAME) and --dataset NAME"
        )
    if init is not None and (run is not None or hub is not None):
        raise RequestError("--init: expected none with a run folder or --hub, which have weights; leave it out")
    if dataset is not None:
        check_dataset(dataset)
    from torch import nn

    from smoothcert.analysis.doctor import doctor as examine
    from smoothcert.analysis.output import Output
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.data import load_dataset, read_class_names, with_known_classes
    from smoothcert.distributed import find_device
    from smoothcert.io.text import csv_text
    from smoothcert.models import HubClassifier, own_model
    from smoothcert.report.progress import print_data_notes, print_note
    from smoothcert.training.checkpoint import load_run
    from smoothcert.training.initial_weights import load_initial_weights

    loaded = load_run(run, model) if run is not None else None
    if loaded is not None:
        dataset = dataset or loaded.recipe.dataset
        image_size = loaded.recipe.image_size if image_size is None else image_size
        sigma = loaded.recipe.sigma if sigma is None else sigma
    sigma = 0.25 if sigma is None else sigma
    settings = CertifySettings(sigma=sigma)  # refuses a wrong noise level before anything is loaded
    folder = out if out is not None else run / "doctor" if run is not None else Path("doctor")
    files = Output(folder, "doctor", ["png"]).check()
    selected = load_dataset(
        *(str(dataset), "test", data),
        image_size=image_size,
        classes=read_class_names(classes) if classes is not None else None,
        channels=channels or run_channels(loaded, str(dataset)),
        skip_unreadable=skip_unreadable,
    )
    print_data_notes(console, selected)
    network = loaded.model if loaded is not None else own_model(str(model), selected.num_classes)
    if isinstance(network, HubClassifier) and classes is None:
        selected = with_known_classes(selected, network.class_names)
    if init is not None:
        if not isinstance(network, nn.Module):
            raise RequestError(f"--init: expected {model} to return a torch module, got {type(network).__name__}")
        load_initial_weights(network, init, str(model))
    if isinstance(network, nn.Module):
        network = network.to(find_device(device))
    name = run.name if run is not None else str(model)
    diagnosis = examine(network, selected, sigma=sigma, images=images, name=name, device=device)
    show(diagnosis)
    measured = [(0.0, diagnosis.clean_accuracy), *diagnosis.accuracy_under_noise]
    written = files.write({"csv": csv_text([("sigma", "accuracy"), *measured])}, diagnosis.plot)
    again: list[object] = [] if channels is None else ["--channels", channels]
    again += ["--classes", classes] if classes is not None else []
    again += ["--skip-unreadable"] if skip_unreadable else []
    more: list[object] = [*again, *(["--init", init or run] if init is not None or run is not None else [])]
    small = ["batch_size=" + str(max(2, len(selected) // 2 * 2))] if len(selected) < 256 else []
    for field in (*FINE_TUNING, *small):
        more += ["--set", field]
    target = run if run is not None else Path("runs") / folder_name(str(model))
    about = (loaded, target, model, str(dataset), image_size, settings, data)
    if any(finding.code == "noise" for finding in diagnosis.findings):
        denoiser: list[object] = ["--dataset", dataset, "--sigma", f"{sigma:g}", "--out", "runs/denoiser"]
        denoiser += ["--image-size", image_size] if image_size is not None else []
        denoiser += ["--data", data] if data is not None else []
        tuning = training_command(*about, method="consistency", more=more)
        show_ways_forward(diagnosis, tuning, command_line("train-denoiser", *denoiser))
    console.print(f"wrote {written[-1]}" + ("" if diagnosis.findings else "; nothing was found"), soft_wrap=True)
    if diagnosis.healthy:
        subject: list[object] = [run] if run is not None else []
        subject += ["--hub", hub] if hub is not None else ["--model", model] if model is not None else []
        subject += ["--dataset", dataset] if run is None else []
        subject += ["--image-size", image_size] if image_size is not None and run is None else []
        subject += ["--sigma", f"{sigma:g}", *again, *([] if run is not None else ["--out", target])]
        subject += ["--data", data] if data is not None else []
        if init is not None:
            print_note(console, f"certify has no --init: load {init} in {model}")
        console.print(f"next: {command_line('certify', *subject)}", soft_wrap=True)


def folder_name(model: str) -> str:
    """Return a name for folders of a network: of the file or module of its code, or of the published classifier."""
    code, _, function = model.rpartition(":")
    source = function if code in ("hf", "timm") else code.removesuffix(".py").replace(".", "/")
    return Path(source).name or "mine"


def show(diagnosis: "Diagnosis") -> None:
    """Print the table of accuracies and the findings."""
    console.print(
        f"{diagnosis.model} on {diagnosis.images} images of {diagnosis.dataset}", highlight=False, soft_wrap=True
    )
    table = Table("sigma", "accuracy")
    for sigma, accuracy in ((0.0, diagnosis.clean_accuracy), *diagnosis.accuracy_under_noise):
        table.add_row(f"{sigma:.3g}", f"{accuracy:.1%}")
    console.print(table)
    for number, finding in enumerate(diagnosis.findings, start=1):
        console.print(f"{number}. {finding.code}: {finding.problem}", soft_wrap=True, markup=False, highlight=False)
        console.print(f"   {finding.advice}", soft_wrap=True, markup=False, highlight=False)


def show_ways_forward(diagnosis: "Diagnosis", fine_tuning: str, denoiser: str) -> None:
    """Print how to make a network robust to noise, with what each way costs on this device."""
    forward = diagnosis.seconds_per_image
    epoch = 1000 * NOISES_PER_IMAGE * PASSES * forward
    lines = (
        "way 1, fine-tune the network under noise; best radii, needs its training data and changes its weights;",
        f"  about {epoch:.2g} s per 1,000 training images and epoch, 10 epochs; votes then cost what they cost now:",
        f"  {fine_tuning}",
        "way 2, train a denoiser in front of the network, which does not change; needs images without labels;",
        f"  each vote runs both networks, and the network alone takes {1000 * forward:.2g} ms per image here:",
        f"  {denoiser}",
    )
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
