"""`smoothcert.doctor`: measure a classifier with and without noise, and find what keeps it from good certificates."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from smoothcert.analysis.doctor_inputs import (
    Examined,
    Finding,
    check_channel_order,
    check_enlarged,
    check_input,
    check_labels_order,
    check_range,
    check_sigma,
    check_width,
    normalised,
)
from smoothcert.analysis.doctor_modes import check_mode, check_statistics
from smoothcert.certification.certify_loader import Batches, inputs_and_labels, loader_of
from smoothcert.certification.ensemble import RunEnsemble
from smoothcert.certification.inputs import check_integer
from smoothcert.certification.smoothed_classifier import SmoothedClassifier
from smoothcert.certification.subject import Subject
from smoothcert.classifier import Classifier, check_logits, device_of, first_logits, refuse_nan
from smoothcert.data import Images, with_known_classes
from smoothcert.data.images import spread
from smoothcert.data.torch_dataset import checked_length
from smoothcert.distributed import find_device
from smoothcert.errors import RequestError
from smoothcert.noise import NOISES, checked_sigma
from smoothcert.smoothing.accuracy import NoiseAccuracy, clearly_below
from smoothcert.training.checkpoint import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGMAS = (0.12, 0.25, 0.5, 1.0)
"""Noise levels of the table, besides the requested one."""
SAME = 0.9
"""Share of the accuracy that a network trained under noise keeps, without noise and with it."""
CORRECTED_FIRST = (
    *("images-range", "images-normalised", "input-range", "normalisation"),
    *("batch-statistics", "channel-order", "label-order", "sigma-units"),
)
"""Findings that make the accuracy under noise meaningless until they are corrected."""


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` measured: accuracies in [0, 1] on the same `images` images, and the findings."""

    model: str
    dataset: str
    images: int
    sigma: float
    """The noise level of interest."""
    clean_accuracy: float
    accuracy_under_noise: tuple[tuple[float, float], ...]
    """(sigma, accuracy on one noisy copy of each image), by rising sigma."""
    seconds_per_image: float
    """Time of a forward pass."""
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def depends_on_noise(self) -> bool:
        """Whether the accuracy clearly differs with and without noise of `sigma`: training under noise can help."""
        lower, higher = sorted((self.clean_accuracy, self.accuracy(self.sigma)))
        return clearly_below(lower, SAME * higher, self.images)

    @property
    def accuracies(self) -> tuple[tuple[float, float], ...]:
        """(sigma, accuracy), by rising sigma from 0: the clean accuracy."""
        return ((0.0, self.clean_accuracy), *self.accuracy_under_noise)

    def accuracy(self, sigma: float) -> float:
        """The accuracy at one of the measured noise levels; 0 is the clean accuracy."""
        known = dict(self.accuracies)
        if sigma not in known:
            raise RequestError(f"sigma: expected one of {', '.join(f'{s:g}' for s in known)}, got {sigma:g}")
        return known[sigma]

    def plot(self) -> "Figure":
        """Draw the accuracy by sigma."""
        from smoothcert.report.names import dataset_name
        from smoothcert.report.style import FIRST, GREY, one_panel, plain

        title = plain(f"{self.model} on {self.images:,} images of {dataset_name(self.dataset)}")
        figure, axes = one_panel(4.8, 3.2, title, "σ: standard deviation of the noise", "accuracy under noise (%)")
        sigmas, accuracies = zip(*self.accuracies, strict=True)
        axes.plot(
            sigmas, [100 * accuracy for accuracy in accuracies], color=FIRST, marker="o", markersize=4, clip_on=False
        )
        axes.axvline(self.sigma, color=GREY, linewidth=1, linestyle="--", zorder=1)
        axes.text(self.sigma, 98, f" chosen σ = {self.sigma:g}", ha="left", va="top", fontsize=8, color=GREY)
        axes.set_ylim(0, 100)
        return figure

    def __str__(self) -> str:
        levels = ", ".join(f"{accuracy:.0%} at sigma {sigma:g}" for sigma, accuracy in self.accuracy_under_noise)
        head = f"{self.model} on {self.images} images of {self.dataset}: accuracy {self.clean_accuracy:.0%}, {levels}"
        return "\n".join([head, *(f"{finding.code}: {finding}" for finding in self.findings)])


