"""What the HTML page draws: every step of every curve in as few characters as possible, and the images of the gallery
with what it says about each."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from smoothcert.certification.certificates import CertificatesFile, CertifiedImage
from smoothcert.certification.columns import Columns, Flags, Floats, Integers
from smoothcert.io.text import one_line
from smoothcert.report.labels import Panel, titles_of
from smoothcert.report.looks import Look
from smoothcert.report.protocol import class_name, class_names_of
from smoothcert.report.summary import Summary
from smoothcert.smoothing.certificate import ABSTAIN

STEPS_PER_UNIT = 10_000
"""Radii are rounded down to a multiple of 1 / STEPS_PER_UNIT."""
PER_KIND = 24
"""Images of a list."""
DIFFER = "runs differ"
_TOP_VOTES = 3
NOT_ASKED = "No pictures: this report was written without the images of the data set."
NOT_RECORDED = "No pictures: the certificates do not say of which data set and split they are."
OTHER_LABELS = "No pictures: the images that were found have other labels than the certificates."


@dataclass(frozen=True, slots=True)
class Pictures:
    """Some images of a split by their index: PNG or JPEG files, and labels; the names of the labels, if known."""

    files: Mapping[int, bytes]
    labels: Mapping[int, int]
    class_names: tuple[str, ...] = ()


Gallery = Callable[[str, str, Sequence[int]], Pictures | str]
"""(data set, split, indices) -> their pictures, or one line that says why there are none."""

Source = tuple[str, str] | None
"""Data set and split, None if the certificates do not record both."""


def curve_data(panels: Sequence[Panel], look_of: Mapping[str, int], looks: Sequence[Look]) -> list[dict[str, Any]]:
    """For each sigma and data set its runs, each with all steps of its curve and with its look.

    `steps` are the ascending radii that count, each as its difference from the one before, in 1 / STEPS_PER_UNIT.
    """

    def run(label: str, summary: Summary) -> dict[str, Any]:
        look = look_of[summary.name]
        return {
            "name": one_line(summary.name),
            "label": one_line(label),
            "look": look,
            "dash": " ".join(f"{2 * length:g}" for length in looks[look].dash),
            "acr": f"{summary.acr:.3f}",
            "images": summary.images,
            "steps": np.diff(in_steps(np.sort(summary.file.columns.counted_radii)), prepend=0).tolist(),
        }

    return [
        {
            "title": one_line(title),
            "norm": panel[0][1].norm,
            "runs": [run(*member) for member in panel],
            "ceilings": sorted({(s.ceiling, s.n) for _, s in panel if s.ceiling is not None and s.n is not None}),
        }
        for panel, title in zip(panels, titles_of(panels), strict=True)
    ]


def in_steps(radii: ArrayLike, per_unit: int = STEPS_PER_UNIT) -> NDArray[np.int64]:
    """The radii in units of 1 / per_unit: the largest whole numbers that do not exceed them.

    No radius is shown larger than it was certified, and one with as few decimals stays the same.
    """
    values = np.asarray(radii, dtype=np.float64)
    steps: NDArray[np.float64] = np.floor(values * per_unit)
    # The product may have been rounded across a whole number, in either direction.
    steps += (steps + 1) / per_unit <= values
    steps -= steps / per_unit > values
    return steps.astype(np.int64)


def kinds_of(columns: Columns) -> dict[str, Integers]:
    """The positions of all rows by the lists of the gallery: every image is correct, wrong or abstained.

    Wrong images with the largest radius come first: these are certified for a wrong class. Ties are in file order.
    """

    def sorted_by(values: Floats, chosen: Flags) -> Integers:
        return np.flatnonzero(chosen)[np.argsort(values[chosen], kind="stable")]

    abstained = columns.prediction == ABSTAIN
    return {
        "smallest radius": sorted_by(columns.radius, columns.correct),
        "largest radius": sorted_by(-columns.radius, columns.correct),
        "wrong": sorted_by(-columns.radius, ~columns.correct & ~abstained),
        "abstained": np.flatnonzero(abstained),
    }


def gallery_data(summaries: Sequence[Summary], gallery: Gallery | None, labels: Mapping[str, str]) -> dict[str, Any]:
    """The gallery of the runs, whose `labels` the page shows. Runs on the same images share their pictures.

    `runs` have their lists of images; `groups`, one per sigma and data set, the outcome of each of their images under
    all runs; `pictures` are data URIs that the images refer to by number.
    """
    groups: dict[tuple[tuple[float, str], Source], list[Summary]] = {}
    for summary in summaries:
        groups.setdefault((summary.group, _source(summary.file)), []).append(summary)
    kinds = {name: lists for members in groups.values() for name, lists in _kinds_of_runs(members).items()}
    shown = {name: [row for rows, _ in lists.values() for row in rows] for name, lists in kinds.items()}
    wanted: dict[Source, set[int]] = {}
    for summary in summaries:
        wanted.setdefault(_source(summary.file), set()).update(row.index for row in shown[summary.name])
    answers: dict[Source, Pictures | str] = dict.fromkeys(wanted, NOT_ASKED if gallery is None else NOT_RECORDED)
    if gallery is not None:
        answers |= {source: gallery(*source, sorted(some)) for source, some in wanted.items() if source is not None}
    pictures: list[str] = []
    numbers: dict[Source, dict[int, int]] = {}  # index of an image -> number of its picture
    runs: list[dict[str, Any]] = []
    outcomes = []
    for number, ((_, source), members) in enumerate(groups.items()):
        rows = [row for member in members for row in shown[member.name]]
        names = class_names_of(members[0].file)
        answer = _checked(answers[source], rows, names)
        reason = one_line(answer) if isinstance(answer, str) else None
        if isinstance(answer, Pictures) and source not in numbers:
            numbers[source] = {index: n for n, index in enumerate(answer.files, len(pictures))}
            pictures += map(_data_uri, answer.files.values())
        number_of = {} if isinstance(answer, str) else numbers[source]
        outcomes.append(_outcomes(members, sorted({row.index for row in rows}), len(runs), names))
        for member in members:
            lists = [
                {
                    "title": kind,
                    "total": total,
                    "images": [_card(row, names, number_of.get(row.index)) for row in images],
                }
                for kind, (images, total) in kinds[member.name].items()
            ]
            name = one_line(member.name)
            runs.append({"name": name, "label": labels[member.name], "group": number, "kinds": lists, "note": reason})
    return {"runs": runs, "groups": outcomes, "pictures": pictures}


def _kinds_of_runs(summaries: Sequence[Summary]) -> dict[str, dict[str, tuple[list[CertifiedImage], int]]]:
    """Name of a run -> its lists, each with its first images and the number of all; several runs have the images in
    which they differ most as the first list."""
    differing = most_differing(summaries) if len(summaries) > 1 else []
    kinds = {}
    for summary in summaries:
        file = summary.file
        columns = file.columns
        lists = kinds_of(columns)
        if len(summaries) > 1:
            places = dict(zip(columns.index.tolist(), range(len(columns)), strict=True))
            lists = {DIFFER: np.array([places[index] for index in differing], dtype=np.int64), **lists}
        kinds[summary.name] = {
            kind: ([file.rows[i] for i in positions[:PER_KIND].tolist()], len(positions))
            for kind, positions in lists.items()
        }
    return kinds


def most_differing(summaries: Sequence[Summary]) -> list[int]:
    """The indices of the images that all runs have whose radius differs most between them, 0 where wrong."""
    common = sorted(frozenset.intersection(*(summary.indices for summary in summaries)))
    every = [summary.outcomes for summary in summaries]
    radii = np.stack([outcomes.radius[np.searchsorted(outcomes.index, common)] for outcomes in every])
    spread = np.ptp(radii, axis=0)
    return [common[i] for i in np.argsort(-spread, kind="stable")[:PER_KIND] if spread[i] > 0]


def _outcomes(
    summaries: Sequence[Summary], indices: Sequence[int], first: int, names: Sequence[str]
) -> dict[int, list[list[Any]]]:
    """Index of an image -> for each run that has it: its number, counted from `first`, the predicted class (None:
    abstained), whether it is right, and the radius, rounded down."""
    outcomes = {index: list[list[Any]]() for index in indices}
    for number, summary in enumerate(summaries, first):
        columns = summary.file.columns
        chosen = np.flatnonzero(np.isin(columns.index, indices))
        radii = in_steps(columns.radius[chosen], 1000) / 1000
        cells = (columns.index[chosen], columns.prediction[chosen], columns.correct[chosen], radii)
        for index, predict, correct, radius in zip(*(column.tolist() for column in cells), strict=True):
            name = None if predict == ABSTAIN else class_name(predict, names)
            outcomes[index].append([number, name, correct, radius])
    return outcomes


def _source(file: CertificatesFile) -> Source:
    dataset, split = file.settings.get("dataset"), file.settings.get("split")
    return (str(dataset), str(split)) if dataset and split else None


def _checked(answer: Pictures | str, rows: Sequence[CertifiedImage], names: Sequence[str]) -> Pictures | str:
    """`answer` with labels in the order of the `names` that the certificates record, if any; or the reason if the
    labels of the pictures show that other images were certified."""
    if isinstance(answer, Pictures) and answer.class_names and set(answer.class_names) <= set(names):
        moved = {index: names.index(answer.class_names[label]) for index, label in answer.labels.items()}
        answer = replace(answer, labels=moved)
    if isinstance(answer, str) or all(answer.labels.get(row.index, row.label) == row.label for row in rows):
        return answer
    return OTHER_LABELS


def _card(row: CertifiedImage, names: Sequence[str], picture: int | None) -> dict[str, Any]:
    """One image as the page shows it, with the number of its picture; its outcome is in the data of its group."""
    certificate = row.certificate
    return {
        "index": row.index,
        "label": class_name(row.label, names),
        "n": certificate.n,
        "votes": [[class_name(k, names), count, k == row.label] for k, count in certificate.votes[:_TOP_VOTES]],
        "picture": picture,
    }


def _data_uri(file: bytes) -> str:
    kind = "png" if file.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
