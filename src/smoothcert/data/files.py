"""Single image files as a batch, for predictions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from smoothcert.errors import RequestError


def read_image_files(paths: Sequence[Path], shape: tuple[int, int, int], *, resize: bool = False) -> Tensor:
    """The images as float32 [n, c, h, w] in [0, 1]; grey or RGB as `shape` (c, h, w) asks."""
    return torch.stack([_read(path, shape, resize) for path in paths])


def _read(path: Path, shape: tuple[int, int, int], resize: bool) -> Tensor:
    channels, height, width = shape
    try:
        with Image.open(path) as file:
            image = file.convert("L" if channels == 1 else "RGB")
    except FileNotFoundError as error:
        raise RequestError(f"{path}: no such file; give an image file") from error
    except (OSError, UnidentifiedImageError) as error:
        raise RequestError(f"{path}: expected an image file, got something else ({error})") from error
    if image.size != (width, height):
        if not resize:
            raise RequestError(
                f"{path}: expected an image of {width}x{height} pixels, got {image.width}x{image.height}; "
                "scale it, or pass --resize"
            )
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float32).reshape(height, width, channels) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