def doctor(
    model: Run | RunEnsemble | SmoothedClassifier | Classifier,
    data: "Images | Dataset[Any] | Iterable[Any]",
    *,
    sigma: float | None = None,
    images: int = 200,
    seed: int = 0,
    name: str | None = None,
    device: str | torch.device = "auto",
) -> Diagnosis:
    """Examine a classifier before it is certified: its accuracy by noise level, and findings in plain words.

    `model` and `data` are as in `certify_dataset`, without cascades. `data` may also be any loader of batches (images,
    labels); images outside [0, 1] are a finding. `sigma` is the noise level of interest, by default that of a run, else
    0.25. `images` of the data are used, spread evenly where possible. Noise is of the kind of a run, else Gaussian, and
    depends on `seed` alone.
    """
    subject = Subject.of(model)
    if subject.stages:
        raise RequestError("model: expected one classifier, got a cascade; examine each of its stages alone")
    classifier = subject.classifier
    title = name or subject.name
    defaults: dict[str, Any] = {"sigma": 0.25, "noise": "gaussian", **subject.defaults}
    sigma = checked_sigma(defaults["sigma"] if sigma is None else sigma)
    kind = NOISES[defaults["noise"]]
    check_integer("images", images, 1)
    if not hasattr(seed, "__index__"):
        raise RequestError(f"seed: expected an integer, got {seed!r}")
    data = with_known_classes(data, subject.class_names) if isinstance(data, Images) else data
    inputs, labels, about = _gather(data, images)
    device = device_of(classifier) or find_device(device)
    inputs, labels = inputs.to(device), labels.to(device)
    examined = Examined(
        classifier,
        inputs,
        labels,
        outputs=_outputs(classifier, inputs[:2], labels, title),
        class_names=getattr(about, "class_names", None),
        num_classes=getattr(about, "num_classes", None),
        normalization=getattr(about, "normalization", None),
    )
    started = time.perf_counter()
    clean = examined.classes(examined.images).to(device)  # on the CPU first: this waits for a GPU
    seconds = (time.perf_counter() - started) / len(inputs)
    generator = torch.Generator(device).manual_seed(seed)
    noise = kind(1.0).sample(inputs.shape, generator)
    levels = sorted({*SIGMAS, sigma, *([sigma / 255] if sigma > 2 else [])})  # it may be meant for pixels in 0..255
    noisy = {level: examined.logits(examined.images + level * noise).argmax(1) for level in levels}
    right = {level: classes == examined.labels for level, classes in noisy.items()}
    accuracies = {level: float(correct.double().mean()) for level, correct in right.items()}
    measured = NoiseAccuracy.of(examined.labels, clean, noisy[sigma], examined.outputs)
    return Diagnosis(
        model=title,
        dataset=str(getattr(about, "name", type(data).__name__)),
        images=len(inputs),
        sigma=sigma,
        clean_accuracy=measured.clean,
        accuracy_under_noise=tuple(accuracies.items()),
        seconds_per_image=seconds,
        findings=tuple(_findings(examined, sigma, noise, right, measured)),
    )


def _findings(
    examined: Examined, sigma: float, noise: Tensor, right: dict[float, Tensor], measured: NoiseAccuracy
) -> Sequence[Finding]:
    """What is wrong, in the order in which it should be corrected; `right` are the right images by noise level."""
    outside = check_range(examined.images)
    mode = check_mode(examined)
    noisy = examined.images + sigma * noise
    scaled, steps = check_input(examined, noisy) if outside is None and mode is None else (None, ())
    # Other images have other statistics.
    statistics = check_statistics(examined, noisy, steps) if outside is None else None
    if statistics is not None:
        scaled, steps = None, ()
    inputs = normalised(examined.images, steps[0]) if steps else examined.images
    findings = [
        outside,
        mode,
        scaled,
        statistics,
        check_channel_order(examined, inputs) if outside is None and mode is None else None,
        check_width(examined.outputs, examined.num_classes),
        check_labels_order(examined, inputs),
        check_sigma(sigma, right.__getitem__),
        check_enlarged(examined.images) if outside is None else None,
    ]
    present = [finding for finding in findings if finding is not None]
    if any(finding.code in CORRECTED_FIRST for finding in present):
        return present
    text = f"clean accuracy {measured.clean:.0%}, under noise of sigma {sigma:g} {measured.noisy:.0%}"
    if measured.fault == "chance":
        advice = "check the weights, the labels and the preprocessing; then train the network"
        present.append(Finding("chance", f"the network is at chance: {text}", advice))
    elif measured.fault == "noise":
        present.append(
            Finding(
                "noise",
                f"the network is not robust to noise: {text}",
                "fine-tune it under noise, or put a denoiser in front of it, or choose a smaller sigma",
            )
        )
    return present


def _outputs(classifier: Classifier, images: Tensor, labels: Tensor, name: str) -> int:
    """The number of outputs; a model that fails on the images, or that has fewer outputs than labels, is refused."""
    logits = first_logits(classifier, images, name)
    check_logits(logits, len(images))
    refuse_nan(logits)
    outputs = int(logits.shape[1])
    lowest = int(labels.min())
    highest = int(labels.max())
    if highest >= outputs or lowest < 0:
        raise RequestError(
            f"model: {name} has {outputs} outputs, but there are labels from {lowest} to {highest}; give data of its "
            "classes, numbered from 0"
        )
    return outputs


def _gather(data: Any, count: int) -> tuple[Tensor, Tensor, object]:
    """`count` images float32 [n, ...] and labels int64 [n], and what they are called."""
    if isinstance(data, Images):
        return *data.batch(spread(len(data), count)), data
    source = Batches.of(_spread(data, count))
    images, labels = [], []
    for batch in source.batches:
        part, classes = inputs_and_labels(batch)
        if not isinstance(part, Tensor) or classes is None:
            raise RequestError("data: expected batches (images, labels) of tensors, got none with labels; add them")
        images.append(part.float())
        labels.append(classes.long())
        if sum(map(len, labels)) >= count:
            break
    if not images:
        raise RequestError("data: expected batches (images, labels), got none")
    if len(shapes := {tuple(part.shape[1:]) for part in images}) > 1:
        given = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise RequestError(f"data: expected images of one shape, got {given}; resize them")
    if not all(bool(part.isfinite().all()) for part in images):
        raise RequestError("data: expected finite pixels, got NaN or infinity; check the data set")
    dataset = data.dataset if isinstance(data, DataLoader) else data
    return torch.cat(images)[:count], torch.cat(labels)[:count], replace(source, name=type(dataset).__name__)


def _spread(data: Any, count: int) -> Any:
    """A loader of `count` items spread over a data set: the first ones of sorted data may have one class only."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if not isinstance(dataset, Dataset) or isinstance(dataset, IterableDataset):
        return data
    chosen = Subset(dataset, spread(checked_length(dataset), count).tolist())
    # Without automatic batching, a loader converts items: they make no batch.
    collate = data.collate_fn if isinstance(data, DataLoader) and data.batch_sampler is not None else None
    return loader_of(chosen, collate)
