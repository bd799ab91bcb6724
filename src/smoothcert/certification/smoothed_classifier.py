"""SmoothedClassifier: any classifier as a PyTorch module with predictions and certificates."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from smoothcert.certification.inputs import check_integer, noise_seeds
from smoothcert.certification.prepare import prepare
from smoothcert.classifier import check_classifier, device_of
from smoothcert.data import Images
from smoothcert.errors import RequestError
from smoothcert.models.precision import resolve_precision
from smoothcert.noise import NOISES
from smoothcert.smoothing.certificate import Certificate, class_from_votes, fewest_deciding_votes, sorted_votes
from smoothcert.smoothing.certificate_batch import CertificateBatch
from smoothcert.training.choices import Bound


class RuleOptions(TypedDict, total=False):
    """The options of `SmoothedClassifier.certify` that decide how votes are drawn and what they prove."""

    n: int
    n0: int
    alpha: float
    radii: Sequence[float] | float
    until_radius: float | None
    radius_loss: float | None
    bound: Bound
    sound: bool


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
        check_without_noise(classifier, "classifier")
        for name, value, least in (("num_classes", num_classes, 2), ("batch_size", batch_size, 1), ("votes", votes, 1)):
            if value is not None:
                check_integer(name, value, least)
        if not isinstance(noise, str) or noise not in NOISES:
            raise RequestError(f"noise: expected one of {', '.join(NOISES)}, got {noise}")
        self.noise = NOISES[noise](sigma)
        resolve_precision(precision, torch.device("cpu"))  # refuses an unknown one
        self.classifier = classifier
        self.num_classes = num_classes
        self.precision = precision
        self.compiled = compile
        self.batch_size = batch_size
        self.strict = strict
        self.votes = votes

    def extra_repr(self) -> str:
        values = {"sigma": self.noise.sigma, "noise": self.noise.name, "precision": self.precision}
        return ", ".join(f"{name}={value}" for name, value in (values | {"num_classes": self.num_classes}).items())

    def forward(self, x: Tensor, n: int | None = None, seed: int | None = None) -> Tensor:
        """Smoothed class probabilities float32 [batch, classes]: the share of each class among n votes.

        n is `self.votes` by default. These are estimates without a guarantee, and they have no gradient. The classifier
        votes as it is, so that calls in a loop are cheap; `predict` and `certify` optimize a copy of it first.
        """
        inputs, prepared = prepare(self, x, {"n": self.votes if n is None else n}, optimize=False)
        votes = torch.tensor(prepared.votes(inputs, noise_seeds(inputs, seed, None)), device=x.device)
        return votes.float() / votes.sum(1, keepdim=True)

    def predict(
        self,
        x: Tensor,
        *,
        n: int = 1000,
        alpha: float = 0.001,
        sound: bool = False,
        seed: int | None = None,
        indices: Sequence[int] | Tensor | None = None,
    ) -> CertificateBatch:
        """The class of each input, or ABSTAIN (-1), with radius 0: each is wrong with probability at most `alpha`.

        `sound` draws integer noise: certificates with `sound` are about the class under this noise.
        """
        inputs, prepared = prepare(self, x, {"n": n, "alpha": alpha, "sound": sound})
        if n < (least := fewest_deciding_votes(alpha)):
            text = f"n = {n:,} votes cannot decide any class at alpha {alpha:g}: all abstain; n = {least:,} can"
            warnings.warn(text, stacklevel=2)
        records = []
        for votes in prepared.votes(inputs, noise_seeds(inputs, seed, indices)):
            pairs = sorted_votes(votes)
            records.append(Certificate(class_from_votes(votes, alpha), 0.0, 0, prepared.recipe.n, pairs[0][1], pairs))
        return CertificateBatch.of(records, prepared.counter.num_classes, x.device, indices=indices)

    def certify(
        self,
        x: Tensor,
        *,
        n: int = 100_000,
        n0: int = 100,
        alpha: float = 0.001,
        radii: Sequence[float] | float = (),
        until_radius: float | None = None,
        radius_loss: float | None = None,
        bound: Bound = "one-sided",
        sound: bool = False,
        seed: int | None = None,
        indices: Sequence[int] | Tensor | None = None,
    ) -> CertificateBatch:
        """A certificate for each input; each is wrong with probability at most `alpha`.

        `n0` votes choose the class and `n` fresh votes bound its probability. Fewer votes are drawn with `radii` or
        `until_radius` (only until these radii are decided) or `radius_loss` (lose about this much, in sigmas). A
        two-sided `bound` also bounds the second class; a randomized one draws a number per input, on which the radius
        depends. `sound` draws integer noise, for images made from bytes.
        """
        options: RuleOptions = {
            **{"n": n, "n0": n0, "alpha": alpha, "radii": radii, "until_radius": until_radius},
            **{"radius_loss": radius_loss, "bound": bound, "sound": sound},
        }
        inputs, prepared = prepare(self, x, options)
        if (text := prepared.unreachable()) is not None:
            warnings.warn(text, stacklevel=2)
        certificates = prepared.certify(inputs, noise_seeds(inputs, seed, indices))
        return CertificateBatch.of(certificates, prepared.counter.num_classes, x.device, indices=indices)

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

        A batch is certified when you ask for it: iterate over the result.
        Batches are (inputs, labels) or inputs; they are moved to the device of the classifier. Images of dtype uint8
        with labels are divided by 255. `options` are those of `certify`. With `out`, a path that ends in .tsv, rows are
        written to a certificates file as soon as they are computed, the classifier is called `name` in it, and inputs
        that the file already has are read from it. A file that ends in .tsv.gz is compressed after the last batch.
        """
        from smoothcert.certification.certify_loader import certify_loader  # which needs this class

        return certify_loader(self, data, options, seed=seed, out=out, name=name, progress=progress)

    @property
    def sigma(self) -> float:
        """The noise level, which does not change: another one is another smoothed classifier."""
        return self.noise.sigma

    @property
    def device(self) -> torch.device | None:
        """The device of the parameters of the classifier; None for other callables."""
        return device_of(self)


def check_without_noise(classifier: object, name: str) -> None:
    """Refuse what is no classifier, and one with a SmoothedClassifier inside; `name` is that of the argument."""
    check_classifier(classifier, name)
    parts = classifier.modules() if isinstance(classifier, nn.Module) else ()
    if any(isinstance(part, SmoothedClassifier) for part in parts):
        raise RequestError(
            f"{name}: expected a network, got a SmoothedClassifier, which adds noise itself; give its .classifier"
        )
