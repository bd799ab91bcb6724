"""The empirical distribution of p over images, p the vote share of the true class: what an average radius hides.

The average certified radius is dominated by images with p next to 1, where a little more of p is much more radius: it
can grow while images near the decision are lost. So the whole distribution is shown, on a probit axis, on which equal
steps are equal steps of radius.

For an image that is classified right, p is the p_A of the papers. For the others p_A belongs to a wrong class, and a
large one would look like a success; the share of the true class, then at most 1/2, says how far from right the image
is. So one number serves for all images, and above 1/2 a radius can be certified.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray
from scipy.special import ndtri

from smoothcert.certification.certificates import CertificatesFile, CertifiedImage
from smoothcert.report.panels import Look, Member, looks_of, panel_grid, panels_of, write_pictures
from smoothcert.report.style import GREY, LABEL_SIZE, NOTE_SIZE, PALE, legend_below, plain, quiet_axes

Floats = NDArray[np.float64]
LEAST_SHOWN = 0.01
"""The axis starts at this p; the curves start at the share of images that lie to its left."""
_TICKS = (0.01, 0.1, 0.5, 0.9, 0.99, 0.9999, 0.999999)
_TICKS_BETWEEN = (0.999, 0.99999)
_STRIP_COLOUR = "#F0F0F0"
_STRIP = 0.45
"""Width of the strip at the right end, in units of the probit axis, that holds the images whose votes all agree."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """One run: Phi^-1(p) of each image, ascending, -inf where p is 0 or unknown and +inf where all votes agree.

    `bounded`: the file has no votes, so p is a lower bound, and unknown where the image is wrong or abstained; then
    the curve means something from p = 1/2 on only, and lies above that of p itself.
    """

    member: Member
    probits: Floats
    bounded: bool


def vote_share(row: CertifiedImage) -> float:
    """The share of the row's n votes that went to its label: an unbiased estimate of p where n was fixed."""
    return dict(row.certificate.votes).get(row.label, 0) / row.certificate.n


def distribution_of(member: Member) -> Distribution | None:
    """The distribution of p in a file; None where it cannot be told.

    Files of other tools have no votes, and label-aware ones lack some: there the certified radius r of a right image
    tells p >= Phi(r / sigma) under Gaussian noise.
    """
    rows, sigma = member.file.rows, member.summary.sigma
    if all(row.certificate.votes for row in rows):
        shares = np.array([vote_share(row) for row in rows])
        return Distribution(member, np.sort(ndtri(shares)), bounded=False)
    if not sigma or not _gaussian(member):
        return None
    probits = [row.certificate.radius / sigma if row.correct else -math.inf for row in rows]
    return Distribution(member, np.sort(np.array(probits)), bounded=True)


def _gaussian(member: Member) -> bool:
    return str(member.file.settings.get("noise") or "gaussian").lower() == "gaussian"


def _label(distribution: Distribution) -> str:
    return f"{distribution.member.label} (lower bounds)" if distribution.bounded else distribution.member.label


def _last_probit(panel: Sequence[Distribution]) -> float:
    """Phi^-1(1 - 1/n): no image whose n votes do not all agree lies to the right of it."""
    most = max(row.certificate.n for d in panel for row in d.member.file.rows)
    finite = [float(d.probits[np.isfinite(d.probits)].max(initial=0.0)) for d in panel]
    return max(1.5, *finite, -float(ndtri(1 / most)) if most > 1 else 0.0)


def cumulative(distribution: Distribution, end: float) -> tuple[Floats, Floats]:
    """Corners (probit, share of images in [0, 1] at or below it), a value holding up to the next (`where="post"`).

    They start at `LEAST_SHOWN` (lower bounds: at p = 1/2); the images at p = 1 are counted at `end`, beyond all others.
    """
    start = 0.0 if distribution.bounded else float(ndtri(LEAST_SHOWN))
    probits = distribution.probits
    inner = probits[(probits > start) & np.isfinite(probits)]
    below = int((probits <= start).sum())
    counts = np.append(np.arange(below, below + len(inner) + 1), len(probits))
    return np.concatenate([[start], inner, [end]]), counts / len(probits)


