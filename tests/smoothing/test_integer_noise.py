"""Integer noise: its distribution is exact to the last bit, and no classifier can read the image from the low bits."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from smoothcert import SmoothedClassifier
from smoothcert.certification.settings import CertifyRecipe, make_rule
from smoothcert.errors import RequestError
from smoothcert.noise import Gaussian
from smoothcert.smoothing import integer_noise
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.smoothing.integer_noise import BITS, SLACK, IntegerGaussian, pixels

IMAGENET = 3 * 224 * 224
NEXT_TO_128 = float(np.nextafter(np.float32(128 / 255), np.float32(0)))
SIGMAS = [0.25, 1.0]


def tail_by_alternating_series(z: Fraction) -> Fraction:
    """P(N > z) from the Maclaurin series of erf in 400-bit fixed point: another formula, another arithmetic."""
    bits = 400
    x = round(z * 2**bits)
    half_square = (x * x >> bits) // 2
    power, total, n = x, 0, 0
    while power:
        total += (-1) ** n * power // (2 * n + 1)
        n += 1
        power = (power * half_square >> bits) // n
    inverse_root = Fraction(2**bits, math.isqrt(2 * machin_pi(bits) << bits))
    return Fraction(1, 2) - Fraction(total, 2**bits) * inverse_root


def machin_pi(bits: int) -> int:
    """2^bits pi = 2^bits (16 arctan(1/5) - 4 arctan(1/239))."""

    def arctan_inverse(k: int) -> int:
        power, total, n = (1 << (bits + 20)) // k, 0, 0
        while power:
            total += (-1) ** n * (power // (2 * n + 1))
            power, n = power // (k * k), n + 1
        return total

    return (16 * arctan_inverse(5) - 4 * arctan_inverse(239)) >> 20


@pytest.mark.parametrize("sigma", [0.1, 0.5])
def test_thresholds_by_another_series(sigma: float) -> None:
    law = integer_noise._law(sigma)
    scale = 255 * Fraction(sigma)
    drawn = law.thresholds.tolist()
    assert len(drawn) == 2 * law.reach
    assert all(low + high == 2**BITS for low, high in zip(drawn, reversed(drawn), strict=True))
    for j in {0, 1, 2, *range(3, law.reach, 41), law.reach - 1}:
        assert drawn[law.reach - 1 - j] == round(2**BITS * tail_by_alternating_series((j + Fraction(1, 2)) / scale))
    # Reach is where the next threshold would be no unit at all.
    assert drawn[0] >= 1
    assert 2**BITS * tail_by_alternating_series((law.reach + Fraction(1, 2)) / scale) < Fraction(1, 2)


@pytest.mark.parametrize("sigma", [0.1])
def test_thresholds_and_total_variation_by_mpmath(sigma: float) -> None:
    mpmath = pytest.importorskip("mpmath")
    law = integer_noise._law(sigma)
    thresholds = law.thresholds.tolist()
    with mpmath.workdps(50):
        scale = 255 * mpmath.mpf(sigma)
        j = range(-law.reach, law.reach)
        cumulative = [mpmath.ncdf((k + mpmath.mpf("0.5")) / scale) for k in j]
        assert [int(mpmath.nint(2**BITS * c)) for c in cumulative] == thresholds
        beyond = mpmath.ncdf(-(law.reach + mpmath.mpf("0.5")) / scale)
        ideal = np.diff(np.array([beyond, *cumulative, 1 - beyond]))
        drawn = np.diff(np.array([mpmath.mpf(t) / 2**BITS for t in (0, *thresholds, 2**BITS)]))
        distance = float((sum(abs(ideal - drawn)) + 2 * beyond) / 2)
    assert distance <= IntegerGaussian(sigma).total_variation(1) < distance * (1 + 1e-9)


def test_normal_tail_has_120_bits() -> None:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(80), integer_noise.localcontext(prec=60):
        for z in ("0.001", "0.5", "1", "3.7", "9.1", "15", "19.99", "25"):
            ours = mpmath.mpf(str(integer_noise._normal_tail(integer_noise.Decimal(z))))
            assert abs(ours - mpmath.ncdf(-mpmath.mpf(z))) < mpmath.mpf("1e-55") < mpmath.mpf(2) ** -120


@pytest.mark.parametrize("sigma", SIGMAS)
def test_total_variation_on_imagenet(sigma: float) -> None:
    noise = IntegerGaussian(sigma)
    assert 0 < noise.total_variation(IMAGENET) < 1e-10
    assert noise.slack(IMAGENET) == SLACK == 1e-10
    # Without support far beyond six sigma this could not be: those tails alone weigh more.
    assert integer_noise._law(sigma).reach > 8.9 * 255 * sigma
    assert IMAGENET * 2 * special.ndtr(-6) > 1e-10


def test_too_many_values_for_the_slack_are_refused() -> None:
    noise = IntegerGaussian(0.25)
    most = int(SLACK / noise.total_variation(1))
    assert noise.slack(most - 1) == SLACK
    with pytest.raises(RequestError, match="expected at most 1e-10"):
        noise.slack(most + 2)
    recipe = CertifyRecipe(sigma=0.25, sound=True, seed=0)
    assert make_rule(recipe, (3, most // 6, 2)).slack == SLACK
    with pytest.raises(RequestError, match="expected at most 1e-10"):
        make_rule(recipe, (3, most // 6 + 1, 2))
    for sigma in (0.0, -1.0, math.nan, math.inf, 8.1):
        with pytest.raises(RequestError, match="sigma"):
            IntegerGaussian(sigma)


def test_integers_cannot_wrap_around() -> None:
    """The tails of the largest sigma, by the float64 quantile: sums fit 16 bits."""
    assert -special.ndtri(2.0**-63) * 255 * integer_noise.LARGEST_SIGMA + 255 < 2**15 - 1


class Scripted:
    """A bit generator whose words are given: the tails that `_place` asks for."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = words

    def random_raw(self, count: int) -> np.ndarray:
        assert count == len(self.words)
        return self.words


