"""Labels of runs in figures and pages, and the colours and styles that belong to them."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from smoothcert.objectives import OBJECTIVES
from smoothcert.report.labels import NamedRun, labels_of
from smoothcert.report.looks import looks_of
from smoothcert.report.names import METHODS, dataset_name, meanings_in, network_name, setting_titles

LOW, HIGH = (0.5, "mnist"), (1.0, "mnist")
PAPERS = [
    "Gaussian",
    "Stability",
    "SmoothAdv",
    "MACER",
    "Consistency",
    "SmoothAdv + Consistency",
    "SmoothMix (η = 1)",
    "SmoothMix (η = 1), one-step",
    "SmoothMix (η = 5)",
    "SmoothMix (η = 5), one-step",
    "CAT-RS",
]


def run(name: str, method: str | None, group: tuple[float, str] = LOW, **objective: Any) -> NamedRun:
    seed = {"seed": objective.pop("seed", 0)}
    return NamedRun(name, method, {"objective": {"name": method, **objective}, **seed} if method else {}, group)


def test_methods_have_the_names_that_people_use() -> None:
    runs = [
        run("gaussian-0.5", "gaussian"),
        run("a", "smoothmix", eta=5.0, one_step=False),
        run("b", "smoothmix", eta=5.0, one_step=True),
        run("c", "consistency", weight=5.0, adversary=None),
        run("d", "consistency", weight=5.0, adversary={"attack": "pgd"}),
        run("gaussian-1.0", "gaussian", HIGH),
        run("mine-0.5", None),
        run("theirs", "my_methods:SmoothLabels"),
        run("denoised", "gaussian + denoiser"),
        run("three", "ensemble of 3 (gaussian + consistency)"),
        run("in a file", "/home/me/my code/methods.py:SmoothLabels"),
    ]
    assert list(labels_of(runs).values()) == [
        "Gaussian",
        "SmoothMix (η = 5)",
        "SmoothMix (η = 5), one-step",
        "Consistency",
        "SmoothAdv + Consistency",
        "Gaussian",
        "mine",
        "my_methods:SmoothLabels",
        "Gaussian + denoiser",
        "ensemble of 3 (gaussian + consistency)",
        "methods.py:SmoothLabels",
    ]


def test_every_method_has_a_name_in_reports() -> None:
    names = {name.replace("_", "") for name in OBJECTIVES}
    assert set(METHODS) == names, "correct METHODS in report/names.py, whose keys have no underscores"


def test_attacked_noise_and_a_sampler_are_part_of_the_label() -> None:
    recipe = {"objective": {"name": "gaussian", "noise_attack": {"steps": 6}}, "sampler": {"name": "radius-weighted"}}
    uniform = recipe | {"sampler": {"name": "uniform"}}
    runs = [run("plain", "gaussian"), NamedRun("a", "gaussian", uniform, LOW), NamedRun("b", "gaussian", recipe, LOW)]
    attacked = "Gaussian + attacked noise"
    assert list(labels_of(runs).values()) == ["Gaussian", attacked, f"{attacked} + weighted images"]
    assert list(setting_titles(["sampler.name", "sampler.votes"]).values()) == [
        "sampler",
        "sampler votes",
    ]


def test_seeds_have_all_their_digits() -> None:
    runs = [run(f"run-{seed}", "consistency", seed=seed) for seed in (20261118, 20261119)]
    assert list(labels_of(runs).values()) == ["Consistency (seed = 20261118)", "Consistency (seed = 20261119)"]


def test_labels_name_fields_of_the_recipe_only_if_those_of_the_objective_do_not_suffice() -> None:
    def trained(name: str, weight: float, epochs: int) -> NamedRun:
        named = run(name, "consistency", weight=weight)
        return replace(named, recipe={**named.recipe, "epochs": epochs})

    short, heavy, long = trained("a", 5.0, 1), trained("b", 10.0, 2), trained("c", 10.0, 3)
    assert list(labels_of([short, heavy]).values()) == ["Consistency (λ = 5)", "Consistency (λ = 10)"]
    assert all("epochs" in label for label in labels_of([short, heavy, long]).values())


def test_networks_other_than_the_most_common_one_are_named() -> None:
    def with_model(named: NamedRun, model: str) -> NamedRun:
        return replace(named, recipe={**named.recipe, "model": model})

    mine = [with_model(run(f"mine{g[0]}", "consistency", g, weight=10.0), "net.py:Wide") for g in (LOW, HIGH)]
    ours = [with_model(run(f"ours{w}", "consistency", weight=w), "lenet") for w in (5.0, 10.0)]
    gaussian = with_model(run("g", "gaussian"), "lenet")
    labels = labels_of([*mine, *ours, gaussian, run("other tool", "gaussian", HIGH)])
    assert list(labels.values()) == [
        *["Consistency, Wide"] * 2,
        *["Consistency (λ = 5)", "Consistency (λ = 10)"],
        *["Gaussian"] * 2,
    ]
    assert list(labels_of([mine[0], gaussian]).values()) == ["Consistency, Wide", "Gaussian, LeNet"]
    assert list(labels_of([mine[1], gaussian]).values()) == ["Consistency", "Gaussian"], "the panels differ"


def test_labels_of_one_method_have_what_differs() -> None:
    weights = [run(f"c{w}", "consistency", weight=w, num_noise=2) for w in (5.0, 10.0)]
    other_sigma = run("c", "consistency", HIGH, weight=20.0, num_noise=2)
    labels = list(labels_of([*weights, other_sigma]).values())
    assert labels == ["Consistency (λ = 5)", "Consistency (λ = 10)", "Consistency (λ = 20)"]
    steps = [run(f"s{t}", "smoothmix", eta=5.0, steps=t) for t in (2, 4)]
    assert list(labels_of(steps).values()) == ["SmoothMix (η = 5, T = 2)", "SmoothMix (η = 5, T = 4)"]
    seeds = [run(f"g{seed}", "gaussian", seed=seed) for seed in (0, 1)]
    assert list(labels_of(seeds).values()) == ["Gaussian (seed = 0)", "Gaussian (seed = 1)"]
    schedules = [
        run("consistency-0.5", "consistency", epochs=150, learning_rate=0.1, weight_decay=1e-4, warm_up=0),
        run("best-0.5", "consistency", epochs=110, learning_rate=0.2, weight_decay=5e-4, warm_up=2),
    ]
    assert list(labels_of(schedules).values()) == ["Consistency", "Consistency (best)"]


def test_the_letters_of_the_papers_are_those_of_published_methods() -> None:
    """A field of a user's own method that is called `weight` need not be λ; the number of noises is that of any."""
    runs = [run(f"m{w}", "methods.py:Mine", weight=w, steps=w, num_noise=w) for w in (1, 2)]
    labels = [f"methods.py:Mine (weight = {w}, steps = {w}, m = {w})" for w in (1, 2)]
    assert list(labels_of(runs).values()) == labels


