"""Integer noise, for certificates that hold in finite arithmetic: integers are added, floats are only looked up.

A float sum x + delta is not a shift of delta: its low bits depend on x, a network can read them, and then the radius
is false (Voracek & Hein, ICLR 2023). Here pixels are the integers 0..255, the noise K is the Gaussian rounded to
integers, the sum is an integer, and the float that the network sees is a function of that integer alone.
The network is the function that one kind of device computes with one batch size: rounding that depends on the other
inputs of a batch is not covered.

**Why the Gaussian radius holds.** Let Z ~ N(0, (255 sigma)^2) for each pixel and K = round(Z). For an integer pixel x,
x + round(Z) = round(x + Z): the noisy integer is the continuous Gaussian, centred at x, and then rounded. Rounding,
the clamp, the table, the normalisation and the network are one fixed function F of a point of R^d, so the smoothed
classifier is

    g(x) = argmax_c P(f(table[clamp(x + K)]) = c) = argmax_c P(F(x + Z) = c),

which is smoothing of F by an exact continuous Gaussian. The Neyman-Pearson argument needs nothing of F but that it is
measurable: if P(F(x + Z) = A) >= p_low > 1/2 then g(x') = A whenever ||x' - x||_2 < 255 sigma Phi^-1(p_low) in units of
bytes, that is sigma Phi^-1(p_low) for pixels in [0, 1]. It holds for every x' whose pixels are bytes, which is every
image that the classifier can get: between bytes x + K is not defined.

**What the sampler loses.** K has infinite support and probabilities that are not multiples of 2^-62. The total
variation between K and the drawn K', over all pixels of an image, is at most `total_variation`. The probability that
one vote is A changes by at most that much, and p_low - slack bounds P(F(x + Z) = A) from below. As in all sampling, it
remains an assumption that the bits of the generator are uniform and independent.

The clamp to six sigma around [0, 255] loses nothing: it acts on the sum, after the noise, and so is a part of F. It
must never act on the noise, whose support therefore extends until its probabilities fall below 2^-63.
"""

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from smoothcert.errors import RequestError
from smoothcert.smoothing.bounds import SLACK

BITS = 62
"""Bits of a uniform number: the most for which 2^BITS itself fits into a signed 64-bit integer."""
LARGEST_SIGMA = 8.0
"""Up to this sigma, noise plus a pixel stays below 2^15, so that sums of 16-bit integers cannot wrap around."""

_DIGITS = 60
_DIGITS_ERROR = Decimal("1e-45")  # far above the accumulated rounding to 60 digits of any sum below
_LAST_TERM = Decimal("1e-58")
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640629")
_HEAD_BITS = 16
_TAIL_BITS = BITS - _HEAD_BITS
_UNDECIDED = np.iinfo(np.int16).min
_CPU_CHUNK = 1 << 16  # draws whose temporaries stay in the cache
_CUDA_CHUNK = 1 << 25  # draws whose 64-bit uniforms take a quarter of a GiB


