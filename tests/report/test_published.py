"""Published rows below runs, and what is said about the differences in protocol."""

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from smoothcert.certification.certificates import CertifiedImage
from smoothcert.errors import RequestError
from smoothcert.papers.tables import dataset_of, paper_table, paper_table_names
from smoothcert.report import Published, summarize, write_report
from smoothcert.report.document import terminal_report
from smoothcert.report.published import AS_PUBLISHED, certified_otherwise, published_rows

from .conftest import MakeRun, as_file, image, our_file

TABLE = "smoothmix/table2"
ROW = Published(TABLE, "SmoothMix (eta=5)", 0.3, {0.0: 60.0, 0.5: 39.9, 1.0: 12.0}, ("epochs 2, the paper's 90",))


def only(name: str, row: Published = ROW) -> Any:
    """A matcher that finds `row` for the run called `name`."""
    return lambda file: row if file.path.parent.parent.name == name else None


def test_published_row_and_difference_in_every_format(make_run: MakeRun, tmp_path: Path) -> None:
    runs, out = [make_run("mine", objective="smoothmix"), make_run("other")], tmp_path / "out"
    report = write_report(runs, out, ["md", "csv", "tex"], published=only("mine"))
    assert list(report.contents.summaries[0].accuracy_at) == [0.0, 0.5, 1.0], "the columns of the paper"
    text = (out / "report.md").read_text()
    assert "| mine | SmoothMix (eta=5) | 0.320 | 60.0 | 40.0 | 10.0 |" in text
    assert "|  | *published* |  | *0.300* | *60.0* | *39.9* | *12.0* |  |  |" in text
    assert "|  | *difference* |  | *+0.020* | *0.0* | *+0.1* | *−2.0* |  |  |" in text
    assert text.count("*published*") == 1
    assert "| other | Gaussian |" in text
    assert (
        "- **mine**: epochs 2, the paper's 90; 10 images, the paper's 10,000; n = 1,000, the paper's 100,000;" in text
    )
    assert "- **other**: not in smoothmix/table2\n" in text
    latex = (out / "report.tex").read_text()
    assert r"\textit{published} &  & \textit{0.300}" in latex
    assert r"\textit{$-$2.0}" in latex
    assert "mine: epochs 2, the paper's 90; 10 images" in latex.split(r"\end{tabular}")[1]
    first, second = csv.DictReader((out / "report.csv").open(newline=""))
    assert (first["method"], first["published_table"], first["published_row"]) == ("smoothmix", TABLE, ROW.label)
    for key, published, own in (("acr", 0.3, 0.31999), ("0.50", 39.9, 40), ("1.00", 12, 10)):
        assert float(first[f"published_{key}"]) == published
        assert float(first[f"{key}_difference"]) == pytest.approx(own - published)
    assert {value for key, value in second.items() if "published" in key or "difference" in key} == {""}


def test_runs_come_in_the_order_of_the_table(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(name) for name in ("unknown", "second", "first")]
    published = {name: replace(ROW, row=name, rows=("first", "missing", "second")) for name in ("first", "second")}
    report = write_report(runs, tmp_path, ["csv"], published=lambda file: published.get(file.path.parent.parent.name))
    assert [summary.name for summary in report.contents.summaries] == ["first", "second", "unknown"]


def test_published_rows_and_hyperparameters_in_a_narrow_terminal(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"run-with-a-long-name-{weight}") for weight in (5, 20)]
    for run, weight in zip(runs, (5, 20), strict=True):
        recipe = run / "recipe.yaml"
        recipe.write_text(f"objective: {{name: consistency, weight: {weight}.0}}\nsigma: 0.5\n")
    report = write_report(runs, tmp_path / "out", ["csv"], published=only(runs[0].name))
    console = Console(width=60, record=True)
    for shown in terminal_report(report.contents, 60):
        console.print(shown)
    assert "published" in console.export_text()


def test_published_rows_in_a_terminal(make_run: MakeRun, tmp_path: Path) -> None:
    report = write_report([make_run("mine"), make_run("other")], tmp_path / "out", ["csv"], published=only("mine"))
    console = Console(width=80, record=True)
    for shown in terminal_report(report.contents, 80):
        console.print(shown)
    text = console.export_text()
    lines = [line.split("│") for line in text.splitlines()]
    assert [line[2].strip() for line in lines if len(line) > 3] == ["mine", "published", "difference", "other"]
    assert "+0.020" in text
    assert "other: not in smoothmix/table2" in text
    assert "mine: epochs 2, the paper's 90; 10 images" in text
    assert "…" not in text


