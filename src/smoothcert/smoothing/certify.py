"""CERTIFY and PREDICT of Cohen et al. 2019 (https://arxiv.org/abs/1902.02918): from votes to a certificate or class."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from smoothcert.errors import RequestError
from smoothcert.noise import Gaussian, Noise
from smoothcert.smoothing.bounds import error_upper_bound, randomized_error_bound, top_two_p_value, two_sided_bounds
from smoothcert.smoothing.certificate import ABSTAIN, Certificate


def certificate_of_class(
    cls: int,
    votes: Sequence[int],
    n0: int,
    noise: Noise,
    alpha: float,
    *,
    two_sided: bool = False,
    coin: float | None = None,
    slack: float = 0.0,
) -> Certificate:
    """The certificate of `cls`, which n0 other votes have chosen, from *fresh* `votes` per class.

    With probability at least 1 - alpha over the votes, either the result abstains or the smoothed classifier is
    constant within its radius. `slack` is added to each error bound.
    Two-sided (Gaussian only) bounds the runner-up as well, which helps with many classes. A `coin`, uniform on (0, 1]
    and independent of all votes, makes the bound randomized.
    """
    n, count = int(np.sum(votes)), int(votes[cls])
    if coin is not None:
        radius = noise.radius(min(1.0, randomized_error_bound(count, n, alpha, coin) + slack))
    elif not two_sided:
        radius = noise.radius(min(1.0, error_upper_bound(count, n, alpha) + slack))
    elif isinstance(noise, Gaussian):
        other = max((int(k) for c, k in enumerate(votes) if c != cls), default=0)
        q, runner_up = two_sided_bounds(count, other, n, alpha)
        radius = noise.radius_between(min(1.0, q + slack), min(1.0, runner_up + slack))
    else:
        raise RequestError(f"bound: two-sided is known for gaussian noise, got {noise.name}; use one-sided")
    certificate = certificate_from_bound(cls, radius, n0, count, sorted_votes(votes))
    return certificate if coin is None else replace(certificate, coin=coin)


def certificate_from_bound(
    cls: int,
    radius: float,
    n0: int,
    count: int,
    votes: tuple[tuple[int, int], ...],
    *,
    earlier: tuple[tuple[tuple[int, int], ...], ...] = (),
) -> Certificate:
    """The certificate of `cls` with `radius`; it abstains if the radius is 0."""
    n = sum(number for _, number in votes)
    if radius <= 0:
        return Certificate(ABSTAIN, 0.0, n0, n, count, votes, earlier)
    return Certificate(cls, radius, n0, n, count, votes, earlier)


def class_from_votes(votes: Sequence[int], alpha: float) -> int:
    """The class of the smoothed classifier, or ABSTAIN. Wrong with probability at most alpha over the votes."""
    order = np.argsort(-np.asarray(votes), kind="stable")
    count1, count2 = int(votes[order[0]]), int(votes[order[1]])
    return int(order[0]) if top_two_p_value(count1, count2) <= alpha else ABSTAIN


def sorted_votes(votes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(class, count) of all classes with votes, largest count first."""
    order = sorted((c for c, k in enumerate(votes) if k), key=lambda c: -votes[c])
    return tuple((c, int(votes[c])) for c in order)
