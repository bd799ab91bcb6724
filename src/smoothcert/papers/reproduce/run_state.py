"""A run in its folder: how much of it is finished, the estimated time of the rest, and what it may use."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.table import Column, Table
from rich.text import Text

from smoothcert.certification.certificates import CertificatesFile, read_certificates
from smoothcert.certification.settings import CertifySettings
from smoothcert.data import DATASETS, DatasetReader, Images, Split
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.compressed import existing_form
from smoothcert.io.references import same_reference
from smoothcert.io.results import differing_settings
from smoothcert.io.text import duration
from smoothcert.papers.reproduce.estimate import certification_seconds, training_seconds
from smoothcert.training.checkpoint import InputSpec, Run, load_run, read_model_file
from smoothcert.training.own_code import changed_code, code_of, moved_code
from smoothcert.training.recipe import TrainRecipe, load_run_recipe
from smoothcert.training.resume import refuse_other_recipe
from smoothcert.training.run_folder import MODEL, RECIPE


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the work on runs may use."""

    reader: DatasetReader = field(default_factory=DatasetReader)
    device: str = "auto"
    jobs: int = 1

    def load(self, recipe: TrainRecipe, split: Split) -> Images:
        """Return the images of a recipe; each part of a data set is read once."""
        return self.reader(recipe.dataset, split, recipe.image_size)


@dataclass(frozen=True)
class RunState:
    """A run in its folder, how many images are to be certified, its state, and the estimated seconds that are left."""

    folder: Path
    recipe: TrainRecipe | None
    settings: CertifySettings
    images: int
    epochs_done: int = 0
    images_done: int = 0
    seconds: float = 0.0
    problem: str | None = None
    """Why the folder cannot be used: a file in it is damaged, or does not belong to the run."""
    changed_code: tuple[str, ...] = ()
    """The user's own objective, network and data set whose files have changed since all epochs were trained."""

    @property
    def known_recipe(self) -> TrainRecipe:
        """The recipe of a run that can be trained."""
        assert self.recipe is not None, "runs that cannot be trained are planned, but not worked on"
        return self.recipe

    @property
    def certificates(self) -> Path:
        """The certificates file, plain or compressed."""
        return existing_form(self.settings.default_path(self.folder, None))

    @property
    def trained(self) -> bool:
        return self.recipe is not None and self.epochs_done >= self.recipe.epochs

    @property
    def done(self) -> bool:
        return self.trained and self.images_done >= self.images

    @property
    def state(self) -> str:
        """How far the run is, in words: missing, trained, done, a problem, or a number of epochs or images."""
        if self.problem is not None:
            return f"cannot be used: {self.problem}"
        if not self.trained:
            return f"trained {self.epochs_done} of {self.known_recipe.epochs} epochs" if self.epochs_done else "missing"
        if self.images_done < self.images:
            return f"certified {self.images_done:,} of {self.images:,}" if self.images_done else "trained"
        return "done"


R = TypeVar("R", bound=RunState)


def stored_recipes(out: Path) -> dict[Path, TrainRecipe]:
    """Return the recipe of each run in the folder `out`, by the folder of the run."""
    recipes: dict[Path, TrainRecipe] = {}
    for path in sorted(out.glob(f"*/{RECIPE}")):
        with suppress(RequestError):  # a damaged file, or an imported model
            recipes[path.parent] = load_run_recipe(path)
    return recipes


def with_state(run: R, indices: Sequence[int]) -> R:
    """Return `run` with the epochs and, of the images `indices`, the certificates that its folder holds.

    A folder with a run of another recipe is refused.
    """
    folder = run.folder
    recipe = run.known_recipe
    if not (folder / RECIPE).exists():
        return run
    stored = load_run_recipe(folder / RECIPE)
    path = run.certificates
    wanted = set(indices)
    try:
        code = code_of(recipe)
        provenance = read_model_file(folder / MODEL).provenance if code and (folder / MODEL).exists() else {}
        refuse_other_recipe(stored, recipe, folder, harmless=moved_code(provenance, stored, recipe, code))
        trained = load_run(folder, recipe.model) if (folder / MODEL).exists() else None
        epochs = 0 if trained is None else trained.epoch
        file = read_certificates(path) if path.exists() else None
        images = 0 if file is None else sum(row.index in wanted for row in file.rows)
        if file is not None and trained is not None and epochs >= recipe.epochs:
            refuse_other_certificates(file, run, trained)
    except WorkError as error:
        return replace(run, problem=str(error))
    changed = changed_code(provenance, recipe, code) if epochs == recipe.epochs else []
    return replace(run, epochs_done=epochs, images_done=images, changed_code=tuple(changed))


def refuse_other_certificates(file: CertificatesFile, run: RunState, trained: Run) -> None:
    """Raise a WorkError if `file` is not of the weights, data set and settings of `run`: certify would refuse it."""
    recipe, request = run.known_recipe, run.settings
    wanted: dict[str, Any] = {"sigma": recipe.sigma, "noise": recipe.noise}
    wanted |= {key: getattr(request, key) for key in ("n0", "n", "alpha")}
    wanted |= {"weights_sha256": trained.about()["weights_sha256"], "dataset": recipe.dataset}
    found = {key: file.settings.get(key) for key in wanted}
    dataset = str(found["dataset"]).partition(" (")[0]  # the rest says that its files are not official
    found["dataset"] = recipe.dataset if same_reference(dataset, recipe.dataset) else dataset
    if differences := differing_settings(found, wanted):
        raise WorkError(
            f"{file.path}: has certificates that were made with other settings ({'; '.join(differences)}); move it "
            "away, or choose another --out"
        )


def plan_table(runs: Sequence[RunState], title: str = "", acrs: Sequence[float | None] | None = None) -> Table:
    """Return a plan for a terminal: state and estimate of each run, and the published ACRs if they are given."""
    # The ACR in two lines: names of runs are long.
    columns = [Column("run", overflow="fold"), *([] if acrs is None else [Column("published ACR", max_width=9)])]
    caption = f"estimate for all, one after the other: {duration(sum(run.seconds for run in runs))}"
    table = Table(*columns, "state", "estimate", title=title or None, caption=caption, min_width=len(caption))
    for run, acr in zip(runs, acrs or [None] * len(runs), strict=True):
        acr_text = "" if acr is None else f"{acr:.3f}"
        acr_cells = [] if acrs is None else [acr_text]
        table.add_row(run.folder.name, *acr_cells, Text(run.state), duration(run.seconds) if run.seconds else "-")
    return table


def sizes_of(recipe: TrainRecipe, resources: Resources) -> tuple[int, int]:
    """Return the numbers of training and test images; only user data are read for them, and nothing is downloaded."""
    if recipe.dataset in DATASETS and recipe.image_size is None:
        return DATASETS[recipe.dataset].sizes
    return len(resources.load(recipe, "train")), len(resources.load(recipe, "test"))


def with_estimate(run: R, resources: Resources, device: torch.device) -> R:
    """Return `run` with the estimated seconds of its missing epochs and images."""
    if run.recipe is None or run.problem is not None or run.done:
        return run
    recipe = run.recipe
    spec = InputSpec.of(DATASETS.get(recipe.dataset) or resources.load(recipe, "train"))
    images, _ = sizes_of(recipe, resources)
    seconds = training_seconds(recipe, spec, images, recipe.epochs - run.epochs_done, device)
    votes = (run.images - run.images_done) * (run.settings.n0 + run.settings.n)
    return replace(run, seconds=seconds + certification_seconds(recipe.model, spec, votes, device))
