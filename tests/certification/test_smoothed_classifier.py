"""SmoothedClassifier: a module with tensors in and out, clear refusals, seeds, and the command line's certificates."""

import copy
import doctest
import itertools
import re
import shutil
import threading
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import ListDataset
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import smoothcert as sc
import smoothcert.certification.smoothed_classifier as module
from smoothcert import ABSTAIN, Certificate, CertificateBatch, RequestError, SmoothedClassifier
from smoothcert.classifier import check_logits, evaluating
from smoothcert.data import ImageData
from smoothcert.io.results import only_writer
from smoothcert.models import Normalize
from smoothcert.noise import Gaussian
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.smoothing.rules import Rule
from smoothcert.smoothing.votes import VoteCounter
from smoothcert.training.checkpoint import load_run


def brightness(images: Tensor) -> Tensor:
    mean = images.flatten(1).mean(1)
    return torch.stack([0.5 - mean, mean - 0.5], dim=1)


def smoothed(classifier: Any = brightness, **changes: Any) -> SmoothedClassifier:
    return SmoothedClassifier(classifier, **({"sigma": 0.5} | changes))


def cnn(channels: int = 3, classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(channels, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, classes)]
    return nn.Sequential(*layers)


def test_the_docstring_example_runs() -> None:
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 2
    assert result.failed == 0


IMAGES = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
BAD_INPUT = {
    "list": ([[0.5]], "expected a tensor .* use torch.as_tensor"),
    "list of images": ([torch.zeros(1, 4, 4)], "got list; use torch.stack"),
    "array": (np.zeros((1, 1, 4, 4)), "got ndarray; use torch.as_tensor"),
    "loader": (DataLoader(TensorDataset(IMAGES)), "certify_loader for a DataLoader"),
    "one dimension": (torch.zeros(4), r"got shape \[4\]; add a batch dimension with x\[None\]"),
    "bytes": (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), r"divide bytes by 255: x.float\(\) / 255"),
    "empty": (torch.zeros(0, 1, 4, 4), "expected at least one"),
    "nan": (torch.full((1, 1, 4, 4), float("nan")), "NaN"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_wrong_inputs_are_refused(case: str) -> None:
    x, message = BAD_INPUT[case]
    for call in (smoothed(), smoothed().predict, smoothed().certify):
        with pytest.raises(RequestError, match=message) as caught:
            call(x)
        assert "\n" not in str(caught.value)


def nan_weights() -> nn.Module:
    model = cnn()
    nn.init.constant_(model[-1].bias, float("nan"))
    return model


BAD_CLASSIFIERS = {
    "dict without logits": (
        lambda x: {"scores": x, "loss": 1},
        "got dict with the keys scores, loss; return the logits",
    ),
    "tuple": (lambda x: (brightness(x), x), r"got tuple; wrap it: lambda x: model\(x\)\[0\]"),
    "array": (lambda x: brightness(x).numpy(), r"got ndarray; return torch.as_tensor\(array\)"),
    "text": (lambda x: "text", "expected a tensor of logits, .* got str"),
    "class indices": (lambda x: brightness(x).argmax(1), r"got \[2\]; .*one score per class, such as one_hot"),
    "binary score": (lambda x: brightness(x)[:, :1], r"got \[2, 1\]; for one logit z .*torch.cat"),
    "binary scores without a dimension": (lambda x: brightness(x)[:, 0], r"got \[2\]; for one logit z .*torch.stack"),
    "one row": (lambda x: brightness(x)[:1], r"expected logits of shape \[2, classes\], got \[1, 2\]"),
    "truth values": (lambda x: brightness(x) > 0, r"expected real numbers as logits, got torch\.bool; return floats"),
    "complex": (lambda x: brightness(x) + 0j, r"expected real numbers as logits, got torch\.complex64"),
    "wrong channels": (cnn(channels=1), r"fails on inputs of shape \[3, 8, 8\] \(RuntimeError"),
    "exception": (lambda x: {}["key"], r"fails on inputs .* \(KeyError"),
    "fixed batch size": (lambda x: brightness(x.view(2, 3, 8, 8)), r"fails on inputs .* \(RuntimeError"),
    "nan logits": (nan_weights(), "returned NaN for an input without noise"),
    "another device": (cnn().to("meta"), r"expected them on meta, .* got cpu; use x.to\('meta'\)"),
}


@pytest.mark.parametrize("case", BAD_CLASSIFIERS)
def test_wrong_classifiers_are_refused(case: str) -> None:
    classifier, message = BAD_CLASSIFIERS[case]
    for call in (smoothed(classifier), smoothed(classifier).predict, smoothed(classifier).certify):
        with pytest.raises(RequestError, match=message) as caught:
            call(IMAGES)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("normalized", [False, True])
def test_channels_last_are_refused_with_what_to_do(normalized: bool) -> None:
    model = nn.Sequential(Normalize((0.5,) * 3, (0.2,) * 3), cnn()) if normalized else cnn()
    images = IMAGES.permute(0, 2, 3, 1)
    for call in (smoothed(model).certify, smoothed(model).predict, lambda x: next(smoothed(model).certify_loader([x]))):
        for given in (images, images[:1]):
            with pytest.raises(RequestError, match=r"use images\.permute\(0, 3, 1, 2\)") as caught:
                call(given)
            assert "\n" not in str(caught.value)
    assert len(smoothed(model).certify(images.permute(0, 3, 1, 2), n=20)) == len(images)


def test_a_path_of_a_run_in_place_of_its_model_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"expected a callable on batches, got str; give a model, such as load\(RUN\)"
    ):
        sc.SmoothedClassifier("runs/a", sigma=0.5)  # type: ignore[arg-type]


