"""What training cost: time, memory and hyper-parameters of runs (table 3 of https://arxiv.org/abs/2006.04062)."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field

from smoothcert.analysis.compared_runs import names_of
from smoothcert.certification.certificates import read_certificates
from smoothcert.certification.columns import Floats
from smoothcert.certification.model_provenance import model_provenance
from smoothcert.errors import RequestError
from smoothcert.io.compressed import exists, result_files, stem
from smoothcert.io.text import csv_text, duration, flattened
from smoothcert.objectives import Adversary, NoiseAttack
from smoothcert.papers.presets import preset
from smoothcert.papers.tables import paper_table
from smoothcert.report.layout import UNKNOWN, Column, Layout, layout_of, markdown
from smoothcert.report.looks import looks_of
from smoothcert.report.names import METHODS, dataset_name, network_name
from smoothcert.report.style import GREY, LABEL_SIZE, TITLE_SIZE, legend_below, new_figure, plain, quiet_axes
from smoothcert.training.metrics import METRICS, read_epochs
from smoothcert.training.recipe import TrainRecipe, load_run_recipe
from smoothcert.training.run_folder import CERTIFICATES, RECIPE, runs_in

PUBLISHED = {
    "Gaussian": "cifar10/gaussian",
    "Gaussian + Consistency": "cifar10/consistency",
    "SmoothAdv": "cifar10/smoothadv-best",
    "MACER": "cifar10/macer-150-epochs",
}
"""Row of the paper's table -> its preset at sigma 0.5; the ACR of the row identifies the SmoothAdv preset."""
GIB = 2**30
SPREAD = 50
"""Bars that differ by more than this factor have a logarithmic axis."""


@dataclass(frozen=True)
class Cost:
    """The cost of training a run; None for what its files do not record."""

    run: str
    dataset: str
    model: str
    method: str
    hyperparameters: str
    """Such as `num_noise 2, adversary.attack pgd`: the names that --set takes, without its `objective.`."""
    sigma: float
    epochs: int
    """Epochs with a recorded time."""
    epochs_planned: int
    seconds_per_epoch: float | None
    """The median without the first epoch, which includes the start-up."""
    seconds: float | None
    """Sum over the recorded epochs."""
    peak_memory_bytes: int | None
    device: str | None
    """Comma-separated if the run continued on another device."""
    runs_at_once: int
    """Largest number of runs that shared the device: time and memory are those of all."""
    acr: float | None
    certified_images: int | None
    published_hours: float | None = None
    published_memory_gb: float | None = None

    @property
    def done(self) -> bool:
        return self.epochs >= self.epochs_planned

    @property
    def seconds_planned(self) -> float | None:
        """Seconds of the whole run: those recorded, and the median for each epoch to come. None if only the first
        epoch is recorded."""
        if self.done:
            return self.seconds
        if self.seconds is None or self.seconds_per_epoch is None or self.epochs < 2:
            return None
        return self.seconds + (self.epochs_planned - self.epochs) * self.seconds_per_epoch


def training_costs(folders: Sequence[Path]) -> list[Cost]:
    """The costs of the runs in `folders`, or in the folders in these, from their files alone: no model is loaded."""
    folders = [run for folder in folders for run in runs_in(folder, lambda path: exists(path / METRICS))]
    return [_cost(name, folder) for name, folder in zip(names_of(folders), folders, strict=True)]


def _cost(name: str, folder: Path) -> Cost:
    if folder.is_file():
        raise RequestError(f"{folder}: expected a run folder, got a file; give the folder that holds {RECIPE}")
    if not (folder / RECIPE).exists():
        raise RequestError(
            f"{folder}: expected a run folder with {RECIPE}, got none; `smoothcert train --preset NAME --out {folder}` "
            "makes one"
        )
    if not exists(folder / METRICS):
        raise RequestError(f"{folder}: expected {METRICS} of a training, got none; leave this run out")
    recipe = load_run_recipe(folder / RECIPE)
    epochs = read_epochs(folder / METRICS, _Epoch.model_validate)
    provenance = model_provenance(folder)
    seconds = [epoch.seconds for epoch in epochs]
    acr, images = _certified(folder, recipe.sigma)
    published = _published(recipe)
    hyperparameters = recipe.objective.model_dump(mode="json", exclude_none=True)
    return Cost(
        run=name,
        dataset=recipe.dataset,
        model=recipe.model,
        method=recipe.method,
        hyperparameters=", ".join(f"{name} {value}" for name, value in flattened(hyperparameters).items()),
        sigma=recipe.sigma,
        epochs=len(seconds),
        epochs_planned=recipe.epochs,
        seconds_per_epoch=statistics.median(seconds[1:] or seconds) if seconds else None,
        seconds=sum(seconds) if seconds else None,
        peak_memory_bytes=max((epoch.peak_memory_bytes for epoch in epochs), default=0) or None,
        device=", ".join(dict.fromkeys(epoch.device for epoch in epochs if epoch.device)) or _device(provenance),
        runs_at_once=max((epoch.runs_at_once for epoch in epochs), default=0) or _runs_at_once(provenance),
        acr=acr,
        certified_images=images,
        published_hours=float(published["hours"]) if published else None,
        published_memory_gb=float(published["memory_gb"]) if published else None,
    )


