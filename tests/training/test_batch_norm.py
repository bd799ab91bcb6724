"""Batch-norm statistics under noise: their closed form, what stays as it is, and the command."""

import inspect
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_recipe
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import smoothcert as sc
from smoothcert.cli.adapting import change_of_accuracy
from smoothcert.data import ImageData
from smoothcert.errors import RequestError
from smoothcert.training.batch_norm import adapt_batch_norm, adapt_run
from smoothcert.training.checkpoint import InputSpec, Run, load_run, save_weights, tensors_digest
from smoothcert.training.run_folder import MODEL

Cli = Callable[..., tuple[int, str, str]]


def build() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10))


NETWORK = f"from torch import nn\n\n\n{inspect.getsource(build)}"


def network() -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


def test_statistics_are_those_of_noisy_images(tiny_data: ImageData) -> None:
    """The first layer sees pixels plus noise: the mean of the pixels, and their variance plus that of the noise."""
    model, inputs = network(), list[Tensor]()
    model.register_forward_pre_hook(lambda module, given: inputs.append(given[0].clone()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    about = adapt_batch_norm(model, tiny_data, 0.5)
    after = model.state_dict()
    pixels = tiny_data.images.double() / 255
    assert float(after["0.running_mean"]) == pytest.approx(float(pixels.mean()), abs=0.005)
    assert float(after["0.running_var"]) == pytest.approx(float(pixels.var()) + 0.25, abs=0.005)
    # The last layer, behind dropout, which is off: transcribed, with the old statistics in neither place.
    (batch,) = inputs
    first = (batch - batch.mean()) / (batch.var(correction=0) + 1e-5).sqrt()
    outputs = first.flatten(1) @ after["3.weight"].T + after["3.bias"]
    torch.testing.assert_close(after["4.running_mean"], outputs.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after["4.running_var"], outputs.var(0), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(after[name], before[name]) for name in before if "running" not in name and "num" not in name)
    assert not any(module.training for module in model.modules())
    assert (about["images"], about["original_weights_sha256"]) == (256, tensors_digest(before))


def test_batches_have_the_same_weight(tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoothcert.training.batch_norm.BATCH", 100)
    model, inputs = network(), list[Tensor]()
    model.register_forward_pre_hook(lambda module, given: inputs.append(given[0].clone()))
    assert adapt_batch_norm(model, tiny_data, 0.5)["images"] == 200
    expected = torch.stack([batch.var() for batch in inputs]).mean()
    torch.testing.assert_close(model.state_dict()["0.running_var"], expected[None], rtol=1e-5, atol=1e-6)
    assert torch.stack([batch.mean() for batch in inputs]).unique().numel() == len(inputs) == 2
    assert model[0].momentum == 0.1  # type: ignore[union-attr,index]


def test_synchronized_batch_norm_gets_the_statistics_of_one_process(tiny_data: ImageData) -> None:
    """And keeps its kind, for a training that continues."""
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(network())
    for model in (plain := network(), synchronized):
        adapt_batch_norm(model, tiny_data, 0.5)
    kinds = [type(module) for module in synchronized.modules() if "BatchNorm" in type(module).__name__]
    assert kinds == [nn.SyncBatchNorm] * 2
    assert tensors_digest(synchronized.state_dict()) == tensors_digest(plain.state_dict())


def test_a_torch_dataset_gives_the_statistics_of_its_images(tiny_data: ImageData) -> None:
    given, pairs = network(), network()
    adapt_batch_norm(given, tiny_data, 0.5)
    about = adapt_batch_norm(pairs, TensorDataset(*tiny_data.batch(torch.arange(len(tiny_data)))), 0.5)
    assert (about["data"], about["split"]) == ("TensorDataset", "all")
    assert tensors_digest(pairs.state_dict()) == tensors_digest(given.state_dict())
    with pytest.raises(RequestError, match=r"map-style torch Dataset .* got DataLoader; give .*loader\.dataset"):
        adapt_batch_norm(network(), DataLoader(tiny_data), 0.5)  # type: ignore[arg-type]


def test_networks_without_statistics_and_single_images_are_refused(tiny_data: ImageData) -> None:
    with pytest.raises(RequestError, match="expected a network with batch norm"):
        adapt_batch_norm(nn.Linear(2, 2), tiny_data, 0.5)
    with pytest.raises(RequestError, match="expected at least 2 images, got 1"):
        adapt_batch_norm(network(), tiny_data.subset(torch.arange(1)), 0.5)


def test_images_of_another_shape_than_those_of_a_run_are_refused(tiny_data: ImageData, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", tiny_recipe(), InputSpec.of(tiny_data), network(), 2, {})
    cropped = replace(tiny_data, images=tiny_data.images[..., :20, :20])
    with pytest.raises(RequestError, match=r"its model takes images \(1, 28, 28\) of 10 classes, .* has \(1, 20, 20\)"):
        adapt_run(run, cropped, tmp_path / "adapted")
    assert not (tmp_path / "adapted").exists()


def test_weights_that_are_tied_are_written(run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tied = NETWORK.replace("    return nn.Sequential(", "    layers = nn.Sequential(")
    Path("tied.py").write_text(f"{tied}    layers[4].bias = layers[3].bias\n    return layers\n")
    words = ("--model", "tied.py:build", "--dataset", "mnist-sample", "--sigma", 0.5, "--device", "cpu")
    assert run_cli("adapt", *words, "--out", "a.safetensors")[0] == 0
    stored = load_file("a.safetensors")
    assert torch.equal(stored["3.bias"], stored["4.bias"])


def test_command_makes_weights_that_certify_takes(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    torch.save(network().state_dict(), "weights.pt")
    words = ("--model", "net.py:build", "--init", "weights.pt", "--dataset", "mnist-sample", "--sigma", 0.5)
    code, out, _ = run_cli("adapt", *words, "--out", "adapted.safetensors", "--device", "cpu")
    assert (code, "adapted to 8,192 images at sigma 0.5" in out) == (0, True)
    expected = network()
    adapt_batch_norm(expected, sc.load_dataset("mnist-sample", "train"), 0.5)
    assert all(torch.equal(expected.state_dict()[k], v) for k, v in load_file("adapted.safetensors").items())
    printed = shlex.split(out.partition("next: smoothcert ")[2])
    code, _, error = run_cli(*printed, "--n", 20, "--n0", 10, "--max-images", 2, "--device", "cpu")
    assert (code, "Traceback" in error) == (0, False)
    for wrong, said in (
        (("--out", "adapted.safetensors"), "exists already"),
        (("--out", "folder"), "expected a file of weights"),
    ):
        code, _, error = run_cli("adapt", *words, *wrong)
        assert (code, error.count("\n"), said in error) == (2, 1, True)
    code, _, error = run_cli("adapt", "--model", "net.py:build", "--out", "b.safetensors")
    assert (code, error.count("\n"), "missing: --dataset NAME, --sigma S" in error) == (2, 1, True)


def test_command_prints_the_accuracy_before_and_after(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a plain loop; the noise of that is other noise."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    data, model = sc.load_dataset("mnist-sample", "train"), network().train()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for rows in torch.arange(4000).split(100):
        images, labels = data.batch(rows)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), "weights.pt")
    words = ("--model", "net.py:build", "--init", "weights.pt", "--dataset", "mnist-sample", "--sigma", 0.5)
    _, out, _ = run_cli("adapt", *words, "--out", "adapted.safetensors", "--device", "cpu")
    (line,) = [line for line in out.splitlines() if line.startswith("accuracy on 200 training images: ")]
    printed = [int(number) for number in re.findall(r"(\d+)%", line)]
    images, labels = data.batch(torch.arange(200) * len(data) // 200)
    noisy = images + 0.5 * torch.randn(20, *images.shape, generator=torch.Generator().manual_seed(1))
    for position, file in enumerate(("weights.pt", "adapted.safetensors")):
        model.load_state_dict(torch.load(file) if position == 0 else load_file(file))
        model.eval()
        right = (model(images).argmax(1) == labels).double().mean()
        assert printed[position] == round(100 * float(right))
        right = (model(noisy.flatten(0, 1)).argmax(1) == labels.repeat(20)).double().mean()
        assert printed[2 + position] == pytest.approx(100 * float(right), abs=5)
    assert len(printed) == 4
    wide = nn.Sequential(model, nn.ConstantPad1d((0, 2), -1e9))
    assert change_of_accuracy(wide, wide, data, {"noise": "gaussian", "sigma": 0.5}) is None, "of other classes"


def test_command_makes_a_run_with_its_recipe_and_provenance(
    run_cli: Cli, tmp_path: Path, tiny_data: ImageData, trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    recipe, model = tiny_recipe(model="net.py:build", sigma=0.001, noise="laplace"), network()
    save_weights(Run(Path("run"), recipe, InputSpec.of(tiny_data), model, 2, {"precision": "fp32"}))
    recipe.save(Path("run/recipe.yaml"))
    words = ("adapt", "run", "--model", "net.py:build", "--sigma", 0.25, "--device", "cpu")
    code, out, _ = run_cli(*words, "--out", "adapted")
    assert (code, "next: smoothcert certify adapted --model net.py:build --sigma 0.25" in out) == (0, True)
    adapted = load_run(Path("adapted"), "net.py:build")
    assert (adapted.recipe, adapted.epoch) == (recipe, 2)
    record = adapted.provenance["batch_norm"]
    assert (record["sigma"], record["original_weights_sha256"]) == (0.25, tensors_digest(model.state_dict()))
    adapt_batch_norm(model, sc.load_dataset("mnist-sample", "train"), 0.25, noise="laplace")
    assert tensors_digest(adapted.model.state_dict()) == tensors_digest(model.state_dict())
    code, _, error = run_cli(*words, "--out", "adapted")
    assert (code, error.count("\n"), "exists already" in error) == (2, 1, True)
    code, _, error = run_cli(*words, "--sigma", -1, "--out", "none")
    assert (code, error.count("\n"), "sigma" in error) == (2, 1, True)
    code, _, error = run_cli("adapt", trained_run, "--out", "none")
    assert (code, error.count("\n"), "expected a network with batch norm" in error) == (2, 1, True)
    other = ImageData(torch.zeros(4, 3, 28, 28, dtype=torch.uint8), torch.arange(4), 10, "colour", "train")
    with pytest.raises(RequestError, match="its model takes images"):
        adapt_run(adapted, other, Path("none"))
    assert not Path("none").exists()
    assert (Path("adapted") / MODEL).exists()
