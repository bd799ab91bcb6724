"""The preprocessing of a published classifier as layers: it follows the noise, so radii are lengths of its input."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from smoothcert.errors import RequestError

PILLOW_FILTERS = {0: "nearest-exact", 1: "bicubic", 2: "bilinear", 3: "bicubic", 4: "bilinear", 5: "bilinear"}
"""Pillow's number of a filter -> the mode of torch; Lanczos, which torch lacks, becomes bicubic."""
UNSUPPORTED = ("do_pad", "do_thumbnail", "do_crop_margin", "do_affine_transform", "do_image_splitting", "do_grayscale")
OWN_FUNCTION = "load it in a function of your own (--model FILE.py:function), or give another classifier"
WARPED_FROM = 384
"""ConvNeXT's processor scales both sides, without a crop, from this size on."""


@dataclass(frozen=True)
class Preprocessing:
    """What a classifier does to images in [0, 1]: scale, cut out the centre, normalise."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | int | None = None
    """(height, width) to scale to, or the length of the shorter side; None: images keep their size."""
    crop: tuple[int, int] | None = None
    """(height, width) of the centre that is cut out after scaling."""
    mode: str = "bilinear"
    """Of `torch.nn.functional.interpolate`."""
    flipped: bool = False
    """Whether the channels are in the order blue, green, red."""
    rounded_down: bool = True
    """Whether the corner of the centre is rounded down, as in transformers, or to the nearest pixel, as in timm."""

    @classmethod
    def of_processor(cls, fields: Mapping[str, Any]) -> "Preprocessing":
        """The preprocessing of an image processor of transformers, from its fields; an unknown step is refused."""
        if "data_config" in fields:  # of a network of timm
            return cls.of_timm(fields["data_config"])
        if steps := [step for step in UNSUPPORTED if fields.get(step)]:
            raise RequestError(
                f"preprocessing: expected scaling, cropping and normalisation, got {steps[0]} as well; {OWN_FUNCTION}"
            )
        size = fields.get("size") if fields.get("do_resize") else None
        crop: tuple[int, int] | None = None
        target: tuple[int, int] | int | None = _height_and_width(size) or _shorter_side(size)
        if size is not None and target is None:
            raise RequestError(
                f"preprocessing: expected a size of height and width or a shortest edge, got {size}; {OWN_FUNCTION}"
            )
        if "crop_pct" in fields and isinstance(target, int):
            if target >= WARPED_FROM and not fields.get("do_center_crop"):
                target = (target, target)
            elif fields["crop_pct"] is not None:
                crop = (target, target)
                target = int(target / fields["crop_pct"])
        if fields.get("do_center_crop"):
            crop = _height_and_width(fields.get("crop_size"))
        scale = 255 * fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 255.0
        shift = 1.0 if fields.get("rescale_offset") else 0.0
        mean, std = [0.0], [1.0]
        if fields.get("do_normalize") and fields.get("image_mean") is not None:
            mean, std = _floats(fields["image_mean"]), _floats(fields["image_std"])
            if fields.get("include_top"):  # EfficientNet divides by the standard deviation twice
                std = [s * s for s in std]
        # (scale x - shift - mean) / std in one step
        mean, std = [(m + shift) / scale for m in mean], [s / scale for s in std]
        resample = fields.get("resample")
        mode = "bilinear" if resample is None else PILLOW_FILTERS.get(int(resample), "bilinear")
        return cls(tuple(mean), tuple(std), target, crop, mode, bool(fields.get("do_flip_channel_order")))

    @classmethod
    def of_timm(cls, fields: Mapping[str, Any]) -> "Preprocessing":
        """The preprocessing that timm recommends for a model, from its `pretrained_cfg`."""
        _, height, width = fields["input_size"]
        share = fields.get("crop_pct") or 0.875
        larger = (math.floor(height / share), math.floor(width / share))
        whole = fields.get("crop_mode") == "squash" or height != width
        modes = {"bilinear": "bilinear", "nearest": "nearest-exact"}
        mode = modes.get(fields.get("interpolation", ""), "bicubic")
        size = larger if whole else larger[0]
        return cls(tuple(fields["mean"]), tuple(fields["std"]), size, (height, width), mode, rounded_down=False)


class Preprocess(nn.Module):
    """Apply a `Preprocessing` to images [n, c, h, w] in [0, 1]; grey images are repeated for three channels."""

    mean: Tensor
    std: Tensor

    def __init__(self, steps: Preprocessing) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("mean", torch.tensor(steps.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(steps.std).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x = _centre(_scaled(images.float(), self.steps), self.steps)
        x = x.flip(1) if self.steps.flipped else x
        return (x - self.mean.float()) / self.std.float()


def _scaled(images: Tensor, steps: Preprocessing) -> Tensor:
    height, width = images.shape[-2:]
    target = steps.size
    if isinstance(target, int):
        short = min(height, width)
        target = (height * target // short, width * target // short)
    if target is None or target == (height, width):
        return images
    return functional.interpolate(images, target, mode=steps.mode, antialias=steps.mode != "nearest-exact")


def _centre(images: Tensor, steps: Preprocessing) -> Tensor:
    if steps.crop is None:
        return images
    (height, width), (rows, columns) = images.shape[-2:], steps.crop
    corner = math.floor if steps.rounded_down else round
    top, left = max(0, corner((height - rows) / 2)), max(0, corner((width - columns) / 2))
    return images[..., top : top + rows, left : left + columns]


def _height_and_width(size: object) -> tuple[int, int] | None:
    if isinstance(size, Mapping) and size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    return None


def _shorter_side(size: object) -> int | None:
    if isinstance(size, Mapping) and size.get("shortest_edge") and not size.get("longest_edge"):
        return int(size["shortest_edge"])
    return None


def _floats(values: float | Sequence[float]) -> list[float]:
    return [float(value) for value in (values if isinstance(values, Sequence) else [values])]
