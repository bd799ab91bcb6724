"""The rule behind one served answer: when it looks at the votes, and what a look may claim.

A request fixes everything that the statistics depend on before its first vote is drawn: alpha, the largest number of
votes, and the radius or the grid of radii. n0 votes choose the class A; fresh votes are then counted in looks. The
rules are those of the library (`smoothing/rules.py`):

- sequential with a `radius`: one exact sequential test at alpha, as `certify(until_radius=radius, n=votes)`;
- sequential without one: a test for each radius of GRID at 0.3 alpha, and a Clopper-Pearson bound at 0.7 alpha that is
  used after the last vote only, as `certify(radii=..., n=votes)`;
- fixed: CERTIFY with `votes` votes. Its only look is the last one.

Guarantee: for every request, P(the answer claims a radius that is not true) <= alpha over the noise, whoever ends the
request at whichever moment.

Proof. Let A be given, and let p be its probability; fresh votes are independent of the choice of A. Let k = 1, 2, ...
be the looks that were fixed in advance, and let C_k be the claim at look k: what the tests have crossed up to then and,
at the last look, the Clopper-Pearson bound. Let B be the event that *some* C_k is false, had every vote been drawn. For
one test, P(B) <= alpha, because alpha is spent over the looks in advance: the boundaries bound the probability of
*ever* crossing (`boundaries`). For a grid, P(B) <= 0.3 alpha + 0.7 alpha (`GridTest`, `split_alpha`). For the fixed
rule there is one claim, and P(B) <= alpha (`error_upper_bound`). A request ends at a look K, and its answer is C_K, or
an abstention if K is 0. K may depend on anything: on the votes, on a clock, on the load of other requests, on a client
who watches the votes and disconnects. Whatever K is, the answer is false only if C_K is false, hence only if B occurs.
So P(false answer) <= P(B) <= alpha. A deadline chooses K and nothing else: it adds no look and computes no new bound.
[]

Two conditions carry the proof, and the code keeps both. An answer is read at a look only (`Progress.certificate` uses
the state of the last `update`, and `update` refuses a count between looks). And noise is independent of the image: its
seed comes from the operating system after the request has been read.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from smoothcert.errors import RequestError
from smoothcert.noise import Noise
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.smoothing.certificate import ABSTAIN, Certificate, certificate_from_bound, sorted_votes
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.sequential import GridRun, GridTest, combined_error_bound, split_alpha

RuleName = Literal["sequential", "fixed"]
Ending = Literal["decided", "futile", "budget", "deadline", "disconnect", "failed"]
"""Why an answer has no more votes: all tests have crossed, no more votes would help, all votes are used, the deadline,
the client has left, or the classifier failed."""
GRID = (0.02, *(0.25 * k for k in range(1, 16)))
"""Quantiles of the normal distribution at which an open question tests p; for Gaussian noise, radii in sigmas."""


@dataclass(frozen=True)
class Question:
    """What one request asks about each of its images. `votes` are the most fresh votes that may be drawn."""

    votes: int
    alpha: float
    radius: float | None = None
    rule: RuleName = "sequential"


@dataclass(frozen=True)
class Plan:
    """A question with its looks: the numbers of fresh votes at which counts are read, fixed before the first vote."""

    question: Question
    noise: Noise
    n0: int
    looks: tuple[int, ...]
    test: GridTest | None
    """None for the fixed rule."""
    held_back: float = 0.0

    def start(self, cls: int, num_classes: int) -> "Progress":
        """The run of one image whose first votes chose the class `cls`."""
        return Progress(self, cls, np.zeros(num_classes, dtype=np.int64), self.test.start() if self.test else None)

    def nothing(self) -> Certificate:
        """The answer of a request that ends before its first look: it abstains."""
        return Certificate(ABSTAIN, 0.0, self.n0, 0, 0, ())


@dataclass
class Progress:
    """The votes of one image and what they claim, always at a look."""

    plan: Plan
    cls: int
    votes: np.ndarray
    run: GridRun | None
    position: int = 0
    """Number of looks that have passed."""

    @property
    def n(self) -> int:
        return self.plan.looks[self.position - 1] if self.position else 0

    @property
    def missing(self) -> int:
        """Number of votes up to the next look."""
        return self.plan.looks[self.position] - self.n

    def update(self, fresh: np.ndarray) -> Ending | None:
        """Take the votes per class up to the next look; return why the request ends here, or None."""
        if int(fresh.sum()) != self.missing:
            raise ValueError(f"expected {self.missing} votes up to the next look, got {int(fresh.sum())}")
        self.votes += fresh
        self.position += 1
        stops = self.run is not None and self.run.update(int(self.votes[self.cls]), self.n) == "stop"
        if self.run is not None and self.run.claimed == len(self.run.crossed):
            return "decided"
        if self.position == len(self.plan.looks):
            return "budget"
        return "futile" if stops else None

    @property
    def error_bound(self) -> float:
        """The claim of the last look: 1 - p is at most this (1 if nothing is claimed)."""
        if self.run is None:
            ended = self.position == len(self.plan.looks)
            return error_upper_bound(int(self.votes[self.cls]), self.n, self.plan.question.alpha) if ended else 1.0
        return combined_error_bound(self.run, self.plan.held_back)

    def certificate(self) -> Certificate:
        """The claim of the last look as a certificate, valid whoever chose this look (see the proof above)."""
        counts = self.votes.tolist()
        radius = self.plan.noise.radius(self.error_bound)
        return certificate_from_bound(self.cls, radius, self.plan.n0, counts[self.cls], sorted_votes(counts))


def grid_radii(noise: Noise, votes: int, alpha: float) -> tuple[float, ...]:
    """The radii that an open question tests: those of GRID that `votes` agreeing votes can show, and at least one."""
    least = error_upper_bound(votes, votes, split_alpha(alpha)[0])
    errors = [q for q in special.ndtr(-np.array(GRID)).tolist() if q > least]
    return tuple(noise.radius(q) for q in errors or [special.ndtr(-GRID[0])])


def make_plan(question: Question, noise: Noise, n0: int, look: int) -> Plan:
    """The looks of `question`, after every `look` votes; a radius that they can never show is a RequestError."""
    n = question.votes
    if question.rule == "fixed":
        return Plan(question, noise, n0, (*range(look, n, look), n), None)
    open_question = question.radius is None
    radii = grid_radii(noise, n, question.alpha) if question.radius is None else (question.radius,)
    rule = Rule(n0=n0, n=n, alpha=question.alpha, radii=radii, hold_back=open_question)
    if not open_question and (problem := rule.unreachable(radii[0], noise)):
        raise RequestError(f"radius: {problem}")
    test, held_back = rule.grid(noise, min(look, n))
    return Plan(question, noise, n0, tuple(test.looks.tolist()), test, held_back)
