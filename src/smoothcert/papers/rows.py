"""The papers' tables as runs: which recipe each printed row stands for, and which row a finished run reproduces."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from smoothcert.certification.model_provenance import model_provenance
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.results import read_settings, settings_path, stored_settings
from smoothcert.io.text import flattened
from smoothcert.papers.presets import preset
from smoothcert.papers.tables import dataset_of, paper_table
from smoothcert.report.comparison import Published
from smoothcert.training.recipe import TrainRecipe, load_run_recipe, with_overrides
from smoothcert.training.run_folder import recipe_of_certificates

Row = Mapping[str, str]

SIGMAS = {"consistency/table3": 0.5, "consistency/table4": 0.5, "consistency/supp-table4": 1.0}
"""Of the tables whose rows do not print it."""
SEEDS_TABLE, SEEDS = "mnist/acr-over-5-seeds", range(5)
# Method as printed, without its lambda -> preset of the data set.
METHODS = {
    "Gaussian": "gaussian",
    "Stability": "stability",
    "SmoothAdv": "smoothadv",
    "SmoothAdv + hyperparameter search": "smoothadv-best",
    "SmoothAdv (best hyperparameters for ResNet-110)": "smoothadv-best",
    "MACER": "macer",
    "Consistency": "consistency",
    "Gaussian + Consistency": "consistency",
    "SmoothAdv + Consistency": "smoothadv-consistency",
    "SmoothMix": "smoothmix",
    "SmoothMix + one-step adversary": "smoothmix-one-step",
    "SmoothMix (eta=1)": "smoothmix-eta1",
    "SmoothMix (eta=1) + one-step adversary": "smoothmix-eta1-one-step",
    "SmoothMix (eta=5)": "smoothmix",
    "SmoothMix (eta=5) + one-step adversary": "smoothmix-one-step",
}
LAMBDA = r" \(lambda=(\d+)\)"
# The table of training times repeats rows of the main table under shorter names, as their ACR tells.
RUNTIME_ROWS = {
    "Gaussian + Consistency": "Gaussian + Consistency (lambda=20)",
    "SmoothAdv": "SmoothAdv + hyperparameter search",
}
NETWORKS = {"ResNet-20": "resnet20", "DenseNet-40": "densenet40"}
# A loss form as table 4 of the supplement prints it -> the start of its presets' names. Under cross-entropy it repeats,
# digit by digit, rows of its tables 2 and 6, which are of another form: those are trained.
FORMS = {"MSE": "consistency-form/mse-", "KL": "consistency-form/kl-", "cross-entropy": "consistency-lambda/"}
# A row of an ablation -> its preset.
ABLATIONS: dict[str, Callable[[Row], str]] = {
    "consistency/supp-table4": lambda row: FORMS[row["loss"]] + row["lambda"],
    "consistency/supp-table5": lambda row: f"consistency-noises/{row['m']}",
    "consistency/supp-table6": lambda row: f"consistency-lambda/{row['lambda']}",
    "smoothmix/table6": lambda row: f"smoothmix-eta/{row['eta']}",
    "smoothmix/table7": lambda row: f"smoothmix-alpha-T/{row['alpha_T'].replace('.0', '')}",
    "smoothmix/table8": lambda row: f"smoothmix-max-norm/{float(row['epsilon']):g}",
    "smoothmix/table9": lambda row: f"smoothmix-noises/{row['m']}",
}
ABLATED = {"consistency": "Consistency", "smoothmix": "SmoothMix"}

# The main tables of the Consistency paper come from its first version.
FIRST_VERSION = ("consistency/table1", "consistency/table2", "consistency/table3", "consistency/table4")
SECOND_SOFTMAX = "entropy of the averaged probabilities, the paper's table after a second softmax"
OTHER_FORM = "lambda KL + H / 2, of which the paper prints the numbers here; its text has lambda (KL + H)"
ATTACK_NOT_TOLD = "the paper does not tell the attack (epsilon, number of noises) that this row stands on"

# What a run may have otherwise than the paper and still reproduce a row; the seed is not worth telling.
DIFFERENCES = {
    "dataset": "data",
    "image_size": "image size",
    "model": "network",
    "sigma": "sigma",
    "noise": "noise",
    "epochs": "epochs",
    "batch_size": "batch size",
    "learning_rate": "learning rate",
    "learning_rate_drops": "learning-rate drops",
    "learning_rate_warm_up": "epochs of learning-rate warm-up",
    "momentum": "momentum",
    "nesterov": "Nesterov momentum",
    "weight_decay": "weight decay",
}


@dataclass(frozen=True)
class PaperRun:
    """One training run behind a row of a paper's table. A row that stands for several runs has several of these."""

    table: str
    label: str
    """The row as printed: its method, or its ablated columns as "SmoothMix (eta=4)"."""
    row: Row
    name: str
    """A folder name, unique in the table."""
    sigma: float
    recipe: TrainRecipe | None
    """None where the row cannot be trained: `reason` says why."""
    reason: str | None = None
    remark: str | None = None
    """How the recipe is known to differ from the run behind the printed numbers."""

    @property
    def acr(self) -> float | None:
        printed = self.row.get("acr") or self.row.get(f"acr_{self.sigma:.2f}")
        return float(printed) if printed else None

    @property
    def accuracy_at(self) -> dict[float, float]:
        """Radius -> certified accuracy in percent, as printed."""
        return {float(column): float(text) for column, text in self.row.items() if _is_radius(column) and text}


