"""SmoothedClassifier: any classifier as a PyTorch module with predictions and certificates."""

import hashlib
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from smoothcert.certification.certify_dataset import make_counter, make_rule
from smoothcert.classifier import check_logits, evaluating, logits_of
from smoothcert.data import Images
from smoothcert.errors import RequestError
from smoothcert.models.precision import resolve_precision
from smoothcert.noise import NOISES
from smoothcert.smoothing.certificate import Certificate
from smoothcert.smoothing.certificate_batch import CertificateBatch
from smoothcert.smoothing.predict import class_from_votes
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import VoteCounter, default_batch_size, fitting_into_memory
from smoothcert.training.recipe import CertifyRecipe, parse_recipe

Seeds = list[tuple[int, int]]


class RuleOptions(TypedDict, total=False):
    """The options of `SmoothedClassifier.certify` that decide how votes are drawn and what they prove."""

    n: int
    n0: int
    alpha: float
    radii: Sequence[float]
    until_radius: float | None
    radius_loss: float | None
    bound: Literal["one-sided", "two-sided"]
    sound: bool


@dataclass(frozen=True)
class Prepared:
    """A classifier that is ready to vote on inputs of one shape, and what its certificates depend on."""

    counter: VoteCounter
    rule: Rule
    recipe: CertifyRecipe
    shape: tuple[int, ...]
    device: torch.device

    def certify(self, inputs: Tensor, seeds: Seeds) -> list[Certificate]:
        with fitting_into_memory(self.counter.batch_size):
            return self.rule.certify(self.counter, inputs.to(self.device), seeds)

    def votes(self, inputs: Tensor, seeds: Seeds) -> list[list[int]]:
        """n votes per class for each input; none of them is among the votes of certificates of the same seed."""
        with fitting_into_memory(self.counter.batch_size):
            counts: list[list[int]] = self.counter.count(inputs, seeds, "predict", self.recipe.n).tolist()
            return counts


