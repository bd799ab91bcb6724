"""The certificates file: append, read and resume.

A certificates file is a TSV whose first six columns are those of the field's tools
(`idx label predict radius correct time`), followed by `n0 n count votes`, and by `coin` if the bound is randomized. A
JSON file next to it records what was certified and how. Votes are stored: where their number was fixed beforehand,
`recertify` computes any other bound or alpha from them, without a forward pass.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from smoothcert.certification.checks import RANDOMIZED, RowLimits, check_settings
from smoothcert.certification.columns import (
    COLUMNS,
    FIELD_COLUMNS,
    LARGEST_CLASS,
    LARGEST_INTEGER,
    Columns,
    ParsedRows,
    columns_of,
    parse_columns,
    parse_seconds,
)
from smoothcert.certification.other_tools import with_six_columns
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.compressed import COMPRESSED, PLAIN, read_content, result_files, write_content
from smoothcert.io.files import with_home
from smoothcert.io.results import ResultWriter, read_settings, settings_path, write_settings
from smoothcert.io.text import one_line
from smoothcert.smoothing.certificate import ABSTAIN, Certificate, Votes
from smoothcert.training.run_folder import CERTIFICATES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "a certificates file"
COLUMNS_WITH_COIN = (*COLUMNS, "coin")
"""The columns of a file with the randomized bound."""
HEADERS = (FIELD_COLUMNS, COLUMNS, COLUMNS_WITH_COIN)
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class CertifiedImage:
    """One row of a certificates file. Files of other tools have no votes: then `certificate.votes` is empty, n is 0."""

    index: int
    label: int
    certificate: Certificate
    seconds: float

    @property
    def correct(self) -> bool:
        return self.certificate.prediction == self.label

    @property
    def radius_if_correct(self) -> float:
        """The radius that counts for ACR and certified accuracy: 0 if the prediction is wrong or abstained."""
        return self.certificate.radius if self.correct else 0.0


@dataclass(frozen=True, repr=False)
class CertificatesFile:
    """All rows of a file, in file order, and the settings next to it ({} if there is no JSON file).

    It iterates as `CertifiedImage`, one per image.
    """

    path: Path
    rows: Sequence[CertifiedImage]
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    torn: bool = False
    """Whether an incomplete last row was left out."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[CertifiedImage]:
        return iter(self.rows)

    def __repr__(self) -> str:
        acr = f", ACR {self.acr:.3f}, {self.settings.get('bound', 'unknown')} bound" if self.rows else ""
        return f"CertificatesFile({self.path}: {len(self)} images{acr})"

    @property
    def is_randomized(self) -> bool:
        """Whether the radii depend on coins, by a randomized bound."""
        return bool(self.settings.get("bound") == RANDOMIZED)

    @property
    def acr(self) -> float:
        """The average certified radius; wrong and abstained images count as 0."""
        return self.columns.acr

    def certified_accuracy(self, radius: float = 0.0) -> float:
        """The share of images, in [0, 1], that are certified for their label with a radius of at least `radius`."""
        return self.columns.certified_accuracy(radius)

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one row per image."""
        try:
            import pandas
        except ImportError:
            raise RequestError(
                "to_pandas: expected pandas, got none; install it: pip install 'smoothcert[notebook]'"
            ) from None
        image_fields = ("index", "label", "correct", "seconds")
        vote_fields = ("prediction", "radius", "n0", "n", "count", *(("coin",) if self.is_randomized else ()))
        rows = [
            [*(getattr(row, name) for name in image_fields), *(getattr(row.certificate, name) for name in vote_fields)]
            for row in self.rows
        ]
        return pandas.DataFrame(rows, columns=[*image_fields, *vote_fields]).set_index("index")

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draw the curve of `smoothcert report`; also write the figure to `path` (PNG, PDF or SVG) if one is given."""
        # An import from a higher layer: figures belong to reports, and users expect this one here.
        from smoothcert.report import plot_certificates

        return plot_certificates(self, path)

    @cached_property
    def columns(self) -> Columns:
        """The rows as arrays."""
        return columns_of(self.rows)

    def only(self, indices: Collection[int]) -> "CertificatesFile":
        """The file with the rows of these images only."""
        rows = self.rows
        kept = np.flatnonzero(np.isin(self.columns.index, list(indices)))
        chosen = rows.at(kept) if isinstance(rows, ParsedRows) else tuple(rows[i] for i in kept.tolist())
        return replace(self, rows=chosen)


def format_row(row: CertifiedImage, *, with_coin: bool = False) -> str:
    """Return one line of the file with its newline. Floats are written with repr, so that reading returns them."""
    c = row.certificate
    # Stages of a cascade are separated by bars: first the one that answered, then those before it, in their order.
    votes = "|".join(",".join(f"{k}:{v}" for k, v in stage) for stage in (c.votes, *c.earlier))
    time = timedelta(seconds=round(row.seconds, 6))
    cells = [row.index, row.label, c.prediction, repr(c.radius), int(row.correct), time, c.n0, c.n, c.count, votes]
    if with_coin:
        cells.append("" if c.coin is None else repr(c.coin))
    return "\t".join(str(cell) for cell in cells) + "\n"


