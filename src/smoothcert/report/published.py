"""A run next to the row of a paper's table that it reproduces, and how the two differ."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.errors import RequestError
from smoothcert.io.text import counted, number_text
from smoothcert.report.layout import UNKNOWN, Cell, Column, Row, Value
from smoothcert.report.summary import Summary


@dataclass(frozen=True)
class Published:
    """The row of a paper's table that a run reproduces, as printed."""

    table: str
    """The table's name, as in "smoothmix/table2"."""
    label: str
    """The row as the paper prints it, as in "SmoothMix (eta=5)"."""
    acr: float | None
    accuracy_at: Mapping[float, float]
    """Radius -> certified accuracy in percent."""
    differences: tuple[str, ...]
    """How the training of the run differs from the paper's, as in "epochs 2, the paper's 90"."""
    row: str = ""
    """The row among `rows`."""
    rows: tuple[str, ...] = ()
    """The distinct names of all rows of the table, top to bottom."""
    dataset: str = "mnist"
    """The data set of the table."""

    def at(self, radius: float | None) -> float | None:
        """The certified accuracy at `radius` in percent, or the ACR for None, if it is printed."""
        return self.acr if radius is None else self.accuracy_at.get(radius)


PublishedFor = Callable[[CertificatesFile], Published | None]
"""From a certificates file, whose settings may be those of --as, to the published row of its run."""
AS_PUBLISHED = "trained and certified as in the paper, as far as the files show"

# Both papers: Cohen et al.'s CERTIFY on the whole test set, on ImageNet every 100th image of the validation set.
_VOTES = {"n": 100_000, "n0": 100, "alpha": 0.001}
_IMAGES = {"mnist": 10_000, "cifar10": 10_000, "imagenet": 500}


def published_rows(files: Sequence[tuple[str, CertificatesFile]], published: PublishedFor) -> dict[str, Published]:
    """Name -> published row for the runs that have one. Refuses runs that cannot be compared with their row.

    The papers certify at the sigma of training: a file with another sigma cannot be compared.
    """
    rows = {name: row for name, file in files if (row := published(file)) is not None}
    if not rows:
        names = ", ".join(name for name, _ in files)
        raise RequestError(
            f"{names}: expected a run that the paper's table has, got none with the data set, method, sigma and "
            "hyper-parameters of a row; add a run of the table (for a file of another tool give dataset, sigma and "
            "method with --as, the method as `smoothcert papers TABLE` prints it), choose another table or leave "
            "--paper out"
        )
    for name, file in files:
        if name in rows and file.is_randomized:
            raise RequestError(
                f"{file.path}: expected the one-sided bound to compare with {rows[name].table}, got randomized; "
                "use `smoothcert recertify --bound one-sided`, or leave this file out"
            )
        trained, certified = file.settings.get("training_sigma"), file.settings.get("sigma")
        if name in rows and None not in (trained, certified) and trained != certified:
            raise RequestError(
                f"{file.path}: expected certificates at the sigma of training, {trained}, to compare with "
                f"{rows[name].table}, got sigma {certified}; certify with --sigma {trained} or leave this file out"
            )
    return rows


def place_in_table(row: Published | None) -> float:
    """Rows in the order of the paper's table, others after them."""
    return row.rows.index(row.row) if row is not None and row.row in row.rows else math.inf


def certified_otherwise(summary: Summary, data: str) -> list[str]:
    """How the certification of a file differs from the papers' on the data set `data`, as far as it is recorded."""
    votes: dict[str, float | None] = {"n": summary.n, "n0": summary.n0, "alpha": summary.alpha}
    mixed = [key for key in ("n", "n0") if votes[key] is None and summary.votes]
    unknown = [key for key, value in votes.items() if value is None and key not in mixed]
    differences = [
        f"certified on {summary.dataset}, the paper's {data}" if summary.dataset not in (None, data) else None,
        f"split {summary.split}, the paper's test" if summary.split not in (None, "test") else None,
        f"{counted(summary.images, 'image')}, the paper's {_IMAGES[data]:,}"
        if summary.images != _IMAGES[data]
        else None,
        *(
            f"{key} = {number_text(value)}, the paper's {number_text(_VOTES[key])}"
            for key, value in votes.items()
            if value not in (None, _VOTES[key])
        ),
        *(f"{key} not the same for all images, the paper's {number_text(_VOTES[key])}" for key in mixed),
        f"votes in {summary.precision}" if summary.precision not in (None, "fp32") else None,
        *summary.remarks,
        f"{', '.join(unknown)} not recorded" if unknown else None,
        "data set not recorded" if summary.dataset is None else None,
    ]
    return [difference for difference in differences if difference is not None]


def comparison_notes(summaries: Sequence[Summary], published: Mapping[str, Published]) -> dict[str, list[str]]:
    """Note under a comparison -> the runs that it is about: how they differ from the paper's, or that the table does
    not have them; and the rows of the table that no run reproduces. Empty where nothing is compared."""
    notes: dict[str, list[str]] = {}
    tables = ", ".join(dict.fromkeys(row.table for row in published.values()))
    for summary in summaries if published else ():
        row = published.get(summary.name)
        if row is None:
            note = f"not in {tables}"
        else:
            differences = dict.fromkeys([*row.differences, *certified_otherwise(summary, row.dataset)])
            note = "; ".join(differences) or AS_PUBLISHED
        notes.setdefault(note, []).append(summary.name)
    reproduced = {row.row for row in published.values()}
    rows = dict.fromkeys(name for row in published.values() for name in row.rows)
    missing = [name for name in rows if name not in reproduced]
    return notes | ({f"in {tables}, missing here": missing} if missing else {})


def _as_printed(column: Column, row: Published, value: float) -> str:
    """With the digits of the paper: ACR 3 decimals (4 over seeds), accuracies 1 (none on ImageNet)."""
    if column.radius is None:
        return f"{value:.4f}" if row.table.endswith("over-5-seeds") else f"{value:.3f}"
    return f"{value:.0f}" if row.dataset == "imagenet" else f"{value:.1f}"


def signed(difference: float, decimals: int) -> str:
    """With a sign, unless it rounds to zero."""
    text = f"{difference:+.{decimals}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def minus(own: Value, published: float | None) -> float | None:
    """The difference, where both are known."""
    return own - published if published is not None and isinstance(own, int | float) else None


def published_below(columns: Sequence[Column], own: Row, row: Published) -> tuple[Row, Row]:
    """Two rows to show under the row `own` of a run: the published numbers, and own minus published."""
    names = {"name": ("published", "difference")}
    above, below = [], []
    for column, cell in zip(columns, own, strict=True):
        texts = names.get(column.key, ("", ""))
        value = row.at(column.radius) if column.ranked else None
        difference = minus(cell.value, value)
        if value is not None and difference is not None:
            texts = _as_printed(column, row, value), signed(difference, column.decimals or 0)
        elif column.ranked:
            texts = UNKNOWN, UNKNOWN
        above.append(Cell(value, texts[0], aside=True))
        below.append(Cell(difference, texts[1], aside=True))
    return tuple(above), tuple(below)
