"""The papers' tables: spot checks against the printed numbers, and that each file is well formed."""

import csv
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import pytest

import smoothcert.papers.tables
from smoothcert.errors import RequestError
from smoothcert.papers.tables import paper_table, paper_table_names, published_acr

FILES = sorted(Path(smoothcert.papers.tables.__file__).parent.glob("*.csv"))


def test_names() -> None:
    names = paper_table_names()
    assert names == sorted(set(names))
    expected = {
        "smoothmix/table1", "smoothmix/table2", "smoothmix/table3", "smoothmix/table4", "smoothmix/table6",
        "consistency/table1", "consistency/table2", "consistency/supp-table2", "consistency/supp-table7",
        "mnist/acr-over-5-seeds",
    }  # fmt: skip
    assert expected <= set(names)
    assert len(names) == len(FILES) + 1, "every file has a name, one file has two"


def test_two_tables_of_one_file() -> None:
    assert paper_table("smoothmix/table1") == paper_table("smoothmix/table3")


def test_tables_of_supplement_and_main_text_differ() -> None:
    assert paper_table("consistency/table2") != paper_table("consistency/supp-table2")


def test_row_is_as_printed() -> None:
    first = paper_table("smoothmix/table2")[0]
    assert (first["sigma"], first["method"], first["acr"], first["0.75"]) == ("0.25", "Gaussian", "0.911", "93.3")


def test_changed_rows_do_not_change_the_table() -> None:
    paper_table("smoothmix/table2")[0]["acr"] = "9"
    assert paper_table("smoothmix/table2")[0]["acr"] == "0.911"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_well_formed(path: Path) -> None:
    """Rows as long as the header, ACR in range, and certified accuracy that never rises with the radius.

    ACR is the area under the certified accuracy. The printed points bound it from below and above, as no radius exceeds
    sigma Phi^-1(0.001^(1/n)): an ACR or an accuracy of another row, or in another column, is mostly outside.
    """
    header, *rows = csv.reader(path.open(newline="", encoding="utf-8"))
    assert rows
    radii = [i for i, name in enumerate(header) if name.replace(".", "").isdigit()]
    assert [float(header[i]) for i in radii] == sorted(float(header[i]) for i in radii)
    for row in rows:
        assert len(row) == len(header), row
        shares = [float(row[i]) for i in radii]
        assert shares == sorted(shares, reverse=True), row
        assert all(0 <= share <= 100 for share in shares)
        if "acr" in header:
            assert 0 < (acr := float(row[header.index("acr")])) < 4
        if radii and "acr" in header and "sigma" in header:
            largest = float(row[header.index("sigma")]) * NormalDist().inv_cdf(0.001 ** (1 / 100_000))
            ends = [min(float(header[i]), largest) for i in radii] + [largest]
            least = sum(after / 100 * (b - a) for after, (a, b) in zip(shares[1:], pairwise(ends[:-1]), strict=True))
            most = sum(before / 100 * (b - a) for before, (a, b) in zip(shares, pairwise(ends), strict=True))
            assert least - 0.001 <= acr <= most + 0.001, row


@pytest.mark.parametrize(
    ("table", "match", "expected"),
    [
        ("smoothmix/table2", {"sigma": 0.5, "method": "Gaussian"}, 1.553),
        ("smoothmix/table2", {"sigma": "0.50", "method": "Gaussian"}, 1.553),
        ("smoothmix/table2", {"sigma": 1, "method": "SmoothMix (eta=5) + one-step adversary"}, 1.823),
        ("smoothmix/table6", {"eta": 4}, 1.820),
        ("smoothmix/table7", {"alpha_T": "2.0x4"}, 1.790),
        ("consistency/table1", {"sigma": 0.25, "method": "SmoothAdv"}, 0.544),
        ("smoothmix/table2", {"sigma": 0.5, "method": "gaussian"}, None),
        ("smoothmix/table2", {"sigma": 0.3, "method": "Gaussian"}, None),
        ("smoothmix/table2", {"colour": "red"}, None),
        ("mnist/acr-over-5-seeds", {"method": "Gaussian"}, None),
    ],
)
def test_published_acr(table: str, match: dict[str, object], expected: float | None) -> None:
    assert published_acr(table, **match) == expected


def test_unknown_table_is_refused() -> None:
    with pytest.raises(RequestError, match=r"'smoothmx/table2'.*smoothmix/table2"):
        paper_table("smoothmx/table2")
    with pytest.raises(RequestError, match=r"'smoothmix'; choose one of smoothmix/table1, .*, smoothmix/table9$"):
        paper_table("smoothmix")
    with pytest.raises(RequestError, match="consistency/table1"):
        published_acr("?", sigma=1)