@pytest.mark.parametrize("sigma", [0.001, 0.1])
def test_fast_path_equals_binary_search(sigma: float) -> None:
    """At, just below and just above every threshold, and at both ends of every cell of the guide table."""
    law = integer_noise._law(sigma)
    edges = np.concatenate([law.thresholds, np.arange(1 << 16, dtype=np.int64) << 46, [2**BITS - 1]])
    uniforms = np.unique(np.clip(np.concatenate([edges - 1, edges, edges + 1]), 0, 2**BITS - 1))
    expected = np.searchsorted(law.thresholds, uniforms, side="right") - law.reach
    heads = (uniforms >> 46).astype(np.uint16)
    undecided = law.answers[heads] == integer_noise._UNDECIDED
    tails = uniforms[undecided].astype(np.uint64) << np.uint64(18)
    out = np.empty(len(uniforms), dtype=np.int16)
    integer_noise._place(out, law, heads, Scripted(tails))  # type: ignore[arg-type]
    assert np.array_equal(out, expected)
    assert out.min() == -law.reach
    assert out.max() == law.reach
    assert undecided.any()


def torch_draw(noise: IntegerGaussian, out: Tensor, key: int) -> None:
    """What a CUDA device runs, on the CPU."""
    thresholds = integer_noise._threshold_tensor(noise.sigma, torch.device("cpu"))
    integer_noise._draw_torch(out.view(-1), thresholds, torch.Generator().manual_seed(key))


