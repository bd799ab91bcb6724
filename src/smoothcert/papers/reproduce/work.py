"""Planned runs trained and certified: here, or on a CPU several at once in processes of their own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from smoothcert.certification.certify_dataset import certify_dataset
from smoothcert.certification.settings import CertifySettings
from smoothcert.certification.subject import missing_classes
from smoothcert.data import load_dataset
from smoothcert.distributed import find_device
from smoothcert.errors import RequestError, WorkError
from smoothcert.models import is_code
from smoothcert.papers.reproduce.planning import PlannedRun
from smoothcert.report.progress import certification_bar, print_note, train_with_bar
from smoothcert.training.checkpoint import RECIPE, load_run
from smoothcert.training.loop import TrainingStatus, train_together
from smoothcert.training.recipe import TrainRecipe

LOG = "reproduce.log"
WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from smoothcert.cli.several import run_all
run_all(sys.argv[1:])
"""
"""Program of a worker: it imports modules from where this process imports them. Python is started with -P, because it
would otherwise import them from the current folder first, which may contain anything."""
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Workshop:
    """Where work is done: `jobs` runs at once on `device`, with the data sets in `data`."""

    jobs: int
    device: str
    data: Path | None
    console: Console
    compile: bool = False
    """Whether votes are compiled."""


Failures = dict[Path, str]
"""Folder of a run -> why it failed."""


def finish_runs(planned: Sequence[PlannedRun], workshop: Workshop) -> Failures:
    """Train and certify what is missing of each run; one that fails does not keep the others from theirs."""
    if workshop.jobs > 1 and find_device(workshop.device).type == "cpu":
        return at_once([run for run in planned if not run.done], workshop)
    failed = train_runs([run for run in planned if not run.trained], workshop)
    return failed | certify_runs([run for run in planned if not run.done and run.folder not in failed], workshop)


def train_runs(planned: Sequence[PlannedRun], workshop: Workshop) -> Failures:
    """Train each run to its last epoch, from where it is; several at once take turns in this process.

    On a GPU that is how small networks overlap: processes of their own would only wait for each other.
    """
    if workshop.jobs == 1:
        return in_turn(planned, lambda run: train_here(run, workshop))
    load = cache(lambda dataset, size: load_dataset(dataset, "train", workshop.data, image_size=size))
    recipes = [recipe_of(run) for run in planned]
    data = [load(recipe.dataset, recipe.image_size) for recipe in recipes]
    runs = list(zip(recipes, data, (run.folder for run in planned), strict=True))
    with Progress(console=workshop.console) as bar:
        tasks = {run.folder: bar.add_task(f"train {run.folder.name}", total=None, visible=False) for run in planned}

        def show(folder: Path, status: TrainingStatus) -> None:
            done, total = status.epoch * status.steps + status.step, status.epochs * status.steps
            bar.update(tasks[folder], completed=done, total=total, visible=True)

        note = partial(print_note, bar.console)
        failures = train_together(runs, workshop.jobs, device=workshop.device, on_progress=show, on_note=note)
    return {folder: reason_of(error) for folder, error in failures.items()}


def certify_runs(planned: Sequence[PlannedRun], workshop: Workshop) -> Failures:
    """Certify the images that are missing in each run's file."""
    return in_turn(planned, lambda run: certify_here(run, workshop))


def train_here(run: PlannedRun, workshop: Workshop) -> None:
    recipe = recipe_of(run)
    data = load_dataset(recipe.dataset, "train", workshop.data, image_size=recipe.image_size)
    train_with_bar(recipe, data, run.folder, resume=(run.folder / RECIPE).exists(), device=workshop.device)


def certify_here(run: PlannedRun, workshop: Workshop) -> None:
    recipe, device = recipe_of(run), find_device(workshop.device)
    data = load_dataset(recipe.dataset, "test", workshop.data, image_size=recipe.image_size)
    settings = CertifySettings(n=run.n, compile=workshop.compile, skip=run.skip, max_images=run.max_images)
    indices = settings.selection(len(data)).indices
    if warning := missing_classes(data, indices):
        print_note(workshop.console, warning)
    with certification_bar(run.folder.name, len(indices)) as show:
        model = load_run(run.folder, recipe.model)
        certify_dataset(model, data, run.certificates, settings, device=device, on_progress=show)


