"""What every table is made of, whatever its format: columns, and groups of rows of cells."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

Value = float | int | str | None
UNKNOWN = "–"
MOST_DECIMALS = 10


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: `key` heads it in CSV, `title` elsewhere. Percentages are kept as percentages."""

    key: str
    title: str
    value: Callable[[Any], Value]
    """From what a row is about (a run, a mean over seeds) to the number or text in its cell."""
    decimals: int | None = None
    csv_only: bool = False
    radius: float | None = None
    """The radius at which the column gives the certified accuracy; None for the other columns."""
    ranked: bool = False
    """Whether the largest value of a group is marked."""
    text: Callable[[Any], str] | None = None
    """What a reader sees, where that is not the value with its decimals."""

    @property
    def numeric(self) -> bool:
        return self.decimals is not None


@dataclass(frozen=True, slots=True)
class Cell:
    """A value, the text that shows it, whether it is the best of its group, and whether it is beside a run's own."""

    value: Value
    text: str
    best: bool = False
    aside: bool = False
    """Published or a difference: not a result of ours, shown in italics."""


Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns and cells that all formats share. `groups`: one entry a sigma, each a list of rows of cells."""

    columns: tuple[Column, ...]
    groups: tuple[tuple[Row, ...], ...]

    def only(self, kept: Sequence[int]) -> "Layout":
        """The columns with these numbers."""
        groups = tuple(tuple(tuple(row[i] for i in kept) for row in group) for group in self.groups)
        return Layout(tuple(self.columns[i] for i in kept), groups)

    def for_reading(self) -> "Layout":
        """Without the columns that only a program wants."""
        return self.only([i for i, column in enumerate(self.columns) if not column.csv_only])

    def for_programs(self) -> "Layout":
        """Without the rows beside a run's own: CSV has columns for what they say."""
        groups = tuple(tuple(row for row in group if not any(c.aside for c in row)) for group in self.groups)
        return Layout(self.columns, groups)


def decimals_needed(numbers: Sequence[float]) -> int:
    """At least 2, and as many as tell the numbers apart and show each to one part in ten thousand."""
    for decimals in range(2, MOST_DECIMALS):
        shown = {f"{x:.{decimals}f}" for x in numbers}
        if len(shown) == len(set(numbers)) and all(abs(round(x, decimals) - x) <= 1e-4 * abs(x) for x in numbers):
            return decimals
    return MOST_DECIMALS


def shown(value: Value, decimals: int | None) -> str:
    """The text of a value: a number with its decimals, a dash for what is unknown."""
    if value is None:
        return UNKNOWN
    return value if isinstance(value, str) else f"{value:.{decimals or 0}f}"


def row_of(columns: Sequence[Column], subject: object) -> Row:
    """The cells of one row, none of them marked."""

    def cell(column: Column) -> Cell:
        value = column.value(subject)
        return Cell(value, shown(value, column.decimals) if column.text is None else column.text(subject))

    return tuple(map(cell, columns))


def with_best_marked(columns: Sequence[Column], rows: Sequence[Row]) -> list[Row]:
    """`rows` with the largest value of each ranked column marked; equal as shown is marked alike.

    A row alone has nothing to be better than, and zeros (a radius that no run reaches) are no achievement.
    """
    best: dict[int, str] = {}
    for i, column in enumerate(columns):
        values = [value for row in rows if isinstance(value := row[i].value, int | float)]
        if column.ranked and len(values) > 1 and float(shown(max(values), column.decimals)) > 0:
            best[i] = shown(max(values), column.decimals)
    return [
        tuple(
            replace(cell, best=i in best and shown(cell.value, columns[i].decimals) == best[i])
            for i, cell in enumerate(row)
        )
        for row in rows
    ]


_SIDES = (), ("method",), ("method", "votes"), ("method", "votes", "images", "abstention")


def fitting(content: Layout, width: int) -> Layout:
    """`content` at most `width` wide: without side columns, then with every second, third, ... radius only."""
    keys = [column.key for column in content.columns]
    radii = [i for i, column in enumerate(content.columns) if column.radius is not None]
    fit = content
    for step, side in product(range(1, max(1, len(radii)) + 1), _SIDES):
        hidden = (set(radii) - set(radii[::step])) | {i for i, key in enumerate(keys) if key in side}
        fit = content.only([i for i in range(len(keys)) if i not in hidden])
        if _printed_width(fit) <= width:
            break
    return fit


def _printed_width(content: Layout) -> int:
    """Columns are as wide as their widest cell, with a border and two spaces each."""
    rows = [row for group in content.groups for row in group]
    widest = (max(len(c.title), *(len(row[i].text) for row in rows)) for i, c in enumerate(content.columns))
    return sum(width + 3 for width in widest) + 1