def test_reports_without_a_paper_do_not_mention_one(make_run: MakeRun, tmp_path: Path) -> None:
    write_report([make_run("a")], tmp_path / "out", ["md", "csv", "tex"])
    for path in (tmp_path / "out").iterdir():
        text = path.read_text()
        assert "ublished" not in text
        assert "_difference" not in text
        assert "*difference*" not in text


def test_numbers_as_printed(make_run: MakeRun, tmp_path: Path) -> None:
    """ImageNet's accuracies have no decimals, and some rows have no ACR or not all radii."""
    row = replace(ROW, table="consistency/table2", dataset="imagenet", acr=None, accuracy_at={0.0: 57.0, 0.5: 46.0})
    write_report([make_run("a")], tmp_path / "out", ["md"], radii=[0.0, 0.5, 0.7], published=only("a", row))
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| *published* |  | *–* | *57* | *46* | *–* |" in text
    assert "| *difference* |  | *–* | *+3.0* | *−6.0* | *–* |" in text
    elsewhere = replace(row, table="consistency/supp-table7", dataset="cifar10")
    write_report([tmp_path / "a"], tmp_path / "out", ["md"], radii=[0.0, 0.5], published=only("a", elsewhere))
    assert "| *57.0* | *46.0* |" in (tmp_path / "out" / "report.md").read_text()


def test_given_radii_win_and_a_row_without_any_leaves_the_default(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    report = write_report([run], tmp_path / "out", ["csv"], radii=[0.5], published=only("a"))
    assert list(report.contents.summaries[0].accuracy_at) == [0.5]
    report = write_report([run], tmp_path / "out", ["csv"], published=only("a", replace(ROW, accuracy_at={})))
    assert list(report.contents.summaries[0].accuracy_at) == [0.0, 0.25, 0.5, 0.75, 1.0]


PAPERS = {"dataset": "mnist", "split": "test", "n": 100_000, "n0": 100, "alpha": 0.001, "precision": "fp32"}


@cache
def rows_of(images: int, n: int, n0: int, classes: int) -> list[CertifiedImage]:
    return [image(i, i % classes, i % classes, 0.5, n=n, n0=n0) for i in range(images)]


def differences(
    images: int = 10_000, table: str = TABLE, n: int = 100_000, n0: int = 100, classes: int = 10, **changes: Any
) -> list[str]:
    settings = {k: v for k, v in {**PAPERS, "n": n, "n0": n0, **changes}.items() if v is not None}
    file = as_file(rows_of(images, n, n0, classes), **settings)
    return certified_otherwise(summarize(file, "x", []), dataset_of(table))


def test_the_papers_own_protocol() -> None:
    assert differences() == []
    assert differences(500, "smoothmix/table4", dataset="imagenet") == []
    assert differences(table="consistency/table1", dataset="cifar10") == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"images": 9_999}, "9,999 images, the paper's 10,000"),
        ({"n": 1000}, "n = 1,000, the paper's 100,000"),
        ({"n": 1_000_000}, "n = 1,000,000, the paper's 100,000"),
        ({"n0": 10}, "n0 = 10, the paper's 100"),
        ({"alpha": 0.01}, "alpha = 0.01, the paper's 0.001"),
        ({"alpha": None}, "alpha not recorded"),
        ({"split": "train"}, "split train, the paper's test"),
        ({"dataset": "mnist-sample"}, "certified on mnist-sample, the paper's mnist"),
        ({"dataset": None}, "data set not recorded"),
        ({"precision": "bf16"}, "votes in bf16"),
        ({"bound": "two-sided"}, "two-sided bound"),
        ({"classes": 1}, "all images of class 0, so its ACR alone"),
        ({"noise": "laplace"}, "laplace noise, radii in L1"),
        ({"label_aware": True}, "label-aware: wrong images were not sampled, for benchmarks only"),
        (
            {"dataset": "cifar10 (not the official files)", "table": "consistency/table1"},
            "certified on cifar10 (not the official files), the paper's cifar10",
        ),
        ({"images": 10_000, "table": "smoothmix/table4", "dataset": "imagenet"}, "10,000 images, the paper's 500"),
    ],
    ids=str,
)
def test_each_difference_is_reported_alone(changes: dict[str, Any], expected: str) -> None:
    assert differences(**changes) == [expected]


