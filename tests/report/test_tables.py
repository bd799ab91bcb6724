"""Tables against hand-written ones and against numbers recomputed from the certificates files."""

import csv
import io
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest, norm

from smoothcert.certification.certificates import CertificatesFile, read_certificates
from smoothcert.errors import RequestError
from smoothcert.io.text import escape_markdown
from smoothcert.report import Contents, Summary, write_report
from smoothcert.report.contents import LatexTable
from smoothcert.report.curves import draw_curves
from smoothcert.report.document import markdown_page
from smoothcert.report.layout import comma_separated, decimals_needed, escape_latex, latex, markdown, terminal
from smoothcert.report.tables import compact, layout

from .conftest import MakeRun, image, images


def summary(name: str, sigma: float | None, acr: float, method: str | None = None, **other: object) -> Summary:
    values: dict[str, object] = {
        "accuracy_at": {0.0: 0.9876, 0.5: 0.25, 1.0: 0.0},
        "abstention": 0.0125,
        "acr_standard_error": 0.01,
        **other,
    }
    file = CertificatesFile(Path("f.tsv"), (), {}, {})
    fixed = {"file": file, "images": 400, "n": 1000, "alpha": 0.001, "votes": 5}
    return Summary(name=name, sigma=sigma, acr=acr, method=method, **{**fixed, **values})  # type: ignore[arg-type]


def markdown_table(rows: list[Summary]) -> str:
    return markdown(layout(rows))


def csv_table(rows: list[Summary]) -> str:
    return comma_separated(layout(rows))


def terminal_table(rows: list[Summary], width: int = 100) -> Table:
    return terminal(layout(rows), width, "caption")


THREE = [summary("b", 0.5, 1.2), summary("a|x", 0.25, 0.9114), summary("c_d", 0.25, 0.9216)]


def test_markdown_table() -> None:
    assert markdown_table(THREE) == (
        "| σ | run | ACR | 0.00 | 0.50 | 1.00 | abstain | images |\n"
        "| ---: | :--- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| 0.25 | a\\|x | 0.911 | 98.8 | 25.0 | 0.0 | 1.2 | 400 |\n"
        "| 0.25 | c_d | 0.922 | 98.8 | 25.0 | 0.0 | 1.2 | 400 |\n"
        "| 0.50 | b | 1.200 | 98.8 | 25.0 | 0.0 | 1.2 | 400 |\n"
    )


def test_latex_table() -> None:
    text = latex(layout([*THREE, summary("50% & more", None, 1.0)]).for_reading(), "50% of σ", "tab:a_b")
    assert r"\begin{tabular}{rlrrrrrr}" in text
    assert r"0.25 & a\textbar{}x & 0.911 & 98.8 & 25.0 & 0.0 & 1.2 & 400 \\" in text
    assert r" & c\_d & 0.922 & 98.8 & 25.0 & 0.0 & 1.2 & 400 \\" in text, "sigma once per group"
    assert r"\caption{50\% of $\sigma$}" in text
    assert r"\label{tab:a_b}" in text
    assert r"-- & 50\% \& more & 1.000 &" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert [len(re.findall(r"(?<!\\)&", line)) for line in body] == [7] * 5
    rules = [line for line in text.splitlines() if line in (r"\toprule", r"\midrule", r"\bottomrule")]
    assert rules == [r"\toprule", *[r"\midrule"] * 3, r"\bottomrule"], "one rule below the header, one between sigmas"
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")


