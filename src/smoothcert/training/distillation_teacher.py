"""The network that distillation learns from: a run, or several as an ensemble, that fit the recipe of the student."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from smoothcert.certification.ensemble import refuse_different_runs, spec_of
from smoothcert.data import Images, with_known_classes
from smoothcert.data.class_names import unknown_class
from smoothcert.data.datasets import knows_test_images, published_name
from smoothcert.errors import RequestError
from smoothcert.io.references import same_reference
from smoothcert.models import is_own_code
from smoothcert.models.ensemble import Ensemble
from smoothcert.objectives import Distillation
from smoothcert.training.checkpoint import Run, load_run, read_model_file
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.run_folder import MODEL, check_run_folder


def load_teacher(
    folders: Sequence[Path], recipe: TrainRecipe, images: Images, on_warning: Callable[[str], None]
) -> tuple[nn.Module, Images]:
    """Return the network of the runs in `folders`, and the `images` of the student with its classes.

    Runs that do not fit the recipe or the images are refused; `on_warning` is called with each doubt about the others.
    """
    if not isinstance(recipe.objective, Distillation):
        raise RequestError(
            f"--teacher: expected --method distillation with it, got {recipe.method}; leave --teacher out"
        )
    runs = [_load_run(folder, recipe.model) for folder in folders]
    refuse_different_runs("--teacher", runs)
    images = with_known_classes(images, spec_of(runs).class_names)
    for run in runs:
        run.refuse_other_images(images)
        dataset = run.recipe.dataset
        other = f"{run.folder} was trained on {dataset}, not on {recipe.dataset}: its answers may be poor there"
        for text in (
            run.noise_warning(recipe.sigma, recipe.noise),
            unknown_class(images, run.spec.class_names, run.folder),
            None if same_reference(*map(published_name, (dataset, recipe.dataset))) else other,
            knows_test_images(run.folder, dataset, recipe.dataset),
        ):
            if text is not None:
                on_warning(text)
    return runs[0].model if len(runs) == 1 else Ensemble([run.model for run in runs]), images


def _load_run(folder: Path, student: str) -> Run:
    """Load a run whose network is not the user's own code, or is that of the student, which the user has named."""
    check_run_folder(folder)
    network = read_model_file(folder / MODEL).recipe.model
    if is_own_code(network) and not same_reference(network, student):
        raise RequestError(
            f"--teacher {folder}: its network is the code {network}, and --model names that of the student; "
            f'train in Python: train(recipe, classifier=load("{folder}", code="{network}").model)'
        )
    return load_run(folder, network)
