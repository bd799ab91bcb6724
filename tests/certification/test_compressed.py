"""Compressed certificates files: the same rows for every reader, resume, damaged files, both forms of one file."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import smoothcert as sc
from smoothcert.analysis.cost import training_costs
from smoothcert.certification.certificates import (
    CertificatesFile,
    CertifiedImage,
    certificates_writer,
    read_certificates,
)
from smoothcert.certification.certify_dataset import CertificationStatus
from smoothcert.certification.model_provenance import model_provenance
from smoothcert.certification.recertify import recertify
from smoothcert.certification.shards import Selection, compress_certificates, merge_certificates
from smoothcert.data import mnist
from smoothcert.errors import RequestError, WorkError
from smoothcert.io import compressed
from smoothcert.report import find_certificates, write_report
from smoothcert.smoothing.certificate import Certificate
from smoothcert.training.metrics import METRICS, compress_metrics, epochs_in, keep_metrics_before
from smoothcert.training.run_folder import MODEL

Cli = Callable[..., tuple[int, str, str]]
SETTINGS = {"sigma": 0.5, "n": 10, "alpha": 0.001, "seed": 1}


def row(index: int) -> CertifiedImage:
    return CertifiedImage(index, 3, Certificate(-1, 0.0, 5, 10, 6, ((3, 6), (1, 4))), 0.5)


def write(path: Path, images: int = 4, rows: int = 4, shard: tuple[int, int] = (1, 1)) -> Path:
    """A file whose call selected `images`, with the first `rows` of them."""
    selection = Selection(images, shard=shard)
    with certificates_writer(path, SETTINGS, {"selection": selection.to_mapping()}) as writer:
        writer.append([row(i) for i in selection.indices[:rows]])
    return path


def compact(path: Path) -> Path:
    """The path of `path` after it is compressed."""
    assert compress_certificates(path) is None
    return compressed.compressed_form(path)


@pytest.fixture(scope="module")
def certified(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run twice, with plain and with compressed certificates of the same votes."""
    folder = tmp_path_factory.mktemp("certified")
    plain = folder / "plain" / "run"
    shutil.copytree(trained_run, plain)
    options = {"n": 200, "n0": 50, "seed": 3, "max_images": 6, "device": "cpu"}
    sc.certify_dataset(sc.load(plain), mnist.load_sample("test"), plain / "certificates" / "test.tsv", **options)
    shutil.copytree(plain, folder / "packed" / "run")
    compact(folder / "packed" / "run" / "certificates" / "test.tsv")
    return plain, folder / "packed" / "run"


def test_the_bytes_are_standard_and_depend_on_the_content_only(tmp_path: Path) -> None:
    content = write(tmp_path / "a.tsv").read_bytes()
    shutil.copy(tmp_path / "a.tsv", tmp_path / "other.tsv")
    first, second = compact(tmp_path / "a.tsv"), compact(tmp_path / "other.tsv")
    assert gzip.decompress(first.read_bytes()) == content
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[3:8] == bytes(5), "no name, no time"
    assert not (tmp_path / "a.tsv").exists()


def test_every_reader_gets_the_same(certified: tuple[Path, Path], tmp_path: Path) -> None:
    plain, packed = certified
    first, second = (read_certificates(path) for _, path in find_certificates([plain, packed]))
    assert [file.path.name for file in (first, second)] == ["test.tsv", "test.tsv.gz"]
    assert (first.rows, first.settings, first.provenance) == (second.rows, second.settings, second.provenance)
    assert sc.load(packed).read_certificates("test").acr == sc.load(plain).certificates.acr > 0
    assert sc.report(packed) == sc.report(plain) == sc.report(packed / "certificates" / "test.tsv.gz")
    texts = []
    for run in (plain, packed):
        out = tmp_path / run.parent.name
        write_report([run], out, ["md", "csv", "tex", "html"])
        texts.append({path.name: path.read_bytes() for path in out.iterdir()})
        recertify(next((run / "certificates").glob("*.tsv*")), out / "again.tsv.gz", alpha=0.01)
    assert texts[0] == texts[1]
    again = [tmp_path / name / "again.tsv.gz" for name in ("plain", "packed")]
    assert again[0].read_bytes() == again[1].read_bytes()
    assert training_costs([plain])[0].acr == training_costs([packed])[0].acr == sc.load(plain).certificates.acr
    without_model = Path(shutil.copytree(packed, tmp_path / "weightless"))
    (without_model / MODEL).unlink()
    assert model_provenance(without_model) == model_provenance(plain) != {}


