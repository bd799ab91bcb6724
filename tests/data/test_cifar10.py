"""CIFAR-10: both layouts with small files, pickles that want to run code, the archive, and the names of the result."""

import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from local_mirror import Mirror

from smoothcert.data import DATASETS, load_dataset
from smoothcert.data.augment import flip_and_crop
from smoothcert.data.cifar10 import OFFICIAL_SHA256, load
from smoothcert.errors import RequestError, WorkError

TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
SIZES = {**{name: 3 + place for place, name in enumerate(TRAIN)}, "test_batch": 4}
RANDOM = np.random.default_rng(0)
LABELS = {name: RANDOM.integers(0, 10, size).astype(np.uint8) for name, size in SIZES.items()}
PIXELS = {name: RANDOM.integers(0, 256, (size, 3, 32, 32)).astype(np.uint8) for name, size in SIZES.items()}


def binary(name: str) -> bytes:
    records = zip(LABELS[name], PIXELS[name], strict=True)
    return b"".join(bytes([label]) + b"".join(plane.tobytes() for plane in image) for label, image in records)


def python2_pickle(name: str) -> bytes:
    """What Python 2 and the numpy of 2009 wrote, opcode by opcode: keys and pixels are its byte strings."""

    def short(text: str) -> bytes:
        return b"U" + bytes([len(text)]) + text.encode()

    pixels = PIXELS[name].tobytes()
    dtype = (
        b"cnumpy\ndtype\n("
        + short("u1")
        + b"K\x00K\x01tR(K\x03"
        + short("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    shape = b"(K" + bytes([len(LABELS[name])]) + b"M" + struct.pack("<H", 3072) + b"t"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + short("b") + b"tR"
    array += b"(K\x01" + shape + dtype + b"\x89" + b"T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in LABELS[name]) + b"e"
    return b"\x80\x02}(" + short("data") + array + short("labels") + labels + short("batch_label") + short("x") + b"u."


def write_binary(folder: Path) -> Path:
    target = folder / "cifar-10-batches-bin"
    target.mkdir(parents=True)
    for name in SIZES:
        (target / f"{name}.bin").write_bytes(binary(name))
    return target


def write_python(folder: Path) -> Path:
    target = folder / "cifar-10-batches-py"
    target.mkdir(parents=True)
    for name in SIZES:
        (target / name).write_bytes(python2_pickle(name))
    return target


def check(folder: Path, **options: object) -> None:
    for split, names in (("train", TRAIN), ("test", ["test_batch"])):
        data = load(split, folder, download=False, **options)  # type: ignore[arg-type]
        np.testing.assert_array_equal(data.images.numpy(), np.concatenate([PIXELS[name] for name in names]))
        np.testing.assert_array_equal(data.labels.numpy(), np.concatenate([LABELS[name] for name in names]))
        assert (data.num_classes, data.split, data.shape) == (10, split, (3, 32, 32))


def test_pickle_of_the_tests_is_one_that_pickle_reads() -> None:
    content = pickle.loads(python2_pickle("test_batch"), encoding="bytes")
    np.testing.assert_array_equal(content[b"data"], PIXELS["test_batch"].reshape(-1, 3072))
    assert content[b"labels"] == LABELS["test_batch"].tolist()


@pytest.mark.parametrize("write", [write_binary, write_python])
@pytest.mark.parametrize("below", [".", "cifar10"])
def test_round_trip(tmp_path: Path, write, below: str) -> None:
    write(tmp_path / below)
    check(tmp_path)


@pytest.mark.parametrize("order", ["C", "F"])
def test_python3_pickles_are_read_too(tmp_path: Path, order: str) -> None:
    for name, path in ((name, write_python(tmp_path) / name) for name in ["test_batch"]):
        pixels = np.array(PIXELS[name].reshape(-1, 3072), order=order)
        path.write_bytes(pickle.dumps({b"data": pixels, b"labels": LABELS[name].tolist()}, protocol=4))
    check(tmp_path)


def test_binary_is_preferred(tmp_path: Path) -> None:
    (write_python(tmp_path) / "test_batch").write_bytes(b"damaged")
    write_binary(tmp_path)
    check(tmp_path)


def test_training_is_augmented_and_normalization_is_the_papers(tmp_path: Path) -> None:
    write_binary(tmp_path)
    train, test = (load_dataset("cifar10", split, tmp_path) for split in ("train", "test"))
    assert train.augment is flip_and_crop
    assert test.augment is None
    for data in (train, test, DATASETS["cifar10"]):
        assert data.normalization.mean == (0.4914, 0.4822, 0.4465)
        assert data.normalization.std == (0.2023, 0.1994, 0.2010)
    order = torch.arange(4).view(1, 4)
    assert torch.equal(next(test.batches(order, slice(0, 4), 0))[0], test.batch(order[0])[0])


@pytest.mark.parametrize("write", [write_binary, write_python])
def test_the_name_says_whether_the_content_is_official(tmp_path: Path, write) -> None:
    write(tmp_path)
    digests = {name: hashlib.sha256(binary(name)).hexdigest() for name in SIZES}
    assert load("train", tmp_path, official_sha256=digests).name == "cifar10"
    digests["data_batch_4"] = digests["data_batch_3"]
    assert load("train", tmp_path, official_sha256=digests).name == "cifar10 (not the official files)"
    assert load("test", tmp_path, official_sha256=digests).name == "cifar10"
    assert load("test", tmp_path).name == "cifar10 (not the official files)"
    assert OFFICIAL_SHA256.keys() == SIZES.keys()


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    path, marker = write_python(tmp_path) / "test_batch", tmp_path / "marker"
    path.write_bytes(pickle.dumps({"data": Malicious(marker), "labels": [1]}, protocol=protocol))
    with pytest.raises(WorkError, match=r"posix\.mkdir, which was not run; delete the file") as raised:
        load("test", tmp_path)
    assert str(path) in str(raised.value)
    assert not marker.exists()
    pickle.loads(path.read_bytes())  # the test tests something: the usual reader runs it
    assert marker.exists()


@pytest.mark.parametrize("wanted", ["builtins eval", "numpy load", "numpy.core.multiarray fromfile", "_codecs encode"])
def test_every_other_name_is_refused(tmp_path: Path, wanted: str) -> None:
    module, name = wanted.split()
    path = write_python(tmp_path) / "test_batch"
    path.write_bytes(f"c{module}\n{name}\n(tR.".encode())
    with pytest.raises(WorkError, match=f"asks for {module}.{name}"):
        load("test", tmp_path)


GOOD = {"data": PIXELS["test_batch"].reshape(-1, 3072), "labels": LABELS["test_batch"].tolist()}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (python2_pickle("test_batch")[:-500], "found damaged data"),
        (b"", "found damaged data (EOFError)"),
        (b"something else", "found damaged data"),
        (pickle.dumps([1, 2]), "expected a pickled dict, found list"),
        (pickle.dumps({"data": 1}), "found ['data']"),
        (pickle.dumps({**GOOD, "labels": [0, 1, 10, 2]}), "expected labels in 0..9"),
        (pickle.dumps({**GOOD, "labels": [0, 1, -1, 2]}), "expected labels in 0..9"),
        (pickle.dumps({**GOOD, "labels": [0, 1, "2", 2]}), "expected labels in 0..9"),
        (pickle.dumps({**GOOD, "labels": [0, 1]}), "found 2 labels and shape (4, 3072)"),
        (pickle.dumps({**GOOD, "data": GOOD["data"].astype(np.float32)}), "expected an array of unsigned bytes"),
        (pickle.dumps({**GOOD, "data": np.array([{}], dtype=object)}), "expected an array of unsigned bytes"),
    ],
)
def test_damaged_pickle_is_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = write_python(tmp_path) / "test_batch"
    path.write_bytes(content)
    with pytest.raises(WorkError) as raised:
        load("test", tmp_path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert problem in message
    assert "\n" not in message


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
        load("test", tmp_path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert problem in message
    assert "\n" not in message


def test_half_a_layout_is_refused_and_not_mixed(tmp_path: Path, mirror: Mirror) -> None:
    (write_binary(tmp_path) / "data_batch_3.bin").unlink()
    with pytest.raises(RequestError, match=r"found no data_batch_3\.bin; complete the folder, or delete it"):
        load("train", tmp_path, urls=[mirror.url("archive")])
    load("test", tmp_path)
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


def test_absent_files_are_downloaded_once_and_nothing_else_is_left(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files["cifar"] = content = archive()
    folder = tmp_path / "data"
    options = {"urls": [mirror.url("cifar")], "archive_sha256": hashlib.sha256(content).hexdigest()}
    for _ in range(2):
        load("train", folder, **options)
        check(folder)
    assert [path for path, _ in mirror.requests] == ["cifar"]
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
)
def test_damaged_archive_leaves_nothing_behind(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(content)
    with pytest.raises(WorkError, match=problem) as raised:
        load("test", tmp_path)
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
        load("test", tmp_path, download=False)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz"]


def test_another_archive_than_the_official_is_not_unpacked(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files["cifar"] = archive()
    with pytest.raises(WorkError, match="expected SHA-256"):
        load("test", tmp_path, urls=[mirror.url("cifar")])
    assert not (tmp_path / "cifar-10-batches-bin").exists()


@pytest.mark.parametrize("download", [True, False])
def test_offline_and_absent_is_one_line_with_a_way_out(tmp_path: Path, dead_url: str, download: bool) -> None:
    with pytest.raises(RequestError) as raised:
        load("train", tmp_path / "misspelt", download, urls=[dead_url + "cifar-10-binary.tar.gz"])
    assert list(tmp_path.iterdir()) == []
    message = str(raised.value)
    assert "\n" not in message
    reason = dead_url if download else "switched off"
    for word in (str(tmp_path / "misspelt" / "cifar-10-batches-bin"), reason, "put cifar-10-binary.tar.gz"):
        assert word in message
