"""What a run folder tells about its training: metrics.jsonl, an entry an epoch, and the names in its recipe."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.errors import RequestError
from smoothcert.io.yaml_file import read_yaml
from smoothcert.training.metrics import METRICS, Metrics, read_epochs
from smoothcert.training.run_folder import RECIPE, run_of_certificates

# What is not a term of its own: the book-keeping, and the part of the loss that classifies.
_NOT_TERMS = (
    "epoch",
    "learning_rate",
    "seconds",
    "loss",
    "noisy_accuracy",
    "test_noisy_accuracy",
    "cross_entropy",
    "natural",
    "peak_memory_bytes",
    "runs_at_once",
)


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """One run with its metrics, an entry an epoch; `sigma`, `dataset` and `method` as far as its recipe tells."""

    name: str
    metrics: Metrics
    sigma: float | None
    dataset: str | None
    method: str | None

    @property
    def group(self) -> tuple[float, str]:
        """Runs of one group share a panel. Groups sort by sigma, the unknown last."""
        return (math.inf if self.sigma is None else self.sigma, self.dataset or "")


def read_metrics(folder: Path) -> Metrics:
    """The numbers of each epoch that the run in `folder` has trained; [] where it has no metrics."""
    return read_epochs(folder / METRICS, _numbers)


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    numbers = {key: float(value) for key, value in entry.items() if isinstance(value, int | float)}
    return {**numbers, "epoch": int(entry["epoch"])}


def training_runs(files: Sequence[tuple[str, CertificatesFile]]) -> list[tuple[str, Path]]:
    """(name, run folder) of the runs that (name, certificates file) pairs belong to, each run once, in order.

    A run with several certificates files is named without what their names add to its own, where that is distinct.
    Files outside a run are left out.
    """
    names: dict[Path, list[str]] = {}
    for name, file in files:
        run = run_of_certificates(file.path)
        if run is not None:
            names.setdefault(run, []).append(name)
    short = {run: found[0] if len(found) == 1 else found[0].rpartition("/")[0] for run, found in names.items()}
    counts = Counter(short.values())
    return [(short[run] if short[run] and counts[short[run]] == 1 else found[0], run) for run, found in names.items()]


def _recipe(folder: Path) -> Mapping[str, Any]:
    """The run's recipe as it is written; {} where there is none that can be read: it only serves labels here."""
    try:
        return read_yaml(folder / RECIPE)
    except RequestError:
        return {}


def read_run(name: str, folder: Path) -> TrainedRun:
    """The run in `folder`, called `name`. Its metrics are empty where it has none."""
    recipe = _recipe(folder)
    objective, sigma, dataset = recipe.get("objective"), recipe.get("sigma"), recipe.get("dataset")
    method = objective.get("name") if isinstance(objective, dict) else objective
    return TrainedRun(
        name,
        read_metrics(folder),
        float(sigma) if isinstance(sigma, int | float) else None,
        None if dataset is None else str(dataset),
        None if method is None else str(method),
    )


def learning_rate_drops(metrics: Metrics) -> list[int]:
    """The first epoch of each lower learning rate."""
    pairs = [(m["epoch"], m["learning_rate"]) for m in metrics if "learning_rate" in m]
    return [int(epoch) for (_, before), (epoch, now) in pairwise(pairs) if now < before]


def further_terms(metrics: Metrics) -> list[str]:
    """The objective's terms beside the one that classifies, in the order of the file."""
    return [key for key in dict.fromkeys(key for entry in metrics for key in entry) if key not in _NOT_TERMS]