def test_torch_draws_at_the_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """K <= j exactly if the uniform is below the threshold of j."""
    thresholds = integer_noise._threshold_tensor(0.1, torch.device("cpu"))
    reach = len(thresholds) // 2
    for shift, expected in ((-1, range(-reach, reach)), (0, range(-reach + 1, reach + 1))):
        monkeypatch.setattr(torch, "randint", lambda *_, shift=shift, **__: thresholds + shift)
        out = torch.empty(len(thresholds), dtype=torch.int16)
        torch_draw(IntegerGaussian(0.1), out, 7)
        distinct = thresholds.diff(prepend=thresholds.new_zeros(1)) > 1
        assert out[distinct].tolist() == [k for k, kept in zip(expected, distinct.tolist(), strict=True) if kept]


@pytest.mark.parametrize("draw", [IntegerGaussian.fill, torch_draw], ids=["numpy", "torch"])
@pytest.mark.parametrize("sigma", [0.01, 0.25])
def test_draws_follow_the_law(draw: Callable[[IntegerGaussian, Tensor, int], None], sigma: float) -> None:
    noise = IntegerGaussian(sigma)
    out = torch.empty(400_000, dtype=torch.int16)
    draw(noise, out, 7)
    reach = integer_noise._law(sigma).reach
    counts = np.bincount(out.numpy().astype(np.int64) + reach, minlength=2 * reach + 1)
    edges = (np.arange(-reach, reach) + 0.5) / (255 * sigma)
    expected = len(out) * np.diff(special.ndtr(edges), prepend=0.0, append=1.0)
    common = expected >= 20
    pairs = [np.append(c[common], c[~common].sum()) for c in (counts, expected)]
    assert stats.chisquare(pairs[0], pairs[1] * (pairs[0].sum() / pairs[1].sum())).pvalue > 1e-5
    # Neighbouring draws share a 64-bit word and must not share anything else.
    for lag in range(1, 5):
        x = out.double()
        assert abs(float((x[lag:] * x[:-lag]).mean() / x.var())) < 5 / len(x) ** 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    """All 62 bits of torch's integers are random there, the law is the CPU's, and the floats have the CPU's bits."""
    device = torch.device("cuda")
    uniforms = torch.randint(0, 2**BITS, (1_000_000,), generator=torch.Generator(device).manual_seed(1), device=device)
    for bit in range(BITS):
        assert abs(int((uniforms >> bit & 1).sum()) - 500_000) < 3000
    noise = IntegerGaussian(0.25)
    test_draws_follow_the_law(lambda law, out, key: out.copy_(filled(law, out, key, device)), noise.sigma)
    a, b = (filled(noise, torch.empty(100, 28, 28, dtype=torch.int16), 2**64 - 1, device) for _ in range(2))
    assert torch.equal(a, b)
    image = torch.arange(28 * 28).remainder(256).view(28, 28) / torch.tensor(255.0)
    here = noise.noisy_floats(pixels(image), a.cpu(), noise.table())
    there = noise.noisy_floats(pixels(image.to(device)), a, noise.table(device))
    assert torch.equal(here, there.cpu())


def filled(noise: IntegerGaussian, like: Tensor, key: int, device: torch.device) -> Tensor:
    out = torch.empty(like.shape, dtype=like.dtype, device=device)
    noise.fill(out, key)
    return out


def test_noise_depends_on_the_key_alone() -> None:
    noise = IntegerGaussian(0.25)
    a, b, c = (torch.empty(3, 5, 1, 150, 150, dtype=torch.int16) for _ in range(3))
    noise.fill(a, 2**64 - 1)
    torch.manual_seed(0)
    noise.fill(b, 2**64 - 1)
    noise.fill(c, 2**32 - 1)
    assert torch.equal(a, b)
    assert float((a == c).double().mean()) < 0.02
    with pytest.raises(ValueError, match="expected int16"):
        noise.fill(torch.empty(3), 1)


def test_noise_that_rounds_to_zero() -> None:
    noise = IntegerGaussian(1e-4)
    out = torch.empty(100, dtype=torch.int16)
    noise.fill(out, 1)
    assert not len(integer_noise._law(1e-4).thresholds)
    assert not out.any()
    assert noise.total_variation(IMAGENET) < 1e-30


