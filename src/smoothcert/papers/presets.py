"""The papers' runs as recipes: `preset("mnist/smoothmix", sigma=0.5)`, each with its published ACR where there is one.

Hyper-parameters that the papers choose per sigma are written as {sigma: value}; at another sigma the nearest published
one is taken. Where a paper's text and its published runs differ, these are the runs (`xent`, which is the text, apart).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from smoothcert.errors import RequestError
from smoothcert.io.text import did_you_mean
from smoothcert.objectives import Adversary, Consistency, Gaussian, Macer, Objective, SmoothAdv, SmoothMix, Stability
from smoothcert.papers.tables import published_acr
from smoothcert.training.recipe import TrainRecipe, parse_recipe

DEFAULT_SIGMA = 0.5
Value = TypeVar("Value")


@dataclass(frozen=True)
class Preset:
    """A paper's configuration. `published` maps a sigma to a paper's table and the columns that name its row."""

    recipe: Callable[[float], TrainRecipe]
    sigmas: tuple[float, ...]
    published: Mapping[float, tuple[str, Mapping[str, object]]] = field(default_factory=dict)

    def published_acr(self, sigma: float) -> float | None:
        if sigma not in self.published:
            return None
        table, columns = self.published[sigma]
        return published_acr(table, **columns)


# The shared protocol of each data set. The published runs lower the learning rate one epoch later than the papers say.
PROTOCOLS: dict[str, dict[str, Any]] = {
    "mnist": {
        "model": "lenet",
        "epochs": 90,
        "batch_size": 256,
        "learning_rate": 0.01,
        "learning_rate_drops": (31, 61),
    },
    "cifar10": {
        "model": "resnet110",
        "epochs": 150,
        "batch_size": 256,
        "learning_rate": 0.1,
        "learning_rate_drops": (51, 101),
    },
    "imagenet": {
        "model": "resnet50",
        "epochs": 90,
        "batch_size": 200,
        "learning_rate": 0.1,
        "learning_rate_drops": (31, 61),
    },
}
SIGMAS = {"mnist": (0.25, 0.5, 1.0), "cifar10": (0.25, 0.5, 1.0), "imagenet": (0.5, 1.0)}
MNIST_CONSISTENCY = {0.25: 10.0, 0.5: 5.0, 1.0: 5.0}
MAIN_TABLE = {"mnist": "smoothmix/table2", "cifar10": "smoothmix/table1", "imagenet": "smoothmix/table4"}


def at(values: Mapping[float, Value], sigma: float) -> Value:
    """The value at the published sigma that is nearest to `sigma`."""
    return values[min(values, key=lambda published: abs(published - sigma))]


def preset_of(
    dataset: str, objective: Callable[[float], Objective], row: str | None, table: str = "", **changes: object
) -> Preset:
    """A preset of the shared protocol, with `changes`, whose published ACR is in the row `row` of `table`."""

    def recipe(sigma: float) -> TrainRecipe:
        fields = {"dataset": dataset, "sigma": sigma, "objective": objective(sigma), **PROTOCOLS[dataset], **changes}
        return parse_recipe(TrainRecipe, fields, f"preset at sigma {sigma}")

    table = table or MAIN_TABLE[dataset]
    published = {s: (table, {"sigma": s, "method": row.format(s)}) for s in SIGMAS[dataset]} if row else {}
    return Preset(recipe, SIGMAS[dataset], published)


def ablation_of(objective: Objective, table: str | None, **columns: object) -> Preset:
    """A cell of an ablation: MNIST at sigma 1.0; without a table one that was not published."""
    whole = preset_of("mnist", lambda sigma: objective, None)
    return Preset(whole.recipe, (1.0,), {1.0: (table, columns)} if table else {})


def mnist_presets() -> dict[str, Preset]:
    steps = {0.25: 2, 0.5: 4, 1.0: 8}
    steps_eta1 = steps | {0.25: 3}
    macer = {0.25: 16.0, 0.5: 16.0, 1.0: 6.0}
    on_smoothadv = preset_of(
        "mnist",
        lambda sigma: Consistency(num_noise=4, weight=1, adversary=Adversary()),
        "SmoothAdv + Consistency (lambda=1)",
        "consistency/supp-table2",
    )

    def smoothmix(eta: float, one_step: bool) -> Callable[[float], Objective]:
        chosen = steps_eta1 if eta == 1 else steps
        return lambda sigma: SmoothMix(steps=at(chosen, sigma), eta=eta, one_step=one_step)

    return {
        "mnist/gaussian": preset_of("mnist", lambda sigma: Gaussian(), "Gaussian"),
        "mnist/stability": preset_of("mnist", lambda sigma: Stability(), "Stability"),
        "mnist/smoothadv": preset_of("mnist", lambda sigma: SmoothAdv(), "SmoothAdv"),
        # MACER multiplies its logits by 16. In bf16 it trains to another curve than the published one, in fp32 to that.
        "mnist/macer": preset_of(
            "mnist", lambda sigma: Macer(weight=at(macer, sigma), deferred=True), "MACER", precision="fp32"
        ),
        "mnist/consistency": preset_of("mnist", lambda s: Consistency(weight=at(MNIST_CONSISTENCY, s)), "Consistency"),
        "mnist/smoothadv-consistency": on_smoothadv,
        "mnist/smoothmix": preset_of("mnist", smoothmix(5, False), "SmoothMix (eta=5)"),
        "mnist/smoothmix-one-step": preset_of("mnist", smoothmix(5, True), "SmoothMix (eta=5) + one-step adversary"),
        "mnist/smoothmix-eta1": preset_of("mnist", smoothmix(1, False), "SmoothMix (eta=1)"),
        "mnist/smoothmix-eta1-one-step": preset_of(
            "mnist", smoothmix(1, True), "SmoothMix (eta=1) + one-step adversary"
        ),
    }


def cifar10_presets() -> dict[str, Preset]:
    noises = {0.25: 4, 0.5: 8, 1.0: 8}
    best = {0.25: (1.0, 4), 0.5: (2.0, 2), 1.0: (2.0, 2)}
    consistency = {0.25: 20.0, 0.5: 10.0, 1.0: 10.0}
    on_smoothadv = {0.25: 2.0, 0.5: 1.0, 1.0: 1.0}
    stability = {0.25: 2.0, 0.5: 2.0, 1.0: 1.0}
    macer = {0.25: 12.0, 0.5: 4.0, 1.0: 12.0}
    deferred = {0.25: False, 0.5: False, 1.0: True}
    step_size = {0.25: 0.5, 0.5: 1.0, 1.0: 2.0}

    def smoothadv_best(sigma: float) -> Objective:
        epsilon, num_noise = at(best, sigma)
        return SmoothAdv(num_noise=num_noise, adversary=Adversary(epsilon=epsilon))

    def smoothadv_consistency(sigma: float) -> Objective:
        return Consistency(num_noise=at(noises, sigma), weight=at(on_smoothadv, sigma), adversary=Adversary())

    def smoothmix(one_step: bool) -> Callable[[float], Objective]:
        return lambda sigma: SmoothMix(num_noise=2, steps=4, step_size=at(step_size, sigma), eta=5, one_step=one_step)

    searched = preset_of("cifar10", smoothadv_best, "SmoothAdv + hyperparameter search", "consistency/table1")
    return {
        "cifar10/gaussian": preset_of("cifar10", lambda sigma: Gaussian(), "Gaussian"),
        "cifar10/stability": preset_of("cifar10", lambda s: Stability(weight=at(stability, s)), "Stability"),
        "cifar10/smoothadv": preset_of("cifar10", lambda s: SmoothAdv(num_noise=at(noises, s)), "SmoothAdv"),
        "cifar10/smoothadv-best": searched,
        "cifar10/macer": preset_of("cifar10", lambda s: Macer(weight=at(macer, s), deferred=at(deferred, s)), "MACER"),
        "cifar10/consistency": preset_of("cifar10", lambda s: Consistency(weight=at(consistency, s)), "Consistency"),
        # Its published rows have other weights and an earlier form of the entropy: there is no number to compare with.
        "cifar10/smoothadv-consistency": preset_of("cifar10", smoothadv_consistency, None),
        "cifar10/smoothmix": preset_of("cifar10", smoothmix(False), "SmoothMix"),
        "cifar10/smoothmix-one-step": preset_of("cifar10", smoothmix(True), "SmoothMix + one-step adversary"),
    }


def imagenet_presets() -> dict[str, Preset]:
    epsilon = {0.5: 1.0, 1.0: 2.0}
    entropy = {0.5: 0.5, 1.0: 0.1}
    return {
        "imagenet/gaussian": preset_of("imagenet", lambda sigma: Gaussian(), "Gaussian"),
        "imagenet/smoothadv": preset_of(
            "imagenet",
            lambda s: SmoothAdv(num_noise=1, adversary=Adversary(steps=1, epsilon=at(epsilon, s))),
            "SmoothAdv",
        ),
        "imagenet/consistency": preset_of(
            "imagenet", lambda s: Consistency(weight=5, entropy_weight=at(entropy, s)), "Consistency"
        ),
        # With T = 1 the released code leaves the clean side as it is: its one-step option has no effect.
        "imagenet/smoothmix": preset_of(
            "imagenet", lambda s: SmoothMix(num_noise=1, steps=1, step_size=8), "SmoothMix"
        ),
    }


def consistency_noises(num_noise: int) -> Preset:
    """The ablation of the number of noises, which is published at every sigma."""
    whole = preset_of("mnist", lambda s: Consistency(num_noise=num_noise, weight=at(MNIST_CONSISTENCY, s)), None)
    rows = {s: ("consistency/supp-table5", {"sigma": s, "m": num_noise}) for s in whole.sigmas}
    return Preset(whole.recipe, whole.sigmas, rows)


def ablation_presets() -> dict[str, Preset]:
    """The papers' ablations, on MNIST and mostly at sigma 1.0: `mnist/ablation/<table>/<value>`."""
    found: dict[str, Preset] = {}
    for form, printed in {"mse": "MSE", "kl": "KL"}.items():
        for weight in (5, 20, 50):
            found[f"consistency-form/{form}-{weight}"] = ablation_of(
                Consistency.model_validate({"form": form, "weight": weight}),
                "consistency/supp-table4",
                **{"loss": printed, "lambda": weight},
            )
    # The paper's equation; what its table prints for it is of the form kl_entropy: no row is published.
    for weight in (5, 20):
        found[f"consistency-form/xent-{weight}"] = ablation_of(Consistency(form="xent", weight=weight), None)
    for num_noise in (2, 4, 8):
        found[f"consistency-noises/{num_noise}"] = consistency_noises(num_noise)
    for weight in (1, 5, 10, 15, 20, 25, 30, 50):
        found[f"consistency-lambda/{weight}"] = ablation_of(
            Consistency(weight=weight), "consistency/supp-table6", **{"sigma": 1.0, "lambda": weight}
        )
    for eta in (1, 2, 4, 8, 16):
        found[f"smoothmix-eta/{eta}"] = ablation_of(SmoothMix(steps=8, eta=eta), "smoothmix/table6", sigma=1.0, eta=eta)
    for step_size, steps in ((8, 1), (4, 2), (2, 4), (1, 8)):
        found[f"smoothmix-alpha-T/{step_size}x{steps}"] = ablation_of(
            SmoothMix(steps=steps, step_size=step_size, eta=1), "smoothmix/table7", alpha_T=f"{step_size}.0x{steps}"
        )
    for norm in (2, 4, 6, 8):
        found[f"smoothmix-max-norm/{norm}"] = ablation_of(
            SmoothMix(steps=8, eta=1, max_norm=norm), "smoothmix/table8", sigma=1.0, epsilon=norm
        )
    for num_noise in (1, 2, 4, 8):
        found[f"smoothmix-noises/{num_noise}"] = ablation_of(
            SmoothMix(num_noise=num_noise, steps=8, eta=1), "smoothmix/table9", sigma=1.0, m=num_noise
        )
    return {f"mnist/ablation/{name}": preset for name, preset in found.items()}


PRESETS: dict[str, Preset] = mnist_presets() | cifar10_presets() | imagenet_presets() | ablation_presets()


def preset(name: str, sigma: float | None = None) -> TrainRecipe:
    """The recipe of a preset at `sigma` (0.5 by default; 1.0 for ablations); an unknown name lists the near ones."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS, "`smoothcert presets` lists them")
        raise RequestError(f"preset: no preset is called {name}; {hint}")
    found = PRESETS[name]
    if sigma is None:
        sigma = DEFAULT_SIGMA if DEFAULT_SIGMA in found.sigmas else found.sigmas[0]
    if not sigma > 0:
        raise RequestError(f"sigma: expected a number > 0, got {sigma}")
    return found.recipe(sigma)