def _layout(settings: Mapping[str, Any]) -> tuple[str, Callable[[CertifiedImage], str]]:
    """Return the header and the function that formats rows, with coins if the bound is randomized."""
    with_coin = settings.get("bound") == RANDOMIZED
    return "\t".join(COLUMNS_WITH_COIN if with_coin else COLUMNS) + "\n", partial(format_row, with_coin=with_coin)


def parse_row(line: str, limits: RowLimits | None = None) -> CertifiedImage:
    """Invert `format_row`; six columns are enough. Raise ValueError if the line is not a row or exceeds `limits`."""
    cells = line.rstrip("\r\n").split("\t")
    if len(cells) not in map(len, HEADERS):
        *fewer, most = (str(len(header)) for header in HEADERS)
        raise ValueError(f"expected {', '.join(fewer)} or {most} columns, got {len(cells)}")
    index = _integer(cells[0], "idx")
    label = _class(cells[1], "label")
    predict = _class(cells[2], "predict", -1)
    radius = _parsed(float, cells[3], "radius", "a number")
    seconds = _parsed(parse_seconds, cells[5], "time", "a time")
    if not (math.isfinite(radius) and radius >= 0):
        raise ValueError(f"expected a radius >= 0, got {cells[3]}")
    if not 0 <= seconds <= LARGEST_INTEGER:
        raise ValueError(f"expected a time, got {cells[5]}")
    if _integer(cells[4], "correct") != int(predict == label):
        raise ValueError(f"column 'correct' is {cells[4]} for label {label} and prediction {predict}")
    certificate = Certificate(predict, radius, 0, 0, 0, ())
    if len(cells) > len(FIELD_COLUMNS):
        certificate = _with_votes(certificate, cells)
    if limits is not None:
        limits.check(label, certificate)
    return CertifiedImage(index, label, certificate, seconds)


def _with_votes(claim: Certificate, cells: Sequence[str]) -> Certificate:
    """Return the `claim` with the votes in the further columns. Raise ValueError if these contradict it."""
    predict, radius = claim.prediction, claim.radius
    n0 = _integer(cells[6], "n0", 1)
    n = _integer(cells[7], "n")
    count = _integer(cells[8], "count")
    stages = [_parse_votes(stage) for stage in cells[9].split("|")]
    if any(sum(number for _, number in votes) != n for votes in stages):
        raise ValueError(f"the votes {cells[9]} do not add up to n = {n}")
    if any(len(dict(votes)) != len(votes) for votes in stages):
        raise ValueError(f"the votes {cells[9]} name a class twice")
    votes, *earlier = stages
    if count > n:
        raise ValueError(f"count {count} exceeds n = {n}")
    if predict == ABSTAIN and radius > 0:
        raise ValueError(f"the row abstains but has the radius {radius}")
    if predict != ABSTAIN and votes and dict(votes).get(predict, 0) != count:
        raise ValueError(f"count is {count}, but class {predict} has {dict(votes).get(predict, 0)} votes")
    coin = _parsed(float, cells[10], "coin", "a number") if cells[10:] not in ([], [""]) else None
    if coin is not None and not 0 < coin <= 1:
        raise ValueError(f"expected a coin above 0 and at most 1, got {cells[10]}")
    return Certificate(predict, radius, n0, n, count, votes, tuple(earlier), coin)


def _parse_votes(text: str) -> Votes:
    """Return the votes of one stage."""
    pairs = [pair.partition(":") for pair in text.split(",") if pair]
    return tuple((_class(cls, "votes"), _integer(number, "votes")) for cls, _, number in pairs)


def _parsed(parse: Callable[[str], Number], text: str, column: str, expected: str) -> Number:
    try:
        if "_" in text:  # which Python allows between digits
            raise ValueError
        return parse(text)
    except ValueError:
        raise ValueError(f"column '{column}': expected {expected}, got '{text}'") from None


def _integer(text: str, column: str, least: int = 0, most: int = LARGEST_INTEGER) -> int:
    value = _parsed(int, text, column, "an integer")
    if not least <= value <= most:
        raise ValueError(f"column '{column}': expected an integer from {least} to {most}, got {text}")
    return value


@lru_cache(maxsize=10_000)  # a file repeats its few classes in every row
def _class(text: str, column: str, least: int = 0) -> int:
    return _integer(text, column, least, LARGEST_CLASS)


class _Indexed(Protocol):
    @property
    def index(self) -> int: ...


Row = TypeVar("Row", bound=_Indexed)


