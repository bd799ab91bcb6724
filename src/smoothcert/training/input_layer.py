"""The layer before an imported network: its mean and standard deviation, and whether another one is more accurate."""

from typing import get_args

import torch
from torch import nn

from smoothcert.classifier import evaluating
from smoothcert.data import DATASETS, Images, Normalization
from smoothcert.data.images import spread
from smoothcert.models import Normalize
from smoothcert.noise import Gaussian
from smoothcert.training.checkpoint import InputSpec, Run
from smoothcert.training.choices import InputLayer
from smoothcert.training.recipe import ImportRecipe

CLEARLY_BETTER = 0.10
MOST_IMAGES, BATCH = 200, 50


def layer_normalization(layer: InputLayer, published: Normalization | None) -> Normalization | None:
    """Mean and std of `layer` for a data set with the `published` ones."""
    if layer == "none" or published is None:
        return None
    return published if layer == "normalize" else Normalization(published.mean, (1.0,) * len(published.mean))


def network_of(model: nn.Module, spec: InputSpec) -> nn.Module:
    """The network without its input layer."""
    return model.get_submodule("1") if spec.normalization else model


@torch.no_grad()
def input_layer_warning(run: Run, images: Images) -> str | None:
    """One line if another input layer is more accurate by over 10 points on the same noisy images; otherwise None.

    Each of up to 200 images, spread over the data, has one noisy copy, always the same one.
    """
    assert isinstance(run.recipe, ImportRecipe), "only an imported run has an input layer to check"
    current = run.recipe.input_layer
    network = network_of(run.model, run.spec)
    known = DATASETS.get(run.recipe.dataset)
    published = images.normalization if known is None else known.normalization
    pixels, labels = images.batch(spread(len(images), MOST_IMAGES))
    noisy = pixels + Gaussian(run.recipe.sigma).sample(pixels.shape, torch.Generator().manual_seed(0))
    accuracy: dict[str, float] = {}
    for layer in get_args(InputLayer):
        normalization = run.spec.normalization if layer == current else layer_normalization(layer, published)
        if normalization is None and layer not in (current, "none"):
            continue  # a data set without a published mean
        first = [Normalize(normalization.mean, normalization.std)] if normalization else []
        model = nn.Sequential(*first, network)
        with evaluating(model):
            classes = torch.cat([model(part).argmax(1) for part in torch.split(noisy, BATCH)])
        accuracy[layer] = float((classes == labels).double().mean())
    best = max(accuracy, key=accuracy.__getitem__)
    if accuracy[best] - accuracy[current] <= CLEARLY_BETTER:
        return None
    return (
        f"input layer: accuracy on {len(labels)} noisy images is {accuracy[current]:.0%} with {current}, "
        f"{accuracy[best]:.0%} with {best}; import again with --input-layer {best}"
    )
