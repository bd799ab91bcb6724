"""Every loss and its gradient against the plain numpy transcription of its formula in `reference.py`.

Values agree to 1e-9; gradients are compared with central differences of the transcription. The result of an attack is a
constant of the loss, so it is held fixed for the differences; averages over noises are not.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import reference
import torch
from reference import Array, Network
from scipy import stats
from torch import Tensor, nn

from smoothcert.classifier import divergence_from_logits
from smoothcert.objectives import (
    OBJECTIVES,
    Adversary,
    CatRs,
    Consistency,
    Gaussian,
    LossTerms,
    Macer,
    NoiseAttack,
    Objective,
    Progress,
    SmoothAdv,
    SmoothMix,
    Stability,
)
from smoothcert.objectives.catrs import binomial
from smoothcert.objectives.losses import Loss

SHAPE, PIXELS, HIDDEN, CLASSES, BATCH = (1, 2, 3), 6, 5, 4, 7
VALUE = {"rel": 1e-9, "abs": 1e-9}
GRADIENT = {"rel": 1e-6, "abs": 1e-7}

Formula = Callable[[Network], dict[str, float]]
DIRECTIONS = 6


class TorchTwin(nn.Module):
    """The network of `reference` in torch, float64, on images of SHAPE."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.tensor(network.w1)), nn.Parameter(torch.tensor(network.b1))
        self.w2, self.b2 = nn.Parameter(torch.tensor(network.w2)), nn.Parameter(torch.tensor(network.b2))

    def forward(self, images: Tensor) -> Tensor:
        assert images.shape[1:] == SHAPE
        hidden = torch.tanh(nn.functional.linear(images.flatten(1), self.w1, self.b1))
        logits = nn.functional.linear(hidden, self.w2, self.b2)
        return logits if self.training else reference.EVAL_SCALE * logits

    def flat_gradient(self) -> Array:
        gradients = [parameter.grad for parameter in (self.w1, self.b1, self.w2, self.b2)]
        return torch.cat([gradient.flatten() for gradient in gradients]).numpy()


def teacher(images: Tensor) -> Tensor:
    """The teacher of all steps: its logits are the first pixels."""
    return images.flatten(1)[:, :CLASSES]


class Draw(NamedTuple):
    """A random network and a random step: flat images [batch, pixels], noise [num_noise, batch, pixels]."""

    network: Network
    x: Array
    y: Array
    noise: Array
    uniform: Array
    sigma: float = 0.5
    epoch: int = 3
    after_first_drop: bool = True
    phat: Array | None = None

    def take(self, images: list[int]) -> "Draw":
        return self._replace(
            x=self.x[images], y=self.y[images], noise=self.noise[:, images], uniform=self.uniform[images]
        )

    def torch_arguments(self) -> tuple[Tensor, Tensor, Tensor, Progress]:
        progress = Progress(
            self.sigma,
            torch.tensor(reference.warmup(self.epoch), dtype=torch.float64),
            torch.tensor(float(self.after_first_drop), dtype=torch.float64),
            torch.tensor(self.uniform),
            torch.tensor(float(self.epoch), dtype=torch.float64),
            None if self.phat is None else torch.tensor(self.phat),
            teacher,
        )
        noise = torch.tensor(self.noise).view(*self.noise.shape[:2], *SHAPE)
        return torch.tensor(self.x).view(-1, *SHAPE), torch.tensor(self.y), noise, progress


def draw(num_noise: int, seed: int = 0, batch: int = BATCH, sharpness: float = 1.0, sigma: float = 0.5) -> Draw:
    """Draw a network and a step; about two labels in three are the network's predictions, so right and wrong occur."""
    rng = np.random.default_rng([seed, num_noise])
    network = Network(
        rng.normal(size=(HIDDEN, PIXELS)),
        rng.normal(size=HIDDEN) / 2,
        sharpness * rng.normal(size=(CLASSES, HIDDEN)),
        rng.normal(size=CLASSES) / 2,
    )
    x = rng.uniform(size=(batch, PIXELS))
    predicted = np.array([int(np.argmax(network.logits(image))) for image in x])
    y = np.where(rng.uniform(size=batch) < 2 / 3, predicted, rng.integers(CLASSES, size=batch))
    noise = sigma * rng.normal(size=(num_noise, batch, PIXELS))
    return Draw(network, x, y, noise, rng.uniform(size=batch), sigma)


