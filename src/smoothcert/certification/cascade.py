"""Cascade: smoothed classifiers with falling sigma as one classifier with certificates."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from smoothcert.certification.prepare import noise_seeds, prepare
from smoothcert.certification.smoothed_classifier import SmoothedClassifier
from smoothcert.errors import RequestError
from smoothcert.smoothing.cascade import certify_cascade
from smoothcert.smoothing.certificate_batch import CertificateBatch
from smoothcert.smoothing.votes import fitting_into_memory


class Cascade:
    """G(x) = the answer of the first of `stages` that gives a class more than half of its probability.

    `stages` are smoothed classifiers with Gaussian noise of falling sigma, for the same inputs and classes. A large
    sigma certifies large radii where it is sure; a small one answers the rest. `smoothing.cascade` states the rule and
    proves its guarantee.
    """

    def __init__(self, stages: Sequence[SmoothedClassifier]) -> None:
        if len(stages) < 2:
            raise RequestError(f"stages: expected at least 2 smoothed classifiers, got {len(stages)}")
        noises = [stage.noise for stage in stages]
        if other := [noise.name for noise in noises if noise.name != "gaussian"]:
            raise RequestError(f"stages: expected gaussian noise, got {other[0]}; a cascade is known for gaussian only")
        if any(first.sigma <= second.sigma for first, second in pairwise(noises)):
            sigmas = ", ".join(f"{noise.sigma:g}" for noise in noises)
            raise RequestError(f"stages: expected falling sigmas, got {sigmas}; give the largest sigma first")
        self.stages = tuple(stages)

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
        counters, (inputs, first) = [prepared.counter for _, prepared in stages], stages[0]
        if len({counter.num_classes for counter in counters}) > 1:
            numbers = ", ".join(str(counter.num_classes) for counter in counters)
            raise RequestError(f"stages: expected one number of classes, got {numbers}; use networks of one data set")
        seeds = noise_seeds(inputs, seed, indices)
        with fitting_into_memory(max(counter.batch_size for counter in counters)):
            records = certify_cascade(counters, inputs.to(first.device), seeds, n0=n0, n=n, alpha=alpha)
        numbered = None if indices is None else [int(index) for index in indices]
        return CertificateBatch.of(records, counters[0].num_classes, x.device, indices=numbered)
