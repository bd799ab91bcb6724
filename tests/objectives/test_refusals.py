"""Hyper-parameters out of range are refused: in Python by pydantic, and in recipes by one line for users."""

import math

import pytest
from pydantic import ValidationError
from tiny import tiny_recipe

from smoothcert.errors import RequestError
from smoothcert.objectives import OBJECTIVES, Adversary, Consistency, SmoothMix
from smoothcert.training.recipe import with_overrides

# Method, field, value as YAML, and what the line must name as expected.
REFUSED = [
    ("gaussian", "num_noise", "0", "at least 1"),
    ("gaussian", "num_noise", "1.5", "a valid integer"),
    ("stability", "num_noise", "2", "1"),
    ("stability", "weight", "-1", "at least 0"),
    ("stability", "weight", ".nan", "a finite number"),
    ("smoothadv", "num_noise", "0", "at least 1"),
    ("smoothadv", "adversary.epsilon", "0", "greater than 0"),
    ("smoothadv", "adversary.epsilon", "-0.5", "greater than 0"),
    ("smoothadv", "adversary.epsilon", ".nan", "a finite number"),
    ("smoothadv", "adversary.epsilon", ".inf", "a finite number"),
    ("smoothadv", "adversary.steps", "0", "at least 1"),
    ("smoothadv", "adversary.steps", "2.5", "a valid integer"),
    ("smoothadv", "adversary.attack", "fgsm", "'pgd' or 'ddn'"),
    ("smoothadv", "adversary", "null", "a valid dictionary"),
    ("macer", "num_noise", "0", "at least 1"),
    ("macer", "weight", "-0.1", "at least 0"),
    ("macer", "weight", ".inf", "a finite number"),
    ("macer", "gamma", "0", "greater than 0"),
    ("macer", "gamma", "-8", "greater than 0"),
    ("macer", "gamma", ".nan", "a finite number"),
    ("macer", "beta", "0", "greater than 0"),
    ("macer", "beta", ".inf", "a finite number"),
    ("macer", "deferred", "later", "a valid boolean"),
    ("consistency", "num_noise", "1", "at least 2"),
    ("consistency", "weight", "-1", "at least 0"),
    ("consistency", "weight", ".nan", "a finite number"),
    ("consistency", "weight", "much", "a valid number"),
    ("consistency", "entropy_weight", "-0.5", "at least 0"),
    ("consistency", "entropy_weight", ".inf", "a finite number"),
    ("consistency", "form", "l1", "'kl_entropy', 'xent', 'kl' or 'mse'"),
    ("consistency", "adversary.attack", "fgsm", "'pgd' or 'ddn'"),
    ("consistency", "adversary.epsilon", "0", "greater than 0"),
    ("consistency", "adversary.steps", "0", "at least 1"),
    ("smoothmix", "num_noise", "0", "at least 1"),
    ("smoothmix", "steps", "0", "at least 1"),
    ("smoothmix", "step_size", "0", "greater than 0"),
    ("smoothmix", "step_size", "-1", "greater than 0"),
    ("smoothmix", "step_size", ".inf", "a finite number"),
    ("smoothmix", "eta", "-1", "at least 0"),
    ("smoothmix", "eta", ".nan", "a finite number"),
    ("smoothmix", "max_norm", "0", "greater than 0"),
    ("smoothmix", "max_norm", ".inf", "a finite number"),
    ("smoothmix", "one_step_radius", "0.5", "none without one_step"),
    ("smoothmix", "one_step_radius", "-1", "greater than 0"),
]
SHOWN = {".nan": "nan", ".inf": "inf", "null": "None"}
PYTHON = {".nan": math.nan, ".inf": math.inf, "null": None}
refused = pytest.mark.parametrize(("name", "field", "text", "expected"), REFUSED)