@dataclass(frozen=True)
class IntegerGaussian:
    """255 N(0, sigma^2) rounded to integers, drawn exactly up to `total_variation`."""

    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma <= LARGEST_SIGMA:
            raise RequestError(f"sigma: expected 0 < sigma <= {LARGEST_SIGMA:g} for integer noise, got {self.sigma}")

    def total_variation(self, num_pixels: int) -> float:
        """An upper bound on the total variation between drawn and ideal noise on `num_pixels` values.

        For one pixel it is half the sum of |drawn - ideal| over all integers, evaluated from the thresholds themselves
        (including tails) with 60 digits; for independent pixels it is at most their sum.
        """
        return math.nextafter(num_pixels * _law(self.sigma).error, math.inf)

    def slack(self, num_pixels: int) -> float:
        """SLACK, if that covers images of `num_pixels` values (all colours counted); otherwise a RequestError."""
        if self.total_variation(num_pixels) > SLACK:
            raise RequestError(
                f"integer noise of sigma {self.sigma:g} is exact to {self.total_variation(num_pixels):.1e} on "
                f"{num_pixels} values, expected at most {SLACK:g}; use smaller images or a smaller sigma"
            )
        return SLACK

    @property
    def lowest(self) -> int:
        """Lower end of the clamp: six sigma below black."""
        return -math.ceil(6 * 255 * self.sigma)

    @property
    def highest(self) -> int:
        """Upper end of the clamp: six sigma above white."""
        return 255 - self.lowest

    def table(self, device: torch.device | str = "cpu") -> Tensor:
        """k / 255 rounded to float32 for k = lowest..highest, the same bits on every device."""
        values = torch.arange(self.lowest, self.highest + 1, dtype=torch.float64, device="cpu") / 255
        return values.float().to(device)

    def fill(self, out: Tensor, key: int) -> None:
        """Fill `out` (int16, contiguous) with noise that depends on `key` (64 bits) alone.

        CPU and CUDA draw different numbers from the same distribution. Other devices get the numbers of the CPU,
        because it is not known how many random bits their generators give.
        """
        if out.dtype != torch.int16:
            raise ValueError(f"expected int16, got {out.dtype}")
        if out.device.type == "cuda":
            generator = torch.Generator(out.device).manual_seed(key)
            _draw_torch(out.view(-1), _threshold_tensor(self.sigma, out.device), generator)
            return
        drawn = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype, device="cpu")
        _draw_numpy(drawn.view(-1).numpy(), _law(self.sigma), np.random.SFC64(key))
        if drawn is not out:
            out.copy_(drawn)

    def noisy_floats(self, images: Tensor, noise: Tensor, table: Tensor) -> Tensor:
        """The input of the network: `images` (integers 0..255) plus `noise`, clamped, looked up in `table`.

        The shapes broadcast. Only integers are added, so the result is a function of x + K alone.
        """
        if images.is_floating_point() or noise.is_floating_point() or images.dtype == torch.uint8:
            raise ValueError(f"expected signed integers, got images {images.dtype} and noise {noise.dtype}")
        index = torch.add(images, noise).clamp_(self.lowest, self.highest).sub_(self.lowest)
        return table.index_select(0, index.view(-1).int()).view(index.shape)


def pixels(images: Tensor) -> Tensor:
    """The bytes (int16) of float32 `images` in [0, 1]; a RequestError if a value is not k / 255 in float32.

    Equality is exact, because a value between two bytes is a different image than the one that would be certified.
    """
    if images.dtype != torch.float32:
        raise RequestError(f"images: expected float32 made from bytes, got {images.dtype}")
    grid = (torch.arange(256, dtype=torch.float64, device="cpu") / 255).float().to(images.device)
    nearest = images.mul(255).round().nan_to_num(0.0).clamp(0, 255).to(torch.int32)
    on_grid = grid.index_select(0, nearest.view(-1)).view(images.shape) == images
    if not bool(on_grid.all()):
        value = float(images[~on_grid][0])
        raise RequestError(
            f"images: expected bytes divided by 255 (k/255, correctly rounded to float32), got {value:.9g}; "
            "integer noise certifies byte images only"
        )
    return nearest.to(torch.int16)


@dataclass(frozen=True, eq=False)
class _Law:
    """Distribution of the drawn noise, computed once per sigma."""

    reach: int
    """The largest noise: beyond it every threshold rounds to 0 or to 2^62."""
    thresholds: np.ndarray
    """2^62 P(K <= j) for j = -reach..reach - 1, each rounded to the nearest integer. Symmetric, as the noise is."""
    error: float
    """Upper bound on the total variation of one pixel."""
    answers: np.ndarray
    """Noise for each value of the top 16 bits of a uniform where they decide it, else _UNDECIDED."""


