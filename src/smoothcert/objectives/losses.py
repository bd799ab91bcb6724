"""The losses of all methods for your own training loop: `smoothcert.losses`.

As modules, which draw the noise and call the model. One changed line in a training loop:

>>> import torch, smoothcert as sc
>>> model = torch.nn.Linear(4, 3)
>>> x, y = torch.rand(8, 4), torch.arange(8) % 3
>>> criterion = sc.losses.Consistency(sigma=0.5, weight=10)
>>> loss = criterion(model, x, y)

And as functions: of logits under noise [num_noise, batch, classes] (`gaussian`, `stability`, `macer`, `consistency`,
`distillation`), or of a model where the method attacks it (`smoothadv`, `smoothmix`, `catrs`).

>>> noisy = torch.stack([model(x + 0.5 * torch.randn_like(x)) for _ in range(2)])
>>> loss = sc.losses.consistency(noisy, y, weight=10)

Both compute what the objectives of `smoothcert train` compute, by the same code. They leave the model's mode,
`requires_grad` and gradients as they are.
"""

import math
from collections.abc import Mapping
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from smoothcert import objectives
from smoothcert.errors import RequestError
from smoothcert.io.records import validated
from smoothcert.noise import checked_sigma, sigma_warning
from smoothcert.objectives.base import Classifier, Objective, Progress, cross_entropy_under_noise, warm_up
from smoothcert.objectives.consistency import Form
from smoothcert.objectives.inner_attacks import Adversary as Adversary
from smoothcert.objectives.inner_attacks import NoiseAttack as NoiseAttack
from smoothcert.objectives.loss_arguments import (
    check_batch,
    check_draws,
    check_logits,
    check_noisy_logits,
    evaluated_teacher,
    explained_labels,
    warn_about_clipping,
    warn_about_sigma,
)
from smoothcert.objectives.synchronized_pass import OneSynchronizedPass

__all__ = [
    "Adversary",
    "CatRs",
    "Consistency",
    "Distillation",
    "Gaussian",
    "Loss",
    "Macer",
    "NoiseAttack",
    "SmoothAdv",
    "SmoothMix",
    "Stability",
    "catrs",
    "consistency",
    "distillation",
    "gaussian",
    "macer",
    "smoothadv",
    "smoothmix",
    "stability",
]


class Settings(TypedDict, total=False):
    """What every module takes: the noise level is required."""

    sigma: Required[float]
    num_noise: int
    generator: torch.Generator | None


class GaussianSettings(Settings, total=False):
    noise_attack: NoiseAttack | Mapping[str, Any] | None


class StabilitySettings(Settings, total=False):
    weight: float


class SmoothAdvSettings(Settings, total=False):
    adversary: Adversary | Mapping[str, Any]


class CatRsSettings(Settings, total=False):
    weight: float
    steps: int
    epsilon: float


class MacerSettings(Settings, total=False):
    weight: float
    gamma: float
    beta: float
    deferred: bool


class ConsistencySettings(Settings, total=False):
    weight: float
    entropy_weight: float
    form: Form
    adversary: Adversary | Mapping[str, Any] | None
    noise_attack: NoiseAttack | Mapping[str, Any] | None


class SmoothMixSettings(Settings, total=False):
    steps: int
    step_size: float
    eta: float
    one_step: bool
    one_step_radius: float | None
    max_norm: float | None
    noise_attack: NoiseAttack | Mapping[str, Any] | None


