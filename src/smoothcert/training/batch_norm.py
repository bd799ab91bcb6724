"""The statistics of batch norm under noise: they change without labels, and every weight stays.

A network that was trained on clean images, or on clean and noisy ones in turn, has running statistics that do not
describe the noisy images it gets when it is certified.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from smoothcert.classifier import evaluating
from smoothcert.data import UNSPLIT, Images, images_from_dataset
from smoothcert.errors import RequestError
from smoothcert.noise import NOISES
from smoothcert.training.checkpoint import ORIGINAL, Run, tensors_digest, write_new_run
from smoothcert.training.choices import NoiseName
from smoothcert.training.seeds import derived_seed

MOST_IMAGES = 8192
"""Largest number of images that the statistics are computed on."""
BATCH = 256
CHANGE = "batch_norm"


class _BatchNormOfOneProcess(nn.modules.batchnorm._BatchNorm):
    """Batch norm of any shape without the other processes, which do not take part in this."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def layers_with_statistics(network: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """The batch-norm layers of `network` that have running statistics, by name."""
    kind = nn.modules.batchnorm._BatchNorm
    return {n: m for n, m in network.named_modules() if isinstance(m, kind) and m.running_mean is not None}


@torch.no_grad()
def replace_statistics(network: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace the running statistics of `network` by the mean over `batches`, each with the same weight.

    Other layers compute as in eval mode: dropout is off.
    """
    layers = layers_with_statistics(network)
    before = [(layer, layer.momentum, layer.__class__) for layer in layers.values()]
    with evaluating(network):
        for layer in layers.values():
            layer.train()
            if isinstance(layer, nn.SyncBatchNorm):
                layer.__class__ = _BatchNormOfOneProcess  # type: ignore[assignment]
        try:
            for number, batch in enumerate(batches):
                for layer in layers.values():
                    layer.momentum = 1 / (number + 1)
                network(batch)
        finally:
            for layer, momentum, kind in before:
                layer.momentum = momentum
                layer.__class__ = kind


def adapt_batch_norm(
    network: nn.Module, data: Images | Dataset[Any], sigma: float, *, noise: NoiseName = "gaussian", seed: int = 0
) -> Mapping[str, Any]:
    """Give `network` the batch-norm statistics of images under noise, in place; return what was done, for provenance.

    `data` are images of `load_dataset` or a torch Dataset of (image, label). Up to 8192 of them are used, without
    labels and augmentation, in batches of up to 256, in an order and with noise that depend on `seed`. A network
    without such statistics, or a single image, is a RequestError.
    """
    if not isinstance(data, Images):
        data = images_from_dataset(data, split=UNSPLIT)
    if not layers_with_statistics(network):
        raise RequestError(
            "adapt: expected a network with batch norm, got one without running statistics to change; "
            "`smoothcert train --init` trains it for the noise"
        )
    if len(data) < 2:
        raise RequestError(f"adapt: expected at least 2 images, got {len(data)}; give more")
    device = next(network.parameters()).device
    size = min(BATCH, len(data))
    count = min(MOST_IMAGES, len(data)) // size * size
    draws = torch.Generator().manual_seed(derived_seed(seed, 0))
    order = torch.randperm(len(data), device="cpu", generator=draws)[:count]
    generator = torch.Generator(device).manual_seed(derived_seed(seed, 1))
    distribution = NOISES[noise](sigma)
    original = tensors_digest(network.state_dict())
    rows = data.to(device).batches(order.view(-1, size).to(device), slice(None), None)
    replace_statistics(network, (images + distribution.sample(images.shape, generator) for images, _ in rows))
    about = {"data": data.name, "split": data.split, "images": count, "noise": noise, "sigma": sigma, "seed": seed}
    return {**about, ORIGINAL: original}


def adapt_run(run: Run, data: Images, out: Path, sigma: float | None = None) -> Mapping[str, Any]:
    """Write `run` into the new folder `out`, with the batch-norm statistics of `data` under its noise, or at `sigma`.

    It is another network: certificates of `run` do not hold for it. The recipe stays that of its training; what was
    done here is returned, and recorded in the provenance.
    """
    run.refuse_other_images(data)
    level = run.recipe.sigma if sigma is None else sigma
    about = adapt_batch_norm(run.model, data, level, noise=run.recipe.noise)
    adapted = replace(run, folder=out, provenance={**run.provenance, CHANGE: dict(about)})
    write_new_run(adapted, run.model.state_dict())
    return about