def test_labels_of_a_panel_are_distinct() -> None:
    same = [run("a-0.5", "gaussian"), run("b-0.5", "gaussian"), run("Gaussian", None), run("b", None)]
    assert labels_of(same) == {"a-0.5": "a", "b-0.5": "b-0.5", "Gaussian": "Gaussian", "b": "b"}
    clash = [run("Gaussian", None), run("x", "gaussian")]
    assert sorted(labels_of(clash).values()) == ["Gaussian", "x"]


@pytest.mark.parametrize(
    "labels",
    [
        PAPERS,
        [*PAPERS, *(f"other {i}" for i in range(20))],
        [f"Consistency (λ = {w})" for w in (1, 5, 10, 15, 20, 25, 30, 50)],
        [f"Consistency (λ = {w}, loss = {f})" for w in (5, 20, 50) for f in ("KL", "MSE", "KL + entropy")],
        ["Consistency (λ = 5)", "Consistency (λ = 10)", "Consistency", "SmoothMix", "SmoothMix (η = 5)"],
    ],
)
def test_looks_differ_and_do_not_depend_on_the_order(labels: list[str]) -> None:
    looks = looks_of(labels)
    assert len(set(looks.values())) == len(labels)
    shuffled = random.Random(1).sample(labels, len(labels))
    assert looks_of(shuffled) == looks


def test_a_method_looks_the_same_in_every_figure() -> None:
    everything = looks_of(PAPERS)
    for label in PAPERS:
        assert looks_of([label, "Gaussian"])[label] == everything[label]
    # Without its style, each is still a colour of its own, on white and on dark pages.
    assert len({look.colour for look in everything.values()}) == len(PAPERS)
    assert len({look.dark for look in everything.values()}) == len(PAPERS)


def brightness(colour: str) -> int:
    red, green, blue = bytes.fromhex(colour[1:])
    return 2 * red + 7 * green + blue


def test_methods_of_one_line_style_differ_in_brightness() -> None:
    """A figure that is printed in grey shows which curve is which."""
    for one, other in itertools.combinations(looks_of(PAPERS).values(), 2):
        if one.dash == other.dash:
            assert abs(brightness(one.colour) - brightness(other.colour)) > 150, (one, other)


def test_an_ordered_hyper_parameter_gets_a_ramp() -> None:
    labels = [f"SmoothMix (η = {eta})" for eta in (16, 1, 4, 2, 8)]
    looks = looks_of(labels)
    ordered = [brightness(looks[f"SmoothMix (η = {eta})"].colour) for eta in (1, 2, 4, 8, 16)]
    assert ordered == sorted(ordered)


def test_letters_of_labels_are_explained() -> None:
    got = meanings_in(["MNIST, σ = 0.50", "SmoothMix (η = 5), one-step", "term: mix", "loss = KL, seed = 3"])
    assert [meaning.partition(":")[0] for meaning in got] == ["σ", "η", "one-step"]
    assert meanings_in(["Gaussian", "epochs = 3"]) == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [("mnist", "MNIST"), ("mnist-sample", "MNIST sample"), ("cifar10", "CIFAR-10"), ("folder:/a/cats", "cats")],
)
def test_data_sets(name: str, shown: str) -> None:
    assert dataset_name(name) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        *[("lenet", "LeNet"), ("resnet110", "ResNet-110"), ("net.py:Wide", "Wide"), ("hf:org/vit", "org/vit")],
        *[("some/wide_net.py:build", "wide_net"), ("package.wide:get_model", "wide")],
    ],
)
def test_networks(name: str, shown: str) -> None:
    assert network_name(name) == shown


def test_columns_of_settings_have_the_letters_of_the_papers() -> None:
    keys = ["objective.weight", "objective.adversary.steps", "objective.steps", "learning_rate"]
    assert list(setting_titles(keys).values()) == ["λ", "T of adversary", "T", "learning rate"]
    assert setting_titles(keys[:2]) == {"objective.weight": "λ", "objective.adversary.steps": "T"}
