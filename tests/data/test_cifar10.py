"""CIFAR-10: small binary files, the archive, the Python layout that is not read, and the names of the result."""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from local_mirror import Mirror

from smoothcert.data import DATASETS, cifar10, load_dataset
from smoothcert.data.augmentation import flip_and_crop
from smoothcert.data.cifar10 import OFFICIAL_SHA256, read
from smoothcert.errors import RequestError, WorkError

TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
SIZES = {**{name: 3 + place for place, name in enumerate(TRAIN)}, "test_batch": 4}
RANDOM = np.random.default_rng(0)
LABELS = {name: RANDOM.integers(0, 10, size).astype(np.uint8) for name, size in SIZES.items()}
PIXELS = {name: RANDOM.integers(0, 256, (size, 3, 32, 32)).astype(np.uint8) for name, size in SIZES.items()}


def binary(name: str) -> bytes:
    records = zip(LABELS[name], PIXELS[name], strict=True)
    return b"".join(bytes([label]) + b"".join(plane.tobytes() for plane in image) for label, image in records)


def write_binary(folder: Path) -> Path:
    target = folder / "cifar-10-batches-bin"
    target.mkdir(parents=True)
    for name in SIZES:
        (target / f"{name}.bin").write_bytes(binary(name))
    return target


def check(folder: Path) -> None:
    for split, names in (("train", TRAIN), ("test", ["test_batch"])):
        data = load_dataset("cifar10", split, folder)  # type: ignore[arg-type]
        np.testing.assert_array_equal(data.images.numpy(), np.concatenate([PIXELS[name] for name in names]))
        np.testing.assert_array_equal(data.labels.numpy(), np.concatenate([LABELS[name] for name in names]))
        assert (data.num_classes, data.split, data.shape) == (10, split, (3, 32, 32))


@pytest.mark.parametrize("below", [".", "cifar10"])
def test_round_trip(tmp_path: Path, below: str) -> None:
    write_binary(tmp_path / below)
    check(tmp_path)


def test_training_is_augmented_and_normalization_is_the_papers(tmp_path: Path) -> None:
    write_binary(tmp_path)
    train, test = (load_dataset("cifar10", split, tmp_path) for split in ("train", "test"))
    assert train.augment is flip_and_crop
    assert DATASETS["cifar10"].augmented, "the notes about missing augmentation do not read the images"
    assert test.augment is None
    for data in (train, test, DATASETS["cifar10"]):
        assert data.normalization.mean == (0.4914, 0.4822, 0.4465)
        assert data.normalization.std == (0.2023, 0.1994, 0.2010)
    order = torch.arange(4).view(1, 4)
    assert torch.equal(next(test.batches(order, slice(0, 4), 0))[0], test.batch(order[0])[0])


