"""The engine: votes are those of the library, passes are shared and full, and requests end at looks only."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from smoothcert.certification.serve.engine import (
    PATIENCE,
    Engine,
    Job,
    QueueFullError,
    Scheduler,
    choose_pass,
    system_seed,
)
from smoothcert.certification.serve.rule import Question, make_plan
from smoothcert.noise import Gaussian
from smoothcert.smoothing.certificate import Certificate
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import VoteCounter

NOISE = Gaussian(0.5)


def half_space(images: torch.Tensor) -> torch.Tensor:
    """Class 1 right of 0.5, class 2 far on the left."""
    x = images.flatten(1)[:, 0]
    return torch.stack([torch.zeros_like(x), (x - 0.5) * 10, -1 - x * 10], dim=1)


COUNTER = VoteCounter(half_space, NOISE, 3, batch_size=500)
IMAGES = [torch.full((1, 2, 2), value) for value in (0.52, 0.7, 1.0, 1.6, -0.4, 0.3, 2.5)]


def job(image: torch.Tensor, question: Question, **options: Any) -> Job:
    plan = make_plan(question, NOISE, 100, 500)
    return Job(COUNTER, image, plan, **{"deadline": float("inf"), **options})


def finish(scheduler: Scheduler) -> None:
    while len(scheduler):
        scheduler.step()


@pytest.mark.parametrize("radius", [None, 0.1])
def test_answers_are_those_of_the_library_for_the_same_seeds(radius: float | None) -> None:
    """Also when all images share passes, and join at different times."""
    question = Question(3000, 0.001, radius)
    plan = make_plan(question, NOISE, 100, 500)
    assert plan.test is not None
    radii = (radius,) if radius else tuple(NOISE.radius(q) for q in plan.test.qs)
    rule = Rule(100, 3000, 0.001, radii=radii, hold_back=radius is None)
    expected = rule.certify(COUNTER, torch.stack(IMAGES), [(7, i) for i in range(len(IMAGES))])
    scheduler, jobs = Scheduler(100), [job(image, question, seed=(7, i)) for i, image in enumerate(IMAGES)]
    for late in jobs:
        scheduler.submit([late])
        scheduler.step()
    finish(scheduler)
    for mine, theirs in zip([j.certificate() for j in jobs], expected, strict=True):
        assert (mine.prediction, mine.n, mine.votes) == (theirs.prediction, theirs.n, theirs.votes)
        assert mine.radius == pytest.approx(theirs.radius, rel=1e-8)  # the grid is rounded once more in `radii`
    assert len({j.certificate().n for j in jobs}) > 1


def test_fixed_rule_is_certify_of_the_library() -> None:
    question = Question(1250, 0.001, rule="fixed")
    jobs, scheduler = [job(image, question, seed=(3, i)) for i, image in enumerate(IMAGES)], Scheduler(100)
    scheduler.submit(jobs)
    finish(scheduler)
    expected = Rule(100, 1250, 0.001).certify(COUNTER, torch.stack(IMAGES), [(3, i) for i in range(len(IMAGES))])
    assert [j.certificate() for j in jobs] == expected


@pytest.mark.parametrize("how", ["deadline", "disconnect"])
def test_requests_that_are_stopped_end_at_a_look(how: str) -> None:
    """At every moment of the run, with the claim of the last look, which is that of the same votes without a stop."""
    now = [0.0]
    for moment in range(10):
        stopped, whole = (job(IMAGES[2], Question(3000, 0.001), seed=(1, 1)) for _ in range(2))
        scheduler = Scheduler(10, lambda: now[0])
        scheduler.submit([stopped])
        if how == "deadline":
            stopped.deadline = now[0] + moment
        claims: list[Certificate] = []
        while len(scheduler):
            if how == "disconnect" and len(claims) == moment:
                stopped.cancelled = True
            ended = [job for job in scheduler.step() if job.ending is not None]
            claims.append(stopped.certificate())
            now[0] += 1
        assert ended == [stopped], "it is answered and logged"
        assert stopped.certificate().n in (0, *stopped.plan.looks)
        if stopped.ending != how:
            assert moment > 1
            break
        free = Scheduler(10)
        free.submit([whole])
        for _ in range(moment):
            free.step()
        assert stopped.certificate() == whole.certificate()
    else:
        pytest.fail("the request never ended")


def test_passes_are_full_when_many_wait() -> None:
    scheduler = Scheduler(100)
    scheduler.submit([job(IMAGES[3], Question(1000, 0.001, 0.1)) for _ in range(10)])
    first, second, third = scheduler.step(), scheduler.step(), scheduler.step()
    assert [len(jobs) for jobs in (first, second, third)] == [5, 5, 1]  # 5 x 100 votes twice, then 500 votes of one
    finish(scheduler)
    assert scheduler.votes / scheduler.passes == 500


def test_no_pass_has_images_of_two_stages() -> None:
    """Votes that choose a class and votes that certify it are drawn from separate noise, also if they are as many."""
    plan = make_plan(Question(500, 0.001, rule="fixed"), NOISE, 500, 500)
    counter = replace(COUNTER, batch_size=10_000)
    scheduler, passes = Scheduler(100), list[set[str]]()
    for _ in range(5):
        scheduler.submit([Job(counter, IMAGES[2], plan, float("inf"))])
        passes.append({waiting.stage for waiting in choose_pass(scheduler.queue)})
        scheduler.step()
    assert {frozenset(stages) for stages in passes} == {frozenset({"select"}), frozenset({"estimate"})}


def test_lonely_job_is_not_passed_over_for_ever() -> None:
    scheduler = Scheduler(100)
    scheduler.submit([job(IMAGES[0], Question(100_000, 0.001)) for _ in range(5)])
    scheduler.step()
    lonely = job(IMAGES[0], Question(1000, 0.001))
    scheduler.submit([lonely])
    for _ in range(5 + PATIENCE + 1):
        scheduler.step()
    assert lonely.progress is not None


def test_full_queue_takes_all_images_of_a_request_or_none() -> None:
    scheduler = Scheduler(3)
    scheduler.submit([job(IMAGES[0], Question(1000, 0.1)) for _ in range(2)])
    with pytest.raises(QueueFullError):
        scheduler.submit([job(IMAGES[0], Question(1000, 0.1)) for _ in range(2)])
    assert len(scheduler) == 2


def test_images_in_a_pass_count_in_the_queue() -> None:
    """A request arrives while the only place is taken by an image whose votes are being drawn."""
    refused = []

    def interrupted(images: torch.Tensor) -> torch.Tensor:
        with pytest.raises(QueueFullError):
            scheduler.submit([job(IMAGES[0], Question(1000, 0.1))])
        refused.append(len(scheduler))
        return half_space(images)

    scheduler, first = Scheduler(1), job(IMAGES[2], Question(1000, 0.1))
    first.counter = replace(COUNTER, classifier=interrupted)
    scheduler.submit([first])
    finish(scheduler)
    assert refused
    assert set(refused) == {1}
    assert first.certificate().prediction == 1


def test_image_on_which_the_classifier_fails_costs_no_other_an_answer() -> None:
    def fragile(images: torch.Tensor) -> torch.Tensor:
        if images.amax() > 150:
            raise KeyError("a secret")
        return torch.where(images.flatten(1)[:, :1] > 50, float("nan"), half_space(images))

    counter = VoteCounter(fragile, NOISE, 3, batch_size=500)
    bad = [torch.full((1, 2, 2), value) for value in (100.0, 200.0)]
    jobs = [job(image, Question(500, 0.001, 0.1)) for image in (IMAGES[3], *bad, IMAGES[3])]
    for each in jobs:
        each.counter = counter
    scheduler = Scheduler(10)
    scheduler.submit(jobs)
    finish(scheduler)
    assert [j.ending for j in jobs] == ["decided", "failed", "failed", "decided"]
    assert "NaN" in jobs[1].error
    assert jobs[2].error == "the classifier failed on this image"  # what its code raised is for the log only


def test_seeds_are_fresh_and_close_finishes_what_was_accepted() -> None:
    assert len({system_seed() for _ in range(100)}) == 100
    ended: list[Job] = []
    notified = threading.Event()
    engine = Engine(50, ended.append)
    jobs = [job(IMAGES[3], Question(1000, 0.001, 0.1), notify=lambda j: notified.set()) for _ in range(20)]
    engine.submit(jobs)
    engine.close()
    assert notified.is_set()
    assert sorted(map(id, ended)) == sorted(map(id, jobs))
    assert {j.ending for j in jobs} == {"decided"}
    assert len({j.seed for j in jobs}) == 20
    with pytest.raises(QueueFullError):
        engine.submit(jobs[:1])
    assert np.all([j.certificate().radius > 0.1 for j in jobs])
