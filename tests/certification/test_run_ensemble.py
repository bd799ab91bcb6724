"""Ensembles of runs: what the certificates file records, resume, other statistics, refusals, the command line."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import other_run, tiny_recipe

from smoothcert import Ensemble, RequestError, RunEnsemble, certify_dataset, read_certificates, train
from smoothcert.certification.recertify import recertify
from smoothcert.data import ImageData
from smoothcert.training.checkpoint import load_run, tensors_digest

Cli = Callable[..., tuple[int, str, str]]
FEW = ("--n", 60, "--n0", 20, "--device", "cpu", "--seed", 7, "--batch-size", 60)
SETTINGS: dict[str, Any] = {"n": 60, "n0": 20, "seed": 7, "batch_size": 60, "device": "cpu"}


@pytest.fixture
def folders(trained_run: Path, tmp_path: Path) -> list[Path]:
    first = Path(shutil.copytree(trained_run, tmp_path / "a"))
    return [first, *(other_run(load_run(first), tmp_path / name, seed) for seed, name in enumerate("bc"))]


def load(folders: list[Path], consensus: int | None = None) -> RunEnsemble:
    return RunEnsemble([load_run(folder) for folder in folders], consensus)


def certificates(path: Path) -> dict[int, object]:
    return {row.index: row.certificate for row in read_certificates(path).rows}


@pytest.mark.parametrize("consensus", [None, 2])
def test_rows_do_not_depend_on_order_resume_or_the_api(
    folders: list[Path], test_data: ImageData, tmp_path: Path, consensus: int | None
) -> None:
    ensemble, images = load(folders, consensus), list(range(6))
    for name, parts in {"whole": [images], "back": [images[::-1]], "resumed": [[3, 4], [5], images]}.items():
        for part in parts:
            certify_dataset(ensemble, test_data, tmp_path / f"{name}.tsv", indices=part, **SETTINGS)
    whole = certificates(tmp_path / "whole.tsv")
    assert whole == certificates(tmp_path / "back.tsv") == certificates(tmp_path / "resumed.tsv")
    batch = test_data.batch(torch.tensor(images))[0]
    smoothed = ensemble.smoothed(batch_size=60)
    assert list(whole.values()) == list(smoothed.certify(batch, n=60, n0=20, seed=7, indices=images))
    single = Ensemble([load_run(folder).model for folder in folders], consensus)
    certify_dataset(single, test_data, tmp_path / "module.tsv", sigma=0.5, indices=images, **SETTINGS)
    assert certificates(tmp_path / "module.tsv") == whole


def test_file_records_all_members_and_refuses_others(folders: list[Path], test_data: ImageData, tmp_path: Path) -> None:
    path, ensemble = tmp_path / "e.tsv", load(folders, 2)
    certify_dataset(ensemble, test_data, path, max_images=2, **SETTINGS)
    file = read_certificates(path)
    digests = [tensors_digest(load_run(folder).model.state_dict()) for folder in folders]
    assert [member["weights_sha256"] for member in file.settings["members"]] == digests
    assert len(set(digests)) == 3
    assert file.settings["consensus"] == 2
    assert file.settings["objective"] == "ensemble of 3 (gaussian, consensus 2)"
    assert file.settings["training_sigma"] == file.settings["sigma"] == 0.5
    assert [member["run"] for member in file.provenance["members"]] == ["a", "b", "c"]
    with pytest.raises(RequestError, match="consensus: the file has 2"):
        certify_dataset(load(folders), test_data, path, max_images=3, **SETTINGS)
    with pytest.raises(RequestError, match="weights_sha256: the file has"):
        certify_dataset(load(folders[::-1], 2), test_data, path, max_images=3, **SETTINGS)


def test_recertify_recomputes_from_the_votes_of_an_ensemble(
    folders: list[Path], test_data: ImageData, tmp_path: Path
) -> None:
    certify_dataset(load(folders), test_data, tmp_path / "e.tsv", max_images=10, **SETTINGS)
    certify_dataset(load(folders), test_data, tmp_path / "loose.tsv", max_images=10, alpha=0.1, **SETTINGS)
    assert recertify(tmp_path / "e.tsv", tmp_path / "again.tsv", alpha=0.1) == 10
    assert certificates(tmp_path / "again.tsv") == certificates(tmp_path / "loose.tsv")
    assert read_certificates(tmp_path / "again.tsv").settings["members"] == load(folders).about()["members"]


def test_runs_that_do_not_fit_together_are_refused(folders: list[Path], tmp_path: Path) -> None:
    first = load_run(folders[0])
    for number, (field, value, words) in enumerate((("noise", "laplace", "noise"), ("dataset", "mnist", "data set"))):
        other = other_run(first, tmp_path / f"other{number}", 9, **{field: value})
        with pytest.raises(
            RequestError, match=f"ensemble: expected the same {words} for all members, got .* and {value} for"
        ):
            load([*folders, other])
    names = {"folder:photos": "photos", "folder:./photos": "same-photos"}  # a path may be written in several ways
    assert len(load([other_run(first, tmp_path / out, 9, dataset=name) for name, out in names.items()]).runs) == 2
    assert len(RunEnsemble(load_run(folder) for folder in folders).runs) == len(folders)
    with pytest.raises(RequestError, match="got one of them twice"):
        load([*folders, folders[0]])
    fewer = replace(first, folder=tmp_path / "fewer", spec=replace(first.spec, num_classes=9))
    with pytest.raises(RequestError, match="ensemble: expected the same number of classes for all members, got 10 for"):
        RunEnsemble([first, fewer])
    for number in (0, 1):
        with pytest.raises(RequestError, match=f"at least 2 networks, got {number}"):
            load(folders[:number])


def test_a_run_without_class_names_joins_others_that_agree(folders: list[Path]) -> None:
    """Imported for ImageNet, whose names are in its files, a run has none."""
    names = tuple("abcdefghij")
    unknown, *known = (load_run(folder) for folder in folders)
    named = [replace(run, spec=replace(run.spec, class_names=names)) for run in known]
    for runs in ([unknown, *named], [*named, unknown]):
        assert len(RunEnsemble(runs).runs) == 3
        assert RunEnsemble(runs).spec.class_names == names
    other = replace(named[1], spec=replace(named[1].spec, class_names=names[::-1]))
    with pytest.raises(RequestError, match="ensemble: expected the same class names for all members"):
        RunEnsemble([unknown, named[0], other])


def test_several_training_sigmas_need_a_sigma(folders: list[Path], test_data: ImageData, tmp_path: Path) -> None:
    mixed = load([folders[0], other_run(load_run(folders[0]), tmp_path / "wide", 9, sigma=1.0)])
    assert mixed.sigma is None
    with pytest.raises(RequestError, match=r"trained with sigma 0\.5, 1, got none"):
        mixed.smoothed()
    with pytest.raises(RequestError, match="sigma"):
        certify_dataset(mixed, test_data, tmp_path / "m.tsv", max_images=1, **SETTINGS)
    certify_dataset(mixed, test_data, tmp_path / "m.tsv", max_images=1, sigma=0.5, **SETTINGS)
    settings = read_certificates(tmp_path / "m.tsv").settings
    assert "training_sigma" not in settings
    assert [member["training_sigma"] for member in settings["members"]] == [0.5, 1.0]


def test_command_line_certifies_an_ensemble_and_reports_it(run_cli: Cli, folders: list[Path], tmp_path: Path) -> None:
    code, _, err = run_cli("certify", "--ensemble", *folders, *FEW, "--max-images", 4, "--consensus", 2)
    assert (code, err) == (0, "")
    path = tmp_path / "ensemble-a-b-c" / "certificates" / "test-n60-consensus2.tsv"
    assert len(read_certificates(path).rows) == 4
    code, _, _ = run_cli("certify", *folders, "--ensemble", *FEW, "--max-images", 6, "--consensus", 2)
    assert code == 0
    assert len(read_certificates(path).rows) == 6
    assert run_cli("certify", "--ensemble", *folders, *FEW, "--max-images", 4, "--out", tmp_path / "e")[0] == 0
    assert (tmp_path / "e" / "certificates" / "test-n60.tsv").exists()
    runs = (tmp_path / "ensemble-a-b-c", tmp_path / "e")
    code, _, _ = run_cli("report", *runs, "--out", tmp_path / "report", "--format", "md")
    assert code == 0
    assert "ensemble of 3 (gaussian, consensus 2)" in (tmp_path / "report" / "report.md").read_text()
    json.loads(path.with_suffix(".json").read_text())


def test_command_line_refuses_requests_that_are_unclear(run_cli: Cli, folders: list[Path], tmp_path: Path) -> None:
    wide = other_run(load_run(folders[0]), tmp_path / "wide", 9, sigma=1.0)
    for request, message in (
        (["--ensemble", folders[0]], "--ensemble: expected at least two run folders, got 1"),
        ([folders[0], "--consensus", 2], "--consensus: expected none without --ensemble"),
        (["--ensemble", *folders, "--consensus", 3], "consensus: expected at least 2 and fewer than the 3 members"),
        (["--ensemble", folders[0], wide], "--sigma: expected one for all members, which were trained with sigma 0.5"),
        (["--ensemble", *folders[:2], tmp_path / "none"], "none: no such run folder"),
    ):
        code, _, err = run_cli("certify", *request, *FEW)
        assert code == 2
        assert message in " ".join(err.split())
        assert err.count("\n") == 1


def test_built_in_and_own_networks_are_members_of_one_ensemble(
    run_cli: Cli, folders: list[Path], tmp_path: Path, tiny_data: ImageData
) -> None:
    """--model names the code of the one and not the network of the other; other code is not run."""
    code, unnamed = (f"{tmp_path / name}.py:build" for name in ("own_for_ensemble", "unnamed_for_ensemble"))
    for reference in (code, unnamed):
        Path(reference.removesuffix(":build")).write_text(
            f"from torch import nn\nname = {reference!r}\n"
            "def build(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))\n"
        )
    for out, reference in (("own", code), ("unnamed", unnamed)):
        train(tiny_recipe(model=reference, epochs=1), tiny_data.subset(torch.arange(64)), tmp_path / out, device="cpu")
    request = ("certify", "--ensemble", folders[0], tmp_path / "own", "--out", tmp_path / "e", "--max-images", 1, *FEW)
    status, _, err = run_cli(*request, "--model", code)
    assert (status, err) == (0, "")
    members = read_certificates(tmp_path / "e/certificates/test-n60.tsv").settings["members"]
    assert [member["model"] for member in members] == ["tiny", code]
    for words, message in (
        (request, f"its network is the code {code}; allow it with --model {code}"),
        ((*request, "--model", code, tmp_path / "unnamed"), f"its network is the code {unnamed}; allow it with"),
        (("certify", "--ensemble", *folders, "--model", code, *FEW), "its network is tiny, got --model"),
    ):
        status, _, err = run_cli(*words)
        assert (status, err.count("\n"), message in err) == (2, 1, True), err


def test_results_of_an_ensemble_do_not_go_into_the_folder_of_a_run(run_cli: Cli, folders: list[Path]) -> None:
    before = sorted(folders[1].rglob("*"))
    for command in ("certify", "attack"):
        code, _, err = run_cli(command, "--ensemble", *folders, "--out", folders[1], "--max-images", 1, "--n", 60)
        assert (code, err.count("\n")) == (2, 1)
        assert "--out: expected a folder for the ensemble alone, got the run" in err
    assert sorted(folders[1].rglob("*")) == before
