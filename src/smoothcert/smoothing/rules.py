"""Rules that decide how many votes an image gets, and the certificates that follow from them.

Fixed: CERTIFY with n votes. Two-stage: a few votes choose the class and the number of fresh votes that are worth their
cost. Sequential: votes are drawn until the question "is the radius at least r?" is answered. Certificates of every rule
fail with probability at most alpha.

The second stage of the two-stage rule is plain CERTIFY on votes that the first has not seen, so Clopper-Pearson at the
full alpha holds with probability at least 1 - alpha, whatever the first stage chose. Counting the first votes again
would break this, because n would depend on the votes that are then bounded.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from scipy import special
from torch import Tensor

from smoothcert.errors import RequestError
from smoothcert.io.text import radius_text
from smoothcert.noise import Noise
from smoothcert.smoothing.certificate import (
    ABSTAIN,
    MOST_VOTES,
    Certificate,
    certificate_from_bound,
    certificate_of_class,
    largest_radius,
    sorted_votes,
)
from smoothcert.smoothing.sequential import GridTest, combined_error_bound, spendable, split_alpha
from smoothcert.smoothing.votes import NOISE_BLOCK, VoteCounter, coin_of

FIRST_STAGE = 500
"""Minimum number of votes of the first stage of the two-stage rule."""
SECOND_STAGE = 1000
"""Minimum number of votes of its second stage."""
OUTSIDE = 0.1
"""Probability that p is larger than the largest one for which the loss is predicted. It decides how often the loss is a
little larger than requested, never whether a certificate holds."""
LOOK = {"cpu": 500, "cuda": 2000}
"""Number of votes between two looks of a sequential test, at least."""
LEAST_RADIUS = 1e-6
"""The least radius of a test, in sigmas: the float64 numbers next to q = 1/2 stand for radii 1e-16 sigma apart."""
BEYOND = 1e-9
"""Relative amount by which radii are tested beyond the requested ones: certified accuracy counts larger radii only."""


@dataclass(frozen=True)
class _Chosen:
    """Images whose class the first n0 votes chose: `first[i]` of them went to `classes[i]`."""

    counter: VoteCounter
    images: Tensor
    seeds: Sequence[tuple[int, int]]
    classes: Sequence[int]
    first: Sequence[int]
    n0: int

    def votes(self, which: Sequence[int], n: int, first_block: int = 0) -> np.ndarray:
        """n fresh votes for some of the images."""
        part = self.images[torch.tensor(which, device=self.images.device)]
        return self.counter.count(part, [self.seeds[i] for i in which], "estimate", n, first_block=first_block)


@dataclass(frozen=True)
class Rule:
    """`radii` makes the rule sequential, `radius_loss` (in sigmas) two-stage; otherwise it is CERTIFY with n votes.

    `bound` is one-sided, two-sided or randomized, with a coin per image from its seed (see `randomized_error_bound`);
    with `radii` it is one-sided.
    `hold_back` reserves a part of alpha for a Clopper-Pearson bound after n votes of a sequential rule. `label_aware`
    (benchmarks only) draws no further votes for an image whose first votes do not choose its label, because it cannot
    count towards certified accuracy. `slack` is added to every error bound (see `integer_noise`).
    """

    n0: int
    n: int
    alpha: float
    bound: str = "one-sided"
    radii: tuple[float, ...] = ()
    hold_back: bool = False
    radius_loss: float | None = None
    label_aware: bool = False
    slack: float = 0.0

    def certify(
        self, counter: VoteCounter, images: Tensor, seeds: Sequence[tuple[int, int]], labels: Sequence[int] = ()
    ) -> list[Certificate]:
        """A certificate for each of `images` (float32 [k, ...] on the device); only `label_aware` needs labels."""
        n0 = self.n0 if self.radius_loss is None else max(self.n0, FIRST_STAGE)
        selection = counter.count(images, seeds, "select", n0)
        top = selection.argmax(axis=1).tolist()
        active = [i for i in range(len(images)) if not self.label_aware or top[i] == labels[i]]
        results = [Certificate(ABSTAIN, 0.0, n0, 0, 0, ()) for _ in images]
        if not active:
            return results
        part = images[torch.tensor(active, device=images.device)]
        first = [int(selection[i, top[i]]) for i in active]
        chosen = _Chosen(counter, part, [seeds[i] for i in active], [top[i] for i in active], first, n0)
        if self.radii:
            certificates = self._sequential(chosen)
        elif self.radius_loss is not None:
            certificates = self._two_stage(chosen, self.radius_loss)
        else:
            certificates = self._bounded(chosen, chosen.votes(range(len(active)), self.n))
        for i, certificate in zip(active, certificates, strict=True):
            results[i] = certificate
        return results

    def _bounded(self, chosen: _Chosen, votes: Iterable[np.ndarray]) -> list[Certificate]:
        # A coin does not depend on the first stage either, so the bound is exact for every n that this may choose.
        coins = [coin_of(seed) if self.bound == "randomized" else None for seed in chosen.seeds]
        noise = chosen.counter.noise
        return [
            certificate_of_class(
                cls, fresh.tolist(), chosen.n0, noise, self.alpha, bound=self.bound, coin=coin, slack=self.slack
            )
            for cls, fresh, coin in zip(chosen.classes, votes, coins, strict=True)
        ]

    def _two_stage(self, chosen: _Chosen, radius_loss: float) -> list[Certificate]:
        """Plain CERTIFY on as many fresh votes as the first stage found worthwhile: sound given the first stage."""
        votes = []
        block = chosen.counter.block(chosen.images.device, self.n)
        for i, count in enumerate(chosen.first):
            wanted = second_stage_votes(count, chosen.n0, alpha=self.alpha, n_max=self.n, radius_loss=radius_loss)
            votes.append(chosen.votes([i], min(self.n, -(-wanted // block) * block))[0])
        return self._bounded(chosen, votes)

    def errors_at_radii(self, noise: Noise) -> list[float]:
        """The error probability of each of the radii, falling; radii that cannot be tested are a RequestError."""
        qs = [noise.error_at(radius * (1 + BEYOND)) - self.slack for radius in self.radii]
        if qs and min(qs) <= 0:
            raise RequestError(
                f"radii: {max(self.radii):g} can never be certified at sigma {noise.sigma:g}; ask for less"
            )
        if self.radii and self.radii[0] < LEAST_RADIUS * noise.sigma:
            raise RequestError(f"radii: expected at least {LEAST_RADIUS:g} sigma, got {self.radii[0]:g}; ask for more")
        for (below, q), (above, smaller) in pairwise(zip(self.radii, qs, strict=True)):
            if smaller >= q:
                raise RequestError(
                    f"radii: {below!r} and {above!r} cannot be distinguished at sigma {noise.sigma:g}; "
                    "ask for one of them"
                )
        return qs

    def grid(self, noise: Noise, look: int) -> tuple[GridTest, float]:
        """The tests of the radii, and the alpha reserved for Clopper-Pearson at n (0 without `hold_back`)."""
        qs = self.errors_at_radii(noise)
        alpha, held_back = split_alpha(self.alpha) if self.hold_back else (self.alpha, 0.0)
        return GridTest(qs, alpha, look, self.n), held_back

    def largest_radius(self, noise: Noise, block: int = 1) -> float:
        """The largest radius that the rule can certify: all votes agree, and the coin of a randomized bound is 0.

        The two-stage rule may round its votes up to a multiple of `block` or less.
        """
        n, alpha = self.n, self.alpha
        if self.radii:
            tested, held_back = split_alpha(alpha) if self.hold_back else (alpha, 0.0)
            # A radius that its test cannot show ends the votes at the first look: what is held back helps only if that
            # is the last one. While no vote has failed, the looks before n have spent almost nothing.
            alpha = held_back if self._bounds_at_the_only_look else spendable(tested, n)
        elif self.radius_loss is not None:
            # While no vote has failed, the number of first votes does not matter.
            n = min(n, second_stage_votes(1, 1, alpha=alpha, n_max=n, radius_loss=self.radius_loss) + block - 1)
        return largest_radius(n, noise, alpha, self.bound, self.slack)

    @property
    def _bounds_at_the_only_look(self) -> bool:
        """Whether n votes are one look on every device, after which the reserved bound may exceed all radii."""
        return self.hold_back and self.n <= min(LOOK.values())

    def unreachable(self, radius: float, noise: Noise) -> str | None:
        """A warning if the rule does not certify `radius`, with what to change, such as the least n that can; or None.

        Radius 0 asks for any certificate: with too few votes every image abstains. Votes end as soon as the largest of
        the radii is decided: beyond it there is chance, but no test.
        """
        if self.radii and radius > self.radii[-1] and not self._bounds_at_the_only_look:
            return f"votes end when radius {self.radii[-1]:g} is decided: to certify {radius:g}, add it to the radii"
        most = self.largest_radius(noise, max(NOISE_BLOCK.values()))
        if 0 < most >= radius:
            return None
        numbers = range(MOST_VOTES + 1)
        least = max(radius, sys.float_info.min)
        n = bisect_left(numbers, least, lo=self.n, key=lambda n: replace(self, n=n).largest_radius(noise))
        enough = f"n = {n:,} can" if n in numbers else f"no n up to {MOST_VOTES:,} can at sigma {noise.sigma:g}"
        if radius == 0:
            return f"n = {self.n:,} votes cannot certify any image at alpha {self.alpha:g}: all abstain; {enough}"
        return f"n = {self.n:,} votes cannot certify radius {radius:g} (at most {radius_text(most)}); {enough}"

    def _sequential(self, chosen: _Chosen) -> list[Certificate]:
        """Draw votes in looks; an image leaves when its tests are decided."""
        noise = chosen.counter.noise
        look = votes_per_look(chosen.counter, chosen.images.device, self.n)
        block = chosen.counter.block(chosen.images.device, look)
        test, held_back = self.grid(noise, look)
        runs = [test.start() for _ in chosen.classes]
        votes = np.zeros((len(runs), chosen.counter.num_classes), dtype=np.int64)
        active = list(range(len(runs)))
        used = 0
        for n in test.looks.tolist():
            votes[active] += chosen.votes(active, n - used, first_block=used // block)
            used = n
            active = [i for i in active if runs[i].update(int(votes[i, chosen.classes[i]]), n) == "continue"]
            if not active:
                break
        certificates = []
        for run, cls, counts in zip(runs, chosen.classes, votes.tolist(), strict=True):
            radius = noise.radius(min(1.0, combined_error_bound(run, held_back) + self.slack))
            certificates.append(certificate_from_bound(cls, radius, chosen.n0, counts[cls], sorted_votes(counts)))
        return certificates


def votes_per_look(counter: VoteCounter, device: torch.device, n: int) -> int:
    """Number of votes between two looks of at most n votes: whole noise blocks."""
    block = counter.block(device, n)
    return min(-(-LOOK.get(device.type, LOOK["cuda"]) // block) * block, n)


def _predicted_radius(q: float, n: int, alpha: float) -> float:
    """The radius, in units of sigma, from n votes of which the share q fails: Clopper-Pearson at a real count."""
    bound = float(special.betainccinv(n * q + 1, n * (1 - q), alpha))
    return max(0.0, -float(special.ndtri(bound)))


def second_stage_votes(
    first_count: int, first_n: int, *, alpha: float, n_max: int, radius_loss: float, minimum: int = SECOND_STAGE
) -> int:
    """Number of fresh votes that are predicted to lose at most `radius_loss` * sigma of radius against `n_max` votes.

    The prediction is for the largest p that the first stage leaves plausible, by Clopper-Pearson: the larger p, the
    more votes are needed. It is `minimum` (at most n_max) when even this p gives no radius, and close to n_max when no
    vote failed, because the radius of such an image grows with every vote. Only the cost depends on the prediction: the
    fresh votes are bounded at the full alpha, which holds for every n.
    """
    if not 0 <= first_count <= first_n or first_n < 1:
        raise ValueError(f"expected 0 <= count <= n and n >= 1, got count {first_count}, n {first_n}")
    if not 0 < alpha < 1 or n_max < 1 or minimum < 1 or radius_loss < 0:
        given = f"{alpha}, {n_max}, {minimum}, {radius_loss}"
        raise ValueError(f"expected 0 < alpha < 1, n_max, minimum >= 1, radius_loss >= 0, got {given}")
    failures = first_n - first_count
    q = float(special.betaincinv(failures, first_count + 1, OUTSIDE)) if failures else 0.0  # the least plausible error
    enough = _predicted_radius(q, n_max, alpha) - radius_loss
    least = min(minimum, n_max)
    return bisect_left(range(n_max), True, lo=least, key=lambda n: _predicted_radius(q, n, alpha) >= enough)
