"""Noise families. A noise owns its sampling and its certificate: which radius, in which norm, follows from p.

Gaussian: Cohen et al. 2019, https://arxiv.org/abs/1902.02918
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy import special
from torch import Tensor

from smoothcert.bounds import SAFETY
from smoothcert.errors import RequestError


def fill_standard_normal(out: Tensor, key: int) -> None:
    """Fill `out` (float32, contiguous) with N(0, 1) drawn from `key` (64 bits) alone.

    On the CPU by numpy: its generator takes the whole key (torch's CPU generator takes 32 bits of it, so blocks
    would repeat in a large run) and is several times faster. On other devices by torch's counter-based generator.
    The two give different numbers: which one was used follows from the device in a certificates file.
    """
    if out.device.type == "cpu":
        np.random.Generator(np.random.SFC64(key)).standard_normal(out=out.numpy(), dtype=np.float32)
    else:
        out.normal_(generator=torch.Generator(out.device).manual_seed(key))


@dataclass(frozen=True, slots=True)
class Gaussian:
    """N(0, sigma^2 I): certifies an L2 ball."""

    sigma: float
    name: ClassVar[str] = "gaussian"
    norm: ClassVar[str] = "L2"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise RequestError(f"sigma: expected a number > 0, got {self.sigma}")

    def sample(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Independent noise, float32, of `shape`, on the generator's device."""
        return torch.randn(tuple(shape), generator=generator, device=generator.device).mul_(self.sigma)

    def fill(self, out: Tensor, key: int) -> None:
        """Fill `out` with noise that depends on `key` alone."""
        fill_standard_normal(out, key)
        out.mul_(self.sigma)

    def radius(self, q: float) -> float:
        """The L2 radius sigma * Phi^-1(1 - q) that follows from p >= 1 - q, rounded toward zero; 0 for q >= 1/2."""
        if not 0 < q <= 1:
            raise ValueError(f"expected 0 < q <= 1, got {q}")
        if q >= 0.5:
            return 0.0
        return self.sigma * -float(special.ndtri(q)) * (1 - SAFETY)

    def error_at(self, radius: float) -> float:
        """The q at which `radius` is certified: the inverse of `radius`."""
        return float(special.ndtr(-radius / self.sigma))
