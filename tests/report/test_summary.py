"""The numbers of a report against loops over the rows and numbers worked out by hand."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest, norm

import smoothcert.report
from smoothcert.certification.certificates import read_certificates
from smoothcert.certification.columns import ParsedRows, columns_of
from smoothcert.errors import RequestError, WorkError
from smoothcert.noise import NOISES, Laplace
from smoothcert.report.protocol import ceiling_of
from smoothcert.report.summary import (
    default_radii,
    summarize,
    wilson_interval,
)
from smoothcert.smoothing.certificate import ABSTAIN

from .conftest import SETTINGS, MakeRun, as_file, image, images, our_file


def test_numbers_of_a_small_file() -> None:
    rows = images()
    assert columns_of(rows).acr == pytest.approx((0.1 + 0.25 + 0.5 + 0.5 + 1.1 + 0.7499) / 10, abs=1e-15)
    assert [columns_of(rows).certified_accuracy(r) for r in (0, 0.1, 0.25, 0.5, 0.75, 1.1)] == [
        0.6,
        0.6,
        0.5,
        0.4,
        0.1,
        0.1,
    ]
    assert summarize(as_file(rows), "a", ()).abstention == 0.2


def test_rows_of_runs_are_read_at_once_and_too_large_ones_refused(make_run: MakeRun) -> None:
    """As those of certify: the other tests report on runs whose round radii are below what the votes show."""
    path = make_run("a") / "certificates/test.tsv"
    assert isinstance(read_certificates(path).rows, ParsedRows)
    path.write_text(path.read_text().replace("\t1.1\t", "\t1.3\t"))
    with pytest.raises(WorkError, match=r"the radius 1\.3 exceeds 1\.2"):
        read_certificates(path)


def test_radius_zero_counts_every_right_row(field_file: Path) -> None:
    rows = read_certificates(field_file).rows
    assert len(rows) == 5, "the last line has no newline and still is a row"
    assert columns_of(rows).certified_accuracy(0.0) == 3 / 5
    assert columns_of(rows).certified_accuracy(0.001) == 2 / 5
    assert columns_of(rows).acr == pytest.approx((0.951 + 0.00123) / 5)


def test_ties_count_as_in_the_analysis_of_the_field(tmp_path: Path) -> None:
    """The field's tools print three digits and count `correct and radius >= r`, so that ties are common."""
    cells = [
        (3, 3, "0.25"),
        (3, 3, "0.250"),
        (3, 3, "0.249"),
        (3, 3, "0.29"),
        (3, 1, "0.5"),
        (3, 3, "0.0"),
        (3, -1, "0.0"),
    ]
    rows = [
        f"{i}\t{label}\t{predict}\t{radius}\t{int(label == predict)}\t1.0"
        for i, (label, predict, radius) in enumerate(cells)
    ]
    path = tmp_path / "theirs.tsv"
    path.write_text("\n".join(["idx\tlabel\tpredict\tradius\tcorrect\ttime", *rows]))
    file = read_certificates(path)
    counted = [columns_of(file.rows).certified_accuracy(r) * 7 for r in (0.0, 0.249, 0.25, 0.29, 0.291, 0.5)]
    assert counted == pytest.approx([5, 4, 3, 1, 0, 0])
    assert summarize(file, "theirs", [0.25]).accuracy_at == {0.25: pytest.approx(3 / 7)}


def test_a_label_of_minus_one_is_not_a_right_abstention() -> None:
    rows = [image(0, ABSTAIN, ABSTAIN, 0.0), image(1, 1, 1, 0.5)]
    assert columns_of(rows).certified_accuracy(0) == 0.5


def test_summary_of_a_file_with_settings() -> None:
    summary = summarize(as_file(images(), **SETTINGS), "run", [0.0])
    assert (summary.name, summary.sigma, summary.images, summary.n, summary.n0) == ("run", 0.5, 10, 1000, 10)
    assert (summary.alpha, summary.dataset, summary.method, summary.precision) == (0.001, "mnist", "gaussian", "fp32")
    assert summary.votes == 10 * 1010
    assert summary.ceiling == pytest.approx(0.5 * 2.463, abs=1e-3)


def test_summary_of_a_file_of_another_tool(field_file: Path) -> None:
    summary = summarize(read_certificates(field_file), "theirs", [0.0, 0.5])
    unknown = (summary.sigma, summary.n, summary.n0, summary.alpha, summary.dataset, summary.method, summary.ceiling)
    assert unknown == (None,) * 7
    assert summary.votes == 0
    assert summary.abstention == 1 / 5
    assert summary.accuracy_at == {0.0: 3 / 5, 0.5: 1 / 5}


