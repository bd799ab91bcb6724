"""MNIST: 60,000 training and 10,000 test images of handwritten digits, 1 x 28 x 28.

LeCun, Cortes, Burges: "The MNIST database of handwritten digits", http://yann.lecun.com/exdb/mnist/.
It is distributed as gzipped idx files, whose numbers are big-endian: a magic number whose last byte counts the
dimensions, one uint32 per dimension, the bytes. A sample of it is part of the package, for work without a network.
"""

import gzip
import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smoothcert.data.datasets import DATASETS, Split
from smoothcert.data.download import UnreachableError, download
from smoothcert.data.stored_images import StoredImages
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import check_regular_file

if TYPE_CHECKING:
    from smoothcert.data.images import ImageData

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SAMPLE = Path(__file__).with_name("mnist_sample.npz")  # <split>_images uint8 [n, 28, 28], <split>_labels uint8 [n]
MOST_BYTES = 50_000_000
"""No more is unpacked; the largest file of MNIST has 47,040,016 bytes."""


class MnistFile(NamedTuple):
    """One of the four files, with the SHA-256 of the archive that the mirrors serve and that of its content.

    A file on disk is judged by its content, because copies that were compressed again are common.
    """

    name: str
    archive_sha256: str
    content_sha256: str


SplitFiles = tuple[MnistFile, MnistFile]
"""The images and the labels of one split."""
FILES: Mapping[Split, SplitFiles] = {
    "train": (
        MnistFile(
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        MnistFile(
            "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
    ),
    "test": (
        MnistFile(
            "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        MnistFile(
            "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
}


def load(split: Split, folder: Path) -> "ImageData":
    """One split of MNIST, images [n, 1, 28, 28], with every byte checked against the known digests.

    The files are searched for in `folder`/MNIST/raw, `folder` and `folder`/mnist. Absent files are downloaded into the
    first of these. Absent files that cannot be downloaded are a RequestError, files with another content a WorkError.
    """
    return read(split, folder, MIRRORS).as_data(DATASETS["mnist"], split)


def read(split: Split, folder: Path, mirrors: Sequence[str] = ()) -> StoredImages:
    """`load` without torch; without `mirrors` nothing is downloaded."""
    _complete(FILES[split], folder, mirrors)
    images, labels = (read_idx(_path(file, folder), file.content_sha256) for file in FILES[split])
    return StoredImages(images[:, None], labels.astype(np.int64), "mnist")


def load_sample(split: Split) -> "ImageData":
    """One split of the bundled sample: see `read_sample`."""
    return read_sample(split).as_data(DATASETS["mnist-sample"], split)


def read_sample(split: Split) -> StoredImages:
    """One split of the bundled sample, images [n, 1, 28, 28]: the first 10,000 training or 2,000 test images."""
    with np.load(SAMPLE, allow_pickle=False) as arrays:
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    return StoredImages(images[:, None], labels.astype(np.int64), "mnist-sample")


def _places(folder: Path) -> tuple[Path, ...]:
    return folder / "MNIST" / "raw", folder, folder / "mnist"


def _path(file: MnistFile, folder: Path) -> Path:
    """The path of `file` in the first place that has it; in the first place of all if none has."""
    paths = [place / file.name for place in _places(folder)]
    return next((path for path in paths if path.is_file()), paths[0])


def _complete(wanted: SplitFiles, folder: Path, mirrors: Sequence[str]) -> None:
    """Download the absent files of `wanted`; without mirrors, or if none of them answers, a RequestError."""
    missing = [file for file in wanted if not _path(file, folder).is_file()]
    for position, file in enumerate(missing):
        if not mirrors:
            raise _absent(missing, folder, "downloading is switched off")
        try:
            urls = [mirror + file.name for mirror in mirrors]
            download(urls, _path(file, folder), file.archive_sha256)
        except UnreachableError as error:
            raise _absent(missing[position:], folder, str(error)) from error


def _absent(missing: Sequence[MnistFile], folder: Path, reason: str) -> RequestError:
    return RequestError(
        f"expected {' and '.join(file.name for file in missing)} in {_places(folder)[0]}, found nothing and "
        f"{reason}; put the files there, or use the bundled sample (to train: --set dataset=mnist-sample; to certify: "
        "--dataset mnist-sample)"
    )


def read_idx(path: Path, sha256: str) -> NDArray[np.uint8]:
    """The array in the gzipped idx file `path`, [n, h, w] or [n]; a WorkError unless its content has digest `sha256`.

    At most MOST_BYTES are unpacked. The archive is not hashed, because one content can be compressed in many ways.
    """
    check_regular_file(path)
    try:
        with gzip.open(path, "rb") as file:
            content = file.read(MOST_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise _bad_file(path, f"expected a whole gzip archive, found: {error}") from None
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise _bad_file(path, f"expected content with SHA-256 {sha256}, found {digest}")
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    # A copy, because an array over bytes is read-only and a tensor made from it must not be.
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


def _bad_file(path: Path, problem: str) -> WorkError:
    return WorkError(f"{path}: {problem}; delete it so that it is downloaded again")
