"""Several runs on one device: they take turns, one step each, so that small networks keep a GPU busy."""

import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from pathlib import Path

import torch

from smoothcert.data import Images
from smoothcert.distributed import TRAINING_SECONDS, find_device, out_of_memory, team
from smoothcert.errors import WorkError
from smoothcert.training.device import new_stream, training_device
from smoothcert.training.loop import TOO_LITTLE_MEMORY, training_steps
from smoothcert.training.recipe import TrainRecipe
from smoothcert.training.run_folder import RECIPE
from smoothcert.training.run_in_progress import Options
from smoothcert.training.status import TrainingStatus

STEPS_AHEAD = 8
"""Steps of a run that may wait on the GPU: enough to keep it busy, few enough that the other runs need not wait."""
POLL_SECONDS = 1e-4
"""How long the host sleeps while all runs have enough steps on the GPU; shorter than a step."""
FEWER_RUNS = f"{TOO_LITTLE_MEMORY}, or fewer --jobs"


def train_together(
    runs: Sequence[tuple[TrainRecipe, Images, Path]],
    jobs: int,
    *,
    device: str = "auto",
    on_progress: Callable[[Path, TrainingStatus], None] = lambda folder, status: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> dict[Path, Exception]:
    """Train or continue `runs` (recipe, data, folder), `jobs` at a time in this process; return failures by folder.

    The runs take turns, one step each; a run whose last steps are still waiting on the GPU is skipped, so fast runs do
    not wait for slow ones. On a GPU each run has its own stream and generator, so captured steps of small networks
    overlap. Each run gives the same result as alone, except for its peak memory, which is that of all runs. All runs
    wait while one is saved, so each of n runs is saved n times less often than alone.
    """
    on_device = find_device(device)
    at_once = min(jobs, len(runs))
    waiting = list(runs)
    failures: dict[Path, Exception] = {}
    active: list[tuple[Path, Generator[None, None, None], AbstractContextManager[object], Pace]] = []
    # The stack closes the runs after an exception too, which must not leave their folders locked.
    with training_device(on_device), team(on_device, TRAINING_SECONDS) as group, ExitStack() as opened:
        while waiting or active:
            while waiting and len(active) < at_once:
                recipe, data, folder = waiting.pop(0)
                options = Options(
                    resume=(folder / RECIPE).exists(),
                    device=device,
                    on_progress=partial(on_progress, folder),
                    on_note=on_note,
                    runs_at_once=at_once,
                    running=lambda: len(active),
                )
                steps = training_steps(recipe, data, folder, group, options)
                opened.enter_context(closing(steps))
                active.append((folder, steps, new_stream(on_device), Pace(on_device)))
            ready = [run for run in active if not run[3].far_ahead()]
            if not ready:
                time.sleep(POLL_SECONDS)
            for run in ready:
                folder, steps, stream, pace = run
                try:
                    with stream:
                        next(steps)
                        pace.stepped()
                except StopIteration:
                    active.remove(run)
                except Exception as error:  # a run that fails does not stop the others
                    # The traceback would keep the model and the data of the run in memory.
                    traceback.clear_frames(error.__traceback__)
                    too_large = out_of_memory(error)
                    failures[folder] = WorkError(FEWER_RUNS) if too_large else error.with_traceback(None)
                    active.remove(run)
    return failures


class Pace:
    """How far the host is ahead of a GPU's stream. On a CPU the host is never ahead."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: deque[torch.cuda.Event] = deque(maxlen=STEPS_AHEAD)

    def stepped(self) -> None:
        """Record a step; call it in the stream, after the step was launched."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self.events.append(event)

    def far_ahead(self) -> bool:
        """Whether none of the last STEPS_AHEAD steps is done."""
        return len(self.events) == STEPS_AHEAD and not self.events[0].query()
