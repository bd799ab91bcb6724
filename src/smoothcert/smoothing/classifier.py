"""SmoothedClassifier: what a user holds. Any callable on images in [0, 1] becomes a classifier with certificates."""

import secrets

import torch
from torch import Tensor, nn

from smoothcert.errors import RequestError
from smoothcert.noise import NOISES
from smoothcert.smoothing.certificate import MOST_VOTES, Certificate
from smoothcert.smoothing.predict import class_from_votes
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import (
    Classifier,
    VoteCounter,
    default_batch_size,
    fitting_batch_size,
)


class SmoothedClassifier:
    """g(x) = the class that `classifier` most likely gives for x + N(0, sigma^2 I), or under another `noise`.

    >>> right_half = lambda images: torch.stack([0.5 - images[:, 0, 0, 0], images[:, 0, 0, 0] - 0.5], dim=1)
    >>> smoothed = SmoothedClassifier(right_half, sigma=0.25, num_classes=2)
    >>> certificate = smoothed.certify(torch.full((1, 1, 1, 1), 0.9), n=10_000)[0]
    >>> certificate.predict, 0.3 < certificate.radius < 0.4        # the boundary is 0.4 away
    (1, True)

    `classifier` takes a batch [n, c, h, w] of `dtype` and returns logits [n, num_classes]. A module is evaluated in
    eval mode and gets its mode back. Noise is drawn afresh for every call (a public seed would let an adversary
    choose images against it); pass `seed` only for tests and replays.
    """

    def __init__(
        self,
        classifier: Classifier,
        *,
        sigma: float,
        num_classes: int,
        noise: str = "gaussian",
        batch_size: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not callable(classifier):
            raise RequestError(f"classifier: expected a callable on image batches, got {type(classifier).__name__}")
        if num_classes < 2:
            raise RequestError(f"num_classes: expected at least 2, got {num_classes}")
        if batch_size is not None and batch_size < 1:
            raise RequestError(f"batch_size: expected at least 1, got {batch_size}")
        if noise not in NOISES:
            raise RequestError(f"noise: expected one of {', '.join(NOISES)}, got {noise}")
        self.noise = NOISES[noise](float(sigma))
        self.classifier, self.num_classes, self.batch_size, self.dtype = classifier, num_classes, batch_size, dtype

    def predict(self, images: Tensor, *, n: int = 1000, alpha: float = 0.001, seed: int | None = None) -> list[int]:
        """The class of each image, or ABSTAIN (-1): each is wrong with probability at most `alpha`."""
        images = self._checked(images)
        _check_statistics(alpha, n=n)
        votes = self._counter(images).count(images, _seeds(seed, len(images)), "predict", n)
        return [class_from_votes(v, alpha) for v in votes.tolist()]

    def certify(
        self, images: Tensor, *, n0: int = 100, n: int = 100_000, alpha: float = 0.001, seed: int | None = None
    ) -> list[Certificate]:
        """A certificate for each image; each is wrong with probability at most `alpha`."""
        images = self._checked(images)
        _check_statistics(alpha, n0=n0, n=n)
        seeds = _seeds(seed, len(images))
        return Rule(n0, n, alpha).certify(self._counter(images), images, seeds)

    def _counter(self, images: Tensor) -> VoteCounter:
        """Counts votes in batches that fit the device and the size of `images`."""
        size = self.batch_size or default_batch_size(images.device, images.shape[1:])
        if self.batch_size is None and images.device.type == "cuda":
            size = fitting_batch_size(self.classifier, size, images[0].to(self.dtype))
        return VoteCounter(self.classifier, self.noise, self.num_classes, size, self.dtype)

    def _checked(self, images: Tensor) -> Tensor:
        """`images` on the classifier's device, if they are a float batch [n, c, h, w] in [0, 1]; else RequestError."""
        if not isinstance(images, Tensor):
            raise RequestError(
                f"images: expected a tensor [n, c, h, w], got {type(images).__name__}; use torch.as_tensor"
            )
        if images.ndim != 4:
            hint = "; add a batch dimension with images[None]" if images.ndim == 3 else ""
            raise RequestError(f"images: expected shape [n, c, h, w], got {list(images.shape)}{hint}")
        if not images.is_floating_point():
            raise RequestError(f"images: expected floats in [0, 1], got {images.dtype}; divide bytes by 255")
        if len(images) == 0:
            raise RequestError("images: expected at least one image, got none")
        if not bool(images.isfinite().all()):
            raise RequestError("images: expected finite values, got NaN or infinity")
        low, high = float(images.min()), float(images.max())
        if low < 0 or high > 1:
            raise RequestError(
                f"images: expected values in [0, 1], got [{low:.3g}, {high:.3g}]; "
                "normalisation belongs inside the classifier, after the noise"
            )
        return images.detach().to(_device_of(self.classifier) or images.device, torch.float32)


def _device_of(classifier: Classifier) -> torch.device | None:
    """Where a module's parameters live; None for other callables and modules without parameters."""
    parameter = next(classifier.parameters(), None) if isinstance(classifier, nn.Module) else None
    return None if parameter is None else parameter.device


def _check_statistics(alpha: float, **counts: int) -> None:
    if not 0 < alpha < 1:
        raise RequestError(f"alpha: expected 0 < alpha < 1, got {alpha}")
    for name, value in counts.items():
        if not 1 <= value <= MOST_VOTES:
            raise RequestError(f"{name}: expected 1 to {MOST_VOTES:,} votes, got {value}")


def _seeds(seed: int | None, images: int) -> list[tuple[int, int]]:
    seed = secrets.randbits(63) if seed is None else seed
    if seed < 0:
        raise RequestError(f"seed: expected an integer >= 0, got {seed}")
    return [(seed, index) for index in range(images)]
