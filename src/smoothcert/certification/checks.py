"""Checks of files that anyone may have written: settings have the expected types, rows claim what votes can show."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import special

from smoothcert.errors import WorkError
from smoothcert.io.results import settings_path
from smoothcert.noise import NOISES
from smoothcert.smoothing.bounds import SLACK, error_upper_bound
from smoothcert.smoothing.cascade import cascade_radius
from smoothcert.smoothing.certificate import ABSTAIN, MOST_VOTES, Certificate, certified_radius, largest_other
from smoothcert.training.choices import LARGEST_SIGMA, Bound

if TYPE_CHECKING:
    from smoothcert.certification.columns import Columns

TOLERANCE = 1e-6
"""Tolerated relative difference between a stored radius and the one that its votes show: other versions of libraries
round differently. A stored radius may also be smaller by this many sigmas: near 0 the rounding of the bound matters."""
BOUNDS = get_args(Bound)
ONE_SIDED, RANDOMIZED = "one-sided", "randomized"
EARLY_NAME = "clopper-pearson one-sided"
"""What the first files call the one-sided bound."""


def bound_of(settings: Mapping[str, Any]) -> str:
    """The name of the confidence bound; the first files have a longer one, files of other tools none."""
    bound = settings.get("bound")
    return ONE_SIDED if bound in (None, EARLY_NAME) else str(bound)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_falling_sigmas(value: object) -> bool:
    if not isinstance(value, list) or len(value) < 2 or not all(map(_is_number, value)):
        return False
    return all(LARGEST_SIGMA >= a > b > 0 for a, b in pairwise(value))


_Check = tuple[str, Callable[[Any], bool]]
_SIGMA: _Check = (
    f"a number above 0 and at most {LARGEST_SIGMA:g}",
    lambda v: _is_number(v) and 0 < v <= LARGEST_SIGMA,
)
_VOTES: _Check = (f"an integer from 1 to {MOST_VOTES:,}", lambda v: _is_integer(v) and 1 <= v <= MOST_VOTES)
_TEXT: _Check = ("a text", lambda v: isinstance(v, str))
_FLAG: _Check = ("true or false", lambda v: isinstance(v, bool))
SETTINGS: Mapping[str, _Check] = {
    **dict.fromkeys(("sigma", "training_sigma"), _SIGMA),
    **dict.fromkeys(("n", "n0"), _VOTES),
    **dict.fromkeys(("model", "objective", "dataset", "split", "precision", "device"), _TEXT),
    **dict.fromkeys(("images_sha256", "weights_sha256", "classes_sha256"), _TEXT),
    **dict.fromkeys(("hold_back", "label_aware", "sound"), _FLAG),
    "alpha": ("a number between 0 and 1", lambda v: _is_number(v) and 0 < v < 1),
    "noise": (f"one of {', '.join(NOISES)}", lambda v: isinstance(v, str) and v in NOISES),
    "bound": (f"one of {', '.join(BOUNDS)}", lambda v: v in (*BOUNDS, EARLY_NAME)),
    "radii": ("a list of numbers", lambda v: isinstance(v, list) and all(_is_number(r) and r > 0 for r in v)),
    "radius_loss": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "certificates": ("a mapping", lambda v: isinstance(v, dict) and _is_number(v.get("alpha") or 0)),
    "cascade": ("a list of decreasing sigmas", _are_falling_sigmas),
    "num_classes": ("an integer above 0", lambda v: _is_integer(v) and v > 0),
    "seed": ("an integer of at least 0", lambda v: _is_integer(v) and v >= 0),
}
"""Expected values of the settings next to a result file, if they are present; null stands for "not used"."""


LONGEST_TEXT = 10_000
"""More than the longest path of a file; figures and tables of a report take minutes to lay out a much longer name."""


def check_settings(settings: Mapping[str, Any], path: Path) -> None:
    """Raise a WorkError if a setting of the result file `path` has an unexpected value, or a text without end."""
    for key, value in settings.items():
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise WorkError(
                f"{settings_path(path)}: damaged, expected at most {LONGEST_TEXT:,} characters for '{key[:60]}', got "
                f"{len(value):,}; restore it"
            )
    for key, (expected, holds) in SETTINGS.items():
        value = settings.get(key)
        if value is not None and not holds(value):
            raise WorkError(
                f"{settings_path(path)}: damaged, expected {expected} for '{key}', got {str(value)[:60]!r}; restore it"
            )


@dataclass(frozen=True)
class RowLimits:
    """What a row can claim under the settings of its file; without sigma, n and alpha, any radius."""

    settings: Mapping[str, Any]

    def check(self, label: int, certificate: Certificate) -> None:
        """Raise a ValueError if a row claims what its votes do not show, or does not belong to these settings."""
        n = self._get("n", None)
        classes = self._get("num_classes", math.inf)
        largest = max(
            label,
            certificate.prediction,
            *(cls for stage in (certificate.votes, *certificate.earlier) for cls, _ in stage),
        )
        if largest >= classes:
            raise ValueError(f"class {largest} is out of range for {classes} classes")
        if n is not None and certificate.votes:
            fixed = not (self._get("radii", ()) or self._get("radius_loss", None))
            if certificate.n > n or (fixed and certificate.n != n):
                raise ValueError(f"has {certificate.n} votes, the settings say n = {n}")
        stages = len(self._get("cascade", (0,)))
        if len(certificate.earlier) >= stages:
            raise ValueError(f"has votes of {len(certificate.earlier) + 1} stages, the settings say {stages}")
        if (certificate.coin is not None) != (self._get("bound", "") == RANDOMIZED and certificate.n > 0):
            raise ValueError("expected a coin for each image of a randomized bound, and none for another bound")
        if self._limited:
            self._check_radius(certificate)

    def _check_radius(self, certificate: Certificate) -> None:
        """Raise a ValueError if the votes show another radius; those of a sequential test only bound it from above."""
        claim = replace(certificate, prediction=certificate.chosen)
        if claim.prediction == ABSTAIN or claim.n0 == 0:
            return  # the class that may have been certified is not known, or another tool wrote the row, without votes
        shown = self.radius(claim)
        radius = claim.radius
        sigma = self.settings["sigma"]
        given = f"{claim.count} of {claim.n} votes"
        noise = f"at sigma {sigma:g} and alpha {self.settings['alpha']:g}"
        if shown == 0 and not certificate.abstained:
            raise ValueError(f"the class {claim.prediction} is more than {given} can show {noise}")
        if radius > shown * (1 + TOLERANCE):
            raise ValueError(f"the radius {radius:g} exceeds {shown:g}, the most that {given} can show {noise}")
        if not self._get("radii", ()) and radius + TOLERANCE * sigma < shown * (1 - TOLERANCE):
            raise ValueError(f"the radius {radius:g} is below {shown:g}, which {given} show {noise}")

    def allow(self, columns: "Columns") -> bool:
        """Whether `check` passes for all rows of a file with Gaussian noise, one stage and the one-sided bound; False
        for other files.

        The bound falls where its tail probability reaches alpha. So a claimed error is not below the bound if its own
        tail is at most alpha, and not above it if its tail is at least alpha. A tail is computed faster than the bound.
        """
        n = self._get("n", None)
        classes = self._get("num_classes", math.inf)
        largest = max(int(c.max(initial=0)) for c in (columns.label, columns.prediction, columns.votes_class))
        unusual = any(self._get(key, False) for key in ("cascade", "radii", "radius_loss"))
        gaussian = self._get("noise", "gaussian") == "gaussian"
        plain = gaussian and bound_of(self.settings) == ONE_SIDED and not unusual
        if not plain or largest >= classes or (n is not None and (columns.n != n).any()):
            return False
        if not self._limited:
            return True
        sigma, alpha = self.settings["sigma"], self.settings["alpha"]
        count, radius, claims = np.unique([columns.count, columns.radius, columns.prediction != ABSTAIN], axis=1)

        def tail(radius: NDArray[np.float64]) -> NDArray[np.float64]:
            error = special.ndtr(-radius / sigma) - self._slack
            # betaincc(n - count + 1, count, error), of which scipy computes this form two hundred times as fast.
            return np.asarray(special.betainc(np.maximum(count, 1), n - count + 1, 1 - error))

        shown = (claims == 0) | (count > 0) & (tail(radius / (1 + TOLERANCE)) <= alpha)
        return bool((shown & (tail((radius + TOLERANCE * sigma) / (1 - TOLERANCE)) >= alpha)).all())

    def radius(self, certificate: Certificate) -> float:
        """Return the radius that these votes show; with `radii`, where it depends on their order, an upper bound."""
        n = certificate.n
        count = certificate.count
        alpha = self.settings["alpha"]
        if n == 0:  # no votes show nothing
            return 0.0
        if sigmas := self._get("cascade", ()):
            return cascade_radius(certificate.prediction, count, n, certificate.earlier, sigmas, alpha)
        noise = NOISES[self._get("noise", "gaussian")](self.settings["sigma"])
        if radii := self._get("radii", ()):
            fixed = noise.radius(error_upper_bound(count, n, alpha) + self._slack)
            if len(radii) == 1 and not self._get("hold_back", False):
                # Its only test claims the radius at its last look. If the error is that of the radius, as few failures
                # at one look are at most as likely as a claim at any look: alpha. So the bound is not above this error.
                return float(min(radii[0], fixed))
            held_back = fixed if self._get("hold_back", False) else 0.0
            # A test of several may have claimed at an earlier look, when all votes agreed.
            return float(min(max(*radii, held_back), noise.radius(error_upper_bound(n, n, alpha))))
        other = largest_other(certificate.votes, certificate.prediction)
        bound = bound_of(self.settings)
        return certified_radius(count, other, n, noise, alpha, bound=bound, coin=certificate.coin, slack=self._slack)

    @property
    def _slack(self) -> float:
        return SLACK if self._get("sound", False) else 0.0

    @cached_property
    def _limited(self) -> bool:
        return all(self.settings.get(key) is not None for key in ("sigma", "n", "alpha"))

    def _get(self, key: str, default: Any) -> Any:
        value = self.settings.get(key)
        return default if value is None else value
