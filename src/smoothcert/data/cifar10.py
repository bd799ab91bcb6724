"""CIFAR-10: 50,000 training and 10,000 test photographs of ten kinds of objects, 3 x 32 x 32.

Krizhevsky: "Learning Multiple Layers of Features from Tiny Images", https://www.cs.toronto.edu/~kriz/cifar.html.
"""

import gzip
import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from smoothcert.data.augment import flip_and_crop
from smoothcert.data.cifar10_files import NUM_CLASSES, Records, read_binary, read_python
from smoothcert.data.download import Progress, UnreachableError, alone_in, download, made
from smoothcert.data.images import ImageData, Normalization, Split
from smoothcert.errors import RequestError, WorkError

__all__ = ["CLASS_NAMES", "NORMALIZATION", "NUM_CLASSES", "SHAPE", "load"]

SHAPE = (3, 32, 32)
NORMALIZATION = Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ARCHIVE = "cifar-10-binary.tar.gz"
URLS = (f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}",)
MOST_BYTES = 100_000_000
"""Larger batch files are not unpacked; the official ones have 30,730,000 bytes."""
ARCHIVE_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
BATCHES: Mapping[Split, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test": ("test_batch",),
}
OFFICIAL_SHA256 = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
"""Digests of the official records, which both layouts hold: of the binary files as they are."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One of the two ways in which the data set is distributed."""

    folder: str
    suffix: str
    read: Callable[[Path], Records]

    def paths(self, place: Path, split: Split) -> list[Path]:
        return [place / self.folder / (name + self.suffix) for name in BATCHES[split]]


BINARY = Layout("cifar-10-batches-bin", ".bin", read_binary)
PYTHON = Layout("cifar-10-batches-py", "", read_python)


def load(
    split: Split,
    folder: Path,
    download: bool = True,
    *,
    urls: Sequence[str] = URLS,
    archive_sha256: str = ARCHIVE_SHA256,
    official_sha256: Mapping[str, str] = OFFICIAL_SHA256,
    progress: Progress | None = None,
) -> ImageData:
    """One split of CIFAR-10, images [n, 3, 32, 32]; the training split is augmented with `flip_and_crop`.

    Looked for in `folder` and `folder`/cifar10, in the binary layout first, then in the Python one. If absent, the
    official binary archive is downloaded, unless `download` is False, and unpacked into `folder`; an archive that
    lies there already serves as well. Files with other content than the official ones are read too, but then the
    data set is called "cifar10 (not the official files)", and so in every result. Absent files that cannot be had
    are a RequestError, damaged ones a WorkError.
    """
    found = _found(split, folder)
    if found is None:
        _unpack_official(split, folder, urls if download else (), archive_sha256, progress)
        found = BINARY, BINARY.paths(folder, split)
    layout, paths = found
    batches = [layout.read(path) for path in paths]
    names = BATCHES[split]
    official = all(_digest(batch) == official_sha256[name] for name, batch in zip(names, batches, strict=True))
    records = torch.from_numpy(np.concatenate(batches))
    return ImageData(
        images=records[:, 1:].reshape(-1, *SHAPE).contiguous(),
        labels=records[:, 0].to(torch.int64),
        num_classes=NUM_CLASSES,
        name="cifar10" if official else "cifar10 (not the official files)",
        split=split,
        normalization=NORMALIZATION,
        augment=flip_and_crop if split == "train" else None,
        class_names=CLASS_NAMES,
    )


def _digest(records: Records) -> str:
    return hashlib.sha256(records.tobytes()).hexdigest()


def _found(split: Split, folder: Path) -> tuple[Layout, list[Path]] | None:
    """The first layout of which all files are there; half of one is a RequestError, so that none is mixed."""
    incomplete: RequestError | None = None
    for layout in (BINARY, PYTHON):
        for place in (folder, folder / "cifar10"):
            paths = layout.paths(place, split)
            absent = [path.name for path in paths if not path.is_file()]
            if not absent:
                return layout, paths
            if len(absent) < len(paths):
                incomplete = incomplete or RequestError(
                    f"{paths[0].parent}: expected {paths[0].name} to {paths[-1].name}, found no {', '.join(absent)}; "
                    "complete the folder, or delete it so that the official files are downloaded"
                )
    if incomplete is not None:
        raise incomplete
    return None


def _unpack_official(split: Split, folder: Path, urls: Sequence[str], sha256: str, progress: Progress | None) -> None:
    """Put the binary files of both splits into `folder`, from the archive there or from a downloaded one."""
    mine = folder / ARCHIVE
    if not urls and not mine.is_file():
        raise _absent(folder, "downloading is switched off")
    try:
        with made(folder), alone_in(folder):
            if all(path.is_file() for path in BINARY.paths(folder, split)):
                return  # another process of this run was first
            if mine.is_file():
                return _unpack(mine, folder)
            fetched = folder / "cifar-10-download" / ARCHIVE
            download(urls, fetched, sha256, progress)
            _unpack(fetched, folder)
            shutil.rmtree(fetched.parent)
    except UnreachableError as error:
        raise _absent(folder, str(error)) from error
    except OSError as error:
        problem = error.strerror or error
        raise WorkError(f"cannot write into {folder}: {problem}; free the space or choose another folder") from error


def _unpack(archive: Path, folder: Path) -> None:
    """The six binary files of `archive` into `folder`, each there as a whole or not at all; nothing else is taken."""
    wanted = {f"{BINARY.folder}/{name}{BINARY.suffix}" for names in BATCHES.values() for name in names}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".cifar-10-") as temporary:
        try:
            with tarfile.open(archive, "r:gz") as tar:
                for member in tar:
                    if member.name in wanted and member.isreg() and not member.issparse():
                        if member.size > MOST_BYTES:
                            raise tarfile.TarError(f"{member.name} of {member.size:,} bytes, at most {MOST_BYTES:,}")
                        tar.extract(member, temporary, filter="data")
        except OSError as error:
            if not isinstance(error, gzip.BadGzipFile):
                raise
            raise _bad_archive(archive, error) from error
        except Exception as error:  # a damaged archive can fail in nearly any way
            raise _bad_archive(archive, error) from error
        unpacked = [Path(temporary) / name for name in sorted(wanted)]
        if absent := [path.name for path in unpacked if not path.is_file()]:
            raise WorkError(f"{archive}: expected it to hold {BINARY.folder}, found no {', '.join(absent)}; delete it")
        (folder / BINARY.folder).mkdir(exist_ok=True)
        for path in unpacked:
            path.replace(folder / BINARY.folder / path.name)


def _bad_archive(archive: Path, error: Exception) -> WorkError:
    problem = " ".join(str(error).split())[:160] or type(error).__name__
    return WorkError(f"{archive}: expected a whole tar.gz archive, found: {problem}; delete it")


def _absent(folder: Path, reason: str) -> RequestError:
    return RequestError(
        f"expected the files of CIFAR-10 in {folder / BINARY.folder} or {folder / PYTHON.folder}, found nothing and "
        f"{reason}; put {ARCHIVE} or its files into {folder}"
    )
