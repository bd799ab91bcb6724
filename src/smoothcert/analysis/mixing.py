"""Equal-confidence mixing ratios (figure 5 of https://arxiv.org/abs/2111.09277): how far an image can be mixed with its
adversarial example before the smoothed prediction changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
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
from smoothcert.data.images import in_parts
from smoothcert.errors import RequestError
from smoothcert.io.text import csv_text
from smoothcert.report.looks import looks_of
from smoothcert.report.style import draw_steps, legend_below, one_panel, plain

GRID = 20
"""Steps of the first search from 0 to 1."""
HALVINGS = 6
"""Bisections of the step that contains the change: ratios are exact to 1 / (GRID * 2**HALVINGS), less than 0.001."""
Ahead = Callable[[Tensor, Tensor], Tensor]
"""(positions int64 [k], ratios [k]) -> how far the label is ahead there, [k]."""


@dataclass(frozen=True)
class Ratios:
    """The mixing ratios of one run; arrays have one entry per image."""

    run: str
    ratio: Floats
    """0 if the image is misclassified, infinite if the adversarial example is still classified correctly."""
    distance: Floats
    """L2 norm of adversarial - x."""

    @property
    def wrong_from_the_start(self) -> float:
        return float((self.ratio == 0).mean())

    @property
    def never_changes(self) -> float:
        return float(np.isinf(self.ratio).mean())

    @property
    def median(self) -> float:
        """Infinite if more than half of the images never change."""
        return float(np.quantile(self.ratio, 0.5, method="inverted_cdf"))


@dataclass(frozen=True)
class Mixing:
    """Equal-confidence mixing ratios of several runs on the same images."""

    compared: ComparedRuns
    indices: tuple[int, ...]
    runs: tuple[Ratios, ...]


def first_change(ahead: Ahead, images: int, device: torch.device) -> Tensor:
    """The smallest ratio in [0, 1] where `ahead` <= 0, for each of `images` images; infinity where there is none.

    A grid of GRID steps from 0 upwards, on images that have not changed yet, then bisection of the step before the
    first change. A change that is undone within one step of the grid is missed.
    """
    upper = torch.full((images,), torch.inf, device=device, dtype=torch.float64)
    for step in range(GRID + 1):
        unchanged = torch.nonzero(upper.isinf()).squeeze(1)
        if len(unchanged) == 0:
            break
        ratio = torch.full((len(unchanged),), step / GRID, device=device, dtype=torch.float64)
        changed = ahead(unchanged, ratio) <= 0
        upper[unchanged[changed]] = ratio[changed]
    between = torch.nonzero(upper.isfinite() & (upper > 0)).squeeze(1)
    high, low = upper[between], upper[between] - 1 / GRID
    for _ in range(HALVINGS if len(between) else 0):
        middle = (low + high) / 2
        changed = ahead(between, middle) <= 0
        high, low = torch.where(changed, middle, high), torch.where(changed, low, middle)
    upper[between] = high
    return upper


def mixing_ratios(
    compared: ComparedRuns,
    indices: Sequence[int],
    attack: UnrestrictedAttack,
    *,
    num_noise: int = 100,
    seed: int = 0,
    on_progress: Callable[[str, int], None] = lambda run, done: None,
) -> Mixing:
    """For every run and test image the ratio at which another class has the label's smoothed confidence.

    Confidence is the mean softmax over `num_noise` noises, the same at all ratios and for all runs, hence continuous in
    the ratio.
    """
    refuse_outside("n", num_noise)
    if not indices:
        raise RequestError("expected at least one image, got none")
    results = []
    at_once = compared.images_at_once()
    for run in compared.runs:
        parts = []
        for part in in_parts(indices, at_once):
            parts.append(_of_images(compared, run, part, attack, num_noise, seed))
            on_progress(run.name, sum(len(ratio) for ratio, _ in parts))
        ratio, distance = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        results.append(Ratios(run.name, ratio, distance))
    return Mixing(compared, tuple(indices), tuple(results))


def _of_images(
    compared: ComparedRuns,
    run: ComparedRun,
    indices: Sequence[int],
    attack: UnrestrictedAttack,
    num_noise: int,
    seed: int,
) -> tuple[Floats, Floats]:
    images, labels = compared.images(indices)
    offsets = adversarial_examples(compared, run, indices, attack, seed) - images

    def ahead(positions: Tensor, ratios: Tensor) -> Tensor:
        points = images[positions] + ratios.float().view(-1, 1, 1, 1) * offsets[positions]
        noise = compared.noise_blocks([indices[i] for i in positions.tolist()], num_noise, seed, "estimate")
        confidence, _ = smoothed(run.classifier, points, noise)
        label = labels[positions].unsqueeze(1)
        others = confidence.scatter(1, label, -1.0).amax(1)
        return confidence.gather(1, label).squeeze(1) - others

    ratio = first_change(ahead, len(images), images.device)
    distance = torch.linalg.vector_norm(offsets.flatten(1), dim=1)
    return ratio.cpu().numpy(), distance.double().cpu().numpy()


def mixing_csv(mixing: Mixing) -> str:
    """One row per run and image; the prediction of a ratio of `inf` never changes."""
    rows = (
        [run.run, index, float(ratio), float(distance)]
        for run in mixing.runs
        for index, ratio, distance in zip(mixing.indices, run.ratio, run.distance, strict=True)
    )
    return csv_text([["run", "index", "ratio", "distance"], *rows])


def draw_mixing(mixing: Mixing) -> Figure:
    """The share of images whose prediction is wrong at or before each ratio: from the error rate to all but those that
    are right at every ratio."""
    images = f"{len(mixing.indices):,} test images"
    title = f"{mixing.compared.title}, {images}, σ = {mixing.compared.noise.sigma:g} (lower is better)"
    x, y = "mixing ratio toward the adversarial example", "wrong prediction (% of images)"
    figure, axes = one_panel(5.4, 3.3, title, x, y)
    labels = mixing.compared.labels
    looks = looks_of(labels.values())
    for run in mixing.runs:
        ratios = np.sort(run.ratio[np.isfinite(run.ratio)])
        share = 100 * np.arange(len(ratios) + 1) / len(run.ratio)
        always = plain(f"{run.never_changes:.0%}")
        length = np.median(run.distance)
        label = f"{labels[run.run]}: {always} right at every ratio; ratio 1 is L2 length {length:.2f} (median)"
        corners = np.concatenate([[0.0], ratios, [1.0]]), np.append(share, share[-1])
        draw_steps(axes, *corners, label, looks[labels[run.run]])
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 102)
    note = "each run has its own adversarial examples: equal ratios are different lengths"
    legend_below(figure, notes=[note])
    return figure
