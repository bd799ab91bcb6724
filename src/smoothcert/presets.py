"""The papers' runs as recipes: `PRESETS["mnist/gaussian"](sigma)`."""

import difflib
from collections.abc import Callable

from smoothcert.errors import RequestError
from smoothcert.objectives import Gaussian, Objective
from smoothcert.recipe import TrainRecipe

DEFAULT_SIGMA = 0.5
Preset = Callable[[float], TrainRecipe]


def mnist(sigma: float, objective: Objective) -> TrainRecipe:
    """The shared protocol of the papers' MNIST runs."""
    return TrainRecipe(
        dataset="mnist",
        model="lenet",
        sigma=sigma,
        objective=objective,
        epochs=90,
        batch_size=256,
        learning_rate=0.01,
        learning_rate_drops=(30, 60),
    )


PRESETS: dict[str, Preset] = {
    "mnist/gaussian": lambda sigma: mnist(sigma, Gaussian()),
}


def preset(name: str, sigma: float = DEFAULT_SIGMA) -> TrainRecipe:
    """The recipe of a preset at `sigma`; an unknown name is refused with the near ones."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3) or sorted(PRESETS)
        raise RequestError(f"preset: no preset is called {name}; did you mean {', '.join(near)}?")
    if not sigma > 0:
        raise RequestError(f"sigma: expected a number > 0, got {sigma}")
    return PRESETS[name](sigma)