def test_a_class_in_place_of_its_instance_is_refused() -> None:
    with pytest.raises(RequestError, match=r"got the class Linear; give an instance .* such as Linear\(\.\.\.\)"):
        sc.SmoothedClassifier(nn.Linear, sigma=0.5)


def test_a_smoothed_classifier_is_not_smoothed_again(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"got a SmoothedClassifier, which adds noise itself; give its \.classifier"):
        sc.SmoothedClassifier(smoothed(cnn()), sigma=0.5)
    with pytest.raises(RequestError, match="got a SmoothedClassifier, which adds noise itself"):
        sc.SmoothedClassifier(sc.Ensemble([smoothed(cnn()), smoothed(cnn())]), sigma=0.5)
    with pytest.raises(RequestError, match="model: expected a network, got a SmoothedClassifier"):
        sc.certify_dataset(
            sc.Ensemble([smoothed(cnn()), smoothed(cnn())]),
            sc.load_dataset("mnist-sample", "test"),
            tmp_path / "a.tsv",
            sigma=0.5,
        )


def test_a_wrong_number_of_classes_is_refused_with_the_right_one() -> None:
    with pytest.raises(RequestError, match=r"expected logits of shape \[2, 3\], got \[2, 2\]; set num_classes to 2"):
        smoothed(num_classes=3).certify(IMAGES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sigma": 0}, "sigma: expected"),
        ({"sigma": None}, "sigma: expected a number > 0, got None"),
        ({"sigma": "small"}, "sigma: expected a number > 0, got 'small'"),
        ({"num_classes": 1}, "num_classes: expected an integer of at least 2, got 1"),
        ({"num_classes": 2.0}, r"num_classes: expected an integer of at least 2, got 2\.0"),
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1, got 0"),
        ({"batch_size": "8"}, "batch_size: expected an integer of at least 1, got '8'"),
        ({"votes": 0}, "votes: expected an integer of at least 1, got 0"),
        ({"noise": ["gaussian"]}, r"noise: expected one of gaussian, .*, got \['gaussian'\]"),
        ({"classifier": 3}, "expected a callable"),
        ({"precision": "fp8"}, "precision: expected one of auto, fp32, bf16, fp16, got fp8"),
        ({"noise": "pink"}, "noise: expected one of gaussian, .*, got pink"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        smoothed(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n: expected"),
        ({"n0": 0}, "n0: expected"),
        ({"alpha": 1.0}, "alpha: expected"),
        ({"seed": -1}, "seed: expected"),
        ({"indices": [0, 1]}, "indices: expected 3 different integers"),
        ({"indices": [0, 1, 1]}, "indices: expected 3 different integers"),
        ({"indices": [-1, 0, 1]}, "indices: expected 3 different integers >= 0"),
        ({"bound": "both"}, "bound: expected"),
        ({"radii": (0.5, 0.25)}, "radii: expected rising radii"),
        ({"radii": (0.5,), "until_radius": 0.5}, "until_radius or radii, not both"),
        ({"radii": (0.5,), "radius_loss": 0.1}, "radius_loss: expected none together with radii"),
        ({"until_radius": 0.5, "radius_loss": 0.1}, "radius_loss: expected none together with radii or until_radius"),
        ({"until_radius": 50.0}, "can never be certified"),
        ({"sound": True}, "expected bytes divided by 255"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        smoothed().certify(IMAGES, **options)


@pytest.mark.parametrize("case", ["[n, 1]", "[n]"])
def test_the_advice_for_one_score_gives_its_classifier(case: str) -> None:
    """The two classes are those of z > 0 and of p > 1/2, and the softmax of the logits is the probability."""
    z = torch.tensor([-2.0, -0.1, 0.3, 4.0])
    z = z[:, None] if case == "[n, 1]" else z
    with pytest.raises(RequestError) as caught:
        check_logits(z, len(z))
    for_logit, for_probability = re.findall(r"torch\.(\w+)\((\[.*?\]), 1\)", str(caught.value))
    values = {"[torch.zeros_like(z), z]": [torch.zeros_like(z), z], "[1 - p, p]": [1 - z.sigmoid(), z.sigmoid()]}
    logits, probabilities = (getattr(torch, f)(values[text], 1) for f, text in (for_logit, for_probability))
    check_logits(logits, len(z))
    assert torch.allclose(logits.softmax(1), probabilities)
    assert logits.argmax(1).tolist() == probabilities.argmax(1).tolist() == [0, 0, 1, 1]


def test_too_few_votes_for_any_certificate_give_a_warning() -> None:
    with pytest.warns(UserWarning, match="n = 9 votes cannot certify any image .*: all abstain; n = 10 can"):
        assert bool(smoothed().certify(IMAGES, n=9).abstained.all())
    with pytest.warns(UserWarning, match="n = 9 votes cannot certify any image .*; n = 10 can") as caught:
        assert len([*smoothed().certify_loader([IMAGES, IMAGES], n=9)]) == 2
    assert [warning.filename for warning in caught] == [__file__], "once, at the loop over the batches"
    with pytest.warns(UserWarning, match=r"n = 10 votes cannot decide any class .*: all abstain; n = 11 can") as caught:
        assert bool(smoothed().predict(IMAGES, n=10).abstained.all())
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smoothed().predict(IMAGES, n=11)
        smoothed().certify(IMAGES, n=10)
        assert len([*smoothed().certify_loader([IMAGES], n=10)]) == 1


def test_images_outside_the_unit_interval_give_a_warning_or_an_error() -> None:
    with pytest.warns(UserWarning, match=r"expected values in \[0, 1\], got .* normalisation belongs inside"):
        smoothed().certify(IMAGES - 0.5, n=100)
    with pytest.warns(UserWarning, match=r"expected values in \[0, 1\], got .* divide bytes by 255"):
        smoothed(cnn()).certify(255 * IMAGES[0], n=100)  # one image without a batch dimension
    with pytest.raises(RequestError, match="normalisation belongs inside the classifier"):
        smoothed(strict=True).certify(IMAGES - 0.5, n=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smoothed().certify(torch.randn(4, 7), n=100)  # tabular data have no such interval


def test_it_is_a_module() -> None:
    model = cnn()
    wrapped = smoothed(model, sigma=0.25)
    assert set(wrapped.state_dict()) == {f"classifier.{name}" for name in model.state_dict()}
    wrapped.load_state_dict({name: value + 1 for name, value in wrapped.state_dict().items()})
    assert next(wrapped.to(torch.float64).parameters()).dtype == torch.float64
    assert wrapped.eval() is wrapped
    assert not model.training
    assert "sigma=0.25, noise=gaussian" in repr(wrapped)
    assert smoothed().state_dict() == {}


def test_a_module_in_train_mode_is_evaluated_in_eval_mode() -> None:
    model = cnn()
    expected = smoothed(cnn().eval()).certify(IMAGES, n=300, seed=1)
    model.train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    result = smoothed(model).certify(IMAGES, n=300, seed=1)
    smoothed(model)(IMAGES)
    assert list(result) == list(expected)
    assert model.training
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 1, 2]), torch.tensor([0, -1, 1]), torch.tensor([True, False, True])]
)
def test_labels_that_a_file_cannot_hold_are_refused(labels: Tensor, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data: expected labels .* got .*; "):
        list(smoothed().certify_loader([(IMAGES, labels)], n=100, out=tmp_path / "a.tsv"))
    assert not (tmp_path / "a.tsv").exists()


def test_batches_without_labels_may_be_lists() -> None:
    (batch,) = smoothed().certify_loader(DataLoader(TensorDataset(IMAGES), batch_size=3), n=100)
    assert len(batch) == 3
    assert batch.labels is None


class Wrapped:
    """A callable that is not a module."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, images: Tensor) -> Any:
        return self.model(images)


WRAPPERS: dict[str, Any] = {
    "function": lambda model: lambda x: model(x),
    "method of the module": lambda model: model.forward,
    "partial": partial,
    "object": Wrapped,
    "method of an object": lambda model: Wrapped(model).__call__,
    "object in an object": lambda model: Wrapped(Wrapped(model)),  # type: ignore[arg-type]
    "list": lambda model: (lambda models: lambda x: models[0](x))([model]),
    "dictionary": lambda model: (lambda models: lambda x: models["a"](x))({"a": model}),
    "decorated function": lambda model: torch.no_grad()(lambda x: model(x)),
    "function of a function": lambda model: (lambda inner: lambda x: inner(x))(lambda x: model(x)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_module_inside_a_callable_is_evaluated_in_eval_mode(wrap: Any) -> None:
    model = cnn().train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    result = smoothed(wrap(model)).certify(IMAGES, n=300, seed=1)
    expected = smoothed(wrap(cnn().eval())).certify(IMAGES, n=300, seed=1)
    assert list(result) == list(expected)
    assert model.training
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


GLOBAL_NETWORK = cnn().train()


def test_a_global_network_inside_a_comprehension_is_evaluated_in_eval_mode() -> None:
    def one_by_one(images: Tensor) -> Tensor:  # batch norm in train mode would normalise each image alone
        return torch.cat([GLOBAL_NETWORK(image[None]) for image in images])

    expected = copy.deepcopy(GLOBAL_NETWORK).eval()(IMAGES)
    with evaluating(one_by_one):
        assert torch.allclose(one_by_one(IMAGES), expected, atol=1e-6)
    assert GLOBAL_NETWORK.training


def test_logits_that_depend_on_other_inputs_are_refused(tmp_path: Path) -> None:
    def normalized(images: Tensor) -> Tensor:
        return brightness(images - images.mean(0))

    with pytest.raises(RequestError, match="depend on one input alone"):
        smoothed(normalized).certify(IMAGES, n=100)
    with pytest.raises(RequestError, match="depend on one input alone"):
        sc.certify_dataset(normalized, TensorDataset(IMAGES, torch.arange(3) % 2), tmp_path / "a.tsv", sigma=0.5)


def test_a_changed_module_is_seen_by_the_next_call() -> None:
    model = cnn()
    wrapped = smoothed(model)
    before = wrapped.certify(IMAGES, n=300, seed=1).counts
    model[-1].bias.data += torch.tensor([0.0, 9.0, 0.0, 0.0])
    after = wrapped.certify(IMAGES, n=300, seed=1).counts
    assert (before[:, 1] < 300).all()
    assert (after[:, 1] == 300).all()


def test_the_results_are_tensors_and_records() -> None:
    result = smoothed().certify(torch.tensor([0.1, 0.5, 0.95]).view(3, 1, 1, 1), n=500, seed=3)
    assert result.prediction.tolist() == [record.prediction for record in result]
    assert result.radius.tolist() == [record.radius for record in result]
    assert result.radius.dtype == torch.float64
    assert result.abstained.tolist() == [record.abstained for record in result] == [False, True, False]
    assert result.n.tolist() == [500] * 3
    for row, record in zip(result.counts, result, strict=True):
        assert {c: k for c, k in enumerate(row.tolist()) if k} == dict(record.votes)
    assert isinstance(result[1], Certificate)
    assert result[-1] == result.records[2]
    assert result[~result.abstained].prediction.tolist() == [0, 1]
    assert list(result[1:]) == list(result[[1, 2]]) == list(result.to("cpu"))[1:]
    assert len(result) == 3
    assert repr(result).splitlines()[2] == f"  abstained, {result[1].count} of 500 votes"


def test_a_selection_keeps_the_label_and_the_index_of_each_input() -> None:
    (batch,) = smoothed().certify_loader([(IMAGES, torch.tensor([0, 1, 1]))], n=100)
    for some in (batch[[2, 0]], batch[torch.tensor([2, 0])], batch.to("cpu")[[2, 0]]):
        assert list(some) == [batch[2], batch[0]]
        assert some.labels is not None
        assert some.labels.tolist() == [1, 0]
        assert some.indices == (2, 0)


def test_an_empty_selection_has_no_records() -> None:
    result = smoothed().certify(IMAGES, n=100)
    assert len(result[torch.zeros(3, dtype=torch.bool)]) == 0


@pytest.mark.parametrize("shape", [(5,), (2, 16), (1, 4, 4), (2, 3, 4, 4)])
def test_any_feature_shape_is_certified(shape: tuple[int, ...]) -> None:
    x = torch.rand(4, *shape)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 3))
    result = smoothed(layers).certify(x, n=200, seed=0)
    assert result.counts.shape == (4, 3)
    probabilities = smoothed(layers)(x, n=200)
    assert probabilities.shape == (4, 3)
    assert torch.allclose(probabilities.sum(1), torch.ones(4))


def test_one_image_is_a_batch_of_one_if_the_classifier_needs_it(capfd: pytest.CaptureFixture[str]) -> None:
    together = smoothed(cnn()).certify(IMAGES, n=300, seed=1)
    single = smoothed(cnn()).certify(IMAGES[0], n=300, seed=1)
    assert list(single) == [together[0]]
    grey = smoothed(cnn(channels=1)).certify(IMAGES[0, :1], n=300)
    assert len(grey) == 1
    # The trial with a batch of c inputs fails inside a traced module, which would print a traceback.
    layers = (Normalize((0.5,) * 3, (0.5,) * 3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    assert len(smoothed(nn.Sequential(*layers)).certify(IMAGES[0], n=300)) == 1
    assert capfd.readouterr().err == ""
    # A classifier of matrices takes the first dimension as the batch.
    assert len(smoothed().certify(IMAGES[0], n=300)) == 3
    with pytest.raises(RequestError, match=r"shape \[8, 8\].*; as one image: .* shape \[3, 8, 8\]"):
        smoothed(cnn(channels=2)).certify(IMAGES[0])


class Output(OrderedDict[str, Any]):
    """As Hugging Face models return: a mapping that has its entries as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize("wrap", [Output, dict, SimpleNamespace])
def test_logits_are_found_in_objects_and_mappings(wrap: Any) -> None:
    def model(images: Tensor) -> Any:
        return wrap(loss=None, logits=brightness(images))

    assert list(smoothed(model).certify(IMAGES, n=200, seed=1)) == list(smoothed().certify(IMAGES, n=200, seed=1))


def test_probabilities_are_shares_of_votes() -> None:
    """Class 1 where the pixel is above 0.5, at 0.75: Phi(0.25 / 0.5)."""
    x = torch.full((1, 1, 1, 1), 0.75)
    wrapped = smoothed(votes=4000)
    assert float(wrapped(x)[0, 1]) == pytest.approx(0.6915, abs=5 * (0.25 / 4000) ** 0.5)
    assert wrapped(x, n=10).mul(10).frac().abs().max() < 1e-6
    assert torch.equal(wrapped(x, n=50, seed=2), wrapped(x, n=50, seed=2))
    assert wrapped.predict(x, n=4000).prediction.tolist() == [1]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, {}),
        ({"radii": (0.1, 0.2)}, {"radii": (0.1, 0.2), "hold_back": True}),
        ({"until_radius": 0.1}, {"radii": (0.1,)}),
        ({"radius_loss": 0.1}, {"radius_loss": 0.1}),
        ({"bound": "two-sided"}, {"bound": "two-sided"}),
    ],
)
def test_every_rule_is_reached(options: dict[str, Any], rule: dict[str, Any]) -> None:
    expected = Rule(100, 2000, 0.001, **rule).certify(
        VoteCounter(brightness, Gaussian(0.5), 2, 500), IMAGES, [(3, index) for index in (7, 2, 5)]
    )
    found = smoothed(batch_size=500).certify(IMAGES, n=2000, seed=3, indices=[7, 2, 5], **options)
    assert list(found) == expected


