"""Noise families: how each one is sampled, and which radius, in which norm, it certifies.

All are scaled to have the standard deviation `sigma` in each pixel.
Gaussian: Cohen et al. 2019, https://arxiv.org/abs/1902.02918; Laplace and uniform: Yang et al. 2020,
https://arxiv.org/abs/2002.08118.
"""

from __future__ import annotations

import math
import platform
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from smoothcert.errors import RequestError

if TYPE_CHECKING:  # certificates are read without torch
    import torch
    from torch import Tensor

SAFETY = 1e-12
"""Relative margin of bounds and radii: many times the rounding of a few float64 operations."""
HIDING_SIGMA = 2.0
"""Noise above this level hides any image in [0, 1]; in units of 0..255 it is almost invisible."""
VECTOR_MATHEMATICS = platform.machine().lower() in ("x86_64", "amd64")
"""True where numpy computes logarithms, sines and cosines in vector registers: there the Box-Muller method is nearly
three times as fast as numpy's normal numbers; elsewhere it is slower."""
BOX_MULLER_CHUNK = 16_384
"""Number of values that stay in the cache of a core while they are computed."""


def sigma_warning(sigma: float) -> str | None:
    """A warning about a sigma that is probably in units of 0..255, for images in [0, 1]; None for other sigmas."""
    if sigma <= HIDING_SIGMA:
        return None
    return (
        f"sigma {sigma:g} hides images in [0, 1] completely; if it is meant for pixels in 0..255, give "
        f"{sigma:g}/255 = {sigma / 255:.3g}"
    )


def checked_sigma(sigma: object) -> float:
    """The noise level as a float: any number above 0, also of numpy or torch, but no text and no truth value."""
    try:
        number = math.nan if isinstance(sigma, str | bytes | bool) else float(sigma)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise RequestError(f"sigma: expected a number > 0, got {sigma!r}")
    return number


