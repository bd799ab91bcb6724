"""Where an analysis goes: a figure in the formats asked for, and its numbers as CSV."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from smoothcert.errors import RequestError, write_error
from smoothcert.files import write_text_atomically
from smoothcert.palette import PICTURE_FORMATS, save_figure


def parse_formats(text: str) -> list[str]:
    """Picture formats by commas, such as png,pdf; anything else is refused."""
    formats = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [kind for kind in formats if kind not in PICTURE_FORMATS]:
        raise RequestError(f"format: expected some of {', '.join(PICTURE_FORMATS)} by commas, got {unknown[0]!r}")
    return formats


def write_analysis(
    out: Path, name: str, figure: Figure | None, formats: Sequence[str], texts: Mapping[str, str]
) -> list[Path]:
    """Write `name`.png (and so on) and `name`.csv, .md, as `texts` has them, into `out`; the paths, numbers first."""
    written = [out / f"{name}.{kind}" for kind in texts]
    pictures = [out / f"{name}.{kind}" for kind in formats] if figure is not None else []
    try:
        for path, text in zip(written, texts.values(), strict=True):
            write_text_atomically(path, text.encode("utf-8", "backslashreplace").decode())
        if figure is not None:
            save_figure(figure, pictures)
    except OSError as error:
        raise write_error(out, error) from error
    return [*written, *pictures]
