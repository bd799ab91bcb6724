"""Refuse classifiers whose votes are not independent: logits that depend on the other inputs of the batch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

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
JITTER = 1e-3
"""Largest difference, as a share of `scale_of`, that is attributed to the order of additions on a GPU."""
SEEDS, STEPS = 3, 8
CALLS = 8
"""Number of calls with the same inputs that show whether logits are random: a network may have a generator
of its own, and one that flips a batch every second time gives the same logits twice with probability 1/2."""
DRAWS = 64
"""Number of random logits of each batch in a test of their distribution."""
SHARED_DRAWS, UNCHANGED_DRAWS = 500, 40
"""Largest number of random logits in the test for shared draws; and if all of them were the same so far."""
STAKE, GIVE_UP = 0.5, 0.01
"""The part of its money that the careful half of a gambler stakes, and the money with which the bets end: of 1."""
LEVEL = 1e-6
"""Significance level of the tests on random logits."""
EQUAL_CALLS, PLACES = 10, 8
"""Number of calls that must repeat a difference of equal inputs (4^-10 is below `LEVEL`), and of these inputs."""
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
        refuse_batch_dependence(classifier, pair, logits)
    return int(logits.shape[1])


def refuse_batch_dependence(classifier: Classifier, pair: Tensor, logits: Tensor) -> None:
    """Refuse a classifier whose votes are seen not to be independent of the other votes of a batch.

    `pair` are two equal inputs [2, ...] and `logits` their logits. Random logits are accepted if each input has draws
    of its own, whatever their number and order. The random generators of torch are left as they were.
    """
    classifier, logits = _unmasked(classifier, logits)
    if depends_on_place(classifier, pair[0]):
        raise RequestError(
            "model: expected logits that depend on one input alone, got some that change with its place in the batch, "
            "in the same way in each call; remove seeds that are set in each call, such as torch.manual_seed(0)"
        )
    is_random = _is_random(classifier, pair, logits)
    if depends_on_batch(classifier, pair, logits, is_random):
        raise RequestError(
            "model: expected logits that depend on one input alone, got some that change with the other inputs of the "
            "batch; use model.eval(), batch norm with running statistics, and nothing that is kept from call to call"
        )
    if is_random and _draws_are_shared(classifier, pair[0]):
        raise RequestError(
            "model: expected different random numbers for each input, got the same ones for all inputs of a batch; "
            "draw them for each input, or not at all"
        )


def depends_on_batch(classifier: Classifier, pair: Tensor, logits: Tensor, is_random: bool | None = None) -> bool:
    """Whether the logits of an input, or their distribution if they are random, depend on the inputs next to it."""
    if not (_is_random(classifier, pair, logits) if is_random is None else is_random):
        return _neighbours_matter(classifier, pair[0])
    different = _brighter(pair[1])
    if _pass(classifier, torch.stack([pair[0], different]), 0).first.isnan().any():
        return False
    # Backwards, too: an input may depend on those before it only.
    both: tuple[Classifier, ...] = (classifier, lambda batch: logits_of(classifier(batch.flip(0))).flip(0))
    return any(_random_logits_depend(one, pair[0], different) for one in both)


def _neighbours_matter(classifier: Classifier, image: Tensor) -> bool:
    """Whether logits without randomness change if a batch is reversed, or half of it replaced.

    The inputs are `image` and, in the other half, a brighter one, with more and more noise: the halves differ in every
    statistic. All batches are in the same memory, as those of votes are: a classifier that caches logits by address or
    shape repeats the first ones.
    """
    half = NEIGHBOURS // 2
    rows = _noisier(torch.stack([image] * half + [_brighter(image)] * half), 0)
    batches = (rows, rows.flip(0), torch.cat([rows[:half]] * 2))
    memory = torch.empty_like(rows)
    first, backwards, repeated = (_pass(classifier, memory.copy_(batch), 0).logits for batch in batches)
    if len(first) != len(rows):  # those of an earlier batch, which was at the same address
        return True
    again = (backwards.flip(0), repeated[:half])
    changed = ([not _same(one, two) for one, two in zip(first, logits, strict=False)] for logits in again)
    return any(sum(flags) > CHANGED * len(flags) for flags in changed)


def _noisier(images: Tensor, seed: int) -> Tensor:
    """`images` with more and more noise, from none to twice the largest pixel of the first one."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(images)
    steps = torch.linspace(0, 2, len(images), device="cpu").to(images).view(-1, *[1] * (images.ndim - 1))
    return images + steps * (float(images[0].abs().max()) or 1.0) * noise


def _brighter(image: Tensor) -> Tensor:
    return 1.5 * image.flip(-1) + 0.5


def _unmasked(classifier: Classifier, logits: Tensor) -> tuple[Classifier, Tensor]:
    """The classifier and its `logits` [2, classes] without the classes that a mask, such as -inf or -1e9, excludes."""
    kept = unmasked(logits[0].float())
    if int(kept.sum()) < 2 or bool(kept.all()):
        return classifier, logits
    return lambda batch: logits_of(classifier(batch))[:, kept], logits[:, kept]


def depends_on_place(classifier: Classifier, image: Tensor) -> bool:
    """Whether copies of `image` in a batch get different logits, and the same ones in each call.

    Random numbers whose seed is set in each call give this: the votes of one place in the batch repeat its draws, so
    they are not independent. If all draws are independent, a call repeats two different logits with probability 1/4 at
    most.
    """
    copies = torch.stack([image] * PLACES)
    logits = _pass(classifier, copies, 0).logits
    if logits.isnan().any() or _same(logits[:1].expand_as(logits), logits):
        return False
    jitter = JITTER * scale_of(logits)
    others = (_pass(classifier, copies, seed).logits for seed in range(1, EQUAL_CALLS + 1))
    return all(torch.allclose(logits, other, rtol=0, atol=jitter) for other in others)


