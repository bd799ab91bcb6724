"""The tables of the papers, as published: average certified radius and certified accuracy in percent.

A name is the paper and the table, such as "smoothmix/table2" or "consistency/supp-table2". One file may hold several
tables of a paper: each of them is a name of its own for the same rows.
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

__all__ = ["dataset_of", "paper_table", "paper_table_names", "published_acr"]

_CIFAR10 = ("consistency/table1", "consistency/table3", "consistency/table4", "consistency/supp-table7")
_DATASETS = {
    **dict.fromkeys((*_CIFAR10, "smoothmix/table1", "smoothmix/table3"), "cifar10"),
    **dict.fromkeys(("consistency/table2", "smoothmix/table4"), "imagenet"),
}


def dataset_of(table: str) -> str:
    """The data set of a paper's table; all that are not of CIFAR-10 or ImageNet are of MNIST."""
    return _DATASETS.get(table, "mnist")


def _names_of(stem: str) -> list[str]:
    """The table names of a file: `smoothmix_table1_table3_cifar10` -> smoothmix/table1, smoothmix/table3."""
    paper, rest = stem.split("_", maxsplit=1)
    numbers = re.findall(r"(?:supp_)?table\d+", rest)
    return [f"{paper}/{table.replace('_', '-')}" for table in numbers or [rest]]


@cache
def _files() -> Mapping[str, str]:
    """Table name -> file name."""
    stored = sorted(entry.name for entry in files(__package__).iterdir() if entry.name.endswith(".csv"))
    return MappingProxyType({name: file for file in stored for name in _names_of(file.removesuffix(".csv"))})


def paper_table_names() -> list[str]:
    """The names that `paper_table` knows, sorted."""
    return sorted(_files())


def paper_table(name: str) -> list[dict[str, str]]:
    """The rows of a published table, top to bottom: column -> text as printed. Columns such as "0.50" are radii."""
    file = _files().get(name)
    if file is None:
        hint = did_you_mean(name, paper_table_names())
        raise RequestError(f"expected the name of a paper's table, got {name!r}; {hint}")
    text = files(__package__).joinpath(file).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def _equal(printed: str | None, wanted: object) -> bool:
    """Numbers are compared as numbers ("0.50" is 0.5), anything else as text."""
    if printed is None:
        return False
    try:
        return float(printed) == float(str(wanted))
    except ValueError:
        return printed == str(wanted)


def published_acr(table: str, **match: object) -> float | None:
    """The ACR of the row of `table` whose columns equal `match`, as in `published_acr("smoothmix/table2", sigma=0.5,
    method="SmoothMix")`. None if no row does, also where the table has no such column.

    Refuses a question that rows with different ACR answer.
    """
    rows = [row for row in paper_table(table) if all(_equal(row.get(k), v) for k, v in match.items())]
    values = {float(row["acr"]) for row in rows if row.get("acr")}
    if len(values) > 1:
        asked = ", ".join(f"{k}={v}" for k, v in match.items()) or "no column"
        raise RequestError(f"{table}: expected columns that single out a row, got {asked} ({len(rows)} rows); add one")
    return values.pop() if values else None
