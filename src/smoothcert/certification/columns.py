"""The columns of a certificates file: their names, and its rows as arrays, parsed and checked all at once."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from smoothcert.certification.checks import RowLimits
from smoothcert.errors import RequestError
from smoothcert.smoothing.certificate import ABSTAIN

if TYPE_CHECKING:
    from smoothcert.certification.certificates import CertifiedImage

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
FIELD_COLUMNS = ("idx", "label", "predict", "radius", "correct", "time")
"""The columns of the field's tools."""
COLUMNS = (*FIELD_COLUMNS, "n0", "n", "count", "votes")
LARGEST_INTEGER, LARGEST_CLASS = 10**12, 10**6
"""Far above any index or number of votes, and any class."""
_NUMBER = "[0-9]{1,18}+"
"""18 digits always fit into 64 bits."""
_USUAL_ROWS = re.compile(
    rf"(?:{_NUMBER}\t{_NUMBER}\t-?{_NUMBER}\t[^\t\n_]++\t[01]\t[^\t\n_]++\t{_NUMBER}\t{_NUMBER}\t{_NUMBER}\t"
    rf"{_NUMBER}:{_NUMBER}(?:,{_NUMBER}:{_NUMBER})*+\n)*+"
)
"""Rows of ten cells, the last of which are votes such as `3:998,5:2`. Python would allow underscores in numbers."""


@dataclass(frozen=True, eq=False)
class Columns:
    """One entry per row in each array, in file order; `votes_*` have one entry per row and class with votes."""

    index: Integers
    label: Integers
    prediction: Integers
    radius: Floats
    n0: Integers
    n: Integers
    count: Integers
    spent: Integers
    votes_row: Integers
    """The position of the row that a pair (class, votes) belongs to, ascending."""
    votes_class: Integers
    votes_number: Integers

    def __len__(self) -> int:
        return len(self.index)

    @property
    def correct(self) -> Flags:
        """Whether each image is certified for its label, with any radius; an abstention is not."""
        correct: Flags = (self.prediction == self.label) & (self.prediction != ABSTAIN)
        return correct

    @property
    def counted_radii(self) -> Floats:
        """The radii of the images certified for their label, in row order; wrong and abstained images are left out."""
        return self.radius[self.correct]

    @property
    def acr(self) -> float:
        """ACR (Zhai et al. 2020): the mean over all images of the radius, taken as 0 where wrong or abstained."""
        return math.fsum(self.counted_radii.tolist()) / self._images

    def certified_accuracy(self, radius: float) -> float:
        """The fraction in [0, 1] of images that are certified for their label with a radius of at least `radius`.

        This is what the published tables count. An abstention never counts, not even at radius 0.
        """
        try:
            number = float(radius)
        except (TypeError, ValueError) as error:
            raise RequestError(f"radius: expected one number, got {radius!r}; ask for one radius at a time") from error
        return int((self.counted_radii >= number).sum()) / self._images

    @property
    def _images(self) -> int:
        if not len(self):
            raise RequestError(
                "expected at least one certified image, got none; certify some with `smoothcert certify RUN`"
            )
        return len(self)

    def votes_for(self, classes: Integers) -> Integers:
        """The votes of each row for its entry of `classes`."""
        votes = np.zeros(len(self), dtype=np.int64)
        hit = self.votes_class == classes[self.votes_row]
        votes[self.votes_row[hit]] = self.votes_number[hit]
        return votes

    def at(self, positions: Integers) -> "Columns":
        """Some of the rows, by their ascending positions."""
        hit = np.isin(self.votes_row, positions)
        names = ("index", "label", "prediction", "radius", "n0", "n", "count", "spent")
        return replace(
            self,
            **{name: getattr(self, name)[positions] for name in names},
            votes_row=np.searchsorted(positions, self.votes_row[hit]),
            votes_class=self.votes_class[hit],
            votes_number=self.votes_number[hit],
        )


class ParsedRows(Sequence["CertifiedImage"]):
    """Rows whose columns are known and checked; a row becomes an object each time that it is asked for."""

    def __init__(self, lines: Sequence[str], columns: Columns, parse: "Callable[[str], CertifiedImage]") -> None:
        self.lines, self.columns, self.parse = lines, columns, parse

    def __len__(self) -> int:
        return len(self.lines)

    @overload
    def __getitem__(self, position: int) -> "CertifiedImage": ...
    @overload
    def __getitem__(self, position: slice) -> "Sequence[CertifiedImage]": ...
    def __getitem__(self, position: int | slice) -> "CertifiedImage | Sequence[CertifiedImage]":
        chosen = self.lines[position]
        return self.parse(chosen) if isinstance(chosen, str) else tuple(map(self.parse, chosen))

    def __iter__(self) -> "Iterator[CertifiedImage]":
        return map(self.parse, self.lines)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def at(self, positions: Integers) -> "ParsedRows":
        """Some of the rows, by their ascending positions."""
        return ParsedRows([self.lines[i] for i in positions.tolist()], self.columns.at(positions), self.parse)


