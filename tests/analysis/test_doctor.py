"""The doctor: each fault alone is found, with a model that has exactly this fault; healthy models have no finding."""

import copy
import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from tiny import ListDataset, tiny_recipe
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import smoothcert as sc
from smoothcert.analysis.doctor import Diagnosis, doctor
from smoothcert.analysis.doctor_inputs import Examined, best_order, check_input, clearly_better, normalised
from smoothcert.analysis.doctor_modes import misfit
from smoothcert.data import DATASETS, ImageData, mnist
from smoothcert.errors import RequestError
from smoothcert.models import Normalize
from smoothcert.models.hub import HubClassifier
from smoothcert.models.preprocessing import Preprocessing
from smoothcert.training.batch_norm import replace_statistics
from smoothcert.training.checkpoint import load_run
from smoothcert.training.loop import train


@pytest.fixture(scope="module")
def data() -> ImageData:
    return mnist.load_sample("test")


@pytest.fixture(scope="module")
def robust(trained_run: Path) -> nn.Module:
    """A network that was trained under noise of sigma 0.5."""
    return load_run(trained_run).model


class Convolutions(nn.Module):
    """A small network with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 5, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3))
        self.last = nn.Linear(8 * 144, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.layers(images))
        return logits


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """`Convolutions`, trained under noise of sigma 0.5."""
    torch.manual_seed(0)
    model = Convolutions()
    some = mnist.load_sample("train").subset(torch.arange(2048))
    recipe = tiny_recipe(model="mine", epochs=2)
    train(recipe, some, tmp_path_factory.mktemp("runs") / "normed", model=model, device="cpu")
    return model.eval()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """The same network, trained with next to no noise."""
    torch.manual_seed(0)
    model = Convolutions()
    some = mnist.load_sample("train").subset(torch.arange(2048))
    recipe = tiny_recipe(model="mine", epochs=2, sigma=0.001)
    train(recipe, some, tmp_path_factory.mktemp("runs") / "clean", model=model, device="cpu")
    return model.eval()


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code for finding in diagnosis.findings]


class Holder:
    """A callable that hides its modules where eval() does not reach them."""

    __slots__ = ("modules",)

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = list(modules)

    def __call__(self, images: Tensor) -> Tensor:
        for module in self.modules:
            images = module(images)
        return images


FAULTS: dict[str, tuple[Callable[[nn.Module], Any], str, str]] = {
    "bytes": (lambda f: lambda x: f(x / 255), "input-range", r"expects images in 0\.\.255 \(accuracy [78]\d%"),
    "dark": (lambda f: lambda x: f((x + 1) / 2), "normalisation", r"in \[-1, 1\] \(accuracy [78]\d%"),
    "random": (lambda f: lambda x: f(x) + 3 * torch.randn(len(x), 10), "random", "draws random numbers"),
    "random, next to a constant": (
        lambda f: lambda x: f(x) + 3 * torch.randn(len(x), 10) - 1e4,
        "random",
        "draws random numbers",
    ),
    "seeded": (
        lambda f: lambda x: f(x) + 3 * torch.randn(len(x), 10, generator=torch.Generator().manual_seed(3)),
        "random",
        "in another place of its batch",
    ),
    "functional dropout": (lambda f: lambda x: f(functional.dropout(x, 0.5)), "random", "draws random numbers"),
    "order": (
        lambda f: lambda x: f(x)[:, [3, 0, 1, 2, 4, 5, 6, 7, 9, 8]],
        "label-order",
        "class 0 is output 1, class 1 is output 2, class 2 is output 3, class 3 is output 0, class 8 is output 9 and 1",
    ),
    "wide": (
        lambda f: nn.Sequential(f, nn.ConstantPad1d((0, 5), -1e9)),
        "outputs",
        "the model has 15 outputs, and the data has 10 classes",
    ),
    "dropout": (lambda f: Holder(f, nn.Dropout(0.2)), "random", "other logits in each call"),
    "batch norm": (lambda f: Holder(f, nn.BatchNorm1d(10)), "train-mode", "depend on the other images of its batch"),
    "batch norm without statistics": (
        lambda f: nn.Sequential(f, nn.BatchNorm1d(10, track_running_stats=False)),
        "train-mode",
        "depend on the other images of its batch",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_model_is_found_alone(fault: str, robust: nn.Module, data: ImageData) -> None:
    wrap, code, text = FAULTS[fault]
    diagnosis = doctor(wrap(robust), data, sigma=0.5, images=120)
    assert codes(diagnosis) == [code], str(diagnosis)
    (finding,) = diagnosis.findings
    assert re.search(text, finding.problem), finding.problem
    assert finding.advice
    assert "\n" not in str(finding)


@pytest.mark.parametrize("mask", [-1e9, -torch.inf])
@pytest.mark.parametrize("fault", ["dropout", "batch norm"])
def test_a_mode_is_found_next_to_a_masked_class(fault: str, mask: float, robust: nn.Module, data: ImageData) -> None:
    make, code, _ = FAULTS[fault]
    hidden = make(robust)
    diagnosis = doctor(lambda x: hidden(x).index_fill(1, torch.tensor(7), mask), data, sigma=0.25)
    assert code in codes(diagnosis)


@pytest.mark.parametrize("size", [6, 50])
def test_a_model_that_fails_on_larger_batches_is_one_line(size: int, robust: nn.Module, data: ImageData) -> None:
    def failing(images: Tensor) -> Tensor:
        if len(images) == size:
            raise ValueError("too many")
        return robust(images)

    message = r"model: the classifier fails on inputs of shape \[1, 28, 28\] \(ValueError: too many\)"
    with pytest.raises(RequestError, match=message):
        doctor(failing, data, sigma=0.25)


def test_normalisation_of_imagenet_outside_the_model(robust: nn.Module, data: ImageData) -> None:
    """The network gets what a loader of ImageNet gives, and the doctor gives it images in [0, 1]."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images, labels = data.batch(torch.arange(200))
    colour = TensorDataset(images.expand(-1, 3, -1, -1), labels)
    diagnosis = doctor(lambda x: robust((x * std + mean).mean(1, keepdim=True)), colour, sigma=0.5)
    assert codes(diagnosis) == ["normalisation"], str(diagnosis)
    assert "the mean and std of ImageNet (accuracy" in diagnosis.findings[0].problem
    layer = diagnosis.findings[0].advice
    assert "Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))" in layer
    images = (colour.tensors[0] - mean) / std
    outside = doctor(lambda x: robust((x * std + mean).mean(1, keepdim=True)), TensorDataset(images, labels), sigma=0.5)
    assert codes(outside) == ["images-normalised"]
    assert "not in [0, 1]" in outside.findings[0].problem


