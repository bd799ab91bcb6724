"""Text from outside (file names, settings, error messages), made safe for every output: terminal, CSV, Markdown."""

import csv
import io
import re
from collections.abc import Iterable

_FORMULA = ("=", "+", "-", "@")


def printable(text: object) -> str:
    """`text` with an escape such as \\x1b in place of each character that cannot be shown: control characters, which a
    terminal would obey, characters that change the direction of writing, and halves of surrogate pairs, which stand for
    bytes of a file name that are not UTF-8 and which no file can hold."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def one_line(text: object) -> str:
    """`text` printable and on one line: each run of white space becomes one space."""
    return printable(" ".join(str(text).split()))


def escape_markdown(text: str) -> str:
    """`text` so that Markdown shows it as it is, in a table cell too. Underscores inside words need no escape."""
    return re.sub(r"([\\|*`<\[\]]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", one_line(text))


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """A CSV file: floats with ten digits, None as an empty cell, text on one line.

    A spreadsheet takes text that begins with = + - or @ for a formula and runs it: an apostrophe before it prevents
    that. Numbers stay numbers, also negative ones.
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(_cell, row) for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return f"{value:.10g}"
    text = one_line(value)
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