def torch_loss(objective: Objective, step: Draw) -> tuple[LossTerms, Array]:
    """Compute the objective's loss and gradient; the module of `smoothcert.losses` gives the same loss."""
    twin = TorchTwin(step.network).train()
    result = objective.loss(twin, *step.torch_arguments())
    result.loss.backward()
    gradient = twin.flat_gradient()
    criterion = Loss(objective, sigma=step.sigma)
    criterion.epoch, criterion.first_drop = step.epoch, 0 if step.after_first_drop else step.epoch + 1
    images, labels, noise, progress = step.torch_arguments()
    given = {"targets": progress.targets, "teacher": progress.teacher}
    assert criterion(twin, images, labels, noise=noise, uniform=progress.uniform, **given).item() == result.loss.item()
    return result, gradient


def slope(formula: Formula, network: Network, direction: Array, step: float = 3e-6) -> float:
    """Compute the central difference of the transcription along `direction` in the space of all parameters."""
    parameters = network.flat()
    higher, lower = (formula(network.replaced(parameters + sign * step * direction)) for sign in (1, -1))
    return (higher["loss"] - lower["loss"]) / (2 * step)


def assert_same(objective: Objective, step: Draw, expected: Formula) -> None:
    """Compare loss, logged terms and gradient with the transcription.

    The gradient is compared along random directions: a wrong entry shows in all of them, except by chance.
    """
    result, gradient = torch_loss(objective, step)
    values = expected(step.network)
    assert result.loss.item() == pytest.approx(values.pop("loss"), **VALUE)
    assert {name: term.item() for name, term in result.terms.items()} == {
        name: pytest.approx(value, **VALUE) for name, value in values.items()
    }
    assert result.noisy_logits.shape == (len(step.noise), len(step.x), CLASSES)
    for direction in np.random.default_rng(0).normal(size=(DIRECTIONS, len(gradient))) / np.sqrt(len(gradient)):
        assert gradient @ direction == pytest.approx(slope(expected, step.network, direction), **GRADIENT)


def attacked(step: Draw, adversary: Adversary) -> Array:
    """Find xhat of every image by the transcribed attack."""
    epsilon = adversary.epsilon * reference.warmup(step.epoch)
    points = []
    for b in range(len(step.x)):
        of_image = (step.network, step.x[b], step.y[b], step.noise[:, b])
        if adversary.attack == "ddn":
            points.append(reference.ddn(*of_image, adversary.steps, epsilon))
        else:
            points.append(reference.pgd(*of_image, adversary.steps, 2 * epsilon / adversary.steps, epsilon)[-1])
    return np.array(points)


@pytest.mark.parametrize("num_noise", [1, 3])
def test_gaussian(num_noise: int) -> None:
    step = draw(num_noise)
    assert_same(
        Gaussian(num_noise=num_noise), step, lambda network: reference.gaussian(network, step.x, step.y, step.noise)
    )


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_stability(weight: float) -> None:
    """The target F(x) has a gradient too, which the differences include."""
    step = draw(1)
    assert_same(
        Stability(weight=weight),
        step,
        lambda network: reference.stability(network, step.x, step.y, step.noise, weight),
    )


ADVERSARIES = {
    "pgd": Adversary(attack="pgd", steps=10, epsilon=1.0),
    "pgd, one step": Adversary(attack="pgd", steps=1, epsilon=0.6),
    "ddn": Adversary(attack="ddn", steps=8, epsilon=1.0),
    "ddn, wide": Adversary(attack="ddn", steps=5, epsilon=3.0),
}


@pytest.mark.parametrize(("attack", "epoch"), [*((attack, 4) for attack in ADVERSARIES), ("pgd", 0), ("ddn", 30)])
def test_smoothadv(attack: str, epoch: int) -> None:
    adversary = ADVERSARIES[attack]
    step = draw(4)._replace(epoch=epoch)
    points = attacked(step, adversary)
    assert np.abs(points - step.x).max() > 0.01
    assert_same(
        SmoothAdv(adversary=adversary),
        step,
        lambda network: reference.gaussian(network, points, step.y, step.noise),
    )


