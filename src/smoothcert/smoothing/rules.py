"""How many votes an image gets, and what they show.

Fixed: CERTIFY with n votes. Two-stage: a first look chooses n, then n fresh votes. Sequential: votes come until
the question "is the radius at least r?" is answered. Every rule's certificates fail with probability at most alpha.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from smoothcert.errors import RequestError
from smoothcert.noise import Noise
from smoothcert.smoothing.certificate import ABSTAIN, Certificate
from smoothcert.smoothing.certify import certificate_from_bound, certificate_of_class, sorted_votes
from smoothcert.smoothing.sequential import GridRun, GridTest, combined_error_bound, split_alpha
from smoothcert.smoothing.two_stage import second_stage_votes
from smoothcert.smoothing.votes import VoteCounter, noise_block

FIRST_STAGE = 500
"""Votes of the first stage of the two-stage rule, at least."""
LOOK = {"cpu": 500, "cuda": 2000}
"""Votes between two looks of a sequential test."""
BEYOND = 1e-9
"""A radius that was asked for is tested a little beyond itself: certified accuracy counts radii greater than it."""


@dataclass(frozen=True)
class Rule:
    """`radii` makes it sequential, `radius_loss` (in sigmas) two-stage; without them it is CERTIFY with n votes.

    `label_aware` (benchmarks only): an image whose first votes do not choose its label gets no further votes, since it
    cannot count towards certified accuracy. `slack` is added to every error bound (see `integer_noise`).
    """

    n0: int
    n: int
    alpha: float
    two_sided: bool = False
    radii: tuple[float, ...] = ()
    hold_back: bool = False
    radius_loss: float | None = None
    label_aware: bool = False
    slack: float = 0.0

    def certify(
        self, counter: VoteCounter, images: Tensor, seeds: Sequence[tuple[int, int]], labels: Sequence[int]
    ) -> list[Certificate]:
        """A certificate for each of `images` (float32 [k, c, h, w] on the device)."""
        n0 = self.n0 if self.radius_loss is None else max(self.n0, FIRST_STAGE)
        selection = counter.count(images, seeds, "select", n0)
        chosen = selection.argmax(axis=1)
        going = [i for i in range(len(images)) if not self.label_aware or chosen[i] == labels[i]]
        found = [Certificate(ABSTAIN, 0.0, n0, 0, 0, ()) for _ in images]
        if not going:
            return found
        part = images[torch.tensor(going, device=images.device)]
        part_seeds = [seeds[i] for i in going]
        classes = [int(chosen[i]) for i in going]
        if self.radii:
            certificates = self._sequential(counter, part, part_seeds, classes, n0)
        elif self.radius_loss is not None:
            first = [int(selection[i, chosen[i]]) for i in going]
            certificates = self._two_stage(counter, part, part_seeds, classes, first, n0)
        else:
            votes = counter.count(part, part_seeds, "estimate", self.n)
            certificates = [self._bounded(c, v, n0, counter.noise) for c, v in zip(classes, votes, strict=True)]
        for i, certificate in zip(going, certificates, strict=True):
            found[i] = certificate
        return found

    def _bounded(self, cls: int, votes: np.ndarray, n0: int, noise: Noise) -> Certificate:
        return certificate_of_class(
            cls, votes.tolist(), n0, noise, self.alpha, two_sided=self.two_sided, slack=self.slack
        )

    def _two_stage(
        self,
        counter: VoteCounter,
        images: Tensor,
        seeds: Sequence[tuple[int, int]],
        classes: Sequence[int],
        first: Sequence[int],
        n0: int,
    ) -> list[Certificate]:
        """Plain CERTIFY on fresh votes, as many as the first stage found worthwhile: sound given the first stage."""
        block = min(noise_block(images.device), counter.batch_size)
        certificates = []
        for i, cls in enumerate(classes):
            wanted = second_stage_votes(
                first[i], n0, alpha=self.alpha, n_max=self.n, radius_loss=self.radius_loss or 0.0
            )
            n = min(self.n, -(-wanted // block) * block)
            votes = counter.count(images[i : i + 1], [seeds[i]], "estimate", n)[0]
            certificates.append(self._bounded(cls, votes, n0, counter.noise))
        return certificates

    def errors_at_radii(self, noise: Noise) -> list[float]:
        """The error probability that each of the radii stands for, falling; radii that cannot be tested are refused."""
        qs = [noise.error_at(radius * (1 + BEYOND)) - self.slack for radius in self.radii]
        if qs and min(qs) <= 0:
            raise RequestError(
                f"radii: {max(self.radii):g} can never be certified at sigma {noise.sigma:g}; ask for less"
            )
        for (below, q), (above, smaller) in pairwise(zip(self.radii, qs, strict=True)):
            if smaller >= q:
                raise RequestError(
                    f"radii: {below!r} and {above!r} cannot be told apart at sigma {noise.sigma:g}; ask for one of them"
                )
        return qs

    def grid(self, noise: Noise, look: int) -> tuple[GridTest, float]:
        """The tests of the radii, and the alpha held back for Clopper-Pearson at n (0 if none is)."""
        qs = self.errors_at_radii(noise)
        alpha, held_back = split_alpha(self.alpha) if self.hold_back else (self.alpha, 0.0)
        return GridTest(qs, alpha, look, self.n), held_back

    def _sequential(
        self,
        counter: VoteCounter,
        images: Tensor,
        seeds: Sequence[tuple[int, int]],
        classes: Sequence[int],
        n0: int,
    ) -> list[Certificate]:
        """Votes in looks; each image leaves when its tests are decided."""
        block = min(noise_block(images.device), counter.batch_size)
        look = min(-(-LOOK.get(images.device.type, LOOK["cuda"]) // block) * block, self.n)
        test, held_back = self.grid(counter.noise, look)
        runs = [test.start() for _ in classes]
        votes = np.zeros((len(classes), counter.num_classes), dtype=np.int64)
        going, used = list(range(len(classes))), 0
        for n in test.looks.tolist():
            part = images[torch.tensor(going, device=images.device)]
            first_block = used // min(block, look)
            fresh = counter.count(part, [seeds[i] for i in going], "estimate", n - used, first_block=first_block)
            votes[going] += fresh
            used = n
            going = [i for i in going if runs[i].update(int(votes[i, classes[i]]), n) == "continue"]
            if not going:
                break
        return [self._claimed(runs[i], classes[i], votes[i], n0, held_back, counter.noise) for i in range(len(classes))]

    def _claimed(
        self, run: GridRun, cls: int, votes: np.ndarray, n0: int, held_back: float, noise: Noise
    ) -> Certificate:
        q = combined_error_bound(run, held_back) if held_back else run.error_bound
        radius = noise.radius(min(1.0, q + self.slack))
        return certificate_from_bound(cls, radius, n0, int(votes[cls]), sorted_votes(votes.tolist()))
