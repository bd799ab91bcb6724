"""Attacks: limits they keep, what they restore, and their iterates against a plain numpy transcription."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from smoothcert.attacks import attacked, ddn, project, smoothed_pgd, sphere_attack
from smoothcert.attacks.l2 import unit
from smoothcert.attacks.smoothed_pgd import smoothed_loss_and_gradient

SHAPES = [(1, 28, 28), (3, 8, 8), (5,)]
BATCH, CLASSES, NOISES = 4, 3, 2

Attack = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def network(shape: tuple[int, ...]) -> nn.Module:
    """Smooth, with modes that matter and one parameter that is frozen already."""
    torch.manual_seed(1)
    pixels = math.prod(shape)
    layers = nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
    )
    layers[5].bias.requires_grad_(False)
    layers[2].eval()
    return layers


def batch(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(BATCH, *shape, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return images, labels, 0.25 * torch.randn(NOISES, BATCH, *shape, generator=generator)


def last_of_pgd(max_norm: float | Tensor | None = 0.8, steps: int = 6, step_size: float = 0.4) -> Attack:
    def run(classifier: nn.Module, images: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        iterates = smoothed_pgd(classifier, images, labels, noise, steps=steps, step_size=step_size, max_norm=max_norm)
        return list(iterates)[-1]

    return run


def of_ddn(max_norm: float | Tensor = 0.8, steps: int = 6) -> Attack:
    return lambda classifier, images, labels, noise: ddn(
        classifier, images, labels, noise, steps=steps, max_norm=max_norm
    )


ATTACKS = {"pgd": last_of_pgd(), "ddn": of_ddn(), "pgd without a ball": last_of_pgd(None)}
attacks = pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def lengths(offset: Tensor) -> Tensor:
    return offset.flatten(1).double().norm(dim=1)


def state(classifier: nn.Module) -> tuple[list[bool], list[bool], list[Tensor | None]]:
    parameters = list(classifier.parameters())
    return (
        [module.training for module in classifier.modules()],
        [parameter.requires_grad for parameter in parameters],
        [parameter.grad for parameter in parameters],
    )


@shapes
@attacks
def test_attacks_stay_in_range_and_raise_the_loss(attack: Attack, shape: tuple[int, ...]) -> None:
    """In [0, 1], same shape and type, inside the ball where there is one; -log pbar_y is larger than before."""
    classifier, (images, labels, noise) = network(shape), batch(shape)
    _, _, average = smoothed_loss_and_gradient(classifier, images, labels, noise)
    torch.testing.assert_close(average.sum(1), torch.ones(BATCH))
    right = torch.arange(BATCH) > 0
    labels = torch.where(right, average.argmax(1), average.argmin(1))
    found = attack(classifier, images, labels, noise)
    assert (found.shape, found.dtype, found.requires_grad) == (images.shape, images.dtype, False)
    assert 0 <= found.min() <= found.max() <= 1
    if attack is not ATTACKS["pgd without a ball"]:
        assert lengths(found - images).max() <= 0.8 * (1 + 1e-5)
    before, _, _ = smoothed_loss_and_gradient(classifier, images, labels, noise)
    after, _, _ = smoothed_loss_and_gradient(classifier, found, labels, noise)
    if attack is ATTACKS["ddn"]:
        # DDN leaves images alone that are misclassified already.
        assert torch.equal(found[~right], images[~right])
        before, after = before[right], after[right]
    assert (after > before).all()


@pytest.mark.parametrize("radius", [1e-3, 0.1, 1.0, 2.0])
@pytest.mark.parametrize("make", [last_of_pgd, of_ddn])
def test_attacks_stay_in_the_ball_of_a_number_or_tensor_radius(make: Callable[..., Attack], radius: float) -> None:
    classifier, (images, labels, noise) = network((3, 8, 8)), batch((3, 8, 8))
    found = make(radius)(classifier, images, labels, noise)
    assert lengths(found - images).max() <= radius * (1 + 1e-5) + 1e-6
    assert 0 <= found.min() <= found.max() <= 1
    torch.testing.assert_close(make(torch.tensor(radius))(classifier, images, labels, noise), found)


@attacks
def test_attacks_do_not_change_their_input(attack: Attack) -> None:
    images, labels, noise = batch((3, 8, 8))
    copies = images.clone(), noise.clone()
    attack(network((3, 8, 8)), images, labels, noise)
    assert torch.equal(images, copies[0])
    assert torch.equal(noise, copies[1])


class Constant(nn.Module):
    """The same logits for every image, reached through it, so that the gradient is zero and not missing."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).sum(1, keepdim=True) * 0 + torch.tensor([2.0, 1.0, 0.0])


