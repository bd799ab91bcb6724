"""Opens a run folder for training: checks what it holds, and restores the state (`state.pt`) that training continues
from. The state is written before the model, whose file can be made from it, and replaced atomically."""

import io
import json
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from smoothcert.data import DATASETS, Images
from smoothcert.distributed import Team
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.compressed import exists
from smoothcert.io.files import check_regular_file, remove_temporaries, replaced_atomically
from smoothcert.io.records import parse_recipe
from smoothcert.io.results import differing_settings
from smoothcert.io.text import counted, error_line, flattened
from smoothcert.training.checkpoint import ModelFile, Run, load_run, read_model_file, save_weights
from smoothcert.training.frozen_classifier import refuse_missing_classifier
from smoothcert.training.metrics import METRICS, epochs_in, keep_metrics_before
from smoothcert.training.own_code import CODE, EARLIER_CODE, changed_code, moved_code, recorded_code
from smoothcert.training.recipe import ImportRecipe, TrainRecipe, load_run_recipe
from smoothcert.training.run_folder import MODEL, RECIPE, STATE, refuse_existing_run, refuse_lost_recipe
from smoothcert.training.weight_average import AveragedWeights

TENSORS = ("epoch", "model", "average", "sampler")
"""Fields that torch saves; the optimizer is saved as in its `state_dict`, and the other fields as JSON."""
CHANGEABLE = ("epochs", "dataset")
"""Fields that a user may edit in the recipe of a run: the same data in another place, and more or fewer epochs, do not
change the epochs that have been trained. Only a cosine schedule would have given these other learning rates."""
ORIGIN = ("init", "classifier", "sync_batch_norm", EARLIER_CODE)
"""What the weights depend on apart from recipe and data, as provenance records it: the file of the initial weights, the
frozen classifier that the loss uses, whether batch norm is synchronized, and users' code that has changed since epochs
were trained with it. What a run does not have is absent."""