def recipe_of(run: PlannedRun) -> TrainRecipe:
    assert run.recipe is not None, "runs that cannot be trained are planned, but not worked on"
    return run.recipe


def in_turn(planned: Sequence[PlannedRun], work: Callable[[PlannedRun], None]) -> Failures:
    """Call `work` on each run. A run that fails, for whatever reason, does not keep the others from theirs."""
    failed: Failures = {}
    for run in planned:
        try:
            work(run)
        except Exception as error:
            failed[run.folder] = reason_of(error)
    return failed


def reason_of(error: Exception) -> str:
    """One line: the message, and the kind of an error that no message of ours explains."""
    known = isinstance(error, RequestError | WorkError | OSError)
    return " ".join(f"{'' if known else f'{type(error).__name__}: '}{error}".split())


def at_once(planned: Sequence[PlannedRun], workshop: Workshop) -> Failures:
    """Each run in a process of its own, `jobs` of them at a time, which share the cores.

    What a process prints is in a log in its run's folder. None outlives this call, whatever ends it.
    """
    waiting, failed = list(planned), Failures()
    running: dict[subprocess.Popen[bytes], tuple[PlannedRun, float]] = {}
    threads = max(1, torch.get_num_threads() // workshop.jobs)

    def end(run: PlannedRun, started: float, problem: str | None) -> None:
        if problem is not None:
            failed[run.folder] = problem
        word = "finished" if problem is None else "failed"
        count = f"{len(planned) - len(waiting) - len(running)} of {len(planned)}"
        shown = f"{word} {run.folder.name} ({count}, {time.perf_counter() - started:.0f} s)"
        workshop.console.print(shown, soft_wrap=True, markup=False)

    try:
        while waiting or running:
            while waiting and len(running) < workshop.jobs:
                run, started = waiting.pop(0), time.perf_counter()
                try:
                    running[start(commands(run, workshop), run.folder, threads)] = run, started
                except (RequestError, WorkError, OSError) as error:  # as where a file is in place of its folder
                    end(run, started, " ".join(str(error).split()))
            time.sleep(POLL_SECONDS)
            for process in [process for process in running if process.poll() is not None]:
                run, started = running.pop(process)
                end(run, started, last_words(run.folder, process.returncode) if process.returncode else None)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed


def commands(run: PlannedRun, workshop: Workshop) -> list[str]:
    """`train --resume`, which finds the recipe in the folder, if epochs are missing, then `certify`."""
    options = ["--device", workshop.device, *(["--data", str(workshop.data)] if workshop.data else [])]
    most = [] if run.max_images is None else ["--max-images", str(run.max_images)]
    chosen = ["--n", str(run.n), "--skip", str(run.skip), *most, "--name", run.certificates.stem]
    # A user's own network, which --set named, may be opened.
    code = ["--model", recipe_of(run).model] if is_code(recipe_of(run).model) else []
    fast = ["--compile"] if workshop.compile else []
    certify = ["certify", str(run.folder), *chosen, *code, *fast, *options]
    if run.trained:
        return certify
    if not (run.folder / RECIPE).exists():
        recipe_of(run).save(run.folder / RECIPE)
    return ["train", "--out", str(run.folder), "--resume", *code, *options, "then", *certify]


def start(arguments: Sequence[str], folder: Path, threads: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "COLUMNS": "200"}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER, json.dumps(sys.path), *arguments],
            stdin=subprocess.PIPE,  # it ends with us, even if we are killed
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def last_words(folder: Path, code: int) -> str:
    """The last line that a process printed: its error, or where it was when it was killed."""
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    killed = f"killed by signal {-code}, last seen at: " if code < 0 else ""
    return killed + (said[-1].removeprefix("smoothcert: ") if said else f"exit code {code}")
