"""Decoding of image files with Pillow into bytes [c, h, w]: turned upright, scaled and cropped.

All commands read files through `Decoder`: `predict`, `serve` and `folder:PATH` give the same pixels, or the same error,
for the same file. EXIF orientation is applied, except for ImageNet, as in the scripts of papers. Transparent parts are
composited on black. Files with more than 8 bits per channel are refused, because their values cannot be represented.
JPEG files are decoded at their full size, as the scripts of papers do: Pillow's faster decoding at 1/2 of it moves
photographs by more than a certified radius.
"""

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import check_regular_file
from smoothcert.io.text import one_line

Pixels = NDArray[np.uint8]
"""[c, h, w]"""

SCALE = (0.08, 1.0)  # area of a random crop, as a fraction of the image
RATIO = (3 / 4, 4 / 3)  # width over height of a random crop
ATTEMPTS = 10
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Supported formats, as Pillow names them. Formats whose bit depth Pillow does not report are left out."""
WIDE_MODES = ("I", "F")  # 16 and 32 bits per channel: Pillow would clip these, not scale them
WIDE_CHANNELS = re.compile(r";(16|32|64)[A-Z]")  # of Pillow's raw modes: RGB;16B has 16 bits, BGR;16 has 5, 6 and 5
GREY_MODES = ("1", "L", "LA", "La")
ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
BLACK = (0, 0, 0, 255)
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The operation that turns an image of each EXIF orientation upright; as in `ImageOps.exif_transpose`, which also
rewrites the metadata and fails on unusual ones."""


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """The content of an image file that is not on disk, with a name for messages."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class ImageHead:
    """The header of a file; `size` is (width, height) of the upright image, `mode` that of Pillow."""

    size: tuple[int, int]
    mode: str
    transparent: bool
    """Whether a pixel is transparent, at least in part."""

    @property
    def grey(self) -> bool:
        return self.mode in GREY_MODES


@dataclass(frozen=True, slots=True)
class Decoder:
    """How files become images of `channels` (1 grey, 3 RGB) x `height` x `width`."""

    channels: int
    height: int
    width: int
    shorter_side: int | None
    """Length of the shorter side after scaling, before the centre is cut out; None: files have the right size."""
    upright: bool = True
    """Whether images are turned as their EXIF orientation says."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    def centre(self, path: Path | ImageBytes) -> Pixels:
        """The central height x width after scaling the shorter side to `shorter_side`; the same in every call.

        If height and width differ, the image is scaled until it just covers that shape.
        """
        with opened_image(path) as opened:
            image = _upright(opened) if self.upright else opened
            if self.shorter_side is None:
                if image.size != (self.width, self.height):
                    raise WorkError(
                        f"{path}: expected an image of {self.width}x{self.height} pixels, got "
                        f"{image.width}x{image.height}; scale it, or give an image size"
                    )
                return self._pixels(image)
            target = self._scaled_size(*image.size)
            scaled = self._coloured(image).resize(target, Image.Resampling.BILINEAR)
            left, top = round((scaled.width - self.width) / 2), round((scaled.height - self.height) / 2)
            return self._pixels(scaled.crop((left, top, left + self.width, top + self.height)))

    def _scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image of `width` x `height` is scaled before the centre is cut out."""
        short = self.shorter_side or 0
        least = min(self.width, self.height)
        across, down = short * self.width // least, short * self.height // least
        if width * down <= height * across:
            return across, height * across // width
        return width * down // height, down

    def random(self, path: Path, generator: np.random.Generator) -> Pixels:
        """A random part of the image scaled to height x width, mirrored with probability 1/2."""
        with opened_image(path) as opened:
            image = _upright(opened) if self.upright else opened
            box = random_box(*image.size, generator)
            mirrored = generator.random() < 0.5
            # Crop first: scaling a box of the whole image would mix in pixels from around the box.
            part = self._coloured(image.crop(box)).resize((self.width, self.height), Image.Resampling.BILINEAR)
            return self._pixels(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else part)

    def _coloured(self, image: Image.Image) -> Image.Image:
        if _has_alpha(image):
            layer = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", layer.size, BLACK), layer)
        mode = "L" if self.channels == 1 else "RGB"
        return image if image.mode == mode else image.convert(mode)

    def _pixels(self, image: Image.Image) -> Pixels:
        pixels = np.asarray(self._coloured(image)).reshape(self.height, self.width, self.channels)
        return np.array(pixels.transpose(2, 0, 1), order="C")  # a copy, because Pillow's array is read-only


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


def image_head(path: Path | ImageBytes) -> ImageHead:
    """Size, mode and transparency of a file; pixels are decoded only if there is an alpha channel to look at."""
    with opened_image(path) as image:
        turned = _orientation(image) >= 5  # by a quarter
        size = image.size[::-1] if turned else image.size
        mode = image.mode
        transparent = _has_alpha(image) and image.convert("RGBA").getchannel("A").getextrema() != (255, 255)
        return ImageHead(size, mode, transparent)


@contextmanager
def opened_image(path: Path | ImageBytes) -> Iterator[Image.Image]:
    """Open an image file; any error in the body, too, becomes a WorkError of one line that names the file."""
    try:
        if isinstance(path, Path):
            check_regular_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual metadata and large images
            with Image.open(path if isinstance(path, Path) else BytesIO(path.content), formats=FORMATS) as image:
                if (depth := _more_than_8_bits(image)) is not None:
                    raise WorkError(f"{path}: expected 8 bits per channel, got more ({depth}); convert the file")
                if image.format == "TIFF":
                    image.load()  # which makes its size the upright one
                yield image
    except WorkError:
        raise
    except RequestError as error:  # the file is wrong, not the request
        raise WorkError(str(error)) from None
    except FileNotFoundError:
        raise WorkError(f"{path}: expected an image file, found none; restore it or read the folder again") from None
    except Image.DecompressionBombError:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise WorkError(f"{path}: expected an image of at most {most:,} pixels, got more; make it smaller") from None
    except Exception as error:  # a damaged file can make Pillow fail in nearly any way
        size = len(path.content) if isinstance(path, ImageBytes) else path.stat().st_size
        problem = one_line(str(error).replace(f"{str(path)!r}", "the file")) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            problem = "not a PNG, JPEG, WebP, BMP, GIF, TIFF or PPM file"
        advice = "send another" if isinstance(path, ImageBytes) else "replace or delete it"
        raise WorkError(
            f"{path}: expected a whole image, found {size} bytes that cannot be decoded ({problem}); {advice}"
        ) from None


def _more_than_8_bits(image: Image.Image) -> str | None:
    """How the file stores more than 8 bits per channel, which Pillow would clip; None if it does not."""
    if image.mode.split(";")[0] in WIDE_MODES:
        return f"Pillow mode {image.mode}"
    for tile in image.tile if isinstance(image, ImageFile.ImageFile) else ():
        arguments = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        raw_mode = arguments[0] if arguments else None
        if isinstance(raw_mode, str) and WIDE_CHANNELS.search(raw_mode):
            return f"Pillow raw mode {raw_mode}"
        if image.format == "PPM" and isinstance(arguments[-1], int) and arguments[-1] > 255:
            return f"values up to {arguments[-1]}"
    return None


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ALPHA_MODES or "transparency" in image.info


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation in the part of the file that has been read: a key of TURNS, or 1 for an upright image."""
    if image.format == "TIFF":
        return 1  # turned by Pillow
    try:
        # The method of the base class, because that of PNG files decodes the pixels.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
        return int(value) if value in TURNS else 1
    except Exception:  # damaged metadata say nothing about the pixels
        return 1


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # metadata may follow the pixels
    turn = _orientation(image)
    return image.transpose(TURNS[turn]) if turn in TURNS else image
