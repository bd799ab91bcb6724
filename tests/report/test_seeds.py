"""Mean and spread over seeds against numpy, and which runs are put together."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from scipy import stats

from smoothcert.certification.certificates import CertificatesFile, read_certificates
from smoothcert.errors import WorkError
from smoothcert.io.text import escape_markdown
from smoothcert.report import Published, write_report
from smoothcert.report.contents import LatexTable
from smoothcert.report.document import terminal_report
from smoothcert.report.seeds import SeedMean, mean_difference
from smoothcert.report.summary import summarize

from .conftest import MakeRun, as_file, image

RECIPE = {"dataset": "mnist", "sigma": 0.5, "objective": {"name": "gaussian", "num_noise": 1}, "epochs": 90, "seed": 0}


def seeded(make_run: MakeRun, name: str, seed: int, scale: float = 1.0, **changes: Any) -> Path:
    """A run of training seed `seed`: radii scale/20, 2 scale/20, ..., all of them right."""
    settings = {"weights_sha256": name, "seed": hash(name) % 1000, **changes.pop("settings", {})}
    rows = changes.pop("rows", [image(i, 1, 1, scale * (i + 1) / 20) for i in range(20)])
    run = make_run(name, rows, **settings)
    (run / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "seed": seed, **changes}))
    return run


def names(paths: list[Path], out: Path) -> list[list[str]]:
    means = write_report(paths, out, ["csv"], same_images=False).contents.seeds
    return [[summary.name for summary in mean.members] for mean in means]


def test_means_of_an_ablation_have_its_hyper_parameter(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        seeded(
            *(make_run, f"w{weight}-s{seed}", seed),
            objective={"name": "consistency", "weight": weight, "adversary": {}},
            settings={"objective": "consistency"},
        )
        for weight in (1.0, 10.0)
        for seed in (0, 1)
    ]
    write_report(runs, tmp_path / "out", ["md", "csv", "tex"], radii=[0.0])
    rows = list(csv.DictReader((tmp_path / "out/report-seeds.csv").open(newline="")))
    assert [(row["method"], row["objective.weight"], row["seeds"]) for row in rows] == [
        *(("consistency", "1", "2"), ("consistency", "10", "2"))
    ]
    latex = (tmp_path / "out/report.tex").read_text()
    assert "runs & method & $\\lambda$ & seeds & ACR" in latex
    assert "w10.0-s* & Consistency & 10 & 2 &" in latex
    chosen = LatexTable(["name", "acr", "images"], "On MNIST.", "tab:mnist")
    write_report(runs, tmp_path / "chosen", ["tex"], radii=[0.0], latex=chosen)
    latex = (tmp_path / "chosen/report.tex").read_text()
    assert r"$\sigma$ & runs & ACR & images & seeds \\" in latex, "--columns is for both tables"
    assert re.findall(r"\\label{(.*)}", latex) == ["tab:mnist", "tab:mnist-seeds"]
    captions = re.findall(r"\\caption{(.*)}", latex)
    assert captions[0] == "On MNIST."
    assert captions[1].startswith("On MNIST. Mean")


def test_mean_and_sd_of_three_seeds(make_run: MakeRun, tmp_path: Path) -> None:
    scales = {"gaussian-seed0": 1.0, "gaussian-seed1": 1.2, "gaussian-seed2": 0.8}
    runs = [seeded(make_run, name, i, scale) for i, (name, scale) in enumerate(scales.items())]
    out = tmp_path / "out"
    report = write_report(runs, out, ["md", "csv", "tex"], radii=[0.0, 0.5])
    assert [p.name for p in report.written] == ["report.md", "report.csv", "report-seeds.csv", "report.tex"]
    radii = [scale * np.arange(1, 21) / 20 for scale in scales.values()]
    acr = [np.mean(r) for r in radii]
    right = [100 * np.mean(r >= 0.5) for r in radii]
    (row,) = csv.DictReader((out / "report-seeds.csv").open(newline=""))
    assert (row["name"], row["seeds"], row["method"], row["images"]) == ("gaussian-seed*", "3", "gaussian", "20")
    assert float(row["acr"]) == pytest.approx(np.mean(acr))
    assert float(row["acr_sd"]) == pytest.approx(np.std(acr, ddof=1))
    assert float(row["0.50"]) == pytest.approx(np.mean(right))
    assert float(row["0.50_sd"]) == pytest.approx(np.std(right, ddof=1))
    assert (row["0.00"], row["0.00_sd"]) == ("100", "0")
    cells = f"{np.mean(acr):.4f} ± {np.std(acr, ddof=1):.4f}", f"{np.mean(right):.1f} ± {np.std(right, ddof=1):.1f}"
    text = (out / "report.md").read_text()
    assert f"| 0.50 | gaussian-seed\\* | Gaussian | 3 | {cells[0]} | 100.0 ± 0.0 | {cells[1]} | 20 |" in text
    assert all(f"| {name} |" in text for name in scales), "the runs keep their rows"
    latex = (out / "report.tex").read_text()
    assert latex.count(r"\begin{tabular}") == 2
    assert cells[0].replace("±", r"$\pm$") in latex
    console = Console(width=80, record=True)
    for shown in terminal_report(report.contents, 80):
        console.print(shown)
    assert cells[0] in console.export_text()


def test_the_best_mean_is_marked(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [seeded(make_run, f"a{seed}", seed, 0.5 + 0.1 * seed) for seed in range(2)]
    runs += [seeded(make_run, f"b{seed}", seed, 1.0 + 0.1 * seed, epochs=3) for seed in range(2)]
    third = [seeded(make_run, f"c{seed}", seed, 0.95 + 0.1 * seed, epochs=4) for seed in range(2)]

    def marked(runs: list[Path]) -> list[int]:
        write_report(runs, tmp_path / "out", ["md"], radii=[0.0])
        lines = (tmp_path / "out" / "report.md").read_text().split("Mean ± sd")[1].partition("## ")[0].splitlines()
        return [line.count("**") for line in lines if line.startswith("| 0.50")]

    assert marked(runs) == [0, 2], "ACR by 0.26 with a standard error of 0.04; at radius 0 both have 100%"
    assert marked([*runs, *third]) == [0, 0, 0], "the third mean is 0.03 below the second"


@pytest.mark.parametrize(("seeds", "other_seeds"), [(2, 2), (2, 5), (3, 3), (5, 4)])
def test_means_differ_by_a_t_test(seeds: int, other_seeds: int) -> None:
    """Compared with scipy's test, for differences on both sides of its limit; with few seeds next to many, stricter."""
    most = 2 * (min(seeds, other_seeds) - 1)
    random, answers = np.random.default_rng(seeds), []
    for shift in np.linspace(-8, 8, 60):
        values, others = random.normal(shift, 1, seeds).tolist(), random.normal(0, 2, other_seeds).tolist()
        test = stats.ttest_ind(values, others, equal_var=False)
        difference = mean_difference(values, others)
        assert difference.value == pytest.approx(np.mean(values) - np.mean(others))
        assert difference.value / difference.standard_error == pytest.approx(test.statistic)
        freedom = min(test.df, most)
        assert difference.degrees_of_freedom == pytest.approx(freedom)
        assert difference.significant == (2 * stats.t.sf(abs(test.statistic), freedom) < 0.05)
        answers.append((difference.significant, difference.value > 0))
    assert len(set(answers)) == 4
    assert not mean_difference([1.0, 1.0], [0.9, 0.9]).significant, "a t-test needs some spread"
    assert not mean_difference([1.0, 1.0], [1.0, 1.0]).significant


