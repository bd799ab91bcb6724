"""Compare every number of a written report with the numbers that its certificates give now."""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from os.path import commonprefix
from pathlib import Path

from smoothcert.errors import RequestError
from smoothcert.io.files import check_regular_file
from smoothcert.io.text import one_line
from smoothcert.io.written_files import is_as_written, stored_request
from smoothcert.report.contents import Contents
from smoothcert.report.document import TEXT_FILES, TEXTS
from smoothcert.report.figures import FIGURES, PICTURE_FORMATS, digest_of, digests_stored_in, figures_of

PAGE, MARKDOWN = "report.html", "report.md"
MOST_SHOWN = 20
# What differs between versions and days, figures, which are compared apart, and the pictures of the gallery.
_NO_NUMBERS = re.compile(
    r"<style>.*?</style>|<script type=\"module\">.*?</script>|<section id=\"figures\">.*?</section>|"
    r" <a href=\"#figures\">Figures</a>|'sha256-[^']*'|Written by smoothcert \S+|<span>\d{1,2} \w+ \d{4}</span></p>|"
    r'"pictures":\[[^]]*\]|"picture":(?:null|\d+)|"note":(?:null|"(?:[^"\\]|\\.)*")',
    re.DOTALL,
)
_DATA = re.compile(r"<script type=\"application/json\".*?</script>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_NUMBER = re.compile(r"[+−-]?\d+(?:,\d{3})*(?:\.\d+)?")


def request_for(folder: Path, runs: Iterable[Path], options: Mapping[str, object]) -> dict[str, object]:
    """What a report of `runs` in `folder` stores for `request_of`: paths from there, and the used `options`."""
    used = {key: value for key, value in options.items() if value}
    return {"runs": [_seen_from(folder, run) for run in runs], **used}


def _seen_from(folder: Path, run: Path) -> str:
    """`run` with slashes; unchanged where there is no way from `folder` to it (another drive of Windows)."""
    try:
        return Path(os.path.relpath(run, folder)).as_posix()
    except ValueError:
        return str(run)


def request_of(folder: Path) -> Mapping[str, object]:
    """What the report in `folder` was asked for; a RequestError if that is not stored."""
    if not folder.is_dir():
        raise RequestError(f"{folder}: expected the folder of a report, got none; give one that smoothcert wrote")
    request = stored_request(folder)
    if request is None:
        if not any((folder / name).exists() for name in TEXT_FILES):
            raise _no_report(folder)
        raise RequestError(
            f"{folder}: this report does not store its request, so it can be checked only if you give its runs and "
            f"options: `smoothcert report RUNS [OPTIONS] --check {folder}`"
        )
    return request


def _no_report(folder: Path) -> RequestError:
    return RequestError(f"{folder}: expected one of {', '.join(TEXT_FILES)}, got none; give the folder of a report")


def differing_numbers(folder: Path, contents: Contents) -> list[str]:
    """A line for each number (or other text) of the files in `folder` that `contents` contradict; [] if all agree.

    Files that the folder lacks are not compared; a folder with none of them is a RequestError.
    """
    drawn = [f"{name}.{kind}" for name in FIGURES for kind in PICTURE_FORMATS if (folder / f"{name}.{kind}").exists()]
    found_files = [folder / name for name in TEXT_FILES if (folder / name).exists()]
    for path in found_files:
        check_regular_file(path)
    written = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in found_files}
    if not written and not drawn:
        raise _no_report(folder)
    # The Markdown page shows the figures that were drawn with it, which need not be all in the folder.
    shown = [file for file in drawn if f"]({file})" in written.get(MARKDOWN, "")]
    contents = replace(contents, pictures=dict.fromkeys(shown, b""))
    kinds = [kind for kind in TEXTS if any(name.endswith(f".{kind}") for name in written)]
    expected = {name: text or "" for kind in kinds for name, text in TEXTS[kind](contents).items()}
    differences: list[str] = []
    for name, text in written.items():
        theirs, ours = text, expected[name]
        if name == PAGE:
            theirs, ours = _numbers_of_page(theirs), _numbers_of_page(ours)
        elif name.endswith(".csv"):  # the commas in numbers are not those between cells
            theirs, ours = theirs.replace(",", " , "), ours.replace(",", " , ")
        differences += _line_differences(theirs, ours, name)
    return [*differences, *_picture_differences(folder, contents, drawn)]


def _numbers_of_page(page: str) -> str:
    """The page without what `_NO_NUMBERS` matches; the commas between the numbers of its data are not those in one."""
    page = _DATA.sub(lambda data: data[0].replace(",", ", "), _NO_NUMBERS.sub("", page))
    return "\n".join(filter(None, page.splitlines()))


def _picture_differences(folder: Path, contents: Contents, files: Sequence[str]) -> Iterator[str]:
    """Pictures that were changed after they were written, or that show other numbers than the figure drawn now.

    Reports of earlier versions do not record what their figures show; of these only changes of the files are found.
    """
    shown = digests_stored_in(folder)
    names = {file: file.rpartition(".")[0] for file in files}
    draw = figures_of(contents) if files else {}
    figures = {name: draw[name]() for name in dict.fromkeys(names.values()) if name in shown}
    digests = {name: None if figure is None else digest_of(figure) for name, figure in figures.items()}
    for file, name in names.items():
        if not is_as_written(folder, file):
            yield f"{file}: is not the file that smoothcert wrote"
        if name in shown and digests[name] != shown[name]:
            yield f"{file}: shows other numbers than the certificates give"


def _line_differences(written: str, expected: str, name: str) -> Iterator[str]:
    """A line for each line that one text lacks, each number that differs, or the whole line if its words differ.

    A line of a page is named by its words, for its number changes with the style.
    """
    lines = zip_longest(written.splitlines(), expected.splitlines())
    for number, (theirs, ours) in enumerate(lines, start=1):
        if theirs == ours:
            continue
        words = " ".join(_TAG.sub(" ", theirs or ours or "").split())[:60]
        place = f"{name}, '{words}'" if name == PAGE else f"{name}, line {number}"
        if theirs is None or ours is None:
            yield f"{place}: {'not in the certificates' if ours is None else 'missing'}"
            continue
        theirs, ours = one_line(theirs), one_line(ours)
        start = max(0, len(commonprefix([theirs, ours])) - 40)  # noqa: RUF071 - by letters, not by folders
        pairs = [(f"'{theirs[start:][:80]}'", f"'{ours[start:][:80]}'")]
        if _NUMBER.sub("#", theirs) == _NUMBER.sub("#", ours):
            pairs = list(zip(_NUMBER.findall(theirs), _NUMBER.findall(ours), strict=True))
        for wrong, right in pairs:
            if not _same(wrong, right):
                yield f"{place}: is {wrong}, the certificates give {right}"


def _same(written: str, expected: str) -> bool:
    """Whether two texts are equal, or numbers that differ only in the last of ten digits, as between processors.

    Whole numbers are counts, which are exact.
    """
    if written == expected:
        return True
    if "." not in written + expected or not (_NUMBER.fullmatch(written) and _NUMBER.fullmatch(expected)):
        return False
    theirs, ours = (float(text.replace(",", "").replace("−", "-")) for text in (written, expected))
    return math.isclose(theirs, ours, rel_tol=1e-9)
