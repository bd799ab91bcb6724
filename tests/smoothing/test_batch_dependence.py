"""Votes must be independent: classifiers whose logits depend on more than one input alone are refused."""

import random
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from smoothcert import SmoothedClassifier
from smoothcert.errors import RequestError
from smoothcert.smoothing.batch_dependence import refuse_dependent_votes, refuse_unsound

Function = Callable[[Tensor], Tensor]
ROWS = "depend on one input alone"
RANDOM = "the same logits for the same inputs"
PLACE = "its place in the batch"


class Slots:
    __slots__ = ("layers",)

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers


def hidden(*layers: nn.Module) -> Function:
    """The layers in train mode, in an object with slots where eval() does not reach them."""
    kept = Slots([layer.train() for layer in layers])

    def classify(images: Tensor) -> Tensor:
        for layer in kept.layers:
            images = layer(images)
        return images

    return classify


def linear() -> Function:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def centred(classify: Function, noise: float) -> Function:
    """Minus the mean over the batch, after random numbers for each input."""

    def with_noise(images: Tensor) -> Tensor:
        logits = classify(images)
        logits = logits + noise * torch.randn_like(logits)
        return logits - logits.mean(0)

    return with_noise


def seeded(classify: Function) -> Function:
    """The same random numbers in each call: the place of an input in its batch decides which ones it gets."""

    def with_seed(images: Tensor) -> Tensor:
        torch.manual_seed(3)
        return classify(images)

    return with_seed


def moving_average() -> Function:
    """Each input with those before it in the batch, as for the images of a video."""
    classify = linear()

    def averaged(images: Tensor) -> Tensor:
        rows = [(logits := classify(images))[0]]
        for row in logits[1:]:
            rows.append(0.7 * rows[-1] + 0.3 * row)
        return torch.stack(rows)

    return averaged


def sorted_batch() -> Function:
    """The logits of the inputs from dark to bright, whatever their order was."""
    classify = linear()
    return lambda x: classify(x[x.flatten(1).sum(1).argsort()])


def cached(key: Callable[[Tensor], object]) -> Function:
    """Logits that are computed once for each key of a batch."""
    classify, known = linear(), dict[object, Tensor]()
    return lambda x: known[key(x)] if key(x) in known else known.setdefault(key(x), classify(x))


def masked(classify: Function, value: float) -> Function:
    """With a class that never wins."""
    return lambda x: classify(x).index_fill(1, torch.tensor(7), value)


def in_one_output(classify: Function) -> Function:
    """All results in the same memory."""
    out: dict[int, Tensor] = {}
    return lambda x: out.setdefault(len(x), torch.empty(len(x), 10)).copy_(classify(x))


def batch_norm() -> Function:
    return hidden(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10))


DEPENDENT: dict[str, tuple[Callable[[], Function], str]] = {
    "batch norm": (batch_norm, ROWS),
    "batch norm, class masked by -1e9": (lambda: masked(batch_norm(), -1e9), ROWS),
    "batch norm, class masked by -inf": (lambda: masked(batch_norm(), -float("inf")), ROWS),
    "batch norm, one output": (lambda: in_one_output(batch_norm()), ROWS),
    "moving average": (moving_average, ROWS),
    "sorted batch": (sorted_batch, ROWS),
    "scaled by the largest pixel": (lambda: (lambda f: lambda x: f(x / x.max()))(linear()), ROWS),
    "cached by address": (lambda: cached(Tensor.data_ptr), ROWS),
    "cached by address and shape": (lambda: cached(lambda x: (x.data_ptr(), x.shape)), ROWS),
    "cached from the first call on": (lambda: cached(lambda x: None), ROWS),
    "cached by shape": (lambda: cached(lambda x: x.shape), ROWS),
    "batch norm, dropout": (
        lambda: hidden(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 10)),
        RANDOM,
    ),
    "dropout, batch norm": (
        lambda: hidden(nn.Flatten(), nn.Dropout(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)),
        RANDOM,
    ),
    "strong dropout": (
        lambda: hidden(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Dropout(0.9), nn.Linear(288, 10)),
        RANDOM,
    ),
    "centred logits": (lambda: centred(linear(), 1.0), RANDOM),
    "one noise for all": (lambda: (lambda f: lambda x: f(x + torch.randn_like(x[:1])))(linear()), RANDOM),
    "one shift for all": (lambda: (lambda f: lambda x: f(x.roll(int(torch.randint(8, ())), -1)))(linear()), RANDOM),
    "one shift for all, other rounding in each place": (
        lambda: (lambda f: lambda x: f(x.roll(int(torch.randint(3, ())), -1)) + 1e-6 * torch.rand(len(x), 1))(linear()),
        RANDOM,
    ),
    "one noise for all, class masked": (
        lambda: masked((lambda f: lambda x: f(x + torch.randn_like(x[:1])))(linear()), -1e9),
        RANDOM,
    ),
    "one coin for all": (
        lambda: lambda x: functional.one_hot((torch.rand(1) < 0.5).long(), 10).float().expand(len(x), -1),
        RANDOM,
    ),
    "one noise for all, and own noise": (
        lambda: (lambda f: lambda x: f(x + torch.randn_like(x[:1]) + torch.randn_like(x)))(linear()),
        RANDOM,
    ),
    "one shift for all, and own noise": (
        lambda: (lambda f: lambda x: f(x.roll(int(torch.randint(8, ())), -1) + 0.1 * torch.randn_like(x)))(linear()),
        RANDOM,
    ),
    "seeded coin": (lambda: seeded(coin(0.5)), PLACE),
    "seeded dropout": (lambda: seeded(hidden(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))), PLACE),
    "own generator, seeded": (lambda: (lambda f: lambda x: own_generator(f)(x))(linear()), PLACE),
    "dropout": (lambda: hidden(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10)), RANDOM),
    "own noise": (lambda: (lambda f: lambda x: f(x + torch.randn_like(x)))(linear()), RANDOM),
    "own generator": (lambda: own_generator(), RANDOM),
    "random flips of each input": (lambda: flips(random.Random(3), together=False), RANDOM),
    "coin": (lambda: coin(0.5), RANDOM),
    "rare coin": (lambda: coin(0.05), RANDOM),
    "random NaN": (lambda: lambda x: torch.randn(len(x), 10).log(), RANDOM),
}
"""A certificate is about one function of the input, so random numbers are refused even if each input has its own."""


