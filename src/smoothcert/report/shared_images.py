"""The images that several certificates files have in common: only on these is a comparison of runs a fair one."""

from collections.abc import Sequence
from dataclasses import replace

from smoothcert.certificates import CertificatesFile
from smoothcert.errors import RequestError

Files = Sequence[tuple[str, CertificatesFile]]


def on_shared_images(files: Files) -> list[tuple[str, CertificatesFile]]:
    """`files` (name, file) cut to the images that all of the same data set and split have; refused if there is none."""
    shared: dict[object, set[int]] = {}
    for _, file in files:
        shared[_data_of(file)] = shared.get(_data_of(file), _indices(file)) & _indices(file)
    for data, indices in shared.items():
        if not indices:
            names = ", ".join(name for name, file in files if _data_of(file) == data)
            raise RequestError(f"{names}: expected images that all of these have, got none; leave a run out")
    return [
        (name, replace(file, rows=tuple(row for row in file.rows if row.index in shared[_data_of(file)])))
        for name, file in files
    ]


def on_the_same_images(files: Files) -> bool:
    """Whether the files of each data set and split have the same images."""
    seen: dict[object, set[int]] = {}
    return all(_indices(file) == seen.setdefault(_data_of(file), _indices(file)) for _, file in files)


def _indices(file: CertificatesFile) -> set[int]:
    return {row.index for row in file.rows}


def _data_of(file: CertificatesFile) -> tuple[object, object]:
    return file.settings.get("dataset"), file.settings.get("split")
