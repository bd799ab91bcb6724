"""Compare every number of a written report with the numbers that its certificates give now."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from smoothcert.errors import RequestError
from smoothcert.io.files import check_regular_file
from smoothcert.io.text import one_line
from smoothcert.io.written_files import is_as_written, stored_request
from smoothcert.report.contents import Contents
from smoothcert.report.document import FIGURES, PICTURE_FORMATS, TEXTS
from smoothcert.report.figures import digest_of, digests_stored_in, figures_of
from smoothcert.report.html_gallery import Gallery, Pictures

PAGE = "report.html"
NAMES = ("report.csv", "report-seeds.csv", "report.md", "report.tex", PAGE)
"""The files that are compared word by word; of pictures, a digest of what they show is."""
MOST_SHOWN = 20
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
# What differs between versions and days, and figures, which are compared apart.
_NO_NUMBERS = re.compile(
    r"<style>.*?</style>|<script.*?</script>|<section id=\"figures\">.*?</section>| <a href=\"#figures\">Figures</a>|"
    r"'sha256-[^']*'|Written by smoothcert \S+|<span>\d{1,2} \w+ \d{4}</span></p>",
    re.DOTALL,
)
_TAG = re.compile(r"<[^>]*>")
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
    written = {name: _text(folder / name) for name in NAMES if (folder / name).exists()}
    if not written and not drawn:
        raise RequestError(f"{folder}: expected one of {', '.join(NAMES)}, got none; give the folder of a report")
    if PAGE in written:
        contents = replace(contents, gallery=_without_pictures(written[PAGE]))
    kinds = [kind for kind in TEXTS if any(name.endswith(f".{kind}") for name in written)]
    expected = {name: text or "" for kind in kinds for name, text in TEXTS[kind](contents).items()}
    found: list[str] = []
    for name, text in written.items():
        compare = _COMPARISONS.get(name.rpartition(".")[2], _line_differences)
        found += [f"{name}, {difference}" for difference in compare(text, expected[name])]
    return [*found, *_picture_differences(folder, contents, drawn)]


def _text(path: Path) -> str:
    check_regular_file(path)
    return path.read_text(encoding="utf-8", errors="replace")


def _picture_differences(folder: Path, contents: Contents, files: Sequence[str]) -> Iterator[str]:
    """Pictures that were changed after they were written, or that show other numbers than the figure drawn now.

    Reports of earlier versions do not record what their figures show; of these only changes of the files are found.
    """
    shown = digests_stored_in(folder)
    draw = figures_of(contents) if files else {}
    digests = {}
    for file in files:
        name = file.rpartition(".")[0]
        if not is_as_written(folder, file):
            yield f"{file}: is not the file that smoothcert wrote"
        if name not in shown:
            continue
        if name not in digests:
            figure = draw[name]()
            digests[name] = None if figure is None else digest_of(figure)
        if digests[name] != shown[name]:
            yield f"{file}: shows other numbers than the certificates give"


def _without_pictures(page: str) -> Gallery:
    """The names of the classes as the page has them: they come with the images, which need not be on this machine."""
    try:
        names = json.loads(_DATA.findall(page)[0])["gallery"]["class_names"]
        known = {str(data): tuple(map(str, texts)) for data, texts in names.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        known = {}
    return lambda dataset, split, indices: Pictures({}, {}, known.get(dataset, ()))


def _page_differences(written: str, expected: str) -> Iterator[str]:
    """The curves and outcomes that the page draws, then its words and tables."""
    try:
        theirs, ours = (_page_data(page) for page in (written, expected))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        yield "the data of the curves: missing or damaged"
    else:
        yield from _data_differences(theirs, ours, "data")
    texts = ("\n".join(filter(None, _NO_NUMBERS.sub("", page).splitlines())) for page in (written, expected))
    yield from _line_differences(*texts, numbered=False)


def _page_data(page: str) -> dict[str, Any]:
    """The data of the curves and the gallery, but for the pictures and the reason why there are none."""
    data = json.loads(_DATA.findall(page)[0])
    del data["gallery"]["pictures"]
    for run in data["gallery"]["runs"]:
        del run["note"]
        for image in (image for kind in run["kinds"] for image in kind["images"]):
            del image["picture"]
    return dict(data)


def _data_differences(written: object, expected: object, place: str) -> Iterator[str]:
    if isinstance(written, dict) and isinstance(expected, dict) and written.keys() == expected.keys():
        for key, value in expected.items():
            yield from _data_differences(written[key], value, f"{place}.{key}")
    elif isinstance(written, list) and isinstance(expected, list) and len(written) == len(expected):
        for i, (theirs, ours) in enumerate(zip(written, expected, strict=True)):
            yield from _data_differences(theirs, ours, f"{place}[{i}]")
    elif written != expected:
        yield f"{place}: is {_shown(str(written))}, the certificates give {_shown(str(expected))}"


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


def _line_differences(written: str, expected: str, *, numbered: bool = True) -> Iterator[str]:
    """Line by line: each number that differs, or the line if its words do. Lines have their numbers, or their text."""
    lines = zip_longest(expected.splitlines(), written.splitlines(), fillvalue=None)
    for number, (line, other) in enumerate(lines, start=1):
        if line == other:
            continue
        place = f"line {number}" if numbered else f"'{_shown(' '.join(_TAG.sub(' ', other or line or '').split()))}'"
        if line is None or other is None:
            yield f"{place}: {'not in the certificates' if line is None else 'missing'}"
            continue
        ours, theirs = _NUMBER.findall(line), _NUMBER.findall(other)
        if _NUMBER.sub("#", line) != _NUMBER.sub("#", other):
            yield f"{place}: is '{one_line(other)[:80]}', the certificates give '{one_line(line)[:80]}'"
            continue
        for right, wrong in zip(ours, theirs, strict=True):
            if right != wrong:
                yield f"{place}: is {wrong}, the certificates give {right}"


def _shown(text: str | None) -> str:
    return one_line(text)[:60] if text else "empty"


_COMPARISONS: Mapping[str, Callable[[str, str], Iterator[str]]] = {"csv": _csv_differences, "html": _page_differences}
