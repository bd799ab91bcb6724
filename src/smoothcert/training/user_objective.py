"""A user's own objective, named by a recipe as `package.module:Class` or `FILE.py:Class`: imported with consent."""

import inspect
from pathlib import Path

from smoothcert.errors import RequestError
from smoothcert.io.records import parse_recipe, validated
from smoothcert.io.text import named_error
from smoothcert.objectives import REFERENCES, Objective, UnloadedObjective
from smoothcert.training.recipe import TrainRecipe


def import_objective(reference: str) -> type[Objective]:
    """Import the class that `reference` names. Call this only if the user has named it."""
    from smoothcert.models.user_code import import_code  # imports torch

    kind = import_code(reference, "objective", "Class")
    if not (inspect.isclass(kind) and issubclass(kind, Objective)):
        raise RequestError(
            f"objective: expected {reference} to be a subclass of smoothcert.objectives.Objective, "
            f"got {kind.__name__ if inspect.isclass(kind) else type(kind).__name__}"
        )
    if inspect.isabstract(kind):
        raise RequestError(f"objective: expected {reference} to define loss(), got a class without it")
    REFERENCES[kind] = reference
    return kind


def load_objective(recipe: TrainRecipe) -> TrainRecipe:
    """Import the code of the recipe's objective, if it is outside the package, and check its hyper-parameters.

    Opening a recipe or a run folder must not be enough to run code that its author chose: call this only if the user
    trusts the recipe.
    """
    objective = recipe.objective
    if not isinstance(objective, UnloadedObjective):
        return recipe
    kind = import_objective(objective.reference)
    fields = recipe.to_mapping()
    del fields["objective"]["name"]
    try:
        loaded = validated(kind, fields["objective"], "objective.")
    except RequestError:
        raise
    except Exception as error:  # a user's code may fail in any way
        raise RequestError(f"objective: {objective.reference} failed ({named_error(error)})") from error
    return parse_recipe(TrainRecipe, fields | {"objective": loaded}, objective.reference)


def refuse_objective_code(source: Path, recipe: TrainRecipe) -> None:
    """Refuse a recipe from the file `source` whose objective is code that the user has not named."""
    if isinstance(recipe.objective, UnloadedObjective):
        reference = recipe.objective.reference
        raise RequestError(f"{source}: its objective is the code {reference}; allow it with --objective {reference}")
