"""The images that several certificates files have in common: only on these is a comparison of runs a fair one."""

from collections.abc import Sequence
from dataclasses import replace

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.errors import RequestError
from smoothcert.report.summary import refuse_without_images

Files = Sequence[tuple[str, CertificatesFile]]


def cut_to_shared_images(files: Files) -> list[tuple[str, CertificatesFile]]:
    """`files` (name, file) with those images alone that all of a data set and split have; refused if there is none.

    Files that do not tell their data set are taken to be of the one that the others tell, and refused if these tell
    several."""
    told = {name: (file.settings.get("dataset"), file.settings.get("split")) for name, file in files}
    known = {data for data in told.values() if data[0] is not None}
    unknown = [name for name, data in told.items() if data[0] is None]
    if unknown and len(known) > 1:
        raise RequestError(f"{unknown[0]}: expected to be told its data set, got none; report it without --same-images")
    data = told | (dict.fromkeys(unknown, next(iter(known))) if known else {})
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
