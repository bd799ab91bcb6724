"""Randomized bounds in certificates files: stored coins, resume, other statistics, labels in reports, refusals."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from smoothcert import CertifySettings, RequestError, certify_dataset, load, read_certificates, report
from smoothcert.certification.recertify import recertify
from smoothcert.certification.shards import merge_certificates
from smoothcert.data import ImageData
from smoothcert.errors import WorkError
from smoothcert.noise import Gaussian
from smoothcert.report import write_report
from smoothcert.smoothing.bounds import randomized_error_bound
from smoothcert.smoothing.votes import coin_of

Cli = Callable[..., tuple[int, str, str]]
SETTINGS: dict[str, Any] = {"n": 80, "n0": 20, "seed": 7, "batch_size": 200, "device": "cpu"}
IMAGES = list(range(8))


@pytest.fixture(scope="module")
def folder(trained_run: Path, test_data: ImageData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the same votes under both bounds."""
    folder = Path(shutil.copytree(trained_run, tmp_path_factory.mktemp("randomized") / "run"))
    for bound in ("one-sided", "randomized"):
        path = folder / "certificates" / f"{bound}.tsv"
        certify_dataset(load(folder), test_data, path, indices=IMAGES, bound=bound, **SETTINGS)
    return folder


def certificates(path: Path) -> list[object]:
    return [row.certificate for row in sorted(read_certificates(path).rows, key=lambda row: row.index)]


def test_coins_are_stored_and_radii_follow_from_them(folder: Path, test_data: ImageData, tmp_path: Path) -> None:
    path = folder / "certificates" / "randomized.tsv"
    file = read_certificates(path)
    assert file.settings["bound"] == "randomized"
    assert path.read_text().splitlines()[0].endswith("votes\tcoin")
    assert [row.certificate.coin for row in file.rows] == [coin_of((7, i)) for i in IMAGES]
    smoothed = load(folder).smoothed(batch_size=200)
    batch = test_data.batch(torch.tensor(IMAGES))[0]
    result = smoothed.certify(batch, n=80, n0=20, seed=7, indices=IMAGES, bound="randomized")
    assert certificates(path) == list(result)
    assert "randomized bound with coin" in repr(result)
    for part in ([5, 2], IMAGES):
        certify_dataset(load(folder), test_data, tmp_path / "resumed.tsv", indices=part, bound="randomized", **SETTINGS)
    assert certificates(tmp_path / "resumed.tsv") == certificates(path)


def test_recertify_keeps_draws_and_drops_coins(folder: Path, tmp_path: Path) -> None:
    plain, drawn = (folder / "certificates" / f"{bound}.tsv" for bound in ("one-sided", "randomized"))
    recertify(plain, tmp_path / "drawn.tsv", bound="randomized")
    assert certificates(tmp_path / "drawn.tsv") == certificates(drawn)
    recertify(drawn, tmp_path / "again.tsv", alpha=0.001)
    assert certificates(tmp_path / "again.tsv") == certificates(drawn)
    recertify(drawn, tmp_path / "plain.tsv", bound="one-sided")
    assert certificates(tmp_path / "plain.tsv") == certificates(plain)


def test_an_image_without_votes_has_no_coin(folder: Path, test_data: ImageData, tmp_path: Path) -> None:
    """A label-aware rule draws none for an image whose first votes do not choose its label."""
    wrong = replace(test_data, labels=(test_data.labels + 1) % 10)
    settings = {**SETTINGS, "bound": "randomized", "label_aware": True}
    file = certify_dataset(load(folder), wrong, tmp_path / "a.tsv", indices=IMAGES, **settings)
    drawn = [(row.certificate.n, row.certificate.coin is None) for row in file]
    assert (0, True) in drawn
    assert set(drawn) <= {(0, True), (80, False)}


def test_coins_of_merged_shards_need_no_seed(folder: Path, test_data: ImageData, tmp_path: Path) -> None:
    for part, seed in enumerate((7, 8)):
        settings = {**SETTINGS, "bound": "randomized", "seed": seed}
        certify_dataset(load(folder), test_data, tmp_path / f"{part}.tsv", indices=IMAGES[part::2], **settings)
    merge_certificates([tmp_path / "0.tsv", tmp_path / "1.tsv"], tmp_path / "merged.tsv")
    assert recertify(tmp_path / "merged.tsv", tmp_path / "again.tsv", alpha=0.05) == len(IMAGES)
    file = read_certificates(tmp_path / "again.tsv")
    assert [row.certificate.coin for row in file] == [coin_of((7 + i % 2, i)) for i in IMAGES]
    for c in (row.certificate for row in file if not row.certificate.abstained):
        assert c.coin is not None
        bound = randomized_error_bound(c.count, c.n, 0.05, c.coin)
        assert c.radius == Gaussian(file.settings["sigma"]).radius(bound)


