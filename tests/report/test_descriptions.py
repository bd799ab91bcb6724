"""Certificates files of other tools: how they vary, and how a user describes them."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import smoothcert as sc
from smoothcert.certification.certificates import read_certificates
from smoothcert.errors import RequestError, WorkError
from smoothcert.report import write_report
from smoothcert.report.descriptions import parse_description

from .conftest import MakeRun, image

# label, prediction, radius of five images: right, abstained, wrong, right, right.
IMAGES = [(3, 3, "0.951"), (8, -1, "0.0"), (0, 5, "0.623"), (6, 6, "0.250"), (1, 1, "1.231")]
RUNNING = [1, 1, 1, 2, 3]
Report = Callable[..., tuple[int, str, str]]


def table(separator: str = "\t", header: str = "idx label predict radius correct time", extra: str = "") -> str:
    """A file with a running count of the correct images, `extra` cells at the end of each row."""
    names = [*header.split(), *(["more"] if extra else [])]
    lines = [separator.join(names)]
    for i, ((label, predict, radius), running) in enumerate(zip(IMAGES, RUNNING, strict=True)):
        cells = {
            "idx": i,
            "label": label,
            "predict": predict,
            "radius": radius,
            "correct": running,
            "time": "0:00:12",
        }
        lines.append(separator.join([*(str(cells[name]) for name in header.split()), *([extra] if extra else [])]))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        table(),
        table(extra="0.99"),
        table(","),
        table("   "),
        table(header="idx label predict radius time correct"),
        table(header="idx label predict radius"),
        table().replace("\n", "\r\n"),
        table().upper(),
        table().removesuffix("\n"),
        "\ufeff" + table(";").replace(".", ",").replace("\n", "\r\n"),
        "\ufeff" + table(",", extra='"3:998,5:2"').replace("\n", "\r\n"),
    ],
    ids=[
        "running",
        "extra",
        "commas",
        "spaces",
        "order",
        "four",
        "windows",
        "capitals",
        "no newline",
        "Excel",
        "quoted",
    ],
)
def test_variants_of_the_six_columns(text: str, tmp_path: Path) -> None:
    path = tmp_path / "sigma_0.25"
    path.write_text(text, newline="")
    rows = read_certificates(path).rows
    expected = [(label, predict, float(radius)) for label, predict, radius in IMAGES]
    assert [(r.label, r.certificate.prediction, r.certificate.radius) for r in rows] == expected
    assert [r.correct for r in rows] == [True, False, False, True, True], "computed, not read"


@pytest.mark.parametrize("separator", [",", ";"])
def test_a_file_of_ours_that_a_spreadsheet_saved_as_csv(separator: str, ours: Path, tmp_path: Path) -> None:
    """Excel writes a byte order mark, quotes votes that contain commas, and ends lines as Windows does."""
    (stored,) = (ours / "certificates").glob("*.tsv")
    path = tmp_path / "saved.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(csv.reader(stored.open(), delimiter="\t"))
    assert path.read_bytes().startswith(b"\xef\xbb\xbfidx" + separator.encode())
    expected = [
        (r.index, r.label, r.certificate.prediction, r.certificate.radius) for r in read_certificates(stored).rows
    ]
    saved = read_certificates(path).rows
    assert [(r.index, r.label, r.certificate.prediction, r.certificate.radius) for r in saved] == expected


def test_files_that_are_not_such_tables_are_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "theirs.txt"
    path.write_text("idx\tlabel\tradius\n1\t2\t0.5\n")
    with pytest.raises(RequestError, match=r"theirs\.txt: not a certificates file: expected the columns 'idx label"):
        read_certificates(path)
    path.write_text(table(extra="1").replace("3\t6\t6\t0.250\t2\t0:00:12\t1", "3\t6\t6"))
    with pytest.raises(WorkError, match=r"theirs\.txt, line 5: damaged"):
        read_certificates(path)


@pytest.fixture
def ours(make_run: MakeRun) -> Path:
    """A run on the same images as IMAGES."""
    rows = [image(i, label, predict, float(radius) / 2) for i, (label, predict, radius) in enumerate(IMAGES)]
    return make_run("ours", rows)


def described(report: Report, out: Path, *arguments: object) -> dict[str, dict[str, str]]:
    code, _, err = report(*arguments, "--format", "csv,md", "--out", out)
    assert (code, err) == (0, "")
    return {row["name"]: row for row in csv.DictReader((out / "report.csv").open(newline=""))}


def test_a_described_file_is_in_the_same_table(run_cli: Report, ours: Path, tmp_path: Path) -> None:
    report, theirs, out = partial(run_cli, "report"), tmp_path / "theirs.tsv", tmp_path / "out"
    theirs.write_text(table())
    described(report, out, ours, theirs)
    assert "**theirs**: compared with no run of known σ: describe the file" in (out / "report.md").read_text()
    rows = described(report, out, ours, theirs, "--as", "name=CAT-RS,sigma=0.5")
    assert "of known σ" not in (out / "report.md").read_text()
    assert (rows["CAT-RS"]["sigma"], rows["CAT-RS"]["dataset"]) == ("0.5", "mnist")
    assert "not ranked: n differs (1,000 and not recorded)" in (out / "report.md").read_text()
    same = "name=CAT-RS,sigma=0.5,n=1e3,alpha=0.001,method=cat-rs"
    rows = described(report, out, ours, theirs, "--as", same, "--radii", "0,0.5")
    assert rows["CAT-RS"]["method"] == "cat-rs"
    assert sc.report([ours, theirs], described=same)[1]["method"] == "CAT-RS", "as the tables for reading"
    assert float(rows["CAT-RS"]["acr_minus_reference"]) == pytest.approx((0.951 + 0.25 + 1.231) / 2 / 5)
    assert rows["CAT-RS"]["reference"] == "ours"
    text = (out / "report.md").read_text()
    assert "not ranked: " not in text
    assert "2 of 5 test digits of MNIST keep their class under every change of L2 length up to 0.5 (CAT-RS;" in text


def test_the_split_of_the_same_data_set_is_that_of_the_other_runs(run_cli: Report, ours: Path, tmp_path: Path) -> None:
    """Only images that all runs have are compared, whether --as repeats the data set or not."""
    theirs = tmp_path / "theirs.tsv"
    theirs.write_text("".join(table().splitlines(keepends=True)[:4]))
    for number, data in enumerate(("", ",dataset=mnist", ",dataset=mnist,split=test")):
        same = f"name=CAT-RS,sigma=0.5,n=1000,alpha=0.001{data}"
        rows = described(partial(run_cli, "report"), tmp_path / str(number), ours, theirs, "--as", same)
        assert [(row["images"], row["reference"]) for row in rows.values()] == [("3", ""), ("3", "ours")]
    other = "name=CAT-RS,sigma=0.5,n=1000,alpha=0.001,dataset=mnist,split=train"
    rows = described(partial(run_cli, "report"), tmp_path / "train", ours, theirs, "--as", other)
    assert [row["reference"] for row in rows.values()] == ["", ""]


def test_a_described_file_has_the_published_row_of_its_method(run_cli: Report, tmp_path: Path) -> None:
    theirs, out = tmp_path / "theirs.tsv", tmp_path / "out"
    theirs.write_text(table())
    about = "name=A,sigma=0.5,n=100000,alpha=0.001,dataset=mnist,method="
    report = partial(run_cli, "report", theirs, "--paper", "smoothmix/table2")
    (row,) = described(report, out, "--as", f"{about}consistency").values()
    assert (row["published_row"], row["published_acr"]) == ("Consistency", "1.657")
    assert float(row["acr_difference"]) == pytest.approx((0.951 + 0.25 + 1.231) / 5 - 1.657)
    note = "- **A**: how it was trained is not recorded; 5 images, the paper's 10,000; n0 not recorded\n"
    assert note in (out / "report.md").read_text()
    assert run_cli("report", "--check", out)[0] == 0
    code, _, err = report("--as", f"{about}smoothmix", "--out", tmp_path / "unclear")
    assert (code, err.count("\n")) == (2, 1)
    assert "for a file of another tool give dataset, sigma and method with --as" in err


def test_python_describes_files_as_the_command_does(run_cli: Report, ours: Path, tmp_path: Path) -> None:
    theirs, text = tmp_path / "theirs.tsv", "name=CAT-RS,sigma=0.5,n=1e3,alpha=0.001"
    theirs.write_text(table())
    printed = described(partial(run_cli, "report"), tmp_path / "out", ours, theirs, "--as", text)
    for given in (text, [text]):
        rows = {row["name"]: row for row in sc.report([ours, theirs], described=given)}
        assert rows.keys() == printed.keys() == {"ours", "CAT-RS"}
        for key in ("sigma", "n", "acr_minus_reference"):
            assert rows["CAT-RS"][key] == pytest.approx(float(printed["CAT-RS"][key]))
    with pytest.raises(RequestError, match="expected keys out of"):
        sc.report([theirs], described="sgima=0.5")


def test_a_described_file_is_not_compared_with_images_of_other_numbers(
    run_cli: Report, make_run: MakeRun, tmp_path: Path
) -> None:
    ours, theirs, out = make_run("ours", dataset="imagenet (not the official set)"), tmp_path / "t.tsv", tmp_path / "o"
    theirs.write_text(table())
    rows = described(partial(run_cli, "report"), out, ours, theirs, "--as", "name=A,sigma=0.5,n=1000,alpha=0.001")
    assert (rows["A"]["dataset"], rows["A"]["reference"]) == ("imagenet", "")


def test_descriptions_belong_to_files_in_order_or_by_name(run_cli: Report, ours: Path, tmp_path: Path) -> None:
    report, files = partial(run_cli, "report"), [tmp_path / "first", tmp_path / "second"]
    for path in files:
        path.write_text(table())
    rows = described(report, tmp_path / "out", ours, *files, "--as", "sigma=0.25", "--as", "name=B,sigma=1")
    assert {name: row["sigma"] for name, row in rows.items()} == {"ours": "0.5", "first": "0.25", "B": "1"}
    rows = described(report, tmp_path / "out", *files, "--as", "file=second,name=B,sigma=1,dataset=mnist")
    assert {name: row["sigma"] for name, row in rows.items()} == {"first": "", "B": "1"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["sigma"], '--as: expected KEY=VALUE,... such as "name=CAT-RS,sigma=0.5", got "sigma"'),
        (["sigmas=0.5"], "--as: expected keys out of name, file, sigma"),
        (["sigma=wide"], "--as: expected a number for sigma, got 'wide'"),
        (["sigma=-1"], "--as: expected a number above 0"),
        (["n=few"], "--as: expected a number for n, got 'few'"),
        (["name=ours"], "expected a different name for each run, got 'ours' twice"),
        (["name=a", "name=b"], "--as: expected one for each file of another tool, got more"),
        (["sigma=0.25,n=1000,alpha=0.001"], "--as: expected radii of at most 0.615 for sigma 0.25, n 1,000"),
        (["file=nowhere,name=a"], "--as: expected file= to name one file without settings, got 'nowhere'"),
    ],
)
def test_wrong_descriptions_are_one_line(
    given: list[str], expected: str, run_cli: Report, ours: Path, tmp_path: Path
) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    theirs.write_text(table())
    options = [word for text in given for word in ("--as", text)]
    code, _, err = run_cli("report", ours, theirs, *options, "--out", out)
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith(f"smoothcert: {expected}"), err
    assert not out.exists()


def test_descriptions_as_mappings() -> None:
    assert parse_description("name=CAT-RS, sigma=0.5") == {"name": "CAT-RS", "sigma": "0.5"}
    with pytest.raises(RequestError, match="did you mean dataset"):
        parse_description("data_set=cifar10")


def test_other_labels_are_other_data(make_run: MakeRun, ours: Path, tmp_path: Path) -> None:
    """The same indices of another data set, by mistake under the same name."""
    rows = [image(i, label + 1, predict, float(radius) / 2) for i, (label, predict, radius) in enumerate(IMAGES)]
    report = write_report([ours, make_run("other", rows)], tmp_path / "out", ["md"])
    (comparison,) = report.contents.comparisons
    assert comparison.obstacles == ("the labels of the same images differ, so these are different data",)


def test_a_dash_is_never_the_best(tmp_path: Path) -> None:
    """Printed with few digits, a radius may be rounded beyond what 10,000 votes show at sigma 0.25: 0.79964."""
    for name, radius in (("a", "0.8"), ("b", "0.3")):
        rows = "".join(f"{i}\t1\t1\t{radius}\t1\t0:00:01\n" for i in range(20))
        (tmp_path / f"{name}.tsv").write_text("idx\tlabel\tpredict\tradius\tcorrect\ttime\n" + rows)
    files = [tmp_path / "a.tsv", tmp_path / "b.tsv"]
    described = [parse_description("sigma=0.25,n=10000,alpha=0.001")] * 2
    contents = write_report(files, tmp_path / "out", ["md"], described=described, radii=[0, 0.8]).contents
    cells = {c.key: cell for c, cell in zip(contents.table.columns, contents.table.groups[0][0], strict=True)}
    assert (cells["acr"].text, cells["acr"].best) == ("0.800", True)
    assert (cells["0.80"].text, cells["0.80"].best) == ("–", False)