def test_only_a_significant_lead_is_marked(make_run: MakeRun, tmp_path: Path) -> None:
    """a has 29 of 30 images at 0.5 and b 1, which is significant; at radius 0 they have 30 and 29, which is not."""
    a = [image(i, 1, 1, 0.7 if i else 0.1) for i in range(30)]
    b = [image(i, 1, 1 if i else 2, 0.7 if i == 1 else 0.2) for i in range(30)]
    runs = [make_run("a", a), make_run("b", b), make_run("lone", a, sigma=1.0)]
    write_report(runs, tmp_path / "out", ["md", "tex"], radii=[0.0, 0.5, 1.0, 1.5])
    text = (tmp_path / "out/report.md").read_text()
    assert "| 0.50 | a | Gaussian | **0.680** | 100.0 | **96.7** | 0.0 | – | 0.0 | 30 |" in text
    assert "| 0.50 | b | Gaussian | 0.210 | 96.7 | 3.3 | 0.0 | – | 0.0 | 30 |" in text
    assert "| 1.00 | lone | Gaussian | 0.680 | 100.0 | 96.7 | 0.0 | 0.0 | 0.0 | 30 |" in text, (
        "nothing to be better than"
    )
    assert (
        r"0.50 & a & Gaussian & \textbf{0.680} & 100.0 & \textbf{96.7} & 0.0 & -- \\"
        in (tmp_path / "out/report.tex").read_text()
    )


def test_votes_are_shown_if_runs_differ_in_them() -> None:
    same = [summary("a", 0.5, 1.0, votes=100_100_000), summary("b", 0.5, 1.0, votes=100_100_000)]
    assert "votes" not in markdown_table(same)
    differ = [*same, summary("c", 0.5, 1.0, votes=4321), summary("theirs", 0.5, 1.0, votes=0)]
    text = markdown_table(differ)
    assert [line.split(" | ")[-1].removesuffix(" |") for line in text.splitlines()[2:]] == [
        "100M",
        "100M",
        "4.32k",
        "–",
    ]
    votes = [row["votes"] for row in csv.DictReader(io.StringIO(csv_table(differ)))]
    assert votes == ["100100000", "100100000", "4321", ""]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "–"), (7, "7"), (999, "999"), (1000, "1k"), (999_499, "999k"), (999_999, "1M"), (2_345_678_901, "2.35G")],
)
def test_compact_counts(count: int, expected: str) -> None:
    assert compact(count) == expected


def wilson_of_numbers(shares: list[float], scale: float) -> tuple[float, float]:
    """The means m in [0, 1], times `scale`, that differ from that of `shares` by 1.96 standard errors, whose variance
    is m (1 - m) without the mean of x (1 - x)."""
    mean, within = statistics.fmean(shares), statistics.fmean(x * (1 - x) for x in shares)
    z2 = norm.ppf(0.975) ** 2 / len(shares)
    # (m - mean)^2 = z2 (m (1 - m) - within), as a polynomial in m
    low, high = np.sort(np.roots([1 + z2, -2 * mean - z2, mean**2 + z2 * within]).real)
    return scale * float(low), scale * float(high)


def test_intervals_in_csv_and_markdown(make_run: MakeRun, field_file: Path, tmp_path: Path) -> None:
    write_report([make_run("a"), field_file], tmp_path / "out", ["csv", "md"], radii=[0.0, 0.5])
    first, _ = csv.DictReader((tmp_path / "out" / "report.csv").open(newline=""))
    counted = [0.1, 0.25, 0.0, 0.0, 0.5, 0.5, 0.0, 1.1, 0.0, 0.7499]
    largest = 0.5 * norm.ppf(0.001 ** (1 / 1000))
    low, high = wilson_of_numbers([radius / largest for radius in counted], largest)
    assert float(first["acr_low"]) == pytest.approx(low)
    assert float(first["acr_high"]) == pytest.approx(high)
    for key, right in (("0.00", 6), ("0.50", 4)):
        expected = binomtest(right, 10).proportion_ci(method="wilson")
        assert float(first[f"{key}_low"]) == pytest.approx(100 * expected.low)
        assert float(first[f"{key}_high"]) == pytest.approx(100 * expected.high)
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"| 0.50 | a | {low:.3f}–{high:.3f} | 31.3–83.2 | 16.8–68.7 |" in text
    assert f"(95% interval {low:.3f} to {high:.3f})" in text
    assert "Wilson" in text


