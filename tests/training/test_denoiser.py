"""Training a denoiser, and certificates of classifiers behind it."""

import csv
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import Killed, digest, killed_after_the_first_epoch, metrics, tiny_recipe, without_times
from torch import Tensor, nn

import smoothcert as sc
from smoothcert.certification.subject import Subject
from smoothcert.data import ImageData, mnist
from smoothcert.errors import RequestError
from smoothcert.models import CifarResNet, Denoised, Normalize
from smoothcert.models.precision import at_precision
from smoothcert.models.unet import UNet
from smoothcert.objectives import Denoising, Progress
from smoothcert.training.checkpoint import tensors_digest, write_new_run
from smoothcert.training.denoiser import behind_denoiser, denoiser_recipe, load_denoiser
from smoothcert.training.frozen_classifier import is_built_in_network
from smoothcert.training.loop import train
from smoothcert.training.recipe import TrainRecipe

Cli = Callable[..., tuple[int, str, str]]


def small_recipe(**changes: Any) -> TrainRecipe:
    fields = {"model": "unet-small", "epochs": 2, "batch_size": 64, "precision": "fp32", **changes}
    return denoiser_recipe("mnist-sample", 0.5, **fields)


@pytest.fixture(scope="module")
def denoiser_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "denoiser"
    train(small_recipe(batch_size=16), mnist.load_sample("train").subset(torch.arange(512)), folder, device="cpu")
    return folder


@pytest.mark.parametrize("size", [(28, 28), (5, 7), (1, 1)])
def test_the_denoiser_starts_as_the_identity_and_keeps_every_size(size: tuple[int, int]) -> None:
    noisy, network = torch.randn(2, 3, *size), UNet(3, 4, 1)
    assert torch.equal(network(noisy), noisy)
    nn.init.normal_(network.tail.weight)
    assert network(noisy).shape == noisy.shape
    assert not torch.equal(network(noisy), noisy)
    # Other sizes than multiples of 4: as if the last row and column were repeated.
    rows, columns = (torch.arange(-(-length // 4) * 4).clamp(max=length - 1) for length in size)
    larger = network(noisy[..., rows, :][..., columns])
    torch.testing.assert_close(network(noisy), larger[..., : size[0], : size[1]])


def test_only_networks_of_known_layers_are_captured_behind_a_denoiser() -> None:
    known = nn.Sequential(Normalize([0.5], [0.5]), nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 10))
    assert is_built_in_network(known)
    assert is_built_in_network(nn.Sequential(Normalize([0.5] * 3, [0.5] * 3), CifarResNet(8, 10)))
    assert not is_built_in_network(nn.Sequential(known, ByMean()))
    known[1].register_forward_hook(lambda layer, inputs, output: None)
    assert not is_built_in_network(known)


class ByMean(nn.Module):
    """A layer that decides in Python, which a captured step would do only once."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.mean() > 0 else -x


@pytest.mark.parametrize("weight", [None, 0.7])
def test_the_loss_equals_the_formula(weight: float | None) -> None:
    torch.manual_seed(0)
    images, noise = torch.rand(3, 1, 4, 4, dtype=torch.float64), torch.randn(2, 3, 1, 4, 4, dtype=torch.float64)
    denoiser = nn.Conv2d(1, 1, 3, padding=1).double()
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(16, 5)).double()
    squared, stability, logits = [], [], []
    for draw in noise:
        for image, delta in zip(images, draw, strict=True):
            clean = denoiser((image + delta)[None])
            squared.append(float(((clean - image) ** 2).mean()))
            logits.append(classifier(clean)[0])
            target, output = classifier(image[None])[0].softmax(0), logits[-1].softmax(0)
            stability.append(-sum(float(t) * float(o.log()) for t, o in zip(target, output, strict=True)))
    expected = np.mean(squared) + (weight or 0.0) * np.mean(stability)
    network = Denoised(denoiser, None if weight is None else classifier)
    progress = Progress(0.5, torch.ones(()), torch.ones(()), torch.zeros(3))
    terms = Denoising(stability_weight=weight or 0.0).loss(network, images, torch.zeros(3), noise, progress)
    assert float(terms.loss) == pytest.approx(expected, rel=1e-9)
    if weight is None:
        assert terms.noisy_logits is None
    else:
        torch.testing.assert_close(terms.noisy_logits, torch.stack(logits).view(2, 3, 5))


class Rounding(nn.Module):
    """Gives its input in bfloat16, as a denoiser does under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


def test_the_error_of_a_denoiser_in_half_precision_is_measured_from_the_exact_image() -> None:
    images = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    progress = Progress(0.5, torch.ones(()), torch.ones(()), torch.zeros(3))
    network, noise = Denoised(Rounding(), None), torch.zeros(1, *images.shape)
    terms = Denoising().loss(network, images, torch.zeros(3), noise, progress)
    rounding = images.numpy().astype(np.float64) - images.bfloat16().float().numpy()
    assert float(terms.loss) == pytest.approx(np.mean(rounding**2), rel=1e-5)


def test_the_classifier_behind_a_denoiser_is_a_frozen_copy_in_eval_mode() -> None:
    given = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3), nn.Dropout(0.5)).train()
    copied, images = behind_denoiser(UNet(1, 4, 1), given, torch.device("cpu")), torch.rand(8, 1, 4, 4)
    logits = copied.classify(images)
    assert not logits.requires_grad
    assert given.training
    assert torch.equal(logits, given.eval()(images))


