"""The plan of a reproduced table: its runs, their folders, the state of each and the estimated time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from smoothcert.certification.settings import CertifySettings
from smoothcert.distributed import find_device
from smoothcert.errors import RequestError
from smoothcert.objectives import Adversary, Macer, Objective, SmoothMix
from smoothcert.papers.reproduce.run_state import (
    Resources,
    RunState,
    sizes_of,
    stored_recipes,
    with_estimate,
    with_state,
)
from smoothcert.papers.rows import SEEDS_TABLE, PaperRun, paper_runs
from smoothcert.training.recipe import TrainRecipe, with_overrides
from smoothcert.training.run_folder import RECIPE

QUICK_CHANGES = {
    "mnist": ("dataset=mnist-sample", "epochs=2", "batch_size=128", "learning_rate=0.05", "learning_rate_drops=[1]"),
    "cifar10": ("epochs=2", "learning_rate_drops=[1]"),
    "imagenet": ("epochs=1", "learning_rate_drops=[]"),
}
QUICK_PREFIX = "quick-"
VOTES, QUICK_VOTES = 100_000, 1_000
# Every SKIP-th image of the test set is certified; QUICK_SKIP leaves 100 images.
SKIP = {"imagenet": 100}
QUICK_SKIP = {"mnist-sample": 20, "cifar10": 100, "imagenet": 500}


@dataclass(frozen=True, kw_only=True)
class Request(Resources):
    """The rows of a table to reproduce, and how. An empty `sigmas` or `methods` selects all."""

    table: str
    out: Path
    sigmas: tuple[float, ...] = ()
    methods: tuple[str, ...] = ()
    """Parts of the printed label or the folder name; a row needs to contain one of them."""
    other_tables: tuple[str, ...] = ()
    """Other tables of the same call, whose methods `methods` may name."""
    seeds: tuple[int, ...] = ()
    quick: bool = False
    overrides: tuple[str, ...] = ()
    n: int | None = None
    skip: int | None = None
    max_images: int | None = None
    compile: bool = False
    """Compile the votes; training decides for itself."""
    report: str = "report"
    """Name of the report's folder in `out`."""

    @property
    def prefix(self) -> str:
        """Prefix of every folder name, so that nobody takes a quick result for a full one."""
        return QUICK_PREFIX if self.quick else ""


@dataclass(frozen=True)
class PlannedRun(RunState):
    """The run of a row in its folder, its state, and the estimated seconds that are left."""

    paper: PaperRun = field(kw_only=True)

    @property
    def state(self) -> str:
        return f"cannot be trained: {self.paper.reason}" if self.recipe is None else super().state


def plan(request: Request) -> list[PlannedRun]:
    """Return the runs that `request` selects, in the order of the table, with state and estimated seconds."""
    if request.jobs < 1:
        raise RequestError(f"jobs: expected at least 1, got {request.jobs}")
    device = find_device(request.device)
    planned = [planned_run(request, run, seed) for run in chosen_runs(request) for seed in seeds_of(request, run)]
    planned = use_existing_runs(request, planned)
    if all(run.recipe is None for run in planned):
        raise RequestError(f"{request.table}: none of these rows can be trained: {planned[0].paper.reason}")
    return [with_estimate(run, request, device) for run in planned]


def share_runs(plans: Sequence[Sequence[PlannedRun]]) -> list[list[PlannedRun]]:
    """Return the plans of several tables with one run per recipe: in the most advanced of their folders, else the
    first. Its time is counted once.

    Rows of one table that overrides have made equal keep their folders, because a report has one row per file.
    Rows with different recipes and the same folder are refused.
    """
    runs = [run for planned in plans for run in planned if run.recipe is not None]
    for run in runs:
        other = next((other for other in runs if other.folder == run.folder and other.recipe != run.recipe), None)
        if other is not None:
            raise RequestError(
                f"{run.folder}: expected one recipe, got those of {run.paper.table} and {other.paper.table}, which "
                "differ; reproduce these tables into folders of their own"
            )

    def shared(run: PlannedRun) -> PlannedRun:
        same = [other for other in runs if other.recipe == run.recipe]
        best = most_advanced(same)
        if best is None or len({other.paper.table for other in same}) < len(same):
            return run
        return replace(best, paper=run.paper, seconds=best.seconds if run is same[0] else 0.0)

    return [[shared(run) for run in planned] for planned in plans]


def chosen_runs(request: Request) -> list[PaperRun]:
    """Return the runs of the table that `request` selects; a selection of none, and an unknown method, are refused."""
    runs = paper_runs(request.table)
    methods = [part.lower() for part in request.methods or ("",)]
    chosen = [
        run
        for run in runs
        if (not request.sigmas or run.sigma in request.sigmas)
        and any(_is_called(run, part) for part in methods)
        and (request.table != SEEDS_TABLE or not request.seeds or (run.recipe and run.recipe.seed in request.seeds))
    ]
    elsewhere = [run for table in request.other_tables for run in paper_runs(table)]
    unknown = [part for part in methods if not any(_is_called(run, part) for run in (*runs, *elsewhere))]
    if not chosen or unknown:
        asked = f"the method {unknown[0]!r}" if unknown else "the sigma, method and seed asked for"
        sigmas = ", ".join(f"{sigma:g}" for sigma in sorted({run.sigma for run in runs}))
        labels = ", ".join(dict.fromkeys(run.label for run in runs))
        raise RequestError(f"{request.table}: no row has {asked}; sigmas: {sigmas}; methods: {labels}")
    return chosen


