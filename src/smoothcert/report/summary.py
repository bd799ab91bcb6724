"""Numbers of a certificates file: average certified radius, certified accuracy, abstention; their 95% intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import ndtri

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.certification.columns import Flags, Floats, Integers
from smoothcert.certification.model_provenance import unfinished
from smoothcert.data.datasets import DATASETS, published_name
from smoothcert.errors import RequestError
from smoothcert.io.text import counted
from smoothcert.report.labels import NamedRun
from smoothcert.report.locate import run_recipe
from smoothcert.report.protocol import (
    ceiling_of,
    class_name,
    class_names_of,
    kept_apart,
    norm_of,
    protocol_of,
    remarks_on,
)
from smoothcert.smoothing.certificate import ABSTAIN

MAX_RADII = 12
FINE_STEPS = (0.05, 0.02, 0.01)
"""Between radii below 0.25, which small sigmas and few votes give."""
LIMITED = 0.1
"""From this share of images at the largest radius on, the report says that n limits the result."""
NORMAL_95 = float(ndtri(0.975))


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What counts of some images, one entry per image in each array, ascending by index."""

    index: Integers
    label: Integers
    certified: Flags
    """Whether the image is certified for its label, with any radius."""
    radius: Floats
    """The certified radius; 0 where wrong or abstained."""

    def __len__(self) -> int:
        return len(self.index)

    def certified_at(self, radius: float) -> Flags:
        """Whether each image is certified for its label with a radius of at least `radius`."""
        return self.certified & (self.radius >= radius)

    def accuracy(self, radius: float = 0.0) -> float:
        """The certified accuracy at `radius`, in [0, 1]."""
        return float(self.certified_at(radius).mean())

    @property
    def acr(self) -> float:
        """The average certified radius."""
        return float(self.radius.mean())

    def at(self, c: Flags | Integers) -> "Outcomes":
        """The chosen images, by flags or positions."""
        return Outcomes(self.index[c], self.label[c], self.certified[c], self.radius[c])


def wilson_interval(mean: float, images: int, within: float = 0.0) -> tuple[float, float]:
    """Wilson's 95% interval for the mean of numbers in [0, 1] that was `mean` among `images`: unlike the normal one it
    stays in [0, 1] and has a width at 0 and 1 too.

    `within` is the mean of x (1 - x) over the numbers x: 0 if each is 0 or 1. It is what their variance lacks of that
    of a proportion, p (1 - p).
    """
    z2 = NORMAL_95**2 / images
    centre = (mean + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * max(0.0, mean * (1 - mean) + z2 / 4 - (1 + z2) * within)) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def standard_error(values: Floats) -> float | None:
    """Of the mean of `values`: sample standard deviation / sqrt(count); None for a single value."""
    return None if len(values) < 2 else float(np.std(values, ddof=1) / math.sqrt(len(values)))


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
    protocol: Mapping[str, object] = field(default_factory=dict)
    """What radii depend on besides the network and the image, by name: only runs that share it are ranked."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Of the run that the file belongs to; {} without one."""
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
        """What counts of the rows."""
        columns = self.file.columns
        certified = columns.correct
        rows = Outcomes(columns.index, columns.label, certified, np.where(certified, columns.radius, 0.0))
        return rows.at(np.argsort(columns.index, kind="stable"))

    @cached_property
    def classes(self) -> dict[int, Outcomes]:
        """Label -> what counts of its images, for each label that occurs, ascending."""
        labels = np.unique(self.outcomes.label).tolist()
        return {label: self.outcomes.at(self.outcomes.label == label) for label in labels}

    @property
    def worst_class(self) -> int:
        """The label with the smallest ACR; of several the first."""
        return min(self.classes, key=lambda label: self.classes[label].acr)

    def class_name(self, label: int) -> str:
        """The name of a class; its number if the file does not have names."""
        return class_name(label, class_names_of(self.file))

    @property
    def never_certified(self) -> list[int]:
        """The labels of which not one image is certified, at any radius."""
        return [label for label, outcomes in self.classes.items() if not outcomes.certified.any()]

    @property
    def at_ceiling(self) -> float | None:
        """The share of images whose n votes all go to their label: their radius is `ceiling`, whatever the network.

        None without votes, and where it is not the same for all of them: in a later stage of a cascade it is smaller,
        and with a randomized bound it depends on the coin.
        """
        columns = self.file.columns
        if self.ceiling is None or self.apart or not columns.n.any():
            return None
        return float((columns.correct & (columns.count == columns.n)).mean())

    @property
    def limited_by_n(self) -> bool:
        """Whether a tenth of the images or more are at the largest radius: more votes would raise ACR visibly."""
        return self.at_ceiling is not None and self.at_ceiling >= LIMITED

    def reaches(self, radius: float) -> bool:
        """Whether n votes can show this radius at all, and it was asked for; True if that is not known.

        A sequential rule stops at the largest of its radii: its votes say nothing about larger ones.
        """
        largest = max(self.file.settings.get("radii") or [math.inf])
        return radius <= largest and (self.ceiling is None or radius <= self.ceiling)

    def shown_accuracy(self, radius: float) -> float | None:
        """The certified accuracy at `radius`, in [0, 1]; None for a radius that n votes or the rule cannot show."""
        return self.accuracy_at.get(radius) if self.reaches(radius) else None

    def interval(self, radius: float | None = None) -> tuple[float, float] | None:
        """The 95% confidence interval over the choice of images, of the ACR or of the accuracy at `radius` in percent.

        Both are Wilson's, that of the ACR for numbers between 0 and the largest radius. A normal one would be too short
        where most radii are the largest, or 0: if all are, it has no width.
        """
        if radius is None:
            return self._acr_interval
        if (fraction := self.shown_accuracy(radius)) is None:
            return None
        low, high = wilson_interval(fraction, self.images)
        return 100 * low, 100 * high

    @cached_property
    def _acr_interval(self) -> tuple[float, float] | None:
        """None for a single image, and if no radius above 0 is known."""
        radii = self.outcomes.radius
        largest = max(self.ceiling or 0.0, float(radii.max(initial=0.0)))
        if len(radii) < 2 or largest == 0:
            return None
        shares = radii / largest
        low, high = wilson_interval(float(shares.mean()), len(shares), float((shares * (1 - shares)).mean()))
        return largest * low, largest * high

    @property
    def in_words(self) -> str:
        """The ACR, and how the images were certified as far as the file records it."""
        ends = self.interval()
        parts = [
            f"ACR {self.acr:.3f}" + ("" if ends is None else f" (95% interval {ends[0]:.3f} to {ends[1]:.3f})"),
            counted(self.images, "image"),
            self.dataset and f"data set {self.dataset}",
            self.split and f"split {self.split}",
            "n not recorded or mixed" if self.n is None else f"n = {self.n:,}",
            None if self.n0 is None else f"n0 = {self.n0:,}",
            "alpha not recorded" if self.alpha is None else f"alpha = {self.alpha:g}",
            self.precision and f"precision {self.precision}",
            counted(self.votes, "vote") if self.votes else "votes not recorded",
            *self.remarks,
        ]
        return ", ".join(part for part in parts if part)

    @property
    def group(self) -> tuple[float, str]:
        """Runs of one group can be compared: same sigma, same data set, radii in the same norm. Groups sort by sigma,
        the unknown last."""
        data = self.dataset if self.norm == "L2" else f"{self.dataset or 'radii'} in {self.norm}"
        compared_on = f"{data or 'radii'}, {self.apart}" if self.apart else data
        return (math.inf if self.sigma is None else self.sigma, compared_on or "")

    @property
    def named(self) -> NamedRun:
        """What the label of the run depends on."""
        return NamedRun(self.name, self.method, self.recipe, self.group)


