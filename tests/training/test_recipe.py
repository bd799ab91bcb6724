"""Recipes: round trips, overrides, and refusals of one line that name field, value and allowed range."""

import os
from pathlib import Path
from typing import get_args

import pytest
from tiny import tiny_recipe

from smoothcert.certification.settings import CertifySettings
from smoothcert.errors import RequestError
from smoothcert.io.records import parse_recipe
from smoothcert.noise import NOISES
from smoothcert.objectives import OBJECTIVES, Consistency
from smoothcert.papers.presets import PRESETS, preset
from smoothcert.training.choices import NoiseName
from smoothcert.training.recipe import TrainRecipe, load_train_recipe, with_overrides
from smoothcert.training.sampler_settings import SAMPLERS


def test_recipes_accept_the_noises_of_the_registry() -> None:
    assert get_args(NoiseName) == tuple(NOISES), "correct NoiseName in training/choices.py"


def test_yaml_round_trip(tmp_path: Path) -> None:
    recipe = tiny_recipe(seed=7)
    recipe.save(tmp_path / "recipe.yaml")
    assert load_train_recipe(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_yaml(name: str, tmp_path: Path) -> None:
    recipe = preset(name)
    recipe.save(tmp_path / "recipe.yaml")
    assert load_train_recipe(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_has_batch_size_noisy_inputs_except_for_macer(name: str) -> None:
    """MACER's published runs take all 16 noises of a whole batch in one step."""
    recipe = tiny_recipe(objective=OBJECTIVES[name](), batch_size=64)
    noisy_inputs = recipe.images_per_step * recipe.objective.num_noise
    assert noisy_inputs == (16 * 64 if name == "macer" else 64)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_field_is_described(name: str) -> None:
    assert OBJECTIVES[name].name == name
    assert all(field.description for field in OBJECTIVES[name].model_fields.values())


def test_later_fields_are_written_only_if_they_are_set() -> None:
    assert not set(TrainRecipe.later_fields) & set(tiny_recipe().to_mapping())
    changed = with_overrides(tiny_recipe(), ["optimizer=adamw", "schedule=cosine", "ema=0.999", "epochs=9"])
    changed = with_overrides(changed, ["sampler=radius-weighted", "sampler.start=3"])
    assert {name: value for name, value in changed.to_mapping().items() if name in TrainRecipe.later_fields} == {
        "schedule": "cosine",
        "optimizer": "adamw",
        "ema": 0.999,
        "sampler": {
            "name": "radius-weighted",
            "start": 3,
            "discard_below": 0.4,
            "discard_votes": 100,
            "every": 10,
            "votes": 16,
        },
    }
    assert parse_recipe(TrainRecipe, changed.to_mapping(), "test") == changed


def test_the_last_of_two_overrides_of_a_method_counts() -> None:
    recipe = with_overrides(tiny_recipe(), ["objective=null", "objective=project.methods:Mine", "strength=3"])
    assert recipe.to_mapping()["objective"] == {"name": "project.methods:Mine", "strength": 3}


def test_overrides_change_what_they_name() -> None:
    recipe = with_overrides(tiny_recipe(), ["epochs=5", "learning_rate_drops=[2, 3]", "precision=bf16"])
    assert (recipe.epochs, recipe.learning_rate_drops, recipe.precision) == (5, (2, 3), "bf16")
    assert recipe.batch_size == tiny_recipe().batch_size


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epochs", "expected key=value"),
        ("epochs=0", "epochs: expected at least 1, got 0"),
        ("epochs=many", "epochs: expected a valid integer, got 'many'"),
        ("epoch=3", "epoch: unknown key; did you mean epochs"),
        ("learning_rat=3", "did you mean learning_rate"),
        ("sigma=-1", "sigma: expected greater than 0, got -1"),
        ("sigma=.nan", "sigma: expected a finite number"),
        ("precision=fp8", "precision: expected 'auto', 'fp32' or 'bf16', got 'fp8'"),
        ("objective=gausian", "did you mean gaussian"),
        ("objective={name: [gaussian]}", "objective: unknown method"),
        ("objective.num_noises=2", "objective.num_noises: unknown key; did you mean objective.num_noise"),
        ("num_noises=2", "objective.num_noises: unknown key; did you mean objective.num_noise"),
        ("name=macer", "--set: name: unknown key"),
        ("objective.num_noise=0", "objective.num_noise: expected at least 1, got 0"),
        ("objective.num_noise=3", "batch_size: expected a multiple of objective.num_noise = 3, got 64"),
        ("objectiv.num_noise=3", "did you mean objective"),
        ("learning_rate_drops=[60, 30]", "learning_rate_drops: expected rising epochs"),
        ("learning_rate_warm_up=1", "before the first drop and the last epoch, at most 0 epochs, got 1"),
        ("optimizer=adam", "optimizer: expected 'sgd' or 'adamw', got 'adam'"),
        ("ema=1", "ema: expected less than 1, got 1"),
        ("sampler=radius", f"sampler: unknown sampler radius; choose one of {', '.join(SAMPLERS)}"),
        ("sampler={name: [uniform]}", "sampler: unknown sampler ['uniform']"),
        ("sampler=3", f"sampler: expected one of {', '.join(SAMPLERS)}, or a mapping with the key 'name'"),
        ("sampler.start=3", "sampler.start: the sampler uniform has no settings; first set sampler to radius-weighted"),
        (
            "objective.noise_attack.first_epoch=2",
            "objective.noise_attack.first_epoch: expected an epoch before the end of training, at most 1, got 2",
        ),
        ("sampler=radius-weighted", "sampler.start: expected an epoch before the end of training, at most 1, got 70"),
        ("sampler={name: radius-weighted, start: 2}", "sampler.start: expected at least 3, got 2"),
        ("sampler={name: radius-weighted, votes: 1}", "sampler.votes: expected 0 or at least 4, got 1"),
        ("sampler={name: radius-weighted, votes: 3}", "sampler.votes: expected 0 or at least 4, got 3"),
        ("sampler={name: radius-weighted, begin: 3}", "sampler.begin: unknown key"),
        ("epochs=[", "not YAML"),
        ("epochs=" + "[" * 400 + "]" * 400, "not YAML (nested too deeply)"),
        ("epochs=" + "[" * 40 + "]" * 40, "epochs: expected a valid integer, got [[["),
        ("epochs=" + "9" * 5000, "not YAML"),
        ("epochs=1000000000000", "epochs: expected at most 1000000, got 1000000000000"),
        ("epochs=2001-99-99", "not YAML"),
        ("dataset=!!int ''", "not YAML"),
        ('dataset="\\ud800"', "not YAML"),
        ("dataset=\udcff", "not YAML"),
        ("\ud800=1", "not YAML"),
        ("learning_rate_drops={a: 1, a: 2}", "expected each key once, got a 2 times"),
        ("learning_rate=1e308", "learning_rate: expected at most 1e+30, got 1e+308"),
        ("sigma=1.0e+300", "sigma: expected at most 1000000, got 1e+300"),
        ("weight_decay=1.0e+300", "weight_decay: expected at most 1e+30"),
        ("seed=" + "9" * 30, "seed: expected less than 9223372036854775808"),
        (
            "objective={name: macer, num_noise: 1" + "0" * 40 + "}",
            "objective.num_noise: expected at most 1e+06, got 1000",
        ),
        ("objective={name: macer, weight: 1.0e+300}", "objective.weight: expected at most 1e+30, got 1e+300"),
        ("objective={name: smoothadv, adversary: {steps: 100000000}}", "objective.adversary.steps: expected at most"),
        ("eta=0.1", "eta: unknown key"),
        ("lambda=5", "objective.weight: unknown key; did you mean objective.noise_attack"),
        ("wd=0.1", "wd: unknown key; did you mean weight_decay"),
        ("objective={name: consistency, lambda: 3}", "objective.lambda: unknown key; did you mean objective.weight"),
    ],
)
def test_wrong_overrides_are_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        with_overrides(tiny_recipe(), [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("override", "given"), [("momentum=0", "sgd with momentum 0"), ("optimizer=adamw", "adamw with momentum 0.9")]
)
def test_nesterov_needs_the_momentum_of_sgd(override: str, given: str) -> None:
    with pytest.raises(RequestError, match=f"nesterov: expected false for {given}, got true"):
        with_overrides(tiny_recipe(), ["nesterov=true", override])


@pytest.mark.parametrize("override", ["lambda=3", "objective.lambda=3", "weight=3", "objective.weight=3"])
def test_letters_of_the_papers_are_known(override: str) -> None:
    recipe = with_overrides(tiny_recipe(), ["objective=consistency", override, "lr=0.5", "m=4"])
    assert recipe == tiny_recipe(objective=Consistency(weight=3, num_noise=4), learning_rate=0.5)


def test_fields_of_a_users_objective_need_no_prefix() -> None:
    own = ["objective=mine.py:Mine", "smoothing=0.2"]
    assert with_overrides(tiny_recipe(), own) == with_overrides(tiny_recipe(), [own[0], "objective.smoothing=0.2"])
    with pytest.raises(RequestError, match="epoch: unknown key; did you mean epochs"):
        with_overrides(tiny_recipe(), [own[0], "epoch=3"])


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epochs: 3", "dataset: missing"),
        ("- 1", "expected a mapping"),
        ("a: [", "not YAML"),
        (None, "cannot be read"),
        (BOMB, "not YAML .*got an alias"),
        ("1: 2", "expected names of fields as keys"),
        ('"\\ud800": 1', "not YAML"),
        ("#" * 1_000_001, "at most 1,000,000 bytes"),
        ("sigma: 0.5\nsigma: 1.0", "expected each key once, got sigma 2 times"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestError, match=message) as caught:
        load_train_recipe(path)
    assert str(path) in str(caught.value)


def test_a_pipe_in_place_of_a_recipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(RequestError, match="expected a file, got a pipe"):
        load_train_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 3}, "epoch: unknown key; did you mean epochs"),
        ({"epochs": -1}, "epochs: expected"),
        ({"num_noise": 0}, "objective.num_noise: expected at least 1, got 0"),
        ({"objective": Consistency(), "num_noise": 4}, "num_noise: unknown key"),
    ],
)
def test_copies_with_wrong_changes_are_refused(change: dict[str, object], message: str) -> None:
    recipe = preset("mnist/gaussian", sigma=0.5)
    with pytest.raises(RequestError, match=message):
        recipe.model_copy(update=change)
    copied = recipe.model_copy(update={"seed": 5})
    assert copied.to_mapping() == recipe.to_mapping() | {"seed": 5}


