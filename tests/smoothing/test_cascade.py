"""The cascade's error probability by enumeration of all votes, and its radius on classifiers with a known one."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtri
from torch import Tensor

from smoothcert import ABSTAIN, Cascade, RequestError, SmoothedClassifier
from smoothcert.noise import Gaussian
from smoothcert.smoothing import cascade
from smoothcert.smoothing.cascade import certify_cascade, last_alpha, stage_alphas, stage_seed
from smoothcert.smoothing.votes import VoteCounter

N, ALPHA, SIGMAS = 10, 0.2, (1.0, 0.5)
OUTCOMES = np.array([(a, b, N - a - b) for a in range(N + 1) for b in range(N + 1 - a)])
"""All votes of a stage with three classes."""


class Outcomes:
    """Stands for a VoteCounter: image (class, outcome) of this stage has these votes, so a batch enumerates them."""

    def __init__(self, stage: int, sigma: float) -> None:
        self.stage, self.noise = stage, Gaussian(sigma)

    def count(self, images: Tensor, seeds: Sequence[tuple[int, int]], kind: str, n: int) -> np.ndarray:
        chosen, outcome = images[:, self.stage, 0].numpy(), images[:, self.stage, 1].numpy()
        return np.eye(3, dtype=np.int64)[chosen] if kind == "select" else OUTCOMES[outcome]


def enumerated(chosen: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Class and radius, [outcomes, outcomes], of both stages' outcomes, if these classes were chosen."""
    pairs = list(product(range(len(OUTCOMES)), repeat=2))
    images = torch.tensor([[[chosen[0], first], [chosen[1], second]] for first, second in pairs])
    counters = [Outcomes(stage, sigma) for stage, sigma in enumerate(SIGMAS)]
    found = certify_cascade(counters, images, [(0, 0)] * len(pairs), n0=1, n=N, alpha=ALPHA)  # type: ignore[arg-type]
    shape = (len(OUTCOMES), len(OUTCOMES))
    return np.reshape([c.prediction for c in found], shape), np.reshape([c.radius for c in found], shape)


@lru_cache
def probabilities(p: tuple[float, float, float]) -> np.ndarray:
    """The multinomial probability of each outcome."""
    coefficients = [math.factorial(N) / math.prod(math.factorial(int(k)) for k in votes) for votes in OUTCOMES]
    return np.array(coefficients) * np.prod(np.array(p) ** OUTCOMES, axis=1)


def true_radius(cls: int, p: Sequence[tuple[float, float, float]]) -> float:
    """The largest radius that holds for every pair of base classifiers with these probabilities at the image."""
    radii, earlier = [0.0], math.inf
    for sigma, stage in zip(SIGMAS, p, strict=True):
        radii.append(min(earlier, sigma * float(ndtri(stage[cls]))))
        earlier = min(earlier, -sigma * float(ndtri(max(stage[:cls] + stage[cls + 1 :]))))
    return max(radii)


P = ((1 / 3, 1 / 3, 1 / 3), (0.5, 0.5, 0.0), (0.45, 0.35, 0.2), (0.2, 0.7, 0.1), (0.9, 0.05, 0.05), (0.02, 0.02, 0.96))


def largest_error(*choices: tuple[int, int]) -> float:
    """The largest probability of a wrong certificate over probabilities of the stages and chosen classes."""
    worst = 0.0
    for chosen in choices:
        classes, radii = enumerated(chosen)
        for p in product(P, repeat=2):
            weights = np.outer(probabilities(p[0]), probabilities(p[1]))
            wrong = [(classes == c) & (radii > true_radius(c, p)) for c in range(3)]
            worst = max(worst, float(weights[np.any(wrong, axis=0)].sum()))
    return worst


def test_wrong_certificates_have_probability_at_most_alpha() -> None:
    worst = largest_error((0, 0), (0, 1), (0, 2), (1, 0), (2, 2))
    assert 0.02 < worst <= ALPHA