def test_sound_certificates_use_integer_noise() -> None:
    images = torch.tensor([0.0, 51.0, 255.0]).view(3, 1, 1, 1) / 255
    result = smoothed(sigma=0.25).certify(images, n=500, sound=True, seed=1)
    assert result.prediction.tolist() == [0, 0, 1]
    bounds = [error_upper_bound(record.count, 500, 0.001) + 1e-10 for record in result]  # with the error of the sampler
    assert result.radius.tolist() == [Gaussian(0.25).radius(bound) for bound in bounds]


def test_sound_predictions_draw_the_noise_of_sound_certificates() -> None:
    """A network that tells sums of bytes from other floats: only with integer noise are all its inputs such sums."""

    def reads_low_bits(inputs: torch.Tensor) -> torch.Tensor:
        bytes_ = (inputs.double() * 255).round()
        exact = ((bytes_ / 255).float() == inputs).flatten(1).all(1)
        return torch.stack([~exact, exact], 1).float()

    images = torch.tensor([10.0, 200.0]).view(2, 1, 1, 1).expand(2, 1, 4, 4) / 255
    classifier = SmoothedClassifier(reads_low_bits, sigma=0.25)
    assert classifier.certify(images, n=500, sound=True).prediction.tolist() == [1, 1]
    assert classifier.predict(images, n=500, sound=True).prediction.tolist() == [1, 1]
    assert classifier.predict(images, n=500).prediction.tolist() == [0, 0]


