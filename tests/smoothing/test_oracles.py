"""Classifiers of known radius through the real sampling path: certificates are true and close to the known radius."""

from collections.abc import Callable

import pytest
import torch
from scipy import optimize, special, stats
from torch import Tensor

from smoothcert import SmoothedClassifier

SIGMA = 0.25


def two_logits(score: Tensor) -> Tensor:
    """Class 1 where score > 0."""
    return torch.stack([-score, score], dim=1)


def half_space(direction: Tensor, offset: float) -> Callable[[Tensor], Tensor]:
    return lambda images: two_logits(images.flatten(1) @ direction.flatten() - offset)


@pytest.mark.parametrize("distance", [0.1, 0.3, 0.6])
def test_half_space(distance: float) -> None:
    direction = torch.zeros(1, 3, 3)
    direction[0, 1] = 1 / 3**0.5
    image = torch.full((1, 1, 3, 3), 0.5)
    offset = float(image.flatten() @ direction.flatten()) - distance
    smoothed = SmoothedClassifier(half_space(direction, offset), sigma=SIGMA, num_classes=2)
    certificate = smoothed.certify(image, n=20_000, seed=1)[0]
    assert certificate.prediction == 1
    assert certificate.radius <= distance
    # p = Phi(distance / sigma); 20,000 votes bound it this closely except about once in a million.
    p = special.ndtr(distance / SIGMA)
    slack = 8 * (p * (1 - p) / 20_000) ** 0.5 / stats.norm.pdf(distance / SIGMA) * SIGMA
    assert certificate.radius > distance - slack
    assert certificate.count == pytest.approx(20_000 * p, abs=5 * (20_000 * p * (1 - p)) ** 0.5)


def test_constant_reaches_the_ceiling_of_n() -> None:
    smoothed = SmoothedClassifier(lambda x: two_logits(torch.ones(len(x))), sigma=SIGMA, num_classes=2)
    certificate = smoothed.certify(torch.zeros(1, 1, 2, 2), n=1000)[0]
    assert certificate.prediction == 1
    assert certificate.count == certificate.n == 1000
    assert certificate.radius == pytest.approx(2.463 * SIGMA, abs=1e-3 * SIGMA)
    assert smoothed.predict(torch.zeros(2, 1, 2, 2)).prediction.tolist() == [1, 1]


def test_fair_coin_is_hardly_ever_certified() -> None:
    """A pixel's noise decides, so p = 1/2 exactly: at most alpha of the certificates may claim anything."""
    alpha, images = 0.05, 200
    smoothed = SmoothedClassifier(lambda x: two_logits(x[:, 0, 0, 0] - 0.5), sigma=SIGMA, num_classes=2)
    batch = torch.full((images, 1, 1, 1), 0.5)
    claimed = int((~smoothed.certify(batch, n=200, alpha=alpha, seed=2, indices=range(images)).abstained).sum())
    assert stats.binomtest(claimed, images, alpha, alternative="greater").pvalue > 1e-4
    # The rule is nearly exact: it must claim at times, else the test could not fail.
    assert claimed > 2
    predicted = int((~smoothed.predict(batch, n=200, alpha=alpha, seed=3, indices=range(images)).abstained).sum())
    assert stats.binomtest(predicted, images, alpha, alternative="greater").pvalue > 1e-4


@pytest.mark.parametrize("distance", [0.0, 0.2])
def test_ball(distance: float) -> None:
    """Class 1 inside a ball of radius 1 around a centre: the votes follow a non-central chi-square."""
    dimension, radius = 12, 1.0
    centre = torch.full((3, 2, 2), 0.5)
    image = centre.clone()
    image[0, 0, 0] += distance
    smoothed = SmoothedClassifier(
        lambda x: two_logits(radius - (x - centre).flatten(1).norm(dim=1)), sigma=SIGMA, num_classes=2
    )

    def inside(shift: float) -> float:
        law = stats.ncx2(dimension, (shift / SIGMA) ** 2) if shift else stats.chi2(dimension)
        return float(law.cdf((radius / SIGMA) ** 2))

    certificate = smoothed.certify(image[None], n=20_000, seed=4)[0]
    p = inside(distance)
    assert certificate.prediction == 1
    assert certificate.count == pytest.approx(20_000 * p, abs=5 * (20_000 * p * (1 - p)) ** 0.5)
    # The true radius is where moving further out makes the inside as likely as the outside.
    truth = optimize.brentq(lambda shift: inside(shift) - 0.5, distance, 3.0) - distance
    assert 0 < certificate.radius <= truth


def test_radius_scales_with_sigma() -> None:
    """R(sigma, x) = sigma R(1, x / sigma): here with thresholds scaled along, the same noise gives the same votes."""
    image = torch.full((1, 1, 1, 1), 0.5)
    radii = [
        SmoothedClassifier(half_space(torch.ones(1, 1, 1), 0.5 - s), sigma=s, num_classes=2)
        .certify(image, n=4000, seed=9)[0]
        .radius
        / s
        for s in (0.25, 0.5)
    ]
    assert radii[0] == pytest.approx(radii[1], rel=1e-6)


def test_permuting_classes_permutes_votes() -> None:
    def three(images: Tensor) -> Tensor:
        v = images[:, 0, 0, 0]
        return torch.stack([v, 1 - v, torch.full_like(v, 0.6)], dim=1)

    image = torch.full((1, 1, 1, 1), 0.55)
    permutation = [2, 0, 1]
    plain = SmoothedClassifier(three, sigma=SIGMA, num_classes=3).certify(image, n=1000, seed=5)[0]
    moved = SmoothedClassifier(lambda x: three(x)[:, permutation], sigma=SIGMA, num_classes=3)
    votes = dict(moved.certify(image, n=1000, seed=5)[0].votes)
    assert {permutation[c]: k for c, k in votes.items()} == dict(plain.votes)
