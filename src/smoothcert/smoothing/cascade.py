"""A cascade of smoothed classifiers over decreasing sigma: the first stage that is sure answers.

Definition. Stages s = 1, ..., S have base classifiers f_s and sigmas sigma_1 > ... > sigma_S. Let p_s(c, x) be the
probability that f_s(x + N(0, sigma_s^2 I)) = c. Stage s answers c at x if p_s(c, x) > 1/2. The cascade G(x) is the
answer of the first stage that answers; it abstains if none does.

Rule. From stage 1 on: n0 votes choose a class a_s, n fresh votes give a lower bound of p_s(a_s, x). If it is above 1/2,
the answer is A = a_s. Its radius is the minimum of R_s = sigma_s Phi^-1(lower bound) and, over all earlier stages e, of
-sigma_e Phi^-1(u_e), where u_e is an upper bound of the largest p_e(c, x) of a class c other than A. If this is not
positive, or no stage answers, the result abstains.

Claim. With probability at least 1 - alpha over the votes, the result abstains or G(x') = A for all ||x' - x|| < radius.

Proof. Suppose that the bounds in use hold. Phi^-1(p_s(c, x)) changes by at most ||x' - x|| / sigma_s between x and x',
for each class. So p_s(A, x') > 1/2 for ||x' - x|| < R_s: stage s answers A at x'. At an earlier stage e, every class
c other than A has p_e(c, x') <= Phi(Phi^-1(u_e) + ||x' - x|| / sigma_e) <= 1/2 inside the radius: stage e answers A or
nothing. Hence the first stage that answers at x' answers A.

The bounds fail with probability at most alpha. Stage e has alpha / S, of which its lower bound takes 90% and its upper
bound the rest; the last stage needs no upper bound. (With the full alpha / S for each, a stage could fail at both ends,
by too many votes or by too few, with up to twice its share.) The lower bound is Clopper-Pearson for a class that other
votes chose. For the upper bound, let A_e be the answer of the stages after e as if stage e had not answered. It depends
on the votes of these stages only, which are independent of those of stage e because each stage draws its own noise.
Given A_e, the most probable class other than A_e is one fixed class B; its count is at most the largest count of a
class other than A_e, and the bound grows with the count, so it fails for B with at most its share. Whenever stage e is
passed, A = A_e. The sum over all bounds is at most alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smoothcert.noise import Gaussian
from smoothcert.smoothing.bounds import error_upper_bound, runner_up_upper_bound
from smoothcert.smoothing.certificate import Certificate, Votes, certificate_from_bound, largest_other, sorted_votes

if TYPE_CHECKING:  # certificates files are checked without torch
    from torch import Tensor

    from smoothcert.smoothing.votes import VoteCounter

LOWER_SHARE = 0.9
"""Share of the alpha of a stage for its lower bound."""


def stage_alphas(alpha: float, stages: int) -> tuple[float, float]:
    """The alpha of the lower and of the upper bound of a stage that is not the last."""
    share = last_alpha(alpha, stages)
    lower = LOWER_SHARE * share
    return lower, math.nextafter(share - lower, 0.0)


def last_alpha(alpha: float, stages: int) -> float:
    """The alpha of the last stage, which needs no upper bound: its whole share."""
    return math.nextafter(alpha / stages, 0.0)


def stage_error(count: int, n: int, stage: int, stages: int, alpha: float) -> float:
    """Upper bound on 1 - p of the class with `count` of the n votes of a stage, which answers if it is below 1/2."""
    lower, _ = stage_alphas(alpha, stages)
    return error_upper_bound(count, n, lower if stage + 1 < stages else last_alpha(alpha, stages))


def cascade_radius(
    cls: int, count: int, n: int, earlier: Sequence[Votes], sigmas: Sequence[float], alpha: float
) -> float:
    """The radius of `cls` with `count` of n votes at the stage after the `earlier` ones, n each; 0 if there is none."""
    stage = len(earlier)
    stages = len(sigmas)
    radius = Gaussian(sigmas[stage]).radius(stage_error(count, n, stage, stages, alpha))
    _, upper = stage_alphas(alpha, stages)
    for sigma, votes in zip(sigmas, earlier, strict=False):
        # The radius at an error of u is -sigma Phi^-1(u), rounded toward zero.
        radius = min(radius, Gaussian(sigma).radius(runner_up_upper_bound(largest_other(votes, cls), n, upper)))
    return radius


def certify_cascade(
    counters: Sequence[VoteCounter],
    images: Tensor,
    seeds: Sequence[tuple[int, int]],
    *,
    n0: int,
    n: int,
    alpha: float,
) -> list[Certificate]:
    """The certificate of each of `images` by the cascade of `counters`; a stage sees what no earlier one answers.

    n0, n, count and votes of a certificate are those of the stage that answered, or of the last one; `earlier` holds
    the votes of the stages before it.
    """
    sigmas = [counter.noise.sigma for counter in counters]
    results: dict[int, Certificate] = {}
    earlier: list[list[Votes]] = [[] for _ in images]
    for stage, counter in enumerate(counters):
        active = [i for i in range(len(images)) if i not in results]
        if not active:
            break
        part = images[active]
        stage_seeds = [(stage_seed(seeds[i][0], stage), seeds[i][1]) for i in active]
        chosen = counter.count(part, stage_seeds, "select", n0).argmax(axis=1).tolist()
        for i, cls, votes in zip(active, chosen, counter.count(part, stage_seeds, "estimate", n).tolist(), strict=True):
            last = stage + 1 == len(counters)
            if stage_error(votes[cls], n, stage, len(counters), alpha) < 0.5 or last:
                radius = cascade_radius(cls, votes[cls], n, earlier[i], sigmas, alpha)
                results[i] = certificate_from_bound(
                    cls, radius, n0, votes[cls], sorted_votes(votes), earlier=tuple(earlier[i])
                )
            earlier[i].append(sorted_votes(votes))
    return [results[i] for i in range(len(images))]


def stage_seed(seed: int, stage: int) -> int:
    """The seed of a stage: stages draw independent noise."""
    return int(np.random.SeedSequence(seed, spawn_key=(stage,)).generate_state(1, np.uint64)[0] >> np.uint64(1))
