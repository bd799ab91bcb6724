"""Networks from images in [0, 1] to logits, normalisation included. To add one, write its file and add it to MODELS."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from smoothcert.errors import RequestError
from smoothcert.io.text import did_you_mean
from smoothcert.models.denoised import Denoised as Denoised
from smoothcert.models.densenet import DenseNet40
from smoothcert.models.hub import is_hub as is_hub
from smoothcert.models.hub import load_hub as load_hub
from smoothcert.models.hub import output_names as output_names
from smoothcert.models.lenet import LeNet as LeNet
from smoothcert.models.normalize import Normalize as Normalize
from smoothcert.models.resnet50 import ResNet50
from smoothcert.models.resnet_cifar import CifarResNet as CifarResNet
from smoothcert.models.unet import UNet
from smoothcert.models.user_code import as_module as as_module
from smoothcert.models.user_code import check_outputs as check_outputs
from smoothcert.models.user_code import check_own_code as check_own_code
from smoothcert.models.user_code import code_digest as code_digest
from smoothcert.models.user_code import import_code as import_code
from smoothcert.models.user_code import is_code as is_code
from smoothcert.models.user_code import is_own_code as is_own_code
from smoothcert.models.user_code import own_model as own_model

if TYPE_CHECKING:
    from smoothcert.data import Normalization


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """How to build a model from its number of classes, and the image shape (c, h, w) that it takes (None: any)."""

    description: str
    shape: tuple[int | None, int | None, int | None]
    build: Callable[[int], nn.Module]


MODELS: dict[str, ModelSpec] = {
    "lenet": ModelSpec("LeNet, 2 convolutions and 2 linear layers, 28x28 grey images", (1, 28, 28), LeNet),
    "resnet20": ModelSpec("ResNet-20 for small colour images", (3, None, None), partial(CifarResNet, 20)),
    "resnet110": ModelSpec("ResNet-110 for small colour images", (3, None, None), partial(CifarResNet, 110)),
    "densenet40": ModelSpec("DenseNet-40 with bottlenecks, for small colour images", (3, None, None), DenseNet40),
    "resnet50": ModelSpec("ResNet-50 for ImageNet, torchvision's parameter names", (3, None, None), ResNet50),
}
DENOISERS: dict[str, Callable[[int], nn.Module]] = {
    "unet": partial(UNet, width=64, blocks=3),
    "unet-small": partial(UNet, width=16, blocks=1),
    "unet-large": partial(UNet, width=128, blocks=3),
}
"""Networks from noisy images to clean images, by the number of channels: see `smoothcert train-denoiser`."""


def is_known(name: str) -> bool:
    """Whether `name` is a model of the package or a user's own network, and not the class of a module."""
    return is_code(name) or name in DENOISERS or name in MODELS


def check_name(name: str) -> None:
    """Refuse a name that is neither a model of the package nor a user's own network."""
    if name.endswith(".py"):
        raise RequestError(f"model: expected FILE.py:function, got {name}; add the name of the function after a colon")
    if not is_known(name):
        otherwise = f"choose one of {', '.join(sorted(MODELS))}, or your own as FILE.py:function"
        raise RequestError(f"model: expected a known model, got {name}; {did_you_mean(name, MODELS, otherwise)}")


def build_model(
    name: str, shape: tuple[int, int, int], num_classes: int, normalization: "Normalization | None" = None
) -> nn.Module:
    """Build a newly initialised model for images of `shape`; with a `normalization` its first layer normalises.

    `package.module:function` builds a user's own network, which contains its own normalisation, if any; `hf:NAME` and
    `timm:NAME` are published classifiers with their weights.
    """
    if is_code(name):
        network = as_module(own_model(name, num_classes), name, "model")
        check_outputs(network, name, shape, num_classes)
        return network
    if name in DENOISERS:
        return DENOISERS[name](shape[0])
    check_name(name)
    spec = MODELS[name]
    if any(expected not in (None, size) for expected, size in zip(spec.shape, shape, strict=True)):
        taken = ", ".join("any" if side is None else str(side) for side in spec.shape)
        raise RequestError(
            f"model: {name} takes images of shape ({taken}), the data has {shape}; `smoothcert models` lists others"
        )
    model = spec.build(num_classes)
    return nn.Sequential(Normalize(normalization.mean, normalization.std), model) if normalization else model