def test_each_normalisation_of_cifar10_is_tried_and_the_better_one_is_reported() -> None:
    """Classes of grey levels: one image in forty, near the border of its class, needs the right standard deviation."""
    labels = torch.arange(200) % 4 + 3
    levels = (25.5 * (labels + 0.5)).round().to(torch.uint8)
    levels[::40] = (25.5 * labels[::40] + 2).round().to(torch.uint8)
    images = levels.view(-1, 1, 1, 1).expand(-1, 3, 8, 8).clone()
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))

    def network(x: Tensor) -> Tensor:
        level = (x * std + mean).mean((1, 2, 3))
        return -(level.view(-1, 1) - torch.arange(0.05, 1.0, 0.1)).abs()

    published = DATASETS["cifar10"].normalization
    assert published is not None
    data = ImageData(images, labels, 10, "levels", "test", normalization=published)
    (finding,) = doctor(network, data, sigma=0.01, device="cpu").findings
    assert finding.problem.startswith(
        "the model expects images with the mean and std of CIFAR-10 (accuracy 100%), or with the mean and std of "
        "ImageNet (accuracy 100%): on images in [0, 1]"
    )
    assert finding.advice.endswith("Normalize((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)), model)")
    other = normalised(images / 255, published)
    assert int((network(other).argmax(1) != labels).sum()) == 5


