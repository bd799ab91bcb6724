"""Certificates files of other tools: the six columns of the field, with further columns or a running `correct`."""

import codecs
import csv
import re

from smoothcert.certification.columns import COLUMNS, FIELD_COLUMNS

NEEDED = FIELD_COLUMNS[:4]


def with_six_columns(content: bytes) -> bytes:
    """The table in `content` with the six columns of the field, separated by tabs; any other content unchanged.

    Its columns may be separated by tabs, semicolons, commas or spaces. Further columns are dropped. `correct` is
    computed from label and prediction: some tools write how many images were correct so far. A missing time is 0.
    Lines keep their number; a line that is not a row is left as it is. A file of smoothcert is unchanged, unless a
    spreadsheet saved it as CSV.
    """
    header, _, rest = content.partition(b"\n")
    text = header.decode("utf-8", "replace").strip("\ufeff\r\n ")
    separator = next((mark for mark in "\t;," if mark in text), " ")
    names = [name.strip().lower() for name in _cells(text, separator)]
    is_table = all(name in names for name in NEEDED) and len(set(names)) == len(names)
    complete = tuple(names) == COLUMNS
    if not is_table or (complete and separator == "\t" and not header.startswith(codecs.BOM_UTF8)):
        return content
    lines = [_row(line, names, separator) for line in rest.decode("utf-8", "surrogateescape").split("\n")]
    return "\n".join(["\t".join(FIELD_COLUMNS), *lines]).encode("utf-8", "surrogateescape")


def _cells(line: str, separator: str) -> list[str]:
    """The cells of `line`, without quotation marks around them; several spaces are one separator."""
    if separator == " ":
        return line.split()
    try:
        return next(csv.reader([line.strip("\r\n")], delimiter=separator), [])
    except csv.Error:  # a cell that is longer than any of a table
        return []


def _row(line: str, names: list[str], separator: str) -> str:
    cells = _cells(line, separator)
    if len(cells) != len(names):
        return line
    if separator == ";":  # of a spreadsheet in a language that writes 0,951
        cells = [re.sub(r"(?<=\d),(?=\d)", ".", cell) for cell in cells]
    row = {name: cell.strip() for name, cell in zip(names, cells, strict=True)}
    correct = int(row["label"] == row["predict"])
    return "\t".join([*(row[name] for name in NEEDED), str(correct), row.get("time", "0")])
