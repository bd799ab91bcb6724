"""Training methods, one file per method: `docs/add-an-objective.md` says how to add one."""

from smoothcert.errors import RequestError
from smoothcert.objectives.base import LossTerms as LossTerms
from smoothcert.objectives.base import Objective as Objective
from smoothcert.objectives.base import Progress as Progress
from smoothcert.objectives.base import UnloadedObjective as UnloadedObjective
from smoothcert.objectives.catrs import CatRs as CatRs
from smoothcert.objectives.consistency import Consistency as Consistency
from smoothcert.objectives.denoising import Denoising as Denoising
from smoothcert.objectives.distillation import Distillation as Distillation
from smoothcert.objectives.gaussian import Gaussian as Gaussian
from smoothcert.objectives.inner_attacks import Adversary as Adversary
from smoothcert.objectives.inner_attacks import NoiseAttack as NoiseAttack
from smoothcert.objectives.macer import Macer as Macer
from smoothcert.objectives.smoothadv import SmoothAdv as SmoothAdv
from smoothcert.objectives.smoothmix import SmoothMix as SmoothMix
from smoothcert.objectives.stability import Stability as Stability

OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind for kind in (Gaussian, Stability, SmoothAdv, Macer, Consistency, SmoothMix, CatRs, Distillation)
}
"""The methods that train classifiers."""

BUILT_IN: dict[str, type[Objective]] = {**OBJECTIVES, Denoising.name: Denoising}
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


def checked_terms(objective: Objective, result: object) -> LossTerms:
    """Return the `result` of `objective.loss`; refuse what is no LossTerms."""
    if not isinstance(result, LossTerms):
        raise RequestError(
            f"objective: expected {name_in_recipes(objective)}.loss() to return LossTerms(loss, terms, noisy_logits), "
            f"got {type(result).__name__}"
        )
    return result
