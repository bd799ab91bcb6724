"""`smoothcert report --check`: every number of a written report against its certificates."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from smoothcert.io.compressed import compress
from smoothcert.report.check import _line_differences

from .conftest import MakeRun, image, images

Report = Callable[..., tuple[int, str, str]]


@pytest.fixture
def report(run_cli: Report, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Has written a report of two runs to the folder `out`."""
    monkeypatch.chdir(tmp_path)
    make_run("a"), make_run("b", images()[:8])
    report = partial(run_cli, "report")
    code, _, err = report("a", "b", "--format", "md,csv,tex", "--out", "out", "--radii", "0,0.5", "--title", "Mine")
    assert (code, err) == (0, "")
    return report


def test_an_unchanged_report_agrees(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = report("--check", "out")
    assert (code, err) == (0, "")
    assert out == "out: every number agrees with the certificates\n"
    assert report("a", "--format", "md,svg", "--out", "drawn")[0] == 0
    assert report("--check", "drawn")[0] == 0, "the page names its figures"
    assert report("a", "--format", "md", "--out", "drawn")[0] == 0
    assert report("--check", "drawn")[0] == 0, "the figures in the folder are of the call before"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert report("--check", "../out")[0] == 0, "paths are relative to the report"


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("report.csv", "", "", ""),
        ("report.md", "| 62.5 |", "| 63.5 |", ": is 63.5, the certificates give 62.5"),
        ("report.tex", "62.5", "12.5", ": is 12.5, the certificates give 62.5"),
        ("report.md", "keep their class", "lose their class", "lose their class"),
        ("report.md", "is not established", "is established", "the difference is established"),
    ],
)
def test_a_changed_number_is_named(report: Report, file: str, old: str, new: str, expected: str) -> None:
    path = Path("out") / file
    text = path.read_text()
    if file == "report.csv":
        acr = text.splitlines()[1].split(",")[4]
        old, new, expected = acr, "0.263", f"report.csv, line 2: is 0.263, the certificates give {acr}"
    assert old in text
    path.write_text(text.replace(old, new, 1))
    code, out, err = report("--check", "out")
    assert (code, err.count("\n")) == (1, 1)
    assert expected in out
    assert "1 difference from the certificates; report again" in err


def test_the_last_of_ten_digits_may_differ(report: Report) -> None:
    """It depends on the processor."""
    path = Path("out/report.csv")
    text = path.read_text()
    number = next(cell for cell in text.splitlines()[1].split(",") if len(cell.partition(".")[2].lstrip("0")) == 10)
    for factor, code in ((1 + 7e-10, 0), (1 + 1e-7, 1)):
        changed = f"{float(number) * factor:.10g}"
        assert changed != number
        path.write_text(text.replace(number, changed, 1))
        assert report("--check", "out")[0] == code
    assert list(_line_differences("1001000000", "1001000001", "report.csv")), "counts are exact"


def test_a_changed_certificate_changes_the_numbers(report: Report) -> None:
    path = Path("a/certificates/test.tsv")
    path.write_text(path.read_text().replace("\t0.5\t", "\t0.45\t", 1))
    code, out, _ = report("--check", "out")
    assert code == 1
    assert "report.csv, line 2: is 37.5, the certificates give 25\n" in out


def test_every_number_in_the_text_and_in_the_curves_of_the_page(report: Report) -> None:
    assert report("a", "b", "--format", "html", "--out", "page")[0] == 0
    page = Path("page/report.html")
    whole = page.read_text()
    # Another day, version and style, and figures: the same numbers.
    dated = re.sub(r"<span>\d+ \w+ \d{4}</span>", "<span>1 May 2020</span>", whole)
    changes = {
        "<style>": "<style>\n\n",
        "Tables</a>": 'Tables</a> <a href="#figures">Figures</a>',
        '<section id="gallery">': '<section id="figures">\n<h2>Figures</h2>\n</section>\n<section id="gallery">',
    }
    for old, new in changes.items():
        dated = dated.replace(old, new, 1)
    page.write_text(re.sub(r"smoothcert \S+ from", "smoothcert 0.0.1 from", dated))
    assert report("--check", "page")[0] == 0

    def differences(text: str) -> str:
        page.write_text(text)
        code, out, _ = report("--check", "page")
        assert code == 1
        return out

    assert whole.count(">62.5</td>") > 1
    assert ": is 63.5, the certificates give 62.5" in differences(whole.replace(">62.5</td>", ">63.5</td>", 1))
    curve = differences(whole.replace('"steps":[1000,', '"steps":[1001,', 1))
    assert re.fullmatch(r"""report.html, '\{"panels":.*': is 1001, the certificates give 1000\n""", curve)
    assert '"panels"' in differences(whole.replace('{"panels"', "{", 1))
    assert "lose" in differences(whole.replace("keep their class", "lose their class", 1))


def test_what_pictures_show_and_that_nobody_changed_them(report: Report) -> None:
    certificates, picture = Path("a/certificates/test.tsv"), Path("drawn/curves.svg")
    whole = certificates.read_text()
    certificates.write_text(whole.replace("\t0.5\t", "\t0.45\t", 1))
    assert report("a", "b", "--format", "svg", "--out", "drawn")[0] == 0
    assert report("--check", "drawn")[0] == 0
    certificates.write_text(whole)
    picture.write_text(picture.read_text() + "\n")
    code, out, _ = report("--check", "drawn")
    assert (code, out.splitlines()[:2]) == (
        1,
        [
            "curves.svg: is not the file that smoothcert wrote",
            "curves.svg: shows other numbers than the certificates give",
        ],
    )


