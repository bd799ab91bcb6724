"""The straight line from an image to its unrestricted adversarial example (figure 2 of
https://arxiv.org/abs/2111.09277): the confidence of the smoothed classifier on the way, and the images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from smoothcert.analysis.compared_runs import (
    ComparedRun,
    ComparedRuns,
    UnrestrictedAttack,
    adversarial_examples,
    refuse_outside,
    smoothed,
)
from smoothcert.certification.columns import Floats
from smoothcert.io.text import csv_text
from smoothcert.report.style import (
    FIRST,
    GREY,
    NOTE_SIZE,
    SECOND,
    TITLE_SIZE,
    legend_below,
    new_figure,
    quiet_axes,
)

SHOWN = 9
"""Images in the strip."""


@dataclass(frozen=True)
class Line:
    """One run along the line x + ratio * (adversarial - x); arrays have one entry per ratio."""

    run: str
    other: int
    """The class other than the label that is most likely at the adversarial example."""
    distance: float
    """L2 norm of adversarial - x."""
    confidence: Floats
    """Mean softmax over the noise samples, [ratios, classes]."""
    votes: Floats
    """Share of the noise samples under which a class is chosen, [ratios, classes]."""
    strip: Floats
    """SHOWN evenly spaced images of the line, [SHOWN, c, h, w] in [0, 1], without noise."""


@dataclass(frozen=True)
class Interpolation:
    """Confidences between an image and its adversarial examples, one for each run."""

    compared: ComparedRuns
    index: int
    label: int
    ratios: Floats
    lines: tuple[Line, ...]
    num_noise: int
    """Noises that confidences and votes are means over."""

    def crossing(self, line: Line) -> float | None:
        """The first ratio at which the label is no more likely than another class, by linear interpolation.

        None if the label stays ahead all the way.
        """
        others = np.delete(line.confidence, self.label, axis=1).max(1)
        ahead = line.confidence[:, self.label] - others
        behind = np.flatnonzero(ahead <= 0)
        if len(behind) == 0:
            return None
        i = int(behind[0])
        if i == 0:
            return 0.0
        share = ahead[i - 1] / (ahead[i - 1] - ahead[i])
        return float(self.ratios[i - 1] + share * (self.ratios[i] - self.ratios[i - 1]))


def interpolate(
    compared: ComparedRuns,
    index: int,
    attack: UnrestrictedAttack,
    *,
    points: int = 41,
    num_noise: int = 500,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Interpolation:
    """Walk from test image `index` to the adversarial example that `attack` finds for each run.

    All points of a line and all runs see the same noise, so that curves are smooth and comparable; it is not the noise
    that the attack used.
    """
    refuse_outside("points", points, 2)
    refuse_outside("n", num_noise)
    _, labels = compared.images([index])
    ratios = torch.linspace(0, 1, points, device=compared.device)
    lines = []
    for run in compared.runs:
        lines.append(_line(compared, run, index, attack, ratios, num_noise, seed))
        on_progress(len(lines))
    grid = ratios.double().cpu().numpy()
    return Interpolation(compared, index, int(labels[0]), grid, tuple(lines), num_noise)


def _line(
    compared: ComparedRuns,
    run: ComparedRun,
    index: int,
    attack: UnrestrictedAttack,
    ratios: Tensor,
    num_noise: int,
    seed: int,
) -> Line:
    images, labels = compared.images([index])
    adversarial = adversarial_examples(compared, run, [index], attack, seed)
    offset = adversarial - images
    confidence, votes = [], []
    at_once = compared.images_at_once()
    for part in torch.split(ratios, at_once):
        noise = compared.noise_blocks([index], num_noise, seed, "estimate")
        mean, share = smoothed(run.classifier, images + part.view(-1, 1, 1, 1) * offset, noise)
        confidence.append(mean)
        votes.append(share)
    means = torch.cat(confidence).cpu()
    last = means[-1].clone()
    last[int(labels[0])] = -1
    shown = images + torch.linspace(0, 1, SHOWN, device=images.device).view(-1, 1, 1, 1) * offset
    return Line(
        run=run.name,
        other=int(last.argmax()),
        distance=float(torch.linalg.vector_norm(offset)),
        confidence=means.numpy(),
        votes=torch.cat(votes).cpu().numpy(),
        strip=shown.double().cpu().numpy(),
    )


def interpolation_csv(interpolation: Interpolation) -> str:
    """One row per run and ratio: the label, the other class, and the confidence and vote share of every class."""
    classes = range(interpolation.lines[0].confidence.shape[1])
    header = ["run", "ratio", "distance", "label", "other_class"]
    header += [f"confidence_{c}" for c in classes] + [f"votes_{c}" for c in classes]
    rows = (
        [line.run, float(r), float(r) * line.distance, interpolation.label, line.other, *map(float, (*mean, *share))]
        for line in interpolation.lines
        for r, mean, share in zip(interpolation.ratios, line.confidence, line.votes, strict=True)
    )
    return csv_text([header, *rows])


def draw_interpolation(interpolation: Interpolation, *, votes: bool = False) -> Figure:
    """For each run the confidence in the label and in the class it becomes, above the images on the way and what was
    added to them.

    A third class that is ahead of both somewhere is drawn thin. With `votes`, dotted lines show the share of votes.
    """
    lines, compared = interpolation.lines, interpolation.compared
    figure = new_figure(5.4, 0.5 + 3.6 * len(lines))
    title = f"{compared.title}, test image {interpolation.index}, σ = {compared.noise.sigma:g}"
    figure.suptitle(title, fontsize=TITLE_SIZE)
    for part, line in zip(figure.subfigures(len(lines), 1, squeeze=False).ravel(), lines, strict=True):
        curve, strip, added = part.subplots(3, 1, gridspec_kw={"height_ratios": [3.6, 1, 1]})
        _draw_curves(curve, interpolation, line, votes)
        _draw_strip(strip, line.strip)
        for ratio, place in zip(np.linspace(0, 1, SHOWN), np.arange(SHOWN) + 0.5, strict=True):
            text = strip.text(place / SHOWN, 1.02, f"{ratio:.3g}", transform=strip.transAxes, ha="center", va="bottom")
            text.set(fontsize=NOTE_SIZE, color=GREY)
        _draw_strip(added, 0.5 + (line.strip - line.strip[:1]) / 2)
        added.set_title("what was added to the image (grey: nothing)", fontsize=NOTE_SIZE, color=GREY, pad=2)
    samples = f"confidence: mean softmax over {interpolation.num_noise:,} noise samples"
    legend_below(figure, curves=False, notes=[samples, "a class that is not drawn is nowhere the most likely one"])
    return figure


def _draw_curves(axes: Axes, whole: Interpolation, line: Line, votes: bool) -> None:
    quiet_axes(axes)
    _draw_class(axes, whole, line, whole.label, f"class {whole.label} (the label)", FIRST, "-")
    _draw_class(axes, whole, line, line.other, f"class {line.other}", SECOND, (0, (5, 1.5)))
    for c in sorted(set(line.confidence.argmax(1).tolist()) - {whole.label, line.other}):
        peak = int(line.confidence[:, c].argmax())
        axes.plot(whole.ratios, line.confidence[:, c], color=GREY, linewidth=0.8)
        axes.text(whole.ratios[peak], line.confidence[peak, c], str(c), color=GREY, fontsize=7.5, va="bottom")
    if votes:
        for c, colour in ((whole.label, FIRST), (line.other, SECOND)):
            axes.plot(whole.ratios, line.votes[:, c], color=colour, linestyle=(0, (1, 1.5)), linewidth=1.0)
    crossing = whole.crossing(line)
    if crossing is not None:
        axes.axvline(crossing, color=GREY, linewidth=0.8)
        text = f"label overtaken at {crossing:.2f}, L2 distance {crossing * line.distance:.2f}"
        axes.set_title(text, fontsize=NOTE_SIZE + 0.5, color=GREY, loc="right")
    axes.set_xlim(0, 1)
    ticks = np.linspace(0, 1, SHOWN)
    axes.set_xticks(ticks, [f"{ratio:.3g}" for ratio in ticks])
    axes.set_ylim(0, 1.02)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel("smoothed confidence (dotted: votes)" if votes else "smoothed confidence")
    axes.set_xlabel(f"mixing ratio (0: the image; 1: adversarial example, L2 distance {line.distance:.2f})")
    axes.set_title(whole.compared.labels[line.run], fontsize=TITLE_SIZE, loc="left")


def _draw_class(axes: Axes, whole: Interpolation, line: Line, c: int, name: str, colour: str, style: Any) -> None:
    """The confidence of a class, labelled at the end at which it is higher."""
    values = line.confidence[:, c]
    axes.plot(whole.ratios, values, color=colour, linestyle=style, linewidth=1.7)
    end, side = (0, "left") if values[0] >= values[-1] else (-1, "right")
    text = axes.annotate(name, (whole.ratios[end], values[end]), (-5 if end else 5, 2), textcoords="offset points")
    text.set(color=colour, fontsize=8.5, va="bottom", ha=side)


def _draw_strip(axes: Axes, images: Floats) -> None:
    """The images side by side, a white gap between them."""
    strip = np.pad(images, ((0, 0), (0, 0), (0, 0), (1, 1)), constant_values=1.0)
    whole = np.concatenate(list(strip), axis=2).transpose(1, 2, 0).clip(0, 1)
    axes.imshow(whole.squeeze(2) if whole.shape[2] == 1 else whole, cmap="gray", vmin=0, vmax=1)
    axes.set_axis_off()