def test_copies_change_fields_of_the_objective_and_refuse_unknown_ones() -> None:
    recipe = preset("mnist/consistency", sigma=0.5)
    for name in ("weight", "objective.weight"):
        copied = recipe.model_copy(update={name: 20.0, "epochs": 91})
        assert copied.to_mapping() == with_overrides(recipe, ["weight=20", "epochs=91"]).to_mapping()
    with pytest.raises(RequestError, match=r"^objective.weigth: unknown key; did you mean objective.weight,"):
        recipe.objective.model_copy(update={"weigth": 20.0})
    with pytest.raises(RequestError, match=r"^objective.weigth: unknown key; did you mean objective.weight,"):
        recipe.model_copy(update={"weigth": 20.0})
    with pytest.raises(RequestError, match=r"^epoch: unknown key; did you mean epochs"):
        recipe.model_copy(update={"epoch": 20})


def test_unknown_presets_list_the_near_ones() -> None:
    with pytest.raises(RequestError, match="did you mean mnist/gaussian"):
        preset("mnist/gausian")


def test_a_noise_attack_is_written_only_if_there_is_one() -> None:
    recipe = with_overrides(tiny_recipe(), ["objective=gaussian"])
    assert recipe.to_mapping()["objective"] == {"name": "gaussian", "num_noise": 1}
    attacked = with_overrides(recipe, ["objective.noise_attack.steps=2"])
    assert attacked.to_mapping()["objective"]["noise_attack"] == {"steps": 2, "step_size": 0.5, "first_epoch": 0}
    assert parse_recipe(TrainRecipe, attacked.to_mapping(), "recipe") == attacked
    with pytest.raises(RequestError, match="noise_attack"):
        with_overrides(recipe, ["objective=macer", "objective.noise_attack.steps=2"])


def test_constructors_refuse_wrong_fields_in_one_line() -> None:
    with pytest.raises(RequestError, match=r"^n: expected at least 1, got 0; alpha: expected less than 1"):
        CertifySettings(n=0, alpha=3)
    with pytest.raises(RequestError, match=r"^recipe\.yaml: epochs: expected .*, got 0$"):
        parse_recipe(TrainRecipe, {**tiny_recipe().to_mapping(), "epochs": 0}, "recipe.yaml")