@pytest.mark.parametrize("other", [200, 0])
def test_mixed_n_is_unknown_and_has_no_ceiling(other: int) -> None:
    """A label-aware rule draws no votes for some images."""
    rows = [image(0, 1, 1, 0.1, n=100), image(1, 1, 1 if other else ABSTAIN, 0.1 if other else 0.0, n=other)]
    summary = summarize(as_file(rows, **SETTINGS), "x", [])
    assert summary.n is None
    assert summary.ceiling is None
    assert summary.votes == 100 + other + 20


def test_votes_that_a_rule_saves() -> None:
    """3 x (10 + 1,000) votes against 110 + 110 + 1,010."""
    rows = [image(0, 1, 1, 0.25, n=100), image(1, 2, 2, 0.25, n=100), image(2, 1, 1, 0.25)]
    remarks = summarize(as_file(rows, **SETTINGS, radii=[0.25]), "until", []).remarks
    assert remarks == ("sampled until radius 0.25 was decided", "2.5 times fewer votes than n for each image")


def test_the_largest_radius_of_each_noise() -> None:
    """Closed forms at p = alpha^(1/n); radii beyond it are not reached, so tables have a dash there and not 0."""
    p = 0.001 ** (1 / 1000)
    expected = {
        "gaussian": 0.5 * norm.ppf(p),
        "laplace": -0.5 / math.sqrt(2) * math.log(2 * (1 - p)),
        "uniform": math.sqrt(3) * (p - 0.5),
    }
    for noise, ceiling in expected.items():
        summary = summarize(as_file(images(), **SETTINGS, noise=noise), "x", [])
        assert summary.ceiling == pytest.approx(ceiling, rel=1e-7)
        assert [summary.reaches(factor * ceiling) for factor in (0.999, 1.001)] == [True, False]


def test_the_norm_is_that_of_the_noise_also_of_a_new_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOISES, "new", Laplace)
    for name, kind in NOISES.items():
        assert summarize(as_file(images(), **SETTINGS, noise=name), "x", []).norm == kind.norm


def test_a_torn_row_is_reported() -> None:
    whole = as_file(images(), **SETTINGS)
    assert not any("left out" in remark for remark in summarize(whole, "x", []).remarks)
    remarks = summarize(replace(whole, torn=True), "x", []).remarks
    assert "a last row, not written to its end, is left out" in remarks


def test_one_image_has_no_standard_error() -> None:
    assert summarize(as_file([image(0, 1, 1, 0.5)]), "x", []).acr_standard_error is None


@pytest.mark.parametrize(("right", "count"), [(0, 10), (10, 10), (3, 7), (988, 1000), (1, 1)])
def test_wilson_interval(right: int, count: int) -> None:
    expected = binomtest(right, count).proportion_ci(confidence_level=0.95, method="wilson")
    assert wilson_interval(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_acr_interval_is_never_negative() -> None:
    rows = [image(0, 1, 1, 0.5), *(image(i, 1, 2, 0.5) for i in range(1, 9))]
    interval = summarize(as_file(rows), "x", []).interval()
    assert interval is not None
    assert 0 < interval[0] < 0.5 / 9 < interval[1], "1.96 standard errors below the mean would be -0.05"
    assert summarize(as_file(rows[:1]), "x", []).interval() is None


def test_the_acr_interval_holds_if_most_radii_are_the_largest() -> None:
    """Of 20 images, 94% at the ceiling: 1.96 standard errors hold in 63% of all cases, and are 0 if all are there."""
    random = np.random.default_rng(0)
    ceiling = summarize(our_file([image(0, 1, 1, 0.5)]), "x", []).ceiling
    assert ceiling is not None
    held, normal = [], []
    for _ in range(400):
        radii = np.where(random.random(20) < 0.94, ceiling, random.random(20) * ceiling)
        run = summarize(our_file([image(i, 1, 1, radius) for i, radius in enumerate(radii.tolist())]), "x", [])
        low, high = run.interval() or (math.nan, math.nan)
        held.append(low <= 0.97 * ceiling <= high)
        normal.append(abs(radii.mean() - 0.97 * ceiling) <= 1.96 * radii.std(ddof=1) / math.sqrt(20))
    assert np.mean(held) > 0.87 > 0.7 > np.mean(normal)


@pytest.mark.parametrize(("n", "expected"), [(10**3, 2.463), (10**4, 3.199), (10**5, 3.812), (10**6, 4.347)])
def test_the_largest_radius_of_n_votes(n: int, expected: float) -> None:
    assert ceiling_of(as_file([]), 2.0, n, 0.001) == pytest.approx(2 * expected, abs=2e-3)
    assert ceiling_of(as_file([]), 1.0, n, 0.001) == pytest.approx(norm.ppf(0.001 ** (1 / n)), rel=1e-7)


def test_too_few_votes_certify_nothing() -> None:
    assert ceiling_of(as_file([]), 1.0, 5, 0.001) == 0.0


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        (0.0, [0.0, 0.01]),
        (0.9, [0.0, 0.25, 0.5, 0.75]),
        (1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (2.99, [i / 4 for i in range(12)]),
        (3.0, [i / 2 for i in range(7)]),
        (5.99, [i / 2 for i in range(12)]),
        (6.0, [float(i) for i in range(7)]),
        (0.239, [0.0, 0.05, 0.1, 0.15, 0.2]),
        (0.1, [0.0, 0.02, 0.04, 0.06, 0.08, 0.1]),
        (0.035, [0.0, 0.01, 0.02, 0.03]),
    ],
)
def test_default_radii(reach: float, expected: list[float]) -> None:
    wrong = image(1, 1, 2, 50.0)
    files = [as_file([image(0, 1, 1, 0.01)]), as_file([image(0, 1, 1, reach), wrong])]
    assert default_radii(files) == expected
    assert default_radii([as_file([wrong])]) == [0.0]


