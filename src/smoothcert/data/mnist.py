"""MNIST: 60,000 training and 10,000 test images of handwritten digits, 1 x 28 x 28.

LeCun, Cortes, Burges: "The MNIST database of handwritten digits", http://yann.lecun.com/exdb/mnist/.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from smoothcert.data.download import Progress, UnreachableError, download
from smoothcert.data.idx import IMAGES_MAGIC, LABELS_MAGIC, read_idx
from smoothcert.data.images import ImageData, Split
from smoothcert.errors import RequestError, WorkError

SHAPE = (1, 28, 28)
NUM_CLASSES = 10
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


@dataclass(frozen=True, slots=True)
class MnistFile:
    """One of the four files, with the SHA-256 of the archive that the mirrors serve and that of its content.

    A file found on disk is judged by its content: copies that were compressed anew are common and as good.
    """

    name: str
    archive_sha256: str
    content_sha256: str


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The images and the labels of one split."""

    images: MnistFile
    labels: MnistFile


FILES: Mapping[Split, SplitFiles] = {
    "train": SplitFiles(
        images=MnistFile(
            "train-images-idx3-ubyte.gz",
            archive_sha256="440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            content_sha256="ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        labels=MnistFile(
            "train-labels-idx1-ubyte.gz",
            archive_sha256="3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            content_sha256="65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
    ),
    "test": SplitFiles(
        images=MnistFile(
            "t10k-images-idx3-ubyte.gz",
            archive_sha256="8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            content_sha256="0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        labels=MnistFile(
            "t10k-labels-idx1-ubyte.gz",
            archive_sha256="f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            content_sha256="ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
}


def load(
    split: Split,
    folder: Path,
    download: bool = True,
    *,
    files: Mapping[Split, SplitFiles] = FILES,
    mirrors: Sequence[str] = MIRRORS,
    progress: Progress | None = None,
) -> ImageData:
    """One split of MNIST, images [n, 1, 28, 28], with every byte checked against the known digests.

    The files are looked for in `folder`/MNIST/raw, `folder` and `folder`/mnist. Those that are absent are downloaded
    into the first of these, unless `download` is False. Absent files that cannot be had are a RequestError, files
    with another content a WorkError.
    """
    wanted = files[split]
    _complete(wanted, folder, mirrors if download else (), progress)
    images_path, labels_path = _found(wanted.images, folder), _found(wanted.labels, folder)
    images = read_idx(images_path, IMAGES_MAGIC, wanted.images.content_sha256)
    labels = read_idx(labels_path, LABELS_MAGIC, wanted.labels.content_sha256)
    if len(images) != len(labels):
        raise WorkError(
            f"{labels_path}: expected a label for each of the {len(images)} images in {images_path.name}, "
            f"found {len(labels)}; delete both so that they are downloaded again"
        )
    return ImageData(
        images=torch.from_numpy(images).unsqueeze(1),
        labels=torch.from_numpy(labels).to(torch.int64),
        num_classes=NUM_CLASSES,
        name="mnist",
        split=split,
    )


def _places(folder: Path) -> tuple[Path, ...]:
    return folder / "MNIST" / "raw", folder, folder / "mnist"


def _found(file: MnistFile, folder: Path) -> Path:
    """Where `file` lies; where it belongs if it lies nowhere."""
    paths = [place / file.name for place in _places(folder)]
    return next((path for path in paths if path.is_file()), paths[0])


def _complete(wanted: SplitFiles, folder: Path, mirrors: Sequence[str], progress: Progress | None) -> None:
    """Download the files of `wanted` that are absent; with no mirrors, or none that answers, say what is missing."""
    missing = [file for file in (wanted.images, wanted.labels) if not _found(file, folder).is_file()]
    for position, file in enumerate(missing):
        if not mirrors:
            raise _absent(missing, folder, "downloading is switched off")
        try:
            urls = [mirror + file.name for mirror in mirrors]
            download(urls, _found(file, folder), file.archive_sha256, progress)
        except UnreachableError as error:
            raise _absent(missing[position:], folder, str(error)) from error


def _absent(missing: Sequence[MnistFile], folder: Path, reason: str) -> RequestError:
    return RequestError(
        f"expected {' and '.join(file.name for file in missing)} in {_places(folder)[0]}, found nothing and "
        f"{reason}; put the files there, or use the bundled sample with --set dataset=mnist-sample"
    )