def coin(p: float) -> Function:
    return lambda x: functional.one_hot((torch.rand(len(x)) < p).long(), 10).float()


def flips(draws: random.Random, *, together: bool) -> Function:
    """Random flips by Python's random numbers, of all inputs of a batch together or of each one."""
    classify = linear()

    def flipped(images: Tensor) -> Tensor:
        return images.flip(-1) if draws.random() < 0.5 else images

    return lambda x: classify(flipped(x) if together else torch.stack([flipped(image) for image in x]))


def own_generator(classify: Function | None = None) -> Function:
    """Draws that no seed of torch repeats."""
    generator, classify = torch.Generator().manual_seed(3), classify or linear()
    return lambda x: classify(x + torch.randn(x.shape, generator=generator))


INDEPENDENT: dict[str, Callable[[], Function]] = {
    "no randomness": linear,
    "one output": lambda: in_one_output(linear()),
    "other rounding in each call": lambda: (lambda f: lambda x: f(x) + 1e-6 * torch.rand(len(x), 1))(linear()),
    "one seeded noise for all": lambda: seeded((lambda f: lambda x: f(x + torch.randn_like(x[:1])))(linear())),
    "class masked by -inf": lambda: masked(linear(), -float("inf")),
    "NaN for dark pixels": lambda: (lambda f: lambda x: f(x.log()))(linear()),
    "draws without effect": lambda: (lambda f: lambda x: f(x) + 0 * torch.rand(1))(linear()),
}


def examine(classify: Function, seed: int) -> None:
    image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        refuse_dependent_votes(classify, image, classify(image.repeat(2, 1, 1, 1))[0])


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_votes_are_refused(name: str) -> None:
    make, message = DEPENDENT[name]
    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(RequestError, match=message):
            examine(make(), seed)


MONOTONE: dict[str, Callable[[Tensor], Tensor]] = {
    "plus a constant": lambda logits: logits - 1000,
    "log-probabilities": lambda logits: logits.log_softmax(1),
    "probabilities": lambda logits: logits.softmax(1),
    "small logits plus a constant": lambda logits: 1e-3 * logits + 5,
}
"""Other logits with the same votes, in which the differences between classes are small."""


@pytest.mark.parametrize("same_votes", MONOTONE)
@pytest.mark.parametrize("name", ["batch norm", "moving average", "sorted batch", "one noise for all"])
def test_dependent_votes_are_refused_next_to_a_constant(name: str, same_votes: str) -> None:
    make, message = DEPENDENT[name]
    for seed in range(3):
        torch.manual_seed(seed)
        classify = make()
        with pytest.raises(RequestError, match=message):
            examine(lambda x: MONOTONE[same_votes](classify(x)), seed)  # noqa: B023