def _is_called(run: PaperRun, part: str) -> bool:
    return part in run.label.lower() or part in run.name


def seeds_of(request: Request, run: PaperRun) -> Sequence[int | None]:
    """Return the seeds to train a row with, each once; None stands for the seed of the row's recipe."""
    fixed = run.table == SEEDS_TABLE or run.recipe is None or not request.seeds
    return (None,) if fixed else tuple(dict.fromkeys(request.seeds))


def use_existing_runs(request: Request, planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Replace runs without a folder by the most advanced run of the same recipe that another table has made.

    Damaged runs are not used, and quick runs never replace full ones. Rows of one table that overrides have made equal
    keep their folders, because a report has one row per file.
    """
    folders: dict[TrainRecipe, list[Path]] = {}
    for folder, recipe in stored_recipes(request.out).items():
        if folder.name.startswith(QUICK_PREFIX) == request.quick:
            folders.setdefault(recipe, []).append(folder)
    recipes = [run.recipe for run in planned]

    def existing(run: PlannedRun) -> PlannedRun:
        if run.recipe is None or recipes.count(run.recipe) > 1 or (run.folder / RECIPE).exists():
            return run
        others = [planned_run(request, run.paper, run.recipe.seed, folder) for folder in folders.get(run.recipe, [])]
        return most_advanced([other for other in others if other.problem is None]) or run

    return [existing(run) for run in planned]


def most_advanced(runs: Sequence[PlannedRun]) -> PlannedRun | None:
    """Return the run with most epochs, then most certified images; the first of equals."""
    return max(runs, key=lambda run: (run.epochs_done, run.images_done), default=None)


def planned_run(request: Request, run: PaperRun, seed: int | None, folder: Path | None = None) -> PlannedRun:
    """Return the run with its state in `folder`, by default the folder that is named after the row."""
    recipe = recipe_of(request, run, seed)
    folder = folder or request.out / (request.prefix + run.name + (f"-seed{seed}" if seed else ""))
    dataset = recipe.dataset if recipe else ""
    default_skip = (QUICK_SKIP if request.quick else SKIP).get(dataset, 1)
    skip = default_skip if request.skip is None else request.skip
    default_n = QUICK_VOTES if request.quick else VOTES
    n = default_n if request.n is None else request.n
    settings = CertifySettings(n=n, skip=skip, max_images=request.max_images, compile=request.compile)
    if recipe is None:
        return PlannedRun(folder, recipe, settings, 0, paper=run)
    indices = settings.selection(sizes_of(recipe, request)[1]).indices
    return with_state(PlannedRun(folder, recipe, settings, len(indices), paper=run), indices)


def recipe_of(request: Request, run: PaperRun, seed: int | None) -> TrainRecipe | None:
    """Return the paper's recipe, scaled down if the request is quick, with the overrides of the request last.

    Another sigma is refused: its numbers cannot be compared with the row. So is another seed than that of the folder.
    """
    if run.recipe is None:
        return None
    changes = list(QUICK_CHANGES[run.recipe.dataset]) if request.quick else []
    changes += ["model=resnet20"] if request.quick and run.recipe.model == "resnet110" else []
    # Ablations are not scaled down: they vary these fields.
    changes += cheaper(run.recipe.objective) if request.quick and "method" in run.row else []
    changes += [f"seed={seed}"] if seed is not None else []
    recipe = with_overrides(run.recipe, [*changes, *request.overrides])
    if recipe.sigma != run.sigma:
        raise RequestError(
            f"--set sigma: expected {run.sigma:g} for the row {run.name}, got {recipe.sigma:g}; "
            "choose rows with --sigma"
        )
    wanted = run.recipe.seed if run.table == SEEDS_TABLE else seed
    if wanted not in (None, recipe.seed):
        raise RequestError(
            f"--set seed: expected {wanted} for the row {run.name}, got {recipe.seed}; choose seeds with --seeds"
        )
    return recipe


def cheaper(objective: Objective) -> list[str]:
    """Return changes to fewer noise samples and attack steps; one long step covers what several short ones do."""
    adversary = getattr(objective, "adversary", None)
    changes = [f"num_noise={min(objective.num_noise, 4 if isinstance(objective, Macer) else 2)}"]
    if isinstance(objective, SmoothMix):
        changes += ["steps=1", f"step_size={objective.steps * objective.step_size}"]
        if objective.one_step and objective.one_step_radius is None:
            changes.append(f"one_step_radius={objective.step_size}")
    if isinstance(adversary, Adversary):
        changes.append(f"adversary.steps={min(adversary.steps, 2)}")
    return [f"objective.{change}" for change in changes]
