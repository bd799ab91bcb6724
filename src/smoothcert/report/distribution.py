"""The empirical distribution of p over images, p the vote share of the true class: what an average radius hides.

The average certified radius is dominated by images with p close to 1, where a little more of p is much more radius: it
can grow while images near the decision boundary are lost. The figure shows the whole distribution on a probit axis, on
which equal steps are equal steps of radius.

For an image that is classified correctly, p is the p_A of the papers. For the others p_A belongs to a wrong class, and
a large one would look like a success; the share of the true class, then at most 1/2, says how far the image is from
being correct. One number serves for all images, and above 1/2 a radius can be certified.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from scipy.special import ndtri

from smoothcert.certification.columns import Floats
from smoothcert.report.labels import panels_of, scope_text
from smoothcert.report.looks import Look, looks_of
from smoothcert.report.protocol import noise_of
from smoothcert.report.style import GREY, LABEL_SIZE, NOTE_SIZE, draw_steps, legend_below, panel_grid, plain
from smoothcert.report.summary import Summary

LEAST_SHOWN = 0.01
"""The axis starts at this p; the curves start at the share of images that lie to its left."""
_TICKS = (0.01, 0.1, 0.5, 0.9, 0.99, 0.9999, 0.999999)
_STRIP_COLOUR = "#DDE1E6"
_STRIP = 0.55
"""Width of the strip at the right end, in units of the probit axis, that holds the images whose votes all agree."""


Panel = Sequence[tuple[str, Summary, Floats]]
"""Label, run and `probits_of` of each curve of a panel."""


def probits_of(summary: Summary) -> Floats | None:
    """Phi^-1(p) of the images of a run, ascending: -inf if p is 0, +inf if all votes agree; p is an unbiased estimate
    where n was fixed.

    None if the file does not store votes of every image, as files of other tools, or has those of several stages.
    """
    columns = summary.file.columns
    if summary.file.settings.get("cascade") or len(np.unique(columns.votes_row)) < len(columns):
        return None
    return np.sort(ndtri(columns.votes_for(columns.label) / columns.n))


def _last_probit(panel: Panel) -> float:
    """Phi^-1(1 - 1/n): no image lies to the right of it unless all its n votes agree."""
    most = max(int(summary.file.columns.n.max()) for _, summary, _ in panel)
    finite = [float(probits[np.isfinite(probits)].max(initial=0.0)) for _, _, probits in panel]
    return max(1.5, *finite, -float(ndtri(1 / most)) if most > 1 else 0.0)


def cumulative(probits: Floats, end: float) -> tuple[Floats, Floats]:
    """Corners (probit, share of images in [0, 1] at or below it); a share holds up to the next corner.

    They start at `LEAST_SHOWN` and stop at `end`, beyond all images whose votes do not all agree.
    """
    start = float(ndtri(LEAST_SHOWN))
    inner = probits[(probits > start) & np.isfinite(probits)]
    below = int((probits <= start).sum())
    counts = np.append(np.arange(below, below + len(inner) + 1), below + len(inner))
    return np.concatenate([[start], inner, [end]]), counts / len(probits)


def _radius_axis(axes: Axes, sigma: float, last: float) -> None:
    """On top: the radius sigma Phi^-1(p) that p would certify if it were known exactly."""
    top = axes.secondary_xaxis("top", functions=(lambda z: np.multiply(z, sigma), lambda r: np.divide(r, sigma)))
    ticks = [r for r in MaxNLocator(5).tick_values(0, sigma * last) if r <= sigma * last]
    top.xaxis.set_major_locator(FixedLocator(ticks))
    top.tick_params(labelsize=NOTE_SIZE, color=GREY, labelcolor=GREY)
    top.spines["top"].set_visible(False)
    top.set_xlabel("L2 radius that p would certify if it were exact", fontsize=LABEL_SIZE, color=GREY)


def _draw_panel(axes: Axes, panel: Panel, looks: Mapping[str, Look]) -> None:
    last = _last_probit(panel)
    axes.set_xlim(float(ndtri(LEAST_SHOWN)), last + _STRIP)
    ticks = [p for p in _TICKS if ndtri(p) <= last - 0.25]
    axes.set_xticks([*ndtri(ticks), last + _STRIP / 2], [*(f"{p:g}" for p in ticks), "1"])
    axes.axvline(0, color=GREY, linewidth=0.7, zorder=1)
    axes.axvspan(last, last + _STRIP, color=_STRIP_COLOUR, linewidth=0, zorder=0)
    for label, _, probits in panel:
        x, shares = cumulative(probits, last + _STRIP)
        draw_steps(axes, x, 100 * shares, label, looks[label])
    text = scope_text(summary for _, summary, _ in panel)
    note = axes.text(0.02, 0.97, text, transform=axes.transAxes, va="top", color=GREY, fontsize=NOTE_SIZE)
    note.set(zorder=1.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # above the grid, below the curves
    sigma = panel[0][1].sigma
    if sigma and all(noise_of(summary.file) == "gaussian" for _, summary, _ in panel):
        _radius_axis(axes, sigma, last)


def draw_distribution(summaries: Sequence[Summary]) -> Figure | None:
    """The share of images with p <= x against x, one panel per sigma and data set; None if no file can be drawn.

    p is the share of an image's n votes for its label, on a probit axis from 0.01; a grey line marks 1/2. The images
    whose votes all agree are beyond what n votes can resolve: in the strip at the right end, they are what a curve
    lacks of 100%. The axis on top (Gaussian noise only) is the radius of a p known exactly; certified radii are
    smaller. A file without votes, or with those of several stages, is named below the panels.
    """
    members = panels_of(summaries)
    looks = looks_of(plain(label) for panel in members for label, _ in panel)
    known = {s.name: probits for s in summaries if (probits := probits_of(s)) is not None}
    drawn = [drawable for panel in members if (drawable := [run for run in panel if run[1].name in known])]
    if not drawn:
        return None
    x = "vote share p of the true class\n(p < 0.5: not certified; grey: all agree)"
    y = "images with this p or less (%)\nlower is better"
    figure, grid = panel_grid(drawn, x, y, extra_height=0.5)
    for axes, panel in zip(grid, drawn, strict=True):
        _draw_panel(axes, [(plain(label), summary, known[summary.name]) for label, summary in panel], looks)
    left_out = [plain(summary.name) for panel in members for _, summary in panel if summary.name not in known]
    if left_out:
        text = f"not drawn, without votes of one classifier for every image: {', '.join(left_out)}"
        figure.supxlabel(text, fontsize=NOTE_SIZE, color=GREY)
    legend_below(figure)
    return figure