def paper_runs(table: str) -> list[PaperRun]:
    """The runs of a table, top to bottom; an unknown table lists the near ones."""
    return [run for row in paper_table(table) for run in _runs_of(table, row)]


def _runs_of(table: str, row: Row) -> list[PaperRun]:
    seeds = SEEDS if table == SEEDS_TABLE else (None,)
    sigmas = _sigmas(table, row)
    return [_run(table, row, meant, sigma, seed) for meant in _meant(table, row) for sigma in sigmas for seed in seeds]


def _sigmas(table: str, row: Row) -> list[float]:
    if table in SIGMAS:
        return [SIGMAS[table]]
    if "sigma" in row:
        return [float(row["sigma"])]
    return [float(column.removeprefix("acr_")) for column in row if column.startswith("acr_")]


def _meant(table: str, row: Row) -> list[Row]:
    """The row with its method as the main table prints it, and once for each lambda where it prints several."""
    method = row.get("method")
    if method is None:
        return [row]
    if table == "consistency/table3":
        method = RUNTIME_ROWS.get(method, method)
    weights = re.search(r"lambda=([\d,]+)", method)
    if weights is None:
        return [{**row, "method": method}]
    return [{**row, "method": method.replace(weights[1], weight)} for weight in weights[1].split(",")]


def _run(table: str, row: Row, meant: Row, sigma: float, seed: int | None) -> PaperRun:
    """The run of `row`; `meant` is the row with the one method that is trained."""
    dataset, source = dataset_of(table), _preset_of(table, meant)
    name = f"{_slug(_label(table, meant))}-{sigma}" + ("" if seed is None else f"-seed{seed}")
    label = _label(table, row)
    if source == "smoothadv-consistency" and dataset != "mnist":
        return PaperRun(table, label, row, name, sigma, None, ATTACK_NOT_TOLD)
    weight = re.search(LAMBDA, meant.get("method", ""))
    changes = [f"objective.weight={weight[1]}"] if weight else []
    changes += [f"model={NETWORKS[row['architecture']]}"] if "architecture" in row else []
    changes += [f"seed={seed}"] if seed is not None else []
    recipe = with_overrides(preset(f"{dataset}/{source}", sigma), changes)
    remark = SECOND_SOFTMAX if table in FIRST_VERSION and source == "consistency" else None
    remark = OTHER_FORM if row.get("loss") == "cross-entropy" else remark
    return PaperRun(table, label, row, name, sigma, recipe, None, remark)


def _preset_of(table: str, row: Row) -> str:
    """The preset of a row, without its data set. An ablated weight of 0 is plain Gaussian training."""
    if "method" in row:
        return METHODS[re.sub(LAMBDA, "", row["method"])]
    if "0" in (row.get("lambda"), row.get("eta")):
        return "gaussian"
    if row.get("epsilon") == "inf":
        return "ablation/smoothmix-alpha-T/1x8"
    return f"ablation/{ABLATIONS[table](row)}"


def _label(table: str, row: Row) -> str:
    if "architecture" in row:
        return f"{row['architecture']}, {row['method']}"
    if "method" in row:
        return row["method"]
    ablated = [(k, v) for k, v in row.items() if k not in ("sigma", "acr") and not _is_radius(k)]
    shown = ", ".join(f"{k.replace('_', ' x ')}={v}" for k, v in ablated)
    return f"{ABLATED[table.split('/')[0]]} ({shown})"


def _is_radius(column: str) -> bool:
    return re.fullmatch(r"\d+\.\d+", column) is not None


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", label.lower().replace("=", "")).strip("-")


