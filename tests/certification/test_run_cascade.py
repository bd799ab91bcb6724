"""Cascades of runs: the answers of the Python class, what the certificates file records, resume, refusals, commands."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import other_run

from smoothcert import Cascade, RequestError, RunEnsemble, SmoothedClassifier, certify_dataset, load, read_certificates
from smoothcert.certification.recertify import recertify
from smoothcert.data import ImageData
from smoothcert.errors import WorkError
from smoothcert.smoothing.cascade import last_alpha, stage_alphas

Cli = Callable[..., tuple[int, str, str]]
FEW = ("--n", 60, "--n0", 20, "--device", "cpu", "--seed", 7, "--batch-size", 60, "--precision", "fp32")
SETTINGS: dict[str, Any] = {"n": 60, "n0": 20, "seed": 7, "batch_size": 60, "device": "cpu", "precision": "fp32"}


@pytest.fixture(scope="module")
def folders(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs with sigma 1, 0.5 and 0.25; the first is poor, so that later stages are reached."""
    folder = tmp_path_factory.mktemp("cascade")
    middle = Path(shutil.copytree(trained_run, folder / "b"))
    run = load(middle)
    return [other_run(run, folder / "a", 0, sigma=1.0), middle, other_run(run, folder / "c", 1, sigma=0.25)]


def of(folders: list[Path]) -> Cascade:
    return Cascade.of_runs([load(folder) for folder in folders])


def certificates(path: Path) -> dict[int, object]:
    return {row.index: row.certificate for row in read_certificates(path).rows}


def test_file_has_the_answers_of_the_python_class_in_any_order(
    folders: list[Path], test_data: ImageData, tmp_path: Path
) -> None:
    cascade, images = of(folders), list(range(12))
    for name, parts in {"whole": [images], "resumed": [[9, 3], [5], images]}.items():
        for part in parts:
            certify_dataset(cascade, test_data, tmp_path / f"{name}.tsv", indices=part, **SETTINGS)
    whole = certificates(tmp_path / "whole.tsv")
    assert whole == certificates(tmp_path / "resumed.tsv")
    batch = test_data.batch(torch.tensor(images))[0]
    smoothed = [load(folder).smoothed(batch_size=60) for folder in folders]
    assert list(whole.values()) == list(Cascade(smoothed).certify(batch, n=60, n0=20, seed=7, indices=images))
    assert {len(certificate.earlier) for certificate in whole.values()} == {0, 1, 2}  # type: ignore[attr-defined]
    own = certify_dataset(Cascade(smoothed), test_data, tmp_path / "modules.tsv", indices=images, **SETTINGS)
    assert [row.certificate for row in own.rows] == list(whole.values())


def test_file_records_the_stages_and_refuses_others(folders: list[Path], test_data: ImageData, tmp_path: Path) -> None:
    path = tmp_path / "c.tsv"
    certify_dataset(of(folders), test_data, path, max_images=3, **SETTINGS)
    file = read_certificates(path)
    assert file.settings["cascade"] == [1.0, 0.5, 0.25]
    assert file.settings["sigma"] == 1.0
    lower, upper = stage_alphas(0.001, 3)
    assert file.settings["cascade_alphas"] == [[lower, upper], [lower, upper], [last_alpha(0.001, 3), 0.0]]
    assert file.settings["objective"] == "cascade of 3 (gaussian)"
    assert [member["training_sigma"] for member in file.settings["members"]] == [1.0, 0.5, 0.25]
    assert [member["run"] for member in file.provenance["members"]] == ["a", "b", "c"]
    assert "accuracy" not in file.provenance, "the first stage alone need not be accurate"
    with pytest.raises(RequestError, match="weights_sha256: the file has"):
        certify_dataset(of(folders[:2]), test_data, path, max_images=4, **SETTINGS)
    with pytest.raises(RequestError, match="which stage of a cascade answers depends on alpha; certify again"):
        recertify(path, tmp_path / "again.tsv", alpha=0.01)