@pytest.mark.parametrize(("seeds", "other_seeds"), [(2, 2), (2, 5), (2, 10), (3, 10)])
def test_equal_methods_with_unlike_numbers_of_seeds_seldom_differ(seeds: int, other_seeds: int) -> None:
    """By Welch's test alone, 10% of them would for two and ten seeds."""
    random = np.random.default_rng(0)
    pairs = [(random.normal(size=seeds).tolist(), random.normal(size=other_seeds).tolist()) for _ in range(4_000)]
    assert np.mean([mean_difference(*pair).significant for pair in pairs]) < 0.05


def test_equal_methods_whose_seeds_have_whole_numbers_seldom_differ() -> None:
    """Accuracies of 100 images: two seeds of both methods often have no spread at all."""
    random = np.random.default_rng(0)
    counts = np.round(random.normal(90.3, 0.7, size=(4_000, 2, 2))) / 100
    assert np.mean([mean_difference(*pair.tolist()).significant for pair in counts]) < 0.05


def test_how_often_equal_methods_with_two_seeds_differ() -> None:
    """The shares in docs/commands.md, and the limits in standard errors."""
    random = np.random.default_rng(0)
    test = stats.ttest_ind(random.normal(size=(2, 100_000)), random.normal(size=(2, 100_000)), equal_var=False)
    assert np.mean(np.abs(test.statistic) > 2) == pytest.approx(0.18, abs=0.005)
    assert np.mean(test.pvalue < 0.05) == pytest.approx(0.02, abs=0.005)
    # Between the least degrees of freedom, those of one group, and those of both.
    limits = [stats.t.ppf(0.975, freedom) for freedom in (2, 1, 4, 2)]
    assert limits == pytest.approx([4.3, 12.7, 2.8, 4.3], abs=0.05)


