"""Exported runs: weights rounded to float16, loaded as float32, and a record of the rounding."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_recipe

import smoothcert as sc
from smoothcert.certification.certificates import read_certificates
from smoothcert.data import Normalization
from smoothcert.errors import RequestError
from smoothcert.training.checkpoint import InputSpec, Run, new_model, save_weights, tensors_digest, write_new_run
from smoothcert.training.export import export_run
from smoothcert.training.run_folder import MODEL

Cli = Callable[..., tuple[int, str, str]]


def test_weights_are_rounded_once_and_computed_in_float32(trained_run: Path, tmp_path: Path) -> None:
    exported = export_run(trained_run, tmp_path / "half")
    original, stored = sc.load(trained_run), load_file(tmp_path / "half" / MODEL)
    weights, loaded = original.model.state_dict(), exported.model.state_dict()
    largest = 0.0
    for name, tensor in weights.items():
        expected = torch.from_numpy(tensor.numpy().astype("float16").astype("float32")) if tensor.ndim > 1 else tensor
        assert torch.equal(loaded[name], expected)
        assert loaded[name].dtype == tensor.dtype
        assert stored[name].dtype == (torch.float16 if tensor.ndim > 1 else tensor.dtype)
        largest = max(largest, float((tensor - expected).abs().max()))
    record = exported.provenance["weights"]
    assert record["largest_change"] == largest > 0
    assert record["original_weights_sha256"] == tensors_digest(weights)
    assert "cast to float32" in record["stored"]
    assert (tmp_path / "half" / MODEL).stat().st_size < 0.51 * (trained_run / MODEL).stat().st_size
    assert (exported.recipe, exported.epoch) == (original.recipe, original.epoch)


def test_mean_and_std_of_the_input_are_not_rounded(tmp_path: Path) -> None:
    """Rounded, they would scale every image a little differently than in training."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    spec = InputSpec((3, 32, 32), 10, Normalization(mean, std))
    run = Run(
        tmp_path / "run", tiny_recipe(dataset="cifar10", model="resnet20"), spec, new_model("resnet20", spec), 2, {}
    )
    write_new_run(run, run.model.state_dict())
    exported = export_run(tmp_path / "run", tmp_path / "half")
    stored = load_file(tmp_path / "half" / MODEL)
    assert torch.equal(stored["0.mean"].flatten(), torch.tensor(mean))
    assert torch.equal(stored["0.std"].flatten(), torch.tensor(std))
    assert {name for name in stored if stored[name].dtype == torch.float16} == {
        name for name, weight in run.model.named_parameters() if weight.ndim > 1
    }
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    given, expected = (network.eval()(images).detach() for network in (exported.model, run.model))
    assert torch.allclose(given, expected, rtol=0, atol=0.01 * float(expected.abs().max()))


def test_the_command_makes_a_folder_that_certify_takes(run_cli: Cli, trained_run: Path, tmp_path: Path) -> None:
    code, out, _ = run_cli("export", trained_run, "--out", tmp_path / "half")
    assert (code, f"next: smoothcert certify {tmp_path / 'half'}" in out) == (0, True)
    printed = shlex.split(out.partition("next: smoothcert ")[2])
    code, _, error = run_cli(*printed, "--n", 50, "--n0", 20, "--max-images", 2, "--device", "cpu")
    assert (code, error) == (0, "")
    file = read_certificates(tmp_path / "half" / "certificates" / "test-n50.tsv")
    assert "float16" in file.provenance["model"]["weights"]["stored"]
    code, _, error = run_cli("export", trained_run, "--out", tmp_path / "half")
    assert (code, error.count("\n"), "exists already" in error) == (2, 1, True)


def test_an_empty_folder_is_used_and_other_files_are_kept(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    export_run(trained_run, tmp_path / "half")
    assert sorted(path.name for path in (tmp_path / "half").iterdir()) == [MODEL, "recipe.yaml"]
    for name, content in ((MODEL, (trained_run / MODEL).read_bytes()), ("notes.txt", b"mine")):
        (tmp_path / name / "out").mkdir(parents=True)
        (tmp_path / name / "out" / name).write_bytes(content)
        with pytest.raises(RequestError, match="exists already"):
            export_run(trained_run, tmp_path / name / "out")
        assert (tmp_path / name / "out" / name).read_bytes() == content


def test_weights_that_float16_cannot_hold_are_refused(trained_run: Path, tmp_path: Path) -> None:
    run = sc.load(shutil.copytree(trained_run, tmp_path / "run"))
    weights = run.model.state_dict()
    name = next(name for name, tensor in weights.items() if tensor.ndim > 1)
    weights[name][0] = 1e5
    save_weights(run, weights)
    with pytest.raises(RequestError, match="expected weights that float16 can hold"):
        export_run(tmp_path / "run", tmp_path / "half")
    assert not (tmp_path / "half").exists()
