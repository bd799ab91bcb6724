"""Synthetic photographs: smooth coloured waves, which JPEG preserves well, a different picture for every number."""

import io
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image


def photograph(number: int, width: int, height: int) -> Image.Image:
    across, down = np.meshgrid(np.linspace(0, 3, width), np.linspace(0, 3, height))
    phases = np.random.default_rng(number).uniform(0, 6, (3, 2))
    planes = [127 + 60 * np.sin(2 * across + a) + 60 * np.cos(3 * down + b) for a, b in phases]
    return Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8))


def write_photograph(path: Path, number: int, width: int = 60, height: int = 40, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_encoded(path.suffix.lower(), number, width, height, mode))
    return path


@cache
def _encoded(suffix: str, number: int, width: int, height: int, mode: str) -> bytes:
    file, kind = io.BytesIO(), Image.registered_extensions()[suffix]
    photograph(number, width, height).convert(mode).save(file, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return file.getvalue()
