"""Seeds that are derived from the seed of a recipe: one per purpose, so that no two draw the same random numbers."""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What random numbers are for. Results depend on these numbers: never change one, nor use it again."""

    INITIAL_WEIGHTS = 0
    ORDER_AND_NOISE = 1
    AUGMENTATION = 2
    TEST_ACCURACY = 3
    DISCARD_VOTES = 4
    WEIGHT_VOTES = 5
    WEIGHTED_DRAWS = 6
    STATISTICS = 7


def derived_seed(seed: int, *parts: int) -> int:
    """Return an independent seed for each combination of `parts`: the purpose, the epoch, ..."""
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0] >> np.uint64(1))