def test_rows_need_their_coin(folder: Path, tmp_path: Path) -> None:
    for name in ("randomized.tsv", "randomized.json"):
        shutil.copy(folder / "certificates" / name, tmp_path / name)
    path = tmp_path / "randomized.tsv"
    header, *lines = path.read_text().splitlines()
    largest = max(lines, key=lambda line: float(line.split("\t")[3])).split("\t")
    for cells, message in (
        (largest[:10], "expected a coin for each image of a randomized bound"),
        ([*largest[:10], "1.5"], "expected a coin above 0 and at most 1, got 1.5"),
        ([*largest[:10], "0.0"], "expected a coin above 0 and at most 1, got 0.0"),
        ([*largest[:10], "1.0"], "the radius .* exceeds"),
        ([*largest, "7"], "expected 6, 10 or 11 columns, got 12"),
    ):
        path.write_text(header + "\n" + "\t".join(cells) + "\n")
        with pytest.raises(WorkError, match=message):
            read_certificates(path)


def test_reports_label_the_bound_and_never_rank_it_with_the_plain_one(folder: Path, tmp_path: Path) -> None:
    written = write_report([folder], tmp_path / "out", ["md", "html"])
    plain, drawn = sorted(written.contents.summaries, key=lambda summary: summary.apart)
    assert (plain.apart, drawn.apart) == ("", "randomized bound")
    assert plain.group != drawn.group
    text = (tmp_path / "out" / "report.md").read_text()
    assert "run/randomized (randomized bound)" in text
    assert "randomized bound: each radius depends on a coin that the file stores" in text
    assert "**" not in text.partition("\n\nCertified")[0].replace("**run", "")
    assert drawn.ceiling is not None
    assert plain.ceiling is not None
    assert drawn.ceiling > plain.ceiling
    assert [row["bound"] for row in report(folder)] == ["one-sided", "randomized"]
    assert repr(load(folder).read_certificates("randomized")).endswith("randomized bound)")


def test_published_numbers_are_not_compared_with_it(folder: Path, run_cli: Cli, tmp_path: Path) -> None:
    from smoothcert.report.published import Published, published_rows

    path = folder / "certificates" / "randomized.tsv"
    row = Published("smoothmix/table2", "Gaussian", 1.0, {}, ())
    with pytest.raises(RequestError, match="expected the one-sided bound to compare with smoothmix/table2"):
        published_rows([("run", read_certificates(path))], lambda *_: row)


def test_rules_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises((RequestError, ValidationError), match="with radii or until_radius, got randomized"):
        CertifySettings(bound="randomized", radii=(0.5,))
    assert CertifySettings(bound="randomized").default_path(tmp_path, None).name == "test-n100000-randomized.tsv"


def test_commands_take_the_bound_and_say_so(run_cli: Cli, folder: Path, test_data: ImageData, tmp_path: Path) -> None:
    from PIL import Image

    pixels = (test_data.batch(torch.tensor([0]))[0][0, 0] * 255).byte().numpy()
    Image.fromarray(pixels).save(tmp_path / "seven.png")
    code, out, _ = run_cli("predict", folder, tmp_path / "seven.png", "--n", 100, "--bound", "randomized")
    assert code == 0
    assert "L2 radius" in out
    assert "(randomized" in out
    assert "each radius depends on a coin" in out
    few = ("--n", 60, "--n0", 20, "--device", "cpu", "--max-images", 2, "--batch-size", 200)
    assert run_cli("certify", folder, *few, "--bound", "randomized")[0] == 0
    path = folder / "certificates" / "test-n60-randomized.tsv"
    assert all(row.certificate.coin for row in read_certificates(path).rows)
    path.unlink()
    assert run_cli("certify", folder, *few, "--bound", "randomized", "--radii", "0.5")[0] == 2
