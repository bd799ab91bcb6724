"""Presets: hyper-parameters and ACR as printed, and each method trains two steps."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from smoothcert.data import DATASETS, ImageData
from smoothcert.models import CifarResNet, LeNet
from smoothcert.objectives import (
    Adversary,
    CatRs,
    Consistency,
    Gaussian,
    Macer,
    NoiseAttack,
    Objective,
    SmoothAdv,
    SmoothMix,
    Stability,
)
from smoothcert.papers.presets import PRESETS, preset
from smoothcert.papers.tables import paper_table
from smoothcert.training.checkpoint import load_run
from smoothcert.training.loop import train
from smoothcert.training.recipe import load_train_recipe, with_overrides
from smoothcert.training.sampler_settings import RadiusWeighted

RESULTS = Path(__file__).parents[2] / "results"


def test_presets_cover_all_rows_of_the_main_tables() -> None:
    for dataset, table in (
        ("mnist", "smoothmix/table2"),
        ("cifar10", "smoothmix/table1"),
        ("imagenet", "smoothmix/table4"),
    ):
        found = {
            (sigma, found.published_acr(sigma))
            for name, found in PRESETS.items()
            if name.startswith(dataset) and "ablation" not in name
            for sigma in found.sigmas
        }
        assert {(float(row["sigma"]), float(row["acr"])) for row in paper_table(table)} <= found


@pytest.mark.parametrize(
    ("prefix", "table", "rows"),
    [
        ("consistency-form", "consistency/supp-table4", 6),
        ("consistency-lambda", "consistency/supp-table6", 8),
        ("smoothmix-eta", "smoothmix/table6", 5),
        ("smoothmix-alpha-T", "smoothmix/table7", 4),
        ("smoothmix-max-norm", "smoothmix/table8", 4),
        ("smoothmix-noises", "smoothmix/table9", 4),
    ],
)
def test_presets_cover_the_rows_of_the_ablations(prefix: str, table: str, rows: int) -> None:
    """All rows but those that repeat another table's, are plain Gaussian training or have no limit."""
    found = [p for name, p in PRESETS.items() if name.startswith(f"mnist/ablation/{prefix}/")]
    published = [p.published_acr(1.0) for p in found if p.published]
    assert len(published) == rows
    assert set(published) <= {float(row["acr"]) for row in paper_table(table)}


def test_number_of_noises_is_published_at_every_sigma() -> None:
    found = PRESETS["mnist/ablation/consistency-noises/8"]
    assert [found.published_acr(s) for s in (0.25, 0.5, 1.0)] == [0.929, 1.667, 1.762]


def test_presets_with_one_recipe_have_one_published_acr() -> None:
    """Another number is of another recipe: what the preset of an ablation keeps fixed need not be that of the method.

    The tables print some runs twice, rounded differently.
    """
    numbers: dict[str, list[float]] = {}
    for found in PRESETS.values():
        for sigma in found.published:
            if (acr := found.published_acr(sigma)) is not None:
                numbers.setdefault(json.dumps(found.recipe(sigma).to_mapping(), sort_keys=True), []).append(acr)
    assert any(len(same) > 1 for same in numbers.values())
    assert all(max(same) - min(same) < 0.0015 for same in numbers.values())


def at_each_sigma(kind: Callable[..., Objective], **fields: Any) -> dict[float, Objective]:
    """Sigma -> the objective, whose field is one value, or a list of those at sigma 0.25, 0.5 and 1.0."""
    return {
        sigma: kind(**{name: value[i] if isinstance(value, list) else value for name, value in fields.items()})
        for i, sigma in enumerate((0.25, 0.5, 1.0))
    }


def adversary(steps: int, epsilon: float) -> Adversary:
    return Adversary(attack="pgd", steps=steps, epsilon=epsilon)


