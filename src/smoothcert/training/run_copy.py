"""A copy of a run with changed weights, in a folder of its own: another network, with the same recipe."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from smoothcert.errors import RequestError
from smoothcert.io.files import remove_temporaries
from smoothcert.io.results import alone
from smoothcert.training.checkpoint import MODEL, RECIPE, Run, read_model_file, save_weights

ORIGINAL = "original_weights_sha256"


def write_copy(run: Run, out: Path, weights: Mapping[str, Tensor], change: str, about: Mapping[str, Any]) -> None:
    """Write the recipe of `run` and `weights` into the new folder `out`; the provenance has `about` as `change`.

    `about` says what was done, with the digest of the original weights as ORIGINAL. After an interruption the same call
    repeats the copy.
    """
    with alone(out / MODEL, "choose another --out"):
        refuse_other_files(out, change, about[ORIGINAL])
        remove_temporaries(out / RECIPE)
        # The recipe is last: without it, the copy was interrupted.
        save_weights(out, weights, run.recipe, run.spec, run.epoch, {**run.provenance, change: dict(about)})
        run.recipe.save(out / RECIPE)


def refuse_other_files(out: Path, change: str, digest: str) -> None:
    """Raise a RequestError if `out` holds anything but the files of an interrupted copy of the same weights."""
    if out.is_dir():
        hidden = (f".{MODEL}.", f".{RECIPE}.")  # temporary files, and the lock
        files = [path.name for path in out.iterdir() if not path.name.startswith(hidden)]
        if not files:
            return
        if files == [MODEL] and read_model_file(out / MODEL).provenance.get(change, {}).get(ORIGINAL) == digest:
            return
    if os.path.lexists(out):
        raise RequestError(f"{out}: exists already; choose another --out")