def published_for(table: str) -> Callable[[Path], Published | None]:
    """A function from a certificates file to the row of `table` that its run reproduces, None where there is none.

    A run reproduces a row with the same data set (or a sample of it), objective and sigma (and network, where the
    table compares networks); whatever else differs is told. Without a recipe beside it, a file is matched by the
    method that its settings name, where that singles a row out.
    """
    runs = paper_runs(table)

    def find(path: Path) -> Published | None:
        recipe = recipe_beside(path)
        if recipe is not None:
            run = next((run for run in runs if _reproduces(recipe, run)), None)
            return None if run is None else published(run, recipe, path)
        run = _only_row(runs, stored_settings(path))
        return None if run is None else _published(run, ["how it was trained is not recorded"])

    return find


def published(run: PaperRun, recipe: TrainRecipe, path: Path) -> Published:
    """The row of `run` for the certificates file `path` of a model that was trained by `recipe`."""
    differences = differences_from(run.recipe, recipe) if run.recipe is not None else []
    told = read_settings(path)["provenance"] if settings_path(path).exists() else {}
    precision = _precision(recipe, told.get("model"), path.resolve().parent.parent)
    if precision not in (None, "fp32"):
        differences.append(f"precision {precision}, the paper's fp32")
    trained_as = told.get("model")
    warm_up = trained_as.get("learning_rate_warm_up") if isinstance(trained_as, dict) else None
    if warm_up not in (None, recipe.learning_rate_warm_up):
        differences.append(f"started again, after a dead start, with {warm_up} epoch of learning-rate warm-up")
    trained = told.get("epoch")
    if isinstance(trained, int) and trained < recipe.epochs:
        differences.append(f"certified after {trained} of its epochs")
    return _published(run, differences)


def _precision(recipe: TrainRecipe, told: object, folder: Path) -> str | None:
    """What the run was trained in: its provenance knows what `auto` came to; None where that is not told."""
    if recipe.precision != "auto":
        return recipe.precision
    try:
        found = (told if isinstance(told, dict) else model_provenance(folder)).get("precision")
    except WorkError:  # a damaged model: the certificates are none the worse
        return None
    return found if isinstance(found, str) else None


def _published(run: PaperRun, differences: list[str]) -> Published:
    remarks = [run.remark] if run.remark else []
    told = (*differences, *remarks)
    names, dataset = _names(run.table), dataset_of(run.table)
    return Published(run.table, run.label, run.acr, run.accuracy_at, told, run.name, names, dataset)


@cache
def _names(table: str) -> tuple[str, ...]:
    """The rows that can be trained."""
    return tuple(run.name for run in paper_runs(table) if run.recipe is not None)


def differences_from(paper: TrainRecipe, recipe: TrainRecipe) -> list[str]:
    """What `recipe` does otherwise than the paper's: "epochs 2, the paper's 90"."""
    before, now = paper.to_mapping(), recipe.to_mapping()
    pairs = [(word, now[field], before[field]) for field, word in DIFFERENCES.items()]
    before, now = flattened(before["objective"]), flattened(now["objective"])
    pairs += [(field, now.get(field), before.get(field)) for field in dict.fromkeys((*now, *before))]
    return [f"{word} {ours}, the paper's {theirs}" for word, ours, theirs in pairs if ours != theirs]


def recipe_beside(path: Path) -> TrainRecipe | None:
    """The recipe of the run folder that `path` lies in; None for other files and for imported models."""
    file = recipe_of_certificates(path)
    try:
        return None if file is None else load_run_recipe(file)
    except RequestError:
        return None


def _of_its_data_set(name: str, run: PaperRun) -> bool:
    """Whether `name` is the data set of the run's table: its sample and its files from elsewhere count as it."""
    return name.partition(" (")[0].removesuffix("-sample") == dataset_of(run.table)


def _reproduces(recipe: TrainRecipe, run: PaperRun) -> bool:
    if run.recipe is None or not _of_its_data_set(recipe.dataset, run):
        return False
    same = (recipe.objective, recipe.sigma) == (run.recipe.objective, run.recipe.sigma)
    return same and ("architecture" not in run.row or recipe.model == run.recipe.model)


def _only_row(runs: list[PaperRun], settings: Mapping[str, Any]) -> PaperRun | None:
    """The run of the one row whose method is called as `settings` call theirs, at their sigma; else None.

    Settings that tell no data set may be of any.
    """
    called, dataset = str(settings.get("objective", "")).lower(), settings.get("dataset")
    fitting = {
        (run.label, run.sigma): run
        for run in runs
        if run.sigma == settings.get("sigma")
        and (dataset is None or _of_its_data_set(str(dataset), run))
        and (
            called == run.label.lower() or (run.recipe.method == called if run.recipe else called in run.label.lower())
        )
    }
    return next(iter(fitting.values())) if called and len(fitting) == 1 else None
