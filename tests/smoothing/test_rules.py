"""The rules through the real sampling path, on half-spaces whose radius is known."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtr, ndtri
from torch import Tensor

from smoothcert import ABSTAIN, RequestError
from smoothcert.certification.settings import CertifyRecipe, make_rule
from smoothcert.noise import Gaussian, Laplace, Noise, Uniform
from smoothcert.smoothing.certificate import Certificate
from smoothcert.smoothing.integer_noise import IntegerGaussian
from smoothcert.smoothing.rules import Rule, second_stage_votes
from smoothcert.smoothing.sequential import boundaries
from smoothcert.smoothing.votes import VoteCounter, block_keys

SIGMA = 0.5


def half_space(images: Tensor) -> Tensor:
    """Class 1 where the first pixel is above 0.2."""
    score = images[:, 0, 0, 0] - 0.2
    return torch.stack([-score, score], dim=1)


def counter(noise: Noise | None = None, sound: bool = False) -> VoteCounter:
    integer = IntegerGaussian(SIGMA) if sound else None
    return VoteCounter(half_space, noise or Gaussian(SIGMA), 2, 500, sound=integer)


def at_distances(*distances: float) -> Tensor:
    images = torch.zeros(len(distances), 1, 2, 2)
    images[:, 0, 0, 0] = torch.tensor([0.2 + d for d in distances])
    return images


def certify(rule: Rule, images: Tensor, labels: list[int] | None = None, **options: object) -> list[Certificate]:
    seeds = [(11, i) for i in range(len(images))]
    return rule.certify(counter(**options), images, seeds, labels or [1] * len(images))


def test_one_radius_is_decided_with_few_votes() -> None:
    """Far inside, far outside, on the wrong side; images of a group do not affect each other."""
    rule = Rule(n0=100, n=20_000, alpha=0.001, radii=(0.25,))
    images = at_distances(0.6, 0.1, 0.35, -0.15)
    found = certify(rule, images)
    assert [c.prediction for c in found] == [1, ABSTAIN, 1, ABSTAIN]
    assert found[0].radius == pytest.approx(0.25, rel=1e-6)
    assert found[0].radius > 0.25  # counts for certified accuracy at 0.25
    assert found[0].n < 2000
    assert found[1].n < 20_000
    assert all(c.n == sum(k for _, k in c.votes) for c in found)
    alone = [rule.certify(counter(), images[i : i + 1], [(11, i)], [1])[0] for i in range(4)]
    assert alone == found


@pytest.mark.parametrize("batch_size", [500, 60])
def test_the_votes_of_a_sequential_run_are_those_of_a_fixed_one(batch_size: int) -> None:
    """A look continues where the last one ended: no noise is drawn twice, none is left out. A look is whole blocks,
    also if the batch size limits these: 540 votes for blocks of 60."""
    image = at_distances(0.3)
    voting = replace(counter(), batch_size=batch_size)
    sequential = Rule(n0=100, n=5_000, alpha=0.001, radii=(0.29,)).certify(voting, image, [(11, 0)])[0]
    fixed = voting.count(image, [(11, 0)], "estimate", sequential.n)[0]
    assert sequential.n > 500
    assert dict(sequential.votes) == {c: int(k) for c, k in enumerate(fixed) if k}
    assert len(set(block_keys((11, 0), "estimate", 400))) == 400


def test_a_grid_claims_the_largest_radius_it_can_and_holds_back_for_the_end() -> None:
    radii = (0.1, 0.2, 0.3, 0.4)
    rule = Rule(n0=100, n=10_000, alpha=0.001, radii=radii, hold_back=True)
    near, far, saturated = certify(rule, at_distances(0.25, 0.7, 0.8))
    assert 0.2 < near.radius < 0.25
    assert far.radius == pytest.approx(0.4, rel=1e-6)
    assert far.n < 10_000
    assert saturated.radius == pytest.approx(0.4, rel=1e-6)


def test_two_stages_spend_less_where_less_is_to_gain() -> None:
    full = certify(Rule(n0=100, n=20_000, alpha=0.001), at_distances(0.3, 1.2, -0.1))
    two = certify(Rule(n0=100, n=20_000, alpha=0.001, radius_loss=0.1), at_distances(0.3, 1.2, -0.1))
    assert two[0].n < 20_000 / 3
    assert two[0].n0 == 500
    for less, more in zip(two, full, strict=True):
        assert less.prediction == more.prediction
        assert less.radius > more.radius - 0.2 * SIGMA
    assert two[0].radius <= 0.3


@pytest.mark.parametrize(("n", "loss", "limited"), [(20_000, 0.02, False), (3100, 0.0001, True)])
def test_two_stages_ask_the_first_votes_and_round_up_to_blocks(n: int, loss: float, limited: bool) -> None:
    images, seeds = at_distances(0.3, 0.6, 1.5, -0.1), [(11, i) for i in range(4)]
    found = certify(Rule(n0=100, n=n, alpha=0.001, radius_loss=loss), images)
    first = counter().count(images, seeds, "select", 500).max(axis=1).tolist()
    wanted = [second_stage_votes(count, 500, alpha=0.001, n_max=n, radius_loss=loss) for count in first]
    assert [c.n for c in found] == [min(n, 250 * math.ceil(votes / 250)) for votes in wanted]
    assert (max(c.n for c in found) == n) == limited
    for i, c in enumerate(found):
        fresh = counter().count(images[i : i + 1], seeds[i : i + 1], "estimate", c.n)[0]
        assert dict(c.votes) == {cls: int(k) for cls, k in enumerate(fresh) if k}


RULES = {
    "one-sided": Rule(n0=20, n=1, alpha=0.1),
    "two-sided": Rule(n0=20, n=1, alpha=0.1, bound="two-sided"),
    "randomized": Rule(n0=20, n=1, alpha=0.1, bound="randomized"),
    "sound": Rule(n0=20, n=1, alpha=0.1, slack=0.02),
    "one radius": Rule(n0=20, n=1, alpha=0.1, radii=(0.45,)),
    "radii": Rule(n0=20, n=1, alpha=0.1, radii=(0.2, 0.45), hold_back=True),
}


@pytest.mark.parametrize("name", RULES)
def test_the_votes_that_a_radius_needs_are_found_by_trying_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoothcert.smoothing.rules.coin_of", lambda seed: 2.0**-53)
    rule, radius, image = RULES[name], 0.45, at_distances(50.0)  # so far that all votes agree
    n = next(n for n in range(1, 100) if certify(replace(rule, n=n), image)[0].radius >= radius)
    assert replace(rule, n=n).unreachable(radius, Gaussian(SIGMA)) is None
    assert str(replace(rule, n=n - 1).unreachable(radius, Gaussian(SIGMA))).endswith(f"; n = {n:,} can")
    assert str(rule.unreachable(radius, Gaussian(SIGMA))).endswith(f"; n = {n:,} can")
    far = replace(rule, radii=rule.radii and (0.2, 20.0))
    assert "at most" in str(far.unreachable(20.0, Gaussian(SIGMA)))
    assert str(far.unreachable(20.0, Gaussian(SIGMA))).endswith("; no n up to 1,000,000,000 can at sigma 0.5")


@pytest.mark.parametrize(("hold_back", "n", "reached"), [(False, 500, False), (True, 2000, False), (True, 500, True)])
def test_a_radius_beyond_the_tested_ones_is_out_of_reach_unless_one_look_takes_all_votes(
    hold_back: bool, n: int, reached: bool
) -> None:
    """All votes agree, but they end when the largest of the radii is decided."""
    rule = Rule(n0=20, n=n, alpha=0.001, radii=(0.2, 0.45), hold_back=hold_back)
    (certificate,) = certify(rule, at_distances(50.0))
    assert (certificate.radius > 0.5) == reached
    warning = "votes end when radius 0.45 is decided: to certify 0.5, add it to the radii"
    assert rule.unreachable(0.5, Gaussian(SIGMA)) == (None if reached else warning)


@pytest.mark.parametrize("share", [0.999, 1.001])
def test_a_radius_that_only_the_reserved_alpha_could_show_is_out_of_reach_after_several_looks(share: float) -> None:
    """Its test is futile at the first look, where the votes end."""
    q = 1 - (0.3 * 0.1 * 6000 / 9000) ** (1 / 6000)  # of 6,000 agreeing votes, at the alpha of the test
    rule = Rule(n0=20, n=6000, alpha=0.1, radii=(0.2, share * Gaussian(SIGMA).radius(q)), hold_back=True)
    (certificate,) = certify(rule, at_distances(50.0))
    assert (rule.unreachable(rule.radii[1], Gaussian(SIGMA)) is None) == (certificate.radius >= rule.radii[1])
    assert (certificate.radius >= rule.radii[1]) == (share < 1)


def test_the_votes_that_a_radius_needs_allow_for_what_two_stages_give_up() -> None:
    class Agreeing(VoteCounter):
        """All votes are for class 1, and none are rounded up to blocks."""

        def block(self, device: torch.device, n: int) -> int:
            return 1

        def count(self, images: Tensor, seeds: object, stage: object, n: int, **options: object) -> np.ndarray:
            return np.array([[0, n]] * len(images))

    def largest(n: int) -> float:
        agreeing = Agreeing(half_space, Gaussian(SIGMA), 2)
        return replace(rule, n=n).certify(agreeing, at_distances(50.0), [(11, 0)])[0].radius

    rule, radius = Rule(n0=20, n=100, alpha=0.1, radius_loss=0.05), 1.45
    n = next(n for n in range(1200, 2000) if largest(n) >= radius)
    assert str(rule.unreachable(radius, Gaussian(SIGMA))).endswith(f"; n = {n:,} can")
    assert replace(rule, n=n - 100, radius_loss=None).unreachable(radius, Gaussian(SIGMA)) is None


def test_a_radius_in_the_last_block_of_two_stages_is_within_reach() -> None:
    rule = Rule(n0=100, n=20_000, alpha=0.001, radius_loss=0.1)
    (certificate,) = certify(rule, at_distances(50.0))  # all votes agree
    assert certificate.n % 250 == 0
    assert second_stage_votes(500, 500, alpha=0.001, n_max=20_000, radius_loss=0.1) < certificate.n < rule.n
    assert rule.unreachable(certificate.radius, Gaussian(SIGMA)) is None
    exact, rounded_up = (rule.largest_radius(Gaussian(SIGMA), block) for block in (1, 250))
    assert exact < certificate.radius <= rounded_up


def test_grid_spends_alpha_and_keeps_the_slack() -> None:
    """Each radius, slightly enlarged, is tested at the whole alpha, or at the part that is not held back."""
    rule, look = Rule(n0=10, n=1000, alpha=0.01, radii=(0.1, 0.2), slack=0.003), 500
    for hold_back, alpha in ((False, 0.01), (True, 0.003)):
        test, held_back = replace(rule, hold_back=hold_back).grid(Gaussian(SIGMA), look)
        assert held_back == (pytest.approx(0.007) if hold_back else 0.0)
        for j, (radius, q) in enumerate(zip(rule.radii, test.qs, strict=True)):
            assert q == pytest.approx(float(ndtr(-radius / SIGMA)) - 0.003, rel=1e-6)
            assert [test.upper[n][j] for n in (500, 1000)] == boundaries(q, alpha, look, 1000).upper.tolist()
    (certificate,) = certify(rule, at_distances(1.5))
    assert certificate.radius == pytest.approx(0.2, rel=1e-6)


def test_votes_held_back_for_the_end_give_more_than_the_last_radius() -> None:
    """Between 0.2 and the next radius, which cannot be shown: Clopper-Pearson at 0.7 alpha, at n votes only."""
    rule = Rule(n0=100, n=3000, alpha=0.001, radii=(0.2, 0.48), hold_back=True)
    (near,) = certify(rule, at_distances(0.5))
    expected = -SIGMA * float(ndtri(stats.beta.isf(0.0007, 3000 - near.count + 1, near.count)))
    assert near.n == 3000
    assert near.radius == pytest.approx(expected, rel=1e-9)
    assert 0.2 < near.radius < 0.5
    (plain,) = certify(replace(rule, hold_back=False), at_distances(0.5))
    assert plain.radius == pytest.approx(0.2, rel=1e-6)


def test_label_aware_skips_wrong_images_and_keeps_the_others() -> None:
    """Those after a wrong image keep the votes of their own seeds."""
    images = at_distances(0.4, 0.5, 0.3)
    plain = certify(Rule(n0=100, n=1000, alpha=0.001), images, [1, 0, 1])
    aware = certify(Rule(n0=100, n=1000, alpha=0.001, label_aware=True), images, [1, 0, 1])
    assert aware[0] == plain[0]
    assert plain[1].n == 1000
    assert aware[1] == Certificate(ABSTAIN, 0.0, 100, 0, 0, ())
    assert aware[2] == plain[2]


def test_two_sided_is_for_many_classes() -> None:
    """Three classes, 0.7 / 0.15 / 0.15: the runner-up is far below 1 - p."""

    def three(images: Tensor) -> Tensor:
        v = (images[:, 0, 0, 0] - 0.5) / SIGMA  # standard normal
        logits = torch.zeros(len(v), 3)
        logits[torch.arange(len(v)), (v > 0.524).long() + (v > 1.036).long()] = 1
        return logits

    image = torch.full((1, 1, 1, 1), 0.5)
    votes = VoteCounter(three, Gaussian(SIGMA), 3, 500)
    one, two = (
        Rule(n0=100, n=20_000, alpha=0.001, bound=bound).certify(votes, image, [(1, 0)], [0])[0]
        for bound in ("one-sided", "two-sided")
    )
    assert two.votes == one.votes
    assert one.radius == pytest.approx(0.524 * SIGMA, abs=0.03)
    assert two.radius == pytest.approx((0.524 + 1.036) / 2 * SIGMA, abs=0.03)
    with pytest.raises(RequestError, match="two-sided works with gaussian noise only"):
        Rule(n0=10, n=100, alpha=0.1, bound="two-sided").certify(counter(Laplace(SIGMA)), image, [(1, 0)], [0])


def test_sound_certificates_are_close_to_plain_ones() -> None:
    images = (at_distances(0.4, 0.8) * 255).round() / 255
    plain = certify(Rule(n0=100, n=10_000, alpha=0.001), images)
    sound = certify(Rule(n0=100, n=10_000, alpha=0.001, slack=1e-10), images, sound=True)
    slow = certify(Rule(n0=100, n=10_000, alpha=0.001, slack=0.01), images, sound=True)
    for a, b, c in zip(plain, sound, slow, strict=True):
        assert c.votes == b.votes
        assert c.radius < b.radius
        assert b.prediction == a.prediction == 1
        assert b.radius == pytest.approx(a.radius, abs=0.06)
        assert b.radius < 0.82
    with pytest.raises(RequestError, match="expected bytes divided by 255"):
        certify(Rule(n0=100, n=100, alpha=0.001, slack=1e-10), at_distances(0.41234), sound=True)


@pytest.mark.parametrize("family", [Laplace, Uniform])
@pytest.mark.parametrize("distance", [0.1, 0.4])
def test_l1_radius_of_a_one_coordinate_half_space_is_its_distance(family: type[Noise], distance: float) -> None:
    """The worst direction in L1 is the coordinate itself, so the certificate is tight there."""
    certificate = certify(Rule(n0=2000, n=40_000, alpha=0.001), at_distances(distance), noise=family(SIGMA))[0]
    assert certificate.prediction == 1
    assert distance - 0.04 < certificate.radius <= distance


def test_a_radius_that_no_vote_can_reach_is_refused() -> None:
    for radii in ((30.0,), (0.1, 30.0)):
        with pytest.raises(RequestError, match="30 can never be certified"):
            certify(Rule(n0=10, n=100, alpha=0.1, radii=radii, slack=1e-10), at_distances(0.1))
    with pytest.raises(RequestError, match="can never be certified"):  # half of the width of the noise is 0.87
        certify(Rule(n0=10, n=100, alpha=0.1, radii=(1.0,)), at_distances(0.1), noise=Uniform(SIGMA))


@pytest.mark.parametrize("noise", [Gaussian(SIGMA), Laplace(SIGMA), Uniform(SIGMA)])
def test_a_certified_radius_is_never_far_from_the_one_that_was_asked_for(noise: Noise) -> None:
    """A file or a log with a larger radius would be refused as damaged."""
    rule = Rule(n0=10, n=1000, alpha=0.1, radii=(1e-6 * SIGMA,))
    (certificate,) = certify(rule, at_distances(1.0), noise=noise)
    assert rule.radii[0] <= certificate.radius < rule.radii[0] * (1 + 1e-8)
    for radius in (1e-300, 4e-12, 0.9e-6 * SIGMA):
        with pytest.raises(RequestError, match=r"radii: expected at least 1e-06 sigma, got .*; ask for more"):
            replace(rule, radii=(radius,)).errors_at_radii(noise)


@pytest.mark.parametrize("radii", [(0.1, 0.2, np.nextafter(0.2, 1)), (0.1, np.nextafter(0.1, 1))])
def test_radii_that_rounding_makes_equal_are_refused(radii: tuple[float, ...]) -> None:
    with pytest.raises(RequestError, match=r"radii: .* and .* cannot be distinguished at sigma"):
        certify(Rule(n0=10, n=100, alpha=0.1, radii=radii), at_distances(0.1))


def test_fewer_votes_and_no_more_wrong_claims() -> None:
    """On the threshold itself (p = t) at most alpha of many images may be claimed."""
    alpha, radius, images = 0.1, 0.2, 150
    rule = Rule(n0=50, n=1000, alpha=alpha, radii=(radius,))
    # Just inside the radius that is tested, so that every claim is wrong.
    found = certify(rule, at_distances(*[radius * (1 + 1e-12)] * images))
    claimed = np.mean([c.prediction == 1 for c in found])
    assert claimed <= alpha + 4 * (alpha * (1 - alpha) / images) ** 0.5
    assert np.mean([c.n for c in found]) < 1000


def test_no_boundaries_are_read_from_or_written_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed file in a cache folder once turned an abstention into a certificate."""
    monkeypatch.setenv("SMOOTHCERT_DATA", str(tmp_path / "data"))
    recipe = CertifyRecipe(sigma=0.5, n=1000, radii=(0.25,), seed=1)
    make_rule(recipe, (1, 1, 1)).grid(Gaussian(0.5), 500)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("sound", "slack"), [(True, 1e-10), (False, 0.0)])
def test_rule_of_integer_noise_has_its_slack(sound: bool, slack: float) -> None:
    assert make_rule(CertifyRecipe(sigma=0.5, n=1000, seed=1, sound=sound), (1, 28, 28)).slack == slack


@pytest.mark.parametrize(("alpha", "n"), [(0.001, 10), (1e-6, 20), (0.3, 2)])
def test_too_few_votes_for_any_certificate(alpha: float, n: int) -> None:
    """If all n votes agree the bound is alpha ** (1 / n), which must be above 1/2."""
    assert alpha ** (1 / (n - 1)) <= 0.5 < alpha ** (1 / n)
    rule = Rule(n0=10, n=n - 1, alpha=alpha)
    expected = f"n = {n - 1} votes cannot certify any image at alpha {alpha:g}: all abstain; n = {n} can"
    assert rule.unreachable(0.0, Gaussian(SIGMA)) == expected
    assert replace(rule, n=n).unreachable(0.0, Gaussian(SIGMA)) is None