def test_a_seed_replays_and_no_seed_is_fresh() -> None:
    x = torch.full((1, 1, 2, 2), 0.55)
    replay = [smoothed().certify(x, n=1000, seed=3)[0].votes for _ in range(2)]
    fresh = {smoothed().certify(x, n=1000)[0].votes for _ in range(6)}
    assert replay[0] == replay[1]
    assert len(fresh) > 1


def test_the_noise_of_an_input_does_not_depend_on_its_place() -> None:
    x = 0.5 + 0.1 * torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    together = smoothed().certify(x, n=1000, seed=3)
    order = [2, 0, 3, 1]
    assert list(smoothed().certify(x[order], n=1000, seed=3)) == [together[i] for i in order]
    assert [smoothed().certify(x[i : i + 1], n=1000, seed=3)[0] for i in range(4)] == list(together)
    # Different inputs have different noise, also from that of any index.
    same = torch.full((2, 1, 1, 1), 0.5)
    same[1] += 1e-7
    ten = smoothed(lambda x: -(x.flatten(1) - torch.linspace(0, 1, 10)).abs())  # equal votes by chance: next to never
    content, by_index = ten.certify(same, n=1000, seed=3), ten.certify(same, n=1000, seed=3, indices=[0, 1])
    assert len({record.votes for record in (*content, *by_index)}) == 4
    # Predictions share no noise with certificates of the same seed.
    assert not {record.votes for record in ten.predict(same, n=1000, seed=3)} & {record.votes for record in content}


