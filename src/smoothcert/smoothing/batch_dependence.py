"""Refuse classifiers whose votes are not independent: the logits of an input must depend on this input alone."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from smoothcert.classifier import (
    Classifier,
    below_largest,
    check_logits,
    evaluating,
    failures_reported,
    first_logits,
    logits_of,
    refuse_nan,
    scale_of,
    unmasked,
)
from smoothcert.errors import RequestError

SAME = 0.05
"""Largest difference of equal logits, as a share of `scale_of`: rounding may depend on the batch."""
JITTER, ROUNDINGS = 1e-3, 4
"""Largest difference, as a share of `scale_of` and in roundings, that is attributed to the order of additions on a GPU:
the larger of the two. Only the first of them if random numbers are drawn, which are the more likely cause."""
CALLS, CALLS_WITH_DRAWS = 8, 40
"""Number of calls with the same inputs that must give the same logits: a network that flips a batch every second time
gives the same logits twice with probability 1/2. More if it draws random numbers, which may rarely have an effect."""
PLACES = 8
"""Number of equal inputs that must get equal logits."""
NEIGHBOURS = 6
"""Number of inputs, of which half are replaced. No other test has as many: logits may be cached for a shape."""
CHANGED = 0.34
"""Share of inputs whose logits may change with their neighbours: rounding flips a few of a network that quantizes."""


def refuse_unsound(classifier: Classifier, inputs: Tensor, name: str, num_classes: int | None = None) -> int:
    """Try a classifier, called `name`, on two copies of the first of `inputs` [n, ...]; return its number of classes.

    One that fails, overwrites its input, returns other logits than [2, num_classes], or NaN, or gives votes that are
    not independent, is refused.
    """
    pair = inputs[:1].expand(2, *inputs.shape[1:]).contiguous()
    logits = first_logits(classifier, pair, name)
    check_logits(logits, 2, num_classes)
    refuse_nan(logits)
    # A plain image, such as a black one, hides what is multiplied by its pixels, or moves them.
    texture = torch.rand(pair.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu")
    pair = (pair + texture.to(pair)) / 2
    logits = first_logits(classifier, pair, name)
    with failures_reported(name, inputs.shape[1:]), evaluating(classifier):  # it may fail on larger batches only
        refuse_dependent_votes(classifier, pair[0], logits[0])
    return int(logits.shape[1])


def refuse_dependent_votes(classifier: Classifier, image: Tensor, logits: Tensor) -> None:
    """Refuse a classifier if its `logits` [classes] of `image` are seen to depend on anything but the image.

    A certificate is about one function of the input. The random generators of torch are left as they were.
    """
    classifier = without_masked_classes(classifier, logits)
    if is_random(classifier, image):
        raise RequestError(
            "model: expected the same logits for the same inputs in each call, got others; call model.eval() on each "
            "module that it uses, and remove dropout and other random numbers"
        )
    if depends_on_place(classifier, image):
        raise RequestError(
            "model: expected logits that depend on one input alone, got some that change with its place in the batch; "
            "remove seeds that are set in each call, such as torch.manual_seed(0)"
        )
    if depends_on_batch(classifier, image):
        raise RequestError(
            "model: expected logits that depend on one input alone, got some that change with the other inputs of the "
            "batch; use model.eval(), batch norm with running statistics, and nothing that is kept from call to call"
        )


def is_random(classifier: Classifier, image: Tensor) -> bool:
    """Whether `image`, with more or less noise, gets other logits in another call."""
    rows = _neighbours(image)[::2]
    first = _logits(classifier, rows)
    draws = _draws_random_numbers(classifier, rows)
    same = scale_of(first) * (JITTER if draws else max(JITTER, ROUNDINGS * torch.finfo(rows.dtype).eps))
    for seed in range(1, CALLS_WITH_DRAWS if draws else CALLS):
        again = _logits(classifier, rows, seed)
        if again.shape != first.shape or not torch.allclose(again, first, rtol=0, atol=same, equal_nan=True):
            return True
    return False


def depends_on_place(classifier: Classifier, image: Tensor) -> bool:
    """Whether copies of `image` in a batch get different logits: the votes of one place would repeat its draws."""
    logits = _logits(classifier, torch.stack([image] * PLACES))
    return not _same(logits[:1].expand_as(logits), logits)


def depends_on_batch(classifier: Classifier, image: Tensor) -> bool:
    """Whether the logits of inputs change if the batch is reversed, or the other half of it replaced.

    All batches are in the same memory, as those of votes are: a classifier that caches logits by address or shape
    repeats the first ones.
    """
    rows = _neighbours(image)
    half = len(rows) // 2
    batches = (rows, rows.flip(0), torch.cat([rows[:half]] * 2))
    memory = torch.empty_like(rows)
    first, backwards, repeated = (_logits(classifier, memory.copy_(batch)) for batch in batches)
    if len(first) != len(rows):  # those of an earlier batch, which was at the same address
        return True
    again = (backwards.flip(0), repeated[:half])
    changed = ([not _same(one, two) for one, two in zip(first, logits, strict=False)] for logits in again)
    return any(sum(flags) > CHANGED * len(flags) for flags in changed)


def _neighbours(image: Tensor) -> Tensor:
    """`image` and, in the other half, a brighter one, with more and more noise: the halves differ in every statistic.

    The noise grows from none to twice the largest pixel. A classifier that gives classes in place of logits shows what
    it depends on near their boundaries only.
    """
    half = NEIGHBOURS // 2
    images = torch.stack([image] * half + [1.5 * image.flip(-1) + 0.5] * half)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(images)
    steps = torch.linspace(0, 2, len(images), device="cpu").to(images).view(-1, *[1] * (images.ndim - 1))
    return images + steps * (float(image.abs().max()) or 1.0) * noise


def without_masked_classes(classifier: Classifier, logits: Tensor) -> Classifier:
    """The classifier without the classes that a mask, such as -inf or -1e9, excludes in `logits` [classes]."""
    kept = unmasked(logits.float())
    if int(kept.sum()) < 2 or bool(kept.all()):
        return classifier
    return lambda batch: logits_of(classifier(batch))[:, kept]


def _logits(classifier: Classifier, batch: Tensor, seed: int = 0) -> Tensor:
    """The logits [n, classes] in float32, in memory of their own: a classifier may reuse that of its output."""
    with torch.no_grad(), _seeded(batch.device, seed):
        return logits_of(classifier(batch)).float().clone()


def _draws_random_numbers(classifier: Classifier, batch: Tensor) -> bool:
    """Whether a call changes the state of a random generator of torch, Python or numpy."""
    with torch.no_grad(), _seeded(batch.device, 0):
        before = _generator_states(batch.device)
        classifier(batch)
        return _generator_states(batch.device) != before


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Let code on the CPU and on `device` draw the same random numbers each time, and restore the generators."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would change the generators of other GPUs, too
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _generator_states(device: torch.device) -> list[object]:
    """The states of the generators of torch, which `_seeded` sets, and of Python and numpy, which it does not."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    _, numbers, *place = np.random.get_state(legacy=True)
    return [*(state.numpy().tobytes() for state in states), random.getstate(), np.asarray(numbers).tobytes(), place]


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two sets of logits [..., classes] have the same differences between classes, up to rounding."""
    one, two = below_largest(first), below_largest(second)
    return torch.allclose(one, two, rtol=SAME, atol=SAME * scale_of(first), equal_nan=True)
