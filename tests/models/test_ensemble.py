"""Ensembles against an enumeration of all inputs, and their certificates against exact probabilities."""

import copy
from itertools import product

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from smoothcert import Ensemble, RequestError, SmoothedClassifier
from smoothcert.models import Denoised, LeNet
from smoothcert.models.precision import at_precision, has_batch_norm

CPU = torch.device("cpu")
CLASSES = 3


class Table(nn.Module):
    """Looks the logits of an input up: its first pixel is a row of `logits`."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", logits)
        self.evaluated = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.evaluated += len(inputs)
        logits: Tensor = self.logits[inputs.flatten(1)[:, 0].long()]  # type: ignore[index]
        return logits


def all_members() -> list[Table]:
    """Three members whose classes on 3^3 = 27 inputs are all combinations; the strength of an opinion varies."""
    classes = torch.tensor(list(product(range(CLASSES), repeat=3)))
    generator = torch.Generator().manual_seed(3)
    tables = []
    for member in range(3):
        logits = torch.rand(27, CLASSES, generator=generator)
        logits[torch.arange(27), classes[:, member]] += 1 + 2 * torch.rand(27, generator=generator)
        tables.append(Table(logits))
    return tables


def expected_class(rows: list[list[float]], consensus: int | None) -> int:
    """The rule of the ensemble for one input, in plain Python."""
    classes = [row.index(max(row)) for row in rows]
    if consensus is not None and len(set(classes[:consensus])) == 1:
        return classes[0]
    sums = [sum(column) for column in zip(*rows, strict=True)]
    return sums.index(max(sums))


@pytest.mark.parametrize("consensus", [None, 2])
@pytest.mark.parametrize("batch", [1, 2, 5, 27])
def test_classes_equal_those_of_an_enumeration_for_every_batch(consensus: int | None, batch: int) -> None:
    members = all_members()
    ensemble = Ensemble(members, consensus)
    inputs = torch.arange(27.0).view(27, 1, 1, 1)
    order = torch.randperm(27, generator=torch.Generator().manual_seed(batch))
    classes = torch.cat([ensemble(part).argmax(1) for part in inputs[order].split(batch)])
    expected = [expected_class([m.logits[i].tolist() for m in members], consensus) for i in order.tolist()]
    assert classes.tolist() == expected


@pytest.mark.parametrize("consensus", [None, 2])
def test_logits_are_the_mean_over_the_evaluated_members(consensus: int | None) -> None:
    """A number of members that an average is divided by wrongly changes no class, but every margin."""
    members = all_members()
    logits = Ensemble(members, consensus)(torch.arange(27.0).view(27, 1, 1, 1))
    for i in range(27):
        rows = [member.logits[i].tolist() for member in members]
        agreed = consensus is not None and len({row.index(max(row)) for row in rows[:consensus]}) == 1
        evaluated = rows[:consensus] if agreed else rows
        mean = [sum(column) / len(evaluated) for column in zip(*evaluated, strict=True)]
        assert logits[i].tolist() == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("consensus", [None, 2])
def test_logits_of_low_precision_are_averaged_in_float32(consensus: int | None) -> None:
    """512 + 1 is 512 in bfloat16: the sums of both classes would be equal."""
    rows = ([512.0, 512.0], [0.0, 1.0], [0.0, 1.0])
    ensemble = Ensemble([Table(torch.tensor([row]).bfloat16()) for row in rows], consensus)
    logits = ensemble(torch.zeros(1, 1, 1, 1))
    assert logits.dtype == torch.float32
    assert logits[0].tolist() == pytest.approx([512 / 3, 514 / 3], rel=1e-6)


def test_consensus_is_another_classifier_that_evaluates_fewer_members() -> None:
    members = all_members()
    inputs = torch.arange(27.0).view(27, 1, 1, 1)
    plain, short = (Ensemble(copy.deepcopy(members), k)(inputs).argmax(1) for k in (None, 2))
    assert (plain != short).any()
    Ensemble(members, 2)(inputs)
    # The first two agree on 9 of 27 inputs; the other 18 fill six parts of 27 // 8 = 3.
    assert [member.evaluated for member in members] == [27, 27, 18]


def test_nan_of_an_evaluated_member_stays_nan() -> None:
    for broken in range(3):
        members = all_members()
        members[broken].logits[:] = torch.nan
        assert Ensemble(members)(torch.zeros(1, 1, 1, 1)).isnan().any()
        logits = Ensemble(members, 2)(torch.arange(27.0).view(27, 1, 1, 1))
        assert bool(logits.isnan().any(1).all()) == (broken < 2)


class Threshold(nn.Module):
    """Class 1 where the only pixel is above a threshold; `strength` scales the logits."""

    def __init__(self, threshold: float, strength: float = 1.0) -> None:
        super().__init__()
        self.threshold, self.strength = threshold, strength

    def forward(self, inputs: Tensor) -> Tensor:
        score = self.strength * torch.sign(inputs.flatten(1)[:, 0] - self.threshold)
        return torch.stack([-score, score], dim=1)


@pytest.mark.parametrize(("consensus", "boundary"), [(None, 0.7), (2, 0.6)])
def test_radius_is_that_of_the_exact_smoothed_classifier(consensus: int | None, boundary: float) -> None:
    """The strong third member decides where it is asked: everywhere, or only between the first two thresholds.

    With consensus the first two agree above 0.6, so the ensemble is class 1 there; the boundaries follow by cases.
    """
    ensemble = Ensemble([Threshold(0.4), Threshold(0.6), Threshold(0.7, strength=5)], consensus)
    smoothed = SmoothedClassifier(ensemble, sigma=0.25)
    (certificate,) = smoothed.certify(torch.full((1, 1, 1, 1), 1.0), n=20_000, seed=1)
    p = norm.cdf((1 - boundary) / 0.25)
    assert abs(certificate.count / certificate.n - p) < 4 * (p * (1 - p) / certificate.n) ** 0.5
    assert certificate.prediction == 1
    assert 0.95 * (1 - boundary) < certificate.radius < 1 - boundary


def test_all_members_see_one_noise_draw() -> None:
    """Complementary members cancel for every single draw: the average is the constant third member."""
    opposite = Threshold(0.5, strength=-1)
    ensemble = Ensemble([Threshold(0.5), opposite, Threshold(-1e6)])
    votes = SmoothedClassifier(ensemble, sigma=0.5).certify(torch.full((1, 1, 1, 1), 0.5), n=1000, seed=2)[0].votes
    assert votes == ((1, 1000),)


def test_precision_folds_batch_norm_of_each_member_and_keeps_the_logits() -> None:
    torch.manual_seed(0)

    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 26 * 26, 10)).eval()

    members = [network(), LeNet(10).eval(), network()]
    images = torch.rand(16, 1, 28, 28)
    with torch.no_grad():
        mean = torch.stack([member(images) for member in members]).mean(0)
        for consensus in (None, 2):
            evaluated = at_precision(Ensemble(members, consensus), "fp32", CPU, (1, 28, 28))
            assert isinstance(evaluated, Ensemble)
            assert evaluated.consensus == consensus
            assert not has_batch_norm(evaluated)
            if consensus is None:
                torch.testing.assert_close(evaluated(images), mean, rtol=1e-4, atol=1e-5)
        half = at_precision(Ensemble(members), "bf16", CPU, (1, 28, 28))(images.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, mean, rtol=0.1, atol=0.05)


def test_subclasses_and_hooks_are_certified_as_they_are() -> None:
    """They may compute another class from the same parts."""

    class Least(Ensemble):
        def forward(self, inputs: Tensor) -> Tensor:
            return -super().forward(inputs)

    class Reversed(Denoised):
        def forward(self, noisy: Tensor) -> Tensor:
            return -super().forward(noisy)

    hooked = Ensemble([Threshold(0.5), Threshold(0.4)])
    hooked.register_forward_hook(lambda module, inputs, output: -output)
    for network in (Least([Threshold(0.5), Threshold(0.4)]), Reversed(nn.Identity(), Threshold(0.5)), hooked):
        bright = torch.full((1, 1, 1, 1), 0.9)
        (certificate,) = SmoothedClassifier(network, sigma=0.01).certify(bright, n=100)
        assert certificate.prediction == int(network(bright).argmax()) == 0


def test_impossible_ensembles_are_refused() -> None:
    members = all_members()
    for consensus in (0, 1, 3, "2", 2.0):
        with pytest.raises(RequestError, match="fewer than the 3 members"):
            Ensemble(members, consensus)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="consensus: expected at least 3 networks, got 2; leave it out"):
        Ensemble(members[:2], 2)
    assert len(Ensemble(member for member in members).members) == 3
    for one in (members[0], None):
        with pytest.raises(RequestError, match="members: expected"):
            Ensemble(one)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="at least 2 networks, got 1"):
        Ensemble(members[:1])
    with pytest.raises(RequestError, match="expected torch modules, got function"):
        Ensemble([members[0], expected_class])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="compile: expected false with consensus"):
        SmoothedClassifier(Ensemble(members, 2), sigma=1.0, compile=True).certify(torch.zeros(1, 1, 1, 1), n=10)