def _shared_count(file: CertificatesFile, key: str, counts: set[int]) -> int | None:
    """The one value of n or n0 that all rows have; the settings give it where rows have no votes."""
    if counts == {0}:
        return file.settings.get(key)
    return counts.pop() if len(counts) == 1 else None


def _method(settings: Mapping[str, Any], recipe: Mapping[str, Any]) -> str | None:
    """The training method: that of the certificates, or of `recipe` if these only have the name of the classifier."""
    certified = settings.get("objective") or None
    objective = recipe.get("objective")
    written = objective.get("name") if isinstance(objective, Mapping) else objective
    if certified is not None and certified == settings.get("model") and isinstance(written, str) and written:
        return written.rpartition(":")[2]
    return certified


def summarize(file: CertificatesFile, name: str, radii: Sequence[float]) -> Summary:
    """All numbers of `file`, with the certified accuracy at each of `radii`. A file without rows is refused."""
    if not file.rows:
        raise RequestError(
            f"{file.path}: expected at least one certified image, got none; continue with `smoothcert certify RUN`"
        )
    columns = file.columns
    settings = file.settings
    recipe = run_recipe(file.path)
    sigma, alpha = settings.get("sigma"), settings.get("alpha")
    n = _shared_count(file, "n", set(columns.n.tolist()))
    return Summary(
        name=name,
        file=file,
        sigma=sigma,
        images=len(columns),
        n=n,
        alpha=alpha,
        acr=columns.acr,
        acr_standard_error=standard_error(np.where(columns.correct, columns.radius, 0.0)),
        accuracy_at={r: columns.certified_accuracy(r) for r in sorted(set(radii))},
        abstention=int((columns.prediction == ABSTAIN).sum()) / len(columns),
        votes=int(columns.spent.sum()),
        dataset=settings.get("dataset") or None,
        split=settings.get("split") or None,
        method=_method(settings, recipe),
        n0=_shared_count(file, "n0", set(columns.n0.tolist())),
        precision=settings.get("precision") or None,
        ceiling=ceiling_of(file, sigma, n, alpha),
        remarks=(*remarks_on(file), *unfinished(file.provenance, recipe.get("epochs"))),
        norm=norm_of(file),
        apart=kept_apart(file),
        protocol=protocol_of(file, n, alpha),
        recipe=recipe,
    )


def implied_l_infinity(summary: Summary) -> float | None:
    """ACR / sqrt(d): the L-infinity radius that an L2 radius implies, as that cube fits into the ball; None if the
    number d of pixel values is not known."""
    spec = DATASETS.get(published_name(summary.dataset or "")) if summary.norm == "L2" else None
    return None if spec is None else summary.acr / math.sqrt(math.prod(spec.shape))


def default_radii(files: Sequence[CertificatesFile]) -> list[float]:
    """0, the radii that files were asked for, and for the other files 0.25, 0.5, ... up to their largest that counts.

    The step doubles until 12 of these radii suffice; it is smaller if not even 0.25 counts.
    """
    asked = {float(radius) for file in files for radius in file.settings.get("radii") or ()}
    others = [file for file in files if not file.settings.get("radii")]
    reach = max((float(file.columns.counted_radii.max(initial=0.0)) for file in others), default=0.0)
    step = 0.25 if reach >= 0.25 else next((fine for fine in FINE_STEPS if 3 * fine <= reach), FINE_STEPS[-1])
    while reach // step + 1 > MAX_RADII:
        step *= 2
    grid = (round(i * step, 2) for i in range(MAX_RADII))
    return sorted({radius for radius in grid if radius <= reach} | asked)