def test_table_and_lookup() -> None:
    noise = IntegerGaussian(0.25)
    assert (noise.lowest, noise.highest) == (-383, 255 + 383)
    table = noise.table()
    assert len(table) == noise.highest - noise.lowest + 1
    exact = [Fraction(k, 255) for k in range(noise.lowest, noise.highest + 1)]
    assert table.tolist() == [float(np.float32(float(e))) for e in exact]
    images = torch.tensor([[0, 7, 255]], dtype=torch.int16)
    reach = integer_noise._law(0.25).reach
    shift = torch.tensor([[-3], [reach], [-reach]], dtype=torch.int16)
    floats = noise.noisy_floats(images, shift, table)
    top, bottom = float(table[-1]), float(table[0])
    assert floats[0].tolist() == pytest.approx([-3 / 255, 4 / 255, 252 / 255], rel=1e-7)
    assert floats[1].tolist() == pytest.approx([min((k + reach) / 255, top) for k in (0, 7, 255)], rel=1e-7)
    assert floats[2].tolist() == pytest.approx([bottom, bottom, max((255 - reach) / 255, bottom)], rel=1e-7)
    for wrong in (images.float(), images.to(torch.uint8)):
        with pytest.raises(ValueError, match="signed integers"):
            noise.noisy_floats(wrong, shift, table)


def test_pixels_of_bytes() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(pixels(values.float() / 255), values.to(torch.int16))


@pytest.mark.parametrize("value", [0.3, NEXT_TO_128, -1 / 255, 256 / 255, math.nan, math.inf])
def test_images_between_bytes_are_refused(value: float) -> None:
    images = torch.zeros(1, 1, 2, 2)
    images[0, 0, 1, 1] = value
    with pytest.raises(RequestError, match="expected bytes divided by 255") as refusal:
        pixels(images)
    assert "\n" not in str(refusal.value)
    with pytest.raises(RequestError, match="float32"):
        pixels(torch.zeros(1, dtype=torch.float64))


Classifier = Callable[[Tensor], Tensor]


def integer_votes(classifier: Classifier, image: Tensor, sigma: float, n: int, key: int) -> Tensor:
    """Votes per class for a float image [1, h, w], through integers."""
    noise = IntegerGaussian(sigma)
    drawn = torch.empty((n, *image.shape), dtype=torch.int16)
    noise.fill(drawn, key)
    logits = classifier(noise.noisy_floats(pixels(image), drawn, noise.table()))
    return torch.bincount(logits.argmax(1), minlength=2)


def sound_radius(count: int, n: int, sigma: float, num_pixels: int) -> float:
    q = error_upper_bound(count, n, 0.001) + IntegerGaussian(sigma).slack(num_pixels)
    return Gaussian(sigma).radius(min(q, 1.0))


@pytest.mark.parametrize(("pixel", "first"), [(128, 120), (128, 90), (255, 200)])
def test_half_space(pixel: int, first: int) -> None:
    """Class 1 where one pixel is at least `first`: round(x + Z) >= first is x + Z >= first - 1/2, a half-space."""
    sigma, n = 0.25, 100_000
    image = torch.full((1, 1, 2), pixel / 255)
    boundary = (first - 0.5) / 255

    def classifier(v: Tensor) -> Tensor:
        score = v[:, 0, 0, 0] - boundary
        return torch.stack([-score, score], dim=1)

    count = int(integer_votes(classifier, image, sigma, n, 3)[1])
    truth = (pixel - first + 0.5) / 255
    p = float(special.ndtr(truth / sigma))
    assert count == pytest.approx(n * p, abs=5 * (n * p * (1 - p)) ** 0.5)
    radius = sound_radius(count, n, sigma, image.numel())
    slack = 8 * (p * (1 - p) / n) ** 0.5 / stats.norm.pdf(truth / sigma) * sigma
    assert max(0.0, truth - slack) <= radius <= truth