class State(BaseModel):
    """Training after `epoch` epochs; wrong types are a ValidationError."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True)

    epoch: int = Field(ge=0)
    model: dict[str, Tensor]
    optimizer: dict[int, dict[str, Tensor | None]]
    """What the optimizer remembers of each parameter; its settings are those of the recipe."""
    recipe: dict[str, Any]
    data: str
    """The digest of the training data."""
    provenance: dict[str, Any]
    warm_up: int = Field(ge=0)
    """Epochs of learning-rate warm-up, which a dead start changes."""
    dead_epochs: int = Field(ge=0)
    """Number of epochs with a constant output, among those that decide whether the start was dead."""
    average: dict[str, Tensor] | None = None
    """The moving average of the weights, if the recipe has one."""
    sampler: Tensor | None = None
    """The weight of each image in the draws of the sampler, 0 for a discarded image; None: it draws uniformly."""


def save_state(folder: Path, state: State) -> None:
    """Write `state.pt`: tensors, numbers and strings only. On a full disk raise a WorkError and keep the old file."""
    content = io.BytesIO()
    tensors = {name: value for name in TENSORS if (value := getattr(state, name)) is not None}
    # The rest is JSON, which can hold every kind of string and number that torch's safe loading refuses.
    about = json.dumps(state.model_dump(exclude={*TENSORS, "optimizer"}))
    torch.save({**tensors, "optimizer": {"state": state.optimizer}, "about": about}, content)
    with replaced_atomically(folder / STATE) as temporary:
        temporary.write_bytes(content.getbuffer())


def load_state(folder: Path) -> State | None:
    """Read the state onto the CPU; None if no epoch has finished. Loading cannot run code; a changed bit is refused."""
    path = folder / STATE
    check_regular_file(path)
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums
            if (part := archive.testzip()) is not None:
                raise ValueError(f"checksum of {part}")
        stored = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {name: stored[name] for name in TENSORS if name in stored}
        return State(**tensors, optimizer=stored["optimizer"]["state"], **json.loads(stored["about"]))
    except Exception as error:  # a damaged file can make the unpickler raise any exception
        # The messages of torch and pydantic about such files are several lines.
        wrong = error.errors()[0]["loc"] if isinstance(error, ValidationError) else ()
        reason = f"wrong {'.'.join(map(str, wrong))}" if wrong else type(error).__name__
        raise WorkError(
            f"{path}: damaged, the run cannot continue from it ({reason}); it is left as it is: restore it, or "
            "train again into another folder"
        ) from error


@dataclass(frozen=True)
class Start:
    """Where a run starts or continues."""

    epoch: int
    """The first epoch to train."""
    state: State | None
    digest: str
    """The digest of the training data."""
    model: ModelFile | None
    """The model that the folder holds."""
    origin: Mapping[str, Any]
    """See ORIGIN."""


def open_folder(
    recipe: TrainRecipe,
    data: Images,
    folder: Path,
    group: Team,
    origin: Mapping[str, Any],
    resume: bool,
    on_note: Callable[[str], None],
) -> Start:
    """Make or reopen the folder; refuse recipe, data, origin, state, model and metrics that do not belong together.

    A new run replaces one of which no epoch was saved, such as one whose loss diverged at once.
    """
    has_recipe = (folder / RECIPE).exists()
    refuse_unshared_folder(folder, group, has_recipe)
    if not resume:
        refuse_existing_run(folder)
    if not has_recipe:
        refuse_lost_recipe(folder)
    model = read_model_file(folder / MODEL) if (folder / MODEL).exists() else None
    provenance = {} if model is None else model.provenance
    code = origin.get(CODE, {})
    moved: set[str] = set()
    stored = load_run_recipe(folder / RECIPE) if has_recipe and resume else None
    if stored is not None:
        moved = moved_code(provenance, stored, recipe, code)
        refuse_other_recipe(stored, recipe, folder, harmless=moved)
    state = load_state(folder)
    digest = data.digest()
    if not resume and state is not None:
        refuse_existing_run(folder, trained=state.epoch > 0)
        state = None
    refuse_other_data(folder, state, digest)
    harmless = moved | ({"epochs"} if state is None else set(CHANGEABLE))
    if model is not None:
        refuse_other_model(folder, model, recipe, harmless)
    if state is not None:
        refuse_other_state(folder, state, recipe, harmless, on_note)
    epoch = first_epoch(recipe, folder, state, model)
    finished = epoch == recipe.epochs
    if state is not None:
        refuse_other_origin(folder, state.provenance, origin, finished)
        origin = {name: state.provenance[name] for name in ORIGIN if state.provenance.get(name)}
        origin |= {CODE: code} if code else {}
    if not finished and "classifier" not in origin:
        refuse_missing_classifier(recipe.objective)
    group.wait()  # all processes have read the folder before the first one writes
    if epoch and (changed := changed_code(provenance, recipe, code)):
        origin = {**origin, EARLIER_CODE: dict(recorded_code(provenance))}
        on_note(
            f"{folder}: {' and '.join(changed)} changed after it was trained for {epoch} of {recipe.epochs} epochs; "
            "for a run with the new code only, train into another --out"
        )
    if group.leads:
        write_start(recipe, folder, epoch, stored is not None, on_note)
        if stored is not None and not finished and different_fields(stored, recipe):
            recipe.save(folder / RECIPE)  # it names the files where they are now
    group.wait()
    return Start(epoch, state, digest, model, origin)


def refuse_unshared_folder(folder: Path, group: Team, has_recipe: bool) -> None:
    """Refuse a folder in which this process sees a recipe and process 0 does not, or the other way round."""
    if group.agree(has_recipe) != has_recipe:
        raise WorkError(
            f"{folder}: process {group.rank} does not see the files that process 0 sees there; choose an --out on a "
            "file system that all machines share"
        )


def refuse_other_data(folder: Path, state: State | None, digest: str) -> None:
    """Refuse to continue on training data other than those of the state."""
    if state is not None and state.data != digest:
        raise RequestError(
            f"{folder}: the training data have changed since its state was saved; restore them, and read them with the "
            "same options (--classes, --channels), or train on the new data into another --out"
        )


def refuse_other_model(folder: Path, model: ModelFile, recipe: TrainRecipe, harmless: Collection[str]) -> None:
    """Refuse a model that was imported or has another recipe."""
    if not isinstance(model.recipe, TrainRecipe):
        raise RequestError(f"{folder}: expected a run to train, got an imported model; choose another --out")
    refuse_other_recipe(model.recipe, recipe, folder, MODEL, harmless)


def refuse_other_state(
    folder: Path, state: State, recipe: TrainRecipe, harmless: Collection[str], on_note: Callable[[str], None]
) -> None:
    """Refuse a state with another recipe; note that a cosine schedule over other epochs had other learning rates."""
    stored = parse_recipe(TrainRecipe, state.recipe, str(folder / STATE))
    refuse_other_recipe(stored, recipe, folder, STATE, harmless)
    if state.epoch and recipe.schedule == "cosine" and recipe.epochs != stored.epochs:
        on_note(
            f"{folder}: epochs 0 to {state.epoch - 1} had the learning rates of a cosine schedule over {stored.epochs} "
            f"epochs, the others have those of one over {recipe.epochs}; a new run of {recipe.epochs} epochs gives "
            "another model"
        )


def write_start(recipe: TrainRecipe, folder: Path, epoch: int, continues: bool, on_note: Callable[[str], None]) -> None:
    """Write what a new run, or one that `continues`, has in its folder before it trains `epoch`."""
    for name in (RECIPE, STATE, MODEL, METRICS):
        remove_temporaries(folder / name)
    if not continues:
        (folder / STATE).unlink(missing_ok=True)
        recipe.save(folder / RECIPE)
    if epoch < recipe.epochs or epochs_in(folder / METRICS) > epoch:  # compressed metrics of a finished run stay so
        keep_metrics_before(folder / METRICS, epoch)
    if epoch and not exists(folder / METRICS):
        on_note(f"{folder}: its {METRICS} is gone; the metrics of epochs 0 to {epoch - 1} are lost")
    if epoch == recipe.epochs:
        on_note(f"{folder}: trained already, {epoch} of {epoch} epochs")


def first_epoch(recipe: TrainRecipe, folder: Path, state: State | None, model: ModelFile | None) -> int:
    """The epoch after the last one of the state; `recipe.epochs` if the model is finished and the state is missing."""
    measured = epochs_in(folder / METRICS)
    if state is None:
        if model is not None and model.epoch == recipe.epochs:
            return recipe.epochs
        # The first epoch is always saved, so a killed process leaves at most its metrics without a state.
        lost = max(measured if measured > 1 else 0, model.epoch if model is not None else 0)
        if lost:
            raise RequestError(
                f"{folder}: {STATE} is gone, so the run cannot continue after its {lost} of {recipe.epochs} epochs; "
                "restore it, or train again into another --out"
            )
        return 0
    if state.epoch > recipe.epochs:
        raise WorkError(
            f"{folder / STATE}: expected at most the {recipe.epochs} epochs of the recipe, got {state.epoch}; "
            "restore it, or train again into another folder"
        )
    if exists(folder / METRICS) and measured < state.epoch:
        raise WorkError(
            f"{folder}: {STATE} was saved after {counted(state.epoch, 'epoch')}, but {METRICS} holds "
            f"{measured}; restore the files, or train again into another folder"
        )
    return state.epoch


def refuse_other_origin(folder: Path, recorded: Mapping[str, Any], wanted: Mapping[str, Any], finished: bool) -> None:
    """Raise a RequestError if a run was trained from other weights, with another classifier or other batch norm.

    Initial weights need not be given again, nor the classifier of a run that is `finished`.
    """
    known = recorded.get("init") or {}
    init = wanted.get("init")
    if init is not None and any(init.get(part) != known.get(part) for part in ("sha256", "key")):
        raise RequestError(
            f"{folder}: its training started from {known.get('file', 'random weights')}, --init gives "
            f"other weights, {init['file']}; leave --init out, or choose another --out"
        )
    synchronized = "sync_batch_norm" in wanted
    if ("sync_batch_norm" in recorded) != synchronized:
        done, change = ("without", "leave it out") if synchronized else ("with", "add it")
        raise RequestError(f"{folder}: was trained {done} --sync-batch-norm; {change}, or choose another --out")
    started, given = (origin.get("classifier") or {} for origin in (recorded, wanted))
    other = {**started, "folders": None} != {**given, "folders": None}  # which may have been moved
    if other and (given or not finished):
        raise RequestError(
            f"{folder}: expected the classifier that its training started with ({_in_words(started)}), got "
            f"{_in_words(given)}; give the same --teacher or --classifier, or choose another --out"
        )


def _in_words(classifier: Mapping[str, Any]) -> str:
    if not classifier:
        return "none"
    folders = f" of {', '.join(classifier['folders'])}" if "folders" in classifier else ""
    return f"{classifier['model']} {classifier['weights_sha256'][:12]}{folders}"


def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedWeights | None, start: Start, folder: Path
) -> None:
    """Load the state of a run; refuse it if the network has changed since."""
    state = start.state
    if state is None:
        if start.epoch:
            load_run(folder, model=model)
        return
    try:
        model.load_state_dict(state.model)
        if average is not None:
            average.load(state.average or {})
        # The settings are those of the recipe and the device; the momentum is laid out as the parameters are.
        settings = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state.optimizer, "param_groups": settings})
        for parameter, kept in optimizer.state.items():
            for name, value in kept.items():
                if isinstance(value, Tensor) and name != "step":  # AdamW's counter
                    if value.shape != parameter.shape:
                        raise ValueError(f"{name} of shape {list(value.shape)} for {list(parameter.shape)}")
                    kept[name] = torch.empty_like(parameter).copy_(value)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = error_line(error)
        raise RequestError(f"{folder}: its weights do not fit the network ({reason}); choose another --out") from error


def write_missing_model(run: Run, weights: Mapping[str, Tensor], start: Start) -> None:
    """Write the model of a finished run from its state if the folder holds none, or that of an earlier epoch."""
    if start.state is None or not run.finished:
        return
    known = start.model
    if known is None or known.epoch != run.epoch or different_fields(known.recipe, run.recipe):
        save_weights(replace(run, provenance=start.state.provenance), weights)


def refuse_other_recipe(
    stored: TrainRecipe, wanted: TrainRecipe, folder: Path, file: str = RECIPE, harmless: Collection[str] = ()
) -> None:
    """Raise a RequestError if the recipe in `file` differs from `wanted` in fields that are not `harmless`."""
    if differing := different_fields(stored, wanted, harmless):
        source = "" if file == RECIPE else f"{file} says that it "
        moved = stored.dataset == wanted.dataset or not {stored.dataset, wanted.dataset} & DATASETS.keys()
        editable = file == RECIPE and moved and all(difference.startswith(CHANGEABLE) for difference in differing)
        edit = f"to continue the run with this change, edit {RECIPE}, or " if editable else ""
        raise RequestError(
            f"{folder}: {source}holds a run of another recipe ({'; '.join(differing)}); {edit}choose another --out"
        )


def different_fields(
    stored: TrainRecipe | ImportRecipe,
    wanted: TrainRecipe | ImportRecipe,
    harmless: Collection[str] = (),
    names: tuple[str, str] = ("the run", "the request"),
) -> list[str]:
    """In words, each field that differs and is not `harmless`; paths of data and code may be written in another way.

    The words call the two recipes by their `names`.
    """
    before, now = (
        {name: value for name, value in flattened(recipe.model_dump(mode="json")).items() if name not in harmless}
        for recipe in (stored, wanted)
    )
    return differing_settings(before, now, names)