def test_another_noise_certifies_in_its_own_norm() -> None:
    """Uniform noise on one pixel of a half-space: an L1 radius, close to the distance and not beyond it."""
    edge = smoothed(lambda x: torch.stack([0.3 - x[:, 0, 0, 0], x[:, 0, 0, 0] - 0.3], 1), noise="uniform")
    certificate = edge.certify(torch.full((1, 1, 1, 2), 0.6), n=20_000, seed=1)[0]
    assert edge.noise.norm == "L1"
    assert 0.25 < certificate.radius <= 0.3


def test_reduced_precision_is_a_part_of_the_classifier() -> None:
    """bf16 has 8 bits: 0.501 becomes 0.5, so no vote of a tiny noise is for class 1."""

    def above(images: Tensor) -> Tensor:
        score = images.flatten(1)[:, 0] - 0.5
        return torch.stack([torch.zeros_like(score), score], dim=1)

    x = torch.full((1, 1), 0.501)
    assert smoothed(above, sigma=1e-5).certify(x, n=100).counts.tolist() == [[0, 100]]
    assert smoothed(above, sigma=1e-5, precision="bf16").certify(x, n=100).counts.tolist() == [[100, 0]]


LABELS = torch.tensor([0, 1, 0])


def test_a_loader_is_certified_batch_by_batch() -> None:
    dataset = TensorDataset(IMAGES, LABELS)
    expected = smoothed().certify(IMAGES, n=300, seed=5, indices=range(3))
    for data in (dataset, DataLoader(dataset, batch_size=2), [(IMAGES[:2], LABELS[:2]), (IMAGES[2:], LABELS[2:])]):
        batches = list(smoothed().certify_loader(data, n=300, seed=5, progress=True))
        assert [record for batch in batches for record in batch] == list(expected)
        assert torch.cat([batch.labels for batch in batches]).tolist() == LABELS.tolist()
        assert [index for batch in batches for index in batch.indices or ()] == [0, 1, 2]
    (unlabelled,) = smoothed().certify_loader([IMAGES], n=300, seed=5)
    assert unlabelled.labels is None
    assert list(unlabelled) == list(expected)


