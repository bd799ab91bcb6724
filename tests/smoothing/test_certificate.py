"""CERTIFY and PREDICT on given votes."""

import math
from fractions import Fraction
from typing import get_args

import pytest
import torch
from scipy import stats
from scipy.special import ndtri

from smoothcert import ABSTAIN, SmoothedClassifier
from smoothcert.noise import Gaussian
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.smoothing.certificate import (
    certificate_of_class,
    certified_radius,
    class_from_votes,
    fewest_deciding_votes,
)
from smoothcert.smoothing.certificate_batch import rounded_down
from smoothcert.training.choices import Bound


def test_certify_bounds_the_class_that_the_first_votes_chose() -> None:
    """The n0 votes choose and are not counted again; another class may lead among the fresh ones."""
    noise = Gaussian(0.5)
    certificate = certificate_of_class(0, [900, 100, 0], 100, noise, 0.001)
    assert (certificate.prediction, certificate.count, certificate.n, certificate.n0) == (0, 900, 1000, 100)
    p = 1 - error_upper_bound(900, 1000, 0.001)
    assert certificate.radius == pytest.approx(
        0.5 * torch.distributions.Normal(0, 1).icdf(torch.tensor(p)).item(), rel=1e-5
    )
    other = certificate_of_class(1, [900, 100, 0], 100, noise, 0.001)
    assert (other.prediction, other.radius, other.count) == (ABSTAIN, 0.0, 100)
    assert other.votes == ((0, 900), (1, 100))


def test_certify_abstains_up_to_one_half() -> None:
    n = 1000
    claimed = [
        count
        for count in range(n + 1)
        if certificate_of_class(0, [count, n - count], 1, Gaussian(1.0), 0.001).prediction == 0
    ]
    assert claimed[0] == next(k for k in range(n) if error_upper_bound(k, n, 0.001) < 0.5)
    assert claimed == list(range(claimed[0], n + 1))


@pytest.mark.parametrize("slack", [0.0, 0.01])
def test_radius_of_each_bound_has_the_slack(slack: float) -> None:
    """From scipy's quantiles: the slack is added to each error bound, for the runner-up, too."""

    def z(count: int, alpha: float) -> float:
        return -float(ndtri(stats.beta.isf(alpha, 1000 - count + 1, count) + slack))

    votes, noise = [50, 700, 250], Gaussian(0.5)
    one, two, coin, all_of_coin = (
        certificate_of_class(1, votes, 100, noise, 0.001, slack=slack, **options).radius  # type: ignore[arg-type]
        for options in (
            {},
            {"bound": "two-sided"},
            {"bound": "randomized", "coin": 1e-12},
            {"bound": "randomized", "coin": 1.0},
        )
    )
    assert one == pytest.approx(0.5 * z(700, 0.001), rel=1e-9)
    assert two == pytest.approx(0.25 * (z(700, 0.0009) + z(750, 0.0001)), rel=1e-9)
    assert coin == pytest.approx(0.5 * z(701, 0.001), rel=1e-6)  # one vote more
    assert all_of_coin == pytest.approx(one, rel=1e-9)


def test_every_bound_has_its_own_radius() -> None:
    coins = {"randomized": 0.5}
    radii = {
        bound: certified_radius(900, 60, 1000, Gaussian(0.5), 0.001, bound=bound, coin=coins.get(bound))
        for bound in get_args(Bound)
    }
    assert len({*radii.values()}) == len(radii), f"two bounds give the same radius: {radii}"
    for bound, coin in (("other", None), ("one-sided", 0.5), ("randomized", None)):
        with pytest.raises(ValueError, match=bound):
            certified_radius(900, 60, 1000, Gaussian(0.5), 0.001, bound=bound, coin=coin)


def test_two_sided_radius_when_all_votes_agree() -> None:
    """No other class has a vote: its bound is that of the class itself, which takes 0.9 alpha."""
    certificate = certificate_of_class(1, [0, 1000, 0], 100, Gaussian(0.5), 0.001, bound="two-sided")
    assert certificate.radius == pytest.approx(-0.5 * float(ndtri(1 - 0.0009 ** (1 / 1000))), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"bound": "two-sided"}, {"bound": "randomized", "coin": 0.5}])
def test_slack_on_a_hopeless_class_abstains(options: dict[str, object]) -> None:
    certificate = certificate_of_class(0, [0, 10], 1, Gaussian(0.5), 0.001, slack=0.1, **options)  # type: ignore[arg-type]
    assert certificate.abstained


def test_predict_compares_the_two_top_counts() -> None:
    assert class_from_votes([0, 30, 70], 0.001) == 2
    assert class_from_votes([5, 45, 50], 0.001) == ABSTAIN
    assert class_from_votes([50, 50, 0], 0.5) == ABSTAIN


def test_predict_answers_up_to_alpha_itself() -> None:
    """Nine of ten votes have the two-sided p-value 2 * 11 / 1024."""
    for alpha, answer in ((22 / 1024, 1), (21 / 1024, ABSTAIN)):
        assert class_from_votes([1, 9], alpha) == answer
    assert class_from_votes([5, 5], 1.0) == 0  # the first of equal classes


@pytest.mark.parametrize("alpha", [0.9, 0.5, 0.25, 0.1, 0.01, 0.001, 2**-20, 1e-9, 1e-300])
def test_fewest_votes_that_decide_a_class(alpha: float) -> None:
    """If all agree, n of them have the two-sided p-value 2 / 2^n, here as a fraction."""
    least = fewest_deciding_votes(alpha)
    assert Fraction(2, 2**least) <= Fraction(alpha) < Fraction(2, 2 ** (least - 1))
    assert class_from_votes([0, least], alpha) == 1
    assert class_from_votes([0, least - 1], alpha) == ABSTAIN


def test_radii_in_float32_are_rounded_down() -> None:
    radii = torch.cat([torch.zeros(1), torch.rand(100, generator=torch.Generator().manual_seed(0))]).double() / 3
    single = rounded_down(radii)
    assert single.dtype == torch.float32
    assert (single.double() <= radii).all()
    assert (single.nextafter(torch.tensor(math.inf)).double() > radii).all()


def test_printed_radii_are_rounded_down() -> None:
    """All of 1,000 votes prove 0.5 * Phi^-1(0.001^(1/1000)) = 1.23163 and not 1.232."""
    one_class = SmoothedClassifier(lambda x: torch.eye(2)[0].expand(len(x), 2), sigma=0.5)
    assert "class 0, radius 1.231, 1,000 of 1,000 votes" in repr(one_class.certify(torch.zeros(1, 3), n=1000))