def test_too_few_votes_for_the_alpha_of_a_stage_are_a_warning(
    folders: list[Path], test_data: ImageData, tmp_path: Path
) -> None:
    """11 votes are enough at alpha 0.001, and 12 at its part for a stage: 2^-11 < 0.001 and 2^-12 < 0.0003 < 2^-11."""
    notes: list[str] = []
    few = {**SETTINGS, "n": 11, "max_images": 1, "on_warning": notes.append}
    (row,) = certify_dataset(of(folders), test_data, tmp_path / "c.tsv", **few)
    assert row.certificate.abstained
    (note,) = (note for note in notes if "n = 11 votes cannot certify any image" in note)
    assert note.endswith("n = 12 can")
    with pytest.warns(UserWarning, match="n = 11 votes cannot certify any image .*; n = 12 can") as caught:
        of(folders).certify(test_data.batch(torch.tensor([0]))[0], n=11)
    assert [warning.filename for warning in caught] == [__file__]


def test_shards_are_merged(folders: list[Path], test_data: ImageData, tmp_path: Path, run_cli: Cli) -> None:
    parts = [tmp_path / f"shard{i}of2.tsv" for i in (1, 2)]
    for i, part in enumerate(parts, start=1):
        certify_dataset(of(folders), test_data, part, max_images=6, shard=(i, 2), **SETTINGS)
    certify_dataset(of(folders), test_data, tmp_path / "whole.tsv", max_images=6, **SETTINGS)
    assert run_cli("merge", *parts, "--out", tmp_path / "merged.tsv")[0] == 0
    assert certificates(tmp_path / "merged.tsv") == certificates(tmp_path / "whole.tsv")


def test_rows_that_claim_too_much_are_refused(folders: list[Path], test_data: ImageData, tmp_path: Path) -> None:
    path = tmp_path / "c.tsv"
    certify_dataset(of(folders), test_data, path, max_images=12, **SETTINGS)
    header, *lines = path.read_text().splitlines()
    row = next(r for r in read_certificates(path).rows if r.certificate.radius > 0 and r.certificate.earlier)
    cells = next(line for line in lines if line.split("\t")[0] == str(row.index)).split("\t")
    votes = cells[9]
    for radius, stages, message in (
        (repr(row.certificate.radius * 1.01), votes, "the radius .* exceeds"),
        (cells[3], "|".join(votes.split("|")[:1] * 4), "has votes of 4 stages, the settings say 3"),
        (cells[3], votes.replace("|", "|12:1,", 1), "do not add up to n = 60"),
        (cells[3], f"{votes}|12:60", "class 12 is out of range"),
    ):
        changed = [*cells[:3], radius, *cells[4:9], stages]
        path.write_text(header + "\n" + "\t".join(changed) + "\n")
        with pytest.raises(WorkError, match=message):
            read_certificates(path)


def test_runs_of_one_sigma_are_one_stage_with_shared_noise(
    folders: list[Path], test_data: ImageData, tmp_path: Path
) -> None:
    """Two runs at sigma 0.5 vote as their ensemble; stages of different sigma keep their own noise."""
    other = other_run(load(folders[1]), tmp_path / "d", 5)
    cascade = of([folders[0], folders[1], other])
    assert cascade.sigmas == (1.0, 0.5)
    pair = RunEnsemble([load(folders[1]), load(other)])
    batch = test_data.batch(torch.arange(8))[0]
    expected = Cascade([load(folders[0]), pair]).certify(batch, n=60, n0=20, seed=7)
    assert list(cascade.certify(batch, n=60, n0=20, seed=7)) == list(expected)
    file = certify_dataset(cascade, test_data, tmp_path / "p.tsv", max_images=1, **SETTINGS)
    assert [len(member.get("members", [])) for member in file.settings["members"]] == [0, 2]