def test_parts_of_alpha_add_up_to_at_most_alpha() -> None:
    """In rational arithmetic, for many values: rounding must not add anything either."""
    for alpha, stages in product((0.001, 0.01, 0.05, 0.2, 0.37), range(2, 12)):
        lower, upper = map(Fraction, stage_alphas(alpha, stages))
        assert lower == pytest.approx(9 * upper)
        total = (stages - 1) * (lower + upper) + Fraction(last_alpha(alpha, stages))
        assert alpha * (1 - 1e-12) < total <= Fraction(alpha)


@lru_cache
def error_at(count: int, alpha: float) -> float:
    """Clopper-Pearson upper bound on the error of a class with `count` of N votes."""
    return float(stats.beta.isf(alpha, N - count + 1, count)) if count else 1.0


def test_radius_is_that_of_the_rule() -> None:
    """A transcription of the rule with scipy's quantiles, for all votes of both stages."""
    for chosen in ((0, 0), (0, 1)):
        expected = [rule(first, second, chosen) for first, second in product(OUTCOMES.tolist(), repeat=2)]
        classes, radii = enumerated(chosen)
        assert classes.ravel().tolist() == [cls for cls, _ in expected]
        assert radii.ravel() == pytest.approx([radius for _, radius in expected], abs=1e-9)


def rule(first: list[int], second: list[int], chosen: tuple[int, int]) -> tuple[int, float]:
    """The class and the radius from the votes of two stages."""
    share = ALPHA / 2
    error = error_at(first[chosen[0]], 0.9 * share)
    if error < 0.5:
        return chosen[0], -SIGMAS[0] * float(ndtri(error))
    other = max(votes for c, votes in enumerate(first) if c != chosen[1])
    limit = -SIGMAS[0] * float(ndtri(error_at(N - other, 0.1 * share)))
    radius = min(limit, -SIGMAS[1] * float(ndtri(error_at(second[chosen[1]], share))))
    return (chosen[1], radius) if radius > 0 else (ABSTAIN, 0.0)


