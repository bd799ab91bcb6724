"""Which images the gallery of the HTML report shows, and what it says of each."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smoothcert.certification.certificates import CertificatesFile, CertifiedImage
from smoothcert.io.text import one_line
from smoothcert.smoothing.certificate import ABSTAIN

PER_KIND = 24
_TOP_VOTES = 3
NOT_ASKED = "No pictures: this report was written without the images of the data set."
NOT_RECORDED = "No pictures: the certificates do not say of which data set and split they are."
OTHER_LABELS = "No pictures: the images that were found have other labels than the certificates."


@dataclass(frozen=True, slots=True)
class Pictures:
    """Some images of a split by their index: PNG or JPEG files, and labels; the names of all classes, if known."""

    files: Mapping[int, bytes]
    labels: Mapping[int, int]
    class_names: tuple[str, ...] = ()


NO_PICTURES = Pictures({}, {})
Gallery = Callable[[str, str, Sequence[int]], Pictures | str]
"""(data set, split, indices) -> their pictures, or one line that says why there are none."""

Source = tuple[str, str] | None
"""Data set and split, None where the certificates do not tell both."""


def kinds_of(rows: Sequence[CertifiedImage]) -> dict[str, list[CertifiedImage]]:
    """All rows by the lists of the gallery, each in its order: every image is right, wrong or abstained.

    Wrong images with the largest radius come first: those are wrong with proof. Ties are in file order.
    """
    right = sorted((row for row in rows if row.correct), key=lambda row: row.certificate.radius)
    wrong = [row for row in rows if not row.correct and row.certificate.predict != ABSTAIN]
    return {
        "smallest radius": right,
        "largest radius": sorted(right, key=lambda row: -row.certificate.radius),
        "wrong": sorted(wrong, key=lambda row: -row.certificate.radius),
        "abstained": [row for row in rows if row.certificate.predict == ABSTAIN],
    }


def rounded_down(radius: float, decimals: int) -> float:
    """The largest number with so many decimals that is at most `radius` >= 0: it is never shown larger than certified,
    and a radius with fewer decimals stays as it is."""
    scale: int = 10**decimals
    if radius * scale >= 2**53:  # no decimals are left
        return radius
    steps = math.floor(radius * scale)
    # The product may have been rounded across a whole number, in either direction.
    return max(k / scale for k in (steps - 1, steps, steps + 1) if k / scale <= radius)


def gallery_data(files: Sequence[tuple[str, CertificatesFile]], gallery: Gallery | None) -> dict[str, Any]:
    """What the scripts of the page need: `runs` with their lists of images, and `pictures`, data URIs that the images
    refer to by number. Runs on the same images share their pictures."""
    kinds = {name: kinds_of(file.rows) for name, file in files}
    wanted: dict[Source, set[int]] = {}
    for name, file in files:
        indices = {row.index for rows in kinds[name].values() for row in rows[:PER_KIND]}
        wanted.setdefault(_source(file), set()).update(indices)
    found = {source: _asked(gallery, source, sorted(indices)) for source, indices in wanted.items()}
    keys = [
        (source, index) for source, answer in found.items() if not isinstance(answer, str) for index in answer.files
    ]
    numbers = {key: number for number, key in enumerate(keys)}
    runs = []
    for name, file in files:
        answer = _checked(found[_source(file)], [row for rows in kinds[name].values() for row in rows[:PER_KIND]])
        known = NO_PICTURES if isinstance(answer, str) else answer
        places = {index: numbers[_source(file), index] for index in known.files}
        lists = [
            {"title": kind, "total": len(rows), "images": [_card(row, known, places) for row in rows[:PER_KIND]]}
            for kind, rows in kinds[name].items()
        ]
        runs.append(
            {"name": one_line(name), "note": one_line(answer) if isinstance(answer, str) else None, "kinds": lists}
        )
    pictures = [
        _data_uri(answer.files[index])
        for answer in found.values()
        if not isinstance(answer, str)
        for index in answer.files
    ]
    return {"runs": runs, "pictures": pictures}


def _source(file: CertificatesFile) -> Source:
    dataset, split = file.settings.get("dataset"), file.settings.get("split")
    return (str(dataset), str(split)) if dataset and split else None


def _asked(gallery: Gallery | None, source: Source, indices: Sequence[int]) -> Pictures | str:
    if gallery is None:
        return NOT_ASKED
    return NOT_RECORDED if source is None else gallery(*source, indices)


def _checked(answer: Pictures | str, rows: Sequence[CertifiedImage]) -> Pictures | str:
    """Pictures whose labels are not those of the certificates show other images than were certified: not shown."""
    if isinstance(answer, str) or all(answer.labels.get(row.index, row.label) == row.label for row in rows):
        return answer
    return OTHER_LABELS


def _card(row: CertifiedImage, pictures: Pictures, places: Mapping[int, int]) -> dict[str, Any]:
    """One image as the page shows it."""
    certificate = row.certificate

    def class_name(number: int) -> str:
        known = 0 <= number < len(pictures.class_names)
        return one_line(pictures.class_names[number]) if known else str(number)

    return {
        "index": row.index,
        "label": class_name(row.label),
        "predict": None if certificate.predict == ABSTAIN else class_name(certificate.predict),
        "right": row.correct,
        "radius": f"{rounded_down(certificate.radius, 3):.3f}",
        "n": certificate.n,
        "votes": [[class_name(k), count, k == row.label] for k, count in certificate.votes[:_TOP_VOTES]],
        "picture": places.get(row.index),
    }


def _data_uri(file: bytes) -> str:
    kind = "png" if file.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
