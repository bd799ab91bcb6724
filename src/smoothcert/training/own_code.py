"""Users' code that a run was trained with: its files are known by their content, so that they may move, and a run that
continues with other content says so."""

from collections.abc import Mapping
from typing import Any

from smoothcert.data import is_data_code
from smoothcert.models import code_digest, import_code, is_own_code
from smoothcert.objectives import UnloadedObjective, is_built_in, name_in_recipes
from smoothcert.training.recipe import TrainRecipe

CODE = "code"
"""The key of provenance whose value is that of `code_of`."""
EARLIER_CODE = "earlier_code"
"""The same of a run that continued after the code had changed: what the epochs before were trained with."""
OBJECTIVE, NETWORK, DATASET = "objective.name", "model", "dataset"
"""The fields of a recipe that name code."""


def code_of(recipe: TrainRecipe, *, network: bool = True, dataset: bool = True) -> dict[str, str]:
    """The SHA-256 of the files with the user's own objective, `network` and `dataset`, by field of the recipe.

    Modules that these files import do not count. The code is imported: call this only if the user has named it.
    """
    found: dict[str, Any] = {}
    if not is_built_in(recipe.objective) and not isinstance(recipe.objective, UnloadedObjective):
        found[OBJECTIVE] = type(recipe.objective)
    if network and is_own_code(recipe.model):
        found[NETWORK] = import_code(recipe.model, "model", "function")
    if dataset and is_data_code(recipe.dataset):
        found[DATASET] = import_code(recipe.dataset, "dataset", "Class")
    return {field: digest for field, code in found.items() if (digest := code_digest(code)) is not None}


def recorded_code(provenance: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `code_of` returned when a run was trained; {} if nothing is recorded."""
    recorded = provenance.get(CODE)
    return recorded if isinstance(recorded, Mapping) else {}


def names_of_code(recipe: TrainRecipe) -> dict[str, str]:
    return {OBJECTIVE: name_in_recipes(recipe.objective), NETWORK: recipe.model, DATASET: recipe.dataset}


def moved_code(
    provenance: Mapping[str, Any], stored: TrainRecipe, wanted: TrainRecipe, code: Mapping[str, str]
) -> set[str]:
    """The fields in which `wanted` may name another file than `stored`: the content, and the name in it, are the same.

    `provenance` is that of the run, and `code` what `code_of` returned for `wanted`.
    """
    recorded, known, given = recorded_code(provenance), names_of_code(stored), names_of_code(wanted)
    return {field for field in code if code[field] == recorded.get(field) and same_name(known[field], given[field])}


def same_name(first: str, second: str) -> bool:
    """Whether two references, perhaps to different files, name a class or a function of the same name."""
    return first.rpartition(":")[2] == second.rpartition(":")[2]


def changed_code(provenance: Mapping[str, Any], recipe: TrainRecipe, code: Mapping[str, str]) -> list[str]:
    """The objective, network and data set of `recipe` whose files have changed since training; `code` as above."""
    recorded, names = recorded_code(provenance), names_of_code(recipe)
    return [names[field] for field, digest in code.items() if recorded.get(field, digest) != digest]
