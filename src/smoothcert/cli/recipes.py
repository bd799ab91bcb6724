"""Which recipe `smoothcert train` and `sweep` mean: of a preset, of a file, or made for a data set and a method."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smoothcert.cli.options import Load, check_dataset, console
from smoothcert.errors import RequestError
from smoothcert.io.console import leads

if TYPE_CHECKING:  # commands import torch only when they need it
    from smoothcert.training.recipe import TrainRecipe


@dataclass(frozen=True)
class RecipeOptions:
    """The options that choose a recipe, as on the command line."""

    preset: str | None
    file: Path | None
    dataset: str | None
    image_size: int | None
    objective: str | None
    model: str | None
    epochs: int | None
    set_: Sequence[str]
    trained: bool = False
    """Whether training starts from trained weights."""
    continued: bool = False
    """Whether `file` is the recipe of a run that is continued, perhaps of an earlier version."""

    def name(self, sigma: float | None) -> str | None:
        """Return a name for the run folder; None if nothing is chosen."""
        if self.preset is not None:
            return self.preset.replace("/", "-") + ("" if sigma is None else f"-{sigma:g}")
        if self.file is not None:
            return self.file.parent.name if self.file.name == "recipe.yaml" else self.file.stem
        if self.dataset is None or self.objective is None or sigma is None:
            return None
        kind, _, path = self.dataset.partition(":")
        return f"{Path(path).stem if path else kind}-{self.objective.rpartition(':')[2]}-{sigma:g}"


def choose_recipe(options: RecipeOptions, sigma: float | None, load: Load) -> "TrainRecipe":
    """Return the recipe that `options` name, at the noise level `sigma`, with all overrides.

    Code that only a file names is refused: the user has to name it as well. `load` is called
    if the recipe depends on the images.
    """
    from smoothcert.papers.presets import preset as find_preset
    from smoothcert.training.recipe import load_run_recipe, load_train_recipe, with_overrides
    from smoothcert.training.run_folder import MODEL
    from smoothcert.training.user_objective import load_objective, refuse_objective_code

    file = options.file
    if options.preset is not None and file is not None:
        raise RequestError("give --preset or --recipe, not both")
    named = {"objective": options.objective, "dataset": options.dataset, "image_size": options.image_size}
    named |= {"epochs": options.epochs, "model": options.model}
    if options.preset is not None:
        chosen = find_preset(options.preset, sigma)
    elif file is None:
        chosen, named = recipe_for_data(options, sigma, load), {}
    elif file.suffix == Path(MODEL).suffix and file.is_file():
        from smoothcert.training.checkpoint import recipe_of_model

        chosen = recipe_of_model(file)
    else:
        chosen = load_run_recipe(file) if options.continued else load_train_recipe(file)
    given = {key: value for key, value in named.items() if value is not None and key != "model"}
    overrides = [f"{key}={json.dumps(value)}" for key, value in given.items()]  # JSON is YAML: a path may contain " #"
    overrides += options.set_ if sigma is None or options.preset is not None else [f"sigma={sigma}", *options.set_]
    overrides += [f"model={options.model}"] if named.get("model") is not None else []
    final = with_overrides(chosen, overrides)
    check_dataset(final.dataset)
    if file is not None and not any(text.partition("=")[0] in ("objective", "objective.name") for text in overrides):
        refuse_objective_code(file, final)
    # torch is imported when the request is known to be right.
    from smoothcert.training.checkpoint import refuse_code

    if file is not None and f"model={final.model}" not in overrides:
        refuse_code(file, final.model, None)
    return load_objective(final)


def recipe_for_data(options: RecipeOptions, sigma: float | None, load: Load) -> "TrainRecipe":
    """Return the default recipe for the data set and the method of a request; print what it chooses."""
    if options.dataset is None:
        raise RequestError(
            "give --preset NAME, --recipe FILE, or --dataset NAME --method NAME --sigma S; `smoothcert presets` and "
            "`smoothcert datasets` list the names"
        )
    for option, value in (("--method NAME", options.objective), ("--sigma S", sigma)):
        if value is None:
            raise RequestError(f"{option}: missing; without a preset it must be given with --dataset {options.dataset}")
    check_dataset(options.dataset)
    from smoothcert.report.progress import print_note
    from smoothcert.training.default_recipe import default_recipe, describe_choices

    images = load(options.dataset, "train", options.image_size)
    recipe = default_recipe(
        *(images, options.dataset, sigma, str(options.objective)),  # type: ignore[arg-type]
        image_size=options.image_size,
        model=options.model,
        epochs=options.epochs,
        trained=options.trained,
    )
    if leads():
        print_note(console, f"without a preset: {describe_choices(recipe)}; --set changes them")
    return recipe
