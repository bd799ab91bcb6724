"""Prepare the classifier of a smoothed classifier for voting."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smoothcert.certification.certificates import CertifiedImage
from smoothcert.certification.inputs import Seeds, checked_inputs
from smoothcert.certification.settings import CertifyRecipe, CertifySettings, make_counter, make_rule
from smoothcert.classifier import Classifier, channels_last
from smoothcert.errors import RequestError
from smoothcert.io.records import parse_recipe
from smoothcert.models.precision import has_batch_norm
from smoothcert.noise import sigma_warning
from smoothcert.smoothing.batch_dependence import refuse_unsound
from smoothcert.smoothing.cascade import certify_cascade, last_alpha, stage_alphas
from smoothcert.smoothing.certificate import Certificate
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import VoteCounter, fitting_into_memory, noise_block

if TYPE_CHECKING:
    from smoothcert.certification.smoothed_classifier import SmoothedClassifier


@dataclass(frozen=True)
class Prepared:
    """A classifier that is ready to vote on inputs of one shape, and what its certificates depend on."""

    counter: VoteCounter
    recipe: CertifyRecipe
    shape: tuple[int, ...]
    device: torch.device
    later: tuple[VoteCounter, ...] = ()
    """The stages of a cascade after the first, which is `counter`."""

    @property
    def rule(self) -> Rule:
        return make_rule(self.recipe, self.shape)

    def settings(self, model: Classifier) -> dict[str, Any]:
        """What a certificates file records of the votes of `model`."""
        return {
            "num_classes": self.counter.num_classes,
            **self.recipe.to_mapping(),
            "batch_norm_folded": has_batch_norm(model) and not has_batch_norm(self.counter.classifier),
            "noise_block": noise_block(self.device),
            "draws": self.counter.noise.draws(self.device),
            "device": self.device.type,
            **self._cascade,
        }

    @property
    def _cascade(self) -> dict[str, Any]:
        """The sigmas of a cascade and, for each stage, the alpha of its lower and of its upper bound."""
        if not self.later:
            return {}
        sigmas = [counter.noise.sigma for counter in (self.counter, *self.later)]
        lower, upper = stage_alphas(self.recipe.alpha, len(sigmas))
        alphas = [*([lower, upper] for _ in self.later), [last_alpha(self.recipe.alpha, len(sigmas)), 0.0]]
        return {"cascade": sigmas, "cascade_alphas": alphas}

    def unreachable(self, radius: float | None = None) -> str | None:
        """Return a warning if the rule certifies no image at `radius` (see `Rule.unreachable`); None otherwise.

        Without `radius` it is about the largest of the rule's radii, or about any certificate.
        """
        rule = self.rule
        radius = max(self.recipe.radii, default=0.0) if radius is None else radius
        if self.later:  # of a cascade, the first stage certifies the largest radii
            rule = replace(rule, alpha=stage_alphas(rule.alpha, 1 + len(self.later))[0])
        return rule.unreachable(radius, self.counter.noise)

    def certify(self, inputs: Tensor, seeds: Seeds, labels: Sequence[int] = ()) -> list[Certificate]:
        """Return a certificate for each of `inputs` [n, ...], which is wrong with probability at most `recipe.alpha`.

        Inputs with the same seed share their noise. Only a label-aware rule looks at the labels.
        """
        with fitting_into_memory(self.counter.batch_size):
            if not self.later:
                return self.rule.certify(self.counter, inputs.to(self.device), seeds, labels)
            votes = {"n0": self.recipe.n0, "n": self.recipe.n}
            counters = (self.counter, *self.later)
            return certify_cascade(counters, inputs.to(self.device), seeds, **votes, alpha=self.recipe.alpha)

    def rows(
        self, inputs: Tensor, labels: Sequence[int], indices: Sequence[int], seeds: Seeds, started: float
    ) -> list[CertifiedImage]:
        """Certify a few inputs; the time since `started` is divided evenly."""
        certificates = self.certify(inputs, seeds, labels)
        seconds = (time.perf_counter() - started) / len(indices)
        triples = zip(indices, labels, certificates, strict=True)
        return [CertifiedImage(index, label, certificate, seconds) for index, label, certificate in triples]

    def votes(self, inputs: Tensor, seeds: Seeds) -> list[list[int]]:
        """n votes per class for each input; none of them is among the votes of certificates of the same seed."""
        with fitting_into_memory(self.counter.batch_size):
            counts: list[list[int]] = self.counter.count(inputs, seeds, "predict", self.recipe.n).tolist()
            return counts


def prepare(
    smoothed: "SmoothedClassifier",
    x: Tensor,
    options: Mapping[str, Any],
    *,
    seed: int | None = None,
    stored: Mapping[str, Any] = MappingProxyType({}),
    optimize: bool = True,
) -> tuple[Tensor, Prepared]:
    """Check `x` and the classifier: the inputs as a float32 batch, and the classifier ready to vote on them.

    `stored` are the settings of a file that is continued.
    """
    checked = checked_inputs(x, strict=smoothed.strict)
    device = smoothed.device or x.device
    if x.device != device:
        raise RequestError(
            f"inputs: expected them on {device}, where the classifier is, got {x.device}; use x.to({str(device)!r})"
        )
    text = sigma_warning(smoothed.noise.sigma)
    if text is not None and x.ndim == 4 and float(checked.min()) >= 0 and float(checked.max()) <= 1:
        warnings.warn(text, stacklevel=3)
    try:
        return checked, _prepared(smoothed, checked, options, device, seed, stored, optimize)
    except RequestError as error:
        if x.ndim != 3:
            raise
        try:  # one image without a batch dimension
            one = _prepared(smoothed, checked[None], options, device, seed, stored, optimize)
            return checked_inputs(x[None], strict=smoothed.strict), one
        except RequestError as second:
            if str(second) == str(error) or channels_last(x.shape):
                raise
            raise RequestError(f"{error}; as one image: {second}") from error


def _prepared(
    smoothed: "SmoothedClassifier",
    inputs: Tensor,
    options: Mapping[str, Any],
    device: torch.device,
    seed: int | None,
    stored: Mapping[str, Any],
    optimize: bool,
) -> Prepared:
    shape: Any = tuple(inputs.shape[1:])  # of any length; images have three
    fields: dict[str, Any] = {**options, "sigma": smoothed.noise.sigma, "noise": smoothed.noise.name, "seed": seed}
    fields |= {"precision": smoothed.precision, "compile": smoothed.compiled}
    fields["batch_size"] = stored.get("batch_size", smoothed.batch_size)  # a file may have one that fits into memory
    recipe = parse_recipe(CertifySettings, fields, "certify").completed(stored, device, shape)
    single = all(parameter.dtype == torch.float32 for parameter in smoothed.parameters())
    as_is = not optimize and recipe.precision == "fp32" and single and not smoothed.compiled
    if as_is:
        counter = VoteCounter(smoothed.classifier, smoothed.noise, 2, recipe.batch_size)
    else:
        counter = make_counter(smoothed.classifier, shape, 2, recipe, device, stored=bool(stored))
        recipe = recipe.model_copy(update={"batch_size": counter.batch_size})
    # It is tried on two copies: one that takes the first dimension for channels does not return two rows.
    tried = inputs[:1].to(counter.dtype)
    smoothed.num_classes = refuse_unsound(counter.classifier, tried, "the classifier", smoothed.num_classes)
    prepared = Prepared(replace(counter, num_classes=smoothed.num_classes), recipe, shape, device)
    prepared.rule.errors_at_radii(smoothed.noise)  # refuses radii that cannot be tested
    return prepared
