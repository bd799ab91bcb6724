"""The certificate of one image; CERTIFY and PREDICT of Cohen et al. 2019 (https://arxiv.org/abs/1902.02918), from votes
to a certificate or a class."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smoothcert.errors import RequestError
from smoothcert.noise import Gaussian, Noise
from smoothcert.smoothing.bounds import error_upper_bound, randomized_error_bound, top_two_p_value, two_sided_bounds

ABSTAIN = -1
"""The prediction when nothing could be proved."""
MOST_VOTES = 10**9
"""The largest number of votes per image that a request may ask for."""

Votes = tuple[tuple[int, int], ...]
"""(class, count) of all classes with votes, largest count first."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """With probability at least 1 - alpha over the sampling, g(x') = prediction for all ||x' - x|| < radius.

    `prediction` is ABSTAIN and `radius` 0 when nothing could be proved. `count` of the `n` fresh votes went to the
    class that the first `n0` votes had chosen; `votes` are all n votes.
    """

    prediction: int
    radius: float
    n0: int
    n: int
    count: int
    votes: Votes
    earlier: tuple[Votes, ...] = ()
    """The votes of the stages of a cascade before the one that `votes` belong to."""
    coin: float | None = None
    """The coin of a randomized bound, on which the radius depends; None for the other bounds."""

    @property
    def spent(self) -> int:
        """All votes that were drawn: n0 + n, at each stage of a cascade."""
        return (self.n0 + self.n) * (1 + len(self.earlier))

    @property
    def abstained(self) -> bool:
        return self.prediction == ABSTAIN

    @property
    def chosen(self) -> int:
        """The class that the first n0 votes chose; ABSTAIN where it is not known.

        An abstention does not store it: it is the class with the stored count, if there is exactly one.
        """
        if not self.abstained:
            return self.prediction
        fitting = [c for c, number in self.votes if number == self.count]
        return fitting[0] if len(fitting) == 1 else ABSTAIN


def certificate_of_class(
    cls: int,
    votes: Sequence[int],
    n0: int,
    noise: Noise,
    alpha: float,
    *,
    bound: str = "one-sided",
    coin: float | None = None,
    slack: float = 0.0,
) -> Certificate:
    """The certificate of `cls`, which n0 other votes have chosen, from *fresh* `votes` per class.

    With probability at least 1 - alpha over the votes, either the result abstains or the smoothed classifier is
    constant within its radius. `slack` is added to each error bound.
    The `bound` two-sided (Gaussian only) bounds the runner-up as well, which helps with many classes; randomized needs
    a `coin`, uniform on (0, 1] and independent of all votes.
    """
    n = int(np.sum(votes))
    count = int(votes[cls])
    pairs = sorted_votes(votes)
    other = largest_other(pairs, cls)
    radius = certified_radius(count, other, n, noise, alpha, bound=bound, coin=coin, slack=slack)
    return certificate_from_bound(cls, radius, n0, count, pairs, coin=coin)


def certified_radius(
    count: int,
    other: int,
    n: int,
    noise: Noise,
    alpha: float,
    *,
    bound: str = "one-sided",
    coin: float | None = None,
    slack: float = 0.0,
) -> float:
    """The radius of a class with `count` of n votes, if no other class has more than `other`; 0 if there is none.

    See `certificate_of_class` for the guarantee and the options.
    """
    if (coin is not None) != (bound == "randomized"):
        raise ValueError(f"expected a coin for the randomized bound and none for others, got {coin} for {bound}")
    if bound == "two-sided":
        if not isinstance(noise, Gaussian):
            raise RequestError(f"bound: two-sided works with gaussian noise only, got {noise.name}; use one-sided")
        q, runner_up = two_sided_bounds(count, other, n, alpha)
        return noise.radius_between(min(1.0, q + slack), min(1.0, runner_up + slack))
    if coin is not None:
        q = randomized_error_bound(count, n, alpha, coin)
    elif bound == "one-sided":
        q = error_upper_bound(count, n, alpha)
    else:
        raise ValueError(f"expected a known bound, got {bound}")
    return noise.radius(min(1.0, q + slack))


def largest_radius(n: int, noise: Noise, alpha: float, bound: str, slack: float = 0.0) -> float:
    """The largest radius that n votes can show: all of them agree, and the coin of a randomized bound is 0."""
    coin = 0.0 if bound == "randomized" else None
    return certified_radius(n, 0, n, noise, alpha, bound=bound, coin=coin, slack=slack)


def certificate_from_bound(
    cls: int,
    radius: float,
    n0: int,
    count: int,
    votes: Votes,
    *,
    earlier: tuple[Votes, ...] = (),
    coin: float | None = None,
) -> Certificate:
    """The certificate of `cls` with `radius`; it abstains if the radius is 0."""
    prediction, radius = (cls, radius) if radius > 0 else (ABSTAIN, 0.0)
    return Certificate(prediction, radius, n0, sum(number for _, number in votes), count, votes, earlier, coin)


def largest_other(votes: Votes, cls: int) -> int:
    """The largest count of another class than `cls`."""
    return max((number for c, number in votes if c != cls), default=0)


def class_from_votes(votes: Sequence[int], alpha: float) -> int:
    """The class of the smoothed classifier, or ABSTAIN. Wrong with probability at most alpha over the votes."""
    order = np.argsort(-np.asarray(votes), kind="stable")
    count1, count2 = int(votes[order[0]]), int(votes[order[1]])
    return int(order[0]) if top_two_p_value(count1, count2) <= alpha else ABSTAIN


def fewest_deciding_votes(alpha: float) -> int:
    """The least number of votes with which `class_from_votes` gives a class if all agree: 2 * 2^-n is at most alpha."""
    return max(1, math.ceil(1 - math.log2(alpha)))


def sorted_votes(votes: Sequence[int]) -> Votes:
    """(class, count) of all classes with votes, largest count first."""
    order = sorted((c for c, k in enumerate(votes) if k), key=lambda c: -votes[c])
    return tuple((c, int(votes[c])) for c in order)
