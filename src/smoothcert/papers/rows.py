"""The recipe behind each row of the published tables, and the row that a finished run reproduces."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.certification.model_provenance import changes_of, model_provenance
from smoothcert.data.datasets import published_name
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import flattened
from smoothcert.papers.presets import PRESETS, preset
from smoothcert.papers.tables import dataset_of, is_radius, matches, paper_table, published_acr
from smoothcert.report.names import value_text
from smoothcert.report.published import Published, PublishedFor
from smoothcert.training.recipe import TrainRecipe, load_run_recipe, with_overrides
from smoothcert.training.run_folder import recipe_of_certificates

Row = Mapping[str, str]

SIGMAS = {"consistency/table3": 0.5, "consistency/table4": 0.5, "consistency/supp-table4": 1.0}
"""The sigma of tables that do not print it."""
SEEDS_TABLE, SEEDS = "mnist/acr-over-5-seeds", range(5)
# Printed method without its lambda -> preset of the data set.
METHODS = {
    "Gaussian": "gaussian",
    "Gaussian (m=4)": "gaussian-m4",
    "Stability": "stability",
    "SmoothAdv": "smoothadv",
    "SmoothAdv + hyperparameter search": "smoothadv-best",
    "SmoothAdv (best hyperparameters for ResNet-110)": "smoothadv-best",
    "MACER": "macer",
    "Consistency": "consistency",
    "Gaussian + Consistency": "consistency",
    "SmoothAdv + Consistency": "smoothadv-consistency",
    "CAT-RS": "catrs",
    "Sun et al. 2024": "sun2024",
    "SmoothMix": "smoothmix",
    "SmoothMix + one-step adversary": "smoothmix-one-step",
    "SmoothMix (eta=1)": "smoothmix-eta1",
    "SmoothMix (eta=1) + one-step adversary": "smoothmix-eta1-one-step",
    "SmoothMix (eta=5)": "smoothmix",
    "SmoothMix (eta=5) + one-step adversary": "smoothmix-one-step",
}
LAMBDA = r" \(lambda=(\d+)\)"
# The table of training times repeats rows of the main table, with the same ACR, under shorter names.
RUNTIME_ROWS = {
    "Gaussian + Consistency": "Gaussian + Consistency (lambda=20)",
    "SmoothAdv": "SmoothAdv + hyperparameter search",
}
NETWORKS = {"ResNet-20": "resnet20", "DenseNet-40": "densenet40"}
ABLATED = {"consistency": "Consistency", "smoothmix": "SmoothMix"}

# The main tables of the Consistency paper come from its first version; of table 4 this is not known.
SECOND_SOFTMAX = "entropy of the averaged probabilities, the paper's table after a second softmax"
FIRST_VERSION = {
    **dict.fromkeys(("consistency/table1", "consistency/table2", "consistency/table3"), SECOND_SOFTMAX),
    "consistency/table4": SECOND_SOFTMAX.replace("after", "probably after"),
}
OTHER_PAPER = {
    **{"consistency/supp-table2": "smoothmix/table2", "smoothmix/table2": "consistency/supp-table2"},
    **{"consistency/table1": "smoothmix/table1", "smoothmix/table1": "consistency/table1"},
}
"""Tables of both papers that share methods; SmoothAdv on CIFAR-10 and MACER on MNIST have another ACR in the other."""
OTHER_FORM = "lambda KL + H / 2, of which the paper prints the numbers here; its text has lambda (KL + H)"
ATTACK_UNKNOWN = "the paper does not give the attack (epsilon, number of noise samples) of this row"

WORDS = {
    "dataset": "data",
    "model": "network",
    "learning_rate_drops": "learning-rate drops",
    "learning_rate_warm_up": "epochs of learning-rate warm-up",
    "nesterov": "Nesterov momentum",
    "schedule": "learning-rate schedule",
    "ema": "moving average of the weights",
    "teacher_votes": "votes of the teacher",
}
"""Fields of a recipe whose name in a difference from the paper is not the field's, with spaces."""
UNCOMPARED = ("seed", "precision", "objective", "sampler", "teacher", "teacher.seed", "teacher.precision")
"""Fields that may differ from the paper's, or are compared in another way."""


@dataclass(frozen=True)
class PaperRun:
    """One training run of a row of a published table. A row of several runs has several of these."""

    table: str
    label: str
    """The printed method, or the ablated columns as in "SmoothMix (eta=4)"."""
    row: Row
    name: str
    """A folder name, unique in the table."""
    sigma: float
    recipe: TrainRecipe | None
    """None if the row cannot be trained for the `reason` below."""
    reason: str | None = None
    remark: str | None = None
    """The known difference between the recipe and the published run."""

    @property
    def acr(self) -> float | None:
        printed = self.row.get("acr") or self.row.get(f"acr_{self.sigma:.2f}")
        return float(printed) if printed else None

    @property
    def accuracy_at(self) -> dict[float, float]:
        """Certified accuracy in percent by radius, as printed."""
        return {float(column): float(text) for column, text in self.row.items() if is_radius(column) and text}