def python_value(text: str) -> object:
    if text in PYTHON:
        return PYTHON[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


@refused
def test_objectives_refuse_values_out_of_range(name: str, field: str, text: str, expected: str) -> None:
    outer, _, inner = field.partition(".")
    value = python_value(text)
    with pytest.raises(RequestError, match=rf"^(objective\.)?{field}: expected .*{expected}.*, got ") as caught:
        OBJECTIVES[name](**{outer: {inner: value} if inner else value})
    assert "\n" not in str(caught.value)


@refused
def test_recipes_refuse_values_out_of_range_in_one_line(name: str, field: str, text: str, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        with_overrides(tiny_recipe(objective=OBJECTIVES[name]()), [f"objective.{field}={text}"])
    line = str(caught.value)
    assert "\n" not in line
    start, _, given = line.rpartition(", got ")
    assert f"objective.{field}: expected" in start
    assert expected in start
    assert given.strip("'") == SHOWN.get(text, text)


UNKNOWN = [
    ("gaussian", "weight"),
    ("smoothadv", "epsilon"),
    ("smoothadv", "adversary.step"),
    ("macer", "gama"),
    ("consistency", "num_noises"),
    ("smoothmix", "alpha"),
]


@pytest.mark.parametrize(("name", "field"), UNKNOWN)
def test_unknown_keys_are_refused(name: str, field: str) -> None:
    outer, _, inner = field.partition(".")
    with pytest.raises(RequestError, match=rf"^{field}: unknown key; "):
        OBJECTIVES[name](**{outer: {inner: 1} if inner else 1})
    recipe = tiny_recipe(objective=OBJECTIVES[name]())
    with pytest.raises(RequestError, match=rf"objective\.{field}: unknown key; did you mean objective\.") as caught:
        with_overrides(recipe, [f"objective.{field}=1"])
    assert "\n" not in str(caught.value)


def test_near_names_are_proposed_for_unknown_keys() -> None:
    with pytest.raises(RequestError, match=r"did you mean objective\.gamma[,?]"):
        with_overrides(tiny_recipe(), ["objective=macer", "objective.gama=8"])


def test_mse_compares_two_noises() -> None:
    with pytest.raises(RequestError, match=r"^objective\.num_noise: expected 2 for form mse, got 4$"):
        Consistency(form="mse", num_noise=4)
    overrides = ["objective=consistency", "objective.form=mse", "objective.num_noise=4"]
    with pytest.raises(RequestError, match=r"objective\.num_noise: expected 2 for form mse, got 4$"):
        with_overrides(tiny_recipe(), overrides)
    assert Consistency(form="mse", num_noise=2).num_noise == 2


def test_one_step_radius_needs_one_step() -> None:
    with pytest.raises(RequestError, match="one_step_radius"):
        SmoothMix(one_step_radius=1.0)
    assert SmoothMix(one_step=True, one_step_radius=1.0).one_step_radius == 1.0


def test_several_wrong_fields_are_all_named_in_one_line() -> None:
    overrides = ["objective=smoothmix", "objective.steps=0", "objective.eta=-1", "objective.step_size=0"]
    with pytest.raises(RequestError) as caught:
        with_overrides(tiny_recipe(), overrides)
    assert all(f"objective.{field}: expected" in str(caught.value) for field in ("steps", "eta", "step_size"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_are_frozen(name: str) -> None:
    objective = OBJECTIVES[name]()
    with pytest.raises(ValidationError, match="frozen"):
        objective.num_noise = 0
    with pytest.raises(ValidationError, match="frozen"):
        Adversary().epsilon = -1.0


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("consistency", "weight", 0.0),
        ("consistency", "entropy_weight", 0.0),
        ("consistency", "num_noise", 2),
        ("stability", "weight", 0.0),
        ("macer", "weight", 0.0),
        ("macer", "num_noise", 1),
        ("smoothmix", "eta", 0.0),
        ("smoothmix", "steps", 1),
        ("smoothmix", "num_noise", 1),
        ("smoothadv", "num_noise", 1),
    ],
)
def test_limits_of_the_ranges_are_allowed(name: str, field: str, value: float) -> None:
    recipe = with_overrides(tiny_recipe(), [f"objective={name}", f"objective.{field}={value}"])
    assert getattr(recipe.objective, field) == value


@pytest.mark.parametrize("name", ["smoothadv", "consistency"])
def test_fields_of_a_chosen_method_can_be_set(name: str) -> None:
    recipe = with_overrides(tiny_recipe(), [f"objective={name}", "objective.adversary.epsilon=0.5"])
    assert recipe.objective == OBJECTIVES[name](adversary=Adversary(epsilon=0.5))


def test_near_names_of_nested_keys_are_proposed() -> None:
    with pytest.raises(RequestError, match=r"did you mean objective\.adversary\.steps"):
        with_overrides(tiny_recipe(), ["objective=smoothadv", "objective.adversary.step=3"])