class ReadsLowBits:
    """Tells 128/255 from 127/255 by one low bit of a float32 sum, without looking at its size.

    Where -1/4 < v < -1/256 the noise that led there from either image was between -1 and -1/2, where float32 counts in
    units of 2^-24, and the sum is exact. 128/255 is a multiple of 2^-24 in float32 as well; 127/255, below 1/2, is an
    odd multiple of 2^-25. So v in units of 2^-25 is an even integer for 128 and an odd one for 127, always: each such
    pixel votes. Where v is no integer of that unit neither image can have led there in floats; then `fair` votes by
    whether the nearest byte is even, else the vote goes to class 1.
    """

    def __init__(self, fair: bool) -> None:
        self.fair = fair

    def __call__(self, images: Tensor) -> Tensor:
        v = images.flatten(1)
        units = v * 2.0**25
        window = (v > -1 / 4) & (v < -1 / 256)
        otherwise = (v * 255).round().remainder(2) == 0 if self.fair else torch.zeros_like(window)
        even = torch.where(units == units.round(), units.remainder(2) == 0, otherwise)
        score = (window & even).sum(1) - (window & ~even).sum(1)
        return torch.stack([score, -score], dim=1)


SIGMA = 0.25
X, X_NEXT = (torch.full((1, 28, 28), k / 255) for k in (128, 127))
DISTANCE = float((X - X_NEXT).norm())


@pytest.mark.parametrize("fair", [False, True])
def test_float_certificate_is_false(fair: bool) -> None:
    """In floats: certified far beyond an image that gets the other class, all votes in both cases."""
    smoothed = SmoothedClassifier(ReadsLowBits(fair), sigma=SIGMA, num_classes=2)
    here, there = smoothed.certify(torch.stack([X, X_NEXT]), n=1000, seed=1)
    assert (here.prediction, there.prediction) == (0, 1)
    assert min(here.count, there.count) >= 995
    assert min(here.radius, there.radius) > 4 * DISTANCE
    assert smoothed.predict(torch.stack([X, X_NEXT]), seed=2).prediction.tolist() == [0, 1]


def test_torch_noise_has_the_same_weakness() -> None:
    generator = torch.Generator().manual_seed(5)
    for image, target in ((X, 0), (X_NEXT, 1)):
        noisy = torch.randn(1000, *image.shape, generator=generator) * SIGMA + image
        assert int((ReadsLowBits(fair=True)(noisy).argmax(1) == target).sum()) >= 995


def test_integer_certificate_holds_against_the_same_classifier() -> None:
    """Through integers: one class for both images, certified beyond their distance, and rightly so."""
    n = 1000
    for key, image in enumerate((X, X_NEXT)):
        votes = integer_votes(ReadsLowBits(fair=False), image, SIGMA, n, key)
        assert int(votes[1]) >= 995
        assert sound_radius(int(votes[1]), n, SIGMA, X.numel()) > 4 * DISTANCE


def test_integer_votes_differ_no_more_than_the_distance_allows() -> None:
    """The fair variant is undecided about integers: the low bits tell nothing, only the shift of the mean is left."""
    n = 2000
    here, there = (
        int(integer_votes(ReadsLowBits(fair=True), image, SIGMA, n, key)[0]) for key, image in enumerate((X, X_NEXT))
    )
    assert 0.25 * n < here < 0.75 * n
    # Two Gaussians at this distance are distinguished with no more than this difference of probabilities.
    most = 2 * float(special.ndtr(DISTANCE / SIGMA / 2)) - 1
    assert abs(here - there) / n < most + 5 * (0.5 / n) ** 0.5
    # Whatever is certified for one image holds for the other: not both can claim a different class this far.
    radii = [sound_radius(max(k, n - k), n, SIGMA, X.numel()) for k in (here, there)]
    assert (here > n / 2) == (there > n / 2) or max(radii) <= DISTANCE