class SmoothedClassifier(nn.Module):
    """g(x) = the class that `classifier` most likely returns for x + noise; Gaussian noise N(0, sigma^2 I) by default.

    >>> right_half = lambda images: torch.stack([0.5 - images[:, 0, 0, 0], images[:, 0, 0, 0] - 0.5], dim=1)
    >>> smoothed = SmoothedClassifier(right_half, sigma=0.25)
    >>> result = smoothed.certify(torch.full((1, 1, 1, 1), 0.9), n=10_000)
    >>> result.prediction.tolist(), 0.3 < result[0].radius < 0.4        # the boundary is 0.4 away
    ([1], True)

    `classifier` is a module or any callable that takes a float batch [n, ...] and returns logits [n, classes]: a
    tensor, an object with `.logits` or a mapping with "logits". A module is evaluated in eval mode, in a copy with
    weights of `precision`, and keeps its own mode and weights. `num_classes` is found by a forward pass if it is None.

    Inputs are always a batch [n, ...]. One image [c, h, w] without a batch dimension is accepted if the classifier does
    not accept it as a batch of c inputs. Images outside [0, 1] give a warning; `strict` makes it a RequestError.

    Noise is drawn afresh from the operating system in each call. With a `seed` the noise of an input depends on the
    seed and the content of the input or, if `indices` are given, on the seed and its index, as on the command line.
    A certificate holds only if the noise is independent of the input: use a seed for tests and replays, never where an
    adversary who knows it can choose inputs. Calls with one seed on one input are copies, not independent repetitions.
    """

    def __init__(
        self,
        classifier: Callable[[Tensor], Any],
        *,
        sigma: float,
        num_classes: int | None = None,
        noise: str = "gaussian",
        precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32",
        compile: bool = False,
        batch_size: int | None = None,
        strict: bool = False,
        votes: int = 1000,
    ) -> None:
        super().__init__()
        if not callable(classifier):
            raise RequestError(f"classifier: expected a callable on batches, got {type(classifier).__name__}")
        if num_classes is not None and num_classes < 2:
            raise RequestError(f"num_classes: expected at least 2, got {num_classes}")
        if batch_size is not None and batch_size < 1:
            raise RequestError(f"batch_size: expected at least 1, got {batch_size}")
        if noise not in NOISES:
            raise RequestError(f"noise: expected one of {', '.join(NOISES)}, got {noise}")
        self.noise = NOISES[noise](float(sigma))
        resolve_precision(precision, torch.device("cpu"))  # refuses an unknown one
        self.classifier, self.num_classes, self.precision = classifier, num_classes, precision
        self.compiled, self.batch_size, self.strict, self.votes = compile, batch_size, strict, votes

    def extra_repr(self) -> str:
        values = {"sigma": self.noise.sigma, "noise": self.noise.name, "precision": self.precision}
        return ", ".join(f"{name}={value}" for name, value in (values | {"num_classes": self.num_classes}).items())

    def forward(self, x: Tensor, n: int | None = None, seed: int | None = None) -> Tensor:
        """Smoothed class probabilities float32 [batch, classes]: the share of each class among n votes.

        n is `self.votes` by default. These are estimates without a guarantee, and they have no gradient. The classifier
        votes as it is, so that calls in a loop are cheap; `predict` and `certify` optimize a copy of it first.
        """
        inputs, prepared = self.prepare(x, {"n": self.votes if n is None else n}, optimize=False)
        votes = torch.tensor(prepared.votes(inputs, self.seeds(inputs, seed, None)), device=x.device)
        return votes.float() / votes.sum(1, keepdim=True)

    def predict(
        self,
        x: Tensor,
        *,
        n: int = 1000,
        alpha: float = 0.001,
        seed: int | None = None,
        indices: Sequence[int] | Tensor | None = None,
    ) -> CertificateBatch:
        """The class of each input, or ABSTAIN (-1), with radius 0: each is wrong with probability at most `alpha`."""
        inputs, prepared = self.prepare(x, {"n": n, "alpha": alpha})
        records = []
        for votes in prepared.votes(inputs, self.seeds(inputs, seed, indices)):
            pairs = sorted(((c, k) for c, k in enumerate(votes) if k), key=lambda pair: -pair[1])
            records.append(Certificate(class_from_votes(votes, alpha), 0.0, 0, n, pairs[0][1], tuple(pairs)))
        return self._batch(records, x.device, prepared, indices)

    def certify(
        self,
        x: Tensor,
        *,
        n: int = 100_000,
        n0: int = 100,
        alpha: float = 0.001,
        radii: Sequence[float] = (),
        until_radius: float | None = None,
        radius_loss: float | None = None,
        bound: Literal["one-sided", "two-sided"] = "one-sided",
        sound: bool = False,
        seed: int | None = None,
        indices: Sequence[int] | Tensor | None = None,
    ) -> CertificateBatch:
        """A certificate for each input; each is wrong with probability at most `alpha`.

        `n0` votes choose the class and `n` fresh votes bound its probability. Fewer votes are drawn with `radii` or
        `until_radius` (only until these radii are decided) or `radius_loss` (give up this radius, in sigmas). `bound`
        two-sided bounds the runner-up, too; `sound` draws integer noise, for images made from bytes.
        """
        options: RuleOptions = {
            **{"n": n, "n0": n0, "alpha": alpha, "radii": radii, "until_radius": until_radius},
            **{"radius_loss": radius_loss, "bound": bound, "sound": sound},
        }
        inputs, prepared = self.prepare(x, options)
        certificates = prepared.certify(inputs, self.seeds(inputs, seed, indices))
        return self._batch(certificates, x.device, prepared, indices)

    def certify_loader(
        self,
        data: Images | Dataset[Any] | Iterable[Any],
        *,
        seed: int | None = None,
        out: str | Path | None = None,
        name: str | None = None,
        progress: bool = False,
        **options: Unpack[RuleOptions],
    ) -> Iterator[CertificateBatch]:
        """Certify all batches of a DataLoader, a torch Dataset or data of `load_dataset`, one result per batch.

        Batches are (inputs, labels) or inputs; they are moved to the device of the classifier. `options` are those of
        `certify`. With `out`, a path that ends in .tsv, rows are written to a certificates file as soon as they are
        computed, the classifier is called `name` in it, and inputs that the file already has are read from it.
        """
        from smoothcert.certification.certify_loader import certify_loader  # which needs this class

        return certify_loader(self, data, options, seed=seed, out=out, name=name, progress=progress)

    @property
    def device(self) -> torch.device | None:
        """The device of the parameters of the classifier; None for other callables."""
        parameter = next(self.parameters(), None)
        return None if parameter is None else parameter.device

    def prepare(
        self, x: Tensor, options: RuleOptions, *, seed: int = 0, batch_size: int | None = None, optimize: bool = True
    ) -> tuple[Tensor, Prepared]:
        """Check `x` and the classifier: the inputs as a float32 batch, and the classifier ready to vote on them."""
        checked, device = self.checked(x), self.device or x.device
        if x.device != device:
            raise RequestError(
                f"inputs: expected them on {device}, where the classifier is, got {x.device}; use x.to({str(device)!r})"
            )
        try:
            return checked, self._prepared(checked, options, device, seed, batch_size, optimize)
        except RequestError as error:
            if x.ndim != 3:
                raise
            try:  # one image without a batch dimension
                return checked[None], self._prepared(checked[None], options, device, seed, batch_size, optimize)
            except RequestError as second:
                raise RequestError(f"{error}; as one image: {second}") from error

    def _prepared(
        self,
        inputs: Tensor,
        options: RuleOptions,
        device: torch.device,
        seed: int,
        batch_size: int | None,
        optimize: bool,
    ) -> Prepared:
        shape = tuple(inputs.shape[1:])
        fields: dict[str, Any] = {**options, "sigma": self.noise.sigma, "noise": self.noise.name, "seed": seed}
        until = fields.pop("until_radius", None)
        fields["radii"] = tuple(fields.get("radii", ()))
        if until is not None and fields["radii"]:
            raise RequestError("give until_radius or radii, not both")
        fields |= {"hold_back": bool(fields["radii"])} if until is None else {"radii": (until,)}
        fields["precision"] = resolve_precision(self.precision, device)
        fields["compile"] = self.compiled
        fields["batch_size"] = batch_size or self.batch_size or default_batch_size(device, shape)
        recipe = parse_recipe(CertifyRecipe, fields, "certify")
        single = all(parameter.dtype == torch.float32 for parameter in self.parameters())
        as_is = not optimize and recipe.precision == "fp32" and single and not self.compiled
        try:
            if as_is:
                counter = VoteCounter(self.classifier, self.noise, 2, recipe.batch_size)
            else:
                counter, recipe = make_counter(self.classifier, shape, 2, recipe, device)
            # Two copies: a classifier that takes the first dimension for channels does not return two rows.
            with torch.no_grad(), evaluating(counter.classifier):
                output = counter.classifier(inputs[:1].expand(2, *shape).contiguous().to(counter.dtype))
        except (RequestError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a user's code may fail in any way
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            raise RequestError(
                f"the classifier fails on a batch of shape [2, {', '.join(map(str, shape))}] ({reason}); "
                "expected inputs [n, ...] as the classifier takes them"
            ) from error
        logits = logits_of(output)
        check_logits(logits, 2, self.num_classes)
        if bool(logits.isnan().any()):
            raise RequestError(
                "the classifier returned NaN for an input without noise, expected numbers; check its weights, or try "
                "precision fp32"
            )
        self.num_classes = logits.shape[1]
        rule = make_rule(recipe, shape)
        rule.errors_at_radii(self.noise)  # refuses radii that cannot be tested
        return Prepared(replace(counter, num_classes=self.num_classes), rule, recipe, shape, device)

    def checked(self, x: object) -> Tensor:
        """`x` in float32 without a gradient, or a RequestError that says what to change."""
        if not isinstance(x, Tensor):
            raise RequestError(
                f"inputs: expected a tensor [n, ...], got {type(x).__name__}; use torch.as_tensor, or certify_loader "
                "for a DataLoader"
            )
        if not x.is_floating_point():
            raise RequestError(f"inputs: expected floats, images in [0, 1], got {x.dtype}; divide bytes by 255")
        if x.ndim < 2:
            raise RequestError(
                f"inputs: expected a batch [n, ...], got shape {list(x.shape)}; add a batch dimension with x[None]"
            )
        if x.numel() == 0:
            raise RequestError(f"inputs: expected at least one, got shape {list(x.shape)}")
        if not bool(x.isfinite().all()):
            raise RequestError("inputs: expected finite values, got NaN or infinity")
        low, high = float(x.min()), float(x.max())
        if (low < 0 or high > 1) and (self.strict or x.ndim == 4):
            message = (
                f"inputs: expected values in [0, 1], got [{low:.3g}, {high:.3g}]; "
                "normalisation belongs inside the classifier, after the noise"
            )
            if self.strict:
                raise RequestError(message)
            warnings.warn(f"{message}; sigma and radii are in units of these values", stacklevel=4)
        return x.detach().float()

    @staticmethod
    def seeds(inputs: Tensor, seed: int | None, indices: Sequence[int] | Tensor | None) -> Seeds:
        """What the noise of each input is drawn from: (seed, index), or (seed, hash of its content) without indices."""
        if seed is not None and seed < 0:
            raise RequestError(f"seed: expected an integer >= 0, got {seed}")
        if indices is not None:
            numbers = [int(index) for index in indices]
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
        seed = secrets.randbits(63) if seed is None else seed
        return [(seed, number) for number in numbers]

    @staticmethod
    def _batch(
        records: Sequence[Certificate],
        device: torch.device,
        prepared: Prepared,
        indices: Sequence[int] | Tensor | None,
    ) -> CertificateBatch:
        numbers = None if indices is None else [int(index) for index in indices]
        return CertificateBatch.of(records, prepared.counter.num_classes, device, indices=numbers)
