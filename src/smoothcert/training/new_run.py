"""Run folders that are written at once: of an imported checkpoint, or of a run with changed weights."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from smoothcert.errors import RequestError
from smoothcert.io.files import remove_temporaries
from smoothcert.io.results import alone
from smoothcert.training.checkpoint import MODEL, RECIPE, ModelFile, Run, read_model_file, save_weights
from smoothcert.training.metrics import METRICS

ORIGINAL = "original_weights_sha256"


def write_new_run(run: Run, weights: Mapping[str, Tensor], interrupted: Callable[[ModelFile], bool]) -> None:
    """Write `run` with `weights` into its folder, which must be new (see `refuse_other_files`).

    After an interruption the same call repeats this.
    """
    with alone(run.folder / METRICS, "choose another --out"):
        refuse_other_files(run.folder, interrupted)
        for name in (MODEL, RECIPE):
            remove_temporaries(run.folder / name)
        # The recipe is last: without it, the call was interrupted.
        save_weights(run.folder, weights, run.recipe, run.spec, run.epoch, run.provenance)
        run.recipe.save(run.folder / RECIPE)


def refuse_other_files(out: Path, interrupted: Callable[[ModelFile], bool]) -> None:
    """Raise a RequestError if `out` holds anything but a model that the same call left: `interrupted` knows it."""
    if out.is_dir():
        hidden = tuple(f".{name}." for name in (MODEL, RECIPE, METRICS))  # temporary files, and the lock
        files = [path.name for path in out.iterdir() if not path.name.startswith(hidden)]
        if not files or (files == [MODEL] and interrupted(read_model_file(out / MODEL))):
            return
    if os.path.lexists(out):
        raise RequestError(f"{out}: exists already; choose another --out")


def is_copy(change: str, digest: str) -> Callable[[ModelFile], bool]:
    """Tell a model that was made by `change` from the weights with `digest`."""
    return lambda stored: stored.provenance.get(change, {}).get(ORIGINAL) == digest