def test_channels_in_another_order(robust: nn.Module, data: ImageData) -> None:
    """Red digits on green and blue noise; the second network was trained with blue first."""
    images, labels = data.batch(torch.arange(200))
    others = torch.rand(200, 2, 28, 28, generator=torch.Generator().manual_seed(0))
    red = TensorDataset(torch.cat([images, others], 1), labels)
    assert codes(doctor(lambda x: robust(x[:, :1]), red, sigma=0.5)) == []
    diagnosis = doctor(lambda x: robust(x[:, 2:]), red, sigma=0.5)
    assert codes(diagnosis) == ["channel-order"], str(diagnosis)
    right = float((robust(images).argmax(1) == labels).double().mean())
    assert f"and {right:.0%} with the channels reversed" in diagnosis.findings[0].problem


def test_labels_are_matched_with_the_names_in_a_published_classifier(robust: nn.Module, data: ImageData) -> None:
    class Reversed(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return robust(images).flip(1)

    names = tuple("abcdefghij")
    published = HubClassifier(Reversed(), Preprocessing((0.0,), (1.0,)), names[::-1], grey=True)
    diagnosis = doctor(published, dataclasses.replace(data, class_names=names), sigma=0.5, device="cpu")
    assert diagnosis.healthy, str(diagnosis)


def test_two_faults_at_once(robust: nn.Module, data: ImageData) -> None:
    """Exchanged outputs hide that the model expects other inputs, unless predictions are compared in the best order."""
    diagnosis = doctor(lambda x: robust(x / 255).flip(1), data, sigma=0.5)
    assert codes(diagnosis) == ["input-range", "label-order"], str(diagnosis)


def test_images_in_bytes(robust: nn.Module, data: ImageData) -> None:
    images, labels = data.batch(torch.arange(200))
    floats = DataLoader(TensorDataset(255 * images, labels), batch_size=64)
    assert codes(doctor(lambda x: robust(x / 255), floats, sigma=0.5)) == ["images-range"]
    integers = DataLoader(TensorDataset((255 * images).to(torch.uint8), labels), batch_size=64)
    assert codes(doctor(robust, integers, sigma=0.5)) == []


@pytest.mark.parametrize(("one_in", "found"), [(12, ["normalisation"]), (50, [])])
def test_a_normalisation_that_few_images_need(
    robust: nn.Module, data: ImageData, one_in: int, found: list[str]
) -> None:
    """One image in twelve is wrong if it is not normalised, clearly more than chance; one in fifty is not."""
    images = data.batch(torch.arange(200))[0]
    forgotten = {float(image.sum()) for image in images[::one_in]}

    def network(x: Tensor) -> Tensor:
        is_normalised = x.std((1, 2, 3), keepdim=True) > 0.8  # even with noise, images in [0, 1] have less
        logits: Tensor = robust(torch.where(is_normalised, x * 0.3081 + 0.1307, x))
        wrong = torch.tensor([[float(image.sum()) in forgotten] for image in x])
        return torch.where(wrong, -logits, logits)

    diagnosis = doctor(network, TensorDataset(images, data.labels[:200]), sigma=0.5)
    assert codes(diagnosis) == found, str(diagnosis)


@pytest.mark.parametrize("sigma", [32.0, 127.5])
def test_sigma_in_units_of_bytes(robust: nn.Module, data: ImageData, sigma: float) -> None:
    diagnosis = doctor(robust, data, sigma=sigma)
    assert codes(diagnosis) == ["sigma-units"], str(diagnosis)
    assert diagnosis.findings[0].advice.endswith(f"--sigma {sigma / 255:.3g}")


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "pillow"])
def test_images_enlarged_before_the_noise(robust: nn.Module, data: ImageData, mode: str) -> None:
    images, labels = data.batch(torch.arange(100))
    if mode == "pillow":
        pictures = [Image.fromarray((255 * image[0]).byte().numpy()).resize((84, 84), 2) for image in images]
        large = torch.from_numpy(np.stack(pictures))[:, None] / 255
    else:
        softer = 0.25 + 0.5 * images  # bicubic interpolation stays in [0, 1]
        large = functional.interpolate(softer, (84, 84), mode=mode).clamp(0, 1)
    back = doctor(
        lambda x: robust(functional.interpolate(x, (28, 28), mode="area")), TensorDataset(large, labels), sigma=0.5
    )
    assert "resized-images" in codes(back), str(back)
    assert "from 28x28 to 84x84 pixels" in str(back)