def test_radii_that_were_asked_for_are_columns() -> None:
    """A file of --radii 0.1,0.4 answers these two questions; whole radii of another file need the usual columns."""
    decided = replace(as_file([image(0, 1, 1, 0.4)]), settings={"radii": [0.1, 0.4]})
    assert default_radii([decided]) == [0.0, 0.1, 0.4]
    assert default_radii([decided, as_file([image(0, 1, 1, 0.6)])]) == [0.0, 0.1, 0.25, 0.4, 0.5]


def test_no_rows_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one certified image"):
        _ = columns_of([]).acr
    with pytest.raises(RequestError, match=r"some\.tsv.*smoothcert certify"):
        summarize(as_file([]), "x", [0.0])


def test_a_report_needs_no_torch_and_one_without_figures_no_matplotlib(tmp_path: Path) -> None:
    """A report is written, and all modules but the one that reads test images are imported, where torch is absent."""
    modules = [path.stem for path in Path(smoothcert.report.__file__).parent.glob("[a-z]*.py")]
    script = f"""
import sys
from importlib import import_module
from pathlib import Path
sys.modules["torch"] = None
from smoothcert.report import write_report
write_report([Path(sys.argv[1])], Path(sys.argv[2]), ("md", "csv", "tex", "html"))
assert "matplotlib" not in sys.modules
for name in {sorted(modules)}:
    import_module("smoothcert.report." + name)
from smoothcert.report.thumbnails import pictures
assert sorted(pictures("mnist-sample", "test", [0, 7]).files) == [0, 7]
"""
    runs = sorted((Path(__file__).parents[2] / "results/float32").glob("*/certificates"))[0]
    subprocess.run([sys.executable, "-c", script, str(runs), str(tmp_path / "report")], check=True, timeout=120)
    assert (tmp_path / "report/report.html").exists()


@pytest.mark.parametrize(
    ("objective", "certified", "method"),
    [
        ("{name: consistency, weight: 5}", "Sequential", "consistency"),
        ("consistency", "Sequential", "consistency"),
        ("{name: 'losses.py:Mine 1.5'}", "Sequential", "Mine 1.5"),
        ("{weight: 5}", "Sequential", "Sequential"),
        ("{name: consistency}", "smoothmix", "smoothmix"),
    ],
)
def test_the_method_of_a_network_of_an_own_loop_is_that_of_its_recipe(
    make_run: MakeRun, objective: str, certified: str, method: str
) -> None:
    """Its certificates only have the name of the classifier, which is that of its class."""
    run = make_run("own", model="Sequential", objective=certified)
    (run / "recipe.yaml").write_text(f"objective: {objective}\nseed: 0\n")
    assert summarize(read_certificates(run / "certificates/test.tsv"), "own", ()).method == method
