"""Which recipe `smoothcert train` and `sweep` mean: of a preset, of a file, or made for a data set and a method."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoothcert.cli.options import DATASET, Epochs, ImageOptions, console
from smoothcert.data.datasets import refuse_absent_data, refuse_data_code
from smoothcert.errors import RequestError
from smoothcert.io.field_errors import LETTERS
from smoothcert.training.run_folder import RECIPE

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.objectives.base import Objective
    from smoothcert.training.recipe import TrainRecipe


_VALUE = r"""((?:\[.*?\]|\{.*?\}|"[^"]*"|'[^']*'|[^,])*)(?:,|$)"""
"""A value and the comma after it, if any."""


@dataclass(frozen=True)
class RecipeOptions:
    """The options of `train` and `sweep` that choose a recipe."""

    preset: Annotated[str | None, typer.Option(help="Name of a recipe: see `smoothcert presets`.")] = None
    recipe: Annotated[Path | None, typer.Option(help="A recipe file (YAML), instead of a preset.")] = None
    dataset: Annotated[str | None, typer.Option(help=DATASET, show_default="the recipe's")] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--arch",
            help="A network, hf:NAME, timm:NAME, or your own: package.module:function or FILE.py:function.",
        ),
    ] = None
    objective: Annotated[
        str | None,
        typer.Option("--method", "--objective", help="A method, or your own: package.module:Class or FILE.py:Class."),
    ] = None
    epochs: Epochs = None

    def name(self, sigma: float | None) -> str | None:
        """Return a name for the run folder; None if nothing is chosen."""
        if self.preset is not None:
            return self.preset.replace("/", "-") + ("" if sigma is None else f"-{sigma:g}")
        if self.recipe is not None:
            return self.recipe.parent.name if self.recipe.name == RECIPE else self.recipe.stem
        if self.dataset is None or self.objective is None or sigma is None:
            return None
        kind, _, path = self.dataset.partition(":")
        return f"{Path(path).stem if path else kind}-{self.objective.rpartition(':')[2]}-{sigma:g}"

    def fields(self, sigma: object, image_size: int | None) -> dict[str, Any]:
        """Return the fields of the recipe that are given as options; None for others."""
        names = {"dataset": self.dataset, "image_size": image_size, "model": self.model, "sigma": sigma}
        return {"objective": self.objective, **names, "epochs": self.epochs}


def refuse_twice(fields: Mapping[str, object], changes: Sequence[str], advice: str = "leave one out") -> None:
    """Refuse a change of --set to a field that an option or another change sets as well: which one is meant?"""
    from smoothcert.training.recipe import TrainRecipe

    before: set[str] = set()
    for change in changes:
        key = change.partition("=")[0]
        short = "objective" if key == "objective.name" else key.removeprefix("objective.")
        field = LETTERS.get(short, short)
        if key.startswith("objective.") and field in TrainRecipe.model_fields.keys() - {"objective"}:
            field = key  # an objective of the user's may have an `epochs` of its own
        if field in before:
            raise RequestError(f"--set {change}: {key} is given twice; {advice}")
        before.add(field)
        if fields.get(field) is not None:
            option = "--method" if field == "objective" else f"--{field.replace('_', '-')}"
            raise RequestError(
                f"--set {change}: expected one value for {key}, got {option} {fields[field]} as well; leave one out"
            )


def choose_recipe(
    options: RecipeOptions,
    sigma: float | None,
    files: ImageOptions,
    changes: Sequence[str],
    *,
    trained: bool = False,
    continued: bool = False,
    silent: bool = False,
    varied: Collection[str] = (),
) -> "TrainRecipe":
    """Return the recipe that `options` name, at the noise level `sigma`, with the `changes` of --set.

    Code that only a file names is refused: the user has to name it as well. The images are read, as `files` says, if
    the recipe depends on them, and on whether training starts from `trained` weights. A recipe of a run that is
    `continued` may be of an earlier version. Defaults that were chosen are printed unless `silent`. Fields that are
    `varied` get their values later.
    """
    from smoothcert.papers.presets import FINETUNE, PRESETS
    from smoothcert.papers.presets import preset as find_preset
    from smoothcert.training.recipe import load_run_recipe, load_train_recipe, with_overrides
    from smoothcert.training.user_objective import load_objective

    file = options.recipe
    if options.preset is not None and file is not None:
        raise RequestError("give --preset or --recipe, not both")
    named = options.fields(sigma, files.image_size)
    refuse_twice(named, changes)
    if options.preset is not None:
        chosen = find_preset(options.preset, named.pop("sigma"))
    elif file is None:
        chosen = recipe_for_data(options, sigma, files, trained)
        named = {}
    else:
        chosen = load_run_recipe(file) if continued else load_train_recipe(file)
    # JSON is YAML: a path may contain " #".
    overrides = [*(f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None), *changes]
    final = with_overrides(chosen, overrides, "--set" if changes else "recipe")
    changed = {text.partition("=")[0] for text in overrides}
    if options.preset is None and file is None and not silent:
        from smoothcert.training.default_recipe import describe_choices

        choices = describe_choices(chosen, final, trained=trained)
        console.note(f"defaults without a preset: {choices}; --set changes them")
    if trained and (better := f"{options.preset}{FINETUNE}") in PRESETS:
        console.note(f"{options.preset} has the learning rates for random weights; with --init give {better}")
    check_references(final, file, changed, continued=continued)
    if not silent and "augment" not in varied:
        note_missing_augmentation(chosen.dataset, final)
    loaded = load_objective(final)
    note_other_defaults(chosen.objective, loaded.objective)
    return loaded


