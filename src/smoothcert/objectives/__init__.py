"""Training methods, one file per method. To add one, write its file and add one line to OBJECTIVES."""

from smoothcert.objectives.adversary import Adversary
from smoothcert.objectives.base import LossTerms, Objective, Progress
from smoothcert.objectives.catrs import CatRs
from smoothcert.objectives.consistency import Consistency
from smoothcert.objectives.denoising import Denoising
from smoothcert.objectives.gaussian import Gaussian
from smoothcert.objectives.macer import Macer
from smoothcert.objectives.noise_attack import NoiseAttack
from smoothcert.objectives.smoothadv import SmoothAdv
from smoothcert.objectives.smoothmix import SmoothMix
from smoothcert.objectives.stability import Stability
from smoothcert.objectives.unloaded import UnloadedObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "gaussian": Gaussian,
    "stability": Stability,
    "smoothadv": SmoothAdv,
    "macer": Macer,
    "consistency": Consistency,
    "smoothmix": SmoothMix,
    "catrs": CatRs,
}
"""The methods that train classifiers."""

BUILT_IN: dict[str, type[Objective]] = {**OBJECTIVES, "denoising": Denoising}
"""All objectives that a recipe may name; the last one trains a denoiser instead of a classifier."""

REFERENCES: dict[type[Objective], str] = {}
"""Classes outside the package that were imported by a reference, `package.module:Class` or `FILE.py:Class`."""


def is_built_in(objective: Objective) -> bool:
    return type(objective) in BUILT_IN.values()


def name_in_recipes(objective: Objective) -> str:
    """Return the name of a built-in objective, and for others the reference to their class."""
    if isinstance(objective, UnloadedObjective):
        return objective.reference
    kind = type(objective)
    return objective.name if is_built_in(objective) else REFERENCES.get(kind, f"{kind.__module__}:{kind.__qualname__}")


__all__ = [
    "BUILT_IN",
    "OBJECTIVES",
    "REFERENCES",
    "Adversary",
    "CatRs",
    "Consistency",
    "Denoising",
    "Gaussian",
    "LossTerms",
    "Macer",
    "NoiseAttack",
    "Objective",
    "Progress",
    "SmoothAdv",
    "SmoothMix",
    "Stability",
    "UnloadedObjective",
    "is_built_in",
    "name_in_recipes",
]
