"""The Python interface of training: `smoothcert.train` and `smoothcert.load`."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from torch import nn
from torch.utils.data import Dataset

from smoothcert.data import Images, Split, load_dataset, refuse_data_code
from smoothcert.data.torch_dataset import DatasetImages, images_from_dataset
from smoothcert.distributed import find_device
from smoothcert.errors import RequestError
from smoothcert.io.files import with_home
from smoothcert.io.text import given_type
from smoothcert.models import MODELS, is_code
from smoothcert.training.augmentation import augmentation_note, lacks_augmentation
from smoothcert.training.checkpoint import Run, code_warning, in_order_of_run, load_run
from smoothcert.training.choices import Compiling, Tracker
from smoothcert.training.loop import train as train_into
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.status import TrainingStatus
from smoothcert.training.tracking import tracker


def train(
    recipe: TrainRecipe,
    data: "Images | Dataset[Any] | str | None" = None,
    out: str | Path = "runs/run",
    *,
    model: nn.Module | None = None,
    init: str | Path | None = None,
    classifier: nn.Module | None = None,
    test_data: "Images | Dataset[Any] | str | None" = None,
    evaluate_every: int = 0,
    track: Tracker | None = None,
    resume: bool = False,
    device: str = "auto",
    compile: Compiling = "auto",
    capture: bool | None = None,
    sync_batch_norm: bool = False,
    data_folder: str | Path | None = None,
    on_epoch: Callable[[Run, dict[str, Any]], None] | None = None,
    on_progress: Callable[[TrainingStatus], None] = lambda status: None,
    on_note: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2),
) -> Run:
    """Train `recipe` into the run folder `out` and return the run, its model on the CPU in eval mode.

    `data` is the name of a data set, what `load_dataset` returns, or a map-style torch `Dataset` of (image, label) with
    images [c, h, w] in [0, 1]; by default the data set of the recipe, unless that is code. A torch `Dataset` is
    recorded in the recipe as `torch:ClassName`. `model` is trained instead of the network that the recipe names, and
    then has the trained weights. `init` names weights to start from: a run folder, a `.safetensors` file or a PyTorch
    checkpoint. `classifier` is a trained network that does not change: the teacher of the method distillation, or the
    network behind a denoiser (see `denoiser_recipe`). With `evaluate_every=N`, the accuracy under noise is measured
    every N epochs on `test_data`, by default the test split of the recipe's data set; `test_data` alone means every
    epoch. With `sync_batch_norm`, batch norm uses the images of all processes (on GPUs only). `track` writes the
    metrics for TensorBoard or Weights & Biases too. `on_epoch` is called after each epoch with the run and its metrics;
    an exception in it stops training.
    """
    _check_arguments(recipe, model, evaluate_every, compile)
    if on_epoch is not None:
        _check_takes_run_and_metrics(on_epoch)
    if model is not None and recipe.model in MODELS:
        recipe = recipe.model_copy(update={"model": type(model).__name__})  # what files and reports call it
    planned = recipe.dataset
    if isinstance(data, str):
        recipe = recipe.model_copy(update={"dataset": data})
    for option, given, used in (("data", data, True), ("test_data", test_data, evaluate_every)):
        if used and given is None and not isinstance(data, str):  # only the recipe names it
            refuse_data_code("recipe", recipe.dataset, f"{option}={recipe.dataset!r}")
    find_device(device)  # a missing GPU is reported before data are downloaded
    out = with_home(out)
    folder = None if data_folder is None else with_home(data_folder)
    images = _images(recipe.dataset if data is None else data, "train", folder, recipe.image_size, on_note)
    start = None if init is None else with_home(init)
    images = in_order_of_run(images, out if resume else None, start)
    if lacks_augmentation(images) and (note := augmentation_note(planned, recipe, images.name)) is not None:
        on_note(note)
    tested = None
    if evaluate_every or test_data is not None:
        tested = _images(recipe.dataset if test_data is None else test_data, "test", folder, recipe.image_size, on_note)
    if isinstance(images, DatasetImages):
        recipe = recipe.model_copy(update={"dataset": images.name})
    callbacks = [callback for callback in (on_epoch, track and tracker(track)) if callback]

    def call_all(run: Run, metrics: dict[str, Any]) -> None:
        for callback in callbacks:
            callback(run, metrics)

    train_into(
        recipe,
        images,
        out,
        model=model,
        init=start,
        classifier=classifier,
        test_data=tested,
        evaluate_every=evaluate_every or 1,
        resume=resume,
        device=device,
        compiling=compile,
        capture=capture,
        sync_batch_norm=sync_batch_norm,
        on_epoch=call_all,
        on_progress=on_progress,
        on_note=on_note,
    )
    return load(out, code=recipe.model if is_code(recipe.model) and model is None else None, model=model)


def _check_arguments(recipe: object, model: object, evaluate_every: int, compile: str) -> None:
    """Refuse arguments of other types than those of `train`."""
    if not isinstance(recipe, TrainRecipe):
        raise RequestError(
            f"recipe: expected a TrainRecipe, got {type(recipe).__name__}; use preset(NAME) or TrainRecipe(...)"
        )
    if not isinstance(model, nn.Module | None):
        raise RequestError(
            f"model: expected a torch module to train, got {given_type(model)}; give an nn.Module with its weights"
        )
    if not hasattr(evaluate_every, "__index__") or evaluate_every < 0:
        raise RequestError(f"evaluate_every: expected 0 (never) or a number of epochs, got {evaluate_every!r}")
    if compile not in (known := get_args(Compiling)):
        raise RequestError(f"compile: expected one of {', '.join(known)}, got {compile}; choose one of these")


def _check_takes_run_and_metrics(on_epoch: Callable[..., Any]) -> None:
    """Refuse before training what could not be called after the first epoch."""
    if not callable(on_epoch):
        raise RequestError(f"on_epoch: expected a function of (run, metrics), got {given_type(on_epoch)}")
    try:
        parameters = inspect.signature(on_epoch)
    except ValueError:  # some built-in functions do not say
        return
    try:
        parameters.bind(None, {})
    except TypeError:
        raise RequestError(
            f"on_epoch: expected a function of (run, metrics), got one of {parameters}; change its parameters"
        ) from None


def _images(
    data: "Images | Dataset[Any] | str",
    split: Split,
    folder: Path | None,
    image_size: int | None,
    on_note: Callable[[str], None],
) -> Images:
    if isinstance(data, str):
        return load_dataset(data, split, folder, image_size=image_size, allow_code=True, on_note=on_note)
    if isinstance(data, Images):
        return data
    if isinstance(data, Dataset):
        return images_from_dataset(data, name=f"torch:{type(data).__name__}", split=split)
    raise RequestError(
        f"data: expected a torch Dataset, images, or the name of a data set, got {type(data).__name__}; a DataLoader "
        "has its data set in `.dataset`"
    )


def load(path: str | Path, *, code: str | None = None, model: nn.Module | None = None) -> Run:
    """Load the run in the folder `path`, its model on the CPU in eval mode.

    If the network of the run is your own code, name it with `code` ("package.module:function"), or give `model`, which
    receives the weights. A warning says if the file of `code` has changed since the training.
    """
    run = load_run(with_home(path), code, model=model)
    if (text := code_warning(run)) is not None:
        warnings.warn(text, stacklevel=2)
    return run
