"""The certificate record and its file: append, read, resume.

A certificates file is a TSV whose first six columns are those of the field's tools
(`idx label predict radius correct time`), followed by `n0 n count votes`. A JSON file beside it says what was
certified and how. Votes are stored, so any bound, alpha or table can be recomputed without a forward pass.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from smoothcert.errors import RequestError, WorkError
from smoothcert.files import write_text_atomically
from smoothcert.result_file import (
    ResultWriter,
    differing_settings,
    read_settings,
    settings_path,
    write_settings,
)

ABSTAIN = -1
FIELD_COLUMNS = ("idx", "label", "predict", "radius", "correct", "time")
COLUMNS = (*FIELD_COLUMNS, "n0", "n", "count", "votes")
HEADER = "\t".join(COLUMNS) + "\n"


@dataclass(frozen=True, slots=True)
class Certificate:
    """With probability at least 1 - alpha over the sampling, g(x') = predict for all ||x' - x|| < radius.

    `predict` is ABSTAIN and `radius` 0 where nothing could be shown. `count` of the `n` fresh votes went to the
    class that the first `n0` votes had chosen; `votes` are all n votes as (class, count), largest count first.
    """

    predict: int
    radius: float
    n0: int
    n: int
    count: int
    votes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CertifiedImage:
    """One row of a certificates file. Files of other tools have no votes: then `certificate.votes` is empty, n is 0."""

    index: int
    label: int
    certificate: Certificate
    seconds: float

    @property
    def correct(self) -> bool:
        return self.certificate.predict == self.label

    @property
    def radius_if_correct(self) -> float:
        """The radius that counts towards ACR and certified accuracy: 0 where wrong or abstained."""
        return self.certificate.radius if self.correct else 0.0


@dataclass(frozen=True, slots=True)
class CertificatesFile:
    """All rows of a file, in file order, and the settings beside it ({} when there is no JSON file)."""

    path: Path
    rows: tuple[CertifiedImage, ...]
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    torn: bool = False
    """Whether a last row was left out that had not been written to its end."""


def format_row(row: CertifiedImage) -> str:
    """One line of the file, newline included. Floats are written with repr, so reading gives the same number back."""
    c = row.certificate
    votes = ",".join(f"{k}:{v}" for k, v in c.votes)
    time = timedelta(seconds=round(row.seconds, 6))
    cells = (row.index, row.label, c.predict, repr(c.radius), int(row.correct), time, c.n0, c.n, c.count, votes)
    return "\t".join(str(cell) for cell in cells) + "\n"


def _parse_seconds(text: str) -> float:
    """Seconds from `12.5` or from Python's timedelta text `[D day[s], ]H:MM:SS[.ffffff]`."""
    days, _, clock = text.rpartition(",")
    seconds = 86400.0 * int(days.split()[0]) if days else 0.0
    for part, unit in zip(reversed(clock.strip().split(":")), (1, 60, 3600), strict=False):
        seconds += float(part) * unit
    return seconds


def parse_row(line: str) -> CertifiedImage:
    """The inverse of `format_row`; six columns are enough. Raises ValueError when the line is not a row."""
    cells = line.rstrip("\r\n").split("\t")
    if len(cells) not in (len(FIELD_COLUMNS), len(COLUMNS)):
        raise ValueError(f"expected {len(FIELD_COLUMNS)} or {len(COLUMNS)} columns, got {len(cells)}")
    index, label, predict, radius = int(cells[0]), int(cells[1]), int(cells[2]), float(cells[3])
    if not (math.isfinite(radius) and radius >= 0):
        raise ValueError(f"expected a radius >= 0, got {cells[3]}")
    if int(cells[4]) != int(predict == label):
        raise ValueError(f"column 'correct' is {cells[4]} for label {label} and prediction {predict}")
    n0 = n = count = 0
    votes: tuple[tuple[int, int], ...] = ()
    if len(cells) == len(COLUMNS):
        n0, n, count = int(cells[6]), int(cells[7]), int(cells[8])
        pairs = (pair.split(":") for pair in cells[9].split(",") if pair)
        votes = tuple((int(cls), int(number)) for cls, number in pairs)
        if sum(number for _, number in votes) != n:
            raise ValueError(f"the votes {cells[9]} do not add up to n = {n}")
    return CertifiedImage(index, label, Certificate(predict, radius, n0, n, count, votes), _parse_seconds(cells[5]))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error}); give a certificates file") from error


