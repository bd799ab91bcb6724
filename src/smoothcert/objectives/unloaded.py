"""Objectives outside the package, which recipes name as `package.module:Class` or `FILE.py:Class`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NoReturn

from pydantic import ConfigDict, Field

from smoothcert.errors import RequestError
from smoothcert.objectives.base import Classifier, LossTerms, Objective, Progress

if TYPE_CHECKING:  # records are read without torch
    from torch import Tensor


class UnloadedObjective(Objective):
    """An objective of which a recipe names the code, and nobody has imported it.

    Certificates and reports of a run need only this record: the reference and the hyper-parameters, whatever they are.
    Training needs the class itself, which `smoothcert.training.user_objective` imports with the user's consent.
    """

    model_config = ConfigDict(extra="allow")
    chunked: ClassVar[bool] = False  # unknown; the class itself is asked before training

    reference: str = Field(alias="name", exclude=True, description="package.module:Class or FILE.py:Class")

    def loss(
        self, classifier: Classifier, images: Tensor, labels: Tensor, noise: Tensor, progress: Progress
    ) -> LossTerms:
        self.refuse()

    def refuse(self) -> NoReturn:
        raise RequestError(
            f"objective: the code {self.reference} is not loaded; allow it with --objective {self.reference}, or in "
            "Python with smoothcert.training.user_objective.load_objective(recipe)"
        )
