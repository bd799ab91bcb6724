"""Training methods, one file per method. To add one, write its file and add one line to OBJECTIVES."""

from smoothcert.objectives.adversary import Adversary
from smoothcert.objectives.base import LossTerms, Objective, Progress
from smoothcert.objectives.consistency import Consistency
from smoothcert.objectives.gaussian import Gaussian
from smoothcert.objectives.macer import Macer
from smoothcert.objectives.smoothadv import SmoothAdv
from smoothcert.objectives.smoothmix import SmoothMix
from smoothcert.objectives.stability import Stability

OBJECTIVES: dict[str, type[Objective]] = {
    "gaussian": Gaussian,
    "stability": Stability,
    "smoothadv": SmoothAdv,
    "macer": Macer,
    "consistency": Consistency,
    "smoothmix": SmoothMix,
}

__all__ = [
    "OBJECTIVES",
    "Adversary",
    "Consistency",
    "Gaussian",
    "LossTerms",
    "Macer",
    "Objective",
    "Progress",
    "SmoothAdv",
    "SmoothMix",
    "Stability",
]
