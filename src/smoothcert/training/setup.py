"""Sets up a training run: checks the request, builds the network, and opens the run folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smoothcert.data import Images, with_known_classes
from smoothcert.data.datasets import knows_test_images
from smoothcert.data.images import check_normalization
from smoothcert.distributed import Team, find_device
from smoothcert.errors import RequestError
from smoothcert.io.results import only_writer
from smoothcert.models import check_outputs, is_hub, load_hub, output_names
from smoothcert.noise import sigma_warning
from smoothcert.objectives import Denoising, Distillation, UnloadedObjective, is_built_in
from smoothcert.training.augmentation import with_augmentation
from smoothcert.training.checkpoint import InputSpec, new_model, read_model_file, refuse_extra_state
from smoothcert.training.denoiser import check_denoiser_request
from smoothcert.training.first_loss import try_loss
from smoothcert.training.frozen_classifier import Teacher, about_classifier, check_classifier
from smoothcert.training.initial_weights import load_initial_weights, start_notes
from smoothcert.training.metrics import METRICS
from smoothcert.training.own_code import CODE, code_of
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.resume import Start, open_folder, save_state, write_missing_model
from smoothcert.training.run_folder import MODEL
from smoothcert.training.run_in_progress import Options, RunInProgress
from smoothcert.training.seeds import Purpose, derived_seed


@contextmanager
def set_up(recipe: TrainRecipe, data: Images, folder: Path, group: Team, options: Options) -> Iterator[RunInProgress]:
    """Build the network, open the folder, which is locked while the context lasts, and restore what it holds."""
    device = find_device(options.device)
    model = options.model
    on_note = options.on_note if group.leads else lambda text: None
    if options.sync_batch_norm and device.type != "cuda":
        raise RequestError(
            f"sync_batch_norm: expected GPUs, got {device.type}, where torch does not have it; leave it out"
        )
    if model is None and is_hub(recipe.model):
        with torch.random.fork_rng(devices=[]):
            model = load_hub(recipe.model)
    for network in (model, options.classifier):  # the order of its outputs need not be that of the folders
        data = with_known_classes(data, output_names(network))
    data = with_augmentation(data, recipe.augment)
    tested = None if options.test_data is None else with_known_classes(options.test_data, data.class_names)
    check_request(recipe, data, folder, group, tested)
    if model is not None:
        check_outputs(model, recipe.model, data.shape, data.num_classes)
    if options.classifier is not None:
        check_classifier(recipe, data, options.classifier)
    check_denoiser_request(recipe, tested is not None)
    model = network_to_train(recipe, data, model, device)
    origin = load_origin(recipe, data, model, options, on_note)
    if (text := sigma_warning(recipe.sigma)) is not None:
        on_note(text)
    # Distillation without a teacher is refused later, unless the run is finished.
    without_teacher = isinstance(recipe.objective, Distillation) and options.classifier is None
    if not is_built_in(recipe.objective) and not without_teacher:
        teacher = None if options.classifier is None else Teacher(options.classifier, recipe, device, data.shape)
        try_loss(recipe, data, model.to(device), recipe.images_per_step // group.size, teacher, on_note)
    with only_writer(folder / METRICS, "choose another --out") if group.leads else nullcontext():
        start = open_folder(recipe, data, folder, group, origin, options.resume, on_note)
        run = RunInProgress(recipe, data, tested, folder, group, device, model, start, options)
        if group.leads:
            prepare_folder(run, start)
        try:
            group.wait()  # a finished run ends here: every process then finds its model
            yield run
        finally:
            run.leave_group()


def prepare_folder(run: RunInProgress, start: Start) -> None:
    """Write the files that a run needs before its first step, and report what has no effect or looks wrong."""
    for text in run.without_effect():
        run.options.on_note(text)
    fresh = start.state is None and start.epoch == 0
    from_file = "init" in start.origin
    if fresh and from_file:
        # A killed process must not leave a run that continues from random weights.
        save_state(run.folder, run.state())
    if fresh and (run.own_network or from_file) and not isinstance(run.recipe.objective, Denoising):
        for text in start_notes(run.model, run.data, trained=from_file or is_hub(run.recipe.model)):
            run.options.on_note(text)
    write_missing_model(run.as_run(), run.weights(), start)


def network_to_train(recipe: TrainRecipe, data: Images, given: nn.Module | None, device: torch.device) -> nn.Module:
    """Return the network that was given, or the one that the recipe names, initialized from the recipe's seed."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derived_seed(recipe.seed, Purpose.INITIAL_WEIGHTS))
        model = new_model(recipe.model, InputSpec.of(data)) if given is None else given
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RequestError(
            f"model: {recipe.model} has no parameters to train, or all are frozen; give a network that has some"
        )
    refuse_extra_state(model.state_dict())
    return model


def load_origin(
    recipe: TrainRecipe, data: Images, model: nn.Module, options: Options, on_note: Callable[[str], None]
) -> dict[str, Any]:
    """Load the initial weights, if any; return what provenance records of them and of other options (see ORIGIN)."""
    origin: dict[str, Any] = {"sync_batch_norm": True} if options.sync_batch_norm else {}
    if code := code_of(recipe, network=options.model is None, dataset=data.name == recipe.dataset):
        origin[CODE] = code
    if options.init is not None:
        origin["init"] = load_initial_weights(model, options.init, recipe.model, on_note)
        if (run := options.init / MODEL).is_file():
            text = knows_test_images(options.init, read_model_file(run).recipe.dataset, recipe.dataset)
            if text is not None:
                on_note(text)
    if options.classifier is not None:
        origin["classifier"] = about_classifier(options.classifier)
        if options.classifier_folders:
            origin["classifier"]["folders"] = list(options.classifier_folders)
    return origin


def check_request(recipe: TrainRecipe, data: Images, folder: Path, group: Team, tested: Images | None = None) -> None:
    """Refuse what cannot be trained before anything is written."""
    if isinstance(recipe.objective, UnloadedObjective):
        recipe.objective.refuse()
    if data.num_classes < 2 and not isinstance(recipe.objective, Denoising):
        raise RequestError(
            f"{data.name}: expected images of at least two classes, got one, which every network gets right; "
            "give data with a label or a folder for each class"
        )
    check_normalization(data.name, data.normalization, data.shape[0])
    if tested is not None and (tested.shape != data.shape or tested.num_classes > data.num_classes):
        raise RequestError(
            f"test data: expected images {data.shape} of at most {data.num_classes} classes, as those of training, got "
            f"{tested.shape} of {tested.num_classes}; give others (for folder:PATH, --image-size scales all images)"
        )
    if len(data) < recipe.batch_size:
        raise RequestError(
            f"batch_size: expected at most the {len(data)} training images, got {recipe.batch_size}; "
            "choose a smaller one with --set batch_size=N"
        )
    if recipe.images_per_step % group.size:
        raise RequestError(
            f"batch_size: a step of {recipe.images_per_step} images does not divide among {group.size} processes; "
            "choose another batch_size"
        )
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if existing.exists() and not existing.is_dir():
        raise RequestError(f"{folder}: expected a folder or none, got the file {existing}; choose another --out")
