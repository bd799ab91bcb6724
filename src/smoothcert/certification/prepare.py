"""Check the inputs of a smoothed classifier and prepare its classifier for voting."""

import hashlib
import operator
import secrets
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smoothcert.certification.certificates import CertifiedImage
from smoothcert.certification.settings import CertifyRecipe, CertifySettings, make_counter, make_rule
from smoothcert.classifier import Classifier, channels_last
from smoothcert.errors import RequestError
from smoothcert.models.precision import has_batch_norm
from smoothcert.noise import sigma_warning
from smoothcert.smoothing.batch_dependence import refuse_unsound
from smoothcert.smoothing.cascade import certify_cascade, last_alpha, stage_alphas
from smoothcert.smoothing.certificate import Certificate
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import VoteCounter, fitting_into_memory, noise_block
from smoothcert.training.recipe import parse_recipe

if TYPE_CHECKING:
    from smoothcert.certification.smoothed_classifier import SmoothedClassifier

Seeds = list[tuple[int, int]]


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


def checked_inputs(x: object, *, strict: bool) -> Tensor:
    """`x` in float32 without a gradient, or a RequestError that says what to change."""
    if not isinstance(x, Tensor):
        advice = "use torch.as_tensor, or certify_loader for a DataLoader"
        if isinstance(x, list | tuple) and any(isinstance(part, Tensor) for part in x):
            advice = "use torch.stack for a list of images"
        raise RequestError(f"inputs: expected a tensor [n, ...], got {type(x).__name__}; {advice}")
    x = x.detach()
    if not x.is_floating_point():
        raise RequestError(
            f"inputs: expected floats, images in [0, 1], got {x.dtype}; divide bytes by 255: x.float() / 255"
        )
    if x.ndim < 2:
        raise RequestError(
            f"inputs: expected a batch [n, ...], got shape {list(x.shape)}; add a batch dimension with x[None]"
        )
    if x.numel() == 0:
        raise RequestError(f"inputs: expected at least one, got shape {list(x.shape)}")
    if not bool(x.isfinite().all()):
        raise RequestError("inputs: expected finite values, got NaN or infinity")
    low, high = float(x.min()), float(x.max())
    if (low < 0 or high > 1) and (strict or x.ndim == 4):
        advice = "normalisation belongs inside the classifier, after the noise"
        if low >= 0 and high > 2:
            advice = "divide bytes by 255; the classifier may multiply them again, after the noise"
        message = f"inputs: expected values in [0, 1], got [{low:.3g}, {high:.3g}]; {advice}"
        if strict:
            raise RequestError(message)
        warnings.warn(f"{message}; sigma and radii are in units of these values", stacklevel=4)
    return x.float()


def checked_indices(indices: Iterable[Any]) -> list[int]:
    """`indices` as a list of integers; anything else is refused."""
    listed = indices.tolist() if isinstance(indices, Tensor) else indices
    numbers = list(listed) if isinstance(listed, Iterable) else [None]
    if not all(hasattr(number, "__index__") and not isinstance(number, bool) for number in numbers):
        given = f"{indices.dtype} {list(indices.shape)}" if isinstance(indices, Tensor) else f"{indices!r:.60}"
        raise RequestError(f"indices: expected integers >= 0, such as range(10) or [3, 5], got {given}")
    return [operator.index(number) for number in numbers]


def noise_seeds(inputs: Tensor, seed: int | None, indices: Sequence[int] | Tensor | None) -> Seeds:
    """What the noise of each input is drawn from: (seed, index), or (seed, hash of its content) without indices."""
    if seed is not None and (not hasattr(seed, "__index__") or operator.index(seed) < 0):
        raise RequestError(f"seed: expected an integer >= 0, got {seed!r}")
    if indices is not None:
        numbers = checked_indices(indices)
        if len(set(numbers)) != len(inputs) or len(numbers) != len(inputs) or min(numbers) < 0:
            raise RequestError(
                f"indices: expected {len(inputs)} different integers >= 0, one per input, got {numbers[:10]}"
            )
    elif seed is None:
        numbers = list(range(len(inputs)))
    else:
        contents = inputs.cpu().contiguous().numpy()
        hashes = (hashlib.sha256(str(content.shape).encode() + content.tobytes()).digest() for content in contents)
        numbers = [2**128 + int.from_bytes(digest[:16], "little") for digest in hashes]  # no index is as large
    seed = secrets.randbits(63) if seed is None else operator.index(seed)
    return [(seed, number) for number in numbers]