def _random_logits_depend(classifier: Classifier, image: Tensor, different: Tensor) -> bool:
    """Whether random logits of `image` depend on the other inputs, which are equal to it or `different`.

    At equal seeds, and in the same place of the batch, `image` has the same draws as a rule, and then equal logits are
    enough. Unequal ones prove nothing yet: the draws that it gets may depend on the other inputs, for instance on how
    many of them take another path. But then its logits change in jumps: if one other input changes little by little,
    and with it the logits every time, they depend on it. Draws that cannot be repeated, or whose number changes, are
    compared by their distribution.
    """
    four = torch.stack([image] * 4)
    # Four inputs: batch norm over two of them gives -1 and 1, whatever they are.
    others = [torch.stack([image, different, image, different.flip(-1) * (1 + 0.01 * step)]) for step in range(STEPS)]
    repeatable = True
    for seed in range(SEEDS):
        alone, mixed = (_pass(classifier, batch, seed) for batch in (four, others[0]))
        if _same(alone.first, mixed.first):
            continue
        steps = [_pass(classifier, batch, seed) for batch in others]
        repeatable &= torch.equal(steps[0].first, mixed.first)
        repeatable &= all(step.end == alone.end for step in steps)
        if repeatable and all(not torch.equal(one.first, two.first) for one, two in pairwise(steps)):
            return True
    return not repeatable and _distributions_differ(classifier, four, others[0])


def _distributions_differ(classifier: Classifier, one: Tensor, two: Tensor) -> bool:
    """Whether the logits of the first input of two batches have different distributions.

    A Kolmogorov-Smirnov test for each class on independent draws: it is valid for any classifier, and wrong with
    probability `LEVEL` at most.
    """
    from scipy import stats

    samples = (
        torch.stack([_pass(classifier, batch, 2 * draw + odd).first for draw in range(DRAWS)]).T.cpu().numpy()
        for odd, batch in enumerate((one, two))
    )
    values = [float(stats.ks_2samp(*of_class).pvalue) for of_class in zip(*samples, strict=True)]
    return min(values) * len(values) <= LEVEL


def _draws_are_shared(classifier: Classifier, image: Tensor) -> bool:
    """Whether random logits of equal inputs are closer to each other in one call than in two.

    Two calls on copies of an input give two groups of logits. If all draws are independent, the distance between the
    means of these groups is as likely to be larger as to be smaller than that of two other groups, which take one half
    of each call. So bets on "larger" at fair odds are a fair game: a gambler who starts with 1 ever has 1 / `LEVEL`
    with probability `LEVEL` at most (Ville's inequality). A bold half of the money is staked in full each time, for
    draws that are all shared, and a part of a careful half, for shared draws next to others.

    The inputs are `image` with more or less noise: a classifier that gives classes in place of logits shows what it
    draws near their boundaries only.
    """
    half = PLACES // 2
    bold = careful = 0.5
    for draw in range(SHARED_DRAWS):
        level = draw % NEIGHBOURS
        if level == 0:
            inputs = _noisier(torch.stack([image] * NEIGHBOURS), 2 * SHARED_DRAWS + draw)
        copies = torch.stack([inputs[level]] * PLACES)
        one, two = (_pass(classifier, copies, 2 * draw + odd).logits for odd in (0, 1))
        between = float((one - two).mean(0).abs().max())
        within = float((one[:half] - one[half:] + two[:half] - two[half:]).mean(0).abs().max()) / 2
        if abs(between - within) > JITTER * scale_of(one):  # not if one is NaN
            won = 1 if between > within else -1
            bold *= 1 + won
            careful *= 1 + won * STAKE
        if not GIVE_UP < bold + careful < 1 / LEVEL or (bold + careful == 1 and draw == UNCHANGED_DRAWS):
            break
    return bold + careful >= 1 / LEVEL


@contextmanager
def seeded(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Let code on the CPU and on `device` draw the same random numbers each time, and restore the generators."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would change the generators of other GPUs, too
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@dataclass(frozen=True, eq=False)
class _Pass:
    """The logits [n, classes] of a batch, and the states of the generators before and after it."""

    logits: Tensor
    start: list[object]
    end: list[object]

    @property
    def first(self) -> Tensor:
        return self.logits[0]


def _pass(classifier: Classifier, batch: Tensor, seed: int) -> _Pass:
    with seeded(batch.device, seed), torch.no_grad():
        start = _generator_states(batch.device)
        logits = logits_of(classifier(batch)).float().clone()  # a classifier may reuse the memory of its output
        return _Pass(logits, start, _generator_states(batch.device))


def _generator_states(device: torch.device) -> list[object]:
    """The states of the generators of torch, which `seeded` sets, and of Python and numpy, which it does not."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    _, numbers, *place = np.random.get_state(legacy=True)
    return [*(state.numpy().tobytes() for state in states), random.getstate(), np.asarray(numbers).tobytes(), place]


def _is_random(classifier: Classifier, pair: Tensor, logits: Tensor) -> bool:
    """Whether `pair` gets other logits than `logits` in one of several calls, or random numbers are drawn for it."""
    for again in (_pass(classifier, pair, 0) for _ in range(CALLS)):
        if again.start != again.end or not torch.equal(again.first, logits[0].float()):
            return True
    return False


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two sets of logits [..., classes] have the same differences between classes, up to rounding."""
    one, two = below_largest(first), below_largest(second)
    return torch.allclose(one, two, rtol=SAME, atol=SAME * scale_of(first), equal_nan=True)