@lru_cache(maxsize=16)
def _law(sigma: float) -> _Law:
    with localcontext(prec=_DIGITS):
        scale = 255 * Decimal(sigma)
        unit = Decimal(2**BITS)
        above: list[Decimal] = []  # 2^62 P(K > j) for j = 0, 1, ... until it rounds to 0
        rounded: list[int] = []  # the same, rounded to the nearest integer
        while not rounded or rounded[-1] > 0:
            above.append(unit * _normal_tail((len(above) + Decimal("0.5")) / scale))
            rounded.append(int(above[-1].to_integral_value()))
        reach = len(above) - 1
        off = [exact - drawn for exact, drawn in zip(above, rounded, strict=True)]
        # P(K = j) is off by off[j-1] - off[j] for j = 1..reach, P(K = 0) by 2 off[0], and nothing is drawn beyond
        # reach. Both signs of j are alike and total variation is half of the sum: hence no factor 2 below.
        total = abs(off[0]) + sum(abs(a - b) for a, b in pairwise(off)) + above[-1]
        error = math.nextafter(float(total / unit + _DIGITS_ERROR), math.inf)
    thresholds = np.array(rounded[:reach][::-1] + [2**BITS - t for t in rounded[:reach]], dtype=np.int64)
    first = np.arange(1 << _HEAD_BITS, dtype=np.int64) << _TAIL_BITS
    low, high = (_search(thresholds, end) for end in (first, first + ((1 << _TAIL_BITS) - 1)))
    return _Law(reach, thresholds, error, np.where(low == high, low, _UNDECIDED).astype(np.int16))


def _search(thresholds: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Noise for 62-bit uniforms, by binary search: K <= j exactly if the uniform is below P(K <= j) 2^62."""
    return np.searchsorted(thresholds, uniforms, side="right") - len(thresholds) // 2


def _normal_tail(z: Decimal) -> Decimal:
    """P(N(0, 1) > z) for z > 0, in the context's 60 digits: the absolute error is below 1e-55 (120 bits: 1e-36).

    1/2 - phi(z) (z + z^3/3 + z^5/(3 5) + ...): all terms have one sign and their sum is below 1/2, so rounding adds
    up to at most a few hundred times 1e-60. Where the sum stops, each term is less than half of the one before it, so
    the omitted terms weigh less than the last one.
    """
    if z > 20:  # the tail is below 1e-88
        return Decimal(0)
    square = z * z
    odd = 1
    term = total = z * (-square / 2).exp() / (2 * _PI).sqrt()
    while term > _LAST_TERM or odd < 2 * square:
        odd += 2
        term = term * square / odd
        total += term
    return Decimal("0.5") - total


def _draw_numpy(out: np.ndarray, law: _Law, source: np.random.SFC64) -> None:
    """Noise from 62-bit uniforms whose lower 46 bits are drawn only where the upper 16 leave the answer open.

    The distribution is that of drawing all bits: bits that cannot change the answer need not exist.
    """
    for start in range(0, len(out), _CPU_CHUNK):
        chunk = out[start : start + _CPU_CHUNK]
        words = source.random_raw(-(-len(chunk) // 4)).astype("<u8", copy=False)
        _place(chunk, law, words.view("<u2")[: len(chunk)], source)


def _place(out: np.ndarray, law: _Law, heads: np.ndarray, source: np.random.SFC64) -> None:
    out[:] = law.answers.take(heads)
    undecided = np.flatnonzero(out == _UNDECIDED)
    tails = (source.random_raw(len(undecided)) >> np.uint64(64 - _TAIL_BITS)).astype(np.int64)
    out[undecided] = _search(law.thresholds, (heads[undecided].astype(np.int64) << _TAIL_BITS) | tails)


@lru_cache(maxsize=16)
def _threshold_tensor(sigma: float, device: torch.device) -> Tensor:
    return torch.from_numpy(_law(sigma).thresholds).to(device)


def _draw_torch(out: Tensor, thresholds: Tensor, generator: torch.Generator) -> None:
    """Noise by torch, whose integers below a bound of at least 2^32 are 64 random bits modulo it: exact here."""
    reach = len(thresholds) // 2
    for chunk in torch.split(out, _CUDA_CHUNK):
        uniforms = torch.randint(0, 2**BITS, chunk.shape, generator=generator, device=out.device)
        chunk.copy_(torch.searchsorted(thresholds, uniforms, right=True, out_int32=True).sub_(reach))