def images_with_fates(step: Draw, wanted: dict[str, int], gamma: float, beta: float) -> Draw:
    """Select images of a large draw: as many of each fate as wanted, none of them near a change of fate."""
    chosen: dict[str, list[int]] = {fate: [] for fate in wanted}
    for b in range(len(step.x)):
        one = step.take([b])
        fates = {
            reference.macer_fates(one.network, one.x + shift, one.y, one.noise, gamma * factor, beta)[0]
            for shift in (-1e-3, 0, 1e-3)
            for factor in (0.98, 1.02)
        }
        q = np.mean([reference.softmax(beta * one.network.logits(one.x[0] + delta)) for delta in one.noise[:, 0]], 0)
        well_conditioned = max(q) < 1 - 1e-4 or max(q) == 1
        fate = fates.pop()
        if not fates and well_conditioned and fate in wanted and len(chosen[fate]) < wanted[fate]:
            chosen[fate].append(b)
        if all(len(chosen[fate]) == number for fate, number in wanted.items()):
            break
    assert {fate: len(images) for fate, images in chosen.items()} == wanted
    return step.take(sorted(b for images in chosen.values() for b in images))


MACER_BATCHES = {
    "kept": ({"kept": 5}, 8.0, 16.0),
    "kept and wrong": ({"kept": 3, "wrong": 3}, 8.0, 16.0),
    "beyond gamma": ({"kept": 2, "wrong": 2, "beyond": 3}, 1.5, 4.0),
    "saturated": ({"kept": 2, "wrong": 2, "saturated": 3}, 100.0, 300.0),
    "all dropped": ({"wrong": 2, "saturated": 2}, 100.0, 300.0),
}


@pytest.mark.parametrize("batch", MACER_BATCHES.values(), ids=list(MACER_BATCHES))
def test_macer(batch: tuple[dict[str, int], float, float]) -> None:
    """Images that are wrong, beyond gamma or saturated have no robustness term but count in the mean."""
    wanted, gamma, beta = batch
    step = images_with_fates(draw(5, batch=80), wanted, gamma, beta)
    assert_same(
        Macer(num_noise=5, weight=3.0, gamma=gamma, beta=beta),
        step,
        lambda network: reference.macer(network, step.x, step.y, step.noise, 3.0, gamma, beta, step.sigma),
    )


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("after_first_drop", [False, True])
def test_macer_deferred(deferred: bool, after_first_drop: bool) -> None:
    """With `deferred` the weight is 0 before the first learning-rate drop; the epoch itself does not matter."""
    step = images_with_fates(draw(5, batch=80), {"kept": 4, "wrong": 1}, 8.0, 16.0)
    step = step._replace(after_first_drop=after_first_drop, epoch=0)
    weight = 0.0 if deferred and not after_first_drop else 16.0
    assert_same(
        Macer(num_noise=5, deferred=deferred),
        step,
        lambda network: reference.macer(network, step.x, step.y, step.noise, weight, 8.0, 16.0, step.sigma),
    )


def test_macer_with_a_true_class_of_almost_no_probability() -> None:
    """Where pbar_y is about 1e-13, -log(pbar_y + 1e-10) levels off."""
    step = draw(2, sharpness=20.0, batch=60)
    pbar = [
        np.mean([reference.softmax(step.network.logits(step.x[b] + delta)) for delta in step.noise[:, b]], 0)
        for b in range(len(step.x))
    ]
    step = step._replace(y=np.array([int(np.argmin(p)) for p in pbar]))
    step = step.take([b for b, p in enumerate(pbar) if 1e-16 < min(p) < 1e-9][:5])
    assert len(step.x) == 5
    assert_same(
        Macer(num_noise=2, weight=3.0),
        step,
        lambda network: reference.macer(network, step.x, step.y, step.noise, 3.0, 8.0, 16.0, step.sigma),
    )


FORMS = ["kl_entropy", "xent", "kl", "mse"]


@pytest.mark.parametrize(
    ("form", "num_noise", "attack"),
    [
        *((form, m, None) for form in FORMS for m in (2, 4) if form != "mse" or m == 2),
        *(("kl_entropy", 4, attack) for attack in ("pgd", "ddn")),
    ],
)
def test_consistency(form: str, num_noise: int, attack: str | None) -> None:
    step = draw(num_noise, seed=1)
    adversary = attack and Adversary(attack=attack, steps=4, epsilon=1.0)
    points = attacked(step, adversary) if adversary else step.x
    assert_same(
        Consistency(num_noise=num_noise, weight=7.0, entropy_weight=0.3, form=form, adversary=adversary),
        step,
        lambda network: reference.consistency(network, points, step.y, step.noise, form, 7.0, 0.3),
    )


@pytest.mark.parametrize("form", FORMS)
def test_consistency_with_probabilities_below_the_floor(form: str) -> None:
    """Logits are so far apart that probabilities under 1e-20 occur: their logarithm is log(1e-20)."""
    step = draw(2, sharpness=30.0)
    noisy = (step.x + step.noise).reshape(-1, PIXELS)
    assert min(reference.softmax(step.network.logits(x)).min() for x in noisy) < 1e-24
    assert_same(
        Consistency(form=form),
        step,
        lambda network: reference.consistency(network, step.x, step.y, step.noise, form, 10.0, 0.5),
    )


