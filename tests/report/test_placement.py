"""Names stand clear of every curve, at their own, or lead to it; a curve that hides behind another gets none."""

import numpy as np
import pytest
from numpy.typing import NDArray

from smoothcert.report.placement import COLUMNS, Box, Panel, Place, place_labels, seen

X = np.linspace(0, 1, 2001)


def line(y: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([X, y], axis=1)


def distance_to_curve(point: tuple[float, float], curve: NDArray[np.float64]) -> float:
    return float(np.hypot(*(curve - point).T).min())


def inside(box: Box, curve: NDArray[np.float64]) -> bool:
    """Whether some point of the finely sampled curve lies in the box."""
    x, y = curve.T
    return bool(((x > box.left) & (x < box.right) & (y > box.bottom) & (y < box.top)).any())


def corners(place: Place) -> list[tuple[float, float]]:
    box = place.box
    return [(x, y) for x in (box.left, box.right) for y in (box.bottom, box.top)]


@pytest.mark.parametrize("shape", [lambda x: x, lambda x: np.sin(9 * x), lambda x: 1.0 * (x > 0.3), lambda x: 0 * x])
def test_what_is_seen_of_a_line_bounds_it_in_every_column(shape: object) -> None:
    few = np.sort(np.random.default_rng(1).uniform(0, 1, 30))
    y = shape(few)  # type: ignore[operator]
    low, high = seen(np.stack([few, y], axis=1))
    dense = np.linspace(few[0], few[-1], 200_001)
    column = np.minimum((dense * COLUMNS).astype(int), COLUMNS - 1)
    values = np.interp(dense, few, y)
    for c in range(COLUMNS):
        here = values[column == c]
        if len(here):
            assert low[c] <= here.min() + 1e-9
            assert high[c] >= here.max() - 1e-9
            assert low[c] >= here.min() - 1e-3
            assert high[c] <= here.max() + 1e-3
        elif not few[0] <= c / COLUMNS <= few[-1]:
            assert (low[c], high[c]) == (np.inf, -np.inf)


def test_a_vertical_line_is_seen_whole() -> None:
    low, high = seen(np.array([[0.5, 0.0], [0.5, 1.0]]))
    assert (low[COLUMNS // 2], high[COLUMNS // 2]) == (0, 1)
    assert np.isfinite(low).sum() == 1


def test_curves_far_apart_are_touched_by_their_names() -> None:
    curves = {"upper": line(0.9 - 0.2 * X), "lower": line(0.5 - 0.3 * X**2)}
    panel = Panel(list(curves.values()), list(curves), [])
    placed = place_labels(panel, dict.fromkeys(curves, (0.2, 0.06)))
    assert set(placed) == set(curves)
    for name, place in placed.items():
        assert place.leader is None
        assert min(distance_to_curve(corner, curves[name]) for corner in corners(place)) < 0.01
        assert not any(inside(place.box, curve) for curve in curves.values())
    assert not placed["upper"].box.overlaps(placed["lower"].box)


def test_curves_close_together_are_led_to() -> None:
    # 0.02 apart: too close to be told apart by a name that touches, far enough for the tip of a line.
    curves = {f"curve {i}": line(0.45 + 0.02 * i - 0.2 * X) for i in range(5)}
    panel = Panel(list(curves.values()), list(curves), [])
    placed = place_labels(panel, dict.fromkeys(curves, (0.15, 0.06)))
    assert set(placed) == set(curves)
    boxes = [place.box for place in placed.values()]
    for name, place in placed.items():
        assert place.leader is not None
        tip, end = place.leader
        assert distance_to_curve(tip, curves[name]) < 0.003
        assert min(abs(end[0] - x) + abs(end[1] - y) for x, y in corners(place)) < 1e-12
        assert sum(map(place.box.overlaps, boxes)) == 1
        path = np.linspace(tip, end, 100)
        assert not any(inside(box, path) for box in boxes if box is not place.box), "no line runs through a name"
        assert not any(inside(place.box, curve) for curve in curves.values())


def test_equal_curves_get_no_names() -> None:
    same = line(0.5 + 0 * X)
    assert place_labels(Panel([same, same], ["a", "b"], []), {"a": (0.1, 0.05), "b": (0.1, 0.05)}) == {}


def test_names_keep_clear_of_texts_and_of_lines_without_a_name() -> None:
    curve, other = line(0.5 + 0 * X), np.array([[0.6, 0.0], [0.6, 1.0]])
    text = Box(0, 0.5, 0.6, 1)
    place = place_labels(Panel([curve, other], ["a", None], [text]), {"a": (0.3, 0.1)})["a"]
    assert not place.box.overlaps(text)
    assert place.box.right <= 0.6 or place.box.left >= 0.6
    assert place_labels(Panel([curve, other], ["a", None], [Box(0, 0, 1, 1)]), {"a": (0.3, 0.1)}) == {}


def test_a_line_does_not_lead_through_what_is_taken() -> None:
    panel = Panel([line(0.1 + 0 * X)], ["a"], [Box(0.4, 0.4, 0.6, 0.6)])
    assert panel.covered((0.3, 0.3), (0.7, 0.7))
    assert panel.covered((0.3, 0.7), (0.7, 0.3))
    assert not panel.covered((0.3, 0.3), (0.39, 0.7))
    assert not panel.covered((0.1, 0.3), (0.7, 0.39))
    # Above the pair a text from edge to edge: beyond it there is room, but every line there runs through the text.
    curves = [line(0.5 + 0 * X), line(0.52 + 0 * X)]
    taken = [Box(0, 0.55, 1, 0.56), Box(0, 0, 1, 0.45)]
    assert place_labels(Panel(curves, ["a", "b"], taken), {"a": (0.1, 0.05), "b": (0.1, 0.05)}) == {}


def test_a_name_too_wide_for_the_panel_gets_no_place() -> None:
    assert place_labels(Panel([line(0.5 - 0.1 * X)], ["a"], []), {"a": (1.1, 0.05)}) == {}