@pytest.mark.parametrize("same_votes", MONOTONE)
@pytest.mark.parametrize("name", ["no randomness", "other rounding in each call", "one seeded noise for all"])
def test_independent_votes_are_accepted_next_to_a_constant(name: str, same_votes: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        classify = INDEPENDENT[name]()
        examine(lambda x: MONOTONE[same_votes](classify(x)), seed)  # noqa: B023


def classes_of(classify: Function) -> Function:
    """The class in place of logits, as a service gives it that is called over a network."""
    return lambda x: functional.one_hot(classify(x).argmax(1), 10).float()


@pytest.mark.parametrize("name", ["one noise for all", "one shift for all", "own noise", "rare coin"])
def test_random_numbers_are_refused_if_classes_are_given_in_place_of_logits(name: str) -> None:
    make, message = DEPENDENT[name]
    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(RequestError, match=message):
            examine(classes_of(make()), seed)


def test_random_numbers_are_refused_if_the_class_of_the_image_without_noise_is_certain() -> None:
    """A shift does not change a white image, but its noisy copies."""
    for seed in range(5):
        torch.manual_seed(seed)
        classify = classes_of(DEPENDENT["one shift for all"][0]())
        white = torch.ones(1, 8, 8)
        certain = classify(white[None])
        assert all(torch.equal(certain, classify(white[None])) for _ in range(1000))
        with pytest.raises(RequestError, match=RANDOM):
            refuse_dependent_votes(classify, white, certain[0])


def test_a_function_of_the_input_is_accepted_if_it_gives_classes_in_place_of_logits() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        examine(classes_of(linear()), seed)


@pytest.mark.parametrize(
    ("change", "drawn", "refused"), [(1 / 128, False, False), (1 / 128, True, True), (1 / 16, False, True)]
)
def test_rounding_of_the_precision_is_accepted_unless_it_may_be_random(
    change: float, drawn: bool, refused: bool
) -> None:
    """bfloat16 has steps of 1/128: the order of additions changes logits by about one of them."""
    image = torch.rand(1, 8, 8, dtype=torch.bfloat16)
    logits = torch.linspace(-1, 1, 10)
    calls = count()

    def classify(images: Tensor) -> Tensor:
        number = torch.randint(2, ()) if drawn else next(calls) % 2
        return (logits + number * change * (torch.arange(10) % 2)).expand(len(images), -1)

    if refused:
        with pytest.raises(RequestError, match=RANDOM):
            refuse_dependent_votes(classify, image, logits)
    else:
        refuse_dependent_votes(classify, image, logits)


@pytest.mark.parametrize("changed", range(5))
def test_two_of_six_inputs_may_change_by_rounding(changed: int) -> None:
    """A network that quantizes flips a few classes if rounding differs with the place in the batch; half are too many.

    Here the brightest inputs of a batch have another class in its first half than in its second.
    """

    def classify(images: Tensor) -> Tensor:
        brightness = images.flatten(1).mean(1)
        classes = torch.zeros(len(images), dtype=torch.long)
        if len(brightness.unique()) == len(images) > 2:
            brightest = brightness.argsort(descending=True)[:changed]
            classes[brightest] = (brightest < len(images) / 2).long()
        return functional.one_hot(classes, 10).float()

    image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0))
    logits = classify(image[None])[0]
    if changed <= 2:
        refuse_dependent_votes(classify, image, logits)
    else:
        with pytest.raises(RequestError, match=ROWS):
            refuse_dependent_votes(classify, image, logits)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_votes_are_accepted(name: str) -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        examine(INDEPENDENT[name](), seed)


@pytest.mark.parametrize("together", [True, False])
def test_random_numbers_of_another_generator_than_that_of_torch_are_seen(together: bool) -> None:
    """Two calls in a row often draw the same number, here whether to flip."""
    for seed in range(3, 7):
        with pytest.raises(RequestError, match=RANDOM):
            examine(flips(random.Random(seed), together=together), seed)


def test_a_rare_change_of_all_inputs_at_once_is_seen() -> None:
    classify = linear()
    draws: tuple[Callable[[], float], ...] = (lambda: float(torch.rand(())), random.random, np.random.random)
    for draw in draws:
        for seed in range(2):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            with pytest.raises(RequestError, match=RANDOM):
                examine(lambda x: classify(x.flip(-1) if draw() < 0.1 else x), seed)  # noqa: B023


def test_the_generator_of_the_user_is_left_alone() -> None:
    for make in (INDEPENDENT["draws without effect"], INDEPENDENT["one seeded noise for all"]):
        classify = make()
        image = torch.rand(1, 8, 8)
        logits, state = classify(image[None])[0], torch.get_rng_state()
        refuse_dependent_votes(classify, image, logits)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["one shift for all", "seeded dropout", "batch norm", "one set of weights for all"])
def test_dependent_votes_on_plain_images_are_not_certified(name: str, level: float) -> None:
    """The image alone shows nothing of a shift or, if it is black, of random weights; its noisy copies do."""
    torch.manual_seed(0)
    classify = linear()
    weights = (lambda: lambda x: classify(x) + x.flatten(1) @ torch.randn(64, 10), RANDOM)
    make, message = DEPENDENT.get(name, weights)
    smoothed = SmoothedClassifier(make(), sigma=0.5, num_classes=10)
    with pytest.raises(RequestError, match=message):
        smoothed.certify(torch.full((1, 1, 8, 8), level), n=100)


@pytest.mark.parametrize("name", ["no randomness", "NaN for dark pixels", "draws without effect"])
def test_independent_votes_on_plain_images_are_accepted(name: str) -> None:
    torch.manual_seed(0)
    refuse_unsound(INDEPENDENT[name](), torch.ones(1, 1, 8, 8), name)


def test_hidden_batch_norm_with_dropout_is_not_certified() -> None:
    torch.manual_seed(0)
    smoothed = SmoothedClassifier(DEPENDENT["batch norm, dropout"][0](), sigma=0.5, num_classes=10)
    with pytest.raises(RequestError, match=RANDOM):
        smoothed.certify(torch.rand(2, 1, 8, 8), n=100)