def test_findings_do_not_depend_on_the_default_type_of_torch(robust: nn.Module, data: ImageData) -> None:
    usual = doctor(robust, data, images=20)
    try:
        torch.set_default_dtype(torch.float64)
        other = doctor(robust, data, images=20)
    finally:
        torch.set_default_dtype(torch.float32)
    assert str(other) == str(usual)


def test_a_network_that_was_never_trained_under_noise(clean: nn.Module, data: ImageData) -> None:
    diagnosis = doctor(clean, data, sigma=1.0)
    assert codes(diagnosis) == ["noise"], str(diagnosis)
    assert "fine-tune it under noise, or put a denoiser in front" in diagnosis.findings[0].advice
    accuracies = dict(diagnosis.accuracy_under_noise)
    assert diagnosis.clean_accuracy > accuracies[0.25] > accuracies[1.0] == diagnosis.accuracy(1.0)


@pytest.mark.parametrize(
    ("clean", "noisy", "images", "depends"),
    [(0.8, 0.65, 200, True), (0.65, 0.8, 200, True), (0.8, 0.76, 1000, False), (0.8, 0.65, 20, False)],
)
def test_whether_the_accuracy_depends_on_noise(clean: float, noisy: float, images: int, depends: bool) -> None:
    """In either direction: batch norm that was adapted to noise loses accuracy on images without noise."""
    diagnosis = Diagnosis("a", "b", images, 0.5, clean, ((0.5, noisy),), 0.0, ())
    assert diagnosis.depends_on_noise is depends


def test_a_network_at_chance(data: ImageData) -> None:
    torch.manual_seed(0)
    untrained = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.Flatten(), nn.Linear(10, 10))
    assert codes(doctor(untrained, data, sigma=0.5)) == ["chance"]


def test_running_statistics_that_do_not_fit(normed: nn.Module, data: ImageData) -> None:
    broken = copy.deepcopy(normed)
    broken.layers[1].running_mean.fill_(3.0)
    broken.layers[1].running_var.fill_(100.0)
    diagnosis = doctor(broken, data, sigma=0.5)
    assert codes(diagnosis) == ["batch-statistics"], str(diagnosis)


@dataclasses.dataclass(frozen=True, eq=False)
class Stained:
    """Digits of low contrast in colour noise, and a network with two layers of batch norm."""

    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, data: ImageData, count: int) -> "Stained":
        images, labels = data.batch(torch.arange(count))
        noise = torch.randn(count, 3, 28, 28, generator=torch.Generator().manual_seed(0))
        return cls((0.35 + 0.3 * images + 0.2 * noise).clamp(0, 1), labels)

    def trained(self, first: nn.Module) -> nn.Module:
        """A network that is trained behind `first`, which is not part of it."""
        torch.manual_seed(2)
        layers = [nn.Conv2d(3, 8, 5, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.BatchNorm2d(16)]
        model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(400, 10))
        optimizer = torch.optim.Adam(model.parameters(), 0.005)
        for rows in torch.randperm(2 * len(self.images)).remainder(len(self.images)).split(64):
            functional.cross_entropy(model(first(self.images[rows])), self.labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.eval()


@pytest.mark.parametrize(
    ("first", "images", "code"),
    [
        (Normalize((0.5, 0.5, 0.5), (0.18, 0.18, 0.18)), 200, "normalisation"),  # not exactly a known one
        (Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), 100, "normalisation"),
        (Normalize((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)), 100, "input-range"),
    ],
)
def test_the_scale_is_the_fault_although_the_statistics_of_a_batch_repair_it(
    data: ImageData, first: nn.Module, images: int, code: str
) -> None:
    """The statistics of each batch undo a missing normalisation, and may be more accurate than a similar one."""
    network = Stained.of(mnist.load_sample("train"), 2048).trained(first)
    tested = Stained.of(data, 200)
    diagnosis = doctor(network, TensorDataset(tested.images, tested.labels), sigma=0.1, images=images)
    assert codes(diagnosis) == [code], str(diagnosis)