consistency = partial(Consistency, form="kl_entropy")
smoothmix = partial(SmoothMix, one_step_radius=None, max_norm=None)
macer = partial(Macer, num_noise=16, gamma=8, beta=16)
MNIST_MIX = {"num_noise": 4, "step_size": 1}
CIFAR10_MIX = {"num_noise": 2, "steps": 4, "step_size": [0.5, 1, 2], "eta": 5}
CHEAP, NEAR, FAR = adversary(1, 1), adversary(10, 1), adversary(10, 2)
AS_PUBLISHED = {
    "mnist/gaussian": at_each_sigma(Gaussian, num_noise=1),
    "mnist/stability": at_each_sigma(Stability, weight=2),
    "mnist/smoothadv": at_each_sigma(SmoothAdv, num_noise=4, adversary=NEAR),
    "mnist/macer": at_each_sigma(macer, weight=[16, 16, 6], deferred=True),
    "mnist/consistency": at_each_sigma(consistency, num_noise=2, weight=[10, 5, 5], entropy_weight=0.5),
    "mnist/smoothadv-consistency": at_each_sigma(
        consistency, num_noise=4, weight=1, entropy_weight=0.5, adversary=NEAR
    ),
    "mnist/smoothmix": at_each_sigma(smoothmix, **MNIST_MIX, steps=[2, 4, 8], eta=5, one_step=False),
    "mnist/smoothmix-one-step": at_each_sigma(smoothmix, **MNIST_MIX, steps=[2, 4, 8], eta=5, one_step=True),
    "mnist/smoothmix-eta1": at_each_sigma(smoothmix, **MNIST_MIX, steps=[3, 4, 8], eta=1, one_step=False),
    "mnist/smoothmix-eta1-one-step": at_each_sigma(smoothmix, **MNIST_MIX, steps=[3, 4, 8], eta=1, one_step=True),
    "cifar10/gaussian": at_each_sigma(Gaussian, num_noise=1),
    "cifar10/stability": at_each_sigma(Stability, weight=[2, 2, 1]),
    "cifar10/smoothadv": at_each_sigma(SmoothAdv, num_noise=[4, 8, 8], adversary=NEAR),
    "cifar10/smoothadv-best": at_each_sigma(SmoothAdv, num_noise=[4, 2, 2], adversary=[NEAR, FAR, FAR]),
    "cifar10/macer": at_each_sigma(macer, weight=[12, 4, 12], deferred=[False, False, True]),
    "cifar10/macer-150-epochs": at_each_sigma(macer, weight=[12, 4, 12], deferred=[False, False, True]),
    "cifar10/consistency": at_each_sigma(consistency, num_noise=2, weight=[20, 10, 10], entropy_weight=0.5),
    "cifar10/smoothadv-consistency": at_each_sigma(
        consistency, num_noise=[4, 2, 2], weight=[2, 1, 1], entropy_weight=0.5, adversary=[NEAR, FAR, FAR]
    ),
    "cifar10/smoothmix": at_each_sigma(smoothmix, **CIFAR10_MIX, one_step=False),
    "cifar10/smoothmix-one-step": at_each_sigma(smoothmix, **CIFAR10_MIX, one_step=True),
    "imagenet/gaussian": at_each_sigma(Gaussian, num_noise=1),
    "imagenet/smoothadv": at_each_sigma(SmoothAdv, num_noise=1, adversary=[CHEAP, CHEAP, adversary(1, 2)]),
    "imagenet/consistency": at_each_sigma(consistency, num_noise=2, weight=5, entropy_weight=[0.5, 0.5, 0.1]),
    # The eta is that of the other data sets.
    "imagenet/smoothmix": at_each_sigma(smoothmix, num_noise=1, steps=1, step_size=8, eta=5, one_step=False),
}
"""Preset of the papers -> sigma -> its objective, with every field written out: no default is relied on."""
OTHER_PROTOCOLS = {
    # MACER multiplies its logits by 16, and LeNet computes them in the precision of the run.
    "mnist/macer": {"precision": "fp32"},
    # Of the networks that Zhai et al. released: the rate drops before their epochs 200 and 400, counted from 1.
    "cifar10/macer": {
        "epochs": 440,
        "batch_size": 64,
        "learning_rate": 0.01,
        "learning_rate_drops": (199, 399),
        "weight_decay": 0.0005,
    },
}


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_hyper_parameters_and_protocol_as_published(name: str) -> None:
    """The rest is the protocol of the data set, except for MACER."""
    dataset = name.partition("/")[0]
    for sigma in PRESETS[name].sigmas:
        recipe, plain = preset(name, sigma), preset(f"{dataset}/gaussian", sigma)
        assert recipe.objective == AS_PUBLISHED[name][sigma]
        protocol = plain.model_copy(update=OTHER_PROTOCOLS.get(name, {}))
        assert recipe.model_copy(update={"objective": plain.objective}) == protocol


def test_presets_of_the_papers_are_all_compared() -> None:
    """The others are ablations, methods of later papers and recipes of our own, which have tests below."""
    later = ("ablation", "/best", "gaussian-m4", "attacked-noise", "distillation", "catrs", "sun2024", "cosine")
    expected = {name for name in PRESETS if not any(word in name for word in later)}
    assert expected == {*AS_PUBLISHED}, (
        "add the hyper-parameters that the paper prints to AS_PUBLISHED, or a word to `later` and a test of its own"
    )


