"""The files of a run folder, and checks of a folder that need nothing but its path: they answer at once."""

from pathlib import Path

from smoothcert.errors import RequestError

MODEL, RECIPE, STATE = "model.safetensors", "recipe.yaml", "state.pt"


def check_run_folder(folder: Path) -> None:
    """Refuse a path that is not a run folder with a model."""
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such run folder; `smoothcert train --out {folder}` makes one")
    if not (folder / MODEL).exists() and not (folder / RECIPE).exists():
        raise RequestError(f"{folder}: expected a run folder, got one without {RECIPE} and {MODEL}; give another")
    if not (folder / MODEL).exists():
        raise RequestError(
            f"{folder}: holds no {MODEL}: no epoch has finished, or it was left out; train it with --resume"
        )


def check_exists(path: Path) -> None:
    """Refuse the path of a report that does not exist."""
    if not path.exists():
        raise RequestError(
            f"{path}: no such file or folder; give a run folder or a certificates file (`smoothcert certify RUN`)"
        )
