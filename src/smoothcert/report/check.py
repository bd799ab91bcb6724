"""Compare every number of a written report with the numbers that its certificates give now."""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from smoothcert.errors import RequestError
from smoothcert.io.files import check_regular_file
from smoothcert.io.text import one_line
from smoothcert.io.written_files import stored_request
from smoothcert.report.contents import Contents
from smoothcert.report.document import FIGURES, PICTURE_FORMATS, TEXTS

CHECKED = ("csv", "md", "tex")
"""The formats that are compared; the page has the same tables, and figures depend on the drawing library."""
MOST_SHOWN = 20
_NUMBER = re.compile(r"[+−-]?\d[\d,]*(?:\.\d+)?")


def request_of(folder: Path) -> Mapping[str, object]:
    """What the report in `folder` was asked for; a RequestError if that is not stored."""
    if not folder.is_dir():
        raise RequestError(f"{folder}: expected the folder of a report, got none; give one that smoothcert wrote")
    request = stored_request(folder)
    if request is None:
        raise RequestError(
            f"{folder}: expected a report that stores its request, got none; give its runs and options too: "
            f"`smoothcert report RUNS --check {folder}`"
        )
    return request


def differing_numbers(folder: Path, contents: Contents) -> list[str]:
    """A line for each number (or other text) of the files in `folder` that `contents` contradict; [] if all agree.

    Files that the folder lacks are not compared; a folder with none of them is a RequestError.
    """
    # The Markdown page shows the figures that were drawn with it.
    drawn = [f"{name}.{kind}" for name in FIGURES for kind in PICTURE_FORMATS if (folder / f"{name}.{kind}").exists()]
    contents = replace(contents, pictures=drawn)
    expected = {name: text for kind in CHECKED for name, text in TEXTS[kind](contents).items()}
    present = [name for name in expected if (folder / name).exists()]
    if not present:
        raise RequestError(f"{folder}: expected one of {', '.join(expected)}, got none; give the folder of a report")
    found: list[str] = []
    for name in present:
        check_regular_file(folder / name)
        written = (folder / name).read_text(encoding="utf-8", errors="replace")
        compare = _csv_differences if name.endswith(".csv") else _line_differences
        found += [f"{name}, {difference}" for difference in compare(written, expected[name] or "")]
    return found


def _csv_differences(written: str, expected: str) -> Iterator[str]:
    """Cell by cell: row and column of each that differs."""
    ours, theirs = (list(csv.reader(io.StringIO(text))) for text in (expected, written))
    heads = ours[0] if ours else [], theirs[0] if theirs else []
    for missing in [key for key in heads[0] if key not in heads[1]]:
        yield f"column {missing}: missing"
    for extra in [key for key in heads[1] if key not in heads[0]]:
        yield f"column {extra}: not in the certificates"
    shared = [key for key in heads[0] if key in heads[1]]
    for number, (row, other) in enumerate(zip_longest(ours[1:], theirs[1:], fillvalue=None), start=1):
        if row is None or other is None:
            yield f"row {number}: {'not in the certificates' if row is None else 'missing'}"
            continue
        values, found = (dict(zip(head, cells, strict=False)) for head, cells in zip(heads, (row, other), strict=True))
        name = values.get("name") or f"row {number}"
        for key in shared:
            if values.get(key) != found.get(key):
                yield f"{name}, {key}: is {_shown(found.get(key))}, the certificates give {_shown(values.get(key))}"


def _line_differences(written: str, expected: str) -> Iterator[str]:
    """Line by line: each number that differs, or the line if its words do."""
    lines = zip_longest(expected.splitlines(), written.splitlines(), fillvalue=None)
    for number, (line, other) in enumerate(lines, start=1):
        if line == other:
            continue
        if line is None or other is None:
            yield f"line {number}: {'not in the certificates' if line is None else 'missing'}"
            continue
        ours, theirs = _NUMBER.findall(line), _NUMBER.findall(other)
        if _NUMBER.sub("#", line) != _NUMBER.sub("#", other):
            yield f"line {number}: is '{one_line(other)[:80]}', the certificates give '{one_line(line)[:80]}'"
            continue
        for right, wrong in zip(ours, theirs, strict=True):
            if right != wrong:
                yield f"line {number}: is {wrong}, the certificates give {right}"


def _shown(text: str | None) -> str:
    return one_line(text)[:60] if text else "empty"
