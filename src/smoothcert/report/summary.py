"""Numbers of a certificates file: average certified radius, certified accuracy, abstention."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import ndtri

from smoothcert.certification.certificates import CertificatesFile, CertifiedImage
from smoothcert.certification.checks import EARLY_NAME, ONE_SIDED, RANDOMIZED, TWO_SIDED
from smoothcert.certification.columns import columns_of
from smoothcert.errors import RequestError, WorkError
from smoothcert.noise import Gaussian
from smoothcert.report.outcomes import NORMAL_95, Outcomes, outcomes_of, standard_error, wilson_interval
from smoothcert.smoothing.bounds import smallest_error_bound
from smoothcert.smoothing.cascade import stage_error
from smoothcert.smoothing.certificate import ABSTAIN

MAX_RADII = 12
MANY_IMAGES = 20
"""This many images of one class, and no other, are not a coincidence."""


@dataclass(frozen=True)
class Summary:
    """The numbers of one certificates file; None where the file does not record them.

    `n` and `n0` are also None if the images of the file do not share one value.
    """

    name: str
    file: CertificatesFile
    sigma: float | None
    images: int
    n: int | None
    alpha: float | None
    acr: float
    acr_standard_error: float | None
    """Standard deviation over the images / sqrt(images): the spread due to the choice of images, not of seeds."""
    accuracy_at: Mapping[float, float]
    """Radius -> certified accuracy in [0, 1], radii ascending."""
    abstention: float
    votes: int
    """Noisy classifications spent, n0 + n summed over the images; 0 for files that do not record them."""
    dataset: str | None = None
    split: str | None = None
    method: str | None = None
    n0: int | None = None
    precision: str | None = None
    ceiling: float | None = None
    """The radius of an image whose n votes all agree: no radius in the file can be larger."""
    remarks: tuple[str, ...] = ()
    """How the file differs from plain CERTIFY: the rule that spent the votes, the noise, the arithmetic."""
    norm: str = "L2"
    """The norm of the radii."""
    apart: str = ""
    """Why the radii cannot be compared with those of plain certificates: "randomized bound" or "cascade"; "" for plain
    certificates. Files that differ in it are never in one group."""
    protocol: tuple[tuple[str, object], ...] = ()
    """What radii depend on besides the network and the image, as (name, value): only runs that share it are ranked."""
    hyperparameters: Mapping[str, float | int | str | None] = field(default_factory=dict)
    """Those in which runs of the report differ, as in {"objective.weight": 10.0}."""
    l_infinity: float | None = None
    """ACR / sqrt(d), the L-infinity radius that ACR implies; only where the report is asked for it."""

    @cached_property
    def indices(self) -> frozenset[int]:
        """The indices of the images."""
        return frozenset(self.file.columns.index.tolist())

    @cached_property
    def outcomes(self) -> Outcomes:
        """The rows as arrays."""
        return outcomes_of(self.file.columns)

    def reaches(self, radius: float) -> bool:
        """Whether n votes can show this radius at all; True if that is not known."""
        return self.ceiling is None or radius <= self.ceiling

    def interval(self, radius: float | None = None) -> tuple[float, float] | None:
        """The 95% confidence interval over the choice of images, of the ACR (normal, cut off at 0) or of the accuracy
        at `radius` in percent (Wilson)."""
        if radius is None:
            half = None if self.acr_standard_error is None else NORMAL_95 * self.acr_standard_error
            return None if half is None else (max(0.0, self.acr - half), self.acr + half)
        if (fraction := self.accuracy_at.get(radius)) is None or not self.reaches(radius):
            return None
        low, high = wilson_interval(fraction, self.images)
        return 100 * low, 100 * high

    @property
    def group(self) -> tuple[float, str]:
        """Runs of one group can be compared: same sigma, same data set, radii in the same norm. Groups sort by sigma,
        the unknown last."""
        return (math.inf if self.sigma is None else self.sigma, self.compared_on or "")

    @property
    def compared_on(self) -> str | None:
        """The data set, the norm if it is not L2, and what keeps these radii apart from others."""
        data = self.dataset if self.norm == "L2" else f"{self.dataset or 'radii'} in {self.norm}"
        return f"{data or 'radii'}, {self.apart}" if self.apart else data


def average_certified_radius(rows: Sequence[CertifiedImage]) -> float:
    """ACR (Zhai et al. 2020): the mean over all images of the radius, taken as 0 where wrong or abstained."""
    return math.fsum(columns_of(rows).counted_radii.tolist()) / _count(rows)


def certified_accuracy(rows: Sequence[CertifiedImage], radius: float) -> float:
    """The fraction in [0, 1] of images that are certified for their label with a radius of at least `radius`.

    This is what the published tables count. An abstention never counts, not even at radius 0.
    """
    return int((columns_of(rows).counted_radii >= radius).sum()) / _count(rows)


def _count(rows: Sequence[CertifiedImage]) -> int:
    if not rows:
        raise RequestError(
            "expected at least one certified image, got none; certify some with `smoothcert certify RUN`"
        )
    return len(rows)


def largest_certifiable_radius(sigma: float, n: int, alpha: float) -> float:
    """sigma * Phi^-1(alpha^(1/n)): what Gaussian smoothing certifies when all n votes agree.

    Computed through 1 - alpha^(1/n), which keeps its digits where alpha^(1/n) is next to 1.
    """
    return max(0.0, sigma * -float(ndtri(-math.expm1(math.log(alpha) / n))))


def _number(file: CertificatesFile, key: str) -> float | None:
    value = file.settings.get(key)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise WorkError(
            f"{file.path}: the settings next to it are damaged: expected a number for '{key}', got {value!r}"
        )
    return number


def _shared_count(file: CertificatesFile, key: str, counts: set[int]) -> int | None:
    """The one value of n or n0 that all rows have; the settings give it where rows have no votes."""
    if counts == {0}:
        stored = _number(file, key)
        return None if stored is None else int(stored)
    return counts.pop() if len(counts) == 1 else None


def _text(settings: Mapping[str, Any], key: str) -> str | None:
    value = settings.get(key)
    return None if value is None or value == "" else str(value)


def _ceiling(file: CertificatesFile, sigma: float | None, n: int | None, alpha: float | None) -> float | None:
    gaussian = (_text(file.settings, "noise") or "gaussian").lower() == "gaussian"
    # Other bounds may show more than alpha^(1/n).
    known = gaussian and _bound(file) in (ONE_SIDED, TWO_SIDED, RANDOMIZED)
    if not known or sigma is None or n is None or alpha is None or n < 1 or not 0 < alpha < 1:
        return None
    if sigmas := file.settings.get("cascade"):
        errors = [stage_error(n, n, stage, len(sigmas), alpha) for stage in range(len(sigmas))]
        return max(Gaussian(s).radius(error) for s, error in zip(sigmas, errors, strict=True))
    if is_randomized(file):
        return Gaussian(sigma).radius(smallest_error_bound(n, alpha, randomized=True))
    ceiling = largest_certifiable_radius(sigma, n, alpha)
    return ceiling if math.isfinite(ceiling) else None


def summarize(file: CertificatesFile, name: str, radii: Sequence[float]) -> Summary:
    """All numbers of `file`, with the certified accuracy at each of `radii`. A file without rows is refused."""
    refuse_without_images(file)
    columns = file.columns
    counted = columns.counted_radii
    radii_of_all = np.concatenate([counted, np.zeros(len(columns) - len(counted))])
    sigma, alpha = _number(file, "sigma"), _number(file, "alpha")
    n = _shared_count(file, "n", set(columns.n.tolist()))
    return Summary(
        name=name,
        file=file,
        sigma=sigma,
        images=len(columns),
        n=n,
        alpha=alpha,
        acr=math.fsum(counted.tolist()) / len(columns),
        acr_standard_error=standard_error(radii_of_all),
        accuracy_at={r: float((counted >= r).sum()) / len(columns) for r in sorted(set(radii))},
        abstention=int((columns.predict == ABSTAIN).sum()) / len(columns),
        votes=int(columns.spent.sum()),
        dataset=_text(file.settings, "dataset"),
        split=_text(file.settings, "split"),
        method=_text(file.settings, "objective"),
        n0=_shared_count(file, "n0", set(columns.n0.tolist())),
        precision=_text(file.settings, "precision"),
        ceiling=_ceiling(file, sigma, n, alpha),
        remarks=_remarks(file),
        norm="L1" if in_l1(file) else "L2",
        apart=_apart(file),
        protocol=_protocol(file, n, alpha),
    )


def _apart(file: CertificatesFile) -> str:
    return "cascade" if file.settings.get("cascade") else "randomized bound" if is_randomized(file) else ""


def is_randomized(file: CertificatesFile) -> bool:
    """Whether the radii depend on coins, by a randomized bound."""
    return file.settings.get("bound") == "randomized"


def _over_sigmas(file: CertificatesFile) -> str:
    return f"cascade over σ {', '.join(f'{sigma:g}' for sigma in file.settings.get('cascade') or ())}"


def _protocol(file: CertificatesFile, n: int | None, alpha: float | None) -> tuple[tuple[str, object], ...]:
    settings = file.settings
    adaptive = bool(settings.get("radii") or settings.get("radius_loss"))  # the rule chooses n for each image
    protocol = {
        "n": _number(file, "n") if n is None or adaptive else n,
        "alpha": alpha,
        "bound": _bound(file),
        "noise": _text(settings, "noise") or "gaussian",
        "radii": str(settings.get("radii") or ""),
        "radius loss": _text(settings, "radius_loss"),
        "label-aware": bool(settings.get("label_aware")),
        "sound": bool(settings.get("sound")),
    }
    return tuple(protocol.items())


def _bound(file: CertificatesFile) -> str:
    """The name of the confidence bound; the first files have a longer one, files of other tools none."""
    bound = _text(file.settings, "bound") or ONE_SIDED
    return ONE_SIDED if bound == EARLY_NAME else bound


def refuse_without_images(file: CertificatesFile) -> None:
    if not file.rows:
        raise RequestError(
            f"{file.path}: expected at least one certified image, got none; continue with `smoothcert certify RUN`"
        )


def _remarks(file: CertificatesFile) -> tuple[str, ...]:
    """What is unusual; usual are n votes for each image of several classes, under Gaussian noise in floats."""
    settings, columns, n = file.settings, file.columns, _number(file, "n")
    radii = settings.get("radii") or ()
    radii = ", ".join(map(str, radii)) if isinstance(radii, list | tuple) else str(radii)
    spent = int(columns.spent.sum())
    most = int(columns.n0.sum()) + (n * len(columns) if n else int(columns.n.sum()))
    remarks = {
        f"sampled until radius {radii} was decided": bool(radii),
        f"two-stage, about {settings.get('radius_loss')} sigma of radius given up": settings.get("radius_loss")
        is not None,
        "label-aware: wrong images were not sampled, for benchmarks only": bool(settings.get("label_aware")),
        f"{_bound(file)} bound": _bound(file) not in (ONE_SIDED, RANDOMIZED),
        "randomized bound: each radius depends on a coin that the file stores": is_randomized(file),
        _over_sigmas(file): bool(settings.get("cascade")),
        "sound integer noise": bool(settings.get("sound")),
        f"{settings.get('noise')} noise, radii in L1": in_l1(file),
        f"{most / max(spent, 1):.1f} times fewer votes than n for each image": most > spent,
        f"all images of class {columns.label[0]}, so its ACR alone": _of_one_class(file),
        "a last row, not written to its end, is left out": file.torn,
    }
    return tuple(remark for remark, holds in remarks.items() if holds)


def in_l1(file: CertificatesFile) -> bool:
    """Whether the radii are in L1: those of Laplace and uniform noise."""
    return file.settings.get("noise") in ("laplace", "uniform")


def _of_one_class(file: CertificatesFile) -> bool:
    """Whether all images have one label, and are too many for that to be chance."""
    return len(file.rows) >= MANY_IMAGES and len(np.unique(file.columns.label)) == 1


def default_radii(files: Sequence[CertificatesFile]) -> list[float]:
    """0, 0.25, 0.5, ... up to the largest radius that counts in any file; the step doubles until 12 radii suffice."""
    reach = max((float(file.columns.counted_radii.max(initial=0.0)) for file in files), default=0.0)
    step = 0.25
    while reach // step + 1 > MAX_RADII:
        step *= 2
    return [i * step for i in range(int(reach // step) + 1)]