def test_enumeration_finds_a_cascade_that_ignores_earlier_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: without the upper bounds, a later stage certifies what an earlier one can answer otherwise."""
    monkeypatch.setattr(cascade, "runner_up_upper_bound", lambda *_: 1e-9)
    assert largest_error((0, 1)) > ALPHA


def half_space(images: Tensor) -> Tensor:
    """Class 1 where the pixel is above 0."""
    score = images.flatten(1)[:, 0]
    return torch.stack([-score, score, torch.full_like(score, -9.0)], dim=1)


def undecided(images: Tensor) -> Tensor:
    """Classes in stripes that are narrow for the noise, each with probability about 1/3."""
    stripe = (images.flatten(1)[:, 0] * 40).floor().long() % 3
    return torch.nn.functional.one_hot(stripe, 3).float()


def counters(*stages: tuple[object, float]) -> list[VoteCounter]:
    return [VoteCounter(f, Gaussian(sigma), 3, 500) for f, sigma in stages]  # type: ignore[arg-type]


def test_later_stage_answers_and_earlier_stage_limits_the_radius() -> None:
    image = torch.full((1, 1, 1, 1), 1.0)
    options = {"n0": 50, "n": 5000, "alpha": 0.001}
    (certificate,) = certify_cascade(counters((undecided, 1.0), (half_space, 0.5)), image, [(3, 0)], **options)
    assert certificate.prediction == 1
    assert 0.3 < certificate.radius < -float(ndtri(1 / 3))  # beyond 0.431, stage 1 may give another answer
    assert len(certificate.earlier) == 1
    assert sum(k for _, k in certificate.earlier[0]) == 5000
    assert certificate.spent == 2 * (50 + 5000)
    (first,) = certify_cascade(counters((half_space, 0.5), (undecided, 0.25)), image, [(3, 0)], **options)
    assert first.earlier == ()
    assert 0.9 < first.radius < 1.0
    (none,) = certify_cascade(counters((undecided, 1.0), (undecided, 0.5)), image, [(3, 0)], **options)
    assert (none.prediction, none.radius, len(none.earlier)) == (ABSTAIN, 0.0, 1)


def test_stage_with_a_bound_just_below_one_half_is_passed() -> None:
    """Half of the votes are for class 0, a quarter for each other class; the next stage is sure of class 0."""

    def half(images: Tensor) -> Tensor:
        z = images.flatten(1)[:, 0]
        return torch.nn.functional.one_hot((z > 0.6745).long() + 2 * (z < -0.6745).long(), 3).float()

    stages = counters((half, 1.0), (lambda images: torch.tensor([[1.0, 0.0, 0.0]]).expand(len(images), 3), 0.5))
    (certificate,) = certify_cascade(stages, torch.zeros(1, 1, 1, 1), [(3, 0)], n0=50, n=2000, alpha=0.01)
    assert (certificate.prediction, len(certificate.earlier)) == (0, 1)
    assert 0.5 < certificate.radius < -float(ndtri(0.25))


def test_stages_draw_independent_noise_and_images_are_independent() -> None:
    assert len({stage_seed(seed, stage) for seed in (0, 1, 2**62) for stage in range(5)}) == 15
    stages, options = counters((undecided, 1.0), (half_space, 0.5)), {"n0": 50, "n": 300, "alpha": 0.01}
    images = torch.tensor([0.2, 1.0, -0.7]).view(3, 1, 1, 1)
    together = certify_cascade(stages, images, [(3, i) for i in range(3)], **options)
    alone = [certify_cascade(stages, images[i : i + 1], [(3, i)], **options)[0] for i in range(3)]
    assert together == alone


def test_no_stage_or_image_repeats_the_votes_of_another() -> None:
    """The same classifier, noise level and image twice: only the seeds differ."""
    stages, image = counters((undecided, 0.5), (undecided, 0.5)), torch.zeros(2, 1, 1, 1)
    both = certify_cascade(stages, image, [(3, 0), (3, 1)], n0=50, n=2000, alpha=0.01)
    assert len({votes for certificate in both for votes in (certificate.votes, *certificate.earlier)}) == 4


def test_class_gives_the_certificates_of_the_rule() -> None:
    images = torch.tensor([0.2, 0.9]).view(2, 1, 1, 1)
    stages = [SmoothedClassifier(f, sigma=sigma, batch_size=500) for f, sigma in ((undecided, 1.0), (half_space, 0.5))]
    assert repr(Cascade(stages)) == "Cascade(2 stages: sigma 1, 0.5)"
    result = Cascade(stages).certify(images, n=300, n0=50, alpha=0.01, seed=3, indices=range(2))
    options = {"n0": 50, "n": 300, "alpha": 0.01}
    expected = certify_cascade(counters((undecided, 1.0), (half_space, 0.5)), images, [(3, 0), (3, 1)], **options)
    assert list(result) == expected
    assert result.prediction.tolist()[1] == 1


def test_stages_that_do_not_fit_are_refused() -> None:
    wide, narrow = (SmoothedClassifier(half_space, sigma=sigma) for sigma in (1.0, 0.5))
    laplace = SmoothedClassifier(half_space, sigma=0.25, noise="laplace")
    two = SmoothedClassifier(lambda x: half_space(x)[:, :2], sigma=0.25)
    for stages, message in (
        ([wide], "at least 2 smoothed classifiers, got 1"),
        ([wide, half_space], r"or runs, got function; use SmoothedClassifier\(model, sigma=S\)"),
        ([narrow, wide], "expected decreasing sigmas, got 0.5, 1;"),
        ([wide, laplace], "expected gaussian noise, got laplace"),
    ):
        with pytest.raises(RequestError, match=message):
            Cascade(stages)
    with pytest.raises(RequestError, match="one number of classes, got 3, 2"):
        Cascade([wide, two]).certify(torch.zeros(1, 1, 1, 1), n=20)
