"""How the model of a run came about (versions, device, precision), as the files of the run folder tell."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from smoothcert.errors import WorkError
from smoothcert.io.results import read_settings, settings_path
from smoothcert.training.run_folder import MODEL


def model_provenance(folder: Path) -> dict[str, Any]:
    """From the metadata of the model's file, whose weights are not read; without the file, from certificates of it; {}
    where nothing is told. A damaged model is a WorkError."""
    path = folder / MODEL
    if path.exists():
        try:
            with safe_open(path, framework="numpy") as file:
                return dict(json.loads((file.metadata() or {})["smoothcert"])["provenance"])
        except (SafetensorError, KeyError, ValueError, TypeError, RecursionError, OSError) as error:
            raise WorkError(f"{path}: damaged or not a smoothcert model; restore it, or leave this run out") from error
    files = [path for path in sorted((folder / "certificates").glob("*.tsv")) if settings_path(path).exists()]
    told = (read_settings(path)["provenance"].get("model") for path in files)
    return next((dict(found) for found in told if isinstance(found, dict)), {})
