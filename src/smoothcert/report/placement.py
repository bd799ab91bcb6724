"""Where the names of curves fit into a panel: beside their own curve, clear of everything else. Geometry only."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
COLUMNS = 240
"""A panel is looked at in this many columns of equal width."""
_CLEAR = 0.035
"""Two curves closer than this (of the panel's height) cannot be told apart by a label that touches one of them."""
_CLEAR_TIP = 0.012
"""The same for the tip of a line that leads from a label to its curve."""
_COST_OF_CROSSING = 0.2
_REACHES = (0.04, 0.07, 0.1, 0.14, 0.19, 0.25, 0.32)
_DIAGONALS = ((1, 1), (-1, -1), (-1, 1), (1, -1))


class Box(NamedTuple):
    """A rectangle in fractions of the panel."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Box") -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.top <= other.bottom or other.top <= self.bottom)

    @property
    def inside(self) -> bool:
        return min(self.left, self.bottom) >= 0 and max(self.right, self.top) <= 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a label goes, and from where to where a line leads to its curve (None: it touches the curve)."""

    box: Box
    leader: tuple[tuple[float, float], tuple[float, float]] | None = None
    cost: float = 0.0


def seen(points: Floats) -> tuple[Floats, Floats]:
    """Lowest and highest point in each column [COLUMNS] of the line through `points` [k, 2], x ascending.

    Both in fractions of the panel; (inf, -inf) in columns that the line does not reach. Nothing between is missed: a
    line enters a column at its edge or starts in it, and both points count.
    """
    x, y = points.T
    low, high = np.full(COLUMNS, np.inf), np.full(COLUMNS, -np.inf)
    edges = np.arange(1, COLUMNS) / COLUMNS
    edges = edges[(edges > x[0]) & (edges < x[-1])]
    at_edges = np.interp(edges, x, y)
    right_of_edge = np.rint(edges * COLUMNS).astype(int)
    inside = (x >= 0) & (x <= 1)
    columns = np.minimum((x[inside] * COLUMNS).astype(int), COLUMNS - 1)
    for column, value in ((columns, y[inside]), (right_of_edge, at_edges), (right_of_edge - 1, at_edges)):
        np.minimum.at(low, column, value)
        np.maximum.at(high, column, value)
    return low, high


class Panel:
    """What is drawn in a panel: every line [lines, COLUMNS] and the boxes that are taken."""

    def __init__(self, lines: Sequence[Floats], names: Sequence[str | None], taken: Sequence[Box]) -> None:
        """`lines`: points [k, 2] of each in fractions of the panel; `names`: None for a line that has no label."""
        both = [seen(points) for points in lines]
        self.low, self.high = (np.stack([pair[i] for pair in both]) for i in (0, 1))
        self.names = list(names)
        self.taken = list(taken)

    def free(self, box: Box) -> bool:
        """Whether `box` lies in the panel, clear of every line and box."""
        if not box.inside or any(map(box.overlaps, self.taken)):
            return False
        columns = slice(int(box.left * COLUMNS), math.ceil(box.right * COLUMNS))
        return not bool(((self.low[:, columns] < box.top) & (self.high[:, columns] > box.bottom)).any())

    def spots(self, row: int, clear: float) -> list[int]:
        """Columns in which line `row` is at least `clear` away from all other named lines, the clearest first.

        The middle of the panel wins ties.
        """
        others = [i for i, name in enumerate(self.names) if name is not None and i != row]
        gaps = np.maximum(self.low[others] - self.high[row], self.low[row] - self.high[others])
        clearance = np.min(np.maximum(gaps, 0), axis=0, initial=1.0)
        usable = np.isfinite(self.low[row]) & (clearance > clear)
        columns = [c for c in range(COLUMNS // 60, COLUMNS, COLUMNS // 60) if usable[c]]
        return sorted(columns, key=lambda c: (-round(clearance[c], 2), abs(c - COLUMNS / 2)))

    def touching(self, row: int, column: int, size: tuple[float, float], towards: tuple[int, int]) -> Box:
        """The box of `size` with a corner on line `row`, extending from it in the direction `towards`."""
        y = self.high[row, column] if towards[1] > 0 else self.low[row, column]
        return _corner_box((column + 0.5) / COLUMNS, float(y), size, towards)

    def crossings(self, start: tuple[float, float], end: tuple[float, float], row: int) -> int:
        """How many lines other than `row` a straight line from `start` to `end` meets."""
        low, high = seen(np.array(sorted((start, end))))
        met = (self.low <= high) & (self.high >= low)
        return int(np.delete(met.any(axis=1), row).sum())

    def covered(self, start: tuple[float, float], end: tuple[float, float]) -> bool:
        """Whether a straight line from `start` to `end` runs into a box that is taken."""
        points = np.linspace(start, end, 50)
        return any(((points > box[:2]) & (points < box[2:])).all(axis=1).any() for box in self.taken)

    def take(self, place: Place) -> None:
        """A placed label is in the way of later ones, and so is the line that leads to it."""
        self.taken.append(place.box)
        if place.leader:
            low, high = seen(np.array(sorted(place.leader)))
            self.low, self.high = np.vstack([self.low, low]), np.vstack([self.high, high])
            self.names.append(None)


def _corner_box(x: float, y: float, size: tuple[float, float], towards: tuple[int, int]) -> Box:
    """The box with a corner at (x, y) that extends in the direction `towards`."""
    right, up = x + towards[0] * size[0], y + towards[1] * size[1]
    return Box(min(x, right), min(y, up), max(x, right), max(y, up))


def _touching(panel: Panel, row: int, size: tuple[float, float]) -> Place | None:
    """The clearest free place with a corner on the curve."""
    boxes = (panel.touching(row, c, size, towards) for c in panel.spots(row, _CLEAR) for towards in _DIAGONALS)
    return next((Place(box) for box in boxes if panel.free(box)), None)


def _led(panel: Panel, row: int, size: tuple[float, float]) -> Place | None:
    """A free place at the end of a straight line from the curve: the line crosses few others, then is short."""
    best: Place | None = None
    spots = panel.spots(row, _CLEAR_TIP)
    for reach in _REACHES:
        if best is not None and best.cost <= reach:
            break
        for column, towards in product(spots, _DIAGONALS):
            tip = ((column + 0.5) / COLUMNS, float(panel.low[row, column] + panel.high[row, column]) / 2)
            end = (tip[0] + 0.6 * reach * towards[0], tip[1] + reach * towards[1])
            box = _corner_box(*end, size, towards)
            if panel.free(box) and not panel.covered(tip, end):
                cost = reach + _COST_OF_CROSSING * panel.crossings(tip, end, row)
                best = best if best is not None and best.cost <= cost else Place(box, (tip, end), cost)
    return best


def place_labels(panel: Panel, sizes: Mapping[str, tuple[float, float]]) -> dict[str, Place]:
    """A place for each label that finds one: touching its own curve, else led to it by a short line.

    `sizes`: width and height of each text with its margin, in fractions of the panel. Places are clear of all lines
    and of each other. A curve that runs with another everywhere gets none.
    """
    rows = {name: row for row, name in enumerate(panel.names) if name is not None}
    tried: list[dict[str, Place]] = []
    # Who chooses first matters: those with the fewest spots, or those with the most; the better outcome counts.
    order = sorted(rows, key=lambda name: len(panel.spots(rows[name], _CLEAR)))
    for names in (order, order[::-1]):
        if tried and len(tried[0]) == len(rows) and not any(place.leader for place in tried[0].values()):
            break
        filling, placed = deepcopy(panel), dict[str, Place]()
        for name in names:
            place = _touching(filling, rows[name], sizes[name]) or _led(filling, rows[name], sizes[name])
            if place is not None:
                filling.take(place)
                placed[name] = place
        tried.append(placed)
    return min(tried, key=lambda placed: (-len(placed), sum(place.cost for place in placed.values())))
