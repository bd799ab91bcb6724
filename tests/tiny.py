"""A recipe small enough for tests."""

from smoothcert.objectives import Gaussian
from smoothcert.training.recipe import TrainRecipe


def tiny_recipe(**changes: object) -> TrainRecipe:
    fields = {
        "dataset": "mnist-sample",
        "model": "lenet",
        "sigma": 0.5,
        "objective": Gaussian(),
        "epochs": 2,
        "batch_size": 64,
        "learning_rate": 0.05,
        "learning_rate_drops": (1,),
        "precision": "fp32",
    }
    return TrainRecipe.model_validate(fields | changes)
