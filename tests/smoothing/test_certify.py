"""CERTIFY and PREDICT on given votes."""

import pytest
import torch

from smoothcert import ABSTAIN
from smoothcert.noise import Gaussian
from smoothcert.smoothing.bounds import lower_bound
from smoothcert.smoothing.certify import certificate_of_class, class_from_votes


def test_certify_bounds_the_class_that_the_first_votes_chose() -> None:
    """The n0 votes choose and are not counted again; another class may lead among the fresh ones."""
    noise = Gaussian(0.5)
    certificate = certificate_of_class(0, [900, 100, 0], 100, noise, 0.001)
    assert (certificate.predict, certificate.count, certificate.n, certificate.n0) == (0, 900, 1000, 100)
    p = lower_bound(900, 1000, 0.001)
    assert certificate.radius == pytest.approx(
        0.5 * torch.distributions.Normal(0, 1).icdf(torch.tensor(p)).item(), rel=1e-5
    )
    other = certificate_of_class(1, [900, 100, 0], 100, noise, 0.001)
    assert (other.predict, other.radius, other.count) == (ABSTAIN, 0.0, 100)
    assert other.votes == ((0, 900), (1, 100))


def test_certify_abstains_up_to_one_half() -> None:
    n = 1000
    claimed = [
        count
        for count in range(n + 1)
        if certificate_of_class(0, [count, n - count], 1, Gaussian(1.0), 0.001).predict == 0
    ]
    assert claimed[0] == next(k for k in range(n) if lower_bound(k, n, 0.001) > 0.5)
    assert claimed == list(range(claimed[0], n + 1))


def test_predict_compares_the_two_top_counts() -> None:
    assert class_from_votes([0, 30, 70], 0.001) == 2
    assert class_from_votes([5, 45, 50], 0.001) == ABSTAIN
    assert class_from_votes([50, 50, 0], 0.5) == ABSTAIN
