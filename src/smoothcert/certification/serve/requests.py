"""What a client sends: limits, the question, and images as PNG, JPEG or raw numbers.

Everything here is checked before it costs time or memory: the size of the body, the number of pixels in the header of
an image before it is decoded, and the number of images. Nothing in a request names a file, and nothing is unpickled.
"""

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from smoothcert.certification.serve.rule import Question, RuleName
from smoothcert.data.decoding import Decoder, ImageBytes, opened_image
from smoothcert.data.image_files import read_image
from smoothcert.data.images import in_unit_interval
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.records import validated

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
MEDIA_TYPES = ("image/png", "image/jpeg", "application/octet-stream", "application/json")
Number = Annotated[float, Field(allow_inf_nan=False)]


class RefusedError(Exception):
    """A request that is refused with an HTTP status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may ask for."""

    votes: int = 20_000
    milliseconds: int = 30_000
    body: int = 8 << 20
    pixels: int = 1 << 24
    images: int = 64
    queue: int = 256


class Ask(BaseModel):
    """The question of a request, as query parameters or as keys of a JSON body."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    radius: Number | None = Field(default=None, gt=0, description="ask only whether this radius is certified")
    votes: int | None = Field(default=None, ge=1, description="the most fresh votes per image")
    milliseconds: Number | None = Field(default=None, ge=1, description="answer at the first look after this time")
    alpha: Number = Field(default=0.001, ge=1e-9, le=0.5, description="probability that an answer is wrong, at most")
    rule: RuleName = Field(default="sequential", description="fixed draws all votes, for answers to be recomputed")
    model: str | None = Field(default=None, max_length=200, description="name or digest of a served model")
    resize: bool = Field(default=False, description="scale and crop images that have another size")
    copies: int = Field(default=0, ge=0, le=32, description="noisy copies to show at each look of a stream")
    shape: str | None = Field(default=None, max_length=60, description="of raw numbers, such as 1,28,28")
    dtype: Literal["float32", "uint8"] = Field(default="float32", description="of raw numbers")

    def question(self, limits: Limits) -> Question:
        """Return what the votes are to decide; more than the `limits` of the server is refused."""
        if self.votes is not None and self.votes > limits.votes:
            raise RequestError(f"votes: expected at most {limits.votes:,} on this server, got {self.votes:,}")
        if self.milliseconds is not None and self.milliseconds > limits.milliseconds:
            raise RequestError(
                f"milliseconds: expected at most {limits.milliseconds:,} on this server, got {self.milliseconds:g}"
            )
        if self.rule == "fixed" and self.radius is not None:
            raise RequestError("radius: expected none with rule=fixed, which gives the largest radius; leave it out")
        # A budget of time alone may use all votes that fit into it.
        default = limits.votes if self.milliseconds is not None else min(10_000, limits.votes)
        return Question(self.votes or default, self.alpha, self.radius, self.rule)


def split_body(media_type: str, query: Mapping[str, str], body: bytes, limits: Limits) -> tuple[Ask, list[bytes]]:
    """The question, and the images as files or, for application/octet-stream, as one block of numbers."""
    if media_type not in MEDIA_TYPES:
        expected = ", ".join(MEDIA_TYPES)
        raise RefusedError(
            415, f"expected the content type {expected}, got '{media_type[:80]}'; send the file itself as the body"
        )
    if media_type != "application/json":
        return validated(Ask, query), [body]
    if query:
        raise RequestError("expected all parameters in the JSON body, got some in the address; move them")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON; send an object with the key 'images'") from None
    images = content.pop("images", None) if isinstance(content, dict) else None
    if not isinstance(images, list) or not images or not all(isinstance(image, str) for image in images):
        kind = "a list with other values" if isinstance(images, list) else type(images).__name__
        got = "none" if images in (None, []) else kind
        raise RequestError(f"images: expected a list of PNG or JPEG files in base64, got {got}")
    if len(images) > limits.images:
        raise RefusedError(413, f"images: expected at most {limits.images}, got {len(images)}; send fewer at once")
    ask = validated(Ask, content)
    try:
        return ask, [base64.b64decode(image, validate=True) for image in images]
    except ValueError:  # such as binascii.Error
        raise RequestError("images: expected base64, got other characters") from None


def decode_file(
    content: bytes, name: str, decoder: Decoder, limits: Limits, *, resize: bool
) -> tuple[Tensor, list[str]]:
    """A PNG or JPEG file as float32 [c, h, w] in [0, 1], and notes on what was changed. The header is checked first."""
    if not content.startswith((PNG, JPEG)):
        raise RequestError(
            f"{name}: expected a PNG or JPEG file, got {len(content)} bytes that are neither; send another"
        )
    file = ImageBytes(name, content)
    try:
        with opened_image(file) as image:
            size = image.size
        if size[0] * size[1] > limits.pixels:
            raise RefusedError(
                413, f"{name}: expected at most {limits.pixels:,} pixels, got {size[0]}x{size[1]}; send a smaller image"
            )
        pixels, changes = read_image(
            file, decoder if resize else replace(decoder, shorter_side=None), "add resize=true"
        )
    except WorkError as error:
        raise RequestError(str(error)) from None
    return in_unit_interval(torch.from_numpy(pixels)), changes


def decode_raw(body: bytes, ask: Ask, shape: tuple[int, int, int], limits: Limits) -> Tensor:
    """Raw numbers as float32 [n, c, h, w] in [0, 1]: float32 (little endian), or uint8 from 0 to 255."""
    kind = "<f4" if ask.dtype == "float32" else "u1"
    one = math.prod(shape) * np.dtype(kind).itemsize
    count, rest = divmod(len(body), one)
    wanted = ",".join(map(str, shape))
    if ask.shape is not None and ask.shape not in (wanted, f"{count},{wanted}"):
        raise RequestError(f"shape: expected {wanted}, or n,{wanted} for n images, got '{ask.shape}'")
    if rest or not count:
        raise RequestError(f"expected {one} bytes per image ({wanted} as {ask.dtype}), got {len(body)} bytes")
    if count > limits.images:
        raise RefusedError(413, f"expected at most {limits.images} images, got {count}; send fewer at once")
    numbers = np.frombuffer(body, dtype=kind).reshape(count, *shape)
    if kind == "u1":
        return in_unit_interval(torch.from_numpy(numbers.copy()))
    if not (np.isfinite(numbers).all() and numbers.min() >= 0 and numbers.max() <= 1):
        raise RequestError("expected numbers from 0 to 1, got others; scale the pixels to [0, 1]")
    return torch.from_numpy(numbers.astype(np.float32))
