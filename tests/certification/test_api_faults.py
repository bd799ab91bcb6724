"""What users of the Python interface get wrong: one clear line each, and inputs that other libraries give."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import smoothcert as sc
from smoothcert import RequestError
from smoothcert.data.torch_dataset import images_from_dataset

LABELS = torch.tensor([0, 1, 2, 0])


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1.5}, "seed: expected an integer of at least 0, got 1.5"),
        ({"seed": "a"}, "seed: expected an integer of at least 0, got 'a'"),
        ({"indices": 5}, r"indices: expected integers >= 0, such as range\(10\) or \[3, 5\], got 5"),
        ({"indices": [0, 1.5, 2, 3]}, r"indices: expected integers >= 0.*got \[0, 1.5, 2, 3\]"),
        ({"indices": torch.rand(4)}, r"got torch.float32 \[4\]"),
        ({"indices": torch.ones(4, dtype=torch.bool)}, r"got torch.bool \[4\]"),
        ({"radii": "0.3"}, "radii: expected a list"),
        ({"radii": 0.3, "until_radius": 0.2}, "give until_radius or radii, not both"),
    ],
)
def test_wrong_options_are_explained(model: nn.Module, images: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        sc.SmoothedClassifier(model, sigma=0.25).certify(images, n=20, **options)
    assert "\n" not in str(caught.value)


def test_sigma_for_bytes_is_reported(model: nn.Module, images: Tensor) -> None:
    with pytest.warns(UserWarning, match=r"sigma 64 hides images in \[0, 1\] completely.*give 64/255 = 0.251"):
        sc.SmoothedClassifier(model, sigma=64).certify(images, n=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sc.SmoothedClassifier(model, sigma=2).certify(images, n=20)


def test_a_single_radius_is_a_list_of_one(model: nn.Module, images: Tensor) -> None:
    smoothed = sc.SmoothedClassifier(model, sigma=0.25)
    several = list(smoothed.certify(images, n=600, radii=[0.1], seed=1))
    for radii in (0.1, torch.tensor([0.1], dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)):
        assert list(smoothed.certify(images, n=600, radii=radii, seed=1)) == several  # type: ignore[arg-type]


def test_certify_dataset_takes_tensors_and_until_radius(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    smoothed, data = sc.SmoothedClassifier(model, sigma=0.25), TensorDataset(images, LABELS)
    file = sc.certify_dataset(smoothed, data, tmp_path / "a.tsv", n=20, indices=torch.tensor([2, 0]))
    assert [row.index for row in file.rows] == [2, 0]
    decided = sc.certify_dataset(smoothed, data, tmp_path / "b.tsv", n=600, until_radius=0.1, seed=1)
    expected = smoothed.certify(images, n=600, until_radius=0.1, seed=1, indices=range(4))
    assert [row.certificate for row in decided.rows] == list(expected)
    assert (decided.settings["radii"], decided.settings["hold_back"]) == ([0.1], False)
    for indices, message in (
        ([99], r"different integers from 0 to 3, got \[99\]"),
        ([-1], r"from 0 to 3, got \[-1\]"),
        ([1, 1], r"different integers from 0 to 3, got \[1, 1\]"),
        (2, "indices: expected integers >= 0"),
    ):
        with pytest.raises(RequestError, match=message):
            sc.certify_dataset(smoothed, data, tmp_path / "c.tsv", n=20, indices=indices)  # type: ignore[arg-type]
    assert not (tmp_path / "c.tsv").exists()


def test_empty_loaders_are_refused(model: nn.Module, images: Tensor) -> None:
    smoothed = sc.SmoothedClassifier(model, sigma=0.25)
    for data in ([], DataLoader(TensorDataset(images[:0], LABELS[:0]))):
        with pytest.raises(RequestError, match="expected at least one batch, got none"):
            list(smoothed.certify_loader(data, n=20))


def script(model: nn.Module, images: Tensor) -> nn.Module:
    return torch.jit.script(model)  # type: ignore[no-any-return, no-untyped-call]


def trace(model: nn.Module, images: Tensor) -> nn.Module:
    return torch.jit.trace(model, images)  # type: ignore[no-any-return, no-untyped-call]


def frozen(model: nn.Module, images: Tensor) -> nn.Module:
    return torch.jit.freeze(script(model, images))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [script, trace, frozen])
def test_torchscript_modules_vote_like_the_module(
    model: nn.Module, images: Tensor, make: Callable[[nn.Module, Tensor], nn.Module], tmp_path: Path
) -> None:
    module = make(model, images)
    plain, scripted = (sc.SmoothedClassifier(m, sigma=0.25) for m in (model, module))
    assert list(scripted.certify(images, n=300, seed=1)) == list(plain.certify(images, n=300, seed=1))
    assert torch.equal(scripted(images, n=50, seed=1), plain(images, n=50, seed=1))
    file = sc.certify_dataset(module, TensorDataset(images, LABELS), tmp_path / "a.tsv", sigma=0.25, n=20)
    assert len(file.rows) == 4


def test_an_outer_autocast_does_not_change_votes(model: nn.Module, images: Tensor) -> None:
    smoothed = sc.SmoothedClassifier(model, sigma=0.25)
    expected, shares = list(smoothed.certify(images, n=1000, seed=1)), smoothed(images, n=1000, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(images).dtype == torch.bfloat16
        assert list(smoothed.certify(images, n=1000, seed=1)) == expected
        assert torch.equal(smoothed(images, n=1000, seed=2), shares)


@pytest.mark.parametrize("noise", ["gaussian", "laplace", "uniform"])
def test_inference_mode_and_other_defaults_of_torch_change_nothing(
    model: nn.Module, images: Tensor, noise: str, tmp_path: Path
) -> None:
    data, pixels = images_from_dataset(TensorDataset(images, LABELS)), (images * 255).round() / 255

    def results(name: str) -> tuple[object, ...]:
        smoothed = sc.SmoothedClassifier(model, sigma=0.25, noise=noise)
        file = sc.certify_dataset(smoothed, data, tmp_path / f"{name}.tsv", n=200, seed=1)
        votes = [row.certificate for row in file], file.provenance["accuracy"]
        sound = list(smoothed.certify(pixels, n=200, seed=1, sound=True)) if noise == "gaussian" else []
        certificates = list(smoothed.certify(images, n=200, seed=1))
        return *votes, certificates, sound, sc.doctor(smoothed, data).accuracy_under_noise

    expected = results("usual")
    with torch.inference_mode():
        assert results("inference") == expected
    try:
        torch.set_default_dtype(torch.float64)
        assert results("float64") == expected
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):  # a tensor that gets no device has no values
        assert results("device") == expected


def test_losses_explain_labels_and_generators(model: nn.Module, images: Tensor) -> None:
    logits = torch.randn(2, 4, 3)
    large, negative = torch.tensor([0, 1, 7, 0]), torch.tensor([0, 1, -1, 0])
    for loss in (sc.losses.gaussian, sc.losses.consistency):
        with pytest.raises(RequestError, match=r"labels: expected classes from 0 to 2, got 0 to 7"):
            loss(logits, large)
        with pytest.raises(RequestError, match=r"labels: expected classes from 0 on, got -1 to 1"):
            loss(logits, negative)
    for attacking in (sc.losses.smoothadv, sc.losses.smoothmix):
        with pytest.raises(RequestError, match=r"labels: expected classes from 0 on, one per output .* got 0 to 7"):
            attacking(model, images, large, sigma=0.5)
        with pytest.raises(RequestError, match=r"labels: expected classes from 0 on, got -1 to 1"):
            attacking(model, images, negative, sigma=0.5)
    with pytest.raises(RequestError, match=r"generator: expected a torch.Generator or None, got 3"):
        sc.losses.smoothmix(model, images, LABELS, sigma=0.5, generator=3)  # type: ignore[typeddict-item]


def test_losses_that_clip_warn_about_normalised_inputs_once(model: nn.Module, images: Tensor) -> None:
    normalised = images * 4 - 2
    adversary = sc.losses.Adversary(steps=1)
    for loss in (
        sc.losses.SmoothAdv(sigma=0.5),
        sc.losses.SmoothMix(sigma=0.5),
        sc.losses.Consistency(sigma=0.5, adversary=adversary),
    ):
        with pytest.warns(UserWarning, match=r"clips to \[0, 1\]; put the normalisation into the model"):
            loss(model, normalised, LABELS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss(model, normalised, LABELS)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for shift in (0.0, 0.1, 0.2):
            sc.losses.smoothadv(model, normalised + shift, LABELS, sigma=0.5)
    assert len(shown) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sc.losses.SmoothMix(sigma=0.5)(model, images, LABELS)
        sc.losses.Gaussian(sigma=0.5)(model, normalised, LABELS)


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ({"max_images": 3}, "max_images: expected an option of certify, got another; give it to certify_dataset"),
        ({"sigma": 1.0}, "sigma: expected an option of certify, got another; give it to SmoothedClassifier"),
        ({"Alpha": 0.1}, "Alpha: expected an option of certify, got another; did you mean alpha?"),
    ],
)
def test_options_that_a_loader_would_ignore_are_refused(
    model: nn.Module, images: Tensor, option: dict[str, Any], advice: str
) -> None:
    smoothed = sc.SmoothedClassifier(model, sigma=0.25)
    with pytest.raises(RequestError, match=re.escape(f"certify_loader: {advice}")):
        smoothed.certify_loader(DataLoader(images), n=100, **option)


def test_too_few_votes_for_the_asked_radius_are_reported(model: nn.Module, images: Tensor) -> None:
    smoothed = sc.SmoothedClassifier(model, sigma=0.25)
    with pytest.warns(UserWarning, match=r"n = 100 votes cannot certify radius 0\.5 \(at most 0\.3\d+\); n = "):
        smoothed.certify(images, n=100, until_radius=0.5)
    with pytest.warns(UserWarning, match=r"n = 100 votes cannot certify radius 0\.5"):
        next(smoothed.certify_loader(DataLoader(images), n=100, radii=[0.1, 0.5]))
    with pytest.warns(UserWarning, match="n = 3 votes cannot certify any image"):
        next(smoothed.certify_loader(DataLoader(images), n=3))


def test_data_and_models_of_other_kinds_are_explained(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    smoothed = sc.SmoothedClassifier(model, sigma=0.25)
    for data, message in (
        ((images, LABELS), "got a tensor of shape [4, 1, 8, 8]; for tensors of all images and labels give torch."),
        (
            TensorDataset(images, LABELS.double()),
            "an integer as label, got dtype float64 and shape []; return",
        ),
    ):
        with pytest.raises(RequestError, match=re.escape(message)):
            sc.certify_dataset(smoothed, data, tmp_path / "a.tsv", n=100)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"got OrderedDict; give the network after network\.load_state_dict"):
        sc.SmoothedClassifier(model.state_dict(), sigma=0.25)  # type: ignore[arg-type]
    recipe = sc.preset("mnist/gaussian", sigma=0.25)
    with pytest.raises(RequestError, match=r"got the class Linear; give an nn\.Module with its weights"):
        sc.train(recipe, "mnist-sample", tmp_path / "run", model=nn.Linear)  # type: ignore[arg-type]