def table_over_seeds(out: Path) -> str:
    return (out / "report.md").read_text().split("Mean ± sd")[1].partition("## ")[0]


def test_the_difference_of_means_from_the_reference(make_run: MakeRun, tmp_path: Path) -> None:
    """Radii are scale/20, 2 scale/20, ..., scale: the ACR is 21/40 of the scale."""
    scales = {"gauss": [0.7, 0.714], "near": [0.73, 0.7], "far": [1.12, 1.15, 1.13]}
    runs = [
        seeded(make_run, f"{name}-s{seed}", seed, scale, epochs=len(name))
        for name, of_name in scales.items()
        for seed, scale in enumerate(of_name)
    ]
    out = tmp_path / "out"
    contents = write_report(runs, out, ["md", "csv", "tex", "html"], radii=[0.0]).contents
    acrs = {name: 21 / 40 * np.array(of_name) for name, of_name in scales.items()}
    rows = {row["name"]: row for row in csv.DictReader((out / "report-seeds.csv").open(newline=""))}
    table = table_over_seeds(out)
    latex = (out / "report.tex").read_text()
    assert r"| ACR | ACR − gauss-s\* | 0.00 |" in table
    assert "ACR & ACR $-$ gauss-s* & 0.00" in latex
    for name, star in (("near", ""), ("far", "*")):
        row, test = rows[f"{name}-s*"], stats.ttest_ind(acrs[name], acrs["gauss"], equal_var=False)
        difference = acrs[name].mean() - acrs["gauss"].mean()
        assert row["reference"] == "gauss-s*"
        assert float(row["acr_minus_reference"]) == pytest.approx(difference)
        assert float(row["acr_minus_reference_standard_error"]) == pytest.approx(difference / test.statistic)
        assert float(row["acr_minus_reference_degrees_of_freedom"]) == pytest.approx(min(test.df, 2))
        assert (test.pvalue < 0.05) == bool(star)
        text = f"+{difference:.4f} ({difference / test.statistic:.4f}){star}"
        assert f"| {escape_markdown(text)} |" in table
        assert f"$+{difference:.4f}$ ({difference / test.statistic:.4f}){star} &" in latex
        assert text in (out / "report.html").read_text()
    assert [rows["gauss-s*"][key] for key in rows["gauss-s*"] if "reference" in key] == [""] * 4
    assert "A star marks" in table
    console = Console(width=100, record=True)
    for shown in terminal_report(contents, 100):
        console.print(shown)
    assert "ACR − gauss-s*" in console.export_text()

    write_report(runs, out, ["md"], radii=[0.0], reference="far-s1")
    assert r"| ACR − far-s\* |" in table_over_seeds(out)
    assert f"| −{(acrs['far'].mean() - acrs['gauss'].mean()):.4f} (" in table_over_seeds(out)