SMOOTHMIX = {
    "plain": SmoothMix(),
    "one noise": SmoothMix(num_noise=1, steps=1, step_size=8.0),
    "short steps": SmoothMix(steps=3, step_size=0.2),
    "max_norm": SmoothMix(steps=3, step_size=0.6, max_norm=0.7),
    "one_step": SmoothMix(steps=3, step_size=0.5, one_step=True),
    "one_step, one step": SmoothMix(steps=1, one_step=True),
    "one_step_radius": SmoothMix(step_size=2.0, one_step=True, one_step_radius=0.6),
    "one_step and max_norm": SmoothMix(steps=2, one_step=True, max_norm=0.9),
    "eta 0": SmoothMix(eta=0.0),
}


def smoothmix_points(objective: SmoothMix, step: Draw) -> tuple[Array, Array]:
    """Find the clean side and the adversarial examples by the transcribed attack."""
    clean, adversarial = [], []
    radius = objective.one_step_radius or objective.step_size
    for b in range(len(step.x)):
        iterates = reference.pgd(
            step.network,
            step.x[b],
            step.y[b],
            step.noise[:, b],
            objective.steps,
            objective.step_size,
            objective.max_norm,
        )
        adversarial.append(iterates[-1])
        if objective.one_step:
            clean.append(reference.into_ball(iterates[0], step.x[b], radius * reference.warmup(step.epoch)))
        else:
            clean.append(step.x[b])
    return np.array(clean), np.array(adversarial)


@pytest.mark.parametrize(
    ("options", "epoch"),
    [
        *((options, 5) for options in SMOOTHMIX),
        *((options, epoch) for options in ("plain", "one_step") for epoch in (0, 12)),
    ],
)
def test_smoothmix(options: str, epoch: int) -> None:
    objective = SMOOTHMIX[options]
    step = draw(objective.num_noise, seed=12)._replace(epoch=epoch)
    clean, adversarial = smoothmix_points(objective, step)
    assert set(reference.smoothmix_right(step.network, clean, step.y, step.noise)) == {True, False}
    weight = objective.eta * reference.warmup(epoch)
    assert_same(
        objective,
        step,
        lambda network: reference.smoothmix(network, clean, adversarial, step.y, step.noise, step.uniform, weight),
    )


def test_smoothmix_with_probabilities_below_the_floor() -> None:
    """The attack does not move an image whose pbar_y is under 1e-20, and logarithms end at log(1e-20)."""
    step = draw(2, sharpness=30.0, seed=4)
    objective = SmoothMix(num_noise=2, steps=2, step_size=0.5)
    clean, adversarial = smoothmix_points(objective, step)
    assert_same(
        objective,
        step,
        lambda network: reference.smoothmix(network, clean, adversarial, step.y, step.noise, step.uniform, 2.0),
    )


def moved_noises(step: Draw, attack: NoiseAttack) -> Array:
    """Move every noise by the transcribed attack."""
    moved = np.empty_like(step.noise)
    for i, b in np.ndindex(step.noise.shape[:2]):
        of_noise = (step.network, step.x[b], step.y[b], step.noise[i, b])
        moved[i, b] = reference.sphere(*of_noise, attack.steps, attack.step_size)
    return moved


@pytest.mark.parametrize("attack", [NoiseAttack(), NoiseAttack(steps=1, step_size=0.3), NoiseAttack(first_epoch=3)])
def test_noise_attack(attack: NoiseAttack) -> None:
    """The three objectives compute their loss with noises that are moved first, at the clean images."""
    step = draw(3, seed=2)
    moved = step._replace(noise=moved_noises(step, attack))
    changed = np.abs(moved.noise - step.noise).max(-1) > 1e-3
    assert changed.any()
    assert not changed.all(), "some noises misclassify their images already"
    assert_same(
        Gaussian(num_noise=3, noise_attack=attack),
        step,
        lambda network: reference.gaussian(network, step.x, step.y, moved.noise),
    )
    adversary = Adversary(steps=3)
    points = attacked(moved, adversary)
    assert_same(
        Consistency(num_noise=3, weight=7.0, noise_attack=attack, adversary=adversary),
        step,
        lambda network: reference.consistency(network, points, step.y, moved.noise, "kl_entropy", 7.0, 0.5),
    )
    mixing = SmoothMix(num_noise=3, steps=2, one_step=True, noise_attack=attack)
    clean, adversarial = smoothmix_points(mixing, moved)
    weight = mixing.eta * reference.warmup(step.epoch)
    assert_same(
        mixing,
        step,
        lambda network: reference.smoothmix(network, clean, adversarial, step.y, moved.noise, step.uniform, weight),
    )