@shapes
@attacks
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_images_with_zero_gradient_do_not_move(attack: Attack, shape: tuple[int, ...], wrong: bool) -> None:
    images, _, noise = batch(shape)
    labels = torch.full((BATCH,), int(wrong))
    assert torch.equal(attack(Constant(), images, labels, noise), images)


@attacks
def test_enormous_logits_do_not_give_nan(attack: Attack) -> None:
    """pbar_y is 0 or 1 in float32: the gradient is zero, the attack stands still."""
    classifier, (images, labels, noise) = network((5,)), batch((5,))
    with torch.no_grad():
        classifier[5].weight *= 1e6
    found = attack(classifier, images, labels, noise)
    assert found.isfinite().all()
    assert 0 <= found.min() <= found.max() <= 1


@attacks
def test_modes_and_requires_grad_are_restored(attack: Attack) -> None:
    classifier = network((5,))
    before, buffers = state(classifier), [buffer.clone() for buffer in classifier.buffers()]
    attack(classifier, *batch((5,)))
    assert state(classifier) == before
    assert all(torch.equal(a, b) for a, b in zip(buffers, classifier.buffers(), strict=True))


class Spy(nn.Module):
    """Notes modes and requires_grad at every forward pass, and fails at pass number `fails_at`."""

    def __init__(self, inner: nn.Module, fails_at: int | None = None) -> None:
        super().__init__()
        self.inner, self.fails_at = inner, fails_at
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, images: Tensor) -> Tensor:
        modes, wanted, _ = state(self)
        self.seen.append((any(modes), any(wanted)))
        if len(self.seen) == self.fails_at:
            raise RuntimeError("out of memory")
        return self.inner(images)


@attacks
def test_the_classifier_is_attacked_in_eval_mode_without_parameter_gradients(attack: Attack) -> None:
    """One forward pass a step, all noises in it."""
    spy = Spy(network((5,)))
    attack(spy, *batch((5,)))
    assert spy.seen == [(False, False)] * 6


@attacks
@pytest.mark.parametrize("fails_at", [1, 3])
def test_state_is_restored_after_an_exception(attack: Attack, fails_at: int) -> None:
    spy = Spy(network((5,)), fails_at)
    before = state(spy)
    with pytest.raises(RuntimeError, match="out of memory"):
        attack(spy, *batch((5,)))
    assert state(spy) == before
    with pytest.raises(ValueError, match="inside"), attacked(spy):
        raise ValueError("inside")
    assert state(spy) == before


def test_state_is_restored_between_iterates_and_when_the_generator_is_dropped() -> None:
    classifier = network((5,))
    before = state(classifier)
    iterates = smoothed_pgd(classifier, *batch((5,)), steps=4, step_size=0.5)
    assert state(classifier) == before
    for _ in range(2):
        next(iterates)
        assert state(classifier) == before
    iterates.close()
    assert state(classifier) == before


def test_modes_changed_between_iterates_are_kept() -> None:
    """What the caller does with an iterate is not undone by the next step."""
    classifier = network((5,)).train()
    iterates = smoothed_pgd(classifier, *batch((5,)), steps=2, step_size=0.5)
    next(iterates)
    classifier.eval()
    next(iterates)
    assert not any(module.training for module in classifier.modules())


