"""Noise that a certificate may rest on in finite arithmetic: integers are added, floats are only looked up.

A float sum x + delta is not a shift of delta: its low bits depend on x, a network can read them, and then the radius
is false (Voracek & Hein, ICLR 2023). Here pixels are the integers 0..255, the noise K is the Gaussian rounded to
integers, the sum is an integer, and the float that the network sees is a function of that integer alone.

**Why the Gaussian radius holds.** Let Z ~ N(0, (255 sigma)^2) for each pixel and K = round(Z). For an integer pixel x,
x + round(Z) = round(x + Z): the noisy integer is the continuous Gaussian, centred at x, and then rounded. Rounding,
the clamp, the table, the normalisation and the network are one fixed function F of a point of R^d, so the smoothed
classifier is

    g(x) = argmax_c P(f(table[clamp(x + K)]) = c) = argmax_c P(F(x + Z) = c),

which is smoothing of F by an exact continuous Gaussian. The Neyman-Pearson argument needs nothing of F but that it is
measurable: if P(F(x + Z) = A) >= p_low > 1/2 then g(x') = A whenever ||x' - x||_2 < 255 sigma Phi^-1(p_low) in units of
bytes, that is sigma Phi^-1(p_low) for pixels in [0, 1]. It speaks of every x' whose pixels are bytes, which is every
image that can be handed to the classifier: between bytes x + K is not defined.

**What the sampler loses.** K has infinite support and probabilities that are no multiples of 2^-62. The drawn K' is
closer to K than `total_variation` in total variation, over all pixels of an image. One vote's probability of A
therefore moves by at most that much, and p_low - slack bounds P(F(x + Z) = A) from below. What remains an assumption,
as everywhere in sampling, is that the generator's bits are uniform and independent.

The clamp to six sigma around [0, 255] loses nothing: it acts on the sum, after the noise, and so belongs to F. It must
never act on the noise, whose own support therefore goes on until its probabilities fall below 2^-63.
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

BITS = 62
"""Bits of a uniform: the most that fits a signed 64-bit integer with room for 2^BITS itself."""
SLACK = 1e-10
"""What is taken off p_low (added to q): more than the total variation of every image that `slack` lets pass."""
LARGEST_SIGMA = 8.0
"""Up to here noise plus a pixel stays below 2^15, so that sums of 16-bit integers cannot wrap around."""

_DIGITS = 60
_DIGITS_ERROR = Decimal("1e-45")  # far above what rounding to 60 digits adds up to in any sum below
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

    @property
    def reach(self) -> int:
        """Noise lies in -reach..reach: beyond, every threshold rounds to 0 or to 2^62."""
        return _law(self.sigma).reach

    @property
    def thresholds(self) -> tuple[int, ...]:
        """2^62 P(K <= j) for j = -reach..reach - 1, each to the nearest integer. Symmetric: so is the noise."""
        return _law(self.sigma).thresholds

    def total_variation(self, num_pixels: int) -> float:
        """An upper bound on the total variation between drawn and ideal noise on `num_pixels` values.

        One pixel's is half the sum of |drawn - ideal| over all integers, evaluated from the thresholds themselves
        (tails included) with 60 digits; a product of independent pixels adds them up at most.
        """
        return math.nextafter(num_pixels * _law(self.sigma).error, math.inf)

    def slack(self, num_pixels: int) -> float:
        """What p_low must give up for images of `num_pixels` values (colours counted): SLACK, or a refusal."""
        if self.total_variation(num_pixels) > SLACK:
            raise RequestError(
                f"integer noise of sigma {self.sigma:g} is exact to {self.total_variation(num_pixels):.1e} on "
                f"{num_pixels} values, expected at most {SLACK:g}; use smaller images or a smaller sigma"
            )
        return SLACK

    @property
    def lowest(self) -> int:
        """The clamp's lower end: six sigma below black."""
        return -math.ceil(6 * 255 * self.sigma)

    @property
    def highest(self) -> int:
        """The clamp's upper end: six sigma above white."""
        return 255 - self.lowest

    def table(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """k / 255 rounded to `dtype` for k = lowest..highest, the same bits on every device."""
        values = torch.arange(self.lowest, self.highest + 1, dtype=torch.float64) / 255
        return values.to(dtype).to(device)

    def fill(self, out: Tensor, key: int) -> None:
        """Fill `out` (int16 or int32, contiguous) with noise that depends on `key` (64 bits) alone.

        CPU and CUDA give different numbers of the same law. Other devices get what the CPU draws, since nothing is
        known of how many random bits their generators give.
        """
        if out.dtype not in (torch.int16, torch.int32):
            raise ValueError(f"expected int16 or int32, got {out.dtype}")
        if out.device.type == "cuda":
            generator = torch.Generator(out.device).manual_seed(key)
            _draw_torch(out.view(-1), _threshold_tensor(self.sigma, out.device), generator)
            return
        drawn = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
        _draw_numpy(drawn.view(-1).numpy(), _guide(self.sigma), np.random.SFC64(key))
        if drawn is not out:
            out.copy_(drawn)

    def noisy_floats(self, images: Tensor, noise: Tensor, table: Tensor) -> Tensor:
        """The network's input: `images` (integers 0..255) plus `noise`, clamped, looked up in `table`.

        The shapes broadcast. Nothing but integers is added, so the result is a function of x + K alone.
        """
        if images.is_floating_point() or noise.is_floating_point() or images.dtype == torch.uint8:
            raise ValueError(f"expected signed integers, got images {images.dtype} and noise {noise.dtype}")
        index = torch.add(images, noise).clamp_(self.lowest, self.highest).sub_(self.lowest)
        return table.index_select(0, index.view(-1).int()).view(index.shape)


def pixels(images: Tensor) -> Tensor:
    """The bytes (int16) behind float32 `images` in [0, 1]; a RequestError if one value is not k / 255 in float32.

    Exact equality, because a value beside the grid is a different image, which the certificate would not be about.
    """
    if images.dtype != torch.float32:
        raise RequestError(f"images: expected float32 made from bytes, got {images.dtype}")
    grid = (torch.arange(256, dtype=torch.float64) / 255).float().to(images.device)
    nearest = images.mul(255).round().nan_to_num(0.0).clamp(0, 255).to(torch.int32)
    on_grid = grid.index_select(0, nearest.view(-1)).view(images.shape) == images
    if not bool(on_grid.all()):
        value = float(images[~on_grid][0])
        raise RequestError(
            f"images: expected bytes divided by 255 (k/255, correctly rounded to float32), got {value:.9g}; "
            "integer noise certifies byte images only"
        )
    return nearest.to(torch.int16)


@dataclass(frozen=True)
class _Law:
    """What is computed once for a sigma; `error` bounds one pixel's total variation from above."""

    reach: int
    thresholds: tuple[int, ...]
    error: float


@lru_cache(maxsize=16)
def _law(sigma: float) -> _Law:
    with localcontext(prec=_DIGITS):
        scale = 255 * Decimal(sigma)
        unit = Decimal(2**BITS)
        above: list[Decimal] = []  # 2^62 P(K > j), and to the nearest integer, for j = 0, 1, ... until it rounds to 0
        rounded: list[int] = []
        while not rounded or rounded[-1] > 0:
            above.append(unit * _normal_tail((len(above) + Decimal("0.5")) / scale))
            rounded.append(int(above[-1].to_integral_value()))
        reach = len(above) - 1
        off = [exact - drawn for exact, drawn in zip(above, rounded, strict=True)]
        # P(K = j) is off by off[j-1] - off[j] for j = 1..reach, P(K = 0) by 2 off[0], and beyond reach nothing is
        # drawn. Both signs of j are alike and total variation is half of the sum: hence no factor 2 below.
        total = abs(off[0]) + sum(abs(a - b) for a, b in pairwise(off)) + above[-1]
        error = math.nextafter(float(total / unit + _DIGITS_ERROR), math.inf)
    upper = [2**BITS - t for t in rounded[:reach]]
    return _Law(reach, tuple(rounded[reach - 1 :: -1] + upper) if reach else (), error)


def _normal_tail(z: Decimal) -> Decimal:
    """P(N(0, 1) > z) for z > 0, in the context's 60 digits: the absolute error is below 1e-55 (120 bits: 1e-36).

    1/2 - phi(z) (z + z^3/3 + z^5/(3 5) + ...): all terms have one sign and their sum is below 1/2, so rounding can
    only add up to a few hundred times 1e-60. Where the sum stops each term is less than half the one before, so less
    than the last term is left out.
    """
    if z > 20:  # the tail is below 1e-88
        return Decimal(0)
    square, odd = z * z, 1
    term = total = z * (-square / 2).exp() / (2 * _PI).sqrt()
    while term > _LAST_TERM or odd < 2 * square:
        odd += 2
        term = term * square / odd
        total += term
    return Decimal("0.5") - total


@dataclass(frozen=True, eq=False)
class _Guide:
    """The answer for each value of a uniform's top 16 bits where they settle it, else _UNDECIDED."""

    answers: np.ndarray
    thresholds: np.ndarray
    reach: int

    def exact(self, uniforms: np.ndarray) -> np.ndarray:
        """Noise for 62-bit uniforms, by binary search: K <= j exactly where the uniform is below P(K <= j) 2^62."""
        return np.searchsorted(self.thresholds, uniforms, side="right") - self.reach


@lru_cache(maxsize=16)
def _guide(sigma: float) -> _Guide:
    law = _law(sigma)
    plain = _Guide(np.empty(0), np.array(law.thresholds, dtype=np.int64), law.reach)
    first = np.arange(1 << _HEAD_BITS, dtype=np.int64) << _TAIL_BITS
    low, high = plain.exact(first), plain.exact(first + ((1 << _TAIL_BITS) - 1))
    answers = np.where(low == high, low, _UNDECIDED).astype(np.int16)
    return _Guide(answers, plain.thresholds, law.reach)


def _draw_numpy(out: np.ndarray, guide: _Guide, source: np.random.SFC64) -> None:
    """Noise from 62-bit uniforms of which the lower 46 bits are drawn only where the upper 16 leave it open.

    That is the same law as drawing all of them: bits that cannot change the answer need not exist.
    """
    for start in range(0, len(out), _CPU_CHUNK):
        chunk = out[start : start + _CPU_CHUNK]
        words = source.random_raw(-(-len(chunk) // 4)).astype("<u8", copy=False)
        _place(chunk, guide, words.view("<u2")[: len(chunk)], source)


def _place(out: np.ndarray, guide: _Guide, heads: np.ndarray, source: np.random.SFC64) -> None:
    out[:] = guide.answers.take(heads)
    open_ = np.flatnonzero(out == _UNDECIDED)
    tails = (source.random_raw(len(open_)) >> np.uint64(64 - _TAIL_BITS)).astype(np.int64)
    out[open_] = guide.exact((heads[open_].astype(np.int64) << _TAIL_BITS) | tails)


@lru_cache(maxsize=16)
def _threshold_tensor(sigma: float, device: torch.device) -> Tensor:
    return torch.tensor(_law(sigma).thresholds, dtype=torch.int64, device=device)


def _draw_torch(out: Tensor, thresholds: Tensor, generator: torch.Generator) -> None:
    """Noise by torch, whose integers of a range from 2^32 on are 64 random bits modulo the range: here exact."""
    reach = len(thresholds) // 2
    for chunk in torch.split(out, _CUDA_CHUNK):
        uniforms = torch.randint(0, 2**BITS, chunk.shape, generator=generator, device=out.device)
        chunk.copy_(torch.searchsorted(thresholds, uniforms, right=True, out_int32=True).sub_(reach))
