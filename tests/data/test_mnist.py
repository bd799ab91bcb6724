"""MNIST and its bundled sample: found on disk, downloaded, checked, and refused when damaged."""

import gzip
import hashlib
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from local_mirror import Mirror

from smoothcert.data import DATASETS, default_folder, load_dataset, mnist
from smoothcert.data.mnist import FILES, MnistFile, read_idx
from smoothcert.errors import RequestError, WorkError

PIXELS = np.random.default_rng(0).integers(0, 256, size=(7, 4, 5), dtype=np.uint8)
CLASSES = np.array([3, 1, 4, 1, 5, 9, 2], dtype=np.uint8)
IMAGES_CONTENT = struct.pack(">IIII", 2051, 7, 4, 5) + PIXELS.tobytes()
LABELS_CONTENT = struct.pack(">II", 2049, 7) + CLASSES.tobytes()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def described(name: str, content: bytes) -> MnistFile:
    return MnistFile(name, archive_sha256=sha256(gzip.compress(content, mtime=0)), content_sha256=sha256(content))


SMALL = (described("images.gz", IMAGES_CONTENT), described("labels.gz", LABELS_CONTENT))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test split consists of two small files."""
    monkeypatch.setitem(mnist.FILES, "test", SMALL)  # type: ignore[arg-type]


def write(folder: Path, images: bytes = IMAGES_CONTENT, labels: bytes = LABELS_CONTENT, level: int = 9) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "images.gz").write_bytes(gzip.compress(images, level, mtime=0))
    (folder / "labels.gz").write_bytes(gzip.compress(labels, level, mtime=0))


@pytest.mark.parametrize("place", ["MNIST/raw", ".", "mnist"])
@pytest.mark.parametrize("level", [0, 9])  # the archive's bytes differ, the content does not
@pytest.mark.usefixtures("small")
def test_files_are_found_and_read(tmp_path: Path, place: str, level: int) -> None:
    write(tmp_path / place, level=level)
    data = mnist.read("test", tmp_path)
    np.testing.assert_array_equal(data.images, PIXELS[:, None])
    assert data.labels.tolist() == [3, 1, 4, 1, 5, 9, 2]
    loaded = load_dataset("mnist", "test", tmp_path)
    assert torch.equal(loaded.images, torch.from_numpy(PIXELS[:, None]))
    assert (loaded.num_classes, loaded.name, loaded.split) == (10, "mnist", "test")


@pytest.mark.parametrize("damaged", ["images", "labels"])
@pytest.mark.usefixtures("small")
def test_other_content_is_refused_with_both_digests(tmp_path: Path, damaged: str) -> None:
    content = {"images": IMAGES_CONTENT, "labels": LABELS_CONTENT}
    changed = content[damaged][:-1] + bytes([content[damaged][-1] ^ 1])
    write(tmp_path, **{damaged: changed})
    with pytest.raises(WorkError) as raised:
        mnist.read("test", tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    for word in (str(tmp_path / f"{damaged}.gz"), sha256(changed), sha256(content[damaged]), "delete it"):
        assert word in message


ARCHIVE = gzip.compress(IMAGES_CONTENT, mtime=0)


def test_an_archive_that_unpacks_to_much_more_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(IMAGES_CONTENT) + 30 * gzip.compress(bytes(10_000_000), compresslevel=1))
    tracemalloc.start()
    with pytest.raises(WorkError, match="expected content with SHA-256"):
        read_idx(path, sha256(IMAGES_CONTENT))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150_000_000


@pytest.mark.parametrize(
    ("archive", "problem"),
    [
        (ARCHIVE[:-20], "expected a whole gzip archive, found: "),
        (b"", "expected content with SHA-256"),
        (b"<html>not found</html>", "expected a whole gzip archive, found: "),
        (ARCHIVE[:40] + bytes(20) + ARCHIVE[60:], "expected a whole gzip archive, found: "),
        (gzip.compress(IMAGES_CONTENT[:-1], mtime=0), "expected content with SHA-256"),
        (gzip.compress(IMAGES_CONTENT + b"!", mtime=0), "expected content with SHA-256"),
    ],
)
def test_damaged_idx_file_is_one_line(tmp_path: Path, archive: bytes, problem: str) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(archive)
    with pytest.raises(WorkError) as raised:
        read_idx(path, sha256(IMAGES_CONTENT))
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    assert problem in message
    assert message.endswith("; delete it so that it is downloaded again")


def test_idx_array_can_be_written_to(tmp_path: Path) -> None:
    write(tmp_path)
    labels = read_idx(tmp_path / "labels.gz", sha256(LABELS_CONTENT))
    labels += 1
    np.testing.assert_array_equal(labels, CLASSES + 1)


@pytest.mark.usefixtures("small")
def test_absent_files_are_downloaded_once(tmp_path: Path, mirror: Mirror, dead_url: str) -> None:
    for name, content in (("images.gz", IMAGES_CONTENT), ("labels.gz", LABELS_CONTENT)):
        mirror.files["mnist/" + name] = gzip.compress(content, mtime=0)
    for _ in range(2):
        data = mnist.read("test", tmp_path, (dead_url, mirror.url("mnist/")))
        np.testing.assert_array_equal(data.images, PIXELS[:, None])
    assert mirror.requests == ["mnist/images.gz", "mnist/labels.gz"]
    assert sorted(path.name for path in (tmp_path / "MNIST" / "raw").iterdir()) == ["images.gz", "labels.gz"]


@pytest.mark.usefixtures("small")
def test_only_the_absent_file_is_downloaded(tmp_path: Path, mirror: Mirror) -> None:
    write(tmp_path)
    (tmp_path / "labels.gz").unlink()
    mirror.files["labels.gz"] = gzip.compress(LABELS_CONTENT, mtime=0)
    mnist.read("test", tmp_path, [mirror.url("")])
    assert mirror.requests == ["labels.gz"]


def test_offline_and_absent_is_one_line_with_a_way_out(tmp_path: Path, dead_url: str) -> None:
    with pytest.raises(RequestError) as raised:
        mnist.read("train", tmp_path, [dead_url])
    message = str(raised.value)
    assert "\n" not in message
    for word in (
        "train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz",
        str(tmp_path / "MNIST" / "raw"),
        dead_url,
        "--set dataset=mnist-sample",
        "to certify: --dataset mnist-sample",
    ):
        assert word in message


@pytest.mark.usefixtures("small")
def test_no_download_when_switched_off(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"images\.gz and labels\.gz .* switched off"):
        mnist.read("test", tmp_path)


@pytest.mark.usefixtures("small")
def test_wrong_file_on_every_mirror_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files["images.gz"] = b"something else"
    with pytest.raises(RequestError, match=r"expected SHA-256 .* put the files there"):
        mnist.read("test", tmp_path, [mirror.url("")])


# Computed from the idx files with zcat, tail, head and sha256sum; the counts with uniq.
SAMPLE = {
    "train": (
        "2f7182bf021ffc5c1f62db987487f14d899b5c639f421a80f3095affc09a7db2",
        "2f345bad07338ec537641465e169cc4b7288a44244f251211c7f842641e7d927",
        [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978],
    ),
    "test": (
        "170ff6838184f9ec6aaa1bbb5932ed59b7463585418d2da081525165ef21edae",
        "949a3782a9c308bf8ca08ff720810fe1de358fe09887727264c684c785d1ec53",
        [175, 234, 219, 207, 217, 179, 178, 205, 192, 194],
    ),
}


@pytest.mark.parametrize("split", ["train", "test"])
def test_sample_is_the_known_one(split: str, tmp_path: Path) -> None:
    images_digest, labels_digest, counts = SAMPLE[split]
    data = load_dataset("mnist-sample", split, tmp_path)
    assert data.images.shape == (sum(counts), 1, 28, 28)
    assert sha256(data.images.numpy().tobytes()) == images_digest
    assert sha256(data.labels.to(torch.uint8).numpy().tobytes()) == labels_digest
    assert np.bincount(data.labels.numpy()).tolist() == counts
    assert (data.num_classes, data.name, data.split) == (10, "mnist-sample", split)
    assert list(tmp_path.iterdir()) == []


def full_mnist_is_here() -> bool:
    if not os.environ.get("SMOOTHCERT_DATA"):
        return False
    names = [file.name for files in FILES.values() for file in files]
    places = [default_folder() / below for below in ("MNIST/raw", ".", "mnist")]
    return all(any((place / name).is_file() for place in places) for name in names)


@pytest.mark.skipif(not full_mnist_is_here(), reason="SMOOTHCERT_DATA does not hold the files of MNIST")
@pytest.mark.parametrize(("split", "length"), [("train", 60_000), ("test", 10_000)])
def test_sample_is_the_beginning_of_mnist(split: str, length: int) -> None:
    sample, full = load_dataset("mnist-sample", split), load_dataset("mnist", split)
    assert len(full) == length
    assert full.shape == DATASETS["mnist"].shape
    assert torch.equal(sample.images, full.images[: len(sample)])
    assert torch.equal(sample.labels, full.labels[: len(sample)])


def test_every_data_set_is_described_correctly() -> None:
    spec = DATASETS["mnist-sample"]
    data = spec.load("test", Path("unused"))
    assert (data.shape, data.num_classes) == (spec.shape, spec.num_classes)
    for name, spec in DATASETS.items():
        assert spec.description, name
        assert "\n" not in spec.description


def test_unknown_name_lists_the_names_and_the_near_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"mnist, .*npz:PATH, FILE.py:Name, got 'mnst'; did you mean mnist"):
        load_dataset("mnst", "test")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=r"got 'zebra'; choose one"):
        load_dataset("zebra", "test")
    (tmp_path / "zebra").mkdir()
    (tmp_path / "own.npz").touch()
    for path, meant in (("zebra", "folder:zebra"), ("own.npz", "npz:own.npz")):
        with pytest.raises(RequestError, match=rf"got '{path}'; did you mean {meant}\?"):
            load_dataset(path, "test")


def test_unknown_split() -> None:
    with pytest.raises(RequestError, match=r"train, test, got 'validation'"):
        load_dataset("mnist-sample", "validation")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SMOOTHCERT_DATA": "/chosen", "XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/chosen"),
        ({"SMOOTHCERT_DATA": "~/chosen", "HOME": "/home/me"}, "/home/me/chosen"),
        ({"SMOOTHCERT_DATA": "", "XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/cache/smoothcert"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/smoothcert"),
    ],
)
def test_default_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("SMOOTHCERT_DATA", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_folder() == Path(expected)


def test_load_dataset_looks_in_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SMOOTHCERT_DATA", str(tmp_path))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(b"damaged")
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    with pytest.raises(WorkError, match=str(tmp_path / "t10k-images-idx3-ubyte.gz")):
        load_dataset("mnist", "test")
