"""Images and labels as they are in the files of a data set, read without torch."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StoredImages(NamedTuple):
    """One split: `images` uint8 [n, c, h, w], `labels` int64 [n]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    name: str
    class_names: tuple[str, ...] = ()