def test_noise_attack_waits_for_its_first_epoch() -> None:
    step = draw(3, seed=2)
    attack = NoiseAttack(first_epoch=step.epoch + 1)
    attacking = Gaussian(num_noise=3, noise_attack=attack)
    assert attacking.in_epoch(step.epoch + 1) == attacking
    assert_same(
        attacking.in_epoch(step.epoch), step, lambda network: reference.gaussian(network, step.x, step.y, step.noise)
    )


@pytest.mark.parametrize(
    "objective", [CatRs(weight=2.0), CatRs(num_noise=3, steps=1, epsilon=0.5), CatRs(num_noise=1), CatRs(weight=0.0)]
)
@pytest.mark.parametrize("with_teacher", [True, False])
def test_catrs(objective: CatRs, with_teacher: bool) -> None:
    """Votes of a teacher may be 0 for a class; without a teacher all are for the label."""
    step = draw(objective.num_noise, seed=3, batch=12)
    rng = np.random.default_rng(0)
    phat = rng.multinomial(10, np.full(CLASSES, 1 / CLASSES), size=12) / 10 if with_teacher else np.eye(CLASSES)[step.y]
    step = step._replace(phat=phat if with_teacher else None)
    kept = reference.catrs_kept(step.network, step.x, step.y, step.noise, step.uniform)
    assert objective.num_noise == 1 or {1, objective.num_noise} <= set(kept)
    attacked_noise = np.empty_like(step.noise)
    for i, b in np.ndindex(step.noise.shape[:2]):
        of_noise = (step.network, step.x[b], phat[b], step.noise[i, b])
        attacked_noise[i, b] = reference.noise_ball(*of_noise, objective.steps, objective.epsilon)
    assert_same(
        objective,
        step,
        lambda network: reference.catrs(
            network, step.x, step.y, step.noise, attacked_noise, phat, step.uniform, objective.weight
        ),
    )


@pytest.mark.parametrize("trials", [1, 4])
def test_catrs_draws_from_the_binomial_distribution(trials: int) -> None:
    """Over a grid of uniform draws, each number of noises occurs as often as its probability says; at least one."""
    uniform = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    for right in range(trials + 1):
        share = torch.full_like(uniform, right / trials)
        drawn = torch.bincount(binomial(share, trials, uniform), minlength=trials + 1) / 10_000
        expected = stats.binom.pmf(np.arange(trials + 1), trials, right / trials)
        expected[1], expected[0] = expected[0] + expected[1], 0
        np.testing.assert_allclose(drawn.numpy(), expected, atol=2e-4)


def test_catrs_keeps_all_noises_of_a_confident_image_for_every_draw() -> None:
    """A uniform draw may be exactly 0, or exactly where the distribution jumps: P(K <= k) is the share of draws below.
    So 0 counts as a draw above every probability that is 0."""
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.999], dtype=torch.float64)
    assert binomial(torch.ones_like(uniform), 4, uniform).tolist() == [4] * 5
    assert binomial(torch.zeros_like(uniform), 4, uniform).tolist() == [1] * 5
    assert binomial(torch.full_like(uniform, 0.5), 2, uniform).tolist() == [1, 1, 1, 2, 2]