def test_missing_and_further_lines_are_named(report: Report) -> None:
    path = Path("out/report.csv")
    header, *rows = path.read_text().splitlines()
    for lines, expected in ((rows[:-1], "missing"), ([*rows, rows[0]], "not in the certificates")):
        path.write_text("\n".join([header.replace("acr,", "ACR,", 1), *lines]) + "\n")
        _, out, _ = report("--check", "out")
        assert "report.csv, line 1: is '" in out, "another name of a column"
        assert f"report.csv, line {max(3, len(lines) + 1)}: {expected}" in out


def test_a_report_that_was_moved_away_from_its_runs(report: Report) -> None:
    Path("received").mkdir()
    Path("out").rename("received/out")
    code, _, err = report("--check", "received/out")
    assert (code, err.count("\n")) == (2, 1)
    place = Path("received", "a")
    assert f"received/out: expected the certificates of its report at {place}, got nothing there" in err
    assert report("a", "b", "--radii", "0,0.5", "--title", "Mine", "--check", "received/out")[0] == 0


def test_a_file_that_was_compressed_since(report: Report) -> None:
    assert report("a/certificates/test.tsv", "b", "--format", "md", "--out", "files")[0] == 0
    compress(Path("a/certificates/test.tsv"))
    assert report("--check", "files") == (0, "files: every number agrees with the certificates\n", "")


def test_reports_without_a_stored_request(report: Report) -> None:
    manifest = Path("out/.smoothcert-report.json")
    stored = json.loads(manifest.read_text())
    assert stored["request"]["runs"] == ["../a", "../b"]
    del stored["request"]
    manifest.write_text(json.dumps(stored))
    code, _, err = report("--check", "out")
    assert (code, err.count("\n")) == (2, 1)
    assert err == (
        "smoothcert: out: this report does not store its request, so it can be checked only if you give its runs and "
        "options: `smoothcert report RUNS [OPTIONS] --check out`\n"
    )
    assert report("--check", "a") == report("a", "--check", "a"), "a run is no report"
    assert report("a", "b", "--radii", "0,0.5", "--title", "Mine", "--check", "out")[0] == 0
    for damaged in ({"runs": 3}, {"runs": []}, {"runs": ["../a"], "radii": 5}, {"runs": ["../a"], "paper": ["x"]}):
        stored["request"] = damaged
        manifest.write_text(json.dumps(stored))
        code, _, err = report("--check", "out")
        assert (code, err.count("\n")) == (1, 1), damaged
        assert "the stored request of the report is damaged" in err
    code, _, err = report("--check", "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    code, _, err = report("a", "--check", "a")
    assert (code, err.count("\n")) == (2, 1)
    assert "expected one of report.csv" in err


def test_nothing_to_report(report: Report) -> None:
    code, _, err = report("--out", "other")
    assert (code, err.count("\n")) == (2, 1)
    assert "expected at least one run folder or certificates file, got none" in err


def test_options_of_the_report(report: Report, make_run: MakeRun) -> None:
    better = [image(i, 1, 1, 0.4 + 0.01 * i) for i in range(10)]
    make_run("c", [image(i, 1, 1, 0.1) for i in range(10)]), make_run("d", better, objective="smoothmix")
    options = ["--reference", "d", "--linf", "--columns", "name,acr,acr_low,0.25", "--caption", "50% & σ"]
    code, _, err = report("c", "d", *options, "--label", "tab:x", "--format", "md,tex", "--out", "more")
    assert (code, err) == (0, "")
    page, tex = Path("more/report.md").read_text(), Path("more/report.tex").read_text()
    assert "| 0.50 | c | d | −0.345 (0.010)\\* |" in page, "c minus d"
    assert f"| {0.1 / 28:.4f} |" in page, "28 x 28 values"
    assert r"\caption{50\% \& $\sigma$}" in tex
    assert r"\label{tab:x}" in tex
    assert r"$\sigma$ & run & ACR & acr\_low & 0.25 \\" in tex
    assert r" & d & \textbf{0.445} & " in tex
    assert report("--check", "more")[0] == 0
    assert report("c", "d", "--columns", "acr,largest_radius", "--format", "tex", "--out", "named")[0] == 0
    named = Path("named/report.tex").read_text()
    assert r"$\sigma$ & run & ACR & largest\_radius \\" in named, "rows always have a name"
    assert r"0.50 & c & 0.100 & 1.232 \\" in named, "numbers that are only in CSV otherwise have four digits"
    code, _, err = report("c", "--columns", "acrr", "--format", "tex", "--out", "wrong")
    assert (code, err.count("\n")) == (2, 1)
    assert "columns: expected columns of report.csv, got 'acrr'; did you mean acr" in err
    code, _, err = report("c", "--columns", "acr,0.33", "--format", "tex", "--out", "wrong")
    assert "got '0.33'; add this radius to --radii" in err
    code, _, err = report("c", "d", "--reference", "e", "--out", "wrong")
    assert (code, err.count("\n")) == (2, 1)
    assert "reference: expected one of c, d, got e" in err
    assert not Path("wrong").exists()