def test_the_ablation_of_the_noises_keeps_its_weight() -> None:
    weights = [preset("mnist/ablation/consistency-noises/4", sigma).objective.weight for sigma in (0.25, 0.5, 1.0)]
    assert weights == [5, 5, 5]


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_gaussian_m4_has_four_times_the_steps_of_gaussian(dataset: str) -> None:
    """Every step sees 256 noisy inputs in both; the learning rate and all else are the same."""
    one, four = preset(f"{dataset}/gaussian", 0.25), preset(f"{dataset}/gaussian-m4", 0.25)
    assert (one.images_per_step, four.images_per_step) == (256, 64)
    assert four.objective.num_noise * four.images_per_step == 256
    assert four.model_copy(update={"objective": one.objective}) == one
    published = [PRESETS[f"{dataset}/gaussian-m4"].published_acr(sigma) for sigma in (0.25, 0.5, 1.0)]
    assert published == ([0.487, 0.571, 0.543] if dataset == "cifar10" else [None] * 3)


def test_sun2024_as_published() -> None:
    for sigma, start, share, steps, size in [(0.25, 60, 0.5, 3, 0.25), (0.5, 70, 0.4, 6, 0.25), (1.0, 60, 0.4, 4, 0.5)]:
        recipe = preset("cifar10/sun2024", sigma)
        attack = NoiseAttack(steps=steps, step_size=size, first_epoch=start)
        assert recipe.objective == Gaussian(num_noise=4, noise_attack=attack)
        assert recipe.sampler == RadiusWeighted(start=start, discard_below=share, discard_votes=100, every=10, votes=16)
        plain = preset("cifar10/gaussian", sigma)
        assert recipe.model_copy(update={"objective": plain.objective, "sampler": plain.sampler}) == plain
    assert [PRESETS["cifar10/sun2024"].published_acr(sigma) for sigma in (0.25, 0.5, 1.0)] == [0.564, 0.76, 0.844]


def test_catrs_on_cifar10_as_published() -> None:
    for sigma, weight in [(0.25, 0.5), (0.5, 1.0), (1.0, 2.0)]:
        recipe, plain = preset("cifar10/catrs", sigma), preset("cifar10/gaussian", sigma)
        assert recipe.objective == CatRs(num_noise=4, steps=4, epsilon=1.0, weight=weight)
        assert recipe.teacher == preset("cifar10/gaussian", 0.25)
        assert recipe.model_copy(update={"objective": plain.objective, "teacher": None}) == plain


def test_catrs_as_published() -> None:
    """One teacher, Gaussian at sigma 0.25, for every sigma; the weights at 0.5 and 1.0 are not published."""
    recipes = [preset("mnist/catrs", sigma) for sigma in (0.25, 0.5, 1.0)]
    for recipe, weight in zip(recipes, (1.0, 2.0, 1.0), strict=True):
        assert (recipe.epochs, recipe.learning_rate, recipe.learning_rate_drops) == (150, 0.01, (50, 100))
        assert recipe.objective == CatRs(num_noise=4, steps=4, epsilon=1.0, weight=weight)
        assert recipe.teacher is not None
        assert (recipe.teacher.sigma, recipe.teacher.objective) == (0.25, Gaussian())
    assert recipes[0].teacher == recipes[1].teacher == recipes[2].teacher
    assert [PRESETS["mnist/catrs"].published_acr(sigma) for sigma in (0.25, 0.5, 1.0)] == [0.933, 1.7, 1.831]


def test_our_recipes_are_those_that_were_measured() -> None:
    """Those of the certified runs in results/. `cifar10/best` is the method of Sun et al."""
    for sigma in (0.25, 0.5, 1.0):
        assert preset("cifar10/best", sigma) == preset("cifar10/sun2024", sigma)
        assert load_train_recipe(RESULTS / f"beyond/mnist-best-{sigma}/recipe.yaml") == preset("mnist/best", sigma)
    for sigma in (0.5, 1.0):
        for name in ("sun2024", "consistency-cosine"):
            measured = load_train_recipe(RESULTS / f"beyond/cifar10-{name}-{sigma}/recipe.yaml")
            assert measured == preset(f"cifar10/{name}", sigma)
        measured = load_train_recipe(RESULTS / f"beyond/mnist-catrs-{sigma}/recipe.yaml")
        assert measured == preset("mnist/catrs", sigma)
        measured = load_train_recipe(RESULTS / f"beyond/cifar10-distilled-{sigma}/recipe.yaml")
        assert measured == preset("cifar10/distillation-finetune", sigma)