def test_the_name_says_whether_the_content_is_official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary(tmp_path)
    digests = {f"{name}.bin": hashlib.sha256(binary(name)).hexdigest() for name in SIZES}
    assert OFFICIAL_SHA256.keys() == digests.keys()
    assert read("test", tmp_path).name == "cifar10 (not the official files)"
    monkeypatch.setattr(cifar10, "OFFICIAL_SHA256", digests)
    assert read("train", tmp_path).name == "cifar10"
    digests["data_batch_4.bin"] = digests["data_batch_3.bin"]
    assert read("train", tmp_path).name == "cifar10 (not the official files)"
    assert read("test", tmp_path).name == "cifar10"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (binary("test_batch")[:-1], "expected whole records of 3073 bytes, found 12291 bytes"),
        (b"", "found 0 bytes"),
        (bytes([10]) + binary("test_batch")[1:], "expected labels in 0..9, found label 10"),
    ],
)
def test_damaged_binary_file_is_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = write_binary(tmp_path) / "test_batch.bin"
    path.write_bytes(content)
    with pytest.raises(WorkError) as raised:
        read("test", tmp_path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert problem in message
    assert "\n" not in message


def test_incomplete_batches_are_refused_and_not_downloaded(tmp_path: Path, mirror: Mirror) -> None:
    (write_binary(tmp_path) / "data_batch_3.bin").unlink()
    with pytest.raises(WorkError, match=r"data_batch_3\.bin: .* No such file .*; replace it, or delete its folder"):
        read("train", tmp_path, [mirror.url("archive")])
    read("test", tmp_path)
    assert mirror.requests == []


def archive(**changed: bytes | None) -> bytes:
    """A tar.gz like the official one; `changed` members have another content, or are left out."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        contents = {f"cifar-10-batches-bin/{name}.bin": changed.get(name, binary(name)) for name in SIZES}
        contents |= {"cifar-10-batches-bin/readme.html": b"read me", "../escaped": b"!", "/escaped": b"!"}
        for name, content in contents.items():
            if content is not None:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


@pytest.fixture
def url(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an archive, whose digest is the official one."""
    mirror.files["cifar"] = content = archive()
    monkeypatch.setattr(cifar10, "ARCHIVE_SHA256", hashlib.sha256(content).hexdigest())
    return mirror.url("cifar")


def test_absent_files_are_downloaded_once_and_nothing_else_is_left(tmp_path: Path, mirror: Mirror, url: str) -> None:
    folder = tmp_path / "data"
    for _ in range(2):
        read("train", folder, [url])
        check(folder)
    assert mirror.requests == ["cifar"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert [path.name for path in folder.iterdir()] == ["cifar-10-batches-bin"]
    assert sorted(path.stem for path in (folder / "cifar-10-batches-bin").iterdir()) == sorted(SIZES)


def test_an_archive_in_the_folder_serves_without_a_network(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive())
    check(tmp_path)
    assert (tmp_path / "cifar-10-binary.tar.gz").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (archive()[:-3000], "expected a whole tar.gz archive"),
        (b"<html>", "expected a whole tar.gz archive"),
        (archive(test_batch=None), "found no test_batch.bin"),
    ],
    ids=["cut", "page", "incomplete"],  # an archive holds the time: names made of it differ between two workers
)
def test_damaged_archive_leaves_nothing_behind(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(content)
    with pytest.raises(WorkError, match=problem) as raised:
        read("test", tmp_path)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == [path]


def odd_archive(kind: str) -> bytes:
    """An archive whose test_batch.bin is not a plain file of records."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in TRAIN:
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(binary(name))
            tar.addfile(member, io.BytesIO(binary(name)))
        odd = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        types = {"folder": tarfile.DIRTYPE, "pipe": tarfile.FIFOTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}
        odd.type = types.get(kind, tarfile.REGTYPE)
        odd.linkname = "../../../../etc/passwd" if kind in ("link", "hard") else ""
        if kind == "sparse":  # claims 10^12 bytes of zeros, all of them records with label 0
            odd.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(3073 << 30)}
            odd.size = 512
            tar.addfile(odd, io.BytesIO(b"0\n".ljust(512, b"\0")))
        elif kind == "large":
            odd.size = 200_000_000
            tar.fileobj.write(odd.tobuf() + bytes(1024))
        else:
            tar.addfile(odd)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "hard", "sparse", "large"])
def test_an_archive_with_odd_members_is_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(odd_archive(kind))
    with pytest.raises(WorkError, match=r"tar\.gz: expected .*; delete it") as raised:
        read("test", tmp_path)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz"]


def test_another_archive_than_the_official_is_not_unpacked(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files["cifar"] = archive()
    with pytest.raises(RequestError, match=r"expected SHA-256 .* put it into"):
        read("test", tmp_path, [mirror.url("cifar")])
    assert not (tmp_path / "cifar-10-batches-bin").exists()


@pytest.mark.parametrize("download", [True, False])
def test_offline_and_absent_is_one_line_with_a_way_out(tmp_path: Path, dead_url: str, download: bool) -> None:
    with pytest.raises(RequestError) as raised:
        read("train", tmp_path / "misspelt", [dead_url + "cifar-10-binary.tar.gz"] if download else [])
    assert list(tmp_path.iterdir()) == []
    message = str(raised.value)
    assert "\n" not in message
    reason = dead_url if download else "switched off"
    for word in (
        str(tmp_path / "misspelt" / "cifar-10-batches-bin"),
        reason,
        "download https://",
        "cifar-10-binary.tar.gz and put",
    ):
        assert word in message


@pytest.mark.parametrize("name", ["cifar-10-batches-py", "cifar-10-python.tar.gz"])
@pytest.mark.parametrize("below", [".", "cifar10"])
def test_python_layout_is_one_line_that_names_the_file_to_download(tmp_path: Path, name: str, below: str) -> None:
    path = tmp_path / below / name
    path.mkdir(parents=True)
    with pytest.raises(RequestError, match="the Python layout, which is not read") as raised:
        read("test", tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    assert str(path) in message
    assert f"download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz and put it into {tmp_path}" in message


def test_python_layout_does_not_prevent_the_download(tmp_path: Path, url: str) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    read("test", tmp_path, [url])
    check(tmp_path)
