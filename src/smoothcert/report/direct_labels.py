"""Names of curves at their right ends, where a few curves are far enough apart: no legend to look up."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from smoothcert.report.looks import Look
from smoothcert.report.style import LABEL_SIZE

MOST_CURVES = 4
LONGEST = 32
"""Longer names would take the room of the curves."""
LINE_HEIGHT = 6.0
"""Height of a line of text, in percent of the axis."""
MOST_MOVED = 7.0
"""How far a name may be moved from the end of its curve, in percent."""


def label_right(axes: Axes, end: float, heights: Mapping[str, float], looks: Mapping[str, Look]) -> bool:
    """Write each label to the right of the axes, joined to its curve's (`end`, height in percent) by a thin line.

    False, and nothing is drawn, if there are too many curves, their names are long or their ends close together.
    """
    places = _spread(heights)
    if len(heights) > MOST_CURVES or max(map(len, heights)) > LONGEST:
        return False
    if any(abs(places[label] - heights[label]) > MOST_MOVED for label in places):
        return False
    right = axes.get_xlim()[1]
    for label, height in heights.items():
        colour = looks[label].colour
        axes.plot([end, right], [height, places[label]], color=colour, linewidth=0.6, clip_on=False, zorder=1)
        text = axes.annotate(label, (right, places[label]), (4, 0), textcoords="offset points", va="center")
        text.set(color=colour, fontsize=LABEL_SIZE + 0.5, fontweight="bold", annotation_clip=False)
    return True


def _spread(heights: Mapping[str, float]) -> dict[str, float]:
    """Places at least one line apart, from the lowest height up, then centred on the heights."""
    places: dict[str, float] = {}
    for label in sorted(heights, key=lambda label: (heights[label], label)):
        below = max(places.values(), default=-LINE_HEIGHT)
        places[label] = max(heights[label], below + LINE_HEIGHT)
    shift = sum(places[label] - heights[label] for label in places) / len(places)
    return {label: place - min(shift, min(places.values())) for label, place in places.items()}
