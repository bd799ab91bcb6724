"""What training cost: time, memory and hyper-parameters of runs (table 3 of https://arxiv.org/abs/2006.04062)."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from smoothcert.analysis.compared_runs import distinct_names
from smoothcert.certification.certificates import read_certificates
from smoothcert.certification.model_provenance import model_provenance
from smoothcert.errors import RequestError
from smoothcert.io.compressed import exists, result_files, stem
from smoothcert.io.text import csv_text, duration, escape_markdown, flattened, markdown_table
from smoothcert.objectives import Adversary, NoiseAttack
from smoothcert.papers.presets import preset
from smoothcert.papers.tables import paper_table
from smoothcert.report.layout import UNKNOWN
from smoothcert.report.summary import average_certified_radius
from smoothcert.training.metrics import METRICS, read_epochs
from smoothcert.training.recipe import TrainRecipe, load_run_recipe
from smoothcert.training.run_folder import CERTIFICATES, RECIPE, runs_in

PUBLISHED = {
    "Gaussian": "cifar10/gaussian",
    "Gaussian + Consistency": "cifar10/consistency",
    "SmoothAdv": "cifar10/smoothadv-best",
    "MACER": "cifar10/macer",
}
"""Row of the paper's table -> its preset at sigma 0.5; the ACR of the row identifies the SmoothAdv preset."""
GIB = 2**30


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
    if not folders:
        raise RequestError("expected at least one run folder, got none; give one")
    folders = [run for folder in folders for run in runs_in(folder, lambda path: exists(path / METRICS))]
    return [_cost(name, folder) for name, folder in zip(distinct_names(folders), folders, strict=True)]


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
    epochs, provenance = read_epochs(folder / METRICS, _Epoch.model_validate), model_provenance(folder)
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
    with the shortest name: names of files with other rules are longer. ACRs of another kind (radii in L1, votes that
    stopped at a radius, wrong images left out) are not used."""
    files = [read_certificates(path) for path in result_files(folder / CERTIFICATES)]
    plain_files = [
        file
        for file in files
        if file.settings.get("sigma", sigma) == sigma
        and file.settings.get("noise", "gaussian") == "gaussian"
        and not file.settings.get("radii")
        and not file.settings.get("label_aware")
    ]
    plainest = max(plain_files, key=lambda file: (len(file.rows), -len(stem(file.path))), default=None)
    if plainest is None or not plainest.rows:
        return None, None
    return average_certified_radius(plainest.rows), len(plainest.rows)


def _published(recipe: TrainRecipe) -> dict[str, str] | None:
    """The row of the paper's table whose training does the same work; None if there is none."""
    work, rows = _work(recipe), paper_table("consistency/table3")
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


TITLES = ("run", "method", "hyper-parameters", "σ", "epochs", "per epoch", "total", "peak memory", "device", "ACR")
PUBLISHED_TITLES = ("published time", "published memory")


def cost_cells(costs: Sequence[Cost]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table for reading; with the published columns only if a run has them."""
    with_paper = any(c.published_hours is not None for c in costs)
    titles = [*TITLES, *(PUBLISHED_TITLES if with_paper else ())]
    return titles, [_cells(c)[: len(titles)] for c in costs]


def _cells(c: Cost) -> list[str]:
    epochs = str(c.epochs) if c.done else f"{c.epochs} of {c.epochs_planned}"
    total = UNKNOWN if c.seconds is None else duration(c.seconds)
    if not c.done and c.seconds is not None:
        total = f"{total} so far" if c.seconds_planned is None else f"about {duration(c.seconds_planned)}"
    together = f", {c.runs_at_once} at once" if c.runs_at_once > 1 else ""
    return [
        *(c.run, c.method, c.hyperparameters, f"{c.sigma:g}", epochs),
        UNKNOWN if c.seconds_per_epoch is None else duration(c.seconds_per_epoch),
        total + together,
        UNKNOWN if c.peak_memory_bytes is None else f"{c.peak_memory_bytes / GIB:.2f} GiB",
        c.device or UNKNOWN,
        UNKNOWN if c.acr is None else f"{c.acr:.3f}",
        UNKNOWN if c.published_hours is None else f"{c.published_hours:g} h",
        UNKNOWN if c.published_memory_gb is None else f"{c.published_memory_gb:g} GB",
    ]


def cost_markdown(costs: Sequence[Cost]) -> str:
    """A GitHub table, and below it what its columns mean."""
    titles, rows = cost_cells(costs)
    notes = "Per epoch: the median after the first. Total: the sum over the epochs. ACR: average certified radius.\n"
    if not all(c.done for c in costs):
        notes += "\nAbout: the recorded epochs, and the median for each of the others.\n"
    if any(c.runs_at_once > 1 for c in costs):
        notes += "\nAt once: this many runs shared the device; their times and memory are those of all.\n"
    if len(titles) > len(TITLES):
        notes += "\nPublished: consistency/table3, ResNet-110 on CIFAR-10 at σ = 0.5, on the paper's hardware.\n"
    table = markdown_table(titles, [[escape_markdown(cell) for cell in row] for row in rows])
    return f"# Training cost\n\n{table}\n{notes}"
