"""Certified accuracy against radius: one panel a sigma, one exact step curve a run, what attacks left above it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from smoothcert.certification.attack_file import AttacksFile, read_attacks
from smoothcert.certification.certificates import CertificatesFile, CertifiedImage
from smoothcert.report.locate import find_attacks
from smoothcert.report.panels import Look, Member, looks_of, panel_grid, panels_of, write_pictures
from smoothcert.report.style import GREY, NOTE_SIZE, legend_below, quiet_axes
from smoothcert.report.summary import counted_radii

Floats = NDArray[np.float64]
ATTACKED = "attacked (upper bound)"
ATTACKED_PART = "attacked (upper bound, of other or fewer images)"


@dataclass(frozen=True, slots=True)
class Steps:
    """A step function by its corners: `accuracy[i]` is the height between `radii[i]` and the next radius."""

    radii: Floats
    accuracy: Floats


@dataclass(frozen=True, slots=True)
class Curve(Steps):
    """One run in a panel: the corners that `step_curve` gives, the run itself, and its attacks."""

    member: Member
    attacked: tuple[Steps, ...] = ()
    same_images: bool = True
    """Whether the attacks were on the certified images: only then must their curves lie above."""


def step_curve(rows: Sequence[CertifiedImage]) -> tuple[Floats, Floats]:
    """Corners (radius, accuracy in [0, 1]) of the certified accuracy as a step function, drawn with `where="post"`: the
    accuracy of a corner holds beyond its radius, up to and including the next radius. Both arrays have one entry more
    than there are right images; the last accuracy is 0. No grid: the curve has every step of the data."""
    radii = np.sort(np.asarray(counted_radii(rows), dtype=np.float64))
    accuracy = np.arange(len(radii), -1, -1, dtype=np.float64) / max(len(rows), 1)
    return np.concatenate([[0.0], radii]), accuracy


def attacked_curve(file: AttacksFile) -> Steps:
    """Corners of the empirical accuracy, exact like `step_curve`, ending at the largest radius that was attacked.

    At each radius an upper bound on robust accuracy; beyond the end nothing was tried.
    """
    distances = np.sort(np.asarray([row.distance for row in file.rows if not row.withstood], dtype=np.float64))
    end = max([*(file.settings.get("radii") or ()), *distances], default=0.0)
    standing = 1 - np.arange(len(distances) + 1, dtype=np.float64) / max(len(file.rows), 1)
    return Steps(np.concatenate([[0.0], distances, [end]]), np.append(standing, standing[-1]))


def _attacks_on(file: CertificatesFile) -> list[AttacksFile]:
    """The attacks in the run's folder on the classifier and data that `file` certifies."""
    keys = ("weights_sha256", "noise", "sigma", "sound", "dataset", "split", "precision")
    found = [read_attacks(path) for path in find_attacks(file.path)]
    # What is off may be recorded as such or not at all.
    wanted = [file.settings.get(key) or None for key in keys]
    return [a for a in found if a.rows and [a.settings.get(key) or None for key in keys] == wanted]


def _curve(member: Member) -> Curve:
    attacks = _attacks_on(member.file)
    certified = {row.index for row in member.file.rows}
    same = all({row.index for row in attack.rows} == certified for attack in attacks)
    return Curve(*step_curve(member.file.rows), member, tuple(map(attacked_curve, attacks)), same)


def _ceilings(panel: Sequence[Curve]) -> dict[float, int]:
    """Largest certifiable radius -> its n, for the runs that tell; ascending."""
    pairs = {c.member.summary.ceiling: c.member.summary.n for c in panel}
    return dict(sorted((c, n) for c, n in pairs.items() if c is not None and n is not None))


def _reach(panel: Sequence[Curve]) -> float:
    """The right end of the axis: a little beyond the last step and the last ceiling, so that their labels fit."""
    ends = [*(float(curve.radii[-1]) for curve in panel), *_ceilings(panel)]
    return 1.09 * (max(ends) or panel[0].member.summary.sigma or 1.0)


def _draw_ceilings(axes: Axes, panel: Sequence[Curve], reach: float) -> None:
    labelled = -math.inf
    for ceiling, n in _ceilings(panel).items():
        axes.axvline(ceiling, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
        if ceiling - labelled > 0.07 * reach:
            text = f"limit of n = {n:,}"
            axes.text(
                ceiling + 0.012 * reach, 50, text, rotation=90, va="center", ha="left", color=GREY, fontsize=NOTE_SIZE
            )
            labelled = ceiling


def _draw_panel(axes: Axes, panel: Sequence[Curve], looks: Mapping[str, Look]) -> None:
    reach = _reach(panel)
    axes.set_xlim(0, reach)
    axes.set_ylim(0, 102)
    quiet_axes(axes)
    _draw_ceilings(axes, panel, reach)
    for curve in panel:
        colour, style = looks[curve.member.label]
        x, y = curve.radii, 100 * curve.accuracy
        axes.step(x, y, where="post", color=colour, linestyle=style, linewidth=1.6, label=curve.member.label)
        for steps in curve.attacked:
            axes.step(steps.radii, 100 * steps.accuracy, where="post", color=colour, linewidth=0.8)


def _attack_entry(curves: Sequence[Curve], looks: Mapping[str, Look]) -> list[tuple[str, Line2D]]:
    """The legend's entry for the thin curves, whatever their colour; none where there are no such curves."""
    shown = [curve for curve in curves if curve.attacked]
    if not shown:
        return []
    text = ATTACKED if all(curve.same_images for curve in shown) else ATTACKED_PART
    colour = looks[shown[0].member.label][0] if len(curves) == 1 else GREY
    return [(text, Line2D([], [], color=colour, linewidth=0.8))]


def _figure(files: Sequence[tuple[str, CertificatesFile]]) -> Figure:
    panels = [[_curve(member) for member in panel] for panel in panels_of(files)]
    curves = [curve for panel in panels for curve in panel]
    looks = looks_of(curve.member.label for curve in curves)
    figure, grid = panel_grid([[c.member for c in panel] for panel in panels], "radius", "certified accuracy (%)")
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, looks)
    legend_below(figure, _attack_entry(curves, looks))
    return figure


def draw_curves(files: Sequence[tuple[str, CertificatesFile]], paths: Sequence[Path]) -> None:
    """Draw (name, file) pairs and write the picture to each of `paths`, as PNG, PDF or SVG by its ending.

    A thin dashed line marks the largest radius that n votes can certify, where n and alpha are known. Where the run
    folder of a certificates file holds `attacks/*.tsv` on the same classifier, a thin curve of the run's colour shows
    the accuracy that these attacks left: an upper bound. Files are replaced atomically.
    """
    write_pictures(lambda: _figure(files), paths)
