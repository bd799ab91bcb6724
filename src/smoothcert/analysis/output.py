"""The files of an analysis: a figure in the requested formats, and its numbers as CSV."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smoothcert.errors import RequestError
from smoothcert.io.written_files import refuse_foreign_files, write_files
from smoothcert.report.figures import PICTURE_FORMATS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def parse_formats(text: str) -> list[str]:
    """Comma-separated picture formats such as png,pdf; any other format is refused."""
    formats = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [kind for kind in formats if kind not in PICTURE_FORMATS]:
        *others, last = PICTURE_FORMATS
        known = f"{', '.join(others)} or {last}"
        raise RequestError(f"format: expected {known}, or several as in png,pdf, got {unknown[0]!r}; choose from these")
    return formats


@dataclass(frozen=True)
class Output:
    """Where an analysis writes: `name`.csv, `name`.png and so on in `folder`.

    Files in `folder` that smoothcert did not write are refused, unless `force` replaces them.
    """

    folder: Path
    name: str
    formats: Sequence[str] = ()
    """Of the figure."""
    force: bool = False

    def check(self, texts: Sequence[str] = ("csv",)) -> "Output":
        """Refuse foreign files before the work, which may take hours. `texts` are the formats of the numbers."""
        refuse_foreign_files(self.folder, [f"{self.name}.{kind}" for kind in (*texts, *self.formats)], self.force)
        return self

    def write(self, texts: Mapping[str, str], draw: "Callable[[], Figure]") -> list[Path]:
        """Write the texts (format -> content) and the figure; the paths, numbers first."""
        from smoothcert.report.style import pictures_of

        files = {f"{self.name}.{kind}": text.encode("utf-8", "backslashreplace") for kind, text in texts.items()}
        return write_files(self.folder, {**files, **pictures_of(self.name, draw, self.formats)}, self.force)