def test_attacks_work_under_no_grad_and_on_plain_functions() -> None:
    classifier, (images, labels, noise) = network((5,)).eval(), batch((5,))
    expected = last_of_pgd()(classifier, images, labels, noise)
    with torch.no_grad():
        assert torch.equal(last_of_pgd()(classifier, images, labels, noise), expected)
    assert torch.equal(last_of_pgd()(lambda x: classifier(x), images, labels, noise), expected)


@attacks
def test_images_do_not_influence_each_other(attack: Attack) -> None:
    """Every image is attacked as if it were alone: its own norm, its own noises."""
    classifier, (images, labels, noise) = network((3, 8, 8)).double(), batch((3, 8, 8))
    together = attack(classifier, images.double(), labels, noise.double())
    for b in range(BATCH):
        alone = attack(classifier, images[b : b + 1].double(), labels[b : b + 1], noise[:, b : b + 1].double())
        torch.testing.assert_close(together[b : b + 1], alone, rtol=1e-9, atol=1e-9)


# Iterates by hand, for logits W x + c


def transcribed_gradient(
    weights: np.ndarray, at: np.ndarray, y: int, noises: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """-d log mean_i softmax(W (x + delta_i))_y / dx at one image, and the mean of the softmax."""
    total, slope = np.zeros(len(weights)), np.zeros_like(at)
    for delta in noises:
        z = weights @ (at + delta)
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        total += p
        slope += p[y] * (weights[y] - p @ weights)
    return -slope / total[y], total / len(noises)


def transcribed_iterates(
    weights: np.ndarray,
    x: np.ndarray,
    y: int,
    noises: np.ndarray,
    steps: int,
    max_norm: float | None,
    clamp_first: bool = True,
) -> list[np.ndarray]:
    """One image: a step of 0.3 along the gradient, [0, 1], the ball."""
    iterates, at = [], x
    for _ in range(steps):
        gradient, _ = transcribed_gradient(weights, at, y, noises)
        at = at + 0.3 * gradient / (np.sqrt((gradient**2).sum()) + 1e-8)
        if clamp_first:
            at = np.minimum(np.maximum(at, 0.0), 1.0)
        if max_norm is not None:
            length = np.sqrt(((at - x) ** 2).sum())
            at = x + (at - x) * min(1.0, max_norm / length)
        at = np.minimum(np.maximum(at, 0.0), 1.0)
        iterates.append(at)
    return iterates


@pytest.mark.parametrize("shape", [(1, 2, 3), (6,)], ids=str)
@pytest.mark.parametrize("max_norm", [None, 0.45])
@pytest.mark.parametrize("steps", [1, 7])
def test_iterates_equal_the_transcription(shape: tuple[int, ...], max_norm: float | None, steps: int) -> None:
    rng = np.random.default_rng(3)
    weights = rng.normal(size=(CLASSES, 6))
    x, noise = rng.uniform(size=(BATCH, 6)), 0.5 * rng.normal(size=(3, BATCH, 6))
    y = rng.integers(CLASSES, size=BATCH)
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(6, CLASSES, bias=False)).double()
    classifier[1].weight.data = torch.tensor(weights)
    found = list(
        smoothed_pgd(
            classifier,
            torch.tensor(x).view(BATCH, *shape),
            torch.tensor(y),
            torch.tensor(noise).view(3, BATCH, *shape),
            steps=steps,
            step_size=0.3,
            max_norm=max_norm,
        )
    )
    assert len(found) == steps
    expected = [transcribed_iterates(weights, x[b], y[b], noise[:, b], steps, max_norm) for b in range(BATCH)]
    for step in range(steps):
        by_hand = np.stack([expected[b][step] for b in range(BATCH)])
        np.testing.assert_allclose(found[step].flatten(1).numpy(), by_hand, rtol=0, atol=1e-12)
    # The order of clamp and projection matters only where both act, as they do here.
    other = [transcribed_iterates(weights, x[b], y[b], noise[:, b], steps, max_norm, False) for b in range(BATCH)]
    differs = max(np.abs(expected[b][-1] - other[b][-1]).max() for b in range(BATCH)) > 1e-6
    assert differs == (steps > 1 and max_norm is not None)