def test_wrong_statistics_are_found_although_a_normalisation_helps(data: ImageData) -> None:
    """All running means are too large by two standard deviations: larger inputs, which are wrong, make up for some."""
    first = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    network = nn.Sequential(first, Stained.of(mnist.load_sample("train"), 2048).trained(first)).eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.get_buffer("running_mean").add_(2 * layer.get_buffer("running_var").sqrt())
    tested = Stained.of(data, 200)
    rival, _ = check_input(Examined(network, tested.images, tested.labels, outputs=10), tested.images)
    assert rival is not None
    assert rival.code == "normalisation"
    diagnosis = doctor(network, TensorDataset(tested.images, tested.labels), sigma=0.1)
    assert codes(diagnosis) == ["batch-statistics"], str(diagnosis)


def test_misfit_of_statistics_against_the_closed_form() -> None:
    """Of N(0, 1) to N(m, v) the divergence is (1 / v - 1 + log v + m^2 / v) / 2."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Identity()).eval()
    inputs = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0))
    assert misfit(model, inputs) < 0.001
    model[0].running_mean.fill_(0.5)
    model[0].running_var.fill_(2.0)
    assert misfit(model, inputs) == pytest.approx((1 / 2 - 1 + math.log(2) + 0.25 / 2) / 2, abs=0.01)
    assert model[0].running_var[0] == 2


class Energy(nn.Module):
    """Class 1 if the mean of the squared pixels is above its running mean, to which noise adds sigma squared."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, images: Tensor) -> Tensor:
        score = self.norm(images.flatten(1).square().mean(1, keepdim=True))
        return torch.cat([-score, score], 1)


def test_statistics_of_noisy_images_are_right_under_noise() -> None:
    """They do not fit clean images: with the statistics of a clean batch all of those are right."""
    labels = torch.arange(200) % 2
    images = (0.4 + 0.2 * labels).view(-1, 1, 1, 1).expand(-1, 1, 28, 28)
    model = Energy()
    replace_statistics(model, [images + torch.randn(images.shape, generator=torch.Generator().manual_seed(1))])
    adapted = doctor(model, TensorDataset(images, labels), sigma=1.0)
    assert adapted.clean_accuracy == 0.5 < 0.9 < adapted.accuracy(1.0)
    assert codes(adapted) == [], str(adapted)
    model.norm.reset_running_stats()
    assert codes(doctor(model, TensorDataset(images, labels), sigma=0.25)) == ["batch-statistics"]


def test_images_that_are_normalised_twice_say_nothing_about_statistics(normed: nn.Module, data: ImageData) -> None:
    """By the loader and by the model: batch norm with the statistics of such a batch undoes the first."""
    images, labels = data.batch(torch.arange(400))
    twice = TensorDataset((images - 0.5) / 0.1, labels)
    assert codes(doctor(normed, twice, sigma=0.1)) == ["images-normalised"]


def test_healthy_models_have_no_finding(
    robust: nn.Module, normed: nn.Module, trained_run: Path, data: ImageData
) -> None:
    """Also in train mode, as callables, in bf16, with more outputs, and on few or colour images."""
    images, labels = data.batch(torch.arange(400))
    wide = nn.Sequential(robust, nn.ConstantPad1d((0, 5), -1e9))
    healthy: dict[str, tuple[Any, Any]] = {
        "run": (load_run(trained_run), data),
        "batch norm in train mode": (copy.deepcopy(normed).train(), data),
        "callable": (lambda x: {"logits": normed(x)}, data),
        "smoothed": (sc.SmoothedClassifier(robust, sigma=0.5), data),
        "bf16": (copy.deepcopy(robust).to(torch.bfloat16), data),
        "more outputs": (wide, TensorDataset(images, labels)),
        "few images": (robust, TensorDataset(images[:20], labels[:20])),
        "batches": (robust, [(images[:200], labels[:200]), (images[200:], labels[200:])]),
        "colour": (lambda x: robust(x.mean(1, keepdim=True)), TensorDataset(images.expand(-1, 3, -1, -1), labels)),
        "scale does not matter": (lambda x: robust(x / x.amax((1, 2, 3), keepdim=True)), data),
    }
    for name, (model, source) in healthy.items():
        diagnosis = doctor(model, source, sigma=0.5, images=100)
        assert codes(diagnosis) == [], f"{name}: {diagnosis}"
        assert diagnosis.healthy
    assert normed.training is False