def test_a_shuffled_loader_gives_the_same_certificates_by_content() -> None:
    dataset = TensorDataset(IMAGES, LABELS)
    loader = DataLoader(dataset, batch_size=2, shuffle=True)
    records = {r.votes for batch in smoothed().certify_loader(loader, n=300, seed=5) for r in batch}
    assert records == {r.votes for r in smoothed().certify(IMAGES, n=300, seed=5)}


def test_a_data_set_does_not_advance_the_random_numbers_of_torch() -> None:
    network, dataset = cnn(), TensorDataset(IMAGES, LABELS)
    state = torch.get_rng_state()
    list(smoothed(network).certify_loader(dataset, n=20))
    sc.doctor(network, dataset)
    assert torch.equal(torch.get_rng_state(), state)


class WithoutLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return IMAGES[index], int(LABELS[index])


PILLOW = (Image.new("RGB", (8, 8)), 0)
BAD_DATA = {
    "images of Pillow": (DataLoader(ListDataset([PILLOW])), r"make no batch .*<class 'PIL.*transforms\.ToTensor"),
    "images of Pillow, one by one": (DataLoader(ListDataset([PILLOW]), batch_size=None), "a tensor .* got Image"),
    "several sizes": (
        DataLoader(ListDataset([(torch.zeros(3, 8, 8), 0), (torch.zeros(3, 9, 9), 0)]), batch_size=2),
        r"make no batch \(RuntimeError: .*equal size, but got \[3, 8, 8\]",
    ),
    "dicts": (DataLoader([{"x": IMAGES[0], "y": 1}]), r"keys x, y; .*pairs, such as \(\(b\['x'\], b\['y'\]"),
    "three values": ([(IMAGES, LABELS, LABELS)], "got 3 values; yield these two"),
    "text labels": ([(IMAGES, ["a", "b", "c"])], "expected labels as a tensor of integers .* got list"),
    "one-hot labels": (
        [(IMAGES, torch.zeros(3, 2, dtype=torch.int64))],
        r"integers \[3\], one per input, got torch.int64 \[3, 2\]",
    ),
    "bytes without labels": ([IMAGES.to(torch.uint8)], "divide bytes by 255"),
    "changing sizes": (
        [(IMAGES, LABELS), (IMAGES[..., :4], LABELS)],
        r"expected batches \[n, 3, 8, 8\] like the first",
    ),
    "pairs": ([(IMAGES[0], 0)], "got one input with its label, int; give a DataLoader a batch_size"),
    "pairs of a loader": (
        DataLoader(TensorDataset(IMAGES, LABELS), batch_size=None),
        r"got one input with its label, torch.int64 \[\]; give a DataLoader a batch_size",
    ),
    "a data set without a length": (WithoutLength(), "expected a map-style torch Dataset with __len__"),
    "images without a batch": ([IMAGES[0]], r"expected batches \[n, 3, 8, 8\], got \[3, 8, 8\]; give a DataLoader"),
    "tensor": (IMAGES, "use certify for a tensor"),
    "name": ("mnist-sample", "got str; .* load_dataset for the name of a data set"),
    "number": (3, "expected a DataLoader, a Dataset or batches"),
    "pair": ((IMAGES, torch.tensor([0, 1, 0])), r"got one such pair; give \[\(inputs, labels\)\]"),
}


def test_sigma_is_read_and_not_set() -> None:
    classifier = smoothed(sigma=0.5)
    assert classifier.sigma == 0.5
    with pytest.raises(AttributeError, match="sigma"):
        classifier.sigma = 0.25  # type: ignore[misc]


