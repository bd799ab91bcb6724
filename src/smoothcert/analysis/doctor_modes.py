"""Checks of `doctor` for classifiers that are not in eval mode, or that are random."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor, nn

from smoothcert.analysis.doctor_inputs import BATCH, SIMILAR, Examined, Finding, clearly_better, share
from smoothcert.classifier import evaluating, logits_of, references_of
from smoothcert.smoothing.batch_dependence import depends_on_batch, depends_on_place

DEEPEST = 4
"""Number of references that are followed from a callable to the modules that it uses."""


def check_mode(examined: Examined) -> Finding | None:
    """Batch norm or dropout in train mode, or other logits in each call."""
    pair = examined.images[:1].repeat(2, *[1] * (examined.images.ndim - 1))
    with torch.no_grad(), evaluating(examined.classifier):
        layers = sorted({type(layer).__name__ for layer in _active_layers(examined.classifier)})
        first, again = (logits_of(examined.classifier(pair)).float() for _ in range(2))
        random = not torch.allclose(first, again, rtol=1e-3, atol=1e-3 * float(first.abs().max()))
        seeded = depends_on_place(examined.classifier, pair[0])
        dependent = not seeded and depends_on_batch(examined.classifier, pair, first)
    found = f" ({', '.join(layers)} in train mode)" if layers else ""
    if dependent:
        return Finding(
            "train-mode",
            f"the logits of an image depend on the other images of its batch{found}, so votes are not independent",
            "use batch norm with its running statistics: call model.eval() on every module that the model uses",
        )
    if random and layers:
        return Finding(
            "train-mode",
            f"the same image gets other logits in each call{found}",
            "call model.eval() on every module that the model uses",
        )
    if random or seeded:
        where = "in another place of its batch" if seeded else "in each call"
        return Finding(
            "random",
            f"the same image gets other logits {where}: the model draws random numbers",
            "remove them (dropout with training=True, random crops, its own noise), or seed them from the input",
        )
    return None


def check_statistics(examined: Examined, rival: float, noisy: Tensor) -> Finding | None:
    """Batch norm whose running statistics do not fit: the model does far better with those of a batch.

    Images on another scale would look the same: the accuracy must be above `rival`, that on the best scale. Statistics
    of noisy images, which `adapt` computes, are right if they do better on `noisy` images than those of clean ones.
    """
    model, inputs = examined.classifier, examined.images
    if not isinstance(model, nn.Module):
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


def _active_layers(classifier: object) -> Iterator[nn.Module]:
    """The layers of batch norm and dropout that are in train mode although the classifier is in eval mode."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for module in _referenced_modules(classifier, DEEPEST, set()):
        for layer in module.modules():
            without_statistics = isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None
            if isinstance(layer, kinds) and (layer.training or without_statistics):
                yield layer


def _referenced_modules(value: object, depth: int, seen: set[int]) -> Iterator[nn.Module]:
    """The modules that a callable refers to, also through lists, dictionaries, closures and attributes."""
    if id(value) in seen or depth < 0 or isinstance(value, Tensor | ModuleType | type | str | int | float):
        return
    seen.add(id(value))
    parts: list[object] = []
    if isinstance(value, nn.Module):
        yield value
        # Modules in a plain list are not registered, so eval() does not reach them.
        parts += [part for module in value.modules() for part in vars(module).values() if isinstance(part, list)]
    elif isinstance(value, list | tuple | dict):
        parts = list(value.values() if isinstance(value, dict) else value)
    else:
        parts = references_of(value)
    for part in parts:
        yield from _referenced_modules(part, depth - 1, seen)
