"""The console, the options and the checks that commands share."""

import math
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from smoothcert.errors import RequestError
from smoothcert.io.console import PlainConsole
from smoothcert.io.text import printable
from smoothcert.training.choices import Bound as Bound
from smoothcert.training.choices import Compiling as Compiling
from smoothcert.training.choices import InputLayer as InputLayer
from smoothcert.training.choices import NoiseName as NoiseName

console = PlainConsole()

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Data folder.", envvar="SMOOTHCERT_DATA", show_default="a user cache folder"),
]
Classes = Annotated[
    Path | None,
    typer.Option("--classes", help="Text file: one class name per line, in the order of the model's outputs."),
]
Denoiser = Annotated[
    Path | None,
    typer.Option("--denoiser", help="Denoiser in front: a folder of train-denoiser, or of a diffusers UNet2DModel."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files in the folder that smoothcert did not write.")]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to compute.")]


def command_line(*words: object) -> str:
    """Return a smoothcert command, quoted for a shell."""
    return shlex.join(["smoothcert", *map(str, words)])


def check_dataset(name: str) -> None:
    """Refuse a path of user data that does not exist, before torch is imported."""
    kind, _, path = name.partition(":")
    wanted = {"folder": "a folder", "npz": "a file"}.get(kind)
    if wanted and path and not path.startswith("~") and not Path(path).exists():
        raise RequestError(f"{name}: expected {wanted}, got none; give a path that exists")


def check_name(name: str) -> None:
    """Refuse a --name that is not the plain name of a file."""
    plain = name.isprintable() and Path(name).name == name and "\\" not in name
    if not name or not plain or name[0] in ".-":
        raise RequestError(
            f"--name: expected a file's name without folders, control characters and a leading dot or dash, "
            f"got '{printable(name)}'; choose another"
        )


def parse_radii(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if min(values) < 0 or not all(map(math.isfinite, values)):
        raise RequestError(f"radii: expected numbers >= 0, separated by commas, such as 0,0.5,1.0, got {text[:60]}")
    return values
