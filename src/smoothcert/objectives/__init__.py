"""One file, one method. To add one: write its file, add one line to OBJECTIVES."""

from smoothcert.objectives.base import LossTerms, Objective, Progress
from smoothcert.objectives.gaussian import Gaussian

OBJECTIVES: dict[str, type[Objective]] = {
    "gaussian": Gaussian,
}

__all__ = ["OBJECTIVES", "Gaussian", "LossTerms", "Objective", "Progress"]