def test_commands_read_compressed_files(run_cli: Cli, certified: tuple[Path, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(certified[1], tmp_path / "run"))
    attack = ("attack", run, "--radii", 0.25, "--steps", 1, "--num-noise", 1, "--n", 50, "--max-images", 2)
    assert run_cli(*attack, "--device", "cpu")[0] == 0
    attacks = (run / "attacks" / "pgd.tsv").read_bytes()
    unpacked = run / "certificates" / "test.tsv"
    content = gzip.decompress((run / "certificates" / "test.tsv.gz").read_bytes())
    unpacked.write_bytes(content[: content[:-1].rindex(b"\n") + 1])
    code, _, error = run_cli(*attack, "--device", "cpu")
    assert code == 2
    assert error.count("\n") == 1
    assert "test.tsv: expected one form of this file, got test.tsv.gz next to it as well" in error
    unpacked.write_bytes(content)
    assert find_certificates([run])[0][1] == unpacked, "the two forms are equal: compressing was killed before it ended"
    (run / "certificates" / "test.tsv.gz").unlink()
    assert run_cli(*attack, "--device", "cpu")[0] == 0, "an attack continues in spite of the other form"
    assert (run / "attacks" / "pgd.tsv").read_bytes() == attacks
    code, out, _ = run_cli("compress", tmp_path)
    assert (code, "compressed 2 files" in out, unpacked.exists()) == (0, True, False)
    assert [path.name for path in run.glob("metrics*")] == ["metrics.jsonl.gz"]
    assert sc.load(run).metrics == sc.load(certified[0]).metrics
    code, out, _ = run_cli("compress", run)
    assert (code, "test.tsv.gz: left as it is: compressed already" in out) == (0, True)
    code, out, _ = run_cli("recertify", run / "certificates" / "test.tsv.gz", "--alpha", 0.01)
    assert (code, "test-alpha0.01.tsv.gz" in out) == (0, True)


def test_metrics_of_finished_runs_are_compressed_until_training_continues(trained_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    path, before, epochs = run / METRICS, (run / METRICS).read_bytes(), sc.load(run).epoch
    assert not compress_metrics(path, epochs + 1), "not finished"
    assert compress_metrics(path, epochs)
    assert gzip.decompress((run / "metrics.jsonl.gz").read_bytes()) == before
    assert len(training_costs([tmp_path])) == 1
    assert epochs_in(path) == epochs == len(sc.load(run).metrics)
    keep_metrics_before(path, epochs)  # as training does when it starts
    assert ([file.name for file in run.glob("metrics*")], path.read_bytes()) == ([METRICS], before)
    compress_metrics(path, epochs)
    (run / "metrics.jsonl.gz").write_bytes(b"damaged")
    with pytest.raises(WorkError, match=r"metrics\.jsonl\.gz: damaged, expected a whole gzip file"):
        epochs_in(path)
    path.write_bytes(before)
    with pytest.raises(RequestError, match="expected one form of this file"):
        epochs_in(path)


def test_shards_are_merged_into_a_compressed_file(tmp_path: Path) -> None:
    shards = [write(tmp_path / f"shard{i}of2.tsv", images=7, shard=(i, 2)) for i in (1, 2)]
    merge_certificates(shards, tmp_path / "plain.tsv")
    packed = [compact(path) for path in shards]
    assert merge_certificates(packed, tmp_path / "whole.tsv.gz") == 7
    assert gzip.decompress((tmp_path / "whole.tsv.gz").read_bytes()) == (tmp_path / "plain.tsv").read_bytes()
    with pytest.raises(RequestError, match=r"whole\.tsv\.gz: exists already"):
        merge_certificates(packed, tmp_path / "whole.tsv")


@pytest.fixture
def certify(trained_run: Path) -> Callable[..., CertificatesFile]:
    data = mnist.load_sample("test")

    def call(out: Path, images: int, **options: object) -> CertificatesFile:
        fields = {"n": 100, "n0": 20, "seed": 3, "batch_size": 100, "device": "cpu"} | options
        return sc.certify_dataset(sc.load(trained_run), data, out, max_images=images, **fields)

    return call


def results(file: CertificatesFile) -> list[tuple[int, Certificate]]:
    return [(row.index, row.certificate) for row in file.rows]


def test_an_interrupted_file_is_plain_and_a_complete_one_compressed(
    certify: Callable[..., CertificatesFile], tmp_path: Path
) -> None:
    expected = results(certify(tmp_path / "expected.tsv", 9))

    def interrupt(status: CertificationStatus) -> None:
        if status.done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certify(tmp_path / "a.tsv.gz", 9, on_progress=interrupt)
    assert not (tmp_path / "a.tsv.gz").exists()
    assert 3 <= len(read_certificates(tmp_path / "a.tsv").rows) < 9
    assert "lacks" in str(compress_certificates(tmp_path / "a.tsv"))
    file = certify(tmp_path / "a.tsv.gz", 9)
    assert (file.path, results(file)) == (tmp_path / "a.tsv.gz", expected)
    assert not (tmp_path / "a.tsv").exists()


def test_a_compressed_file_is_continued_or_kept(certify: Callable[..., CertificatesFile], tmp_path: Path) -> None:
    expected = results(certify(tmp_path / "expected.tsv", 9))
    certify(tmp_path / "a.tsv.gz", 4)
    before = (tmp_path / "a.tsv.gz").read_bytes()
    with pytest.raises(RequestError, match="other settings"):
        certify(tmp_path / "a.tsv", 9, n=200)
    assert (tmp_path / "a.tsv.gz").read_bytes() == before
    assert certify(tmp_path / "a.tsv", 4).path.read_bytes() == before
    file = certify(tmp_path / "a.tsv", 9)
    assert (file.path.name, results(file)) == ("a.tsv.gz", expected)
    assert not list(tmp_path.glob("a.tsv"))
    shutil.copy(tmp_path / "expected.tsv", tmp_path / "a.tsv")
    with pytest.raises(RequestError, match="one form of this file"):
        certify(tmp_path / "a.tsv", 9)


def test_a_process_killed_between_the_two_forms_of_a_file_blocks_nobody(tmp_path: Path) -> None:
    plain, packed, temporary = (tmp_path / name for name in ("a.tsv", "a.tsv.gz", ".a.tsv.gz.0a1b2c3d.tmp"))
    whole = write(plain).read_bytes()
    compressed.write_content(packed, whole)
    temporary.write_bytes(b"a part")
    assert compress_certificates(plain) is None
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a.json", packed]
    plain.write_bytes(whole)
    with compressed.plain_while_written(plain):
        assert (plain.read_bytes(), packed.exists()) == (whole, False)
    assert (gzip.decompress(packed.read_bytes()), plain.exists()) == (whole, False)


def test_a_loader_that_is_left_early_leaves_a_plain_file(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.long))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    smoothed = sc.SmoothedClassifier(lambda x: x.flatten(1)[:, :2], sigma=0.5, num_classes=2)
    options = {"n": 20, "n0": 5, "seed": 1, "out": tmp_path / "a.tsv.gz"}
    batches = smoothed.certify_loader(loader, **options)
    next(batches)
    batches.close()
    assert [path.name for path in sorted(tmp_path.glob("a.*"))] == ["a.json", "a.tsv"]
    whole = [certificate for batch in smoothed.certify_loader(loader, **options) for certificate in batch]
    assert [row.certificate for row in read_certificates(tmp_path / "a.tsv.gz").rows] == whole
    assert len(whole) == 4


@pytest.mark.parametrize("damage", ["truncated", "flipped", "plain text", "empty", "trailing", "bomb"])
def test_a_damaged_file_is_one_clear_line(
    damage: str, run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compact(write(tmp_path / "a.tsv", images=200, rows=200))
    content, middle = path.read_bytes(), path.stat().st_size // 2
    damaged = {
        "truncated": content[:-20],
        "flipped": content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :],
        "plain text": gzip.decompress(content),
        "empty": b"",
        "trailing": content + b"more",
        "bomb": content,
    }
    path.write_bytes(damaged[damage])
    if damage == "bomb":
        monkeypatch.setattr(compressed, "MOST_BYTES", 1000)
    with pytest.raises(WorkError):
        read_certificates(path)
    code, out, error = run_cli("report", path, "--out", tmp_path / "report", "--format", "md")
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert str(path) in error
    assert "Traceback" not in error
    assert not (tmp_path / "report").exists()