def test_catrs_draws_the_same_noises_from_logits_in_half_precision() -> None:
    """Shares of right noises such as 1/3 are not rounded to bfloat16, which would move one draw in 500."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 10_000, 2, generator=generator).bfloat16()
    labels, uniform = torch.zeros(10_000, dtype=torch.int64), torch.rand(10_000, generator=generator)
    targets = torch.eye(2)[labels]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, single = (
            CatRs(num_noise=3).from_logits(z, z, labels, targets, uniform) for z in (logits, logits.float())
        )
    for name in ("low", "high"):
        assert half.terms[name].item() == pytest.approx(single.terms[name].item(), rel=1e-5)


def test_the_input_gradient_of_the_transcription() -> None:
    """The derivative written by hand in `reference` equals its central differences."""
    step = draw(3)
    for b in range(3):
        _, gradient, _ = reference.smoothed_gradient(step.network, step.x[b], step.y[b], step.noise[:, b])
        for k in range(PIXELS):
            move = np.zeros(PIXELS)
            move[k] = 1e-5
            values = [
                reference.smoothed_gradient(step.network, step.x[b] + s * move, step.y[b], step.noise[:, b])[0]
                for s in (1, -1)
            ]
            assert gradient[k] == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-7, abs=1e-9)


def in_float32(step: Draw) -> tuple[TorchTwin, tuple[Tensor, Tensor, Tensor, Progress]]:
    images, labels, noise, (sigma, *factors, teacher) = step.torch_arguments()
    arguments = (
        images.float(),
        labels,
        noise.float(),
        Progress(sigma, *[None if factor is None else factor.float() for factor in factors], teacher),
    )
    return TorchTwin(step.network).float(), arguments


@pytest.mark.parametrize("name", OBJECTIVES)
def test_half_precision_gives_a_loss_in_float32(name: str) -> None:
    """Under bfloat16 autocast the logits are rounded and the loss is not: it is near the float64 loss."""
    objective = OBJECTIVES[name]()
    step = draw(objective.num_noise, seed=5)
    expected = torch_loss(objective, step)[0].loss.item()
    twin, arguments = in_float32(step)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = objective.loss(twin, *arguments)
    assert result.noisy_logits.dtype == torch.bfloat16
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(expected, rel=0.05)


class Rounded(nn.Module):
    """Logits rounded to bfloat16, returned in that type or as float32."""

    def __init__(self, twin: TorchTwin, dtype: torch.dtype) -> None:
        super().__init__()
        self.twin, self.dtype = twin, dtype

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.twin(images).bfloat16().to(self.dtype)


@pytest.mark.parametrize(
    "objective",
    [
        *[pytest.param(kind(), id=name) for name, kind in OBJECTIVES.items()],
        pytest.param(Macer(beta=11.0), id="macer, beta 11"),
    ],
)
def test_only_the_logits_are_rounded_in_half_precision(objective: Objective) -> None:
    """The loss of bfloat16 logits under autocast is the loss of the same numbers in float32."""
    twin, arguments = in_float32(draw(objective.num_noise, seed=5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, single = (
            objective.loss(Rounded(twin, dtype), *arguments).loss.item() for dtype in (torch.bfloat16, torch.float32)
        )
    assert half == pytest.approx(single, rel=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_enormous_logits_give_finite_gradients(name: str) -> None:
    """Saturated probabilities in float32: 0 * inf must not appear in a gradient."""
    objective = OBJECTIVES[name]()
    twin, arguments = in_float32(draw(objective.num_noise, sharpness=1e4))
    result = objective.loss(twin, *arguments)
    result.loss.backward()
    assert np.isfinite(result.loss.item())
    assert np.isfinite(twin.flat_gradient()).all()


@pytest.mark.parametrize("gap", [20.0, 60.0, 200.0])
def test_copies_that_disagree_strongly_are_pulled_together(gap: float) -> None:
    """Two copies have the logits (0, gap) and (gap, 0): by hand d mean KL / d logit = +-(1 - 2 s) / 4 with s tiny.

    This holds if the logarithm of the softmax is computed from the logits. Through floored probabilities the gradient
    vanishes at gap 60.
    """
    logits = torch.tensor([[[0.0, gap]], [[gap, 0.0]]], requires_grad=True)
    labels = torch.tensor([0])
    objective = Consistency(form="kl", weight=1.0)
    noise, images = torch.zeros(2, 1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    progress = Progress(0.5, torch.tensor(1.0), torch.tensor(0.0), torch.zeros(1))
    terms = objective.loss(lambda batch: logits.flatten(0, 1), images, labels, noise, progress)
    (gradient,) = torch.autograd.grad(terms.terms["kl"], logits)
    expected = torch.tensor([[[-0.25, 0.25]], [[0.25, -0.25]]])
    assert torch.allclose(gradient, expected, atol=1e-3)


def test_the_divergence_keeps_its_gradient_where_the_network_is_sure_of_another_class() -> None:
    """KL(t || softmax(z)) has the gradient softmax(z) - t, however far apart the logits are."""
    target = torch.tensor([0.9, 0.1])
    for gap in (5.0, 100.0, 1000.0):
        logits = torch.tensor([0.0, gap], requires_grad=True)
        (gradient,) = torch.autograd.grad(divergence_from_logits(target, logits), logits)
        assert torch.allclose(gradient, logits.detach().softmax(0) - target, atol=1e-6)
