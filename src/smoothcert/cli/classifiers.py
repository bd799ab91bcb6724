"""The classifier that a command line names, and the images and classes that it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from smoothcert.certification.cascade import Cascade
from smoothcert.certification.ensemble import RunEnsemble, spec_of
from smoothcert.certification.subject import Subject
from smoothcert.classifier import check_logits, device_of, first_logits
from smoothcert.cli.options import ClassifierOptions
from smoothcert.data import DATASETS, known_class_names, read_class_names
from smoothcert.data.decoding import image_head
from smoothcert.errors import RequestError
from smoothcert.io.text import some_of
from smoothcert.training.checkpoint import InputSpec, Run, class_names_of, code_warning, load_runs
from smoothcert.training.choices import NoiseName
from smoothcert.training.denoiser import load_denoiser
from smoothcert.training.recipe import TrainRecipe, load_run_recipe
from smoothcert.training.resume import CHANGEABLE, different_fields
from smoothcert.training.run_folder import RECIPE


def find_subject(
    request: ClassifierOptions,
    folders: Sequence[Path],
    sigma: float | None,
    num_classes: int | None,
    on_note: Callable[[str], None],
) -> Subject:
    """Return the classifier of the run `folders`, or the network that is no run, behind --denoiser if it is given.

    `num_classes` is for a network that is no run, `sigma` for a denoiser that is a diffusion model.
    """
    front = None if request.denoiser is None else load_denoiser(request.denoiser, sigma)
    if not folders:
        return Subject.of(request.own_network(num_classes, on_note), request.network).behind(front)
    runs = load_runs(folders, request.network)
    runs[0].refuse_denoiser()
    if request.kind == "ensemble":
        return Subject.of(RunEnsemble(runs, request.consensus)).behind(front)
    return Subject.of(Cascade.of_runs(runs) if request.kind == "cascade" else runs[0]).behind(front)


def noise_for(subject: Subject, sigma: float | None, kind: NoiseName | None) -> tuple[float, NoiseName]:
    """Return the noise level and the kind of noise: those that are given, else those of the training of `subject`."""
    trained = subject.defaults
    if sigma is None and "sigma" not in trained and isinstance(subject.run, RunEnsemble):
        raise RequestError(subject.run.missing_sigma("--sigma"))
    return trained["sigma"] if sigma is None else sigma, kind or trained.get("noise", "gaussian")


def print_about_runs(subject: Subject, on_note: Callable[[str], None], on_warning: Callable[[str], None]) -> None:
    """Print what a user should know about the runs of `subject` and its denoiser before a command works with them.

    A run may be unfinished, or its recipe.yaml or the code of its network may have been edited.
    """
    front = None if subject.denoiser is None else subject.denoiser.run
    for run in (*subject.runs, *([] if front is None else [front])):
        if not run.finished:
            on_note(f"{run.folder} has trained {run.epoch} of {run.recipe.epochs} epochs")
        if (text := code_warning(run)) is not None:
            on_warning(text)
        if (text := recipe_warning(run)) is not None:
            on_warning(text)


def recipe_warning(run: Run) -> str | None:
    """A warning if recipe.yaml, which reports read, has been edited since the network of `run` was trained; else None.

    Fields that a user may edit to continue a training do not count. A damaged file is refused by reports.
    """
    path = run.folder / RECIPE
    if not isinstance(run.recipe, TrainRecipe) or not path.is_file():
        return None
    try:
        stored = load_run_recipe(path)
    except RequestError:
        return None
    differing = different_fields(stored, run.recipe, CHANGEABLE, ("the file", "the network"))
    return f"{path}: is not the recipe of the network ({'; '.join(differing)}); restore it" if differing else None


@dataclass(frozen=True)
class NamedClassifier:
    """A classifier, the images and classes that it is for, and the data set that these are from, if it is known."""

    subject: Subject
    spec: InputSpec
    dataset: str | None


def named_classifier(
    request: ClassifierOptions,
    folders: Sequence[Path],
    sigma: float | None,
    on_note: Callable[[str], None],
    first: Path | None = None,
) -> NamedClassifier:
    """Return the classifier of the run `folders`, or the network that is no run, behind --denoiser if it is given.

    The images of a network that is no run have the size of --dataset, of --image-size, or of the image file `first`.
    """
    names = class_names_of(request.init) if request.classes is None else read_class_names(request.classes)
    if request.skip_unreadable and not str(request.dataset).startswith("folder:"):
        raise RequestError("--skip-unreadable: expected --dataset folder:PATH, whose files it is about; leave it out")
    if folders and (request.dataset, request.image_size, request.channels) != (None, None, None):
        raise RequestError(
            "--dataset, --image-size and --channels: expected none with a run folder, which has them; leave them out"
        )
    dataset: str | None
    if folders:
        subject = find_subject(request, folders, sigma, None, on_note)
        source = str(folders[0])
        spec = spec_of(subject.runs)
        dataset = subject.runs[0].recipe.dataset
        if names and spec.class_names and names != spec.class_names and set(names) == set(spec.class_names):
            raise RequestError(
                f"--classes: expected the order of {source}, {some_of(spec.class_names)}, got {some_of(names)}; leave "
                "--classes out"
            )
    else:
        shape, num_classes, labels = own_inputs(request, first)
        subject = find_subject(request, folders, sigma, num_classes if names is None else len(names), on_note)
        dataset = request.dataset
        source = subject.name
        network = subject.classifier
        logits = first_logits(network, torch.full((1, *shape), 0.5, device=device_of(network)), subject.name)
        check_logits(logits, 1, None if names or subject.class_names else num_classes)
        spec = InputSpec(shape, logits.shape[1], None, tuple(subject.class_names or labels or ()) or None)
    names = names or spec.class_names or known_class_names(dataset)
    if names is not None and len(names) != spec.num_classes:
        raise RequestError(
            f"--classes: expected {spec.num_classes} names, one per output of {source}, got {len(names)}"
        )
    return NamedClassifier(subject, replace(spec, class_names=names), dataset)


def own_inputs(
    request: ClassifierOptions, first: Path | None
) -> tuple[tuple[int, int, int], int | None, Sequence[str] | None]:
    """Return the shape (c, h, w) of the images, the number of classes and their names; None if not known."""
    size = request.image_size
    dataset = request.dataset
    if dataset in DATASETS:
        if (size, request.channels) != (None, None):
            raise RequestError(f"--image-size and --channels: expected none with {dataset}, which has them; omit them")
        return DATASETS[dataset].shape, DATASETS[dataset].num_classes, None
    if dataset is not None:
        images = request.load(dataset, "test", size)
        return images.shape, images.num_classes, images.class_names
    head = None if first is None else image_head(first)
    if size is not None:
        width = height = size
    elif head is not None:
        width, height = head.size
    else:
        raise RequestError("--image-size: missing; give the side of the images, or --dataset NAME, which has it")
    channels = request.channels or (1 if head is not None and head.grey else 3)
    return (channels, height, width), None, None
