"""Wrong fields of records: one line that names each field by its place, however deep it is."""

import pickle

import pytest
from tiny import tiny_recipe

from smoothcert.errors import RequestError
from smoothcert.objectives import Consistency, SmoothAdv
from smoothcert.training.recipe import TrainRecipe


def test_wrong_fields_are_one_line_with_the_place_of_each() -> None:
    with pytest.raises(RequestError) as caught:
        SmoothAdv(num_noise=0, adversary={"steps": 0, "radius": 1})
    line = (
        "num_noise: expected at least 1, got 0; adversary.steps: expected at least 1, got 0; "
        "adversary.radius: unknown key; did you mean adversary.steps, adversary.attack, adversary.epsilon?"
    )
    assert str(caught.value) == line

    fields = tiny_recipe().to_mapping()
    objective = {"name": "smoothadv", "adversary": {"steps": 0}}
    with pytest.raises(RequestError) as caught:
        TrainRecipe(**{**fields, "sigma": -1, "objective": objective})
    assert str(caught.value) == (
        "sigma: expected greater than 0, got -1; objective.adversary.steps: expected at least 1, got 0"
    )
    teacher = {**fields, "epochs": 0, "objective": "gaussian"}
    with pytest.raises(RequestError, match=r"^teacher\.epochs: expected at least 1, got 0$"):
        TrainRecipe(**{**fields, "objective": "catrs", "teacher": teacher})


def test_records_are_copied_and_pickled_without_a_change() -> None:
    objective = Consistency(weight=2)
    assert pickle.loads(pickle.dumps(objective)) == objective.model_copy() == objective
