"""A certificates file that several processes write, each into its own part; what a call adds to an existing file."""

import glob
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smoothcert.certification.certificates import (
    CertifiedImage,
    certificates_writer,
    read_certificates,
    write_certificates,
)
from smoothcert.certification.shards import other_versions
from smoothcert.distributed import Team
from smoothcert.errors import WorkError
from smoothcert.io.compressed import PLAIN, stem
from smoothcert.io.results import read_settings, settings_path, write_settings

SHARED_SECONDS = 60.0
"""How long a new file may be invisible on other machines; network file systems cache what does not exist."""


def wait_for_settings(path: Path, team: Team, seconds: float = SHARED_SECONDS) -> None:
    """Refuse to certify into a folder that this process does not share with the first one: its rows would be lost."""
    deadline = time.monotonic() + seconds
    while not settings_path(path).exists():
        if time.monotonic() > deadline:
            raise WorkError(
                f"{path}: process {team.rank} does not see what process 0 has written there; choose a folder on a file "
                "system that all machines share"
            )
        time.sleep(0.1)


def existing_rows(path: Path) -> tuple[CertifiedImage, ...]:
    """Return the rows of a file, none if there is no file yet."""
    return tuple(read_certificates(path).rows) if path.exists() else ()


def update_provenance(path: Path, provenance: Mapping[str, Any], *, more: bool) -> None:
    """Record the selection and the accuracy of this call in an existing file; everything else stays.

    If `more` rows follow, other versions or hardware than those of the first rows are recorded, too.
    """
    if not path.exists():
        return
    stored = read_settings(path)
    fresh = {key: provenance[key] for key in ("selection", "accuracy") if key in provenance}
    if more:
        fresh |= other_versions([stored["provenance"], provenance])
    if {**stored["provenance"], **fresh} != stored["provenance"]:
        write_settings(path, stored["settings"], {**stored["provenance"], **fresh})


def part_path(path: Path, team: Team) -> Path:
    """Return where a process writes: the file itself, or its own part next to it."""
    return path if team.size == 1 else path.with_name(f".{stem(path)}.part{team.rank}{PLAIN}")


def join_parts(path: Path, settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write all rows of `path` and its parts into `path`, and remove the parts."""
    rows: dict[int, CertifiedImage] = {}
    parts = sorted(path.parent.glob(f".{glob.escape(stem(path))}.part*{PLAIN}"))
    for file in (path, *parts) if path.exists() else parts:
        with certificates_writer(file, settings, provenance) as writer:
            rows |= {row.index: row for row in writer.done}
    if parts:
        kept, *others = (read_settings(file)["provenance"] for file in (path, *parts))
        write_certificates(path, rows.values(), settings, {**kept, **other_versions([kept, *others])})
    for part in parts:
        part.unlink()
        settings_path(part).unlink(missing_ok=True)
