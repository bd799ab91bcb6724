"""The two generators of normal numbers on a CPU, written a second time, in float64, from their definitions."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

CHUNK = 16_384


def ziggurat(key: int, count: int) -> NDArray[np.float64]:
    """`count` numbers of N(0, 1): numpy's own normal numbers in float32 from the generator SFC64 with `key`."""
    return np.random.Generator(np.random.SFC64(key)).standard_normal(count, dtype=np.float32).astype(np.float64)


def box_muller(key: int, count: int) -> NDArray[np.float64]:
    """`count` numbers of N(0, 1) in chunks of 16,384: the first half of a chunk are the cosines, the rest the sines.

    A chunk of c numbers takes h = ceil(c / 2) words of 64 bits, read as 2 h words of 32 bits, lowest bits first: the
    first h give the radii sqrt(-2 ln u) with u = (floor(word / 2) + 1/2) / 2^31, the others the angles pi word / 2^31
    with a signed word.
    """
    bits = np.random.SFC64(key)
    numbers: list[float] = []
    while len(numbers) < count:
        chunk = min(CHUNK, count - len(numbers))
        half = math.ceil(chunk / 2)
        words = [part for word in bits.random_raw(half).tolist() for part in (word % 2**32, word // 2**32)]
        radii = [math.sqrt(-2 * math.log((word // 2 + 0.5) / 2**31)) for word in words[:half]]
        angles = [math.pi * (word - 2**32 if word >= 2**31 else word) / 2**31 for word in words[half:]]
        cosines = [r * math.cos(t) for r, t in zip(radii, angles, strict=True)]
        sines = [r * math.sin(t) for r, t in zip(radii, angles, strict=True)]
        numbers += (cosines + sines)[:chunk]
    return np.array(numbers)


GENERATORS: dict[str, Callable[[int, int], NDArray[np.float64]]] = {
    "sfc64, ziggurat": ziggurat,
    "sfc64, box-muller": box_muller,
}
"""By the name that certificates files give them."""