@pytest.mark.parametrize("case", BAD_DATA)
def test_wrong_data_are_refused(case: str) -> None:
    data, message = BAD_DATA[case]
    with pytest.raises(RequestError, match=message) as caught:
        list(smoothed(cnn()).certify_loader(data, n=100))
    assert "\n" not in str(caught.value)


def test_an_error_in_a_users_data_set_is_not_taken_for_one_of_its_items() -> None:
    class Broken(ListDataset):
        def __getitem__(self, index: int) -> Any:
            raise TypeError("my mistake")

    with pytest.raises(TypeError, match="my mistake"):
        list(smoothed(cnn()).certify_loader(DataLoader(Broken([0])), n=100))


def test_a_file_is_written_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "certificates" / "mine.tsv"
    loader = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=1)
    model, calls = cnn(), []

    def counting(images: Tensor) -> Tensor:
        calls.append(len(images))
        with torch.no_grad():
            return model.eval()(images)

    stream = smoothed(counting).certify_loader(loader, n=300, out=path, name="mine")
    first = next(stream)
    stream.close()  # as an interruption does
    assert len(sc.read_certificates(path).rows) == 1
    done = list(smoothed(counting).certify_loader(loader, n=300, out=str(path), name="mine"))
    assert list(done[0]) == list(first)
    file = sc.read_certificates(path)
    assert [row.certificate for row in file.rows] == [record for batch in done for record in batch]
    assert [row.label for row in file.rows] == LABELS.tolist()
    assert (file.settings["model"], file.settings["dataset"], file.settings["n"]) == ("mine", "TensorDataset", 300)
    before = len(calls)
    again = list(smoothed(counting).certify_loader(loader, n=300, out=path, name="mine"))
    assert [list(batch) for batch in again] == [list(batch) for batch in done]
    assert sum(calls[before:]) < 100, "only the checks of the classifier"
    (row,) = sc.report([path])
    assert row["images"] == 3


def test_a_file_that_nobody_iterates_for_is_a_warning(tmp_path: Path) -> None:
    data, path = TensorDataset(IMAGES, LABELS), tmp_path / "mine.tsv"
    with pytest.warns(UserWarning, match="not written.*for batch in") as caught:
        smoothed().certify_loader(data, n=50, out=path)
    assert Path(caught[0].filename) == Path(__file__), "the warning names the line of the call"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(smoothed().certify_loader(data, n=50, out=path))
        smoothed().certify_loader(data, n=50)  # nothing was asked to be kept
    assert path.exists()


