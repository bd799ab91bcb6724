"""What the commands share: the console, options and their parsing."""

import math
from pathlib import Path
from typing import Annotated

import typer

from smoothcert.console import PlainConsole
from smoothcert.errors import RequestError

console = PlainConsole()

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Data folder.", envvar="SMOOTHCERT_DATA", show_default="a user cache folder"),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files in the folder that smoothcert did not write.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def parse_radii(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if min(values) < 0 or not all(map(math.isfinite, values)):
        raise RequestError(f"radii: expected numbers >= 0 by commas, such as 0,0.5,1.0, got {text[:60]}")
    return values
