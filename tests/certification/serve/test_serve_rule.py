"""The rule of the service: its guarantee by enumeration of all votes, with every way to end a request."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from smoothcert import RequestError
from smoothcert.certification.serve.rule import Plan, Question, RuleName, make_plan
from smoothcert.noise import Gaussian, Laplace, Uniform
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.smoothing.certificate import ABSTAIN

NOISE, LOOK, LOOKS = Gaussian(0.5), 12, 3
ALPHA = 0.4


def claims(plan: Plan, path: tuple[int, ...], *, peeking: bool = False) -> list[float]:
    """The radius that a request claims if it ends before the first look, after the first, ...; `path` are successes."""
    progress = plan.start(1, 2)
    radii = [plan.nothing().radius]
    for successes, n in zip(path, np.diff(plan.looks, prepend=0).tolist(), strict=True):
        progress.update(np.array([n - successes, successes]))
        certificate = progress.certificate()
        assert (certificate.prediction == ABSTAIN) == (certificate.radius == 0)
        peek = NOISE.radius(error_upper_bound(certificate.count, certificate.n, ALPHA)) if peeking else 0.0
        radii.append(max(certificate.radius, peek))
    return radii


def false_claims(plan: Plan, truths: list[float], *, peeking: bool = False) -> list[float]:
    """For each p, the exact probability that some look claims more than the truth: the most that any end can reach.

    All paths of successes are enumerated. A deadline, a client who watches, or an adversary who controls the load
    chooses one of the looks by any means.
    """
    sizes = np.diff(plan.looks, prepend=0).tolist()
    paths = list(product(*(range(n + 1) for n in sizes)))
    most = np.array([max(claims(plan, path, peeking=peeking)) for path in paths])
    found = []
    for p in truths:
        weights = [
            stats.binom.pmf(np.arange(n + 1), n, p)[list(ks)]
            for n, ks in zip(sizes, zip(*paths, strict=True), strict=True)
        ]
        found.append(float(np.prod(weights, axis=0)[most > NOISE.radius(1 - p) * (1 + 1e-9)].sum()))
    return found


def truths(radius: float | None) -> list[float]:
    """Probabilities at which errors are most likely: just where a radius is not yet true."""
    sigmas = (0.02, 0.25, 0.5, 1.0) if radius is None else (radius / NOISE.sigma,)
    return [0.5, *(float(stats.norm.cdf(k)) for k in sigmas)]


@pytest.mark.parametrize(
    ("rule", "radius"), [("sequential", None), ("sequential", 0.2), ("fixed", None)], ids=["grid", "radius", "fixed"]
)
def test_no_way_to_end_a_request_raises_its_error_above_alpha(rule: RuleName, radius: float | None) -> None:
    plan = make_plan(Question(LOOK * LOOKS, ALPHA, radius, rule), NOISE, 10, LOOK)
    assert len(plan.looks) == LOOKS
    assert 0 < max(false_claims(plan, truths(radius))) <= ALPHA


def test_enumeration_finds_that_peeking_is_wrong() -> None:
    """A deadline that computed a fresh bound from the votes at hand, each time at the full alpha, would be refuted."""
    plan = make_plan(Question(LOOK * LOOKS, ALPHA), NOISE, 10, LOOK)
    assert max(false_claims(plan, truths(None), peeking=True)) > ALPHA * 1.1


def test_bound_that_is_reserved_for_the_last_look_is_used_there_only() -> None:
    plan = make_plan(Question(3000, 0.001), NOISE, 100, 500)
    progress = plan.start(0, 2)
    for _ in plan.looks[:-1]:
        progress.update(np.array([480, 20]))
        assert plan.test is not None
        assert progress.error_bound in (1.0, *plan.test.qs)
    progress.update(np.array([480, 20]))
    assert progress.error_bound == pytest.approx(stats.beta.isf(0.0007, 121, 2880), rel=1e-9)


@pytest.mark.parametrize("noise", [Gaussian(0.25), Laplace(0.5), Uniform(1.0)], ids=lambda noise: noise.name)
def test_open_question_tests_rising_radii_of_each_noise(noise: Gaussian | Laplace | Uniform) -> None:
    plan = make_plan(Question(20_000, 0.001), noise, 100, 500)
    assert plan.test is not None
    assert len(plan.test.qs) > 10


def test_votes_between_looks_are_refused() -> None:
    progress = make_plan(Question(1000, 0.001), NOISE, 100, 500).start(0, 2)
    with pytest.raises(ValueError, match="expected 500 votes up to the next look, got 499"):
        progress.update(np.array([499, 0]))


def test_a_radius_that_only_a_fixed_number_of_votes_can_show_is_refused() -> None:
    """1,000 agreeing votes show 2.46 sigma at alpha, and 2.39 sigma at the quarter of it that the test may spend."""
    with pytest.raises(RequestError, match=r"^radius: n = 1,000 votes cannot certify radius .*; n = 1,\d+ can$"):
        make_plan(Question(1000, 0.001, 2.43 * NOISE.sigma), NOISE, 100, 500)
    make_plan(Question(1000, 0.001, 2.38 * NOISE.sigma), NOISE, 100, 500)
