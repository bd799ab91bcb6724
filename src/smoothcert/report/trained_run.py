"""The training of a run as its folder records it: metrics.jsonl, one entry per epoch, and the names in its recipe."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from smoothcert.report.labels import NamedRun
from smoothcert.report.locate import distinct_names, read_recipe
from smoothcert.report.summary import Summary
from smoothcert.training.metrics import MEASUREMENTS, METRICS, Metrics, read_epochs
from smoothcert.training.run_folder import run_of_certificates

_NOT_TERMS = (*MEASUREMENTS, "cross_entropy", "natural")
"""Keys that are not further terms of the loss: measurements of the run, and the part of the loss that classifies."""


@dataclass(frozen=True, slots=True)
class TrainedRun(NamedRun):
    """One run with its metrics, one entry per epoch; method, sigma and data set are those of its recipe."""

    metrics: Metrics


def read_metrics(folder: Path) -> Metrics:
    """The numbers of each epoch of the run in `folder`; [] if it has no metrics."""
    return read_epochs(folder / METRICS, _numbers)


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    numbers = {key: float(value) for key, value in entry.items() if isinstance(value, int | float)}
    return {**numbers, "epoch": int(entry["epoch"])}


def training_runs(summaries: Sequence[Summary]) -> list[TrainedRun]:
    """The runs that certificates files belong to, each once, in order; files outside a run are left out."""
    folders = dict.fromkeys(run_of_certificates(summary.file.path) for summary in summaries)
    runs = [folder for folder in folders if folder is not None]
    return list(map(read_run, distinct_names([run.name for run in runs], runs), runs))


def read_run(name: str, folder: Path) -> TrainedRun:
    """The run in `folder`, called `name`."""
    recipe = read_recipe(folder)
    sigma, dataset, objective = (recipe.get(key) for key in ("sigma", "dataset", "objective"))
    method = objective.get("name") if isinstance(objective, dict) else objective
    group = (float(sigma) if isinstance(sigma, int | float) else math.inf, str(dataset or ""))
    return TrainedRun(name, method if isinstance(method, str) else None, recipe, group, read_metrics(folder))


def learning_rate_drops(metrics: Metrics) -> list[int]:
    """The first epoch of each lower learning rate."""
    pairs = [(m["epoch"], m["learning_rate"]) for m in metrics if "learning_rate" in m]
    return [int(epoch) for (_, before), (epoch, now) in pairwise(pairs) if now < before]


def further_terms(metrics: Metrics) -> list[str]:
    """The terms of the objective other than the one that classifies, in the order of the file."""
    return [key for key in dict.fromkeys(key for entry in metrics for key in entry) if key not in _NOT_TERMS]
