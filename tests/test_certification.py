"""A data set through CERTIFY: resume, kills, independence of order and batching, agreement with the plain API."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from smoothcert import SmoothedClassifier
from smoothcert.certificates import CertifiedImage, read_certificates
from smoothcert.certification import (
    CertificationStatus,
    certify_run,
    chosen_images,
    images_at_once,
    unreachable_radius,
)
from smoothcert.checkpoint import load_run
from smoothcert.data import ImageData, mnist_sample
from smoothcert.errors import RequestError
from smoothcert.recipe import CertifyRecipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def test_data() -> ImageData:
    return mnist_sample.load("test")


def recipe(**changes: object) -> CertifyRecipe:
    return CertifyRecipe.model_validate({"sigma": 0.5, "n": 300, "seed": 5} | changes)


def comparable(rows: tuple[CertifiedImage, ...]) -> dict[int, tuple[object, ...]]:
    """Everything but the time."""
    return {row.index: (row.label, row.certificate) for row in rows}


def certify(
    run: Path, data: ImageData, path: Path, indices: list[int], **changes: object
) -> dict[int, tuple[object, ...]]:
    certify_run(load_run(run), data, indices, recipe(**changes), path, CPU)
    return comparable(read_certificates(path).rows)


def test_rows_equal_the_plain_api(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    """The same numbers as SmoothedClassifier gives for images 0, 1, 2 with the same seed."""
    rows = certify(trained_run, test_data, tmp_path / "a.tsv", [0, 1, 2])
    images, labels = test_data.batch(torch.arange(3))
    model = load_run(trained_run).model
    plain = SmoothedClassifier(model, sigma=0.5, num_classes=10).certify(images, n=300, seed=5)
    assert [rows[i][1] for i in range(3)] == plain
    assert [rows[i][0] for i in range(3)] == labels.tolist()
    assert any(certificate.radius > 0 for certificate in plain)


def test_order_resume_and_parts_change_nothing(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    whole = certify(trained_run, test_data, tmp_path / "whole.tsv", list(range(14)))
    backwards = certify(trained_run, test_data, tmp_path / "back.tsv", list(range(14))[::-1])
    certify(trained_run, test_data, tmp_path / "parts.tsv", [3, 4])
    certify(trained_run, test_data, tmp_path / "parts.tsv", [9])
    parts = certify(trained_run, test_data, tmp_path / "parts.tsv", list(range(14)))
    assert whole == backwards == parts
    assert len(whole) == 14


def test_a_file_is_continued_without_doing_rows_again(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    certify(trained_run, test_data, path, [0, 1, 2])
    before = path.read_bytes()
    seen: list[CertificationStatus] = []
    certify_run(load_run(trained_run), test_data, [0, 1, 2, 3], recipe(), path, CPU, seen.append)
    assert path.read_bytes().startswith(before)
    assert [status.done for status in seen] == [3, 4]
    radii = [row.radius_if_correct for row in read_certificates(path).rows]
    assert seen[-1].average_certified_radius == pytest.approx(sum(radii) / 4)
    assert seen[-1].total == 4
    assert seen[-1].votes_per_second > 0


def test_other_settings_are_refused(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    certify(trained_run, test_data, tmp_path / "a.tsv", [0])
    for field, value in (("n", 400), ("alpha", 0.01), ("seed", 6), ("sigma", 0.25), ("batch_size", 250)):
        with pytest.raises(RequestError, match=f"{field}: the file has"):
            certify(trained_run, test_data, tmp_path / "a.tsv", [1], **{field: value})


def test_settings_say_what_was_certified_and_how(trained_run: Path, test_data: ImageData, tmp_path: Path) -> None:
    certify(trained_run, test_data, tmp_path / "a.tsv", [0])
    stored = read_certificates(tmp_path / "a.tsv")
    expected = {"sigma": 0.5, "n0": 100, "n": 300, "alpha": 0.001, "precision": "fp32", "seed": 5, "batch_size": 500}
    assert {k: stored.settings[k] for k in expected} == expected
    assert stored.settings["noise"] == "gaussian"
    assert stored.settings["dataset"] == "mnist-sample"
    assert len(stored.settings["weights_sha256"]) == 64
    assert stored.provenance["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_kill_loses_at_most_the_row_in_flight(trained_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    options = ["--n", "2500", "--max-images", "12", "--seed", "3", "--batch-size", "100", "--device", "cpu"]
    command = [sys.executable, "-m", "smoothcert", "certify", str(run), *options]
    victim = subprocess.Popen([*command, "--name", "killed"], stdout=subprocess.DEVNULL)
    path = run / "certificates" / "killed.tsv"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= 4):
        assert time.monotonic() < deadline
        assert victim.poll() is None
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    kept = path.read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1]
    assert 3 <= kept.count(b"\n") - 1 < 12
    subprocess.run([*command, "--name", "killed"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*command, "--name", "whole"], check=True, stdout=subprocess.DEVNULL)
    assert path.read_bytes().startswith(kept)
    whole = read_certificates(run / "certificates" / "whole.tsv").rows
    assert comparable(read_certificates(path).rows) == comparable(whole)
    assert len(whole) == 12


def test_chosen_images() -> None:
    assert chosen_images(10, 4, None) == [0, 4, 8]
    assert chosen_images(10, 1, 3) == [0, 1, 2]
    for skip, most in ((0, None), (1, 0)):
        with pytest.raises(RequestError, match="expected at least 1"):
            chosen_images(10, skip, most)


@pytest.mark.parametrize(("n", "images"), [(100_000, 1), (1_000, 5), (5_000, 2)])
def test_rows_are_written_often(n: int, images: int) -> None:
    assert images_at_once(recipe(n=n)) == images


def test_a_radius_out_of_reach_is_announced() -> None:
    assert unreachable_radius(recipe(n=1000), 1.2) is None
    warning = unreachable_radius(recipe(n=1000), 1.5)
    assert warning is not None
    assert "at most 1.231" in warning
    needed = int(warning.split("; n = ")[1].split(" ")[0].replace(",", ""))
    assert unreachable_radius(recipe(n=needed), 1.499) is None
    assert unreachable_radius(recipe(n=needed - 10), 1.5) is not None
    assert "no n can" in str(unreachable_radius(recipe(n=1000), 50.0))