def bold(runs: list[Path], out: Path) -> bool:
    """Whether a number of the table is bold in a report of `runs`, all images counted."""
    write_report(runs, out, ["md"], radii=[0.0], same_images=False)
    return "**" in (out / "report.md").read_text().partition("\n\nCertified")[0]


LOW, HIGH = ([(3, 3, radius)] * 9 for radius in (0.1, 0.8))


@pytest.mark.parametrize(
    ("changes", "ranked"),
    [
        ({}, True),
        ({"bound": "one-sided", "noise": "gaussian", "sound": False, "radii": []}, True),
        ({"n": 500}, False),
        ({"alpha": 0.01}, False),
        ({"bound": "two-sided"}, False),
        ({"noise": "laplace"}, False),
        ({"dataset": "cifar10"}, False),
        ({"sigma": 1.0}, False),
        ({"sigma": None}, False),
        ({"alpha": None}, False),
    ],
    ids=str,
)
def test_only_runs_that_are_certified_alike_are_ranked(
    changes: dict[str, Any], ranked: bool, make_run: MakeRun, tmp_path: Path
) -> None:
    better = make_run("better", images(HIGH, n=changes.get("n", 1000)), **changes)
    assert bold([make_run("plain", images(LOW)), better], tmp_path / "out") == ranked


def test_runs_on_different_images_are_not_ranked(make_run: MakeRun, tmp_path: Path) -> None:
    plain, better = make_run("plain", images(LOW)), make_run("better", images(HIGH))
    part = make_run("part", images(HIGH)[::2])
    assert bold([plain, better], tmp_path / "out")
    assert not bold([plain, part], tmp_path / "out")
    assert not bold([plain, better, part], tmp_path / "out")