def test_best_recipe_for_mnist_has_the_objective_with_the_largest_published_acr_of_smoothmix() -> None:
    for sigma in (0.25, 0.5, 1.0):
        acr = {
            name: PRESETS[name].published_acr(sigma) or 0.0 for name in PRESETS if name.startswith("mnist/smoothmix")
        }
        published = preset(max(acr, key=lambda name: acr[name]), sigma)
        longer = ["epochs=150"] if sigma == 0.25 else ["epochs=300", "nesterov=true"]
        schedule = ["schedule=cosine", "learning_rate_drops=[]", "learning_rate=0.05", *longer]
        assert preset("mnist/best", sigma) == with_overrides(published, schedule)


def test_protocols_as_published() -> None:
    recipe = preset("cifar10/gaussian", 0.25)
    assert (recipe.model, recipe.epochs, recipe.batch_size) == ("resnet110", 150, 256)
    assert (recipe.learning_rate, recipe.learning_rate_drops, recipe.momentum, recipe.weight_decay) == (
        0.1,
        (51, 101),
        0.9,
        1e-4,
    )
    nesterov = {name for name in PRESETS if any(preset(name, sigma).nesterov for sigma in (0.25, 0.5, 1.0))}
    assert nesterov == {"mnist/best"}, "the published runs use plain momentum"
    recipe = preset("mnist/gaussian", 0.25)
    assert (recipe.model, recipe.epochs, recipe.batch_size) == ("lenet", 90, 256)
    assert (recipe.learning_rate, recipe.learning_rate_drops, recipe.weight_decay) == (0.01, (31, 61), 1e-4)
    recipe = preset("imagenet/gaussian")
    assert (recipe.model, recipe.epochs, recipe.batch_size, recipe.learning_rate_drops) == (
        "resnet50",
        90,
        200,
        (31, 61),
    )


def test_unpublished_sigma_takes_the_nearest_setting() -> None:
    assert preset("mnist/smoothmix", 0.3).objective.steps == 2
    assert preset("mnist/smoothmix", 0.3).sigma == 0.3


ABLATIONS = {name.rpartition("/")[0]: name for name in PRESETS if "ablation" in name}
"""The last preset of each ablation; the others have the same fields."""
TRAINED = [name for name in PRESETS if "ablation" not in name and name != "cifar10/best"]  # which is cifar10/sun2024


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINED, *ABLATIONS.values()])
def test_preset_trains_two_steps(name: str, tmp_path: Path) -> None:
    """With small images and batches, a small network (but for one ResNet-50), and two attack steps at most."""
    recipe = preset(name)
    size = recipe.objective.num_noise * 2 if recipe.objective.chunked else 2
    changes = [f"batch_size={size}", "epochs=1", "learning_rate_warm_up=0"]
    if name == "cifar10/sun2024":
        changes += ["epochs=5", "sampler.start=3", "sampler.discard_below=0", "learning_rate_drops=[]"]
        changes += ["objective.noise_attack.first_epoch=3", "objective.noise_attack.steps=2"]
    changes += ["model=resnet20"] if recipe.model != "lenet" and name != "imagenet/gaussian" else []
    if adversary := getattr(recipe.objective, "adversary", None):
        changes.append(f"objective.adversary.steps={min(adversary.steps, 2)}")
    if getattr(recipe.objective, "steps", 0) > 2:
        changes.append("objective.steps=2")
    if recipe.teacher is not None:
        changes += ["learning_rate_drops=[]", "teacher.epochs=1", "teacher.learning_rate_drops=[]", "teacher_votes=5"]
        changes.append(f"teacher.batch_size={size}")
    recipe = with_overrides(recipe, changes)
    spec = DATASETS[recipe.dataset]
    shape = {"mnist": (1, 28, 28), "cifar10": (3, 8, 8), "imagenet": (3, 32, 32)}[recipe.dataset]
    generator = torch.Generator().manual_seed(0)
    steps = 1 if recipe.objective.chunked and recipe.objective.num_noise > 1 else 2
    images = torch.randint(256, (steps * size, *shape), generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (steps * size,), generator=generator)
    train(
        recipe,
        ImageData(images, labels, 10, recipe.dataset, "train", spec.normalization),
        tmp_path / "run",
        classifier=LeNet(10)
        if name.startswith("mnist/distillation")
        else CifarResNet(8, 10)
        if "distill" in name
        else None,
        device="cpu",
    )
    run = load_run(tmp_path / "run")
    assert run.finished
    assert run.spec.normalization == spec.normalization
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())
