"""CIFAR-10: 50,000 training and 10,000 test photographs of ten kinds of objects, 3 x 32 x 32.

Krizhevsky: "Learning Multiple Layers of Features from Tiny Images", https://www.cs.toronto.edu/~kriz/cifar.html.
Only the binary layout is read: the Python layout consists of pickles, which can run code when they are read.
"""

import gzip
import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from smoothcert.data.datasets import DATASETS, Split
from smoothcert.data.download import UnreachableError, download, only_downloader
from smoothcert.data.stored_images import StoredImages
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import error_line

if TYPE_CHECKING:
    from smoothcert.data.images import ImageData

SPEC = DATASETS["cifar10"]
RECORD = 1 + 3 * 32 * 32
"""Bytes of a record: the label, then the red, the green and the blue plane, each row by row."""
FOLDER = "cifar-10-batches-bin"
PYTHON_LAYOUT = ("cifar-10-batches-py", "cifar-10-python.tar.gz")
ARCHIVE = "cifar-10-binary.tar.gz"
URLS = (f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}",)
MOST_BYTES = 100_000_000
"""Larger batch files are not unpacked; the official ones have 30,730,000 bytes."""
ARCHIVE_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
BATCHES: Mapping[Split, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
OFFICIAL_SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
"""Digests of the official batch files."""

Records = NDArray[np.uint8]
"""[n, RECORD]: label, pixels."""


def load(split: Split, folder: Path) -> "ImageData":
    """One split of CIFAR-10, images [n, 3, 32, 32]; the training split is augmented with `flip_and_crop`.

    The binary batch files are searched for in `folder` and `folder`/cifar10. If they are absent, the official archive
    is downloaded and unpacked into `folder`; an archive that is already there is used instead. Files with other content
    than the official ones are read, too, but then the data set is called "cifar10 (not the official files)", also in
    every result. Absent files that cannot be downloaded are a RequestError, damaged files a WorkError.
    """
    from smoothcert.data.augmentation import flip_and_crop

    return read(split, folder, URLS).as_data(SPEC, split, flip_and_crop if split == "train" else None)


def read(split: Split, folder: Path, urls: Sequence[str] = ()) -> StoredImages:
    """`load` without torch; without `urls` nothing is downloaded."""
    paths = _present_batches(split, folder)
    if paths is None:
        _unpack_official(split, folder, urls)
        paths = _paths(folder, split)
    batches = [_read(path) for path in paths]
    digests = {path.name: hashlib.sha256(batch.data).hexdigest() for path, batch in zip(paths, batches, strict=True)}
    records = np.concatenate(batches)
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, *SPEC.shape)
    name = "cifar10" if digests.items() <= OFFICIAL_SHA256.items() else "cifar10 (not the official files)"
    return StoredImages(images, records[:, 0].astype(np.int64), name, SPEC.class_names or ())


def _paths(place: Path, split: Split) -> list[Path]:
    return [place / FOLDER / name for name in BATCHES[split]]


def _present_batches(split: Split, folder: Path) -> list[Path] | None:
    """The batch files in the first place that has some of them; a missing one is refused when it is read."""
    places = [_paths(place, split) for place in (folder, folder / "cifar10")]
    return next((paths for paths in places if any(path.is_file() for path in paths)), None)


def _read(path: Path) -> Records:
    """The records of a batch file; partial records and labels outside 0..9 are a WorkError."""
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise _bad_file(path, f"expected a readable file, found: {error.strerror or error}") from None
    if content.size == 0 or content.size % RECORD:
        raise _bad_file(path, f"expected whole records of {RECORD} bytes, found {content.size} bytes")
    records = content.reshape(-1, RECORD)
    if (highest := int(records[:, 0].max())) >= SPEC.num_classes:
        raise _bad_file(path, f"expected labels in 0..{SPEC.num_classes - 1}, found label {highest}")
    return records


def _bad_file(path: Path, problem: str) -> WorkError:
    return WorkError(f"{path}: {problem}; replace it, or delete its folder so that the official files are downloaded")


def _unpack_official(split: Split, folder: Path, urls: Sequence[str]) -> None:
    """Put the binary files of both splits into `folder`, from the archive there or from a downloaded one."""
    present = folder / ARCHIVE
    if not urls and not present.is_file():
        raise _absent(folder, "downloading is switched off")
    try:
        with only_downloader(folder):
            if all(path.is_file() for path in _paths(folder, split)):
                return  # another process of this run was first
            if present.is_file():
                return _unpack(present, folder)
            fetched = folder / "cifar-10-download" / ARCHIVE
            download(urls, fetched, ARCHIVE_SHA256)
            _unpack(fetched, folder)
            shutil.rmtree(fetched.parent)
    except UnreachableError as error:
        raise _absent(folder, str(error)) from error


def _unpack(archive: Path, folder: Path) -> None:
    """Extract the six binary files of `archive` into `folder`, each as a whole or not at all, and nothing else."""
    names = sorted(name for batch in BATCHES.values() for name in batch)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".cifar-10-") as temporary:
        try:
            with tarfile.open(archive, "r:gz") as tar:
                _extract(tar, {f"{FOLDER}/{name}" for name in names}, Path(temporary))
        except Exception as error:  # a damaged archive can fail in nearly any way
            if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
                raise
            problem = error_line(error)
            raise WorkError(f"{archive}: expected a whole tar.gz archive, found: {problem}; delete it") from error
        if absent := [name for name in names if not (Path(temporary) / name).is_file()]:
            raise WorkError(f"{archive}: expected it to hold {FOLDER}, found no {', '.join(absent)}; delete it")
        (folder / FOLDER).mkdir(exist_ok=True)
        for name in names:
            (Path(temporary) / name).replace(folder / FOLDER / name)


def _extract(tar: tarfile.TarFile, wanted: Collection[str], folder: Path) -> None:
    """Write the regular files `wanted` of an archive into `folder`; one above MOST_BYTES is refused.

    `tar.extract` is safe only with a filter, which Python 3.11.3 and older lack.
    """
    for member in tar:
        if member.name not in wanted or not member.isreg() or member.issparse():
            continue
        if member.size > MOST_BYTES:
            raise tarfile.TarError(f"{member.name} of {member.size:,} bytes, at most {MOST_BYTES:,}")
        content = tar.extractfile(member)
        assert content is not None  # a regular file has content
        with content, (folder / Path(member.name).name).open("wb") as file:
            shutil.copyfileobj(content, file)


def _absent(folder: Path, reason: str) -> RequestError:
    places = (place / name for place in (folder, folder / "cifar10") for name in PYTHON_LAYOUT)
    python = next((path for path in places if path.exists()), None)
    found = "nothing" if python is None else f"{python} (the Python layout, which is not read)"
    return RequestError(
        f"expected the binary files of CIFAR-10 in {folder / FOLDER}, found {found}, and {reason}; "
        f"download {URLS[0]} and put it into {folder}"
    )
