"""One decoder: `predict` and `folder:` give the same tensor, or the same error, for every kind of file."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from photographs import photograph
from PIL import Image, ImageOps

from smoothcert.data import load_folder
from smoothcert.data.decoding import Decoder
from smoothcert.data.image_files import read_image_files
from smoothcert.data.images import in_unit_interval
from smoothcert.errors import RequestError, WorkError

WIDTH, HEIGHT, SIDE = 60, 40, 20


def png(bits: int, colour_type: int, rows: bytes) -> bytes:
    """A PNG file of WIDTH x HEIGHT pixels, also of the kinds that Pillow cannot write."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, bits, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def rgb() -> Image.Image:
    return photograph(0, WIDTH, HEIGHT)


def with_alpha(mode: str) -> Image.Image:
    image = rgb().convert(mode)
    image.putalpha(Image.fromarray(np.arange(WIDTH * HEIGHT, dtype=np.uint8).reshape(HEIGHT, WIDTH)))
    return image


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def wide(path: Path, channels: int) -> None:
    row = b"\0" + bytes(2 * WIDTH * channels)
    path.write_bytes(png(16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], row * HEIGHT))


KINDS: dict[str, Callable[[Path], object]] = {
    "rgb.png": lambda path: rgb().save(path),
    "grey.png": lambda path: rgb().convert("L").save(path),
    "black and white.png": lambda path: rgb().convert("1").save(path),
    "palette.png": lambda path: rgb().convert("P").save(path),
    "palette with an unused transparent colour.png": lambda path: rgb().convert("P").save(path, transparency=3),
    "rgba without a transparent pixel.png": lambda path: rgb().convert("RGBA").save(path),
    "grey and alpha without a transparent pixel.webp": lambda path: rgb().convert("LA").save(path),
    "cmyk.jpg": lambda path: rgb().convert("CMYK").save(path),
    "grey.jpg": lambda path: rgb().convert("L").save(path),
    "wide.jpg": lambda path: photograph(1, 300, 40).save(path),
    "tall.png": lambda path: photograph(1, 40, 300).save(path),
    "tiff on its side.png": lambda path: rgb().save(path, "TIFF", exif=turned(6)),
    **{f"turned {k}.jpg": lambda path, k=k: rgb().save(path, exif=turned(k)) for k in range(1, 9)},
    "turned.png": lambda path: rgb().save(path, exif=turned(6)),
}
TRANSPARENT: dict[str, Callable[[Path], object]] = {
    "palette.png": lambda path: rgb().convert("P").save(path, transparency=rgb().convert("P").getpixel((5, 5))),
    "one colour.png": lambda path: rgb().save(path, transparency=rgb().getpixel((5, 5))),
    "rgba.png": lambda path: with_alpha("RGB").save(path),
    "grey and alpha.png": lambda path: with_alpha("L").save(path),
    "gif.png": lambda path: with_alpha("RGB").save(path, "GIF"),
}
REFUSED: dict[str, Callable[[Path], object]] = {
    "16 bits grey.png": lambda path: wide(path, 1),
    "16 bits grey and alpha.png": lambda path: wide(path, 2),
    "16 bits rgb.png": lambda path: wide(path, 3),
    "16 bits rgba.png": lambda path: wide(path, 4),
    "float tiff.png": lambda path: rgb().convert("F").save(path, "TIFF"),
    "32 bits tiff.png": lambda path: rgb().convert("I").save(path, "TIFF"),
    "16 bits ppm.png": lambda path: path.write_bytes(b"P6\n2 2\n65535\n" + bytes(24)),
    "jpeg 2000.png": lambda path: rgb().save(path, "JPEG2000"),
    "cut.png": lambda path: (rgb().save(path), path.write_bytes(path.read_bytes()[:-300])),
    "broken chunk.png": lambda path: path.write_bytes(png(8, 2, b"\0" * 9)[:40] + b"\xff\xff\xff\xff" + bytes(30)),
    "enormous.png": lambda path: path.write_bytes(
        png(8, 2, b"").replace(struct.pack(">II", WIDTH, HEIGHT), struct.pack(">II", 50_000, 50_000))
    ),
}


@pytest.mark.parametrize("kind", [*KINDS, *(f"transparent {kind}" for kind in TRANSPARENT)])
def test_predict_and_folder_give_the_same_tensor(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "class" / kind
    path.parent.mkdir()
    (KINDS | {f"transparent {name}": save for name, save in TRANSPARENT.items()})[kind](path)
    data = load_folder(tmp_path, "test", SIDE)
    read, _ = read_image_files([path], data.shape, shorter_side=SIDE)
    assert torch.equal(in_unit_interval(read), data.batch(torch.tensor([0]))[0])
    data = load_folder(tmp_path, "test")
    read, notes = read_image_files([path], data.shape)
    assert torch.equal(in_unit_interval(read), data.batch(torch.tensor([0]))[0])
    assert notes == [note.removeprefix(f"{tmp_path}: ") for note in data.notes]
    on_black = [f"{path} is composited on black where transparent"]
    assert notes == (on_black if kind not in KINDS else [])


@pytest.mark.parametrize(
    ("size", "scaled", "box"), [((30, 55), (20, 36), (0, 8, 20, 28)), ((55, 30), (36, 20), (8, 0, 28, 20))]
)
def test_the_longer_side_is_rounded_down_as_in_torchvision(
    tmp_path: Path, size: tuple[int, int], scaled: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    """55 x 20 / 30 = 36.7 pixels."""
    image = photograph(0, *size)
    image.save(tmp_path / "a.png")
    expected = np.asarray(image.resize(scaled, Image.Resampling.BILINEAR).crop(box))
    np.testing.assert_array_equal(Decoder(3, 20, 20, 20).centre(tmp_path / "a.png").transpose(1, 2, 0), expected)


def test_an_orientation_after_the_pixels_is_applied(tmp_path: Path) -> None:
    """A PNG file may have its EXIF data before or after them."""
    rgb().save(tmp_path / "before.png", exif=turned(6))
    content = (tmp_path / "before.png").read_bytes()
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4], "big")
    (tmp_path / "after.png").write_bytes(content[:start] + content[end:-12] + content[start:end] + content[-12:])
    before, after = (Decoder(3, SIDE, SIDE, SIDE).centre(tmp_path / f"{name}.png") for name in ("before", "after"))
    np.testing.assert_array_equal(before, after)