def check_references(recipe: "TrainRecipe", file: Path | None, given: Collection[str], *, continued: bool) -> None:
    """Refuse absent data, an unknown network, and code that only the recipe `file` names, not the user.

    `given` are the keys of the fields that the user gives. This is done before data are downloaded.
    """
    from smoothcert.training.user_objective import refuse_objective_code

    refuse_absent_data(recipe.dataset)
    if file is not None and "dataset" not in given:
        refuse_data_code(file, recipe.dataset)
    if file is not None and "objective" not in given and "objective.name" not in given:
        refuse_objective_code(file, recipe)
    # torch is imported when the rest of the request is known to be right.
    from smoothcert.models import check_name, check_own_code, is_known
    from smoothcert.training.checkpoint import refuse_code

    if continued and "model" not in given and not is_known(recipe.model):
        raise RequestError(
            f"{file}: its network {recipe.model} was given to `train` in Python; continue it there: "
            "train(recipe, data, out, model=network, resume=True)"
        )
    check_name(recipe.model)
    if file is not None and "model" not in given:
        refuse_code(file, recipe.model, None)
    check_own_code(recipe.model)


def note_missing_augmentation(planned: str, recipe: "TrainRecipe") -> None:
    """Print that the data of a recipe are not augmented, where those that it was `planned` for are."""
    from smoothcert.training.augmentation import augmentation_note, without_augmentation

    if without_augmentation(recipe.dataset) and (note := augmentation_note(planned, recipe, recipe.dataset)):
        console.note(note)


def note_other_defaults(replaced: "Objective", objective: "Objective") -> None:
    """Print in which defaults a class of the user's differs from the settings of the preset's method that it extends.

    A comparison of the two would otherwise differ in these settings as well, and nobody would notice.
    """
    if type(objective) is type(replaced) or not isinstance(objective, type(replaced)):
        return
    kept = type(replaced).model_fields.keys() - objective.model_fields_set
    pairs = {name: (getattr(objective, name), getattr(replaced, name)) for name in sorted(kept)}
    differences = [f"{name} {ours} (the preset: {theirs})" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if differences:
        text = f"{type(objective).__name__} has its own defaults: {', '.join(differences)}; --set changes them"
        console.note(text)


def recipe_for_data(options: RecipeOptions, sigma: float | None, files: ImageOptions, trained: bool) -> "TrainRecipe":
    """Return the default recipe for the data set and the method of a request."""
    if options.dataset is None:
        raise RequestError(
            "give --preset NAME, --recipe FILE, or --dataset NAME --method NAME --sigma S; `smoothcert presets` and "
            "`smoothcert datasets` list the names"
        )
    if options.objective is None or sigma is None:
        option = "--method NAME" if options.objective is None else "--sigma S"
        raise RequestError(f"{option}: missing; without a preset it must be given with --dataset {options.dataset}")
    refuse_absent_data(options.dataset)
    from smoothcert.models import check_name, check_own_code
    from smoothcert.training.default_recipe import default_recipe
    from smoothcert.training.recipe import TrainRecipe

    # A wrong method, noise level or network is refused before images are downloaded or read.
    given: dict[str, Any] = {"dataset": options.dataset, "sigma": sigma, "objective": options.objective}
    TrainRecipe(model=options.model or "", **given)
    if options.model is not None:
        check_name(options.model)
        check_own_code(options.model)
    images = files.load(options.dataset, "train", files.image_size)
    return default_recipe(
        images,
        options.dataset,
        sigma,
        options.objective,
        image_size=files.image_size,
        model=options.model,
        epochs=options.epochs,
        trained=trained,
    )


def split_values(text: str) -> list[str]:
    """Return the values of `a,b,c`, at least one; commas inside brackets and quotes belong to a value."""
    values = [value.strip() for value in re.findall(_VALUE, text)]
    return values[:-1] if len(values) > 1 and not text.endswith(",") else values  # an empty match at the end