def columns_of(rows: "Sequence[CertifiedImage]") -> Columns:
    """The columns of any rows."""
    if isinstance(rows, ParsedRows):
        return rows.columns
    cells = [(r.index, r.label, (c := r.certificate).prediction, c.n0, c.n, c.count, c.spent) for r in rows]
    index, label, prediction, *numbers = np.array(cells, dtype=np.int64).reshape(-1, 7).T
    radius = np.array([row.certificate.radius for row in rows], dtype=np.float64)
    votes = [(position, *pair) for position, row in enumerate(rows) for pair in row.certificate.votes]
    return Columns(index, label, prediction, radius, *numbers, *np.array(votes, dtype=np.int64).reshape(-1, 3).T)


@lru_cache(maxsize=1_000)  # images of one batch have the same time
def parse_seconds(text: str) -> float:
    """Return the seconds of `12.5` or of Python's timedelta text `[D day[s], ]H:MM:SS[.ffffff]`."""
    days, _, clock = text.rpartition(",")
    seconds = 86400.0 * int(days.partition(" day")[0]) if days else 0.0
    for part, unit in zip(reversed(clock.strip().split(":")), (1, 60, 3600), strict=False):
        seconds += float(part) * unit
    return seconds


def parse_columns(lines: Sequence[str], limits: RowLimits) -> Columns | None:
    """The columns of `lines`, which have the ten usual columns, if every row is right.

    None if a row is damaged, claims too much, or is of a rule whose rows must be checked one by one: the parser of
    single rows knows what to say. Everything that is accepted here is accepted there.
    """
    if not _USUAL_ROWS.fullmatch("\n".join([*lines, ""])):
        return None
    cells = "\t".join(lines).split("\t") if lines else []
    radius, times, votes = (cells[column::10] for column in (3, 5, 9))
    try:
        seconds = np.array(list(map(parse_seconds, times)))
        radii = np.array(radius, dtype=np.float64)
    except (ValueError, OverflowError):
        return None
    indices, labels, classes, correct, first, fresh, counts = (_integers(cells[i::10]) for i in (0, 1, 2, 4, 6, 7, 8))
    pairs = _integers(votes).reshape(-1, 2)
    rows = np.repeat(np.arange(len(lines)), [cell.count(":") for cell in votes])
    c = Columns(indices, labels, classes, radii, first, fresh, counts, first + fresh, rows, *pairs.T)
    row_and_class = np.sort(rows * (LARGEST_CLASS + 1) + c.votes_class)
    conditions = (
        len(np.unique(c.index)) == len(c),
        _within(c.index, 0, LARGEST_INTEGER),
        _within(c.label, 0, LARGEST_CLASS),
        _within(c.prediction, ABSTAIN, LARGEST_CLASS),
        _within(c.n0, 1, LARGEST_INTEGER),
        _within(c.n, 0, LARGEST_INTEGER),
        _within(c.votes_class, 0, LARGEST_CLASS),
        _within(c.votes_number, 0, LARGEST_INTEGER),
        _within(seconds, 0, LARGEST_INTEGER),
        _within(c.count, 0, c.n),
        ((c.radius >= 0) & np.isfinite(c.radius)).all(),
        (correct == (c.prediction == c.label)).all(),
        (np.bincount(rows, c.votes_number, len(c)) == c.n).all(),
        (row_and_class[1:] != row_and_class[:-1]).all(),  # no row names a class twice
        (c.radius[c.prediction == ABSTAIN] == 0).all(),
        ((c.votes_for(c.prediction) == c.count) | (c.prediction == ABSTAIN)).all(),
    )
    return c if all(conditions) and limits.allow(c) else None


def _integers(cells: Sequence[str]) -> Integers:
    """The numbers in `cells`, all of which are known to be digits with signs, colons and commas between them."""
    return np.fromstring(",".join(cells).replace(":", ","), dtype=np.int64, sep=",")


def _within(values: Integers | Floats, least: int, most: int | Integers) -> bool:
    return bool(((least <= values) & (values <= most)).all())
