"""Checks of `doctor` for classifiers that are not in eval mode, or that are random."""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from smoothcert.analysis.doctor_inputs import BATCH, SIMILAR, Examined, Finding, clearly_better, share
from smoothcert.classifier import evaluating, failures_reported, logits_of
from smoothcert.smoothing.batch_dependence import depends_on_batch, depends_on_place, is_random, without_masked_classes


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


def check_statistics(examined: Examined, rival: float, noisy: Tensor) -> Finding | None:
    """Batch norm whose running statistics do not fit: the model does far better with those of a batch.

    Images on another scale would look the same: the accuracy must be above `rival`, that on the best scale. Statistics
    of noisy images, which `adapt` computes, are right if they do better on `noisy` images than those of clean ones.
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
    with torch.no_grad():
        # Images in random order: batches of one class have other statistics.
        order = torch.randperm(len(inputs), device="cpu", generator=torch.Generator().manual_seed(0)).to(inputs.device)
        parts = [part for part in torch.split(inputs[order], BATCH) if len(part) > 1]
        shuffled = torch.cat([logits_of(trained(part)).argmax(1) for part in parts])
    tested = order[: len(shuffled)]
    right = shuffled == examined.labels[tested]
    before = examined.correct(inputs)[tested]
    if not clearly_better(right, before, 0.2) or float(right.double().mean()) <= rival + 0.02:
        return None
    under_noise = replace(examined, classifier=trained.eval()).correct(noisy)
    if clearly_better(examined.correct(noisy), under_noise, SIMILAR, level=0.01):
        return None
    return Finding(
        "batch-statistics",
        f"the running statistics of batch norm do not fit: accuracy is {share(before)} with them, and {share(right)} "
        "with the statistics of each batch, as in train mode",
        "compute them again: `smoothcert adapt` does it, on images under the noise of certification",
    )
