"""The bundled sample of MNIST: its first 10,000 training and first 2,000 test images, for work without a network."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from smoothcert.data.images import ImageData, Split
from smoothcert.errors import WorkError

ARCHIVE = Path(__file__).with_name("mnist_sample.npz")  # <split>_images uint8 [n, 28, 28], <split>_labels uint8 [n]
SHAPE = (1, 28, 28)
NUM_CLASSES = 10


def load(split: Split, archive: Path = ARCHIVE) -> ImageData:
    """One split of the sample, images [n, 1, 28, 28]: equal to the beginning of the same split of MNIST."""
    try:
        with np.load(archive, allow_pickle=False) as arrays:
            images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise WorkError(
            f"{archive}: expected the bundled MNIST sample, found a missing or damaged file ({error}); "
            "install smoothcert again"
        ) from error
    return ImageData(
        images=torch.from_numpy(images).unsqueeze(1),
        labels=torch.from_numpy(labels).to(torch.int64),
        num_classes=NUM_CLASSES,
        name="mnist-sample",
        split=split,
    )