def test_smoothed_loss_is_of_the_average_probability() -> None:
    """-log mean_i p_i, which is not mean_i -log p_i; never above -log 1e-20."""
    classifier, (images, labels, noise) = network((5,)).eval(), batch((5,))
    loss, gradient, average = smoothed_loss_and_gradient(classifier, images, labels, noise)
    p = torch.stack([classifier(images + noise[i]).softmax(-1) for i in range(NOISES)]).mean(0)
    torch.testing.assert_close(average, p.detach())
    torch.testing.assert_close(loss, -p[torch.arange(BATCH), labels].log().detach())
    assert (loss.shape, gradient.shape, average.shape) == ((BATCH,), images.shape, (BATCH, CLASSES))
    with torch.no_grad():
        classifier[5].weight *= 1e6
    loss, _, _ = smoothed_loss_and_gradient(classifier, images, labels, noise)
    assert loss.max().item() == pytest.approx(-math.log(1e-20), rel=1e-5)


# Projection and unit vectors

numbers = st.floats(-10, 10, width=32)
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12)
radii = st.floats(1e-3, 20)


def as_batches(values: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    both = torch.tensor(values, dtype=torch.float64)
    return both[:, 0].view(1, -1), both[:, 1].view(1, -1)


@settings(deadline=None)
@given(pairs, radii)
def test_projection_is_never_longer_than_the_radius_and_idempotent(
    values: list[tuple[float, float]], radius: float
) -> None:
    points, centre = as_batches(values)
    once = project(points, centre, radius)
    assert lengths(once - centre).item() <= radius * (1 + 1e-12) + 1e-14
    torch.testing.assert_close(project(once, centre, radius), once, rtol=1e-12, atol=1e-14)


@settings(deadline=None)
@given(pairs, radii)
def test_projection_keeps_inner_points_and_directions(values: list[tuple[float, float]], radius: float) -> None:
    points, centre = as_batches(values)
    length = lengths(points - centre).item()
    found = project(points, centre, radius)
    if length <= radius:
        torch.testing.assert_close(found, points, rtol=1e-14, atol=1e-14)
    else:
        torch.testing.assert_close(found, centre + (points - centre) * (radius / length), rtol=1e-12, atol=1e-12)


def test_projection_is_image_by_image_with_a_radius_each() -> None:
    centre = torch.zeros(3, 1, 2, 2)
    points = torch.stack([torch.full((1, 2, 2), length) for length in (0.1, 1.0, 3.0)])
    torch.testing.assert_close(lengths(project(points, centre, 1.5)), torch.tensor([0.2, 1.5, 1.5]).double())
    radius = torch.tensor([0.1, 3.0, 2.0]).view(3, 1, 1, 1)
    torch.testing.assert_close(lengths(project(points, centre, radius)), torch.tensor([0.1, 2.0, 2.0]).double())
    assert torch.equal(project(centre, centre, 1.0), centre)


@shapes
def test_unit_has_length_one_and_zero_stays_zero(shape: tuple[int, ...]) -> None:
    gradient, _, _ = batch(shape)
    gradient = torch.cat([1e-3 * gradient, torch.zeros(1, *shape)])
    found = unit(gradient)
    torch.testing.assert_close(lengths(found)[:BATCH], torch.ones(BATCH).double(), rtol=1e-4, atol=0)
    assert torch.equal(found[BATCH], gradient[BATCH])


# DDN on a linear classifier whose boundary is known


def halves(direction: Tensor, offset: Tensor) -> nn.Module:
    """Two classes: 1 where direction . x > offset."""
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(direction.numel(), 2)).double()
    classifier[1].weight.data = torch.stack([-direction, direction])
    classifier[1].bias.data = torch.stack([offset, -offset])
    return classifier


