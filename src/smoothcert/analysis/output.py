"""Where an analysis goes: a figure in the formats asked for, and its numbers as CSV."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from smoothcert.errors import RequestError, write_error
from smoothcert.io.written_files import write_files
from smoothcert.report.style import PICTURE_FORMATS, save_figure


def parse_formats(text: str) -> list[str]:
    """Picture formats, separated by commas, such as png,pdf; anything else is refused."""
    formats = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [kind for kind in formats if kind not in PICTURE_FORMATS]:
        raise RequestError(f"format: expected some of {', '.join(PICTURE_FORMATS)} by commas, got {unknown[0]!r}")
    return formats


def analysis_files(name: str, formats: Sequence[str], texts: Iterable[str] = ("csv",)) -> list[str]:
    """The names of the files of an analysis, numbers first."""
    return [f"{name}.{kind}" for kind in (*texts, *formats)]


def write_analysis(
    out: Path,
    name: str,
    figure: Figure | None,
    formats: Sequence[str],
    texts: Mapping[str, str],
    force: bool = False,
) -> list[Path]:
    """Write `name`.png (and so on) and `name`.csv, .md, as `texts` has them, into `out`; the paths, numbers first.

    Files in `out` that smoothcert did not write are refused, unless `force` replaces them.
    """
    files = {f"{name}.{kind}": text.encode("utf-8", "backslashreplace") for kind, text in texts.items()}
    try:
        with tempfile.TemporaryDirectory(prefix="smoothcert-") as folder:
            pictures = [Path(folder) / f"{name}.{kind}" for kind in formats] if figure is not None else []
            if figure is not None:
                save_figure(figure, pictures)
            files |= {path.name: path.read_bytes() for path in pictures}
    except OSError as error:
        raise write_error(out, error) from error
    return write_files(out, files, force)