def test_laplace_and_uniform_noise_are_not_ranked(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a", images(LOW), noise="laplace"), make_run("b", images(HIGH), noise="uniform")]
    assert not bold(runs, tmp_path / "out")
    assert "not ranked: noise differs (laplace and uniform)" in (tmp_path / "out/report.md").read_text()


def test_radii_in_different_norms_are_in_different_groups(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("small", images(LOW)), make_run("large", images(HIGH), noise="laplace")]
    report = write_report(runs, tmp_path / "out", ["md", "csv", "html"], radii=[0.0])
    assert [summary.name for summary in report.contents.summaries] == ["small", "large (L1)"]
    titles = [axes.get_title() for axes in draw_curves(report.contents.summaries).axes]
    assert titles == ["MNIST, σ = 0.50"] * 2
    assert [axes.get_xlabel() for axes in draw_curves(report.contents.summaries).axes] == ["L2 radius", "L1 radius"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('"title":"MNIST, \\u03c3 = 0.50"') == 2
    assert all(f'"norm":"{norm}"' in page for norm in ("L1", "L2"))


def test_radii_that_a_run_lacks_are_not_shown_as_zero() -> None:
    text = markdown_table([summary("a", 0.5, 1.0), summary("b", 0.5, 2.0, accuracy_at={0.0: 1.0})])
    assert "| 100.0 | – | – |" in text


def test_names_survive_every_format() -> None:
    name = 'x|y_[red]$5,"q"\n#1\\~^{}'
    table = [summary(name, 0.5, 1.0)]
    assert next(csv.DictReader(io.StringIO(csv_table(table))))["name"] == name.replace("\n", " ")
    assert len(markdown_table(table).splitlines()) == 3
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(terminal_table(table))
    assert "[red]" in console.export_text()


def test_escapes() -> None:
    assert escape_latex("λ ≥ 1 → Δ|×") == r"$\lambda$ $\geq$ 1 $\rightarrow$ $\Delta$\textbar{}$\times$"
    assert escape_latex("a_b{c}\\~^ σ") == r"a\_b\{c\}\textbackslash{}\textasciitilde{}\textasciicircum{} $\sigma$"
    assert escape_markdown("a_b _c_ *d*\ne") == r"a_b \_c\_ \*d\* e"


def test_the_difference_from_the_reference_in_latex(make_run: MakeRun, tmp_path: Path) -> None:
    """One column with the paired difference, its standard error and a star."""
    radii = {"plain_a": [0.1, 0.3, 0.5, 0.2, 0.4, 0.6, 0.1, 0.9], "better": [0.3, 0.6, 0.7, 0.5, 0.6, 0.9, 0.4, 1.1]}
    radii["like"] = [0.2, 0.2, 0.6, 0.1, 0.4, 0.5, 0.0, 1.0]
    runs = [make_run(name, [image(i, 1, 1, r) for i, r in enumerate(values)]) for name, values in radii.items()]
    asked = LatexTable(["name", "acr", "acr_minus_reference"])
    write_report(runs, tmp_path / "out", ["tex", "csv"], latex=asked)
    text = (tmp_path / "out/report.tex").read_text()
    assert r"$\sigma$ & run & ACR & ACR $-$ plain\_a \\" in text
    assert r"\begin{tabular}{rlrr}" in text
    assert "0.50 & plain\\_a & 0.388 & --" in text
    for name, star in (("better", "*"), ("like", "")):
        differences = np.array(radii[name]) - np.array(radii["plain_a"])
        error = differences.std(ddof=1) / 8**0.5
        sign = "+" if differences.mean() > 0 else "-"
        assert f"& ${sign}{abs(differences.mean()):.3f}$ ({error:.3f}){star} \\\\" in text
        assert (abs(differences.mean()) > 2 * error) == bool(star)
    assert "a star marks differences of more than two standard errors" in text
    rows = list(csv.DictReader((tmp_path / "out/report.csv").open(newline="")))
    assert rows[1]["acr_minus_reference"] == "0.25", "the CSV file has the number only"

    other = make_run("other_sigma", sigma=0.25), make_run("better_there", sigma=0.25)
    write_report([*runs, *other], tmp_path / "two", ["tex"], latex=asked)
    assert r"& ACR $-$ reference \\" in (tmp_path / "two/report.tex").read_text()
    write_report(runs[:1], tmp_path / "one", ["tex"], latex=asked)
    assert "0.388 & --" in (tmp_path / "one/report.tex").read_text()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs a TeX")
def test_latex_compiles(tmp_path: Path) -> None:
    odd = summary("50% & #1 {x}_y ~^\\ $5 <λ> ≥ Ünï → a|b ± 2 × η", None, 1.0)
    text = latex(
        layout([*THREE, odd]).for_reading(), "α, β, γ, δ, ε, ζ, θ, κ, μ, ν, ξ, π, ρ, σ, τ, φ, χ, ψ, ω, Φ · ∞ −", "tab:a"
    )
    start, end = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}", r"\end{document}"
    (tmp_path / "a.tex").write_text(f"{start}\n{text}\n{end}\n", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    log = (tmp_path / "a.log").read_text(errors="replace")
    assert "Missing character" not in log
    assert "Overfull" not in log, "a wide table is scaled to the width of the text"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([], 2), ([0.0, 0.5], 2), ([0.125], 3), ([2 / 255], 6), ([1.0, 1.00001], 5), ([1e-12, 2e-12], 10)],
)
def test_decimals_needed(numbers: list[float], expected: int) -> None:
    assert decimals_needed(numbers) == expected