class _Epoch(BaseModel):
    """One line of metrics; 0 and "" for what is not recorded."""

    model_config = ConfigDict(strict=True)  # a number in quotes is damage

    seconds: float = Field(ge=0)
    peak_memory_bytes: int = Field(default=0, ge=0)
    runs_at_once: int = Field(default=0, ge=0)
    device: str = ""


def _device(provenance: Mapping[str, Any]) -> str | None:
    """The device that the run was last trained on, if recorded."""
    versions = provenance.get("versions")
    device = versions.get("device") if isinstance(versions, dict) else None
    return device if isinstance(device, str) else None


def _runs_at_once(provenance: Mapping[str, Any]) -> int:
    number = provenance.get("runs_at_once")
    return number if isinstance(number, int) and number > 1 else 1


def _certified(folder: Path, sigma: float) -> tuple[float | None, int | None]:
    """ACR and number of images of the run's certificates at `sigma`; of several files the one with most images, then
    with the shortest name: names of files with other rules are longer.

    Files whose ACR means something else are not used: radii in L1 or of a randomized bound, votes that stopped at a
    radius, wrong images that were left out, a denoiser in front.
    """
    files = [read_certificates(path) for path in result_files(folder / CERTIFICATES)]
    plain_files = [
        file
        for file in files
        if file.settings.get("sigma", sigma) == sigma
        and file.settings.get("noise", "gaussian") == "gaussian"
        and not file.is_randomized
        and not any(file.settings.get(key) for key in ("radii", "label_aware", "denoiser"))
    ]
    plainest = max(plain_files, key=lambda file: (len(file.rows), -len(stem(file.path))), default=None)
    if plainest is None or not plainest.rows:
        return None, None
    return plainest.acr, len(plainest.rows)


def _published(recipe: TrainRecipe) -> dict[str, str] | None:
    """The row of the paper's table whose training does the same work; None if there is none."""
    work = _work(recipe)
    rows = paper_table("consistency/table3")
    return next((row for row in rows if _work(preset(PUBLISHED[row["method"]], 0.5)) == work), None)


def _work(recipe: TrainRecipe) -> tuple[object, ...]:
    """What time and memory depend on; noise levels, weights and attack radii change neither."""
    adversary = getattr(recipe.objective, "adversary", None)
    attack = (adversary.attack, adversary.steps) if isinstance(adversary, Adversary) else None
    training = (recipe.dataset, recipe.image_size, recipe.model, recipe.epochs, recipe.batch_size)
    noise_attack = getattr(recipe.objective, "noise_attack", None)
    on_noise = noise_attack.steps if isinstance(noise_attack, NoiseAttack) else None
    return (*training, recipe.method, recipe.objective.num_noise, attack, on_noise)


def cost_csv(costs: Sequence[Cost]) -> str:
    """One row per run, times in seconds, memory in bytes."""
    names = [field.name for field in fields(Cost)]
    names.insert(names.index("seconds") + 1, "seconds_planned")
    return csv_text([names, *([getattr(cost, name) for name in names] for cost in costs)])


def _total(c: Cost) -> str:
    """The time of the whole training in words."""
    total = UNKNOWN if c.seconds is None else duration(c.seconds)
    if not c.done and c.seconds is not None:
        total = f"{total} so far" if c.seconds_planned is None else f"about {duration(c.seconds_planned)}"
    return total + (f", {c.runs_at_once} at once" if c.runs_at_once > 1 else "")


def _memory(c: Cost) -> str:
    return UNKNOWN if c.peak_memory_bytes is None else f"{c.peak_memory_bytes / GIB:.2f} GiB"


def _known(value: float | None, text: Callable[[float], str]) -> str | None:
    return None if value is None else text(value)


COLUMNS = (
    Column("run", "run", lambda c: c.run, folds_at=14),
    Column("method", "method", lambda c: c.method, left_out=5),
    Column("hyperparameters", "hyper-parameters", lambda c: c.hyperparameters, left_out=1),
    Column("sigma", "σ", lambda c: f"{c.sigma:g}"),
    Column("epochs", "epochs", lambda c: str(c.epochs) if c.done else f"{c.epochs} of {c.epochs_planned}", left_out=7),
    Column("seconds_per_epoch", "per epoch", lambda c: _known(c.seconds_per_epoch, duration)),
    Column("seconds", "total", _total, folds_at=13),
    Column("peak_memory_bytes", "peak memory", _memory, left_out=6),
    Column("device", "device", lambda c: c.device, left_out=2),
    Column("acr", "ACR", lambda c: _known(c.acr, "{:.3f}".format)),
    Column("published_hours", "published time", lambda c: _known(c.published_hours, "{:g} h".format), left_out=4),
    Column(
        "published_memory_gb", "published memory", lambda c: _known(c.published_memory_gb, "{:g} GB".format), left_out=3
    ),
)


