"""The images that several certificates files have in common: only on these is a comparison of runs a fair one."""

from collections.abc import Sequence
from dataclasses import replace

from smoothcert.certificates import CertificatesFile
from smoothcert.errors import RequestError
from smoothcert.report.summary import refuse_without_images

Files = Sequence[tuple[str, CertificatesFile]]


def cut_to_shared_images(files: Files) -> list[tuple[str, CertificatesFile]]:
    """`files` (name, file) with those images alone that all of a data set and split have; refused if there is none.

    Files that do not tell their data set are taken to be of the one that the others tell, and refused if these tell
    several."""
    data = {name: (file.settings.get("dataset"), file.settings.get("split")) for name, file in files}
    told = {known for known in data.values() if known[0] is not None}
    for name, known in data.items():
        if known[0] is None and len(told) > 1:
            raise RequestError(f"{name}: expected to be told its data set, got none; report it without --same-images")
        data[name] = next(iter(told)) if known[0] is None and told else known
    shared: dict[object, set[int]] = {}
    for name, file in files:
        refuse_without_images(file)
        indices = {row.index for row in file.rows}
        shared[data[name]] = shared.get(data[name], indices) & indices
    for one, indices in shared.items():
        if not indices:
            names = ", ".join(name for name in data if data[name] == one)
            raise RequestError(f"{names}: expected images that all of these have, got none; leave a run out")
    return [
        (name, replace(file, rows=tuple(row for row in file.rows if row.index in shared[data[name]])))
        for name, file in files
    ]