def fill_by_box_muller(out: NDArray[np.float32], bits: np.random.BitGenerator, sigma: float) -> None:
    """Fill `out` (1-D, contiguous) with independent N(0, sigma^2): sigma sqrt(-2 ln u) (cos t, sin t), u and t uniform.

    u is a multiple of 2^-32 and at least that: no number is larger than 6.66 sigma, which a true normal exceeds once in
    3.6e10 draws.
    """
    for start in range(0, len(out), BOX_MULLER_CHUNK):
        part = out[start : start + BOX_MULLER_CHUNK]
        half = -(-len(part) // 2)
        words = bits.random_raw(half).view(np.uint32)
        radius = (words[:half] >> np.uint32(1)).view(np.int32).astype(np.float32)
        radius += np.float32(0.5)
        radius *= np.float32(2.0**-31)
        np.log(radius, out=radius)
        radius *= np.float32(-2 * sigma**2)
        np.sqrt(radius, out=radius)
        angle = words[half:].view(np.int32).astype(np.float32)
        angle *= np.float32(math.pi * 2.0**-31)
        np.multiply(radius, np.cos(angle), out=part[:half])
        rest = len(part) - half
        np.multiply(radius[:rest], np.sin(angle[:rest]), out=part[half:])


@dataclass(frozen=True, slots=True)
class Noise(ABC):
    """A family of noise: independent in each pixel, with a radius that follows from an error bound.

    `fill` draws from a 64-bit key alone. On the CPU numpy draws: its generator takes the whole key (torch's takes 32
    bits of it, so blocks would repeat in a large run) and is faster. On other devices torch's counter-based generator
    draws. They give different numbers: a certificates file records the method as `draws`.
    """

    sigma: float
    name: ClassVar[str]
    norm: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigma", checked_sigma(self.sigma))

    def sample(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Independent noise, float32, of `shape`, on the generator's device."""
        import torch

        out = torch.empty(tuple(shape), device=generator.device, dtype=torch.float32)
        self._draw(out, generator)
        return out

    def fill(self, out: Tensor, key: int) -> None:
        """Fill `out` (float32, contiguous) with noise that depends on `key` alone."""
        if out.device.type == "cpu":
            self._draw_numpy(out.numpy(), np.random.Generator(np.random.SFC64(key)))
        else:
            import torch

            self._draw(out, torch.Generator(out.device).manual_seed(key))

    def radius(self, q: float) -> float:
        """The radius, in `norm`, that follows from p >= 1 - q, rounded toward zero; 0 for q >= 1/2."""
        if not 0 < q <= 1:
            raise ValueError(f"expected 0 < q <= 1, got {q}")
        return 0.0 if q >= 0.5 else self.sigma * self._unit_radius(q) * (1 - SAFETY)

    @staticmethod
    def draws(device: torch.device) -> str:
        """Name of the method by which `fill` draws on `device`."""
        if device.type != "cpu":
            return "philox"
        return "sfc64, box-muller" if VECTOR_MATHEMATICS else "sfc64, ziggurat"

    @abstractmethod
    def _unit_radius(self, q: float) -> float:
        """The radius at sigma = 1, for q < 1/2."""

    @abstractmethod
    def error_at(self, radius: float) -> float:
        """The q at which `radius` is certified: the inverse of `radius`."""

    @abstractmethod
    def _draw(self, out: Tensor, generator: torch.Generator) -> None: ...

    @abstractmethod
    def _draw_numpy(self, out: NDArray[np.float32], generator: np.random.Generator) -> None: ...


class Gaussian(Noise):
    """N(0, sigma^2 I): certifies an L2 ball of radius sigma * Phi^-1(p)."""

    name: ClassVar[str] = "gaussian"
    norm: ClassVar[str] = "L2"

    def _draw(self, out: Tensor, generator: torch.Generator) -> None:
        out.normal_(0, self.sigma, generator=generator)

    def _draw_numpy(self, out: NDArray[np.float32], generator: np.random.Generator) -> None:
        if VECTOR_MATHEMATICS:
            fill_by_box_muller(out.reshape(-1), generator.bit_generator, self.sigma)
        else:
            generator.standard_normal(out=out, dtype=np.float32)
            out *= np.float32(self.sigma)

    def _unit_radius(self, q: float) -> float:
        return -float(special.ndtri(q))

    def error_at(self, radius: float) -> float:
        return float(special.ndtr(-radius / self.sigma))

    def radius_between(self, q: float, runner_up: float) -> float:
        """The radius sigma / 2 (Phi^-1(1 - q) - Phi^-1(runner_up)) that follows from p_A >= 1 - q, p_B <= runner_up.

        0 if the two bounds do not separate. Where the two quantiles nearly cancel, their rounding can exceed SAFETY:
        use it for bounds that were raised by more than that, as those of `bounds` are.
        """
        if not (0 < q <= 1 and 0 < runner_up <= 1):
            raise ValueError(f"expected probabilities in (0, 1], got {q} and {runner_up}")
        gap = -float(special.ndtri(q)) - float(special.ndtri(runner_up))
        return max(0.0, self.sigma / 2 * gap * (1 - SAFETY))


class Laplace(Noise):
    """Laplace noise of scale b = sigma / sqrt(2): certifies an L1 ball of radius -b ln(2 (1 - p))."""

    name: ClassVar[str] = "laplace"
    norm: ClassVar[str] = "L1"

    @property
    def scale(self) -> float:
        return self.sigma / math.sqrt(2)

    def _draw(self, out: Tensor, generator: torch.Generator) -> None:
        # The difference of two exponential variables.
        out.exponential_(generator=generator)
        out.sub_(out.new_empty(out.shape).exponential_(generator=generator)).mul_(self.scale)

    def _draw_numpy(self, out: NDArray[np.float32], generator: np.random.Generator) -> None:
        generator.standard_exponential(out=out, dtype=np.float32)
        out -= generator.standard_exponential(out.shape, dtype=np.float32)
        out *= np.float32(self.scale)

    def _unit_radius(self, q: float) -> float:
        return -math.log(2 * q) / math.sqrt(2)

    def error_at(self, radius: float) -> float:
        return 0.5 * math.exp(-radius / self.scale)


class Uniform(Noise):
    """Uniform noise on [-l, l] with l = sqrt(3) sigma: certifies an L1 ball of radius 2 l (p - 1/2)."""

    name: ClassVar[str] = "uniform"
    norm: ClassVar[str] = "L1"

    @property
    def half_width(self) -> float:
        return math.sqrt(3) * self.sigma

    def _draw(self, out: Tensor, generator: torch.Generator) -> None:
        out.uniform_(-self.half_width, self.half_width, generator=generator)

    def _draw_numpy(self, out: NDArray[np.float32], generator: np.random.Generator) -> None:
        generator.random(out=out, dtype=np.float32)
        out *= np.float32(2 * self.half_width)
        out -= np.float32(self.half_width)

    def _unit_radius(self, q: float) -> float:
        return 2 * math.sqrt(3) * (0.5 - q)

    def error_at(self, radius: float) -> float:
        return max(0.0, 0.5 - radius / (2 * self.half_width))


NOISES: dict[str, type[Noise]] = {kind.name: kind for kind in (Gaussian, Laplace, Uniform)}