def paper_runs(table: str) -> list[PaperRun]:
    """Return the runs of a table from top to bottom."""
    seeds = SEEDS if table == SEEDS_TABLE else (None,)
    return [
        _run(table, row, trained, sigma, seed)
        for row in paper_table(table)
        for trained in _trained_rows(table, row)
        for sigma in _sigmas(table, row)
        for seed in seeds
    ]


def _sigmas(table: str, row: Row) -> list[float]:
    if table in SIGMAS:
        return [SIGMAS[table]]
    if "sigma" in row:
        return [float(row["sigma"])]
    return [float(column.removeprefix("acr_")) for column in row if column.startswith("acr_")]


def _trained_rows(table: str, row: Row) -> list[Row]:
    """Return `row` with the method name of the main table, once per lambda if it prints several."""
    method = row.get("method")
    if method is None:
        return [row]
    if table == "consistency/table3":
        method = RUNTIME_ROWS.get(method, method)
    weights = re.search(r"lambda=([\d,]+)", method)
    if weights is None:
        return [{**row, "method": method}]
    return [{**row, "method": method.replace(weights[1], weight)} for weight in weights[1].split(",")]


def _run(table: str, row: Row, trained: Row, sigma: float, seed: int | None) -> PaperRun:
    """Return the run of `row`; `trained` is the row with the one method that is trained."""
    dataset = dataset_of(table)
    source = _preset_of(table, trained, sigma)
    name = f"{_slug(_label(table, trained))}-{sigma}" + ("" if seed is None else f"-seed{seed}")
    label = _label(table, row)
    if source == "smoothadv-consistency" and dataset != "mnist":
        return PaperRun(table, label, row, name, sigma, None, ATTACK_UNKNOWN)
    weight = re.search(LAMBDA, trained.get("method", ""))
    changes = [f"objective.weight={weight[1]}"] if weight else []
    changes += [f"model={NETWORKS[row['architecture']]}"] if "architecture" in row else []
    changes += [f"seed={seed}"] if seed is not None else []
    recipe = with_overrides(preset(f"{dataset}/{source}", sigma), changes)
    return PaperRun(table, label, row, name, sigma, recipe, None, _remark(table, row, source, sigma))


def _remark(table: str, row: Row, source: str, sigma: float) -> str | None:
    """Return what is known to differ between the preset `source` and the published run, or between the papers."""
    if row.get("loss") == "cross-entropy":
        return OTHER_FORM
    if source == "consistency":
        return FIRST_VERSION.get(table)
    if (other := OTHER_PAPER.get(table)) is not None:
        acr = published_acr(other, sigma=sigma, method=row["method"])
        if acr not in (None, float(row["acr"])):
            return f"{other} prints ACR {acr:.3f} for this row"
    return None


def _preset_of(table: str, row: Row, sigma: float) -> str:
    """Return the preset of a row, without its data set. An ablated weight of 0 is plain Gaussian training."""
    if "method" in row:
        source = METHODS[re.sub(LAMBDA, "", row["method"])]
        return "macer-150-epochs" if source == "macer" and "architecture" in row else source
    if "0" in (row.get("lambda"), row.get("eta")):
        return "gaussian"
    if row.get("epsilon") == "inf":
        return "ablation/smoothmix-alpha-T/1x8"
    if row.get("loss") == "cross-entropy":
        # The table repeats the numbers of supp-table2 and supp-table6, which are of another form: these are trained.
        return f"ablation/consistency-lambda/{row['lambda']}"
    published = {name: preset.published.get(sigma) for name, preset in PRESETS.items()}
    fits = (name for name, entry in published.items() if entry and entry[0] == table and matches(row, entry[1]))
    return next(fits).removeprefix("mnist/")


def _label(table: str, row: Row) -> str:
    if "architecture" in row:
        return f"{row['architecture']}, {row['method']}"
    if "method" in row:
        return row["method"]
    ablated = [(k, v) for k, v in row.items() if k not in ("sigma", "acr") and not is_radius(k)]
    shown = ", ".join(f"{k.replace('_', ' x ')}={v}" for k, v in ablated)
    return f"{ABLATED[table.split('/')[0]]} ({shown})"


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", label.lower().replace("=", "")).strip("-")


def published_for(table: str) -> PublishedFor:
    """Return the function from a certificates file to the row of `table` of its run, or None.

    A run reproduces a row with the same data set (or a sample of it), objective and sigma (and network, if the table
    compares networks); other differences are reported. A file without a recipe is matched by the method in its
    settings, if only one row has it.
    """
    runs = paper_runs(table)

    def find(file: CertificatesFile) -> Published | None:
        recipe = recipe_of_run(file.path)
        if recipe is not None:
            run = next((run for run in runs if _reproduces(recipe, run)), None)
            return None if run is None else published(run, recipe, file)
        run = _only_row(runs, file.settings)
        return None if run is None else _published(run, ["how it was trained is not recorded"])

    return find