def transcribed_ddn(
    weights: np.ndarray, x: np.ndarray, y: int, noises: np.ndarray, steps: int, most: float
) -> np.ndarray:
    """One image: steps of falling length along the gradient, each followed by the new norm and [0, 1]."""
    offset, norm, best = np.zeros_like(x), 1.0, None
    for step in range(steps):
        gradient, average = transcribed_gradient(weights, x + offset, y, noises)
        fooled = average.argmax() != y
        if fooled and (best is None or (offset**2).sum() < (best**2).sum()):
            best = offset
        length = 0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2
        offset = offset + length * gradient / (np.sqrt((gradient**2).sum()) + 1e-8)
        norm = min(most, norm * (0.95 if fooled else 1.05))
        offset = offset * norm / np.sqrt((offset**2).sum())
        offset = np.clip(x + offset, 0, 1) - x
    return x + (offset if best is None else best)


@pytest.mark.parametrize(("steps", "most"), [(1, 2.0), (4, 0.7), (9, 2.0)])
def test_ddn_equals_the_transcription(steps: int, most: float) -> None:
    rng = np.random.default_rng(5)
    weights, count = 2 * rng.normal(size=(CLASSES, 6)), 12
    x, noise = rng.uniform(size=(count, 6)), 0.5 * rng.normal(size=(3, count, 6))
    y = rng.integers(CLASSES, size=count)
    classifier = nn.Linear(6, CLASSES, bias=False).double()
    classifier.weight.data = torch.tensor(weights)
    found = ddn(classifier, torch.tensor(x), torch.tensor(y), torch.tensor(noise), steps=steps, max_norm=most).numpy()
    expected = [transcribed_ddn(weights, x[b], y[b], noise[:, b], steps, most) for b in range(count)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    assert 0 < sum(np.array_equal(a, b) for a, b in zip(found, x, strict=True)) < count  # wrong without an attack


@pytest.mark.parametrize("distance", [0.15, 0.4])
def test_ddn_finds_the_boundary_of_a_linear_classifier(distance: float) -> None:
    """The nearest misclassified point is at `distance`, far inside epsilon: DDN ends near it, PGD at epsilon."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(12, generator=generator, dtype=torch.float64)
    direction /= direction.norm()
    image = torch.full((1, 3, 2, 2), 0.5, dtype=torch.float64)
    images = image + 0.02 * torch.randn(5, 3, 2, 2, generator=generator, dtype=torch.float64)
    # All five are moved along the direction to be at the same distance of one boundary.
    images -= ((images.flatten(1) - 0.5) @ direction).view(5, 1, 1, 1) * direction.view(1, 3, 2, 2)
    classifier = halves(direction, (image.flatten() @ direction) + distance)
    labels, noise = torch.zeros(5, dtype=torch.int64), torch.zeros(1, 5, 3, 2, 2, dtype=torch.float64)
    found = ddn(classifier, images, labels, noise, steps=60, max_norm=1.0)
    assert (classifier(found).argmax(1) == 1).all()
    length = lengths(found - images)
    assert (length >= distance - 1e-9).all()
    assert (length <= 1.06 * distance).all()
    pgd = last_of_pgd(1.0, steps=60, step_size=2 / 60)(classifier, images, labels, noise)
    assert (lengths(pgd - images) > 2 * length).all()


def test_ddn_returns_its_last_point_on_the_sphere_if_the_boundary_is_out_of_reach() -> None:
    direction = torch.tensor([0.6, 0.8], dtype=torch.float64)
    images = torch.full((2, 2), 0.5, dtype=torch.float64)
    classifier = halves(direction, images[0] @ direction + 0.4)
    labels, noise = torch.tensor([0, 1]), torch.zeros(1, 2, 2, dtype=torch.float64)
    found = ddn(classifier, images, labels, noise, steps=20, max_norm=0.3)
    torch.testing.assert_close(found[0], images[0] + 0.3 * direction)
    # The second is on the wrong side from the start.
    assert torch.equal(found[1], images[1])


@pytest.mark.parametrize(("steps", "gamma"), [(1, 0.05), (4, 0.05), (4, 0.2)])
def test_ddn_grows_its_norm_by_gamma(steps: int, gamma: float) -> None:
    """With no boundary in reach, and far from the walls, the norm is (1 + gamma) ** steps."""
    images = torch.full((1, 400), 0.5, dtype=torch.float64)
    classifier = halves(torch.full((400,), 0.05, dtype=torch.float64), torch.tensor(30.0, dtype=torch.float64))
    labels, noise = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 400, dtype=torch.float64)
    found = ddn(classifier, images, labels, noise, steps=steps, max_norm=9.0, gamma=gamma)
    assert lengths(found - images).item() == pytest.approx((1 + gamma) ** steps, rel=1e-6)


def test_ddn_shrinks_its_norm_by_gamma_and_returns_the_shortest() -> None:
    """Past the boundary (at 0.5) the norm shrinks by 0.95 a step: from 1.05 down to the last one above 0.5."""
    images = torch.full((1, 400), 0.5, dtype=torch.float64)
    classifier = halves(torch.full((400,), 0.05, dtype=torch.float64), torch.tensor(10.5, dtype=torch.float64))
    labels, noise = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 400, dtype=torch.float64)
    for steps in (3, 8, 16):
        found = ddn(classifier, images, labels, noise, steps=steps, max_norm=9.0)
        passed = [1.05 * 0.95**k for k in range(steps - 1)]
        assert lengths(found - images).item() == pytest.approx(min(v for v in passed if v > 0.5), rel=1e-6)


# The attack on the noise


@shapes
def test_sphere_attack_keeps_norms_and_raises_the_cross_entropy(shape: tuple[int, ...]) -> None:
    """Noises that misclassify their image stay bit for bit; the classifier and the arguments are left as they were."""
    classifier, (images, _, noise) = network(shape), batch(shape)
    with torch.no_grad(), attacked(classifier):
        predicted = classifier(images + noise[0]).argmax(1)
    labels = (predicted + torch.arange(BATCH) % 2) % CLASSES  # every second one is wrong
    given = noise.clone()
    modes = [module.training for module in classifier.modules()]
    moved = sphere_attack(classifier, images, labels, noise, steps=1, step_size=0.05)
    assert torch.equal(noise, given)
    assert [module.training for module in classifier.modules()] == modes
    assert [parameter.requires_grad for parameter in classifier.parameters()][-1] is False
    assert all(parameter.grad is None for parameter in classifier.parameters())
    torch.testing.assert_close(lengths(moved.flatten(0, 1)), lengths(noise.flatten(0, 1)), rtol=1e-6, atol=0)

    with torch.no_grad():
        before, after = (classifier.eval()((images + deltas).flatten(0, 1)) for deltas in (noise, moved))
    every_label = labels.repeat(NOISES)
    right = before.argmax(1) == every_label
    assert 0 < int(right.sum()) < len(right)
    assert torch.equal(moved.flatten(0, 1)[~right], noise.flatten(0, 1)[~right])
    rise = nn.functional.cross_entropy(after, every_label, reduction="none")
    rise -= nn.functional.cross_entropy(before, every_label, reduction="none")
    assert (rise[right] > 0).all()


def test_sphere_attack_moves_each_noise_separately() -> None:
    classifier, (images, labels, noise) = network((5,)), batch((5,))
    together = sphere_attack(classifier, images, labels, noise, steps=3, step_size=0.2)
    for i in range(NOISES):
        for b in range(BATCH):
            one = images[b : b + 1], labels[b : b + 1], noise[i : i + 1, b : b + 1]
            alone = sphere_attack(classifier, *one, steps=3, step_size=0.2)
            torch.testing.assert_close(alone[0, 0], together[i, b])


def test_sphere_attack_leaves_zero_noise_and_zero_gradients_finite() -> None:
    """A constant classifier has no gradient, and a noise of norm 0 has no direction: both stay where they are."""
    images, labels, noise = torch.rand(2, 5), torch.zeros(2, dtype=torch.int64), torch.zeros(1, 2, 5)
    noise[0, 0] = torch.arange(5.0)
    constant = nn.Linear(5, 3)
    nn.init.zeros_(constant.weight)
    constant.bias.data = torch.tensor([1.0, 0.0, 0.0])
    moved = sphere_attack(constant, images, labels, noise, steps=3, step_size=0.5)
    torch.testing.assert_close(moved, noise)
