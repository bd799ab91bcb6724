"""The certificates file: append, read, resume.

A certificates file is a TSV whose first six columns are those of the field's tools
(`idx label predict radius correct time`), followed by `n0 n count votes`. A JSON file beside it says what was
certified and how. Votes are stored, so any bound, alpha or table can be recomputed without a forward pass.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import check_regular_file, write_text_atomically
from smoothcert.io.results import (
    ResultWriter,
    read_settings,
    settings_path,
    write_settings,
)
from smoothcert.io.text import one_line
from smoothcert.noise import UNIT_RADII
from smoothcert.smoothing.bounds import error_upper_bound, smallest_error_bound, two_sided_bounds
from smoothcert.smoothing.certificate import ABSTAIN, MOST_VOTES, Certificate

FIELD_COLUMNS = ("idx", "label", "predict", "radius", "correct", "time")
COLUMNS = (*FIELD_COLUMNS, "n0", "n", "count", "votes")
HEADER = "\t".join(COLUMNS) + "\n"
NEWER_SETTINGS = ("images_sha256", "classes_sha256", "num_classes")
"""Settings that files of earlier versions lack: such files are continued and merged without them."""
LARGEST_SIGMA = 1e6
"""Far above any noise level of use: images are in [0, 1]."""
LARGEST_INTEGER, LARGEST_CLASS = 10**12, 10**6
"""Far above any index or number of votes, and any class."""
TOLERANCE = 1e-6
"""By how much, relatively, a stored radius may exceed what its votes show: other versions round differently."""
ONE_SIDED, TWO_SIDED, EARLY_NAME = "one-sided", "two-sided", "clopper-pearson one-sided"
"""The bounds. The first files have a longer name for the one-sided one."""


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
    index, label, predict = _integer(cells[0], "idx"), _class(cells[1], "label"), _class(cells[2], "predict", -1)
    radius, seconds = float(cells[3]), _parse_seconds(cells[5])
    if not (math.isfinite(radius) and radius >= 0):
        raise ValueError(f"expected a radius >= 0, got {cells[3]}")
    if not 0 <= seconds <= LARGEST_INTEGER:
        raise ValueError(f"expected a time, got {cells[5]}")
    if int(cells[4]) != int(predict == label):
        raise ValueError(f"column 'correct' is {cells[4]} for label {label} and prediction {predict}")
    if len(cells) == len(FIELD_COLUMNS):
        return CertifiedImage(index, label, Certificate(predict, radius, 0, 0, 0, ()), seconds)
    n0, n, count = _integer(cells[6], "n0", 1), _integer(cells[7], "n"), _integer(cells[8], "count")
    pairs = [pair.split(":") for pair in cells[9].split(",") if pair]
    votes = tuple((_class(cls, "votes"), _integer(number, "votes")) for cls, number in pairs)
    if sum(number for _, number in votes) != n:
        raise ValueError(f"the votes {cells[9]} do not add up to n = {n}")
    if len(dict(votes)) != len(votes):
        raise ValueError(f"the votes {cells[9]} name a class twice")
    if count > n:
        raise ValueError(f"count {count} exceeds n = {n}")
    if predict == ABSTAIN and radius > 0:
        raise ValueError(f"the row abstains but has the radius {radius}")
    if predict != ABSTAIN and votes and dict(votes).get(predict, 0) != count:
        raise ValueError(f"count is {count}, but class {predict} has {dict(votes).get(predict, 0)} votes")
    return CertifiedImage(index, label, Certificate(predict, radius, n0, n, count, votes), seconds)


def _integer(text: str, column: str, least: int = 0, most: int = LARGEST_INTEGER) -> int:
    value = int(text)
    if not least <= value <= most:
        raise ValueError(f"column '{column}': expected an integer from {least} to {most}, got {text}")
    return value


def _class(text: str, column: str, least: int = 0) -> int:
    return _integer(text, column, least, LARGEST_CLASS)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_Check = tuple[str, Callable[[Any], bool]]
_SIGMA: _Check = (
    f"a number above 0 and at most {LARGEST_SIGMA:g}",
    lambda v: _is_number(v) and 0 < v <= LARGEST_SIGMA,
)
_VOTES: _Check = (f"an integer from 1 to {MOST_VOTES:,}", lambda v: _is_integer(v) and 1 <= v <= MOST_VOTES)
_TEXT: _Check = ("a text", lambda v: isinstance(v, str))
_FLAG: _Check = ("true or false", lambda v: isinstance(v, bool))
SETTINGS: Mapping[str, _Check] = {
    **dict.fromkeys(("sigma", "training_sigma"), _SIGMA),
    **dict.fromkeys(("n", "n0"), _VOTES),
    **dict.fromkeys(("model", "objective", "dataset", "split", "precision", "device"), _TEXT),
    **dict.fromkeys(("hold_back", "label_aware", "sound"), _FLAG),
    "alpha": ("a number between 0 and 1", lambda v: _is_number(v) and 0 < v < 1),
    "noise": (f"one of {', '.join(UNIT_RADII)}", lambda v: isinstance(v, str) and v in UNIT_RADII),
    "bound": (f"{ONE_SIDED} or {TWO_SIDED}", lambda v: v in (ONE_SIDED, TWO_SIDED, EARLY_NAME)),
    "radii": ("a list of numbers", lambda v: isinstance(v, list) and all(_is_number(r) and r > 0 for r in v)),
    "radius_loss": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "certificates": ("a mapping", lambda v: isinstance(v, dict) and _is_number(v.get("alpha") or 0)),
    "num_classes": ("an integer above 0", lambda v: _is_integer(v) and v > 0),
}
"""What the settings next to a result file are, where they are present; null stands for "not used"."""


def check_settings(settings: Mapping[str, Any], path: Path) -> None:
    """Raise a WorkError of one line if a setting of the result file `path` is not what every reader expects."""
    for key, (expected, holds) in SETTINGS.items():
        value = settings.get(key)
        if value is not None and not holds(value):
            raise WorkError(
                f"{settings_path(path)}: damaged, expected {expected} for '{key}', got {str(value)[:60]!r}; restore it"
            )


@dataclass(frozen=True)
class RowLimits:
    """What a row can claim under the settings of its file. Settings without sigma, n and alpha limit nothing."""

    settings: Mapping[str, Any]

    def check(self, row: CertifiedImage) -> None:
        """Raise a ValueError if the row claims more than its votes show, or does not belong to these settings."""
        certificate, n = row.certificate, self._get("n", None)
        classes = self._get("num_classes", math.inf)
        largest = max(row.label, certificate.predict, *(cls for cls, _ in certificate.votes))
        if largest >= classes:
            raise ValueError(f"class {largest} is out of range for {classes} classes")
        if n is not None and certificate.votes:
            fixed = not (self._get("radii", ()) or self._get("radius_loss", None))
            if certificate.n > n or (fixed and certificate.n != n):
                raise ValueError(f"has {certificate.n} votes, the settings say n = {n}")
        most = self.radius(certificate) if certificate.radius > 0 and self._limited else math.inf
        if certificate.radius > most * (1 + TOLERANCE):
            votes = f"{certificate.count} of {certificate.n} votes"
            at = f"at sigma {self.settings['sigma']:g} and alpha {self.settings['alpha']:g}"
            raise ValueError(f"the radius {certificate.radius:g} exceeds {most:g}, the most that {votes} can show {at}")

    def radius(self, certificate: Certificate) -> float:
        """An upper bound on the radius that these votes show."""
        n, count, alpha = certificate.n, certificate.count, self.settings["alpha"]
        if n == 0:  # no votes: a row of another tool, or one that a label-aware rule left out
            return math.inf if certificate.n0 == 0 else 0.0
        radii, bound = self._get("radii", ()), self._get("bound", ONE_SIDED)
        if radii:
            # A sequential test may have claimed at an earlier look, when all votes agreed.
            at_most = max(radii)
            if self._get("hold_back", False):
                at_most = max(at_most, self._certified(_error_bound(count, n, alpha)))
            return float(min(at_most, self._certified(smallest_error_bound(n, alpha))))
        if bound == TWO_SIDED:
            other = max((k for cls, k in certificate.votes if cls != certificate.predict), default=0)
            q, runner_up = two_sided_bounds(count, other, n, alpha)
            gap = UNIT_RADII["gaussian"](q) + UNIT_RADII["gaussian"](runner_up)
            return float(max(0.0, self.settings["sigma"] / 2 * gap))
        return self._certified(_error_bound(count, n, alpha))

    def _certified(self, q: float) -> float:
        radius = UNIT_RADII[self._get("noise", "gaussian")](q) if q < 0.5 else 0.0
        return float(self.settings["sigma"] * radius)

    @cached_property
    def _limited(self) -> bool:
        return all(self.settings.get(key) is not None for key in ("sigma", "n", "alpha"))

    def _get(self, key: str, default: Any) -> Any:
        value = self.settings.get(key)
        return default if value is None else value


@lru_cache(maxsize=100_000)
def _error_bound(count: int, n: int, alpha: float) -> float:
    return error_upper_bound(count, n, alpha)


def _content(path: Path) -> bytes:
    check_regular_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error}); give a certificates file") from error


def _parse(
    content: bytes, path: Path, settings: Mapping[str, Any], *, drop_torn_line: bool
) -> tuple[list[CertifiedImage], int]:
    """Rows of the file `path`, each possible under `settings`, and the number of bytes of the rows and the header.

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
        shown = one_line(" ".join(header))[:80]
        raise WorkError(
            f"{path}: not a certificates file: expected the columns '{' '.join(FIELD_COLUMNS)}', got '{shown}'; "
            "give a file that `smoothcert certify` wrote"
        )
    if torn and not drop_torn_line:
        lines.append(torn)
        torn = b""
    rows: list[CertifiedImage] = []
    seen: set[int] = set()
    limits = RowLimits(settings)
    for number, line in enumerate(lines[1:], start=2):
        try:
            row = parse_row(line.decode("utf-8"))
            limits.check(row)
        except ValueError as error:
            raise WorkError(
                f"{path}, line {number}: damaged ({error}); the file is left as it is: repair the line or move the file"
            ) from error
        if row.index in seen:
            raise WorkError(f"{path}, line {number}: image {row.index} is in the file twice; remove one of its rows")
        seen.add(row.index)
        rows.append(row)
    return rows, len(content) - len(torn)