def test_csv_of_a_report_against_the_certificates(make_run: MakeRun, field_file: Path, tmp_path: Path) -> None:
    many = [image(i, i % 3, i % 2, (i * 37 % 100) / 90) for i in range(97)]
    runs = [make_run("late", many, sigma=1.0), make_run("early", objective=None), field_file]
    report = write_report(runs, tmp_path / "out", formats=["csv"], radii=[1.0, 0.0, 0.5])
    assert report.written == [tmp_path / "out" / "report.csv"]
    assert [s.name for s in report.contents.summaries] == ["late", "early", "noise_0.25"]
    rows = list(csv.DictReader((tmp_path / "out" / "report.csv").open(newline="")))
    assert [row["name"] for row in rows] == ["early", "late", "noise_0.25"], "by sigma, the unknown last"
    assert [row["sigma"] for row in rows] == ["0.5", "1", ""]
    assert [row["method"] for row in rows] == ["", "gaussian", ""]
    sources = [runs[1] / "certificates/test.tsv", runs[0] / "certificates/test.tsv", field_file]
    for row, source in zip(rows, sources, strict=True):
        cells = [line.split("\t") for line in source.read_text().splitlines()[1:]]
        right = [float(c[3]) for c in cells if c[1] == c[2]]
        assert int(row["images"]) == len(cells)
        assert float(row["acr"]) == pytest.approx(sum(right) / len(cells), rel=1e-9)
        assert float(row["0.00"]) == pytest.approx(100 * len(right) / len(cells), rel=1e-9)
        for radius in ("0.50", "1.00"):
            expected = 100 * sum(r >= float(radius) for r in right) / len(cells)
            assert float(row[radius]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.usefixtures("no_pictures")
def test_markdown_report(make_run: MakeRun, field_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    report = write_report([make_run("a"), field_file], out, title="My | title")
    written = ["report.md", "report.csv", "report.tex", "curves.png", "distribution.png"]
    assert [path.name for path in report.written] == written
    assert sorted(path.name for path in out.glob("[!.]*")) == sorted(path.name for path in report.written)
    text = (out / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# My \\| title\n")
    table = markdown(layout(report.contents.summaries, comparisons=report.contents.comparisons))
    assert table in text
    assert "](curves.png)" in text
    assert "](distribution.png)" in text
    assert "training.png" not in text, "these runs have no metrics"
    (line,) = [line for line in text.splitlines() if line.startswith("- **a**")]
    for part in ("10 images", "n = 1,000", "n0 = 10", "alpha = 0.001", "mnist", "fp32", "10,100 votes"):
        assert part in line
    note, line = [line for line in text.splitlines() if line.startswith("- **noise_0.25**")]
    assert "compared with no run of known σ" in note
    assert "5 images" in line
    assert "votes not recorded" in line


def test_default_columns_reach_as_far_as_the_certificates(make_run: MakeRun, tmp_path: Path) -> None:
    report = write_report([make_run("a")], tmp_path / "out", formats=["md", "csv", "md"])
    assert list(report.contents.summaries[0].accuracy_at) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [path.name for path in report.written] == ["report.md", "report.csv"]


@pytest.mark.parametrize(
    ("pictures", "shown"),
    [(["curves.svg", "training.pdf"], ["curves.svg"]), (["curves.svg", "curves.png"], ["curves.png"]), ([], [])],
)
def test_the_markdown_page_shows_each_figure_once(pictures: list[str], shown: list[str]) -> None:
    text = markdown_page(Contents("title", [summary("a", 0.5, 1.0)], pictures=dict.fromkeys(pictures, b"")))
    assert re.findall(r"\]\((.*?)\)", text) == shown


def test_wrong_requests_write_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    run, out = make_run("a"), tmp_path / "out"
    with pytest.raises(RequestError, match=r"md, csv, tex, html, png, pdf, svg, got 'docx'"):
        write_report([run], out, formats=["md", "docx"])
    with pytest.raises(RequestError, match="got none"):
        write_report([run], out, formats=[])
    for radii in ([-1.0], [float("nan")], [], [1e308], [float("inf")]):
        with pytest.raises(RequestError, match="expected radii from 0 to 1,000,000"):
            write_report([run], out, radii=radii)
    with pytest.raises(RequestError, match="expected radii that differ in 10 decimals"):
        write_report([run], out, radii=[1e-300, 2e-300])
    with pytest.raises(RequestError, match="at least one certified image"):
        write_report([make_run("empty", [])], out)
    assert not out.exists()


@pytest.mark.parametrize("content", ["", "no table at all\n", "idx\tlabel\n1\t2\n", "\x00\x01\x02"])
def test_a_file_that_holds_no_certificates(content: str, make_run: MakeRun, tmp_path: Path) -> None:
    path = tmp_path / "other.tsv"
    path.write_text(content)
    with pytest.raises(RequestError, match=r"other\.tsv: not a certificates file"):
        write_report([make_run("a"), path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_out_that_is_a_file(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(RequestError, match="expected a folder to write to"):
        write_report([make_run("a")], tmp_path / "out", formats=["md"])
    assert (tmp_path / "out").read_text() == "mine"


def test_a_report_replaces_the_one_before(make_run: MakeRun, tmp_path: Path) -> None:
    write_report([make_run("a")], tmp_path / "out", formats=["csv"])
    write_report([make_run("b", images()[:3])], tmp_path / "out", formats=["csv"])
    (row,) = csv.DictReader((tmp_path / "out" / "report.csv").open(newline=""))
    assert (row["name"], row["images"]) == ("b", "3")
    assert len(read_certificates(tmp_path / "b/certificates/test.tsv").rows) == 3


def test_a_narrow_terminal_keeps_names_and_acr() -> None:
    """Radii and side columns go first; what remains is never cut."""
    radii = {r / 4: 0.5 for r in range(12)}
    rows = [summary(f"a-rather-long-name-{i}", 0.5, 1.25, "consistency", accuracy_at=radii) for i in range(2)]
    for width in (60, 80, 120, 200):
        out = io.StringIO()
        Console(file=out, width=width).print(terminal_table(rows, width))
        assert "a-rather-long-name-1" in out.getvalue()
        assert "1.250" in out.getvalue()
        assert "…" not in out.getvalue()
    assert "2.75" in out.getvalue()


@pytest.mark.parametrize("width", [40, 80])
def test_a_name_wider_than_the_terminal_hides_no_number(width: int) -> None:
    """The name takes several lines instead."""
    name = "long-" * 30 + "name"
    shown = io.StringIO()
    rows = [summary(name, 0.5, 1.25, "consistency", accuracy_at={0.0: 0.75, 0.5: 0.5})]
    Console(file=shown, width=width).print(terminal_table(rows, width))
    assert {"0.50", "1.250", "75.0"} <= set(shown.getvalue().split())
    assert "".join(line.split("│")[2].strip() for line in shown.getvalue().splitlines() if line[0] == "│") == name


def test_a_narrow_terminal_drops_votes_before_radii() -> None:
    rows = [summary(f"run{i}", 0.5, 1.25, "consistency", votes=10**i) for i in range(2)]
    wide, narrow = (
        [column.header.plain for column in terminal_table(rows, width).columns]  # type: ignore[union-attr]
        for width in (120, 64)
    )
    assert wide == ["σ", "run", "method", "ACR", "0.00", "0.50", "1.00", "abstain", "images", "votes in all"]
    assert narrow == ["σ", "run", "ACR", "0.00", "0.50", "1.00", "abstain", "images"]


def test_a_narrow_terminal_drops_hyperparameters_before_radii() -> None:
    settings = {f"objective.a-long-name-{i}": i for i in range(3)}
    rows = [summary(f"run{i}", 0.5, 1.25, "consistency", hyperparameters=settings) for i in range(2)]
    titles = [column.header.plain for column in terminal_table(rows, 80).columns]  # type: ignore[union-attr]
    assert titles == ["σ", "run", "ACR", "0.00", "0.50", "1.00"]


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        (["objective.weight", "epochs", "ema", "schedule"], ["λ", "epochs", "ema", "schedule"], []),
        (
            ["objective.weight", "epochs", "ema", "momentum", "batch_size"],
            ["λ"],
            ["epochs", "ema", "momentum", "batch size"],
        ),
    ],
)
def test_many_settings_of_training_do_not_push_the_results_out_of_sight(
    settings: list[str], before: list[str], after: list[str]
) -> None:
    rows = [summary(f"run{i}", 0.5, 1.25, "consistency", hyperparameters=dict.fromkeys(settings, i)) for i in range(2)]
    titles = [column.title for column in layout(rows).for_reading().columns]
    assert titles[3 : 3 + len(before) + 1] == [*before, "ACR"]
    assert titles[titles.index("images") + 1 :] == after
