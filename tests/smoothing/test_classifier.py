"""SmoothedClassifier: clear refusals, batched input, replays; CERTIFY and PREDICT on given votes."""

import doctest

import pytest
import torch

import smoothcert.smoothing.classifier as module
from smoothcert import ABSTAIN, RequestError, SmoothedClassifier
from smoothcert.noise import Gaussian
from smoothcert.smoothing.bounds import lower_bound
from smoothcert.smoothing.certify import certificate_from_votes
from smoothcert.smoothing.predict import class_from_votes


def brightness(images: torch.Tensor) -> torch.Tensor:
    mean = images.flatten(1).mean(1)
    return torch.stack([0.5 - mean, mean - 0.5], dim=1)


def smoothed(**changes: object) -> SmoothedClassifier:
    return SmoothedClassifier(brightness, **({"sigma": 0.5, "num_classes": 2} | changes))


def test_the_docstring_example_runs() -> None:
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 2
    assert result.failed == 0


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([[0.5]], "expected a tensor"),
        (torch.zeros(1, 4, 4), r"add a batch dimension with images\[None\]"),
        (torch.zeros(4), r"expected shape \[n, c, h, w\], got \[4\]"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), "divide bytes by 255"),
        (torch.zeros(0, 1, 4, 4), "at least one image"),
        (torch.full((1, 1, 4, 4), float("nan")), "NaN"),
        (torch.full((1, 1, 4, 4), 2.0), r"expected values in \[0, 1\], got \[2, 2\]"),
        (torch.full((1, 1, 4, 4), -0.1), "normalisation belongs inside the classifier"),
    ],
)
def test_wrong_images_are_refused(images: object, message: str) -> None:
    for call in (smoothed().predict, smoothed().certify):
        with pytest.raises(RequestError, match=message) as caught:
            call(images)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sigma": 0}, "sigma: expected"),
        ({"num_classes": 1}, "num_classes: expected at least 2"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
        ({"classifier": 3}, "expected a callable"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"classifier": brightness, "sigma": 0.5, "num_classes": 2} | changes
    with pytest.raises(RequestError, match=message):
        SmoothedClassifier(**arguments)


@pytest.mark.parametrize("options", [{"n": 0}, {"n0": 0}, {"alpha": 0.0}, {"alpha": 1.0}, {"seed": -1}])
def test_wrong_statistics_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(options))}: expected"):
        smoothed().certify(torch.zeros(1, 1, 2, 2), **options)


@pytest.mark.parametrize("output", [torch.zeros(500, 3), torch.zeros(500), "text"])
def test_logits_of_the_wrong_size_are_refused(output: object) -> None:
    with pytest.raises(RequestError, match=r"expected (logits of shape|a tensor of logits)"):
        SmoothedClassifier(lambda x: output, sigma=0.5, num_classes=2).predict(torch.zeros(1, 1, 2, 2))


def test_noise_is_fresh_unless_a_seed_is_given() -> None:
    image = torch.full((1, 1, 2, 2), 0.55)
    replay = [smoothed().certify(image, n=1000, seed=3)[0].votes for _ in range(2)]
    fresh = {smoothed().certify(image, n=1000)[0].votes for _ in range(6)}
    assert replay[0] == replay[1]
    assert len(fresh) > 1


def test_certify_bounds_the_class_that_the_first_votes_chose() -> None:
    """The n0 votes choose and are not counted again; another class may lead among the fresh ones."""
    noise = Gaussian(0.5)
    certificate = certificate_from_votes([60, 40, 0], [900, 100, 0], noise, 0.001)
    assert (certificate.predict, certificate.count, certificate.n, certificate.n0) == (0, 900, 1000, 100)
    p = lower_bound(900, 1000, 0.001)
    assert certificate.radius == pytest.approx(
        0.5 * torch.distributions.Normal(0, 1).icdf(torch.tensor(p)).item(), rel=1e-5
    )
    other = certificate_from_votes([40, 60, 0], [900, 100, 0], noise, 0.001)
    assert (other.predict, other.radius, other.count) == (ABSTAIN, 0.0, 100)
    assert other.votes == ((0, 900), (1, 100))


def test_certify_abstains_up_to_one_half() -> None:
    n = 1000
    claimed = [
        count
        for count in range(n + 1)
        if certificate_from_votes([1, 0], [count, n - count], Gaussian(1.0), 0.001).predict == 0
    ]
    assert claimed[0] == next(k for k in range(n) if lower_bound(k, n, 0.001) > 0.5)
    assert claimed == list(range(claimed[0], n + 1))


def test_predict_compares_the_two_top_counts() -> None:
    assert class_from_votes([0, 30, 70], 0.001) == 2
    assert class_from_votes([5, 45, 50], 0.001) == ABSTAIN
    assert class_from_votes([50, 50, 0], 0.5) == ABSTAIN


def test_another_noise_certifies_in_its_own_norm() -> None:
    """Uniform noise on one pixel of a half-space: an L1 radius, close to the distance and not beyond it."""
    edge = SmoothedClassifier(
        lambda x: torch.stack([0.3 - x[:, 0, 0, 0], x[:, 0, 0, 0] - 0.3], 1), sigma=0.5, num_classes=2, noise="uniform"
    )
    certificate = edge.certify(torch.full((1, 1, 1, 2), 0.6), n=20_000, seed=1)[0]
    assert edge.noise.norm == "L1"
    assert 0.25 < certificate.radius <= 0.3
    with pytest.raises(RequestError, match="noise: expected one of gaussian, laplace, uniform, got pink"):
        SmoothedClassifier(brightness, sigma=0.5, num_classes=2, noise="pink")