class Loss(nn.Module):
    """The loss of any objective as a function of (model, inputs, labels).

    The noise is N(0, sigma^2), drawn from `generator` (by default torch's global one) or given as `noise`
    [num_noise, batch, ...]. Set `epoch`, counted from 0, for methods that warm up or wait for a learning-rate drop; as
    long as it is None, the loss is that of late epochs. After a call, `terms` holds the parts of the loss, detached.
    """

    first_drop: int | None = None

    def __init__(self, objective: Objective, *, sigma: float, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not isinstance(objective, Objective):
            given = f"the class {objective.__name__}" if isinstance(objective, type) else repr(objective)
            raise RequestError(f"objective: expected an objective, such as MyMethod(), got {given}; make an object")
        self.objective = objective
        self.sigma = checked_sigma(sigma)
        self.generator = generator
        self.epoch: int | None = None
        self.terms: dict[str, Tensor] = {}
        self.sigma_warning = sigma_warning(self.sigma)
        attacks = isinstance(objective, objectives.SmoothAdv | objectives.SmoothMix)
        self.clipping_checked = not (attacks or getattr(objective, "adversary", None) is not None)

    def forward(
        self,
        model: Classifier,
        inputs: Tensor,
        labels: Tensor,
        *,
        noise: Tensor | None = None,
        uniform: Tensor | None = None,
        targets: Tensor | None = None,
        teacher: Classifier | None = None,
    ) -> Tensor:
        """Compute the loss of inputs [batch, ...] and integer labels [batch].

        `uniform` [batch] in [0, 1) replaces the second random draw, such as the mixing ratios of SmoothMix; `targets`
        [batch, classes] are the shares of a teacher's votes, for CAT-RS; `teacher` is a trained classifier, for
        Distillation or an objective of your own, and is evaluated in eval mode.
        """
        check_batch(model, inputs, labels, targets)
        if teacher is not None or isinstance(self.objective, objectives.Distillation):
            teacher = evaluated_teacher(teacher)
        device = inputs.device
        shape = (self.objective.num_noise, *inputs.shape)
        check_draws({"noise": (noise, shape), "uniform": (uniform, labels.shape)}, self.generator, device)
        if noise is None:
            noise = torch.empty(shape, dtype=inputs.dtype, device=device)
            noise.normal_(0, self.sigma, generator=self.generator)
        if uniform is None:
            uniform = torch.rand(len(inputs), generator=self.generator, device=device)
        epoch = math.inf if self.epoch is None else self.epoch
        factor = warm_up(epoch)
        dropped = float(epoch >= (self.first_drop or 0))
        scalar = inputs.new_empty((), dtype=torch.promote_types(inputs.dtype, torch.float32))
        # In 16 bits, draws close to 1 would become 1.
        factors = (scalar.new_full((), factor), scalar.new_full((), dropped), uniform.to(scalar.dtype))
        progress = Progress(self.sigma, *factors, scalar.new_full((), epoch), targets, teacher)
        if self.sigma_warning is not None:
            warn_about_sigma(inputs, self.sigma_warning)
            self.sigma_warning = None
        if not self.clipping_checked:  # once per module: the check waits for the device
            self.clipping_checked = True
            warn_about_clipping(inputs, objectives.name_in_recipes(self.objective))
        if isinstance(model, DistributedDataParallel):
            model = OneSynchronizedPass(model)
        with explained_labels(labels):
            result = self.objective.in_epoch(epoch).loss(model, inputs, labels.long(), noise, progress)
        result = objectives.checked_terms(self.objective, result)
        self.terms = {name: term.detach() for name, term in result.terms.items()}
        return result.loss

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in [("sigma", self.sigma), *self.objective])


class Gaussian(Loss):
    """Cross-entropy under noise."""

    def __init__(self, **settings: Unpack[GaussianSettings]) -> None:
        super().__init__(**_arguments(objectives.Gaussian, settings))


class Stability(Loss):
    """Cross-entropy without noise, and agreement of the noisy prediction with the clean one."""

    def __init__(self, **settings: Unpack[StabilitySettings]) -> None:
        super().__init__(**_arguments(objectives.Stability, settings))


class SmoothAdv(Loss):
    """Cross-entropy under noise at adversarial examples of the smoothed classifier, which are clipped to [0, 1]."""

    def __init__(self, **settings: Unpack[SmoothAdvSettings]) -> None:
        super().__init__(**_arguments(objectives.SmoothAdv, settings))


class Macer(Loss):
    """A differentiable certified radius. With `deferred`, it counts from the epoch `first_drop` on."""

    def __init__(self, *, first_drop: int | None = None, **settings: Unpack[MacerSettings]) -> None:
        super().__init__(**_arguments(objectives.Macer, settings))
        self.first_drop = first_drop
        if settings.get("deferred", False) != (first_drop is not None):
            raise RequestError(
                f"first_drop: expected the epoch of the first learning-rate drop with deferred=True, None without, "
                f"got {first_drop}"
            )


class Consistency(Loss):
    """Cross-entropy under noise, agreement of the predictions for different noise samples, and their confidence."""

    def __init__(self, **settings: Unpack[ConsistencySettings]) -> None:
        super().__init__(**_arguments(objectives.Consistency, settings))


class SmoothMix(Loss):
    """Cross-entropy under noise, and uncertainty on the way to adversarial examples, which are clipped to [0, 1]."""

    def __init__(self, **settings: Unpack[SmoothMixSettings]) -> None:
        super().__init__(**_arguments(objectives.SmoothMix, settings))


class CatRs(Loss):
    """Cross-entropy without the hardest noise samples of uncertain images, and attacked noise for confident ones."""

    def __init__(self, **settings: Unpack[CatRsSettings]) -> None:
        super().__init__(**_arguments(objectives.CatRs, settings))