def test_a_file_of_another_tool_and_mixed_votes() -> None:
    theirs = summarize(as_file(rows_of(10_000, 0, 0, 2)), "x", [])
    assert certified_otherwise(theirs, "mnist") == ["n, n0, alpha not recorded", "data set not recorded"]
    rows = [image(0, 0, 0, 0.5, n=50_000, n0=100), *rows_of(10_000, 100_000, 100, 10)[1:]]
    found = certified_otherwise(summarize(as_file(rows, **PAPERS), "x", []), "mnist")
    assert found[0] == "n not the same for all images, the paper's 100,000"


def test_runs_that_differ_alike_share_a_line(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a"), make_run("b")]
    contents = write_report(runs, tmp_path / "out", ["csv"], published=lambda file: ROW).contents
    assert list(contents.notes.values()) == [["a", "b"]]
    run = make_run("c", rows_of(10_000, 100_000, 100, 10), n=100_000, n0=100)
    row = replace(ROW, differences=())
    contents = write_report([run], tmp_path / "out", ["csv"], published=lambda file: row).contents
    assert contents.notes == {AS_PUBLISHED: ["c"]}


def test_the_data_set_of_every_table() -> None:
    """As the best accuracy at radius 0 tells: MNIST above 85%, CIFAR-10 below, ImageNet printed without decimals."""
    for table in paper_table_names():
        printed = [row.get("0.00", row.get("0.0")) for row in paper_table(table)]
        clean = max((text for text in printed if text is not None), key=float, default=None)
        if clean is not None:
            kind = "mnist" if float(clean) > 85 else "cifar10" if "." in clean else "imagenet"
            assert dataset_of(table) == kind, table
    assert dataset_of("consistency/table3") == "cifar10", "training cost; its ACR are those of table 1"
    assert dataset_of("mnist/acr-over-5-seeds") == "mnist"


def test_no_run_of_the_table(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"^a, b: expected a run that the paper's table has.*another table"
    ) as caught:
        write_report([make_run("a"), make_run("b")], tmp_path / "out", published=lambda file: None)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_certificates_at_another_sigma_than_the_training(make_run: MakeRun, tmp_path: Path) -> None:
    good, bad = make_run("a", training_sigma=0.5), make_run("b", training_sigma=1.0)
    expected = r"b/certificates/test\.tsv: expected certificates at the sigma of training, 1\.0, .*--sigma 1\.0"
    with pytest.raises(RequestError, match=expected) as caught:
        write_report([good, bad], tmp_path / "out", published=lambda file: ROW)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    write_report([good, bad], tmp_path / "out", ["csv"], published=only("a")), "what is not compared may differ"


def test_certificates_with_a_randomized_bound_are_not_compared() -> None:
    """Their radii are larger: the papers' bound is one-sided."""
    file = our_file(bound="randomized")
    with pytest.raises(RequestError, match="expected the one-sided bound to compare with smoothmix/table2, got random"):
        published_rows([("a", file)], lambda file: ROW)


@pytest.mark.parametrize(
    ("rows", "listed"),
    [
        (("a", "b", "c"), "- **a**, **c**: in smoothmix/table2, missing here\n"),
        (("b",), None),
        (
            tuple("b" * i for i in range(1, 40)),
            ", ".join(f"**{'b' * i}**" for i in range(2, 40)) + ": in smoothmix/table2, missing here\n",
        ),
    ],
)
def test_rows_of_the_table_without_a_run_are_listed(
    rows: tuple[str, ...], listed: str | None, make_run: MakeRun, tmp_path: Path
) -> None:
    row = replace(ROW, row="b", rows=rows)
    write_report([make_run("mine"), make_run("other")], tmp_path / "out", ["md"], published=only("mine", row))
    text = (tmp_path / "out" / "report.md").read_text()
    assert ("missing here" in text) == (listed is not None)
    assert listed is None or listed in text
