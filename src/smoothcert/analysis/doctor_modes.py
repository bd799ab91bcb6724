"""Checks of `doctor` for classifiers that are not in eval mode, or that are random."""

import copy
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from smoothcert.analysis.doctor_inputs import (
    BATCH,
    SIMILAR,
    Examined,
    Finding,
    clearly_better,
    far_above_chance,
    normalised,
    share,
)
from smoothcert.classifier import evaluating, failures_reported, logits_of
from smoothcert.data import Normalization
from smoothcert.smoothing.batch_dependence import depends_on_batch, depends_on_place, is_random, without_masked_classes
from smoothcert.training.batch_norm import layers_with_statistics, replace_statistics

FITTING = 0.1
"""Largest misfit of right running statistics; the variances then differ by a factor of 1.8 at most."""


def check_mode(examined: Examined) -> Finding | None:
    """Logits that depend on the other images of a batch, as with batch norm in train mode, or on random numbers, as
    with dropout in train mode."""
    image = examined.images[0]
    classifier = without_masked_classes(examined.classifier, examined.logits(torch.stack([image] * 2))[0])
    with evaluating(examined.classifier), failures_reported("the classifier", image.shape):
        random = is_random(classifier, image)
        seeded = not random and depends_on_place(classifier, image)
        dependent = not random and not seeded and depends_on_batch(classifier, image)
    if dependent:
        return Finding(
            "train-mode",
            "the logits of an image depend on the other images of its batch, so votes are not independent",
            "use batch norm with its running statistics: call model.eval() on every module that the model uses",
        )
    if random or seeded:
        where = "in another place of its batch" if seeded else "in each call"
        return Finding(
            "random",
            f"the same image gets other logits {where}: the model draws random numbers",
            "call model.eval() on every module that the model uses; remove other random numbers (dropout with "
            "training=True, random crops, its own noise), or seed them from the input",
        )
    return None


def check_statistics(examined: Examined, noisy: Tensor, steps: Iterable[Normalization] = ()) -> Finding | None:
    """Batch norm whose running statistics do not fit: the model does far better with those of a batch.

    Images on another scale look the same. So one of `steps`, with which the model does better, is the only fault if the
    model is as accurate with it, or if the running statistics are those of images after it. Statistics of noisy images,
    which `adapt` computes, are right if they do better on `noisy` images than those of clean ones.
    """
    model = examined.classifier
    inputs = examined.images
    if not isinstance(model, nn.Module) or len(inputs) < 2:  # one image is no batch
        return None
    trained = copy.deepcopy(model).eval()
    layers = [layer for layer in trained.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.momentum = None  # afterwards the running statistics are the mean over all batches
        layer.train().reset_running_stats()
    if not layers:
        return None
    order = shuffled(inputs)
    with torch.no_grad():
        classes = torch.cat([logits_of(trained(inputs[rows])).argmax(1) for rows in order])
    tested = torch.cat(order)
    labels = examined.labels[tested]
    right = classes == labels
    before = examined.correct(inputs)[tested]
    if not clearly_better(right, before, 0.2) or not far_above_chance(right, labels, classes, examined.outputs):
        return None
    under_noise = replace(examined, classifier=trained.eval()).correct(noisy)
    if clearly_better(examined.correct(noisy), under_noise, SIMILAR, level=0.01):
        return None
    for step in steps:
        scaled = [normalised(images, step) for images in (inputs, noisy)]
        as_accurate = int(examined.correct(scaled[0])[tested].sum()) >= int(right.sum())
        if as_accurate or any(misfit(model, images) < FITTING for images in scaled):
            return None
    return Finding(
        "batch-statistics",
        f"the running statistics of batch norm do not fit: accuracy is {share(before)} with them, and {share(right)} "
        "with the statistics of each batch, as in train mode",
        "if its training normalised images outside the model, make that its first layer; otherwise compute the "
        "statistics again: `smoothcert adapt` does it, on images under the noise of certification",
    )


def shuffled(inputs: Tensor) -> list[Tensor]:
    """The rows of at least two `inputs` in batches, in random order: a batch of one class has other statistics."""
    order = torch.randperm(len(inputs), device="cpu", generator=torch.Generator().manual_seed(0))
    return [rows for rows in torch.split(order.to(inputs.device), BATCH) if len(rows) > 1]


def misfit(model: nn.Module, inputs: Tensor) -> float:
    """How far the running statistics are from those of `inputs` in the worst layer, 0 if they are equal.

    It is the Kullback-Leibler divergence of two normal distributions, the median over the channels of the layer.
    """
    again = copy.deepcopy(model)
    replace_statistics(again, (inputs[rows] for rows in shuffled(inputs)))
    pairs = zip(channel_distributions(again), channel_distributions(model), strict=True)
    return max((float(kl_divergence(fresh, running).median()) for fresh, running in pairs), default=0.0)


def channel_distributions(model: nn.Module) -> list[Normal]:
    """Normal distributions of the running mean and variance of each channel, per batch-norm layer."""
    return [
        Normal(layer.get_buffer("running_mean").float(), (layer.get_buffer("running_var").float() + layer.eps).sqrt())
        for layer in layers_with_statistics(model).values()
    ]
