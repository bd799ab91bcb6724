"""Batch-norm statistics of the averaged weights, computed on noisy training images."""

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from smoothcert.noise import NOISES
from smoothcert.training.seeds import derived_seed

if TYPE_CHECKING:
    from smoothcert.training.setup import RunInProgress

STATISTICS_SEED = 7
MOST_IMAGES = 8192
"""Largest number of training images that the statistics are computed on."""


class _BatchNormOfOneProcess(nn.modules.batchnorm._BatchNorm):
    """Batch norm of any shape without the other processes, which do not take part in this."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


@torch.no_grad()
def recompute_statistics(run: "RunInProgress") -> None:
    """Replace the batch-norm statistics in the moving average of a run by those of the averaged network.

    The running statistics of training describe the activations of the network that is trained, whose weights differ
    from their average. Here the averaged network sees batches of augmented training images under noise, and each
    statistic is the mean over the batches, all with the same weight. Images, augmentation and noise depend on
    (seed, epoch) alone, so that a resumed run gets the same. A run without an average or batch norm is not changed.
    """
    norms = [module for module in run.model.modules() if _has_statistics(module)]
    if run.average is None or not norms:
        return
    recipe, data = run.recipe, run.data
    network = copy.deepcopy(run.model).eval()  # dropout stays off
    network.load_state_dict(run.average.tensors)
    own = {name: module for name, module in network.named_modules() if _has_statistics(module)}
    for module in own.values():
        module.train()
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _BatchNormOfOneProcess  # type: ignore[assignment]
    count = max(recipe.batch_size, min(MOST_IMAGES, len(data)) // recipe.batch_size * recipe.batch_size)
    draws = torch.Generator().manual_seed(derived_seed(recipe.seed, STATISTICS_SEED, run.epoch, 0))
    order = torch.randperm(len(data), generator=draws)[:count].view(-1, recipe.batch_size).to(run.device)
    generator = torch.Generator(run.device).manual_seed(derived_seed(recipe.seed, STATISTICS_SEED, run.epoch, 1))
    augmentation = derived_seed(recipe.seed, STATISTICS_SEED, run.epoch, 2)
    noise = NOISES[recipe.noise](recipe.sigma)
    with torch.autocast(run.device.type, torch.bfloat16, enabled=run.precision == "bf16"):
        for number, (images, _) in enumerate(data.batches(order, slice(None), augmentation)):
            for module in own.values():
                module.momentum = 1 / (number + 1)
            network(images + noise.sample(images.shape, generator))
    for name, module in own.items():
        for kind, buffer in module.named_buffers(recurse=False):
            run.average.tensors[f"{name}.{kind}" if name else kind].copy_(buffer)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
