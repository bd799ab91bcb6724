"""`smoothcert doctor`: what keeps a classifier from good certificates, and what to do about it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoothcert.cli.options import (
    NOISE_LEVEL,
    Device,
    NetworkOptions,
    command_line,
    console,
    folder_name,
    optional,
    show_table,
)
from smoothcert.training.run_folder import split_key

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.analysis.doctor import Diagnosis
    from smoothcert.classifier import Classifier
    from smoothcert.training.checkpoint import Run

NOISES_PER_IMAGE, PASSES = 2, 3
"""Noisy copies of an image in a step of Consistency, and the cost of a step in forward passes."""


@dataclass(frozen=True)
class DoctorOptions(NetworkOptions):
    """What `doctor` is asked to examine, and the commands for the same network and images that follow from it."""

    run: Annotated[Path | None, typer.Argument(help="Run folder.", show_default=False)] = None
    sigma: Annotated[float | None, typer.Option(help=NOISE_LEVEL, show_default="the run's, or 0.25")] = None

    def training_words(self, run: "Run | None") -> list[object]:
        """Return the data set, by default that of the run, and how its images are read, as words of a command line."""
        dataset, image_size = self.chosen_data(run)
        channels = self.channels if run is None else self.channels or run.reading(dataset).get("channels")
        return replace(self, dataset=dataset, image_size=image_size, channels=channels).words()

    @property
    def _folder(self) -> Path:
        return self.run if self.run is not None else Path("runs") / folder_name(str(self.network))

    def fine_tuning(self, run: "Run | None") -> str:
        """Return the command that trains the network under noise, from its weights, with the default recipe."""
        network = self.network if run is None else run.recipe.model
        words = [*self.training_words(run), "--method", "consistency", *optional("--model", network)]
        words += [*optional("--init", self.init or self.run), "--sigma", self.sigma]
        out = self._folder.with_name(f"{self._folder.name}-consistency-{self.sigma:g}")
        return command_line("train", *words, "--out", out)

    def denoiser(self, run: "Run | None") -> str:
        """Return the command that trains a denoiser, with the network's term unless it is a run of the user's code."""
        from smoothcert.models import is_code

        named: object = self.network
        if run is not None:
            named = None if is_code(run.recipe.model) else self.run
        words = [*self.training_words(run), "--sigma", f"{self.sigma:g}", *optional("--classifier", named)]
        return command_line(
            "train-denoiser", *words, *optional("--classifier-init", self.init), "--out", "runs/denoiser"
        )

    def _words(self) -> list[object]:
        return [*([self.run] if self.run else []), *self.network_words(), *self.words(), "--sigma", f"{self.sigma:g}"]

    def adaptation(self, network: "Classifier") -> str | None:
        """Return the command that gives batch norm the statistics of noisy images; None for a network without it."""
        from smoothcert.models.precision import has_batch_norm

        if not has_batch_norm(network):
            return None
        if self.run is not None:
            out = self.run.with_name(f"{self.run.name}-adapted")
        else:  # not --init itself, which `adapt` would refuse to replace
            before = [] if self.init is None else [split_key(self.init)[0].stem]
            out = Path("-".join([*before, "adapted.safetensors"]))
        return command_line("adapt", *self._words(), "--out", out)

    def certification(self) -> str:
        """Return the command that certifies the network as it is."""
        return command_line("certify", *self._words(), *([] if self.run is not None else ["--out", self._folder]))


ENOUGH_IMAGES = 100
"""With fewer images the tests of the doctor often cannot tell a poor accuracy from chance."""


def doctor(
    *,
    request: DoctorOptions,
    images: Annotated[int, typer.Option(help="Number of images to examine.", min=1)] = 200,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figure and its numbers.", show_default="doctor, or RUN/doctor")
    ] = None,
    device: Device = "auto",
) -> None:
    """Measure the accuracy of a network under noise, and find what keeps it from good certificates."""
    run = request.run
    model = request.network
    request.check([] if run is None else [run], {})
    from smoothcert.analysis.doctor import doctor as examine
    from smoothcert.analysis.output import Output
    from smoothcert.certification.settings import CertifySettings
    from smoothcert.certification.subject import Subject
    from smoothcert.cli.classifiers import print_about_runs
    from smoothcert.io.text import csv_text
    from smoothcert.training.checkpoint import load_run

    loaded = load_run(run, model) if run is not None else None
    usual = 0.25 if loaded is None else loaded.recipe.sigma
    request = replace(request, sigma=usual if request.sigma is None else request.sigma)
    CertifySettings(sigma=request.sigma)  # refuses a wrong noise level before anything is loaded
    default_folder = Path("doctor") if run is None else run / "doctor"
    folder = default_folder if out is None else out
    output = Output(folder, "doctor", ["png"]).check()
    network, selected = request.network_and_images(loaded, "test", device)
    if loaded is not None:
        print_about_runs(Subject.of(loaded), console.note, console.warn)
    name = run.name if run is not None else str(model)
    diagnosis = examine(loaded or network, selected, sigma=request.sigma, images=images, name=name, device=device)
    show(diagnosis)
    codes = {finding.code for finding in diagnosis.findings}
    adaptation = request.adaptation(network)
    if "noise" in codes:
        ways = request.fine_tuning(loaded), request.denoiser(loaded), request.certification()
        show_ways_forward(diagnosis, *ways, adaptation)
    elif "batch-statistics" in codes and adaptation is not None:
        console.print(f"next: {adaptation}")
    written = output.write({"csv": csv_text([("sigma", "accuracy"), *diagnosis.accuracies])}, diagnosis.plot)
    few = f", but {diagnosis.images} images show large faults only" if diagnosis.images < ENOUGH_IMAGES else ""
    console.print(f"wrote {written[-1]}" + ("" if diagnosis.findings else f"; nothing was found{few}"))
    if diagnosis.healthy:
        console.print(f"next: {request.certification()}")
        if loaded is None and diagnosis.depends_on_noise:
            console.print(
                f"or fine-tune it under noise first, which usually certifies more: {request.fine_tuning(None)}"
            )


def show(diagnosis: "Diagnosis") -> None:
    """Print the table of accuracies and the findings."""
    console.print(f"{diagnosis.model} on {diagnosis.images} images of {diagnosis.dataset}")
    rows = [(f"{sigma:.3g}", f"{accuracy:.1%}") for sigma, accuracy in diagnosis.accuracies]
    show_table(["sigma", "accuracy"], rows)
    for number, finding in enumerate(diagnosis.findings, start=1):
        console.print(f"{number}. {finding.code}: {finding.problem}")
        console.print(f"what to do: {finding.advice}")


def show_ways_forward(
    diagnosis: "Diagnosis", fine_tuning: str, denoiser: str, certification: str, adaptation: str | None
) -> None:
    """Print how to make a network robust to noise, with what each way costs on this device."""
    from smoothcert.training.default_recipe import EPOCHS
    from smoothcert.training.denoiser import EPOCHS as DENOISER_EPOCHS

    forward = diagnosis.seconds_per_image
    epoch = f"{1000 * NOISES_PER_IMAGE * PASSES * forward:.2g} s per 1,000 images and epoch"
    vote = f"{1000 * forward:.2g} ms"
    lines = [
        "way 1: fine-tune the network under noise. It gives the largest radii, but changes the weights.",
        f"  It needs the training data, and about {epoch}, for {EPOCHS} epochs:",
        f"  {fine_tuning}",
        "way 2: train a denoiser in front of the network, which does not change. It needs images without labels, and",
        f"  {DENOISER_EPOCHS} epochs of a U-Net. Each vote then runs both networks; yours alone takes {vote} here:",
        f"  {denoiser}",
        f"then: {certification} --denoiser runs/denoiser",
    ]
    if adaptation is not None:
        lines.append(
            "way 3: give its batch norm the statistics of noisy images. It takes seconds and needs no labels; radii are"
            " smaller:"
        )
        lines.append(f"  {adaptation}")
    for line in lines:
        console.print(line)
