"""The published tables: average certified radius and certified accuracy in percent.

A name consists of paper and table, such as "smoothmix/table2" or "consistency/supp-table2". One file may contain
several tables of a paper, which then have the same rows. "later/..." are ACRs of later papers, computed from the
certificates that their authors published.
"""

import csv
import io
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from smoothcert.errors import RequestError
from smoothcert.io.text import did_you_mean

_CIFAR10 = ("consistency/table1", "consistency/table3", "consistency/table4", "consistency/supp-table7")
_DATASETS = {
    **dict.fromkeys((*_CIFAR10, "smoothmix/table1", "smoothmix/table3", "later/cifar10"), "cifar10"),
    **dict.fromkeys(("consistency/table2", "smoothmix/table4"), "imagenet"),
}


def dataset_of(table: str) -> str:
    """Return the data set of a table: MNIST unless listed above."""
    return _DATASETS.get(table, "mnist")


def _names_of(stem: str) -> list[str]:
    """Return the tables in a file: `smoothmix_table1_table3_cifar10` -> smoothmix/table1, smoothmix/table3."""
    paper, rest = stem.split("_", maxsplit=1)
    numbers = re.findall(r"(?:supp_)?table\d+", rest)
    return [f"{paper}/{table.replace('_', '-')}" for table in numbers or [rest]]


@cache
def _files() -> Mapping[str, str]:
    """Return the file name of each table."""
    stored = sorted(entry.name for entry in files(__package__).iterdir() if entry.name.endswith(".csv"))
    return MappingProxyType({name: file for file in stored for name in _names_of(file.removesuffix(".csv"))})


def paper_table_names() -> list[str]:
    """Return the names of all tables, sorted."""
    return sorted(_files())


def paper_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a table, each as {column: printed text}. Columns such as "0.50" are radii."""
    file = _files().get(name)
    if file is None:
        known = paper_table_names()
        of_paper = [table for table in known if table.startswith(f"{name.rstrip('/')}/")]
        hint = f"choose one of {', '.join(of_paper)}" if of_paper else did_you_mean(name, known)
        raise RequestError(f"expected the name of a paper's table, got {name!r}; {hint}")
    text = files(__package__).joinpath(file).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def is_radius(column: str) -> bool:
    """Return whether the column has the certified accuracy at a radius."""
    return re.fullmatch(r"\d+\.\d+", column) is not None


def matches(row: Mapping[str, str], columns: Mapping[str, object]) -> bool:
    """Return whether `row` has these values; numbers are compared as numbers ("0.50" equals 0.5)."""
    return all(column in row and _number(row[column]) == _number(value) for column, value in columns.items())


def _number(value: object) -> float | str:
    try:
        return float(str(value))
    except ValueError:
        return str(value)


def published_acr(table: str, **match: object) -> float | None:
    """Return the ACR of the first row with these columns, as in `published_acr("smoothmix/table2", sigma=0.5,
    method="SmoothMix")`; None if there is no such row or column.
    """
    row = next((row for row in paper_table(table) if matches(row, match)), {})
    return float(row["acr"]) if row.get("acr") else None