def _draw_steps(axes: Axes, distribution: Distribution, look: Look, jump: float) -> None:
    x, shares = cumulative(distribution, jump)
    (line,) = axes.step(x, 100 * shares, where="post", color=look[0], linestyle=look[1], linewidth=1.6)
    line.set_label(_label(distribution))


def _radius_axis(axes: Axes, sigma: float, last: float) -> None:
    """On top: the radius sigma Phi^-1(p) that p would certify if it were known exactly."""
    top = axes.secondary_xaxis("top", functions=(lambda z: np.multiply(z, sigma), lambda r: np.divide(r, sigma)))
    ticks = [r for r in MaxNLocator(5).tick_values(0, sigma * last) if r <= sigma * last]
    top.xaxis.set_major_locator(FixedLocator(ticks))
    top.tick_params(labelsize=NOTE_SIZE, color=GREY, labelcolor=GREY)
    top.spines["top"].set_visible(False)
    top.set_xlabel("radius σΦ⁻¹(p)", fontsize=LABEL_SIZE, color=GREY)


def _draw_panel(axes: Axes, panel: Sequence[Distribution], looks: Mapping[str, Look]) -> None:
    last = _last_probit(panel)
    axes.set_xlim(float(ndtri(LEAST_SHOWN)), last + _STRIP)
    axes.set_ylim(0, 102)
    quiet_axes(axes)
    ticks = [p for p in _TICKS if ndtri(p) <= last - 0.25]
    axes.set_xticks([z for z in ndtri(_TICKS_BETWEEN) if z < last], minor=True)
    axes.grid(which="minor", color=PALE, linewidth=0.6)
    axes.set_xticks([*ndtri(ticks), last + _STRIP / 2], [*(f"{p:g}" for p in ticks), "1"])
    axes.axvline(0, color=GREY, linewidth=0.7, zorder=1)
    axes.axvspan(last, last + _STRIP, color=_STRIP_COLOUR, linewidth=0, zorder=0)
    # Not to be seen: it keeps names out of the strip.
    axes.axvline(last, color=_STRIP_COLOUR, linewidth=0.1, zorder=0)
    for i, distribution in enumerate(panel):
        jump = last + _STRIP * (i + 1) / (len(panel) + 1)
        _draw_steps(axes, distribution, looks[distribution.member.label], jump)
    sigma = panel[0].member.summary.sigma
    if sigma and all(_gaussian(d.member) for d in panel):
        _radius_axis(axes, sigma, last)


def _figure(panels: Sequence[Sequence[Distribution]], looks: Mapping[str, Look], left_out: Sequence[str]) -> Figure:
    members = [[d.member for d in panel] for panel in panels]
    x, y = "vote share of the true class, p", "images with this p or less (%)"
    figure, grid = panel_grid(members, x, y, extra_height=0.5)
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, looks)
    if left_out:
        text = f"not drawn, having neither votes nor radii under a known Gaussian noise: {', '.join(left_out)}"
        figure.supxlabel(text, fontsize=NOTE_SIZE, color=GREY)
    legend_below(figure)
    return figure


def draw_distribution(files: Sequence[tuple[str, CertificatesFile]], pictures: Sequence[Path]) -> bool:
    """Draw, for (name, file) pairs, the share of images with p <= x against x, one panel a sigma and data set.

    p is the share of an image's n votes for its label, on a probit axis from 0.01; a grey line marks 1/2. The images
    whose votes all agree are beyond what n votes can resolve: in the strip at the right end, a curve rises by their
    share. The axis on top (Gaussian noise only) is the radius of a p known exactly; certified radii are a little
    smaller. A file without votes is drawn from p = 1/2 on, by the lower bounds that its radii are; one without votes
    and sigma is named below the panels instead.

    False, and nothing written, where no file can be drawn. Pictures are PNG, PDF or SVG by their endings, replaced
    atomically.
    """
    members = panels_of(files)
    looks = looks_of(member.label for panel in members for member in panel)
    found = [[(member, distribution_of(member)) for member in panel] for panel in members]
    panels = [[d for _, d in panel if d is not None] for panel in found]
    left_out = [plain(member.summary.name) for panel in found for member, d in panel if d is None]
    panels = [panel for panel in panels if panel]
    if not panels:
        return False
    write_pictures(lambda: _figure(panels, looks, left_out), pictures)
    return True
