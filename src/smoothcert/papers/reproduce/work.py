"""Train and certify planned runs: in this process, or on a CPU several at once in processes of their own."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from smoothcert.certification.certify_dataset import certify_dataset
from smoothcert.data import UNSPLIT, Split
from smoothcert.distributed import find_device
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.console import PlainConsole
from smoothcert.papers.processes import Failures, call_in_processes, reason_of
from smoothcert.papers.reproduce.run_state import Resources, RunState
from smoothcert.report.progress import print_data_notes, status_bar, status_bars, train_with_bar
from smoothcert.training.checkpoint import load_run
from smoothcert.training.run_folder import RECIPE
from smoothcert.training.several_runs import train_together
from smoothcert.training.status import TrainingStatus


def finish_runs(planned: Sequence[RunState], resources: Resources, console: PlainConsole) -> Failures:
    """Train and certify what is missing of each run; one that fails, or is damaged, does not stop the others."""
    failed = {run.folder: run.problem for run in planned if run.problem is not None}
    planned = [run for run in planned if run.problem is None and not run.done]
    print_notes(planned, resources, console)
    if resources.jobs > 1 and find_device(resources.device).type == "cpu":
        return failed | finish_in_processes(planned, resources, console)
    failed |= train_runs([run for run in planned if not run.trained], resources, console)
    rest = [run for run in planned if run.folder not in failed]
    return failed | in_turn(rest, lambda run: certify(run, resources))


def failures_in_words(failed: Failures, runs: int) -> str:
    """How many of the `runs` failed, and why; several runs may have one reason, such as data that are not there."""
    names: dict[str, list[str]] = {}
    for folder, reason in failed.items():
        names.setdefault(reason, []).append(folder.name)
    reasons = "; ".join(f"{', '.join(runs_of)}: {reason}" for reason, runs_of in names.items())
    return f"{len(failed)} of {runs} runs failed, the same command tries them again ({reasons})"


def print_notes(planned: Sequence[RunState], resources: Resources, console: PlainConsole) -> None:
    """Print what a user should know about the images, once for all runs; if they cannot be read, each run fails."""
    splits: tuple[Split, ...] = ("train", "test")
    needed = [(run.known_recipe, split) for run in planned for split in splits if split == "test" or not run.trained]
    parts = {(recipe.dataset, recipe.image_size, split): recipe for recipe, split in needed}
    for (dataset, _, split), recipe in parts.items():
        with suppress(RequestError, WorkError, OSError):
            images = resources.load(recipe, split)
            if split == "test" or images.split != UNSPLIT:  # else they are the test images, which have the same notes
                print_data_notes(console, images, trained_on=[dataset] if split == "test" else ())


def train_runs(planned: Sequence[RunState], resources: Resources, console: PlainConsole) -> Failures:
    """Train each run from its last saved epoch to its last epoch; several at once take turns in this process.

    This is how small networks share a GPU: processes of their own would only wait for each other.
    """
    if resources.jobs == 1:
        return in_turn(planned, lambda run: train_run(run, resources))
    # Read here, so that data that cannot be read fail the runs that need them and no others.
    failed = in_turn(planned, lambda run: resources.load(run.known_recipe, "train"))
    readable = [(run.known_recipe, run.folder) for run in planned if run.folder not in failed]
    runs = [(recipe, resources.load(recipe, "train"), folder) for recipe, folder in readable]
    with status_bars(console) as show:

        def show_run(folder: Path, status: TrainingStatus) -> None:
            show(f"train {folder.name}", status)

        failures = train_together(
            runs, resources.jobs, device=resources.device, on_progress=show_run, on_note=console.note
        )
    return failed | {folder: reason_of(error) for folder, error in failures.items()}


def train_run(run: RunState, resources: Resources) -> None:
    """Train `run`, which an earlier call may have begun."""
    recipe = run.known_recipe
    resume = (run.folder / RECIPE).exists()
    train_with_bar(recipe, resources.load(recipe, "train"), run.folder, resume=resume, device=resources.device)


def certify(run: RunState, resources: Resources) -> None:
    """Certify the images that are missing in the file of `run`."""
    recipe = run.known_recipe
    device = find_device(resources.device)
    data = resources.load(recipe, "test")
    model = load_run(run.folder, recipe.model)
    with status_bar(f"certify {run.folder.name}") as show:
        certify_dataset(
            model, data, run.certificates, run.settings, device=device, on_progress=show, on_warning=show.warn
        )


def in_turn(planned: Sequence[RunState], work: Callable[[RunState], object]) -> Failures:
    """Call `work` on each run. A run that fails, for whatever reason, does not stop the others."""
    failed: Failures = {}
    for run in planned:
        try:
            work(run)
        except Exception as error:
            failed[run.folder] = reason_of(error)
    return failed


def finish_in_processes(planned: Sequence[RunState], resources: Resources, console: PlainConsole) -> Failures:
    """Finish each run in a process of its own, `jobs` at a time, which share the cores."""
    threads = max(1, torch.get_num_threads() // resources.jobs)
    ended = 0

    def show(folder: Path, reason: str | None, seconds: float) -> None:
        nonlocal ended
        ended += 1
        word = "finished" if reason is None else "failed"
        line = f"{word} {folder.name} ({ended} of {len(planned)}, {seconds:.0f} s)"
        console.print(line)

    alone = replace(resources, reader=replace(resources.reader))  # without images
    calls = {run.folder: partial(finish_run, run, alone) for run in planned}
    return call_in_processes(calls, resources.jobs, {"OMP_NUM_THREADS": str(threads), "COLUMNS": "200"}, show)


def finish_run(run: RunState, resources: Resources) -> None:
    """Train and certify what is missing of `run`."""
    if not run.trained:
        train_run(run, resources)
    certify(run, resources)