def read_certificates(path: str | Path) -> CertificatesFile:
    """Read a file of ours or a six-column file of another tool. A file still being written reads up to its last row.

    Rows are checked against the settings next to the file: a row that claims more than its votes can show is refused.
    """
    path = Path(path)
    # Other tools end a finished file without a newline at times; ours never do while a settings file is beside it.
    ours = settings_path(path).exists()
    content = _content(path)
    stored = read_settings(path) if ours else {"settings": {}, "provenance": {}}
    check_settings(stored["settings"], path)
    rows, size = _parse(content, path, stored["settings"], drop_torn_line=ours)
    return CertificatesFile(path, tuple(rows), stored["settings"], stored["provenance"], torn=size < len(content))


def certificates_writer(
    path: Path, settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> ResultWriter[CertifiedImage]:
    """Opens or resumes the certificates file `path`."""

    def parse(path: Path) -> tuple[list[CertifiedImage], int]:
        return _parse(_content(path), path, settings, drop_torn_line=True)

    return ResultWriter(path, settings, provenance, header=HEADER, parse=parse, format_row=format_row)


def write_certificates(
    path: Path, rows: Iterable[CertifiedImage], settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> None:
    """Replace `path` and its settings by a whole file, rows in order of their index."""
    write_settings(path, settings, provenance)
    lines = map(format_row, sorted(rows, key=lambda row: row.index))
    write_text_atomically(path, HEADER + "".join(lines))