def published(run: PaperRun, recipe: TrainRecipe, file: CertificatesFile) -> Published:
    """Return the row of `run` for the certificates of a model that was trained by `recipe`."""
    differences = differences_from(run.recipe, recipe) if run.recipe is not None else []
    model = file.provenance.get("model")
    precision = _precision(recipe, model, file.path.resolve().parent.parent)
    if precision not in (None, "fp32"):
        differences.append(f"precision {precision}, the paper's fp32")
    warm_up = model.get("learning_rate_warm_up") if isinstance(model, dict) else None
    if warm_up not in (None, recipe.learning_rate_warm_up):
        differences.append(f"started again, after a dead start, with {warm_up} epoch of learning-rate warm-up")
    differences += changes_of(file.provenance, recipe.epochs)
    if file.settings.get("denoiser"):
        differences.append("certified behind a denoiser")
    return _published(run, differences)


def _precision(recipe: TrainRecipe, model: object, folder: Path) -> str | None:
    """Return the precision of training; the provenance of the model knows the meaning of `auto`. None: unknown."""
    if recipe.precision != "auto":
        return recipe.precision
    try:
        precision = (model if isinstance(model, dict) else model_provenance(folder)).get("precision")
    except WorkError:  # a damaged model does not invalidate its certificates
        return None
    return precision if isinstance(precision, str) else None


def _published(run: PaperRun, differences: list[str]) -> Published:
    remarks = (*differences, run.remark) if run.remark else tuple(differences)
    names = _names(run.table)
    dataset = dataset_of(run.table)
    return Published(run.table, run.label, run.acr, run.accuracy_at, remarks, run.name, names, dataset)


@cache
def _names(table: str) -> tuple[str, ...]:
    """Return the names of the runs that can be trained."""
    return tuple(run.name for run in paper_runs(table) if run.recipe is not None)


def differences_from(paper: TrainRecipe, recipe: TrainRecipe) -> list[str]:
    """Return the differences of `recipe` from the paper's, such as "epochs 2, the paper's 90"."""
    before, now = paper.model_dump(mode="json"), recipe.model_dump(mode="json")
    names = [name for name in now if name not in UNCOMPARED]
    pairs = [(WORDS.get(name, name.replace("_", " ")), now[name], before[name]) for name in names]
    pairs += [("sampler", _sampler_text(now["sampler"]), _sampler_text(before["sampler"]))]
    teachers = [flattened(fields["teacher"] or {}, "teacher.") for fields in (now, before)]
    keys = dict.fromkeys(key for teacher in teachers for key in teacher if key not in UNCOMPARED)
    pairs += [(key, teachers[0].get(key), teachers[1].get(key)) for key in keys]
    before, now = flattened(before["objective"]), flattened(now["objective"])
    pairs += [(field, now.get(field), before.get(field)) for field in dict.fromkeys((*now, *before))]
    return [f"{word} {value_text(a)}, the paper's {value_text(b)}" for word, a, b in pairs if a != b]


def _sampler_text(sampler: dict[str, Any]) -> str:
    """Return the name of a sampler with its settings in brackets."""
    settings = ", ".join(f"{name} {value}" for name, value in sampler.items() if name != "name")
    return f"{sampler['name']} ({settings})" if settings else str(sampler["name"])


def recipe_of_run(path: Path) -> TrainRecipe | None:
    """Return the recipe of the run folder that contains `path`; None for other files and imported models."""
    file = recipe_of_certificates(path)
    try:
        return None if file is None else load_run_recipe(file)
    except RequestError:
        return None


def _of_its_data_set(name: str, run: PaperRun) -> bool:
    """Return whether `name` is the data set of the run's table, its sample, or its files in another folder."""
    return published_name(name) == dataset_of(run.table)


def _reproduces(recipe: TrainRecipe, run: PaperRun) -> bool:
    if run.recipe is None or not _of_its_data_set(recipe.dataset, run):
        return False
    same = (recipe.objective, recipe.sigma) == (run.recipe.objective, run.recipe.sigma)
    return same and ("architecture" not in run.row or recipe.model == run.recipe.model)


def _only_row(runs: list[PaperRun], settings: Mapping[str, Any]) -> PaperRun | None:
    """Return the run of the only row with the method and sigma of `settings`, else None.

    Settings without a data set match any.
    """
    method = str(settings.get("objective", "")).lower()
    dataset = settings.get("dataset")
    fitting = {
        (run.label, run.sigma): run
        for run in runs
        if run.sigma == settings.get("sigma")
        and (dataset is None or _of_its_data_set(str(dataset), run))
        and (
            method == run.label.lower() or (run.recipe.method == method if run.recipe else method in run.label.lower())
        )
    }
    return next(iter(fitting.values())) if method and len(fitting) == 1 else None