def parse_rows(
    content: bytes,
    path: Path,
    columns: Sequence[tuple[str, ...]],
    parse: Callable[[str], Row],
    kind: str = KIND,
    *,
    drop_torn_line: bool = True,
) -> tuple[list[Row], int]:
    """Return the rows in `content` of the file `path`, and the number of bytes of the rows and the header.

    The header must be one of `columns`. A last line without its newline was being written when the process died: it is
    dropped where `drop_torn_line` allows that.
    """
    # A file with settings next to it was a result file: it is damaged. Any other is a wrong request.
    has_settings = settings_path(path).exists()
    error_type = WorkError if has_settings else RequestError
    lines = content.split(b"\n")
    torn = lines.pop()
    if not lines and drop_torn_line and "\t".join(columns[-1]).encode().startswith(torn):
        return [], 0
    header = (lines or [torn])[0].decode("utf-8", "replace").rstrip("\r").split("\t")
    if tuple(header) not in columns:
        shown = one_line(" ".join(header))[:80]
        raise error_type(
            f"{path}: not {kind}: expected the columns '{' '.join(columns[0])}', got '{shown}'; give another file"
        )
    if torn and not drop_torn_line:
        lines.append(torn)
        torn = b""
    rows: dict[int, Row] = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            row = parse(line.decode("utf-8"))
        except ValueError as error:
            # A changed sigma or alpha in the settings damages every line.
            place = f"the line or {settings_path(path).name}" if has_settings else "the line"
            raise WorkError(
                f"{path}, line {number}: damaged ({error}); the file is left as it is: repair {place}, or move the file"
            ) from error
        if row.index in rows:
            raise WorkError(f"{path}, line {number}: image {row.index} is in the file twice; remove one of its rows")
        rows[row.index] = row
    return list(rows.values()), len(content) - len(torn)


def read_certificates(path: str | Path) -> CertificatesFile:
    """Read a file of smoothcert or of another tool (see `with_six_columns`). An incomplete last row is left out.

    Rows are checked against the settings next to the file: a row with another radius than its votes show is refused.
    """
    path = with_home(path)
    if path.is_dir():
        names = [file.relative_to(path).as_posix() for file in result_files(path) + result_files(path / CERTIFICATES)]
        given = f"give one of its files, such as {names[0]}" if names else f"give {KIND}"
        raise RequestError(f"{path}: expected a certificates file, got a folder; {given}")
    # Other tools may end a finished file without a newline; files with settings next to them never end so.
    ours = settings_path(path).exists()
    content = read_content(path, KIND)
    stored = read_settings(path) if ours else {"settings": {}, "provenance": {}}
    check_settings(stored["settings"], path)
    limits = RowLimits(stored["settings"])
    content = content if ours else with_six_columns(content)
    rows: Sequence[CertifiedImage] | None = _parse_at_once(content, limits) if ours else None
    size = content.rfind(b"\n") + 1
    if rows is None:
        single, size = parse_rows(content, path, HEADERS, partial(parse_row, limits=limits), drop_torn_line=ours)
        rows = tuple(single)
    return CertificatesFile(path, rows, stored["settings"], stored["provenance"], torn=size < len(content))


def _parse_at_once(content: bytes, limits: RowLimits) -> ParsedRows | None:
    """The rows of a usual file without damage, fast; None for any other, which `parse_rows` reads row by row."""
    header = "\t".join(COLUMNS).encode() + b"\n"
    body = content[: content.rfind(b"\n") + 1]
    if not body.startswith(header):
        return None
    lines = body[len(header) :].decode(errors="replace").split("\n")[:-1]
    columns = parse_columns(lines, limits)
    return None if columns is None else ParsedRows(lines, columns, parse_row)


def certificates_writer(
    path: Path, settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> ResultWriter[CertifiedImage]:
    """Open or resume the certificates file `path`."""
    limits = RowLimits(settings)

    def parse(path: Path) -> tuple[list[CertifiedImage], int]:
        return parse_rows(read_content(path, KIND), path, HEADERS, partial(parse_row, limits=limits))

    header, formatted = _layout(settings)
    return ResultWriter(path, settings, provenance, header=header, parse=parse, format_row=formatted)


def certificates_path(out: str | Path) -> Path:
    """Return the path of a certificates file that a user has named, which must end in .tsv or .tsv.gz."""
    if not str(out).endswith((PLAIN, COMPRESSED)):
        raise RequestError(f"out: expected the path of a file that ends in .tsv or .tsv.gz, got {out}; add the ending")
    return with_home(out)


def write_certificates(
    path: Path, rows: Iterable[CertifiedImage], settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> None:
    """Replace `path` (compressed if it ends in .gz) and its settings by a complete file, with rows sorted by index."""
    write_settings(path, settings, provenance)
    header, formatted = _layout(settings)
    lines = map(formatted, sorted(rows, key=lambda row: row.index))
    write_content(path, (header + "".join(lines)).encode())
