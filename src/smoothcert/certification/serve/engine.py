"""Continuous batching: forward passes that are shared by the requests of many clients.

A job is one image of a request. It is in one of two stages: n0 votes choose its class, then it draws votes from look to
look. One forward pass takes jobs of the same stage and size, whichever request or look they belong to, so a new job
joins the next pass and nobody waits for the end of another request. A job leaves at a look only: when its test ends,
when its deadline has passed, or when its client has left.

The noise of a job comes from its own seed, and a pass has a fixed shape: the votes of a job do not depend on what else
is in the pass. They are those that the library draws for the same seed, unless the last look of the rule `fixed` is
shorter than a block of noise.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

import numpy as np
import torch
from torch import Tensor

from smoothcert.certification.serve.rule import Ending, Plan, Progress
from smoothcert.errors import RequestError, WorkError
from smoothcert.smoothing.certificate import Certificate
from smoothcert.smoothing.votes import Stage, VoteCounter

PATIENCE = 8
"""Number of passes that a job lets others go first, in the hope of filling a pass of its own kind."""
log = logging.getLogger("smoothcert.serve")


class QueueFullError(Exception):
    """The queue has no room for all images of a request."""


def system_seed() -> tuple[int, int]:
    """A seed from the operating system, for one image of one request."""
    return secrets.randbits(63), 0


@dataclass(eq=False)
class Job:
    """One image [c, h, w] on the device of `counter`, its plan, and its state."""

    counter: VoteCounter
    image: Tensor
    plan: Plan
    deadline: float
    """In seconds of the clock of the scheduler."""
    notify: Callable[["Job"], None] = lambda job: None
    """Called by the thread of the engine after each look and at the end."""
    seed: tuple[int, int] = field(default_factory=system_seed)
    accepted: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    """Set when the client has left."""
    progress: Progress | None = None
    ending: Ending | None = None
    error: str = ""
    passed_over: int = 0
    seconds: float = 0.0
    """From the request to the answer, once it has ended."""

    @property
    def stage(self) -> Stage:
        return "select" if self.progress is None else "estimate"

    @property
    def size(self) -> int:
        """Number of votes that the job draws in its next pass."""
        return self.plan.n0 if self.progress is None else self.progress.missing

    @property
    def block(self) -> int:
        """Number of votes in a noise block, as in `Rule`."""
        return self.counter.block(self.image.device, self.plan.looks[0])

    @property
    def first_block(self) -> int:
        """Number of noise blocks of this stage that have been drawn."""
        return 0 if self.progress is None else self.progress.n // self.block

    def certificate(self) -> Certificate:
        return self.plan.nothing() if self.progress is None else self.progress.certificate()

    def take(self, votes: np.ndarray) -> None:
        """Continue with the votes per class of one pass."""
        self.passed_over = 0
        if self.progress is None:
            self.progress = self.plan.start(int(votes.argmax()), len(votes))
        else:
            self.ending = self.progress.update(votes)

    def stop(self, now: float) -> bool:
        """End the job at its last look if its client has left or its deadline has passed; say whether it has ended."""
        if self.ending is None and self.cancelled:
            self.ending = "disconnect"
        elif self.ending is None and now >= self.deadline:
            self.ending = "deadline"
        return self.ending is not None


def choose_pass(queue: Sequence[Job]) -> list[Job]:
    """The jobs of the next forward pass, in the order of `queue`: they share classifier, stage and number of votes.

    The first kind of job that fills a pass is chosen, but a job that was passed over PATIENCE times comes first. If no
    pass can be filled, the first job in the queue is served.
    """
    kinds: dict[tuple[int, Stage, int], list[Job]] = {}
    for job in queue:
        kinds.setdefault((id(job.counter), job.stage, job.size), []).append(job)
    overdue = (jobs for jobs in kinds.values() if jobs[0].passed_over >= PATIENCE)
    full = (jobs for jobs in kinds.values() if len(jobs) >= _capacity(jobs[0]))
    chosen = next(chain(overdue, full, kinds.values()), [])
    return chosen[: _capacity(chosen[0])] if chosen else []


def _capacity(job: Job) -> int:
    """Number of jobs of this kind that fill a forward pass."""
    return max(1, job.counter.batch_size // job.size)


def run_pass(jobs: Sequence[Job]) -> None:
    """Draw the votes of jobs of one kind in one forward pass. If it fails, each job is tried alone.

    So an image on which the classifier fails costs no other client an answer.
    """
    first = jobs[0]
    try:
        votes = first.counter.count(
            torch.stack([job.image for job in jobs]),
            [job.seed for job in jobs],
            first.stage,
            first.size,
            first_block=[job.first_block for job in jobs],
        )
    except Exception as error:
        if len(jobs) > 1:
            for job in jobs:
                run_pass([job])
            return
        log.exception("the classifier failed on an image")
        first.ending = "failed"
        # What the code of the classifier raised is the cause of the error, and for the log only.
        known = isinstance(error, RequestError | WorkError) and error.__cause__ is None
        first.error = str(error) if known else "the classifier failed on this image"
        return
    for job, counts in zip(jobs, votes, strict=True):
        job.take(counts)


class Scheduler:
    """The queue of jobs. Any thread may `submit`; one thread calls `step`, which runs one pass."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.clock = limit, clock
        self.queue: deque[Job] = deque()
        self.running = self.passes = self.votes = 0
        self.changed = threading.Condition()
        """Held while the queue changes; notified of new jobs."""

    def __len__(self) -> int:
        """Number of jobs that have been accepted and have not ended."""
        return len(self.queue) + self.running

    def submit(self, jobs: Sequence[Job]) -> None:
        """Accept all of `jobs` or, if the queue has no room for them, none: QueueFullError."""
        with self.changed:
            if len(self) + len(jobs) > self.limit:
                raise QueueFullError
            self.queue.extend(jobs)
            self.changed.notify()

    def step(self) -> list[Job]:
        """Run one pass; return the jobs that reached a look or ended."""
        with self.changed:
            ended, chosen = self._take_pass()
        if chosen:
            self.passes += 1
            self.votes += sum(job.size for job in chosen)
            run_pass(chosen)
        with self.changed:
            self.running = 0
            # At the end of the queue: all requests progress at the same speed.
            self.queue.extend(job for job in chosen if job.ending is None)
        return [*ended, *chosen]

    def _take_pass(self) -> tuple[list[Job], list[Job]]:
        """Remove the jobs that end now, and those of the next pass, from the queue."""
        now = self.clock()
        ended = [job for job in self.queue if job.stop(now)]
        rest = [job for job in self.queue if job.ending is None]
        chosen = choose_pass(rest)
        members = set(map(id, chosen))
        for job in takewhile(lambda job: id(job) not in members, rest):
            job.passed_over += 1
        self.queue = deque(job for job in rest if id(job) not in members)
        self.running = len(chosen)
        return ended, chosen


class Engine:
    """A scheduler in its own thread. `on_end` is called there once per job, before its client is notified."""

    def __init__(self, limit: int, on_end: Callable[[Job], None] = lambda job: None) -> None:
        self.scheduler = Scheduler(limit)
        self._on_end = on_end
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="smoothcert-engine", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """See `Scheduler.submit`."""
        with self.scheduler.changed:
            if self._closing:
                raise QueueFullError
            self.scheduler.submit(jobs)

    def close(self) -> None:
        """Accept no more jobs, finish the accepted ones, and end the thread."""
        with self.scheduler.changed:
            self._closing = True
            self.scheduler.changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            with self.scheduler.changed:
                self.scheduler.changed.wait_for(lambda: self._closing or len(self.scheduler) > 0)
                if not len(self.scheduler):
                    return
            for job in self.scheduler.step():
                try:
                    if job.ending is not None:
                        self._on_end(job)
                    job.notify(job)
                except Exception:  # a log that cannot be written, or a client whose loop has ended
                    log.exception("an answer could not be recorded or delivered")