def test_a_reference_with_one_seed_has_no_difference_of_means(make_run: MakeRun, tmp_path: Path) -> None:
    lone = seeded(make_run, "gauss", 0)
    runs = [seeded(make_run, f"mine-s{seed}", seed, 1.1 + seed / 10, epochs=3) for seed in range(2)]
    write_report([lone, *runs], tmp_path / "out", ["md", "csv"], radii=[0.0])
    table = table_over_seeds(tmp_path / "out")
    assert "| ACR − gauss |" in table
    assert re.search(r"± [\d.]+ \| – \| 100.0 ± 0.0", table)
    (row,) = csv.DictReader((tmp_path / "out/report-seeds.csv").open(newline=""))
    assert (row["reference"], row["acr_minus_reference"]) == ("gauss", "")

    write_report(runs, tmp_path / "alone", ["md"], radii=[0.0])
    assert "ACR −" not in table_over_seeds(tmp_path / "alone"), "nothing to subtract"
    other = seeded(make_run, "other", 0, settings={"alpha": 0.01})
    write_report([lone, *runs, other], tmp_path / "unranked", ["md"], radii=[0.0])
    assert "ACR −" not in table_over_seeds(tmp_path / "unranked"), "runs that are not ranked have no reference"


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 2},
        {"objective": {"name": "gaussian", "num_noise": 2}},
        {"settings": {"sigma": 1.0}},
        {"settings": {"alpha": 0.01}},
        {"settings": {"bound": "two-sided"}},
        {"settings": {"precision": "bf16"}},
        {"settings": {"label_aware": True}},
        {"settings": {"dataset": "mnist-sample"}},
        {"rows": [image(i, 1, 1, 0.5) for i in range(19)]},
        {"rows": [image(i + 1, 1, 1, 0.5) for i in range(20)]},
    ],
    ids=str,
)
def test_runs_that_differ_by_more_than_the_seed_stay_apart(
    make_run: MakeRun, tmp_path: Path, change: dict[str, Any]
) -> None:
    runs = [seeded(make_run, "a", 0), seeded(make_run, "b", 1), seeded(make_run, "c", 2, **change)]
    assert names(runs, tmp_path / "out") == [["a", "b"]]


def test_settings_of_the_computation_are_not_compared(make_run: MakeRun, tmp_path: Path) -> None:
    elsewhere = {"device": "cuda", "batch_size": 7, "noise_block": 3, "sound": False, "radii": None}
    runs = [seeded(make_run, "a", 0), seeded(make_run, "b", 1, settings=elsewhere, image_size=None)]
    assert names(runs, tmp_path / "out") == [["a", "b"]]


def test_own_networks_of_an_own_loop_with_a_short_recipe_next_to_their_certificates(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """The classes that a network of unknown code gives to test images depend on its weights, so on its seed."""
    runs = []
    for seed in (0, 1):
        run = make_run(f"mine{seed}", [image(0, 1, 1, 0.5)], objective="mine", classes_sha256=f"classes of {seed}")
        (run / "recipe.yaml").write_text(f"objective: {{name: mine, weight: 2}}\nseed: {seed}\n")
        runs.append(run)
    assert names(runs, tmp_path / "out") == [["mine0", "mine1"]]


def test_a_seed_counts_once(make_run: MakeRun, tmp_path: Path) -> None:
    first = seeded(make_run, "a", 0)
    make_run("a", [image(i, 1, 1, 0.9) for i in range(20)], file="again", weights_sha256="a", seed=9)
    assert names([first], tmp_path / "one") == []
    assert names([first, seeded(make_run, "b", 1)], tmp_path / "two") == [["a/again", "b"]]


def test_files_without_a_seed_are_left_out(make_run: MakeRun, field_file: Path, tmp_path: Path) -> None:
    plain = [make_run("a"), make_run("b"), field_file]
    (tmp_path / "b" / "recipe.yaml").write_text("dataset: mnist\nsource: theirs.pth\n")
    assert names(plain, tmp_path / "out") == []


def test_the_words_compare_means_over_seeds_and_not_only_the_best_seed(make_run: MakeRun, tmp_path: Path) -> None:
    """Radii are scale/20 to scale: at 0.5 the scales 1, 1.2 and 0.8 certify 11, 12 and 8 of 20 images."""
    scales = {"a-seed0": 1.0, "a-seed1": 1.2, "a-seed2": 0.8}
    runs = [seeded(make_run, name, i, scale) for i, (name, scale) in enumerate(scales.items())]
    counts = [sum(scale * (i + 1) / 20 >= 0.5 for i in range(20)) for scale in scales.values()]
    (words,) = write_report(runs, tmp_path / "out", ["md"], radii=[0.5]).contents.headlines
    expected = f"a-seed* {np.mean(counts):.1f} ± {np.std(counts, ddof=1):.1f} of 20 images."
    assert f"compare the mean ± sd over seeds: {expected}" in words
    for i, run in enumerate((make_run("b-seed0"), make_run("b-seed1"))):
        (run / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "seed": i, "epochs": 3}))
        runs.append(run)
    (words,) = write_report(runs, tmp_path / "both", ["md"], radii=[0.5], same_images=False).contents.headlines
    assert f"{expected.removesuffix(' images.')}, b-seed* 4.0 ± 0.0 of 10 images." in words
    (alone,) = write_report(runs[:1], tmp_path / "one", ["md"], radii=[0.5]).contents.headlines
    assert "seeds" not in alone


