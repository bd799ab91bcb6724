"""Export the model of a run with weights in float16: half the size, for publishing. Loading casts them to float32."""

import os
from pathlib import Path

import torch
from torch import Tensor

from smoothcert.errors import RequestError
from smoothcert.io.files import remove_temporaries
from smoothcert.io.results import alone
from smoothcert.training.checkpoint import (
    MODEL,
    RECIPE,
    Run,
    load_run,
    read_model_file,
    save_weights,
    tensors_digest,
)

DIGEST = "original_weights_sha256"


def stored_in_half(tensor: Tensor) -> Tensor:
    """Round weights of convolutions and linear layers to float16; biases and the numbers of batch norm stay float32."""
    return tensor.half() if tensor.dtype == torch.float32 and tensor.ndim >= 2 else tensor


def export_run(folder: str | Path, out: str | Path, *, code: str | None = None) -> Run:
    """Write the recipe and the model of the run in `folder` into the new folder `out`, and return the exported run.

    The rounded weights are another network: certificates of the original do not hold for it. Its file records the
    digest of the original weights and the largest change of a weight. A run whose network is a user's own code is
    exported if `code` names it. After an interruption the same call repeats the export.
    """
    run, out = load_run(Path(folder), code), Path(out)
    weights = run.model.state_dict()
    digest = tensors_digest(weights)
    _refuse_other_files(out, digest)
    stored = {name: stored_in_half(tensor) for name, tensor in weights.items()}
    if too_large := [name for name, tensor in stored.items() if not bool(tensor.isfinite().all())]:
        raise RequestError(f"{folder}: expected weights that float16 can hold, got larger ones in {too_large[0]}")
    change = max(float((weights[name] - stored[name].float()).abs().max()) for name in weights if weights[name].numel())
    rounding = {
        "stored": "float16, cast to float32 when loaded; biases and batch norm in float32",
        "largest_change": change,
        DIGEST: digest,
    }
    with alone(out / MODEL, "choose another --out"):
        _refuse_other_files(out, digest)
        remove_temporaries(out / RECIPE)
        # The recipe is last: without it, the export was interrupted.
        save_weights(out, stored, run.recipe, run.spec, run.epoch, {**run.provenance, "weights": rounding})
        run.recipe.save(out / RECIPE)
    return load_run(out, code)


def _refuse_other_files(out: Path, digest: str) -> None:
    """Raise a RequestError if `out` holds anything but the files of an interrupted export of the same weights."""
    if out.is_dir():
        hidden = (f".{MODEL}.", f".{RECIPE}.")  # temporary files, and the lock
        files = [path.name for path in out.iterdir() if not path.name.startswith(hidden)]
        if not files:
            return
        if files == [MODEL] and read_model_file(out / MODEL).provenance.get("weights", {}).get(DIGEST) == digest:
            return
    if os.path.lexists(out):
        raise RequestError(f"{out}: exists already; choose another --out")
