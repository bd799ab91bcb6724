"""The console that commands print to: every text is one printable line."""

import codecs
import io
import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from smoothcert.io.text import one_line


def leads() -> bool:
    """Say whether this is the only process, or the first of those that torchrun has started: the one that prints."""
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


class PlainConsole(Console):
    """A console that shows each text, also in a table, as one printable line.

    Texts contain names of files, runs and classes from other people: markup, emoji codes and escape sequences in them
    do not reach the terminal.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print strings in one colour and without line breaks, as commands in them are copied; tables fit the width."""
        as_is = {"soft_wrap": True, "highlight": False} if all(isinstance(each, str) for each in objects) else {}
        super().print(*objects, **{**as_is, **options})

    def note(self, text: str, kind: str = "note") -> None:
        """Print what a user may want to know, in the first of several processes only."""
        if leads():
            self.print(f"{kind}: {text}", style="yellow")

    def warn(self, text: str) -> None:
        """Print what a user should change, on standard error if this console is quiet."""
        (PlainConsole(stderr=True) if self.quiet else self).note(text, "warning")

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(one_line(text), **options)


class PlainColumn(TextColumn):
    """A column of a progress bar that shows its text as one printable line."""

    def __init__(self, text_format: str) -> None:
        super().__init__(text_format, markup=False)

    def render(self, task: Task) -> Text:
        return Text(one_line(super().render(task).plain))


def terminal_bar(*columns: ProgressColumn, shown: bool = True, transient: bool = False) -> Progress:
    """A progress bar with `columns` on stderr, if that is a terminal."""
    console = PlainConsole(stderr=True)
    return Progress(
        *(PlainColumn("{task.description}"), BarColumn(), *columns),
        console=console,
        transient=transient,
        disable=not (shown and console.is_terminal),
    )


SIMILAR_CHARACTERS = str.maketrans({"–": "-", "—": "-", "−": "-", "×": "x", "σ": "s", "α": "a", "…": "."})
"""What characters become that a terminal cannot show: without its sign, a number would be another one."""


def replace_characters(error: UnicodeError) -> tuple[str, int]:
    """Handle an encoding error: replace what the terminal cannot show by one similar character, or by `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end].translate(SIMILAR_CHARACTERS)
    return "".join(c if c.isascii() else "?" for c in characters), error.end


codecs.register_error("smoothcert", replace_characters)


def accept_any_terminal() -> None:
    """Print to terminals that are not UTF-8: rich draws tables in ASCII there, and other characters are replaced."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="smoothcert")