def test_a_resumed_denoiser_equals_an_uninterrupted_one(
    tmp_path: Path, tiny_data: ImageData, trained_run: Path, denoiser_run: Path
) -> None:
    classifier, images = sc.load(trained_run).model, tiny_data.subset(torch.arange(32))
    before = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    recipe = small_recipe(batch_size=16, objective=Denoising(stability_weight=0.5, num_noise=2))

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(recipe, images, whole, device="cpu", classifier=classifier)
    with pytest.raises(Killed):
        train(recipe, images, parts, device="cpu", classifier=classifier, on_epoch=killed_after_the_first_epoch)
    with pytest.raises(RequestError, match=r"expected the classifier that its training started with \(TinyNet"):
        train(
            recipe,
            images,
            parts,
            device="cpu",
            classifier=nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
            resume=True,
        )
    train(recipe, images, parts, device="cpu", classifier=classifier, resume=True)
    assert digest(whole) == digest(parts)
    assert without_times(metrics(whole)) == without_times(metrics(parts))
    assert {"squared_error", "stability", "noisy_accuracy"} <= set(metrics(whole)[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in classifier.state_dict().items())
    assert sc.load(whole).provenance["classifier"]["model"] == "TinyNet"
    assert "noisy_accuracy" not in metrics(denoiser_run)[0]


def test_the_denoiser_removes_noise(denoiser_run: Path) -> None:
    images = mnist.load_sample("test").batch(torch.arange(100))[0]
    noisy = images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        error = float(((load_denoiser(denoiser_run).model(noisy) - images) ** 2).mean())
    assert error < 0.25 / 4  # the noise has 0.25, and a black image 0.1 on average
    assert error < float((images**2).mean())


class ByHand(nn.Module):
    """The composition, written down without `Denoised`."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.steps = nn.ModuleList([first, second])

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def test_certificates_are_those_of_the_composed_classifier(
    tmp_path: Path, trained_run: Path, denoiser_run: Path
) -> None:
    run, denoiser, data = sc.load(trained_run), load_denoiser(denoiser_run), mnist.load_sample("test")
    options: dict[str, Any] = {"n": 200, "n0": 50, "seed": 3, "max_images": 5, "device": "cpu", "precision": "fp32"}
    front = sc.certify_dataset(run, data, tmp_path / "front.tsv", denoiser=denoiser, **options)
    by_hand = sc.certify_dataset(ByHand(denoiser.model, run.model), data, tmp_path / "hand.tsv", sigma=0.5, **options)
    bare = sc.certify_dataset(run, data, tmp_path / "bare.tsv", **options)
    assert [row.certificate for row in front.rows] == [row.certificate for row in by_hand.rows]
    assert [row.certificate for row in front.rows] != [row.certificate for row in bare.rows]
    assert front.settings["denoiser"] == denoiser.about()
    assert front.settings["weights_sha256"] == bare.settings["weights_sha256"]
    with pytest.raises(RequestError, match="was made with other settings"):
        sc.certify_dataset(run, data, tmp_path / "bare.tsv", denoiser=denoiser, **options)


def test_the_noise_is_that_of_the_denoiser_not_of_the_classifier(denoiser_run: Path) -> None:
    classifier = sc.SmoothedClassifier(nn.Flatten(), sigma=1.0, noise="laplace")
    subject = Subject.of(classifier).behind(load_denoiser(denoiser_run))
    assert (subject.defaults["sigma"], subject.defaults["noise"]) == (0.5, "gaussian")


def test_a_run_behind_a_denoiser_need_not_know_the_noise(trained_run: Path, denoiser_run: Path) -> None:
    alone = Subject.of(sc.load(trained_run))
    assert len(alone.noise_warnings(1.0, "gaussian")) == 1
    assert alone.behind(load_denoiser(denoiser_run)).noise_warnings(1.0, "gaussian") == []


def test_both_parts_are_evaluated_at_the_precision_of_the_votes(trained_run: Path, denoiser_run: Path) -> None:
    run, denoiser = sc.load(trained_run), load_denoiser(denoiser_run)
    model = at_precision(Denoised(denoiser.model, run.model), "bf16", torch.device("cpu"), (1, 28, 28))
    images = mnist.load_sample("test").batch(torch.arange(20))[0]
    with torch.no_grad():
        logits, exact = model(images.bfloat16()), run.model(denoiser.model(images))
    assert {tensor.dtype for tensor in model.denoiser.state_dict().values()} == {torch.bfloat16}
    assert logits.dtype == torch.float32  # so that two classes are not tied
    torch.testing.assert_close(logits, exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))


def test_an_unfinished_denoiser_is_reported(
    tmp_path: Path, trained_run: Path, denoiser_run: Path, run_cli: Cli
) -> None:
    """As an unfinished classifier is; recipe.yaml of the denoiser is compared too."""
    run, denoiser = shutil.copytree(trained_run, tmp_path / "run"), tmp_path / "half"
    loaded = sc.load(denoiser_run)
    write_new_run(replace(loaded, folder=denoiser, epoch=1), loaded.model.state_dict())
    recipe = denoiser / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("batch_size: 16", "batch_size: 32"))
    certify = ("certify", run, "--denoiser", denoiser, "--n", 20, "--max-images", 1, "--device", "cpu")
    code, output, _ = run_cli(*certify)
    assert code == 0
    assert f"note: {denoiser} has trained 1 of 2 epochs" in output
    assert (
        f"warning: {recipe}: is not the recipe of the network (batch_size: the file has 32, the network 16)" in output
    )


def test_the_command_line_certifies_attacks_and_predicts(
    tmp_path: Path, trained_run: Path, denoiser_run: Path, run_cli: Cli
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    common = ["--device", "cpu", "--seed", 1, "--max-images", 2]
    for words in ([], ["--denoiser", denoiser_run]):
        status, output, error = run_cli("certify", run, *words, "--n", 200, "--n0", 50, *common)
        assert status == 0, error
    assert "test-n200-denoised.tsv" in output
    certificates = run / "certificates/test-n200-denoised.tsv"
    attack = ["attack", run, "--radii", "0.1", "--steps", 2, "--num-noise", 4, "--n", 100, *common]
    status, _, error = run_cli(*attack, "--certificates", certificates)
    assert status == 2
    assert "certifies another classifier, or other images, than those to attack (denoiser: the file has" in error
    status, _, error = run_cli(
        *attack, "--certificates", run / "certificates/test-n200.tsv", "--denoiser", denoiser_run
    )
    assert status == 2
    status, _, error = run_cli(*attack, "--certificates", certificates, "--denoiser", denoiser_run, "--sigma", 0.25)
    assert status == 2
    assert "got gaussian noise at sigma 0.25" in error, "the noise level that is asked for is not replaced"
    status, _, error = run_cli(*attack, "--denoiser", denoiser_run)
    assert status == 0, error
    compared = json.loads((run / "attacks/pgd.json").read_text())["settings"]["certificates"]
    assert compared["file"] == certificates.name, "of the two files the one behind a denoiser"
    assert json.loads((run / "attacks/pgd.json").read_text())["settings"]["denoiser"]["model"] == "unet-small"

    image = tmp_path / "digit.png"
    pixels = mnist.load_sample("test").batch(torch.tensor([0]))[0][0, 0]
    Image.fromarray((pixels * 255).byte().numpy()).save(image)
    status, output, error = run_cli(
        "predict", run, image, "--denoiser", denoiser_run, "--n", 200, "--device", "cpu", "--format", "csv"
    )
    assert status == 0, error
    assert next(csv.DictReader(output.splitlines()))["class"] == "7"


def test_train_denoiser_makes_a_run_and_prints_the_next_command(
    tmp_path: Path, trained_run: Path, run_cli: Cli
) -> None:
    trained_run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    data = mnist.load_sample("train").subset(torch.arange(64))
    np.savez(tmp_path / "data.npz", images=data.images.numpy(), labels=data.labels.numpy())
    out = tmp_path / "denoiser"
    words = ["train-denoiser", "--dataset", f"npz:{tmp_path / 'data.npz'}", "--sigma", 0.5, "--model", "unet-small"]
    words += ["--set", "epochs=1", "--set", "batch_size=32", "--device", "cpu", "--out", out]
    status, output, error = run_cli(*words, "--classifier", trained_run, "--stability-weight", 0.1)
    assert status == 0, error
    assert f"next: smoothcert certify {trained_run} --denoiser {out}" in output
    assert sc.load(out).recipe.objective == Denoising(stability_weight=0.1)
    few = ("--n", 50, "--max-images", 2, "--device", "cpu")
    status, _, error = run_cli(*shlex.split(output.partition("next: smoothcert ")[2]), *few)
    assert status == 0, error
    status, _, error = run_cli(*words, "--resume")
    assert status == 2
    assert "stability_weight" in error
    (tmp_path / "own_for_denoiser.py").write_text(
        "from torch import nn\n"
        "def own(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))\n"
    )
    other = [*words[:-1], tmp_path / "other", "--classifier", f"{tmp_path / 'own_for_denoiser.py'}:own"]
    weights = nn.Sequential(nn.Flatten(), nn.Linear(784, data.num_classes)).state_dict()
    torch.save(weights, tmp_path / "weights.pt")
    status, output, error = run_cli(*other, "--classifier-init", tmp_path / "weights.pt")
    assert status == 0, error
    assert sc.load(tmp_path / "other").provenance["classifier"]["weights_sha256"] == tensors_digest(weights)
    certify = shlex.split(output.partition("next: smoothcert ")[2])
    assert certify[certify.index("--init") + 1] == str(tmp_path / "weights.pt")
    status, _, error = run_cli(*certify, *few)
    assert status == 0, error
    status, output, error = run_cli(*other[:-3], tmp_path / "third", *other[-2:])
    assert status == 0, error
    assert f"note: no --init: the weights are those that {other[-1]} returns" in output
    status, output, _ = run_cli(*words[:-1], tmp_path / "alone")
    assert (status, "next: " in output) == (0, False)
    assert f"in front of a classifier RUN: smoothcert certify RUN --denoiser {tmp_path / 'alone'}" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["certify", "DENOISER"], "expected a classifier, got the denoiser unet-small; put it in front of"),
        (["certify", "RUN", "--denoiser", "RUN"], "expected a denoiser, got the classifier tiny"),
        (["certify", "RUN", "--denoiser", "NONE"], "expected the folder of a denoiser, got none"),
        (["certify", "RUN", "--denoiser", "DENOISER", "--sigma", 0.25], "expected gaussian noise at sigma 0.5"),
        (["predict", "DENOISER", "IMAGE"], "expected a classifier, got the denoiser"),
        (["train", "--preset", "mnist/gaussian", "--model", "unet", "--set", "dataset=mnist-sample", "--out", "NONE"],
         "objective: expected denoising together with one of the models unet, unet-small, unet-large"),
        (["train-denoiser", "--dataset", "mnist-sample", "--sigma", 0.5, "--stability-weight", 1, "--out", "NONE"],
         "--stability-weight: expected --classifier with it"),
        (["train-denoiser", "--dataset", "mnist-sample", "--sigma", 0.5, "--classifier", "DENOISER", "--out", "NONE"],
         "expected a classifier, got the denoiser"),
        (["train-denoiser", "--dataset", "mnist-sample", "--sigma", -1, "--out", "NONE"], "sigma: expected"),
        (["train-denoiser", "--dataset", "mnist-sample", "--sigma", 0.5, "--classifier-init", "a.pt", "--out", "NONE"],
         "--classifier-init: expected --classifier with it"),
        (["train-denoiser", "--dataset", "mnist-sample", "--sigma", 0.5, "--classifier", "RUN", "--classifier-init",
          "a.pt", "--out", "NONE"], "--classifier-init: expected none with"),
        (["train-denoiser", "--dataset", "mnist-sample", "--sigma", 0.5, "--epochs", 3, "--set", "epochs=1", "--out",
          "NONE"], "--set epochs=1: expected one value for epochs, got --epochs 3 as well; leave one out"),
    ],
)  # fmt: skip
def test_wrong_requests_cost_one_line(
    words: list[object], message: str, tmp_path: Path, trained_run: Path, denoiser_run: Path, run_cli: Cli
) -> None:
    image = tmp_path / "black.png"
    Image.new("L", (28, 28)).save(image)
    places = {"RUN": trained_run, "DENOISER": denoiser_run, "NONE": tmp_path / "none", "IMAGE": image}
    status, _, error = run_cli(*(places.get(str(word), word) for word in words))
    assert status == 2
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_images_of_other_shapes_are_refused(denoiser_run: Path) -> None:
    denoiser = load_denoiser(denoiser_run)
    for shape in [(3, 28, 28), (1, 32, 32)]:
        with pytest.raises(RequestError, match=r"expected images 1x28x28, which the denoiser is for, got \dx"):
            denoiser.check(shape, 0.5, "gaussian")
    with pytest.raises(RequestError, match="classifier: expected a torch module, got function"):
        Denoised(denoiser.model, lambda x: x)  # type: ignore[arg-type]


def test_python_refuses_what_a_denoiser_cannot_do(
    tmp_path: Path, tiny_data: ImageData, trained_run: Path, denoiser_run: Path
) -> None:
    with pytest.raises(RequestError, match="expected a classifier, got the denoiser unet-small"):
        sc.RunEnsemble([sc.load(trained_run), sc.load(denoiser_run)])
    classifier = sc.load(trained_run).model
    with pytest.raises(RequestError, match="classifier: expected none for gaussian"):
        sc.train(tiny_recipe(), tiny_data, tmp_path / "a", classifier=classifier, device="cpu")
    with pytest.raises(RequestError, match="stability_weight: expected 0 without a classifier, got 2"):
        sc.train(small_recipe(objective=Denoising(stability_weight=2)), tiny_data, tmp_path / "a", device="cpu")
    with pytest.raises(RequestError, match="a denoiser has no accuracy of its own"):
        sc.train(small_recipe(), tiny_data, tmp_path / "a", test_data=tiny_data, device="cpu")
    with pytest.raises(RequestError, match="model: the classifier gives"):
        sc.train(small_recipe(), tiny_data, tmp_path / "a", classifier=nn.Flatten(), device="cpu")
    assert not (tmp_path / "a").exists()