def test_a_loader_of_our_data_has_their_name_in_the_file(tmp_path: Path) -> None:
    pixels = torch.randint(256, (4, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = ImageData(pixels, torch.arange(4) % 2, 2, "made", "test")
    list(smoothed().certify_loader(DataLoader(data, batch_size=3), n=50, out=tmp_path / "a.tsv"))
    settings = sc.read_certificates(tmp_path / "a.tsv").settings
    assert (settings["dataset"], settings["split"]) == ("made", "test")


def test_a_loader_of_bytes_gives_the_certificates_of_floats() -> None:
    pixels, labels = (IMAGES * 255).to(torch.uint8), LABELS
    floats = smoothed().certify_loader([(pixels.float() / 255, labels)], n=50, seed=1)
    in_bytes = smoothed().certify_loader(DataLoader(TensorDataset(pixels, labels), batch_size=2), n=50, seed=1)
    assert [c for batch in in_bytes for c in batch] == [c for batch in floats for c in batch]


def test_a_file_is_resumed_with_another_batch_size(tmp_path: Path) -> None:
    """Data of `load_dataset`: the file has its name and split, as on the command line."""
    pixels = torch.randint(256, (40, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = ImageData(pixels, torch.arange(40) % 2, 2, "made", "test")
    path = tmp_path / "x.tsv"
    stream = smoothed().certify_loader(data, n=50, out=path)
    first = next(stream)
    stream.close()
    assert 0 < len(first) < 40
    done = list(smoothed().certify_loader(data, n=50, out=path))
    assert [record for batch in done for record in batch][: len(first)] == list(first)
    file = sc.read_certificates(path)
    assert (file.settings["dataset"], file.settings["split"], len(file.rows)) == ("made", "test", 40)
    for size in (1, 7, 40):
        pairs = TensorDataset(*data.batch(torch.arange(40)))
        list(smoothed().certify_loader(DataLoader(pairs, batch_size=size), n=50, out=tmp_path / "y.tsv"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 400}, "was made with other settings .n: "),
        ({"data": [(IMAGES, 1 - LABELS)]}, "the file has label 0 for input 0, the data 1"),
        ({"data": [(IMAGES.flip(0), LABELS)]}, "was made with other settings .*images_sha256"),
        ({"data": [IMAGES]}, "for a certificates file, got inputs alone"),
        ({"data": DataLoader(TensorDataset(IMAGES, LABELS), shuffle=True)}, "use shuffle=False"),
        ({"data": DataLoader(TensorDataset(IMAGES, LABELS), batch_sampler=[[2], [0, 1]])}, "use shuffle=False"),
        ({"out": "certificates.txt"}, "ends in .tsv"),
    ],
)
def test_a_file_of_other_settings_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    options = {"data": [(IMAGES, LABELS)], "n": 300, "out": tmp_path / "x.tsv"}
    list(smoothed().certify_loader(**options))
    with pytest.raises(RequestError, match=message):
        list(smoothed().certify_loader(**(options | changes)))


def test_a_loader_does_not_write_a_file_that_another_process_writes(tmp_path: Path) -> None:
    stream = smoothed().certify_loader([(IMAGES, LABELS)], n=50, out=tmp_path / "x.tsv")
    with only_writer(tmp_path / "x.tsv"), pytest.raises(RequestError, match="another process is writing it"):
        list(stream)


@pytest.mark.parametrize(
    ("options", "flags", "name"),
    [({}, (), "test-n1000"), ({"radii": (0.25, 0.5)}, ("--radii", "0.25,0.5"), "test-n1000-radii")],
)
def test_the_command_line_gives_the_same_certificates(
    options: dict[str, Any], flags: tuple[str, ...], name: str, trained_run: Path, tmp_path: Path, run_cli: Any
) -> None:
    folder = Path(shutil.copytree(trained_run, tmp_path / "run"))
    selection = ("--skip", 5, "--max-images", 3, "--device", "cpu", "--precision", "fp32")
    assert run_cli("certify", folder, "--n", 1000, "--seed", 3, *selection, *flags)[0] == 0
    rows = sc.read_certificates(folder / "certificates" / f"{name}.tsv").rows
    run = load_run(trained_run)
    images, _ = sc.load_dataset(run.recipe.dataset, "test").batch(torch.tensor([0, 5, 10]))
    wrapped = SmoothedClassifier(run.model, sigma=run.recipe.sigma, noise=run.recipe.noise)
    result = wrapped.certify(images, n=1000, seed=3, indices=[0, 5, 10], **options)
    assert [row.index for row in rows] == [0, 5, 10]
    assert [row.certificate for row in rows] == list(result)


def test_the_batch_type_is_public() -> None:
    assert isinstance(smoothed().predict(IMAGES), CertificateBatch)


def test_numbers_and_inputs_of_other_types_are_those_that_they_stand_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = smoothed().predict(IMAGES.clone().requires_grad_(), n=1e3, seed=1)  # type: ignore[arg-type]
    assert repr(found) == repr(smoothed().predict(IMAGES, n=1000, seed=1))
    assert ABSTAIN == -1


def test_a_module_stays_in_eval_mode_until_the_last_call_that_evaluates_it_ends() -> None:
    network = cnn().train()
    first, second = evaluating(network), evaluating(lambda x: network(x))  # as in two threads of a service
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(part.training for part in network.modules())
    second.__exit__(None, None, None)
    assert all(part.training for part in network.modules())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_calls_that_overlap_restore_the_first_mode_in_whatever_order_they_end(order: tuple[int, ...]) -> None:
    network = cnn().train()
    calls = [evaluating(network) for _ in range(3)]
    for call in calls:
        call.__enter__()
    for place in order:
        assert not any(part.training for part in network.modules())
        calls[place].__exit__(None, None, None)
    assert all(part.training for part in network.modules())


def test_a_nested_evaluation_restores_the_mode_before_it() -> None:
    network = cnn().train()
    with evaluating(network):
        network[0].train()
        with evaluating(network):
            assert not network[0].training
        assert network[0].training
        assert not network.training
    assert all(part.training for part in network.modules())


def test_a_compiled_network_gets_its_mode_back() -> None:
    network = cnn().train()
    with evaluating(torch.compile(network)):
        assert not any(part.training for part in network.modules())
    assert all(part.training for part in network.modules())


def test_other_threads_compute_while_a_network_is_prepared_for_its_votes() -> None:
    images, other = torch.rand(2, 3, 8, 8), cnn().eval()
    expected, meanwhile = other(images), []

    class Watched(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, Proxy):  # the network is being traced
                thread = threading.Thread(target=lambda: meanwhile.append(other(images)))
                thread.start()
                thread.join()
            return super().forward(x)

    assert len(smoothed(Watched(*cnn().eval())).certify(images, n=100)) == 2
    assert [torch.equal(logits, expected) for logits in meanwhile] == [True]


def test_a_network_may_certify_while_it_is_prepared_for_its_votes() -> None:
    images, certificates = torch.rand(2, 3, 8, 8), []

    class Nested(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, Proxy):  # the network is being traced
                smoothed(cnn().eval()).predict(images, n=10)
            return super().forward(x)

    network = smoothed(Nested(*cnn().eval()))
    thread = threading.Thread(target=lambda: certificates.extend(network.certify(images, n=100)), daemon=True)
    thread.start()
    thread.join(60)  # it would wait for itself
    assert len(certificates) == 2