def cost_table(costs: Sequence[Cost]) -> Layout:
    """The table for reading, without columns that no run has a value for."""
    table = layout_of(COLUMNS, [costs])
    return table.only([i for i in range(len(COLUMNS)) if any(row[i].text != UNKNOWN for row in table.groups[0])])


def notes_on(costs: Sequence[Cost]) -> list[str]:
    """What words in the table and the figure mean, as far as they occur."""
    notes = {
        "About: the recorded epochs, and the median for each of the others.": not all(c.done for c in costs),
        "At once: this many runs shared the device; their times and memory are for all of them together.": any(
            c.runs_at_once > 1 for c in costs
        ),
        "Published: consistency/table3, ResNet-110 on CIFAR-10 at σ = 0.5, on the paper's hardware.": any(
            c.published_hours is not None for c in costs
        ),
    }
    return [note for note, holds in notes.items() if holds]


def cost_markdown(costs: Sequence[Cost]) -> str:
    """A GitHub table, and below it what its columns mean."""
    first = "Per epoch: the median after the first. Total: the sum over the epochs. ACR: average certified radius."
    notes = "\n\n".join([first, *notes_on(costs)])
    return f"# Training cost\n\n{markdown(cost_table(costs))}\n{notes}\n"


def draw_cost(costs: Sequence[Cost]) -> Figure:
    """Bars: the whole training time of each run, and peak memory if known; dashed bars are the published values."""
    hours = _numbers(c.seconds_planned or c.seconds for c in costs) / 3600
    unit, factor = ("hours", 1) if np.nanmax(hours, initial=0.0) >= 1 else ("minutes", 60)
    paper = _numbers(c.published_hours for c in costs)
    printed = [UNKNOWN if c.published_hours is None else duration(3600 * c.published_hours) for c in costs]
    panels = [(f"training time ({unit})", factor * hours, [_total(c) for c in costs], factor * paper, printed)]
    memory = _numbers(c.peak_memory_bytes for c in costs)
    paper = _numbers(c.published_memory_gb for c in costs)
    if np.isfinite(memory).any():
        paper *= 1e9 / GIB
        printed = [f"{value:.2f} GiB" for value in paper]
        panels.append(("peak memory (GiB)", memory / GIB, [_memory(c) for c in costs], paper, printed))
    figure = new_figure(3.2 + 2.2 * len(panels), 1.2 + 0.55 * len(costs))
    grid: list[Axes] = figure.subplots(1, len(panels), sharey=True, squeeze=False).ravel().tolist()
    methods = [METHODS.get(c.method, c.method) for c in costs]
    looks = looks_of(methods)
    colours = [looks[method].colour for method in methods]
    for axes, (title, values, texts, paper, printed) in zip(grid, panels, strict=True):
        _draw_bars(axes, values, texts, paper, printed, colours)
        axes.set_xlabel(f"{title}, logarithmic" if axes.get_xscale() == "log" else title)
    grid[0].set_yticks(range(len(costs)), [plain(c.run) for c in costs])
    grid[0].invert_yaxis()
    what = (f"{dataset_name(c.dataset)}, {network_name(c.model)}, {c.epochs_planned} epochs" for c in costs)
    figure.suptitle(plain(" and ".join(dict.fromkeys(what))), fontsize=TITLE_SIZE)
    legend_below(figure, curves=False, notes=notes_on(costs))
    return figure


def _numbers(values: Iterable[float | None]) -> Floats:
    """The numbers, NaN for None."""
    return np.array(list(values), dtype=np.float64)


def _draw_bars(
    axes: Axes, values: Floats, texts: Sequence[str], paper: Floats, printed: Sequence[str], colours: Sequence[str]
) -> None:
    """One bar per run, below its text; on a logarithmic axis where a bar would be too short to be seen."""
    quiet_axes(axes)
    axes.grid(visible=False, axis="y")
    axes.barh(range(len(values)), np.nan_to_num(values), height=0.4, color=colours)
    for i, text in enumerate(texts):
        if math.isfinite(paper[i]):
            axes.barh(i, paper[i], height=0.4, fill=False, edgecolor=GREY, linewidth=1.0, linestyle=(0, (3, 2)))
            text = f"{text}, published {printed[i]}"
        # Above the bars, which may fill the panel.
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "bottom"}
        axes.annotate(text, (0, i - 0.2), (3, 2), fontsize=LABEL_SIZE, color=GREY, **place)
    lengths = np.concatenate([values, paper])
    if np.nanmax(lengths, initial=0.0) > SPREAD * np.nanmin(lengths, initial=math.inf):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(-0.6, len(values) - 0.6)
