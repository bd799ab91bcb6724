"""Seeds that are derived from the seed of a recipe."""

import numpy as np


def derived_seed(seed: int, *parts: int) -> int:
    """An independent seed for each purpose of a run."""
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0] >> np.uint64(1))
