"""Cascade: smoothed classifiers with decreasing sigma as one classifier with certificates."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from torch import Tensor

from smoothcert.certification.ensemble import RunEnsemble, refuse_different_runs
from smoothcert.certification.inputs import noise_seeds
from smoothcert.certification.prepare import prepare
from smoothcert.certification.settings import CertifySettings
from smoothcert.certification.smoothed_classifier import SmoothedClassifier
from smoothcert.errors import RequestError
from smoothcert.smoothing.certificate_batch import CertificateBatch
from smoothcert.training.checkpoint import Run

Stage = SmoothedClassifier | Run | RunEnsemble


class Cascade:
    """G(x) = the answer of the first of `stages` that gives a class more than half of its probability.

    `stages` are smoothed classifiers with Gaussian noise of decreasing sigma, for the same inputs and classes. For a
    run or an ensemble of runs, its `smoothed()` is used. A large sigma certifies large radii where it is sure; a small
    one answers the rest. `smoothing.cascade` states the rule and proves its guarantee.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        stages = tuple(stages) if isinstance(stages, Iterable) else (stages,)
        if len(stages) < 2:
            raise RequestError(f"stages: expected at least 2 smoothed classifiers, got {len(stages)}")
        if wrong := [type(stage).__name__ for stage in stages if not isinstance(stage, Stage)]:
            raise RequestError(
                f"stages: expected smoothed classifiers or runs, got {wrong[0]}; use SmoothedClassifier(model, sigma=S)"
            )
        self.sources = stages
        """The stages as they were given."""
        self.stages = tuple(stage if isinstance(stage, SmoothedClassifier) else stage.smoothed() for stage in stages)
        noises = [stage.noise for stage in self.stages]
        if other := [noise.name for noise in noises if noise.name != "gaussian"]:
            raise RequestError(f"stages: expected gaussian noise, got {other[0]}; a cascade needs gaussian noise")
        if any(first.sigma <= second.sigma for first, second in pairwise(noises)):
            sigmas = ", ".join(f"{noise.sigma:g}" for noise in noises)
            raise RequestError(f"stages: expected decreasing sigmas, got {sigmas}; give the largest sigma first")

    @classmethod
    def of_runs(cls, runs: Iterable[Run]) -> "Cascade":
        """The cascade of `runs`, each with the sigma of its training, the largest first.

        Consecutive runs with one sigma are one stage, an ensemble: its members share each noise draw. Different stages
        never do: the guarantee needs independent votes.
        """
        runs = tuple(runs)
        refuse_different_runs("cascade", runs)
        groups = [list(members) for _, members in groupby(runs, key=lambda run: run.recipe.sigma)]
        if len(groups) == 1:
            raise RequestError(
                f"cascade: expected runs of at least two sigmas, got {runs[0].recipe.sigma:g} only; use an ensemble"
            )
        return cls([members[0] if len(members) == 1 else RunEnsemble(members) for members in groups])

    def __repr__(self) -> str:
        return f"Cascade({len(self.stages)} stages: sigma {', '.join(f'{sigma:g}' for sigma in self.sigmas)})"

    @property
    def sigmas(self) -> tuple[float, ...]:
        return tuple(stage.noise.sigma for stage in self.stages)

    def certify(
        self,
        x: Tensor,
        *,
        n: int = 100_000,
        n0: int = 100,
        alpha: float = 0.001,
        seed: int | None = None,
        indices: Sequence[int] | Tensor | None = None,
    ) -> CertificateBatch:
        """A certificate for each input; each is wrong with probability at most `alpha`, for all stages together.

        Each stage that is reached draws `n0` votes that choose its class and `n` fresh ones. The votes of a certificate
        are those of the stage that answered, or of the last one; `earlier` holds the votes of the stages before it.
        """
        stages = [prepare(stage, x, {"n": n, "n0": n0, "alpha": alpha}) for stage in self.stages]
        inputs, first = stages[0]
        counters = [prepared.counter for _, prepared in stages]
        if len({counter.num_classes for counter in counters}) > 1:
            numbers = ", ".join(str(counter.num_classes) for counter in counters)
            raise RequestError(f"stages: expected one number of classes, got {numbers}; use networks of one data set")
        whole = replace(first, later=tuple(counters[1:]))
        if (text := whole.unreachable()) is not None:
            warnings.warn(text, stacklevel=2)
        records = whole.certify(inputs, noise_seeds(inputs, seed, indices))
        return CertificateBatch.of(records, first.counter.num_classes, x.device, indices=indices)


def refuse_other_rules(settings: CertifySettings, sigma: float) -> None:
    """Raise a RequestError for settings without a meaning for a cascade, which has one rule; `sigma` is its largest."""
    given = {
        "radii": bool(settings.radii),
        "radius_loss": settings.radius_loss is not None,
        "label_aware": settings.label_aware,
        "sound": settings.sound,
        f"bound {settings.bound}": settings.bound != "one-sided",
        f"noise {settings.noise}": settings.noise not in (None, "gaussian"),
        f"sigma {settings.sigma}": settings.sigma not in (None, sigma),
    }
    if wrong := [name for name, used in given.items() if used]:
        raise RequestError(
            f"cascade: expected n votes per stage, a one-sided bound and the sigmas of its stages, got {wrong[0]}; "
            "leave it out"
        )
