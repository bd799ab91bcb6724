"""Which images a certificates file must have: shards and their merge, and what needs a complete file."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smoothcert.certification.certificates import (
    CertificatesFile,
    CertifiedImage,
    read_certificates,
    write_certificates,
)
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.compressed import compress, existing_form, plain_form
from smoothcert.io.results import (
    differing_settings,
    new_result,
    not_being_written,
    only_writer,
    refuse_existing,
    settings_path,
)


@dataclass(frozen=True, slots=True)
class Selection:
    """The images that a call of `certify` selects among the `images` of a data set; recorded in its file."""

    images: int
    skip: int = 1
    max_images: int | None = None
    shard: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if self.skip < 1:
            raise RequestError(f"skip: expected at least 1 (every image), got {self.skip}")
        if self.max_images is not None and self.max_images < 1:
            raise RequestError(f"max-images: expected at least 1, got {self.max_images}")
        part, parts = self.shard
        if not 1 <= part <= parts:
            raise RequestError(f"shard: expected i/k with 1 <= i <= k, got {part}/{parts}")

    @property
    def indices(self) -> list[int]:
        """Every `skip`-th image, at most `max_images`; shard (i, k) takes every k-th of these, from the i-th on."""
        part, parts = self.shard
        return list(range(0, self.images, self.skip)[: self.max_images][part - 1 :: parts])

    def to_mapping(self) -> dict[str, Any]:
        return {"images": self.images, "skip": self.skip, "max_images": self.max_images, "shard": list(self.shard)}

    @classmethod
    def from_provenance(cls, provenance: Mapping[str, Any]) -> "Selection | None":
        """Return the recorded selection; None for files of other callers and damaged records."""
        try:
            stored = provenance["selection"]
            part, parts = stored["shard"]
            selection = cls(stored["images"], stored["skip"], stored["max_images"], (part, parts))
            # Numbers of wrong types have no indices.
            return selection if 0 <= selection.images <= 10**7 and selection.indices is not None else None
        except (KeyError, TypeError, ValueError):
            return None


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
    if unknown := [file.path for file in files if not file.settings]:
        raise RequestError(
            f"{unknown[0]}: expected its settings in {settings_path(unknown[0]).name} next to it, got none, so nothing "
            "shows that the files are of one classifier; merge files that `smoothcert certify` wrote"
        )
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
    provenance = {**common, **other_versions([f.provenance for f in files]), "merged": len(files), "seeds": seeds}
    whole = Selection.from_provenance(files[0].provenance)
    if problems:
        provenance["incomplete"] = problems
    elif whole is not None and whole.shard[1] > 1:
        provenance["selection"] = replace(whole, shard=(1, 1)).to_mapping()
    with new_result(out):
        write_certificates(out, rows.values(), settings, provenance)
    return len(rows)


def other_versions(provenances: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {"other_versions": ...}: versions and hardware of rows, where they are not those of the first; or {}."""
    further = (p.get("other_versions") for p in provenances)
    lists = [list(value) if isinstance(value, list) else [] for value in further]
    first, *others = ([p.get("versions"), *more] for p, more in zip(provenances, lists, strict=True))
    every = [*first, *(version for group in others for version in group)]
    distinct = [version for i, version in enumerate(every) if version is not None and version not in every[:i]]
    return {"other_versions": distinct[1:]} if len(distinct) > 1 else {}


def _united(files: Sequence[CertificatesFile]) -> dict[int, CertifiedImage]:
    """Return the rows of all files by image; different settings and contradicting rows are refused."""
    rows: dict[int, CertifiedImage] = {}
    for file in files:
        # Each shard may have its own seed: votes of different images are independent with one seed or several.
        this, that = ({k: v for k, v in f.settings.items() if k != "seed"} for f in (file, files[0]))
        if differences := differing_settings(this, that, ("this", "that")):
            raise RequestError(
                f"{file.path}: has other settings than {files[0].path} ({'; '.join(differences)}); merge only files of "
                "one certification"
            )
        for row in file.rows:
            known = rows.setdefault(row.index, row)
            if (known.label, known.certificate) != (row.label, row.certificate):
                raise WorkError(
                    f"{file.path}: image {row.index} has another result than in an earlier file; keep the file "
                    "that was certified first, because a choice by the results would invalidate them"
                )
    return rows


def incomplete(files: Sequence[CertificatesFile]) -> list[str]:
    """Return what is missing: shards, and images of a shard. It is empty if nothing is known to be missing."""
    problems = [problem for file in files if (problem := missing_rows(file))]
    selections = ((Selection.from_provenance(file.provenance), file) for file in files)
    shards = {selection: file for selection, file in selections if selection is not None and selection.shard[1] > 1}
    if not shards:
        return problems
    first, example = next(iter(shards.items()))
    for selection, file in shards.items():
        if replace(selection, shard=(first.shard[0], selection.shard[1])) != first:
            raise RequestError(
                f"{file.path}: chose other images ({_described(selection)}) than {example.path} "
                f"({_described(first)}); merge shards with the same --skip and --max-images, of one number of shards"
            )
    parts = first.shard[1]
    images = len(replace(first, shard=(1, 1)).indices)
    # Shards beyond the number of images have none.
    absent = sorted(set(range(1, min(parts, images) + 1)) - {selection.shard[0] for selection in shards})
    return problems + [f"shard {part} of {parts} is missing" for part in absent]


def missing_rows(file: CertificatesFile) -> str | None:
    """Return why `file` does not have all of its images; None if it does or nothing is known."""
    selection = Selection.from_provenance(file.provenance)
    if selection is not None:
        wanted = selection.indices
        absent = set(wanted).difference(file.columns.index.tolist())
        return f"{file.path.name} lacks {len(absent):,} of its {len(wanted):,} images" if absent else None
    if file.torn:
        return f"{file.path.name} ends in the middle of a row"
    return None if file.rows else f"{file.path.name} has no rows"


def _described(selection: Selection) -> str:
    chosen = f"--skip {selection.skip}, --max-images {selection.max_images}, {selection.images:,} images"
    return f"{chosen}, {selection.shard[1]} shards"


def compress_certificates(path: Path) -> str | None:
    """Replace the certificates file NAME.tsv by NAME.tsv.gz with the same content; return None if this was done.

    Otherwise return why the file is left as it is: it is compressed already, lacks images that its call selected, so
    that it can be continued, or has another ending. A damaged file is a WorkError.
    """
    with only_writer(path, "compress it afterwards"):
        if existing_form(path) != plain_form(path):
            return "compressed already"
        file = read_certificates(path)
        if (missing := missing_rows(file)) is not None:
            return f"{missing}; continue it with `smoothcert certify`"
        if not path.name.endswith(".tsv"):
            return "its name does not end in .tsv"
        compress(path)
    return None