def test_bytes_of_pgm_files_are_pixels_also_as_text(tmp_path: Path) -> None:
    for name, content in (
        ("text", b"P2\n3 2\n255\n0 1 2\n128 254 255\n"),
        ("bytes", b"P5\n3 2\n255\n\0\1\2\x80\xfe\xff"),
    ):
        path = tmp_path / f"{name}.png"
        path.write_bytes(content)
        assert Decoder(1, 2, 3, None).centre(path).tolist() == [[[0, 1, 2], [128, 254, 255]]]


@pytest.mark.parametrize("kind", REFUSED)
def test_predict_and_folder_refuse_the_same_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "class" / kind
    path.parent.mkdir()
    REFUSED[kind](path)
    messages = []
    for read in (
        lambda: load_folder(tmp_path, "test", SIDE),
        lambda: read_image_files([path], (3, SIDE, SIDE), shorter_side=SIDE),
    ):
        with pytest.raises(WorkError) as raised:
            read()
        messages.append(str(raised.value))
    assert messages[0] == f"{messages[1]}, or pass --skip-unreadable"  # which `predict` does not have
    assert messages[0].startswith(f"{path}: expected ")
    assert "\n" not in messages[0]
    assert ("expected 8 bits per channel" in messages[0]) == ("bits" in kind or "float" in kind)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
def test_orientation_is_applied(tmp_path: Path, orientation: int, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    rgb().save(path, exif=turned(orientation))
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image)
    decoder = Decoder(3, upright.height, upright.width, None)
    np.testing.assert_array_equal(decoder.centre(path).transpose(1, 2, 0), np.asarray(upright))
    # Scaling and random crops start from the upright image as well.
    upright.save(tmp_path / "upright.png")
    scaled = Decoder(3, SIDE, SIDE, SIDE)
    np.testing.assert_array_equal(scaled.centre(path), scaled.centre(tmp_path / "upright.png"))
    one, two = (scaled.random(p, np.random.default_rng(3)) for p in (path, tmp_path / "upright.png"))
    np.testing.assert_array_equal(one, two)


def test_damaged_metadata_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    rgb().save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert Decoder(3, HEIGHT, WIDTH, None).centre(path).shape == (3, HEIGHT, WIDTH)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_transparency_is_composited_on_black(tmp_path: Path, mode: str, channels: int) -> None:
    """A white image whose ink is in its alpha channel."""
    ink = Image.fromarray(np.arange(WIDTH * HEIGHT, dtype=np.uint8).reshape(HEIGHT, WIDTH))
    image = Image.new(mode, (WIDTH, HEIGHT), "white")
    image.putalpha(ink)
    image.save(tmp_path / "a.png")
    pixels = Decoder(channels, HEIGHT, WIDTH, None).centre(tmp_path / "a.png")
    for plane in pixels:
        np.testing.assert_array_equal(plane, np.asarray(ink))


def test_resize_covers_the_shape_and_crops_the_centre(tmp_path: Path) -> None:
    digit = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    Image.fromarray(np.pad(digit, ((0, 0), (28, 28)))).save(tmp_path / "wide.png")
    read, notes = read_image_files([tmp_path / "wide.png"], (1, 28, 28), shorter_side=28)
    np.testing.assert_array_equal(read[0, 0].numpy(), digit)
    assert len(notes) == 1
    assert "scaled and cropped to 28x28 pixels: the radius is about the result" in notes[0]
    # A network for oblong images: the centre, without black borders.
    Image.new("L", (30, 90), 200).save(tmp_path / "tall.png")
    read, _ = read_image_files([tmp_path / "tall.png"], (1, 20, 40), shorter_side=20)
    assert read.unique().tolist() == [200]
    # The same file for a network of coloured images: a change of length 1 has the length sqrt(3) there.
    _, notes = read_image_files([tmp_path / "tall.png"], (3, 90, 30))
    assert len(notes) == 1
    assert notes[0].endswith("is grey and read as RGB: a change of a pixel counts in each of the three channels")


def test_wrong_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such file"):
        read_image_files([tmp_path / "none.png"], (1, 28, 28))
    rgb().save(tmp_path / "a.png")
    with pytest.raises(RequestError, match="expected an image of 28x28 pixels, got 60x40; scale it, or pass --resize"):
        read_image_files([tmp_path / "a.png"], (1, 28, 28))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    path = tmp_path / "class" / "a.png"
    os.mkfifo(path)
    for read in (lambda: load_folder(tmp_path, "test"), lambda: read_image_files([path], (1, 28, 28))):
        with pytest.raises(WorkError, match=r"a\.png: expected a file, got a pipe"):
            read()
