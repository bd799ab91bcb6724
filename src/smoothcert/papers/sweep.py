"""A sweep: one run per combination of values of a recipe's fields, each in a folder that is named after them."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from smoothcert.certification.settings import CertifySettings
from smoothcert.distributed import Team
from smoothcert.errors import RequestError
from smoothcert.objectives import Distillation
from smoothcert.papers.reproduce.run_state import Resources, RunState, stored_recipes, with_state
from smoothcert.training.checkpoint import InputSpec, new_model
from smoothcert.training.recipe import TrainRecipe, with_overrides
from smoothcert.training.resume import different_fields
from smoothcert.training.run_folder import RECIPE
from smoothcert.training.setup import check_request
from smoothcert.training.user_objective import load_objective


def all_recipes(bases: Mapping[str, TrainRecipe], varied: Mapping[str, Sequence[str]]) -> dict[str, TrainRecipe]:
    """Return the recipe of each combination by the name of its folder; a wrong value of any is refused."""
    last = [key.rpartition(".")[2] for key in varied]
    labels = [word if last.count(word) == 1 else key for key, word in zip(varied, last, strict=True)]
    recipes: dict[str, TrainRecipe] = {}
    for prefix, base in bases.items():
        for values in itertools.product(*varied.values()):
            pairs = [f"{label}{value}" for label, value in zip(labels, values, strict=True)]
            name = re.sub(r"[^\w.+-]+", "_", "-".join(filter(None, [prefix, *pairs]))) or "run"
            combination = [f"{key}={value}" for key, value in zip(varied, values, strict=True)]
            recipe = load_objective(with_overrides(base, combination))
            same = next((other for other, known in recipes.items() if known == recipe or other == name), None)
            if same is not None:
                raise RequestError(f"--set: {name} and {same} are the same run; remove one of the values")
            recipes[name] = recipe
    return recipes


def plan_runs(
    recipes: Mapping[str, TrainRecipe], out: Path, settings: CertifySettings, resources: Resources
) -> list[RunState]:
    """Return the runs with their states; what cannot be trained or certified is refused before anything is.

    A run that `out` holds under another name, from a smaller sweep, is used.
    """
    stored = stored_recipes(out)
    built: set[tuple[str, str]] = set()
    runs: list[RunState] = []
    for name, recipe in recipes.items():
        if isinstance(recipe.objective, Distillation):
            raise RequestError(
                f"objective: expected a method without a teacher, got {recipe.method}; use `smoothcert train --teacher "
                "RUN`"
            )
        images = resources.load(recipe, "train")
        indices = settings.selection(len(resources.load(recipe, "test"))).indices
        folder = out / name
        if not (folder / RECIPE).exists():
            folder = next((other for other, known in stored.items() if not different_fields(known, recipe)), folder)
        check_request(recipe, images, folder, Team())
        if (recipe.model, recipe.dataset) not in built:
            new_model(recipe.model, InputSpec.of(images))  # refuses an unknown network, and one for other images
            built.add((recipe.model, recipe.dataset))
        runs.append(with_state(RunState(folder, recipe, settings, len(indices)), indices))
    return runs
