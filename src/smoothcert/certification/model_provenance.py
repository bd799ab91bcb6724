"""How the model of a run was trained (versions, device, precision), from the files of its folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from smoothcert.errors import WorkError
from smoothcert.io.compressed import result_files
from smoothcert.io.results import read_settings, settings_path
from smoothcert.training.run_folder import CERTIFICATES, MODEL

CHANGES = {
    "init": "trained from given weights",
    "batch_norm": "batch norm adapted to noise after training",
    "earlier_code": "trained with code that changed between its epochs",
}
"""Entries in the provenance of a model whose weights do not follow from its recipe alone; rounding aside."""


def changes_of(provenance: Mapping[str, Any], epochs: object) -> list[str]:
    """Return how the certified weights differ from those that the recipe, with its `epochs`, gives."""
    model = provenance.get("model")
    changes = [text for key, text in CHANGES.items() if isinstance(model, dict) and model.get(key)]
    return [*changes, *unfinished(provenance, epochs)]


def unfinished(provenance: Mapping[str, Any], epochs: object) -> list[str]:
    """Return that the certified weights are those before the last of the `epochs` of the recipe, if they are."""
    epoch = provenance.get("epoch")
    early = isinstance(epoch, int) and isinstance(epochs, int) and epoch < epochs
    return [f"certified after {epoch} of its {epochs} epochs"] if early else []


def model_provenance(folder: Path) -> dict[str, Any]:
    """Return the provenance in the metadata of the model's file, or in certificates of the model if there is no file.

    It is {} if nothing is recorded. The weights are not read. A damaged model is a WorkError.
    """
    path = folder / MODEL
    if path.exists():
        try:
            with safe_open(path, framework="numpy") as file:
                return dict(json.loads((file.metadata() or {})["smoothcert"])["provenance"])
        except (SafetensorError, KeyError, ValueError, TypeError, RecursionError, OSError) as error:
            raise WorkError(f"{path}: damaged or not a smoothcert model; restore it, or leave this run out") from error
    files = [path for path in result_files(folder / CERTIFICATES) if settings_path(path).exists()]
    recorded = (read_settings(path)["provenance"].get("model") for path in files)
    return next((dict(model) for model in recorded if isinstance(model, dict)), {})
