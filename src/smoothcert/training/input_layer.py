"""The layer before an imported network: its mean and standard deviation, and whether another one is more accurate."""

from dataclasses import replace
from typing import get_args

import torch
from torch import nn

from smoothcert.classifier import evaluating
from smoothcert.data import DATASETS, Images, Normalization
from smoothcert.data.images import spread
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import one_line
from smoothcert.models import Normalize
from smoothcert.noise import Gaussian
from smoothcert.training.checkpoint import InputSpec, Run
from smoothcert.training.choices import InputLayer
from smoothcert.training.recipe import ImportRecipe

CLEARLY_BETTER = 0.10
BATCH = 50


def layer_normalization(layer: InputLayer, published: Normalization | None) -> Normalization | None:
    """Mean and std of `layer` for a data set with the `published` ones."""
    if layer == "none" or published is None:
        return None
    return published if layer == "normalize" else Normalization(published.mean, (1.0,) * len(published.mean))


def network_of(model: nn.Module, spec: InputSpec) -> nn.Module:
    """The network without its input layer."""
    return model.get_submodule("1") if spec.normalization else model


@torch.no_grad()
def check_accuracy(run: Run, images: Images, count: int = 200) -> float:
    """The base classifier's accuracy on one noisy copy of `count` images spread over the data, always the same one."""
    spec, total = run.spec, min(count, len(images))
    if images.shape != spec.shape or images.num_classes > spec.num_classes or total < 1:
        raise RequestError(
            f"{run.folder}: expected at least one image of shape {spec.shape} and at most {spec.num_classes} classes, "
            f"got {total} of shape {images.shape} and {images.num_classes}; give images of the run's data set"
        )
    device = next(run.model.parameters()).device
    noise, generator = Gaussian(run.recipe.sigma), torch.Generator().manual_seed(0)
    correct = 0
    with evaluating(run.model):
        for indices in torch.split(spread(len(images), total), BATCH):
            pixels, labels = (part.to(device) for part in images.batch(indices))
            noisy = pixels + noise.sample(pixels.shape, generator).to(device)
            correct += int((run.model(noisy).argmax(1) == labels).sum())
    return correct / total


def input_layer_warning(run: Run, images: Images, count: int = 200) -> str | None:
    """One line if another input layer is more accurate by over 10 points on the same noisy images; otherwise None.

    Images that cannot be read or do not fit raise no error: the line then says that nothing was checked.
    """
    assert isinstance(run.recipe, ImportRecipe), "only an imported run has an input layer to check"
    current, network = run.recipe.input_layer, network_of(run.model, run.spec)
    published = DATASETS[run.recipe.dataset].normalization
    accuracy: dict[str, float] = {}
    try:
        for layer in get_args(InputLayer):
            normalization = run.spec.normalization if layer == current else layer_normalization(layer, published)
            if normalization is None and layer not in (current, "none"):
                continue  # a data set without a published mean
            first = [Normalize(normalization.mean, normalization.std)] if normalization else []
            model = nn.Sequential(*first, network).to(next(network.parameters()).device)
            accuracy[layer] = check_accuracy(replace(run, model=model), images, count)
    except (RequestError, WorkError, OSError) as error:
        return f"input layer: not checked ({one_line(error)})"
    best = max(accuracy, key=accuracy.__getitem__)
    if accuracy[best] - accuracy[current] <= CLEARLY_BETTER:
        return None
    return (
        f"input layer: accuracy on {min(count, len(images))} noisy images is {accuracy[current]:.0%} with {current}, "
        f"{accuracy[best]:.0%} with {best}; import again with --input-layer {best}"
    )