def test_other_rules_and_runs_that_do_not_fit_are_refused(
    folders: list[Path], test_data: ImageData, tmp_path: Path
) -> None:
    cascade = of(folders)
    for field, value in {
        **{"radii": (0.5,), "radius_loss": 0.1, "label_aware": True, "sound": True, "bound": "two-sided"},
        **{"sigma": 0.5, "noise": "laplace"},
    }.items():
        with pytest.raises(RequestError, match=f"cascade: expected n votes per stage.*got {field}"):
            certify_dataset(cascade, test_data, tmp_path / "c.tsv", **{field: value}, **SETTINGS)
    assert not list(tmp_path.iterdir())
    assert len(Cascade(stage for stage in cascade.sources).stages) == len(cascade.stages)
    with pytest.raises(RequestError, match="stages: expected at least 2 smoothed classifiers, got 1"):
        Cascade(cascade.stages[0])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"expected decreasing sigmas, got 0\.25, 0\.5"):
        of(folders[:0:-1])
    with pytest.raises(RequestError, match=r"expected decreasing sigmas, got 0\.5, 0\.5"):
        Cascade([load(folders[1]).smoothed(), load(folders[1]).smoothed()])
    with pytest.raises(RequestError, match="cascade: expected different runs"):
        of([*folders, folders[0]])
    with pytest.raises(RequestError, match="expected at least 2 smoothed classifiers, got 0"):
        of([])
    narrow = SmoothedClassifier(load(folders[2]).model, sigma=0.25, precision="bf16")
    mixed = Cascade([load(folders[1]).smoothed(), narrow])
    with pytest.raises(RequestError, match="one precision, got bf16, fp32"):
        certify_dataset(mixed, test_data, tmp_path / "c.tsv", max_images=1, n=20)


def test_command_line_certifies_a_cascade_and_reports_it(
    run_cli: Cli, folders: list[Path], test_data: ImageData, tmp_path: Path
) -> None:
    out = tmp_path / "e"
    for images in (2, 4):
        code, _, err = run_cli("certify", "--cascade", *folders, *FEW, "--max-images", images, "--out", out)
        assert (code, err) == (0, "")
    path = out / "certificates" / "test-n60.tsv"
    expected = certify_dataset(of(folders), test_data, tmp_path / "python.tsv", max_images=4, **SETTINGS)
    assert certificates(path) == {row.index: row.certificate for row in expected.rows}
    assert json.loads(path.with_suffix(".json").read_text())["settings"]["cascade"] == [1.0, 0.5, 0.25]
    single = tmp_path / "single"
    certify_dataset(load(folders[0]), test_data, single / "certificates" / "t.tsv", max_images=4, **SETTINGS)
    assert run_cli("report", out, single, "--out", tmp_path / "report", "--format", "md")[0] == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "e (cascade)" in text
    assert "cascade of 3 (gaussian)" in text
    assert "cascade over σ 1, 0.5, 0.25" in text


def test_command_line_refuses_requests_that_are_unclear(run_cli: Cli, trained_run: Path, folders: list[Path]) -> None:
    for request, message in (
        (["--cascade", folders[0]], "--cascade: expected at least two run folders, got 1"),
        (["--cascade", "--ensemble", *folders], "give --ensemble or --cascade, not both"),
        (["--cascade", *folders, "--consensus", 2], "--consensus: expected none without --ensemble"),
        (["--cascade", *folders, "--sigma", 0.5], "--sigma: expected none with --cascade"),
        (["--cascade", *folders[::-1]], "expected decreasing sigmas, got 0.25, 0.5, 1; give the largest sigma first"),
        (["--cascade", folders[1], trained_run], "cascade: expected runs of at least two sigmas, got 0.5 only"),
        (["--cascade", *folders, "--sound"], "got sound; leave it out"),
    ):
        code, _, err = run_cli("certify", *request, *FEW)
        assert code == 2
        assert message in " ".join(err.split())
        assert err.count("\n") == 1
