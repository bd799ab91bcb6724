"""Log-probability margins of one image under noise (figure 1 of https://arxiv.org/abs/2006.04062)."""

from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from smoothcert.analysis.compared_runs import LARGEST_SEED, ComparedRuns, refuse_outside
from smoothcert.certification.columns import Floats
from smoothcert.classifier import evaluating, logits_of
from smoothcert.io.text import csv_text
from smoothcert.report.looks import looks_of
from smoothcert.report.style import GREY, NOTE_SIZE, PALE, legend_below, line_style, one_panel, plain
from smoothcert.smoothing.votes import default_batch_size

BINS = 60


@dataclass(frozen=True)
class Margins:
    """log F_y(x + delta) - max_{c != y} log F_c(x + delta) at one image x with label y."""

    compared: ComparedRuns
    index: int
    label: int
    values: dict[str, Floats]
    """Run -> one margin per noise, float64 [n]; the i-th noise is the same for all runs."""

    def share_below_zero(self, run: str) -> float:
        """The fraction of noise samples under which the run's network does not choose the label."""
        return float((self.values[run] < 0).mean())


def margins_of(logits: Tensor, label: int) -> Tensor:
    """The margins [k] of logits [k, classes].

    log F_y - log F_c = z_y - z_c: the normalisation cancels, so no probability is rounded to 0 on the way.
    """
    others = logits.clone()
    others[:, label] = -torch.inf
    return logits[:, label] - others.amax(1)


@torch.no_grad()
def margins_under_noise(compared: ComparedRuns, index: int, n: int = 10_000, seed: int = 0) -> Margins:
    """Margins of the test image `index` under `n` noise samples, the same ones for every run."""
    refuse_outside("n", n)
    refuse_outside("seed", seed, 0, LARGEST_SEED)
    images, labels = compared.images([index])
    label = int(labels[0])
    generator = torch.Generator(compared.device).manual_seed(seed)
    batch = default_batch_size(compared.device, compared.data.shape)
    margins: dict[str, list[Tensor]] = {run.name: [] for run in compared.runs}
    for start in range(0, n, batch):
        noisy = images + compared.noise.sample((min(batch, n - start), *compared.data.shape), generator)
        for run in compared.runs:
            with evaluating(run.classifier):
                margins[run.name].append(margins_of(logits_of(run.classifier(noisy)).double(), label).cpu())
    values = {name: torch.cat(parts).numpy() for name, parts in margins.items()}
    return Margins(compared, index, label, values)


def margins_csv(margins: Margins) -> str:
    """One row per noise, one column per run."""
    columns = np.stack(list(margins.values.values()), axis=1)
    return csv_text([["noise", *margins.values], *([i, *map(float, row)] for i, row in enumerate(columns))])


def draw_margins(margins: Margins) -> Figure:
    """Histograms on common bins, the misclassified side shaded, each label with its share below 0."""
    compared = margins.compared
    labels = compared.labels
    title = f"{compared.title}, test image {margins.index} (class {margins.label}), σ = {compared.noise.sigma:g}"
    x = "log-probability of the label minus that of the best other class"
    figure, axes = one_panel(5.2, 3.2, title, x, "share of noise samples (%)")
    everything = np.concatenate(list(margins.values.values()))
    # Zero is an edge, so that no bar is on both sides of it; a few far outliers must not compress the rest.
    low, high = np.quantile(everything, [0.0005, 0.9995])
    width = max(max(high, 0.0) - min(low, 0.0), 1e-9) / BINS
    edges = width * np.arange(np.floor(min(low, 0.0) / width) - 1, np.ceil(max(high, 0.0) / width) + 2)
    axes.axvspan(edges[0], 0, color=PALE, zorder=0, linewidth=0)
    axes.axvline(0, color=GREY, linewidth=0.8)
    looks = looks_of(labels[run] for run in margins.values)
    for run, values in margins.values.items():
        look = looks[labels[run]]
        counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
        share = 100 * counts / len(values)
        axes.stairs(share, edges, fill=True, color=look.colour, alpha=0.15)
        label = f"{labels[run]}: {plain(f'{margins.share_below_zero(run):.1%}')} misclassified"
        axes.stairs(share, edges, color=look.colour, linestyle=line_style(look), linewidth=1.4, label=label)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    axes.text(0, 1.0, " misclassified", transform=axes.transAxes, fontsize=NOTE_SIZE, color=GREY, va="top", ha="left")
    legend_below(figure)
    return figure
