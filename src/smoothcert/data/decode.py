"""One image file as unsigned bytes [c, h, w]: decoded with Pillow, scaled and cropped.

JPEG files may be decoded at 1/2, 1/4 or 1/8 of their size ("draft"), which is faster; the scale is chosen so that the
result is still at least as large as what is cut out of it.
"""

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from smoothcert.errors import WorkError

Pixels = NDArray[np.uint8]
"""[c, h, w]"""

SCALE = (0.08, 1.0)  # area of a random crop, as a fraction of the image
RATIO = (3 / 4, 4 / 3)  # width over height of a random crop
ATTEMPTS = 10
JPEG_SCALES = (8, 4, 2, 1)
WIDE_MODES = ("I", "F")  # 16 and 32 bits a channel: Pillow would clip these, not scale them


@dataclass(frozen=True, slots=True)
class Decoder:
    """How files become images of `channels` (1 grey, 3 RGB) x `height` x `width`."""

    channels: int
    height: int
    width: int
    shorter_side: int | None
    """What the shorter side is scaled to before the centre is cut out; None: files have the right size already."""
    draft: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    def centre(self, path: Path) -> Pixels:
        """The shorter side scaled to `shorter_side`, then the central height x width. The same for every call."""
        with opened_image(path) as image:
            if self.shorter_side is None:
                if image.size != (self.width, self.height):
                    expected, found = f"{self.width}x{self.height}", f"{image.width}x{image.height}"
                    raise WorkError(
                        f"{path}: expected an image of {expected} pixels, found {found}; give an image size"
                    )
                return self._pixels(image)
            short = min(image.size)
            target = [self.shorter_side if side == short else self.shorter_side * side // short for side in image.size]
            box = (0.0, 0.0, *self._decoded_size(image, (target[0], target[1])))
            scaled = self._coloured(image).resize((target[0], target[1]), Image.Resampling.BILINEAR, box=box)
            left, top = round((scaled.width - self.width) / 2), round((scaled.height - self.height) / 2)
            return self._pixels(scaled.crop((left, top, left + self.width, top + self.height)))

    def random(self, path: Path, generator: np.random.Generator) -> Pixels:
        """A random part of the image scaled to height x width, mirrored with probability 1/2."""
        with opened_image(path) as image:
            width, height = image.size
            left, top, right, bottom = random_box(width, height, generator)
            mirrored = generator.random() < 0.5
            scale = min((right - left) // self.width, (bottom - top) // self.height)
            scale = next(known for known in JPEG_SCALES if known <= max(1, scale))
            decoded_width, decoded_height = self._decoded_size(image, (width // scale, height // scale))
            across, down = decoded_width / width, decoded_height / height
            box = (left * across, top * down, right * across, bottom * down)
            outer = (math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3]))
            inner = (box[0] - outer[0], box[1] - outer[1], box[2] - outer[0], box[3] - outer[1])
            # Cut first: scaling a box of the whole would let what lies around it shine in at the borders.
            part = self._coloured(image.crop(outer))
            part = part.resize((self.width, self.height), Image.Resampling.BILINEAR, box=inner)
            return self._pixels(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else part)

    def _decoded_size(self, image: Image.Image, at_least: tuple[int, int]) -> tuple[float, float]:
        """Ask for a smaller decoding of at least that size; what the original width and height become in it.

        Not whole numbers: 130 rows at 1/4 are 32.5, and the 33rd that is decoded is half filled with padding.
        """
        drafted = image.draft(None, at_least) if self.draft else None
        return (drafted[1][2], drafted[1][3]) if drafted is not None else (image.width, image.height)

    def _coloured(self, image: Image.Image) -> Image.Image:
        mode = "L" if self.channels == 1 else "RGB"
        return image if image.mode == mode else image.convert(mode)

    def _pixels(self, image: Image.Image) -> Pixels:
        pixels = np.asarray(self._coloured(image)).reshape(self.height, self.width, self.channels)
        return np.array(pixels.transpose(2, 0, 1), order="C")  # a copy: what Pillow lends is read-only


def random_box(width: int, height: int, generator: np.random.Generator) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a random part: area uniform in SCALE, ratio log-uniform in RATIO.

    Inception's crop (Szegedy et al. 2015) as all ImageNet training of this field uses it: a part that does not fit
    is drawn again, and after ten attempts the largest central part with an allowed ratio is taken.
    """
    for _ in range(ATTEMPTS):
        area = width * height * generator.uniform(*SCALE)
        ratio = math.exp(generator.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left = int(generator.integers(width - across + 1))
            top = int(generator.integers(height - down + 1))
            return left, top, left + across, top + down
    across, down = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    across, down = max(1, across), max(1, down)
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


@contextmanager
def opened_image(path: Path) -> Iterator[Image.Image]:
    """The image file `path`; whatever Pillow finds wrong with it, then or later, becomes one line that names it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata and large images are not what a user asked about
            with Image.open(path) as image:
                if image.mode.split(";")[0] in WIDE_MODES:
                    raise WorkError(
                        f"{path}: expected 8 bits a channel, found Pillow mode {image.mode}; convert the file to 8 bits"
                    )
                yield image
    except FileNotFoundError:
        raise WorkError(f"{path}: expected an image file, found none; restore it or read the folder again") from None
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        size = f"{os.path.getsize(path)} bytes" if path.is_file() else "no file"
        problem = " ".join(str(error).replace(f"{str(path)!r}", "the file").split())
        raise WorkError(
            f"{path}: expected a whole image, found {size} that cannot be decoded ({problem}); replace or delete it"
        ) from None