def _parse(content: bytes, path: Path, *, drop_torn_line: bool) -> tuple[list[CertifiedImage], int]:
    """Rows of the file `path` and the number of bytes that they and the header take up.

    A last line without its newline was being written when the process died: it is dropped where that is allowed.
    """
    lines = content.split(b"\n")
    torn = lines.pop()
    if not content or lines[:1] == []:
        if drop_torn_line and HEADER.encode().startswith(torn):
            return [], 0
        raise WorkError(
            f"{path}: not a certificates file: it has no header line, expected '{' '.join(FIELD_COLUMNS)}'; "
            "give a file that `smoothcert certify` wrote"
        )
    header = lines[0].decode("utf-8", "replace").rstrip("\r").split("\t")
    if tuple(header) not in (FIELD_COLUMNS, COLUMNS):
        shown = "".join(c if c.isprintable() else " " for c in " ".join(header))[:80]
        raise WorkError(
            f"{path}: not a certificates file: expected the columns '{' '.join(FIELD_COLUMNS)}', got '{shown}'; "
            "give a file that `smoothcert certify` wrote"
        )
    if torn and not drop_torn_line:
        lines.append(torn)
        torn = b""
    rows: list[CertifiedImage] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(parse_row(line.decode("utf-8")))
        except ValueError as error:
            raise WorkError(
                f"{path}, line {number}: damaged ({error}); the file is left as it is: repair the line or move the file"
            ) from error
    seen: set[int] = set()
    for row in rows:
        if row.index in seen:
            raise WorkError(f"{path}: image {row.index} is in the file twice; remove one of its rows")
        seen.add(row.index)
    return rows, len(content) - len(torn)


def read_certificates(path: str | Path) -> CertificatesFile:
    """Read a file of ours or a six-column file of another tool. A file still being written reads up to its last row."""
    path = Path(path)
    # Other tools end a finished file without a newline at times; ours never do while a settings file is beside it.
    ours = settings_path(path).exists()
    content = _content(path)
    rows, size = _parse(content, path, drop_torn_line=ours)
    stored = read_settings(path) if ours else {"settings": {}, "provenance": {}}
    return CertificatesFile(path, tuple(rows), stored["settings"], stored["provenance"], torn=size < len(content))


def certificates_writer(
    path: Path, settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> ResultWriter[CertifiedImage]:
    """Opens or resumes the certificates file `path`."""

    def parse(path: Path) -> tuple[list[CertifiedImage], int]:
        return _parse(_content(path), path, drop_torn_line=True)

    return ResultWriter(path, settings, provenance, header=HEADER, parse=parse, format_row=format_row)


def write_certificates(
    path: Path, rows: Iterable[CertifiedImage], settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> None:
    """Replace `path` and its settings by a whole file, rows in order of their index."""
    write_settings(path, settings, provenance)
    lines = map(format_row, sorted(rows, key=lambda row: row.index))
    write_text_atomically(path, HEADER + "".join(lines))


def merge_certificates(paths: Sequence[Path], out: Path) -> int:
    """Write the rows of all `paths` into `out`; the number of rows. Refuses other settings and contradicting rows."""
    files = [read_certificates(path) for path in paths]
    if not files:
        raise RequestError("merge: expected certificates files, got none")
    if out.exists():
        raise RequestError(f"{out}: exists already; choose another --out")
    rows: dict[int, CertifiedImage] = {}
    for file in files:
        # Shards draw seeds of their own, which is as good as one: votes of different images are independent anyway.
        first, own = {**files[0].settings, "seed": None}, {**file.settings, "seed": None}
        if differences := differing_settings(own, first, ("this", "that")):
            raise RequestError(f"{file.path}: has other settings than {files[0].path} ({'; '.join(differences)})")
        for row in file.rows:
            known = rows.setdefault(row.index, row)
            if (known.label, known.certificate) != (row.label, row.certificate):
                raise WorkError(f"{file.path}: image {row.index} has another result than in an earlier file; keep one")
    seeds = list(dict.fromkeys(file.settings.get("seed") for file in files))
    settings = {**files[0].settings, "seed": seeds[0] if len(seeds) == 1 else None}
    write_certificates(out, rows.values(), settings, {**files[0].provenance, "merged": len(files), "seeds": seeds})
    return len(rows)
