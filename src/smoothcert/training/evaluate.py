"""What a run computes on noisy images between epochs: test accuracy, votes for its sampler, batch-norm statistics."""

import copy
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call

from smoothcert.classifier import evaluating, logits_of
from smoothcert.data import Images
from smoothcert.models.precision import with_kernels
from smoothcert.training.batch_norm import MOST_IMAGES, layers_with_statistics, replace_statistics
from smoothcert.training.seeds import Purpose, derived_seed

if TYPE_CHECKING:
    from smoothcert.training.run_in_progress import RunInProgress

BATCH = 500
PIXELS_AT_ONCE, PIXELS_AT_ONCE_ON_GPU = 2**22, 2**25
"""Pixels of noisy images that are classified at once for votes, if they are more than `batch_size` images. On a GPU,
with few images at once, launching the kernels of a deep network takes longer than computing them."""


@torch.no_grad()
def noisy_accuracy(run: "RunInProgress", data: Images) -> float:
    """The share of `data` that the network, with the weights that are saved, classifies correctly under noise.

    Each image has one noisy copy, drawn from (seed, epoch); training is not affected.
    """
    generator = torch.Generator(run.device).manual_seed(derived_seed(run.recipe.seed, Purpose.TEST_ACCURACY, run.epoch))
    weights = dict(run.weights())
    correct = 0
    with evaluating(run.model), run.autocast():
        for indices in torch.split(torch.arange(len(data), device="cpu"), BATCH):
            images, labels = data.batch(indices)
            noisy = images + run.noise.sample(images.shape, generator)
            output = run.model(noisy) if run.average is None else functional_call(run.model, weights, (noisy,))
            correct += int((logits_of(output).argmax(1) == labels).sum())
    return correct / len(data)


@torch.no_grad()
def correct_votes(run: "RunInProgress", votes: int, indices: Tensor, purpose: Purpose) -> Tensor:
    """How many of `votes` noisy copies the network classifies correctly, for each of the images `indices`: int64 [n] on
    the CPU.

    The images are not augmented and the network is in eval mode, with the weights of training (not their average).
    Noise depends on (seed, purpose, epoch) and the position in `indices` alone: processes, which divide the images
    among themselves, count the same as one process with the same weights.
    """
    pixels = PIXELS_AT_ONCE_ON_GPU if run.device.type == "cuda" else PIXELS_AT_ONCE
    row = min(len(indices), max(run.recipe.batch_size, pixels // math.prod(run.data.shape)))
    padding = indices[-1:].expand(-len(indices) % row)
    rows = torch.cat([indices, padding]).view(-1, row)  # all of one shape
    counts = torch.zeros(rows.shape, dtype=torch.int64, device=run.device)
    # The statistics of batch norm are those of each process until its next step, which takes those of the first one.
    run.group.copy_from_first(run.model.buffers())
    numbers = range(len(rows))[run.group.rank :: run.group.size]
    batches = run.data.batches(rows[run.group.rank :: run.group.size], slice(None), None)
    network, dtype = with_kernels(run.model, run.precision, run.device)
    with evaluating(run.model), run.autocast():
        for number, (images, labels) in zip(numbers, batches, strict=False):
            seed = derived_seed(run.recipe.seed, purpose, run.epoch, number)
            generator = torch.Generator(run.device).manual_seed(seed)
            for _ in range(votes):
                noisy = images + run.noise.sample(images.shape, generator)
                logits = logits_of(network(noisy.to(dtype)))
                counts[number] += logits.argmax(1) == labels
    return run.group.total(counts).flatten()[: len(indices)].cpu()


@torch.no_grad()
def recompute_statistics(run: "RunInProgress") -> None:
    """Replace the batch-norm statistics in the moving average of a run by those of the averaged network.

    The running statistics of training describe the activations of the network that is trained, whose weights differ
    from their average. Here the averaged network sees batches of augmented training images under noise, and each
    statistic is the mean over the batches, all with the same weight. Images, augmentation and noise depend on
    (seed, epoch) alone, so that a resumed run gets the same. A run without an average or batch norm is not changed.
    """
    if run.average is None or not layers_with_statistics(run.model):
        return
    recipe, data = run.recipe, run.data
    network = copy.deepcopy(run.model)
    network.load_state_dict(run.average.tensors)
    count = max(recipe.batch_size, min(MOST_IMAGES, len(data)) // recipe.batch_size * recipe.batch_size)
    seeds = [derived_seed(recipe.seed, Purpose.STATISTICS, run.epoch, part) for part in range(3)]
    draws = torch.Generator().manual_seed(seeds[0])
    order = torch.randperm(len(data), generator=draws, device="cpu")[:count].view(-1, recipe.batch_size).to(run.device)
    generator = torch.Generator(run.device).manual_seed(seeds[1])
    batches = data.batches(order, slice(None), seeds[2])
    with run.autocast():
        replace_statistics(network, (images + run.noise.sample(images.shape, generator) for images, _ in batches))
    for name, layer in layers_with_statistics(network).items():
        for kind, buffer in layer.named_buffers(recurse=False):
            run.average.tensors[f"{name}.{kind}" if name else kind].copy_(buffer)
