"""The files of a run folder, and checks of its path that need no further imports and therefore answer at once."""

import shlex
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from glob import glob
from pathlib import Path
from typing import Any

from smoothcert.errors import RequestError
from smoothcert.io.compressed import exists
from smoothcert.io.files import check_regular_file
from smoothcert.io.text import did_you_mean, natural_order
from smoothcert.training.metrics import METRICS, epochs_in

MODEL, RECIPE, STATE = "model.safetensors", "recipe.yaml", "state.pt"
CERTIFICATES, ATTACKS = "certificates", "attacks"
WEIGHTS = (".pt", ".pth", ".tar", ".safetensors", ".bin", ".ckpt")
"""Endings of files in which people keep weights."""


def stored_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stored recipe, with those that earlier versions did not write; they used Nesterov momentum."""
    absent = {"nesterov": bool(fields.get("momentum", True)), "learning_rate_warm_up": 0}
    return {**fields, **{name: value for name, value in absent.items() if name not in fields}}


def runs_in(folder: Path, is_run: Callable[[Path], bool]) -> list[Path]:
    """The runs in a folder of runs, by name, numbers as numbers; `folder` itself if it is a run or holds none."""
    if not folder.is_dir() or is_run(folder):
        return [folder]
    return sorted(filter(is_run, folder.iterdir()), key=natural_order) or [folder]


def run_of_certificates(path: Path) -> Path | None:
    """The run folder whose `certificates` folder holds the file `path`; None for other files."""
    folder = path.resolve().parent
    return folder.parent if folder.name == CERTIFICATES else None


def recipe_of_certificates(path: Path) -> Path | None:
    """The recipe.yaml of the run that the certificates file `path` belongs to; None if there is none."""
    run = run_of_certificates(path)
    return run / RECIPE if run is not None and (run / RECIPE).is_file() else None


def check_run_folder(folder: Path) -> None:
    """Refuse a path that is not a run folder with a model."""
    if folder.is_file():
        weights = folder.name != MODEL and folder.suffix in WEIGHTS
        weights_hint = (
            f"give weights of your own network as --model FILE.py:function --init {folder}, or make a run of a "
            f"published checkpoint with `smoothcert import {shlex.quote(str(folder))} --sigma S --out RUN`"
        )
        hint = weights_hint if weights else f"give the folder that holds {MODEL}"
        raise RequestError(f"{folder}: expected a run folder, got a file; {hint}")
    if not folder.is_dir():
        nearby = folder.parent if folder.parent.is_dir() else folder.parent.parent
        runs = {run.name: str(run) for run in _runs_below(nearby)}
        make = f"`smoothcert train --preset NAME --out {shlex.quote(str(folder))}` makes one"
        make = make if folder.is_absolute() else f"the current folder is {Path.cwd()}; {make}"
        make = f"a network of your own is --model {shlex.quote(str(folder))}" if ".py:" in folder.name else make
        hint = did_you_mean(folder.name, (), make, [runs[name] for name in get_close_matches(folder.name, runs)])
        raise RequestError(f"{folder}: no such run folder; {hint}")
    if not (folder / MODEL).exists() and not (folder / RECIPE).exists():
        inside = ", ".join(map(str, _runs_below(folder)[:3]))
        hint = f"give one of the runs in it, such as {inside}" if inside else "give another"
        if (folder / CERTIFICATES).is_dir():
            hint = "it holds certificates only: in its place give --model FILE.py:function (or --hub NAME) and --sigma"
        raise RequestError(f"{folder}: expected a run folder, got one without {RECIPE} and {MODEL}; {hint}")
    if not (folder / MODEL).exists():
        raise RequestError(
            f"{folder}: holds no {MODEL}: no epoch has finished, or it was left out; train it with --resume, or use "
            "only its certificates (read_certificates, `smoothcert report`)"
        )


def _runs_below(folder: Path) -> list[Path]:
    """Runs in `folder`, then runs in the folders in it. Folders that disappear meanwhile are ignored."""
    found = (glob(f"{depth}/{MODEL}", root_dir=folder) for depth in ("*", "*/*"))
    files = (file for of_depth in found for file in sorted(of_depth, key=natural_order))
    return [folder / Path(file).parent for file in files]


def check_exists(path: Path) -> None:
    """Refuse the path of a report that does not exist."""
    if not path.exists():
        raise RequestError(
            f"{path}: no such file or folder; give a run folder or a certificates file (`smoothcert certify RUN`)"
        )


def check_file(path: Path, wanted: str) -> None:
    """Refuse the path of an input file that does not exist or is a folder; `wanted` says what to give instead."""
    if not path.exists():
        raise RequestError(f"{path}: no such file; give {wanted}")
    check_regular_file(path)


def refuse_file(folder: Path) -> None:
    """Refuse a folder to write to that is a file."""
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder}: expected a folder to write to, got a file; choose another --out")


def refuse_existing_run(folder: Path, trained: bool = False) -> None:
    """Refuse a folder for a new run that is a file or holds a run, unless no epoch of that run was saved.

    Without a model and other results, `state.pt` says whether an epoch was saved: `trained`.
    """
    refuse_file(folder)
    if not (folder / RECIPE).exists():
        return
    others = {path.name for path in folder.iterdir() if path.name[0] != "."} - {RECIPE, STATE, METRICS}
    # A process may end after the metrics of the first epoch, before its state is saved.
    if trained or others or epochs_in(folder / METRICS) > 1:
        raise RequestError(f"{folder}: holds a run already; continue it with --resume or choose another --out")


def split_key(path: Path) -> tuple[Path, str | None]:
    """The file and the key of FILE:KEY, which names one of several sets of weights in a checkpoint; None for FILE."""
    file, _, key = str(path).rpartition(":")
    return (Path(file), key) if file and not path.exists() and Path(file).is_file() else (path, None)


def weights_in(path: Path) -> tuple[Path, str | None]:
    """The file of the weights of a run folder, or FILE or FILE:KEY, and the key; one that does not exist is refused."""
    if path.is_dir():
        check_run_folder(path)
        path = path / MODEL
    file, key = split_key(path)
    check_file(file, "a run folder, a .safetensors file or a PyTorch checkpoint")
    return file, key


def refuse_lost_recipe(folder: Path) -> None:
    """Raise a RequestError if a folder without a recipe holds other files of a run, which would be overwritten."""
    if files := [name for name in (MODEL, STATE, METRICS) if exists(folder / name)]:
        run, target = repr(str(folder)), repr(str(folder / RECIPE))
        copy = f" (the model has it: in Python, load({run}).recipe.save(Path({target})))" if MODEL in files else ""
        raise RequestError(
            f"{folder}: holds {' and '.join(files)} but no {RECIPE}; restore {RECIPE}{copy}, or choose another --out"
        )
