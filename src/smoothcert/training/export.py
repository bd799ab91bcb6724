"""Export the model of a run with weights in float16: half the size, for publishing. Loading casts them to float32."""

from dataclasses import replace
from pathlib import Path

import torch

from smoothcert.errors import RequestError
from smoothcert.training.checkpoint import (
    ORIGINAL,
    Run,
    load_run,
    refuse_existing_folder,
    tensors_digest,
    write_new_run,
)


def export_run(folder: str | Path, out: str | Path, *, code: str | None = None) -> Run:
    """Write the recipe and the model of the run in `folder` into the new folder `out`, and return the exported run.

    The rounded weights are another network: certificates of the original do not hold for it. Its file records the
    digest of the original weights and the largest change of a weight. A run whose network is a user's own code is
    exported if `code` names it.
    """
    run = load_run(Path(folder), code)
    out = Path(out)
    refuse_existing_folder(out)
    weights = run.model.state_dict()
    # Weights of convolutions and linear layers; biases, batch norm and the mean and std of the input stay float32.
    parameters = run.model.named_parameters(remove_duplicate=False)
    rounded = [name for name, tensor in parameters if tensor.dtype == torch.float32 and tensor.ndim >= 2]
    stored = {**weights, **{name: weights[name].half() for name in rounded}}
    if too_large := [name for name, tensor in stored.items() if not bool(tensor.isfinite().all())]:
        raise RequestError(f"{folder}: expected weights that float16 can hold, got larger ones in {too_large[0]}")
    change = max(float((weights[name] - stored[name].float()).abs().max()) for name in weights if weights[name].numel())
    rounding = {
        "stored": "float16, cast to float32 when loaded; biases, batch norm and normalisation in float32",
        "largest_change": change,
        ORIGINAL: tensors_digest(weights),
    }
    write_new_run(replace(run, folder=out, provenance={**run.provenance, "weights": rounding}), stored)
    return load_run(out, code)