def test_a_table_over_seeds_does_not_outlive_its_report(make_run: MakeRun, tmp_path: Path) -> None:
    runs, out = [seeded(make_run, "a", 0), seeded(make_run, "b", 1)], tmp_path / "out"
    write_report(runs, out, ["csv"])
    assert (out / "report-seeds.csv").exists()
    report = write_report(runs[:1], out, ["csv"])
    assert [path.name for path in out.glob("[!.]*")] == ["report.csv"] == [path.name for path in report.written]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("m-seed0", "m-seed1"), "m-seed*"),
        (("seed0/m-0.5", "seed1/m-0.5"), "seed*/m-0.5"),
        (("m", "m-2"), "m*"),
        (("x1", "x11"), "x1*"),
        (("one", "two"), "*"),
    ],
)
def test_names_with_a_star(given: tuple[str, ...], expected: str) -> None:
    members = [summarize(as_file([image(0, 1, 1, 0.5)]), name, []) for name in given]
    assert SeedMean(tuple(members)).name == expected


@pytest.mark.parametrize("content", ["a: [", "just text\n", "", "\x00"])
def test_a_damaged_recipe_is_named(make_run: MakeRun, tmp_path: Path, content: str) -> None:
    run = make_run("a")
    (run / "recipe.yaml").write_text(content)
    with pytest.raises(
        WorkError, match=r"a/recipe\.yaml: expected the recipe of a run.*restore or remove it"
    ) as caught:
        write_report([run], tmp_path / "out", ["md"])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_published_row_of_all_seeds(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [seeded(make_run, f"a{seed}", seed, 1.0 + 0.2 * seed) for seed in range(2)]
    row = Published("mnist/acr-over-5-seeds", "Gaussian (5 seeds)", 0.5676, {}, ())
    write_report(runs, tmp_path / "out", ["csv", "md"], radii=[0.0], published=lambda file: row)
    (line,) = csv.DictReader((tmp_path / "out" / "report-seeds.csv").open(newline=""))
    mean = np.mean([(1.0 + 0.2 * seed) * 21 / 40 for seed in range(2)])
    assert (line["method"], line["published_row"]) == ("gaussian", "Gaussian (5 seeds)")
    assert float(line["published_acr"]) == 0.5676
    assert float(line["acr_difference"]) == pytest.approx(mean - 0.5676)
    text = (tmp_path / "out" / "report.md").read_text().split("Mean ± sd")[1]
    assert "| a\\* | Gaussian (5 seeds) | 2 |" in text
    assert "| *published* |  |  | *0.5676* |" in text
    assert f"| *difference* |  |  | *+{mean - 0.5676:.4f}* |" in text

    def other(file: CertificatesFile) -> Published | None:
        return row if "a0" in str(file.path) else None

    write_report(runs, tmp_path / "half", ["md"], published=other)
    assert "*published*" not in (tmp_path / "half" / "report.md").read_text().split("Mean ± sd")[1]


def test_unfinished_runs_and_runs_from_given_weights_are_not_averaged_with_others(
    make_run: MakeRun, tmp_path: Path
) -> None:
    runs = [seeded(make_run, f"seed{i}", i) for i in range(4)]
    for run, provenance in zip(runs, ({"epoch": 2}, {"model": {"init": {"file": "a.pt"}}}), strict=False):
        path = run / "certificates" / "test.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "provenance": provenance}))
    assert names(runs, tmp_path / "out") == [["seed2", "seed3"]]
    early = summarize(read_certificates(runs[0] / "certificates" / "test.tsv"), "early", [])
    assert "certified after 2 of its 90 epochs" in early.remarks


def test_means_without_a_common_name_list_their_runs(make_run: MakeRun, tmp_path: Path) -> None:
    """Their names share no letter, so that the star alone would be the name of both means."""
    runs = [
        seeded(*(make_run, name, seed), objective={"name": method}, settings={"objective": method})
        for method, members in (("gaussian", ("anna", "bert")), ("stability", ("dora", "emil")))
        for seed, name in enumerate(members)
    ]
    contents = write_report(runs, tmp_path / "out", ["csv"]).contents
    assert [mean.name for mean in contents.seeds] == ["anna, bert", "dora, emil"]
