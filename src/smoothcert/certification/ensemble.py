"""Trained runs as one classifier: which of them fit together, and what a certificates file records of them."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from smoothcert.certification.smoothed_classifier import SmoothedClassifier
from smoothcert.errors import RequestError
from smoothcert.io.references import full_name
from smoothcert.models.ensemble import Ensemble
from smoothcert.training.checkpoint import InputSpec, Run, tensors_digest


@dataclass(frozen=True)
class RunEnsemble:
    """The ensemble of the networks of `runs`: see `Ensemble` for its output, for `consensus` and for the guarantee.

    All runs must have been trained on one data set, for images of one shape and the same classes, with one kind of
    noise. Their training sigmas may differ. Then no sigma is implied, and one must be given for all members together.
    """

    runs: Sequence[Run]
    consensus: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", tuple(self.runs))  # a generator gives them once
        refuse_different_runs("ensemble", self.runs)
        _ = self.model  # refuses too few members and an impossible consensus

    @cached_property
    def model(self) -> Ensemble:
        return Ensemble([run.model for run in self.runs], self.consensus)

    @property
    def spec(self) -> InputSpec:
        return spec_of(self.runs)

    @property
    def noise(self) -> str:
        return self.runs[0].recipe.noise

    @property
    def sigma(self) -> float | None:
        """The training sigma that all runs share; None if they do not."""
        sigmas = {run.recipe.sigma for run in self.runs}
        return sigmas.pop() if len(sigmas) == 1 else None

    def smoothed(self, sigma: float | None = None, **options: Any) -> SmoothedClassifier:
        """The smoothed classifier of the ensemble with the noise of its training, or with another `sigma`."""
        sigma = self.sigma if sigma is None else sigma
        if sigma is None:
            raise RequestError(self.missing_sigma("sigma"))
        return smoothed_runs(self.runs, self.model, sigma, options)

    def missing_sigma(self, option: str) -> str:
        """Return the message for a request without a sigma where the runs do not share one."""
        sigmas = ", ".join(f"{run.recipe.sigma:g}" for run in self.runs)
        return f"{option}: expected one for all members, which were trained with sigma {sigmas}, got none; give one"

    def about(self) -> dict[str, Any]:
        """Identifies the networks, their order and how they are combined in result files."""
        members = [run.about() for run in self.runs]
        consensus = "" if self.consensus is None else f", consensus {self.consensus}"
        return {
            "model": names_of(members, "model"),
            "objective": f"ensemble of {len(members)} ({names_of(members, 'objective')}{consensus})",
            **({} if self.sigma is None else {"training_sigma": self.sigma}),
            "weights_sha256": tensors_digest(self.model.state_dict()),
            "members": members,
            "consensus": self.consensus,
        }


def smoothed_runs(
    runs: Sequence[Run], model: nn.Module, sigma: float, options: Mapping[str, Any]
) -> SmoothedClassifier:
    """The smoothed classifier of `model`, which consists of `runs`; other noise than that of their training is a
    warning at the line that calls the caller."""
    defaults = {"noise": runs[0].recipe.noise, "num_classes": runs[0].spec.num_classes}
    smoothed = SmoothedClassifier(model, sigma=sigma, **{**defaults, **options})
    for run in runs:
        if (text := run.noise_warning(smoothed.noise.sigma, smoothed.noise.name)) is not None:
            warnings.warn(text, stacklevel=3)
    return smoothed


def training_of(run: Run) -> dict[str, Any]:
    """The name of a member of an ensemble or cascade, and how it was trained."""
    return {"run": run.folder.name, "epoch": run.epoch, "model": dict(run.provenance)}


def names_of(members: Sequence[Mapping[str, Any]], key: str) -> str:
    """The different values of `key` among the members of an ensemble or cascade, in one text."""
    return " + ".join(dict.fromkeys(str(member[key]) for member in members))


FITTING: Mapping[str, Callable[[Run], object]] = {
    "images": lambda run: run.spec.shape,
    "number of classes": lambda run: run.spec.num_classes,
    "class names": lambda run: run.spec.class_names,
    "data set": lambda run: full_name(run.recipe.dataset),
    "noise": lambda run: run.recipe.noise,
}
"""What all members of an ensemble or a cascade must share; None stands for unknown, such as the class names of a
checkpoint."""


def spec_of(runs: Sequence[Run]) -> InputSpec:
    """The images and classes of the members of an ensemble or a cascade, with class names if one of them knows any."""
    return next((run.spec for run in runs if run.spec.class_names is not None), runs[0].spec)


def refuse_different_runs(kind: str, runs: Sequence[Run]) -> None:
    """Raise a RequestError if a run is given twice, or the first that differs from the others in what they share."""
    for run in runs:
        if not isinstance(run, Run):
            raise RequestError(f"{kind}: expected runs, got {type(run).__name__}; load each with load(FOLDER)")
    folders = [run.folder.resolve() for run in runs]
    if len(set(folders)) < len(folders):
        raise RequestError(f"{kind}: expected different runs, got one of them twice; name each run once")
    for run in runs:
        run.refuse_denoiser()
    for name, value in FITTING.items():
        known = [run for run in runs if value(run) is not None]
        for run in known[1:]:
            if value(run) != value(known[0]):
                raise RequestError(
                    f"{kind}: expected the same {name} for all members, got {value(known[0])} for {known[0].folder} "
                    f"and {value(run)} for {run.folder}; leave one of them out"
                )
