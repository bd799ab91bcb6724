"""Checks of `doctor` for faults between a classifier and its images: scale, channels, labels, sigma, size."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy import optimize, special
from torch import Tensor
from torch.nn import functional

from smoothcert.classifier import Classifier, evaluating, failures_reported, logits_of
from smoothcert.data import DATASETS, Normalization
from smoothcert.io.text import counted
from smoothcert.noise import HIDING_SIGMA

BATCH = 50
LEVEL = 0.001
"""Significance level of comparisons on the same images."""
SIMILAR = 0.05
"""Difference of accuracies below which two kinds of inputs are equally good."""
SMALL_SIZES = (8, 16, 24, 28, 32, 48, 56, 64, 96, 112, 128, 160, 192, 224)
"""Sizes from which images may have been enlarged."""
INTERPOLATIONS = (("nearest", False), ("bilinear", False), ("bicubic", False), ("bicubic", True))
"""Of torch; with antialiasing, bicubic is that of Pillow."""
ROUNDING = 0.6 / 255
"""Root mean square of what rounding to bytes, and clipping a few pixels, changes."""
MOST_IMAGES, LEAST_CONTRAST = 16, 0.02
KNOWN_STEPS = {
    DATASETS["imagenet"].normalization: "ImageNet",
    DATASETS["cifar10"].normalization: "CIFAR-10",  # its std is the mean of those of single images
    Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)): "CIFAR-10",
    Normalization((0.1307,), (0.3081,)): "MNIST",
}
"""Normalisations that loaders often have, with the name of their data set."""


@dataclass(frozen=True)
class Finding:
    """One fault: `problem` says what was measured, `advice` what to do; `code` is its name."""

    code: str
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.advice}"


@dataclass(frozen=True, eq=False)
class Examined:
    """A classifier and the images that it is examined with, float32 [n, ...] and labels int64 [n], on its device."""

    classifier: Classifier
    images: Tensor
    labels: Tensor
    outputs: int
    class_names: tuple[str, ...] | None = None
    num_classes: int | None = None
    """Of the data, if it is known."""
    normalization: Normalization | None = None
    """Of the data set, if it is published."""

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        """Logits float32 [n, outputs] in eval mode."""
        with evaluating(self.classifier), failures_reported("the classifier", inputs.shape[1:]):
            return torch.cat([logits_of(self.classifier(part)).float() for part in torch.split(inputs, BATCH)])

    def classes(self, inputs: Tensor) -> Tensor:
        """The class of each input, int64 [n], on the CPU."""
        return self.logits(inputs).argmax(1).cpu()

    def correct(self, inputs: Tensor) -> Tensor:
        """Whether each input gets its label, bool [n]."""
        return self.logits(inputs).argmax(1) == self.labels


def clearly_better(new: Tensor, old: Tensor, gain: float, level: float = LEVEL) -> bool:
    """Whether `new` (bool [n]) is true more often than `old` by at least `gain`, and not by chance (a sign test)."""
    wins, losses = int((new & ~old).sum()), int((old & ~new).sum())
    if (wins - losses) / len(new) < gain:
        return False
    return float(special.bdtrc(wins - 1, wins + losses, 0.5)) <= level


def far_above_chance(right: Tensor, labels: Tensor, classes: Tensor, outputs: int) -> bool:
    """Whether `right` (bool [n]) are clearly more images than by chance, in whatever order the outputs are.

    A network that is not trained often assigns one class to all images. It is right for the images of one class, and
    with another input or order of the classes for those of another, which may be most images.
    """
    shares = [torch.bincount(each, minlength=outputs).double().sort().values / len(each) for each in (labels, classes)]
    chance = float((shares[0] * shares[1]).sum())
    return float(right.double().mean()) > chance + (1 - chance) / 4


def check_range(images: Tensor) -> Finding | None:
    """Images outside [0, 1]: normalised, or bytes as floats."""
    low, high = images.min().item(), images.max().item()
    if low >= 0 and high <= 1:
        return None
    if low >= 0 and high > 2:
        return Finding(
            "images-range",
            f"the images have values in {low:.3g}..{high:.3g}, not in [0, 1]: noise of sigma would be far too weak",
            "divide them by 255, and put what the model expects into its first layer",
        )
    return Finding(
        "images-normalised",
        f"the images have values in {low:.3g}..{high:.3g}, not in [0, 1]: they were normalised before the noise, and "
        "radii would be lengths on another scale",
        "remove the normalisation from the loader and make it the first layer of the model: "
        "torch.nn.Sequential(smoothcert.models.Normalize(mean, std), model)",
    )


def input_steps(channels: int, normalization: Normalization | None) -> dict[Normalization, tuple[str, str]]:
    """Usual first steps of classifiers, as normalisations of [0, 1], with a description and the code of their finding.

    `normalization`, that of the data set, is the first.
    """
    named = {normalization: "the data set"} | KNOWN_STEPS
    steps = {
        step: (f"with the mean and std of {name}", "normalisation")
        for step, name in named.items()
        if step is not None and len(step.mean) == channels
    }
    steps[Normalization((0.5,) * channels, (0.5,) * channels)] = ("in [-1, 1]", "normalisation")
    steps[Normalization((0.0,) * channels, (1 / 255,) * channels)] = ("in 0..255", "input-range")
    return steps


def normalised(images: Tensor, step: Normalization) -> Tensor:
    """Compute (images - mean) / std of each channel, for images [n, c, h, w]."""
    mean, std = (images.new_tensor(part).view(1, -1, 1, 1) for part in (step.mean, step.std))
    return (images - mean) / std


def check_input(examined: Examined, noisy: Tensor) -> tuple[Finding | None, tuple[Normalization, ...]]:
    """Another scale or a normalisation with which the model does clearly better; and all that are about as good.

    It must not do clearly worse on `noisy` images: a network with the batch-norm statistics of noisy images may.
    Predictions are compared up to the order of the classes: if only the labels are exchanged, a model that ignores its
    input may be right more often.
    """
    images = examined.images
    labels = examined.labels.cpu()
    steps = input_steps(images.shape[1], examined.normalization) if images.ndim == 4 else {}
    classes = {step: examined.classes(normalised(images, step)) for step in steps}
    given = examined.classes(images)
    before = right_in_any_order(labels, given, examined.outputs)
    right_after = {step: right_in_any_order(labels, chosen, examined.outputs) for step, chosen in classes.items()}
    better = [
        step
        for step, right in right_after.items()
        if clearly_better(right, before, 0.05) and far_above_chance(right, labels, classes[step], examined.outputs)
    ]
    if better:
        under_noise = right_in_any_order(labels, examined.classes(noisy), examined.outputs)
        for step in tuple(better):
            scaled = right_in_any_order(labels, examined.classes(normalised(noisy, step)), examined.outputs)
            if clearly_better(under_noise, scaled, SIMILAR, level=0.01):
                better.remove(step)
    if not better:
        return None, ()
    number_right = {step: int(right_after[step].sum()) for step in better}
    similar: dict[str, Normalization] = {}  # for each description the best step; the steps are sorted, usual ones first
    for step in better:
        text, _ = steps[step]
        if number_right[step] < max(number_right.values()) - SIMILAR * len(before):
            continue
        if text not in similar or number_right[step] > number_right[similar[text]]:
            similar[text] = step
    best = next(iter(similar.values()))
    order = ""
    if torch.equal(right_after[best], classes[best] == labels):
        before = given == labels
        right_after = {step: chosen == labels for step, chosen in classes.items()}
    else:
        order = ", both with the classes in the order that fits best"
    mean, std = (tuple(float(f"{value:.4g}") for value in part) for part in (best.mean, best.std))
    expected = ", or ".join(f"{text} (accuracy {share(right_after[step])})" for text, step in similar.items())
    finding = Finding(
        steps[best][1],
        f"the model expects images {expected}: on images in [0, 1], to which the noise is added, its accuracy is "
        f"{share(before)}{order}",
        "make this step its first layer, with the mean and std of your own training if you know them: "
        f"torch.nn.Sequential(smoothcert.models.Normalize({mean}, {std}), model)",
    )
    return finding, tuple(similar.values())


def check_channel_order(examined: Examined, inputs: Tensor) -> Finding | None:
    """A model that does clearly better, and better than chance, on images whose channels are reversed."""
    if inputs.ndim != 4 or inputs.shape[1] != 3:
        return None
    labels = examined.labels.cpu()
    classes = examined.classes(inputs.flip(1))
    before = examined.classes(inputs) == labels
    right = classes == labels
    if not clearly_better(right, before, 0.05) or not far_above_chance(right, labels, classes, examined.outputs):
        return None
    return Finding(
        "channel-order",
        f"the model expects blue, green, red: accuracy is {share(before)} on images in red, green, blue, and "
        f"{share(right)} with the channels reversed",
        "reverse the channels inside the model, before its other layers: images.flip(1)",
    )


def right_in_any_order(labels: Tensor, classes: Tensor, outputs: int) -> Tensor:
    """Whether each of `classes` is its label, bool [n], or the output of its label in another order that fits better.

    That order is not fitted to the same images: with few images of each class, some order fits any predictions.
    """
    right = classes == labels
    elsewhere = right_in_fitted_order(labels, classes, outputs)
    return elsewhere if elsewhere.sum() > right.sum() else right


def right_in_fitted_order(labels: Tensor, classes: Tensor, outputs: int) -> Tensor:
    """Whether each of `classes` is the output of its label in the order that fits other images best, bool [n].

    The order is fitted to half of the images of each class and tested on the others, and the reverse.
    """
    rank = torch.zeros_like(labels)
    for label in sorted(set(labels.tolist())):
        rank[labels == label] = torch.arange(int((labels == label).sum()), device=labels.device)
    halves = [rank % 2 == 0, rank % 2 == 1]
    right = torch.zeros_like(labels, dtype=torch.bool)
    for fitted, tested in (halves, halves[::-1]):
        order = best_order(labels[fitted], classes[fitted], outputs)
        expected = [order.get(label, -1) for label in labels[tested].tolist()]
        right[tested] = classes[tested] == labels.new_tensor(expected)
    return right


def check_labels_order(examined: Examined, inputs: Tensor) -> Finding | None:
    """Another order of the classes that explains the predictions far better, also on images it was not fitted to."""
    classes = examined.classes(inputs)
    labels = examined.labels.cpu()
    right = right_in_fitted_order(labels, classes, examined.outputs)
    # A network that is not trained also fits some order better than the given one, but none of them well.
    if not clearly_better(right, classes == labels, 0.2) or right.float().mean() < 0.5:
        return None
    if not far_above_chance(right, labels, classes, examined.outputs):
        return None
    order = best_order(labels, classes, examined.outputs)
    named = examined.class_names
    pairs = [
        f"{label}{f' ({named[label]})' if named else ''} is output {output}"
        for label, output in order.items()
        if label != output
    ]
    more = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
    return Finding(
        "label-order",
        f"the labels do not match the model's outputs: accuracy is {share(classes == labels)}, and {share(right)} if "
        f"class {', class '.join(pairs[:5])}{more}",
        f"write the class {'names' if named else 'numbers'} into a file, one per line, in the order of the outputs, "
        "and pass --classes FILE (Python: load_dataset(..., classes=names))",
    )


def best_order(labels: Tensor, classes: Tensor, outputs: int) -> dict[int, int]:
    """Label -> output, each output at most once, with which most predictions `classes` are right."""
    present = sorted(set(labels.tolist()))
    counts = torch.zeros(len(present), outputs, device="cpu")
    for row, label in enumerate(present):
        counts[row] = torch.bincount(classes[labels == label], minlength=outputs)[:outputs]
    rows, columns = optimize.linear_sum_assignment(counts.numpy(), maximize=True)
    return {present[row]: int(column) for row, column in zip(rows, columns, strict=True)}


def check_width(outputs: int, classes: int | None) -> Finding | None:
    """Another number of outputs than of classes in the data; None classes are not known."""
    if classes in (None, outputs):
        return None
    return Finding(
        "outputs",
        f"the model has {counted(outputs, 'output')}, and the data has {classes} class{'' if classes == 1 else 'es'}",
        "write the names of all its outputs into a file, one per line, in their order, and pass --classes FILE "
        "(Python: load_dataset(..., classes=names))",
    )


def check_sigma(sigma: float, right_at: Callable[[float], Tensor]) -> Finding | None:
    """A sigma that is meant for pixels in 0..255; `right_at` says which images are right under noise, bool [n]."""
    if sigma <= HIDING_SIGMA:
        return None
    large, small = right_at(sigma), right_at(sigma / 255)
    if not clearly_better(small, large, 0.1):
        return None
    return Finding(
        "sigma-units",
        f"noise of sigma {sigma:g} is far larger than pixels in [0, 1]: accuracy is {share(large)} under it, and "
        f"{share(small)} at sigma {sigma:g}/255 = {sigma / 255:.3g}",
        f"give sigma for pixels in [0, 1]: --sigma {sigma / 255:.3g}",
    )


def check_enlarged(images: Tensor) -> Finding | None:
    """Images that were enlarged before the noise: they are exactly what an interpolation of smaller ones gives."""
    if images.ndim != 4:
        return None
    height, width = images.shape[-2:]
    some = images[:: max(1, len(images) // MOST_IMAGES)][:MOST_IMAGES].cpu()
    some = some[some.flatten(1).std(1) > LEAST_CONTRAST]  # uniform images say nothing
    sizes = sorted({*SMALL_SIZES, *(height // k for k in range(2, 9))})
    for size in sizes if len(some) else ():
        if not 8 <= size <= min(height, width) // 2:
            continue
        for mode, antialias in INTERPOLATIONS:
            rows, columns = (projection(n, n * size // height, mode, antialias) for n in (height, width))
            parts = (some[:2], some) if len(some) > 2 else (some,)  # few images first: most candidates end here
            if all(
                (part - rows @ part @ columns).flatten(1).square().mean(1).sqrt().median() < ROUNDING for part in parts
            ):
                return Finding(
                    "resized-images",
                    f"the images were enlarged from {size}x{width * size // height} to {height}x{width} pixels before "
                    "the noise: radii would be lengths of enlarged images",
                    "load them at their original size, and enlarge them in the first layer of the model "
                    "(load_hub and --hub do so)",
                )
    return None


def projection(large: int, small: int, mode: str, antialias: bool) -> Tensor:
    """The projection [large, large] onto all rows that interpolate `small` values; symmetric."""
    unit = torch.eye(small, dtype=torch.float32, device="cpu")[None, None]
    matrix = functional.interpolate(unit, (large, small), mode=mode, antialias=antialias)[0, 0]
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis @ basis.T


def share(right: Tensor) -> str:
    """The share of true values, in percent."""
    return f"{float(right.double().mean()):.0%}"
