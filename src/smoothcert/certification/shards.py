"""Shards: the images of each, and the merge of their certificates files, which refuses incomplete ones."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smoothcert.certification.certificates import (
    NEWER_SETTINGS,
    CertificatesFile,
    CertifiedImage,
    read_certificates,
    write_certificates,
)
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.results import differing_settings, not_being_written, refuse_existing

SHARD_NAME = re.compile(r"shard([0-9]{1,9})of([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Selection:
    """The images that a call of `certify` selects among the `images` of a data set; recorded in its file."""

    images: int
    skip: int = 1
    max_images: int | None = None
    shard: tuple[int, int] = (1, 1)

    @property
    def indices(self) -> list[int]:
        return chosen_images(self.images, self.skip, self.max_images, self.shard)

    def to_mapping(self) -> dict[str, Any]:
        return {"images": self.images, "skip": self.skip, "max_images": self.max_images, "shard": list(self.shard)}

    @classmethod
    def from_provenance(cls, provenance: Mapping[str, Any]) -> "Selection | None":
        """Return the recorded selection; None for files of earlier versions, other callers and damaged records."""
        try:
            stored = provenance["selection"]
            part, parts = stored["shard"]
            selection = cls(stored["images"], stored["skip"], stored["max_images"], (part, parts))
            return selection if 0 <= selection.images <= 10**7 and selection.indices is not None else None
        except (KeyError, TypeError, ValueError):
            return None


def chosen_images(total: int, skip: int, max_images: int | None, shard: tuple[int, int] = (1, 1)) -> list[int]:
    """Return every `skip`-th image, at most `max_images`; shard (i, k) takes every k-th of these, from the i-th on."""
    if skip < 1:
        raise RequestError(f"skip: expected at least 1 (every image), got {skip}")
    if max_images is not None and max_images < 1:
        raise RequestError(f"max-images: expected at least 1, got {max_images}")
    part, parts = shard
    if not 1 <= part <= parts:
        raise RequestError(f"shard: expected i/k with 1 <= i <= k, got {part}/{parts}")
    return list(range(0, total, skip)[:max_images][part - 1 :: parts])


def merge_certificates(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    partial: bool = False,
    on_note: Callable[[str], None] = lambda text: None,
) -> int:
    """Write the rows of all `paths` into `out`, and return their number.

    Different settings, contradicting rows, files that another process is writing, and missing or incomplete shards are
    refused; `partial` merges incomplete shards and reports them through `on_note`.
    """
    if not paths:
        raise RequestError("merge: expected certificates files, got none")
    out = Path(out)
    refuse_existing(out)
    with ExitStack() as stack:
        for path in dict.fromkeys(map(Path, paths)):
            stack.enter_context(not_being_written(path, "merge the others with --partial"))
        files = [read_certificates(path) for path in paths]
    rows = _united(files)
    if problems := incomplete(files):
        text = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        if not partial:
            raise RequestError(f"merge: incomplete: {text}; certify the rest, or add --partial to merge what exists")
        on_note(f"merged with --partial, incomplete: {text}")
    seeds = list(dict.fromkeys(file.settings.get("seed") for file in files))
    settings = {**files[0].settings, "seed": seeds[0] if len(seeds) == 1 else None}
    # Selection and accuracy are those of one shard.
    common = {key: value for key, value in files[0].provenance.items() if key not in ("selection", "accuracy")}
    provenance = {**common, "merged": len(files), "seeds": seeds}
    whole = Selection.from_provenance(files[0].provenance)
    if problems:
        provenance["incomplete"] = problems
    elif whole is not None and whole.shard[1] > 1:
        provenance["selection"] = replace(whole, shard=(1, 1)).to_mapping()
    write_certificates(out, rows.values(), settings, provenance)
    return len(rows)


def _united(files: Sequence[CertificatesFile]) -> dict[int, CertifiedImage]:
    """Return the rows of all files by image; different settings and contradicting rows are refused."""
    rows: dict[int, CertifiedImage] = {}
    for file in files:
        # Each shard may have its own seed: votes of different images are independent with one seed or several.
        unknown = {key for key in NEWER_SETTINGS if (key in files[0].settings) != (key in file.settings)} | {"seed"}
        this, that = ({k: v for k, v in f.settings.items() if k not in unknown} for f in (file, files[0]))
        if differences := differing_settings(this, that, ("this", "that")):
            raise RequestError(f"{file.path}: has other settings than {files[0].path} ({'; '.join(differences)})")
        for row in file.rows:
            known = rows.setdefault(row.index, row)
            if (known.label, known.certificate) != (row.label, row.certificate):
                raise WorkError(f"{file.path}: image {row.index} has another result than in an earlier file; keep one")
    return rows


def incomplete(files: Sequence[CertificatesFile]) -> list[str]:
    """Return what is missing: shards, and images of a shard. It is empty if nothing is known to be missing.

    Files of earlier versions do not record their images. They are judged by their names (`shard2of8`) and by the
    number of their rows, which differs by at most one between the shards of one selection.
    """
    problems = [problem for file in files if (problem := missing_rows(file))]
    shards = {shard: file for file in files if (shard := _shard_of(file)) is not None}
    if not shards:
        return problems
    (_, parts), example = next(iter(shards.items()))
    for (part, other), file in shards.items():
        if other != parts:
            raise RequestError(
                f"{file.path}: is shard {part} of {other}, {example.path} is one of {parts}; merge them separately"
            )
    absent = [part for part in range(1, parts + 1) if (part, parts) not in shards]
    problems += [f"{_shard_name(example, part, parts)} is missing" for part in absent]
    selections = {
        shard: replace(selection, shard=(1, 1))
        for shard, file in shards.items()
        if (selection := Selection.from_provenance(file.provenance)) is not None
    }
    for shard, selection in selections.items():
        first = next(iter(selections.values()))
        if selection != first:
            raise RequestError(
                f"{shards[shard].path}: chose other images ({_described(selection)}) than another shard "
                f"({_described(first)}); certify them with the same --skip and --max-images"
            )
    if not selections:
        most = max(len(file.rows) for file in shards.values())
        problems += [
            f"{file.path.name} has {len(file.rows)} rows where others have {most}"
            for file in shards.values()
            if 0 < len(file.rows) < most - 1 and not file.torn
        ]
    return problems


def missing_rows(file: CertificatesFile) -> str | None:
    """Return why `file` does not have all of its images; None if it does or nothing is known."""
    selection = Selection.from_provenance(file.provenance)
    if selection is not None:
        wanted = selection.indices
        absent = set(wanted).difference(row.index for row in file.rows)
        return f"{file.path.name} lacks {len(absent):,} of its {len(wanted):,} images" if absent else None
    if file.torn:
        return f"{file.path.name} ends in the middle of a row"
    return None if file.rows else f"{file.path.name} has no rows"


def _shard_of(file: CertificatesFile) -> tuple[int, int] | None:
    """Return (i, k) as recorded, or as in the name of the file; None if it is not a shard."""
    selection = Selection.from_provenance(file.provenance)
    if selection is not None:
        return selection.shard if selection.shard[1] > 1 else None
    named = SHARD_NAME.search(file.path.name)
    if named is None:
        return None
    part, parts = int(named[1]), int(named[2])
    return (part, parts) if 1 <= part <= parts and parts > 1 else None


def _shard_name(example: CertificatesFile, part: int, parts: int) -> str:
    """Return the name of another shard of the same request."""
    name, replaced = SHARD_NAME.subn(f"shard{part}of{parts}", example.path.name, count=1)
    return name if replaced else f"shard {part} of {parts}"


def _described(selection: Selection) -> str:
    return f"--skip {selection.skip}, --max-images {selection.max_images}, {selection.images:,} images"
