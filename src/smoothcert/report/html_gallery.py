"""The images that the gallery of the HTML page shows, and what it says about each."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smoothcert.certification.certificates import CertificatesFile, CertifiedImage
from smoothcert.io.text import one_line
from smoothcert.report.summary import Summary
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
"""Data set and split, None if the certificates do not record both."""


def kinds_of(rows: Sequence[CertifiedImage]) -> dict[str, list[CertifiedImage]]:
    """All rows by the lists of the gallery, each in its order: every image is correct, wrong or abstained.

    Wrong images with the largest radius come first: these are certified for a wrong class. Ties are in file order.
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
    """The largest number with `decimals` decimals that is at most `radius` >= 0: no radius is shown larger than it was
    certified, and a radius with fewer decimals stays the same."""
    scale: int = 10**decimals
    if radius * scale >= 2**53:  # no decimals are left
        return radius
    steps = math.floor(radius * scale)
    # The product may have been rounded across a whole number, in either direction.
    return max(k / scale for k in (steps - 1, steps, steps + 1) if k / scale <= radius)


def gallery_data(summaries: Sequence[Summary], gallery: Gallery | None) -> dict[str, Any]:
    """The data of the page's gallery: `runs` with their lists of images, and `pictures`, data URIs that the images
    refer to by number. Runs on the same images share their pictures."""
    kinds = {summary.name: kinds_of(summary.file.rows) for summary in summaries}
    shown = {name: [row for rows in lists.values() for row in rows[:PER_KIND]] for name, lists in kinds.items()}
    wanted: dict[Source, set[int]] = {}
    for summary in summaries:
        wanted.setdefault(_source(summary.file), set()).update(row.index for row in shown[summary.name])
    answers = {source: _asked(gallery, source, sorted(indices)) for source, indices in wanted.items()}
    pictures: list[str] = []
    numbers: dict[Source, dict[int, int]] = {}
    for source, answer in answers.items():
        files = {} if isinstance(answer, str) else answer.files
        numbers[source] = {index: len(pictures) + i for i, index in enumerate(files)}
        pictures += map(_data_uri, files.values())
    runs = []
    for summary in summaries:
        source = _source(summary.file)
        answer = _checked(answers[source], shown[summary.name])
        known, places = (NO_PICTURES, {}) if isinstance(answer, str) else (answer, numbers[source])
        lists = [
            {"title": kind, "total": len(rows), "images": [_card(row, known, places) for row in rows[:PER_KIND]]}
            for kind, rows in kinds[summary.name].items()
        ]
        note = one_line(answer) if isinstance(answer, str) else None
        runs.append({"name": one_line(summary.name), "note": note, "kinds": lists})
    return {"runs": runs, "pictures": pictures}


def _source(file: CertificatesFile) -> Source:
    dataset, split = file.settings.get("dataset"), file.settings.get("split")
    return (str(dataset), str(split)) if dataset and split else None


def _asked(gallery: Gallery | None, source: Source, indices: Sequence[int]) -> Pictures | str:
    if gallery is None:
        return NOT_ASKED
    return NOT_RECORDED if source is None else gallery(*source, indices)


def _checked(answer: Pictures | str, rows: Sequence[CertifiedImage]) -> Pictures | str:
    """`answer`, or the reason if the labels of the pictures show that other images were certified."""
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