class Distillation(Loss):
    """Agreement with a `teacher` under noise, a trained classifier that is an argument of each call."""

    def __init__(self, **settings: Unpack[Settings]) -> None:
        super().__init__(**_arguments(objectives.Distillation, settings))


def gaussian(noisy_logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean cross-entropy of logits under noise [num_noise, batch, classes]."""
    check_logits(noisy_logits, labels)
    return cross_entropy_under_noise(noisy_logits, labels.long())


def stability(clean_logits: Tensor, noisy_logits: Tensor, labels: Tensor, *, weight: float = 2.0) -> Tensor:
    """Compute the loss of Stability from clean logits [batch, classes] and noisy logits [1, batch, classes]."""
    check_logits(noisy_logits, labels)
    if clean_logits.shape != noisy_logits.shape[1:]:
        raise RequestError(
            f"clean_logits: expected the shape {list(noisy_logits.shape[1:])}, got {list(clean_logits.shape)}"
        )
    record = validated(objectives.Stability, {"num_noise": len(noisy_logits), "weight": weight})
    return record.from_logits(clean_logits, noisy_logits, labels.long()).loss


def macer(
    noisy_logits: Tensor,
    labels: Tensor,
    *,
    sigma: float,
    weight: float = 16.0,
    gamma: float = 8.0,
    beta: float = 16.0,
) -> Tensor:
    """Compute the loss of MACER from logits under noise [num_noise, batch, classes]."""
    check_logits(noisy_logits, labels)
    record = validated(objectives.Macer, {"weight": weight, "gamma": gamma, "beta": beta})
    return record.from_logits(noisy_logits, labels.long(), checked_sigma(sigma)).loss


def consistency(
    noisy_logits: Tensor,
    labels: Tensor,
    *,
    weight: float = 10.0,
    entropy_weight: float = 0.5,
    form: Form = "kl_entropy",
) -> Tensor:
    """Compute the loss of Consistency from logits under noise [num_noise, batch, classes], num_noise >= 2."""
    check_logits(noisy_logits, labels)
    fields = {"num_noise": len(noisy_logits), "weight": weight, "entropy_weight": entropy_weight, "form": form}
    return validated(objectives.Consistency, fields).from_logits(noisy_logits, labels.long()).loss


def distillation(noisy_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Compute the loss of Distillation from logits of student and teacher under the same noise.

    Both are [num_noise, batch, classes]; those of the teacher are constants for the gradient.
    """
    check_noisy_logits(noisy_logits)
    check_noisy_logits(teacher_logits, "teacher_logits")
    record = validated(objectives.Distillation, {"num_noise": len(noisy_logits)})
    return record.from_logits(noisy_logits, teacher_logits.detach()).loss


def smoothadv(
    model: Classifier,
    inputs: Tensor,
    labels: Tensor,
    *,
    epoch: int | None = None,
    noise: Tensor | None = None,
    **settings: Unpack[SmoothAdvSettings],
) -> Tensor:
    """Compute the loss of SmoothAdv: attack the smoothed classifier, then train on the adversarial examples."""
    loss = SmoothAdv(**settings)
    loss.epoch = epoch
    return loss.forward(model, inputs, labels, noise=noise)


def smoothmix(
    model: Classifier,
    inputs: Tensor,
    labels: Tensor,
    *,
    epoch: int | None = None,
    noise: Tensor | None = None,
    uniform: Tensor | None = None,
    **settings: Unpack[SmoothMixSettings],
) -> Tensor:
    """Compute the loss of SmoothMix: attack without a norm limit, then train for uncertainty on the way."""
    loss = SmoothMix(**settings)
    loss.epoch = epoch
    return loss.forward(model, inputs, labels, noise=noise, uniform=uniform)


def catrs(
    model: Classifier,
    inputs: Tensor,
    labels: Tensor,
    *,
    noise: Tensor | None = None,
    uniform: Tensor | None = None,
    targets: Tensor | None = None,
    **settings: Unpack[CatRsSettings],
) -> Tensor:
    """Compute the loss of CAT-RS with a teacher's votes `targets` [batch, classes], by default all for the label."""
    return CatRs(**settings).forward(model, inputs, labels, noise=noise, uniform=uniform, targets=targets)


def _arguments(kind: type[Objective], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Divide the settings of a module into its objective and the arguments of `Loss`."""
    given = {"sigma": None, "generator": None, **settings}
    arguments = {name: given.pop(name) for name in ("sigma", "generator")}
    return {"objective": validated(kind, given), **arguments}
