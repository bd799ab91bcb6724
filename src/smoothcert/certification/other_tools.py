"""Certificates files of other tools: the six columns of the field, with further columns or a running `correct`."""

import re

NEEDED = ("idx", "label", "predict", "radius")
SIX = (*NEEDED, "correct", "time")


def header_columns(line: bytes) -> list[str] | None:
    """The names of the columns if `line` is the header of a table of certificates, separated by tabs, commas or
    spaces; else None."""
    text = line.decode("utf-8", "replace").strip("\ufeff\r\n ")
    names = [name.strip().lower() for name in re.split(_separator(text), text)]
    return names if all(name in names for name in NEEDED) and len(set(names)) == len(names) else None


def with_six_columns(content: bytes) -> bytes:
    """The table in `content` with the six columns of the field, separated by tabs; any other content unchanged.

    Further columns are dropped. `correct` is computed from label and prediction: some tools write how many images were
    correct so far. A missing time is 0. Lines keep their number; a line that is not a row is left as it is.
    """
    header, _, rest = content.partition(b"\n")
    names = header_columns(header)
    if names is None or (tuple(names[:6]) == SIX and names[6:] == ["n0", "n", "count", "votes"]):
        return content
    separator = _separator(header.decode("utf-8", "replace"))
    lines = [_row(line, names, separator) for line in rest.decode("utf-8", "surrogateescape").split("\n")]
    return "\n".join(["\t".join(SIX), *lines]).encode("utf-8", "surrogateescape")


def _separator(header: str) -> str:
    """As a regular expression."""
    return "\t" if "\t" in header else "," if "," in header else r"\s+"


def _row(line: str, names: list[str], separator: str) -> str:
    cells = re.split(separator, line.strip("\r") if separator == "\t" else line.strip())
    if len(cells) != len(names):
        return line
    row = {name: cell.strip() for name, cell in zip(names, cells, strict=True)}
    correct = int(row["label"] == row["predict"])
    return "\t".join([*(row[name] for name in NEEDED), str(correct), row.get("time", "0")])