def test_measurements_are_those_of_a_plain_loop(robust: nn.Module, data: ImageData) -> None:
    diagnosis = doctor(robust, data, sigma=0.3, images=50, seed=3)
    images, labels = data.batch(torch.arange(50) * len(data) // 50)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(3))
    for sigma in (0.12, 0.25, 0.3, 0.5, 1.0):
        right = (robust(images + sigma * noise).argmax(1) == labels).double().mean().item()
        assert diagnosis.accuracy(sigma) == pytest.approx(right)
    assert diagnosis.clean_accuracy == pytest.approx((robust(images).argmax(1) == labels).double().mean().item())
    assert diagnosis == dataclasses.replace(
        doctor(robust, data, sigma=0.3, images=50, seed=3), seconds_per_image=diagnosis.seconds_per_image
    )
    assert diagnosis.plot().axes[0].lines[0].get_ydata()[0] == pytest.approx(100 * diagnosis.clean_accuracy)
    with pytest.raises(RequestError, match=r"sigma: expected one of 0, 0\.12, 0\.25, 0\.3, 0\.5, 1, got 2"):
        diagnosis.accuracy(2.0)


@pytest.mark.parametrize(("kind", "largest"), [("uniform", 3**0.5), ("laplace", float("inf"))])
def test_noise_is_of_the_kind_of_a_smoothed_classifier(kind: str, largest: float, data: ImageData) -> None:
    """The noise that a network sees has standard deviation sigma; uniform noise ends at sqrt(3) sigma."""
    seen: list[Tensor] = []

    def network(images: Tensor) -> Tensor:
        seen.append(images - plain[: len(images)])
        return torch.eye(10)[torch.zeros(len(images), dtype=torch.long)]

    plain = data.batch(torch.arange(50) * len(data) // 50)[0]
    doctor(sc.SmoothedClassifier(network, sigma=0.3, num_classes=10, noise=kind), data, images=50)
    noise = next(one for one in seen if len(one) == 50 and 0.29 < one.std() < 0.31)
    assert noise.abs().max() <= 0.3 * largest + 1e-6
    kurtosis = ((noise / noise.std()) ** 4).mean().item()  # 1.8 for uniform, 3 for Gaussian, 6 for Laplace noise
    assert kurtosis == pytest.approx({"uniform": 1.8, "laplace": 6.0}[kind], rel=0.1)


@pytest.mark.parametrize(
    ("model", "source", "message"),
    [
        (lambda x: torch.zeros(len(x), 5), None, "has 5 outputs, but there are labels from 0 to 9"),
        (lambda x: (torch.zeros(len(x), 10), 1), None, "got tuple; wrap it"),
        (lambda x: torch.full((len(x), 10), torch.nan), None, "returned NaN for an input without noise"),
        (nn.Linear(3, 10), None, r"fails on inputs of shape \[1, 28, 28\]"),
        (None, [torch.zeros(2, 1, 28, 28)], "got none with labels"),
        (None, [], "got none"),
        (
            None,
            [(torch.zeros(1, 1, s, s), torch.tensor([0])) for s in (28, 29)],
            r"one shape, got \[1, 28, 28\] and \[1, 29",
        ),
        (None, [(torch.full((1, 1, 28, 28), torch.nan), torch.tensor([0]))], "expected finite pixels, got NaN"),
        (None, [(torch.zeros(1, 1, 28, 28), torch.tensor([-1]))], "there are labels from -1 to -1; .* numbered from 0"),
        (
            None,
            ListDataset([(Image.new("L", (28, 28)), 0)]),
            r"\(TypeError: .*PIL.* with torchvision.transforms.ToTensor",
        ),
        (None, torch.zeros(2, 1, 28, 28), "expected a DataLoader"),
    ],
)
def test_wrong_requests_are_one_line(model: Any, source: Any, message: str, robust: nn.Module, data: ImageData) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        doctor(robust if model is None else model, data if source is None else source)
    assert "\n" not in str(caught.value)


def test_inputs_that_are_no_images_are_examined() -> None:
    rows = torch.rand(20, 32, generator=torch.Generator().manual_seed(0))
    sharp = nn.Linear(32, 32)
    sharp.weight.data, sharp.bias.data = torch.eye(32), torch.zeros(32)
    diagnosis = doctor(sharp, TensorDataset(rows, rows.argmax(1)), images=20)
    assert (diagnosis.images, diagnosis.clean_accuracy) == (20, 1.0)


def test_a_single_image_says_nothing_about_statistics(normed: nn.Module, data: ImageData) -> None:
    assert doctor(normed, data, images=1).images == 1


def test_no_images_are_refused(robust: nn.Module, data: ImageData) -> None:
    with pytest.raises(RequestError, match="images: expected an integer of at least 1, got 0"):
        doctor(robust, data, images=0)


def test_numbers_of_another_type_are_refused(robust: nn.Module, data: ImageData) -> None:
    with pytest.raises(RequestError, match=r"images: expected an integer of at least 1, got 20\.5"):
        doctor(robust, data, images=20.5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="seed: expected an integer, got None"):
        doctor(robust, data, seed=None)  # type: ignore[arg-type]


def test_a_loader_without_batches_is_examined(robust: nn.Module, data: ImageData) -> None:
    images = TensorDataset(*data.batch(torch.arange(40)))
    assert doctor(robust, DataLoader(images, batch_size=None)).clean_accuracy == doctor(robust, images).clean_accuracy


def test_a_cascade_is_refused(robust: nn.Module, clean: nn.Module, data: ImageData) -> None:
    """The accuracy of its first stage would pass for that of the cascade."""
    stages = [sc.SmoothedClassifier(model, sigma=sigma) for model, sigma in ((robust, 0.5), (clean, 0.25))]
    cascade: Any = sc.Cascade(stages)
    with pytest.raises(RequestError, match="expected one classifier, got a cascade; examine each of its stages alone"):
        doctor(cascade, data, images=50)


def test_best_order_against_all_permutations() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        labels, classes = (torch.randint(0, 4, (30,), generator=generator) for _ in range(2))
        order = best_order(labels, classes, 4)
        right = sum(order[label] == output for label, output in zip(labels.tolist(), classes.tolist(), strict=True))
        most = max(
            sum(p[label] == output for label, output in zip(labels.tolist(), classes.tolist(), strict=True))
            for p in itertools.permutations(range(4))
        )
        assert right == most


def test_comparisons_need_a_gain_and_significance() -> None:
    old = torch.zeros(100, dtype=torch.bool)
    for wins, expected in ((9, False), (10, True), (40, True)):
        assert clearly_better(torch.arange(100) < wins, old, 0.1) is expected
    assert not clearly_better(torch.arange(10) < 9, torch.zeros(10, dtype=torch.bool) | (torch.arange(10) > 8), 0.1)
    assert not clearly_better(torch.arange(8) < 8, torch.arange(8) > 8, 0.1)  # 8 of 8: 1 in 256 by chance


def test_accuracies_are_those_of_a_half_space() -> None:
    """Each image is at a known distance d from the boundary: noise leaves it right with probability Phi(d / sigma)."""
    count, distance = 4000, 0.3
    labels = torch.arange(count) % 2
    images = (0.5 + (2 * labels - 1) * distance / 4).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)

    def half_space(inputs: Tensor) -> Tensor:
        score = inputs.flatten(1).sum(1) / 4 - 2
        return torch.stack([-score, score], dim=1)

    diagnosis = doctor(half_space, TensorDataset(images, labels), sigma=0.7, images=count)
    assert diagnosis.clean_accuracy == 1
    assert [sigma for sigma, _ in diagnosis.accuracy_under_noise] == [0.12, 0.25, 0.5, 0.7, 1.0]
    for sigma, accuracy in diagnosis.accuracy_under_noise:
        expected = float(stats.norm.cdf(distance / sigma))
        tail = stats.binom.cdf(round(accuracy * count), count, expected)
        assert 1e-6 < tail < 1 - 1e-6 or abs(accuracy - expected) < 1e-3, (sigma, accuracy, expected)


@pytest.mark.parametrize("seed", range(6))
def test_no_scale_is_found_for_networks_that_are_not_trained(seed: int) -> None:
    """One image of each class: some order of a thousand classes fits any predictions that differ."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(800, 1000)]
    images = TensorDataset(torch.rand(200, 3, 32, 32) * torch.rand(200, 3, 1, 1), 5 * torch.arange(200))
    assert codes(doctor(nn.Sequential(*layers), images)) == ["chance"]


def test_accuracies_in_a_finding_are_those_of_the_model(robust: nn.Module, data: ImageData) -> None:
    images, labels = data.batch(torch.arange(200))

    def accuracy(inputs: Tensor) -> str:
        with torch.no_grad():
            return f"{(robust(inputs / 255).argmax(1) == labels).double().mean():.0%}"

    diagnosis = doctor(lambda x: robust(x / 255), TensorDataset(images, labels), sigma=0.5)
    (finding,) = diagnosis.findings
    assert f"in 0..255 (accuracy {accuracy(255 * images)}):" in finding.problem
    assert finding.problem.endswith(f"its accuracy is {accuracy(images)}")
    assert accuracy(images) == f"{diagnosis.clean_accuracy:.0%}"


def test_scale_and_order_of_the_labels_are_found_together(robust: nn.Module, data: ImageData) -> None:
    diagnosis = doctor(lambda x: robust(x / 255)[:, [3, 0, 1, 2, 4, 5, 6, 7, 9, 8]], data, sigma=0.5, images=200)
    assert codes(diagnosis) == ["input-range", "label-order"], str(diagnosis)
    assert diagnosis.findings[0].problem.endswith("both with the classes in the order that fits best")


def test_sigma_is_not_judged_by_chance(data: ImageData) -> None:
    """Classes that have nothing to do with the images: accuracies at sigma 25 and 25/255 differ by chance only."""
    weights = 1e6 * torch.arange(784.0, dtype=torch.float64).sin()

    def unrelated(images: Tensor) -> Tensor:
        return torch.eye(10)[(images.flatten(1).double() @ weights).long() % 10]

    for seed in range(10):
        assert "sigma-units" not in codes(doctor(unrelated, data, sigma=25.0, seed=seed))


def test_a_scale_that_is_worse_under_noise_is_not_advised() -> None:
    """In 0..255 the model looks at one pixel: right on clean images, and right with probability Phi(0.03 / sigma)."""
    labels = torch.arange(200) % 2
    bright = torch.where(torch.arange(200) % 10 < 3, 1 - labels, labels)  # the mean of 30% of the images misleads
    images = (0.3 + 0.4 * bright)[:, None, None, None].expand(-1, 1, 8, 8).clone()
    images[:, 0, 0, 0] = 0.47 + 0.06 * labels

    def model(x: Tensor) -> Tensor:
        one = x[:, 0, 0, 0] - 127.5
        score = torch.where(x.flatten(1).abs().amax(1) > 20, one, x.flatten(1).mean(1) - 0.5)
        return torch.stack([-score, score], 1)

    loader = DataLoader(TensorDataset(images, labels), batch_size=50)
    assert codes(doctor(model, loader, sigma=0.5)) == []
    assert codes(doctor(model, loader, sigma=0.02)) == ["input-range"], "there, one pixel is better under noise too"


@pytest.mark.parametrize("most", [0.8, 0.95, 1.0])
def test_no_other_fault_is_found_for_networks_that_are_not_trained_on_unbalanced_classes(most: float) -> None:
    """They assign one class to all images: another order, scale or batch gives them that of most images."""
    for seed in range(12):
        torch.manual_seed(seed)
        images = 0.6 * torch.rand(100, 3, 1, 1) + 0.4 * torch.rand(100, 3, 28, 28)
        labels = torch.full((100,), seed % 2)
        labels[: round(100 * (1 - most))] = 1 - seed % 2
        layers = (
            nn.Conv2d(3, 8, 3, 2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1352, 2 + 8 * (seed % 3)),
        )
        found = codes(doctor(nn.Sequential(*layers), TensorDataset(images, labels), images=100))
        assert set(found) <= {"chance", "noise"}
