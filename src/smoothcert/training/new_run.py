"""Run folders that are written at once: of an imported checkpoint, or of a run with changed weights."""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from smoothcert.errors import RequestError
from smoothcert.io.files import remove_temporaries
from smoothcert.io.results import alone
from smoothcert.training.checkpoint import MODEL, RECIPE, Run, read_model_file, save_weights, tensors_digest
from smoothcert.training.metrics import METRICS

ORIGINAL = "original_weights_sha256"


def write_new_run(run: Run, weights: Mapping[str, Tensor]) -> None:
    """Write `run` with `weights` into its folder, which must be new; after an interruption the same call repeats this.

    The folder may hold nothing but the same model.
    """
    with alone(run.folder / METRICS, "choose another --out"):
        refuse_other_files(run.folder)
        if (run.folder / MODEL).exists():
            left = read_model_file(run.folder / MODEL)
            if (left.recipe, left.digest) != (run.recipe, tensors_digest(weights)):
                raise _exists(run.folder)
        for name in (MODEL, RECIPE):
            remove_temporaries(run.folder / name)
        # The recipe is last: without it, the call was interrupted.
        save_weights(run.folder, weights, run.recipe, run.spec, run.epoch, run.provenance)
        run.recipe.save(run.folder / RECIPE)


def refuse_other_files(out: Path) -> None:
    """Raise a RequestError if `out` is a file or holds anything but a model, which an interrupted call leaves."""
    hidden = tuple(f".{name}." for name in (MODEL, RECIPE, METRICS))  # temporary files, and the lock
    names = [path.name for path in out.iterdir()] if out.is_dir() else [""] * os.path.lexists(out)
    if any(name != MODEL and not name.startswith(hidden) for name in names):
        raise _exists(out)


def _exists(out: Path) -> RequestError:
    return RequestError(f"{out}: exists already; choose another --out")
