"""The Python interface of training: `smoothcert.train` and `smoothcert.load`."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.utils.data import Dataset

from smoothcert.data import Images, load_dataset
from smoothcert.data.torch_dataset import images_from_dataset
from smoothcert.errors import RequestError
from smoothcert.models import is_code
from smoothcert.training.checkpoint import Run, load_run
from smoothcert.training.choices import Compiling
from smoothcert.training.loop import TrainingStatus
from smoothcert.training.loop import train as train_into
from smoothcert.training.recipe import TrainRecipe


def train(
    recipe: TrainRecipe,
    data: "Images | Dataset[Any] | str | None" = None,
    out: str | Path = "runs/run",
    *,
    model: nn.Module | None = None,
    resume: bool = False,
    device: str = "auto",
    compile: Compiling = "auto",
    capture: bool | None = None,
    data_folder: str | Path | None = None,
    on_epoch: Callable[[Run, dict[str, Any]], None] = lambda run, metrics: None,
    on_progress: Callable[[TrainingStatus], None] = lambda status: None,
    on_note: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2),
) -> Run:
    """Train `recipe` into the run folder `out` and return the run, its model on the CPU in eval mode.

    `data` is the name of a data set, our `Images`, or a map-style torch `Dataset` of (image, label) with images
    [c, h, w] in [0, 1]; by default the data set of the recipe. A torch `Dataset` is recorded in the recipe as
    `torch:ClassName`. `model` is trained instead of the network that the recipe names, and receives the result.
    `on_epoch` is called after each epoch with the run and its metrics; an exception in it stops training.
    """
    if isinstance(data, str):
        recipe = recipe.model_copy(update={"dataset": data})
    if data is None or isinstance(data, str):
        folder = None if data_folder is None else Path(data_folder)
        images = load_dataset(recipe.dataset, "train", folder, image_size=recipe.image_size)
    elif hasattr(data, "batches"):
        images = cast(Images, data)
    elif isinstance(data, Dataset):
        images = images_from_dataset(data, name=f"torch:{type(data).__name__}")
        recipe = recipe.model_copy(update={"dataset": images.name})
    else:
        raise RequestError(
            f"data: expected a torch Dataset, images, or the name of a data set, got {type(data).__name__}; a "
            "DataLoader has its data set in `.dataset`"
        )
    train_into(
        *(recipe, images, Path(out)),
        model=model,
        resume=resume,
        device=device,
        compiling=compile,
        capture=capture,
        on_epoch=on_epoch,
        on_progress=on_progress,
        on_note=on_note,
    )
    return load(out, code=recipe.model if is_code(recipe.model) and model is None else None, model=model)


def load(path: str | Path, *, code: str | None = None, model: nn.Module | None = None) -> Run:
    """Load the run in the folder `path`, its model on the CPU in eval mode.

    If the network of the run is your own code, name it with `code` ("package.module:function"), or give `model`, which
    receives the weights.
    """
    return load_run(Path(path), code, model=model)
