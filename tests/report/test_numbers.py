"""The numbers of runs and comparisons against loops over rows, enumeration and numbers worked out by hand."""

import math
import random
import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from smoothcert.certification.certificates import CertifiedImage
from smoothcert.errors import RequestError
from smoothcert.noise import Gaussian
from smoothcert.report import write_report
from smoothcert.report.document import terminal_report
from smoothcert.report.further_tables import constant_sentences, csv_columns, further_tables
from smoothcert.report.headline import headlines
from smoothcert.report.paired import comparisons, difference_of_radii, randomization_test
from smoothcert.report.summary import Summary, implied_l_infinity, summarize
from smoothcert.smoothing.certificate import Certificate, certified_radius

from .conftest import MakeRun, image, our_file, random_rows

RADII = (0.0, 0.25, 0.5, 1.0, 1.5)


def summary_of(rows: list[CertifiedImage], name: str = "run", **changes: object) -> Summary:
    return summarize(our_file(rows, **changes), name, RADII)


def counted(rows: list[CertifiedImage]) -> list[float]:
    return [r.certificate.radius if r.certificate.prediction == r.label else 0.0 for r in rows]


def certified(row: CertifiedImage, radius: float) -> bool:
    return row.certificate.prediction == row.label and row.certificate.radius >= radius


@pytest.mark.parametrize("seed", range(3))
def test_numbers_of_a_run_against_a_loop(seed: int) -> None:
    rows = random_rows(seed, 60)
    shuffled = random.Random(seed).sample(rows, len(rows))
    run = summary_of(shuffled)
    assert run.acr == pytest.approx(statistics.fmean(counted(rows)), abs=1e-14)
    assert run.acr_standard_error == pytest.approx(statistics.stdev(counted(rows)) / math.sqrt(60), rel=1e-12)
    for radius, accuracy in run.accuracy_at.items():
        count = sum(certified(row, radius) for row in rows)
        assert accuracy == count / 60
        expected = stats.binomtest(count, 60).proportion_ci(method="wilson")
        if radius < 1.5:
            assert run.interval(radius) == pytest.approx((100 * expected.low, 100 * expected.high), abs=1e-10)
    assert [run.reaches(radius) for radius in RADII] == [True, True, True, True, False], "0.5 * 2.463"
    assert list(run.classes) == [0, 1, 2]
    for label, outcomes in run.classes.items():
        part = [row for row in rows if row.label == label]
        assert (len(outcomes), outcomes.acr) == (20, pytest.approx(statistics.fmean(counted(part))))
        shares = [sum(certified(row, r) for row in part) / 20 for r in RADII]
        assert [outcomes.accuracy(r) for r in RADII] == pytest.approx(shares)
    assert run.classes[run.worst_class].acr == min(outcomes.acr for outcomes in run.classes.values())
    assert run.never_certified == [], "of each class some images are certified, and some are not"
    assert implied_l_infinity(run) == run.acr / 28, "MNIST has 28 x 28 values"
    cifar10 = replace(run, dataset="cifar10 (not the official files)")
    assert implied_l_infinity(cifar10) == pytest.approx(run.acr / (3 * 32 * 32) ** 0.5)
    in_l1 = summary_of(shuffled, noise="laplace")
    assert implied_l_infinity(in_l1) is None, "the cube inside an L1 ball is smaller by d, not by its root"


def test_tables_of_classes_and_columns_of_csv_against_a_loop() -> None:
    """ACR and accuracy in percent of each class, at the radius of the headline; the worst class; the largest radius."""
    rows = random_rows(0, 60)
    compared = comparisons([summary_of(rows)])
    parts = [[row for row in rows if row.label == label] for label in range(3)]
    acrs = [statistics.fmean(counted(part)) for part in parts]
    shares = [100 * sum(certified(row, 0.5) for row in part) / 20 for part in parts]
    for title, expected in (("ACR of each class", acrs), ("Certified accuracy of each class", shares)):
        table = next(table.layout for table in further_tables(compared) if table.title == title)
        cells = dict(zip([column.key for column in table.columns], table.groups[0][0], strict=True))
        assert [cells[str(label)].value for label in range(3)] == pytest.approx(expected)
    worst = acrs.index(min(acrs))
    at_most = [
        row for row in rows if row.certificate.count == row.certificate.n and row.certificate.prediction == row.label
    ]
    values = {column.key: column.value(compared[0].first) for column in csv_columns(compared)}
    assert (values["worst_class"], values["worst_class_acr"]) == (worst, pytest.approx(acrs[worst]))
    assert values["worst_class_accuracy"] == pytest.approx(100 * sum(certified(r, 0.0) for r in parts[worst]) / 20)
    assert values["largest_radius"] == pytest.approx(0.5 * stats.norm.ppf(0.001 ** (1 / 1000)))
    assert values["at_largest_radius"] == pytest.approx(100 * len(at_most) / 60)


def test_a_class_that_is_never_certified_is_named() -> None:
    rows = [image(i, i % 3, 0, 0.4) for i in range(9)]
    run = summary_of(rows)
    assert run.never_certified == [1, 2]
    assert run.worst_class == 1
    expected_texts = ((3, "Only images of class 0 are certified"), (2, "None of the 4 images of class 1 is certified"))
    for labels, expected in expected_texts:
        few = [image(i, i % labels, 0, 0.4) for i in range(9)]
        (text,) = headlines(comparisons([summary_of(few, "poor")]))
        assert f" {expected} by poor." in text
    many = [summary_of(rows, f"poor{i}") for i in range(6)]
    text = headlines(comparisons(many))[0]
    assert " Only images of class 0 are certified by poor0, poor1, poor2 and 3 more." in text, (
        "said once, not once per run"
    )


@pytest.mark.parametrize("images", [20, 100])
def test_classes_are_seldom_named_if_all_are_alike(images: int) -> None:
    """Ten classes: of 20 images, 84% of the runs have one without a certified image at 60%, and nearly all at 10%."""
    for accuracy, fewest in ((0.1, 0.9), (0.6, 0.01)):
        random = np.random.default_rng(0)
        never, named = [], []
        for _ in range(300):
            labels, certified = random.integers(0, 10, images).tolist(), random.random(images) < accuracy
            rows = [image(i, y, y if certified[i] else y + 1, 0.4) for i, y in enumerate(labels)]
            run = summary_of(rows)
            never.append(bool(run.never_certified))
            named.append(any(word in headlines(comparisons([run]))[0] for word in ("None of", "Only images")))
        assert np.mean(never) >= fewest
        assert np.mean(named) < 0.05


def test_a_class_of_many_images_is_named() -> None:
    """The numbers of ways to choose the certified ones of 3,000 images are too large for floats."""
    rows = [image(i, i % 3, 0 if i % 3 == 2 else i % 3, 0.5) for i in range(3000)]
    assert "None of the 1,000 images of class 2 is certified by run." in headlines(comparisons([summary_of(rows)]))[0]


def test_classes_have_the_names_that_the_files_record() -> None:
    rows = [image(i, i % 3, 0, 0.4) for i in range(60)]
    named = summary_of(rows, "poor", classes=["zero", "one", "two"])
    compared = comparisons([named])
    assert " Only images of class zero are certified by poor." in headlines(compared)[0]
    assert "always answers class zero has" in constant_sentences(compared)[0]
    table = next(t.layout.for_reading() for t in further_tables(compared) if t.title == "ACR of each class")
    assert [column.title for column in table.columns][4:] == ["its ACR", "zero", "one", "two"]
    assert table.groups[0][0][3].text == "one", "of two classes that are never certified the first"
    mixed = further_tables(comparisons([named, summary_of(rows, "other", sigma=0.25)]))
    titles = [column.title for table in mixed for column in table.layout.columns]
    assert "zero" not in titles, "the column of a class is for runs of all data sets"
    assert (
        "all images of class bird, so"
        in summary_of([image(i, 2, 2, 0.4) for i in range(20)], dataset="cifar10").in_words
    )


def test_tables_name_the_data_sets_if_there_are_several() -> None:
    rows, others = random_rows(1, 30), random_rows(2, 30)
    runs = [summary_of(rows, "a"), summary_of(others, "b")]
    more = [summary_of(rows, "c", dataset="cifar10"), summary_of(others, "d", dataset="cifar10")]
    for compared, shown in ((runs, False), ([*runs, *more], True)):
        layouts = [table.layout.for_reading() for table in further_tables(comparisons(compared))]
        assert {"data set" in [column.title for column in layout.columns] for layout in layouts} == {shown}


def test_many_classes_are_counted() -> None:
    """As of ImageNet, with one image per class: that 11 of 40 are not certified says nothing about these classes."""
    compared = comparisons([summary_of([image(i, i, i if i > 11 else 0, (i % 7) / 9) for i in range(40)])])
    assert "11 classes" not in headlines(compared)[0]
    more = [image(i, i % 40, i % 40 if i % 40 > 11 else 50, 0.4) for i in range(400)]
    assert " None of the 120 images of 12 classes is certified by run." in headlines(comparisons([summary_of(more)]))[0]
    acrs = {i: i % 7 / 9 if i > 11 or i == 0 else 0.0 for i in range(40)}
    worst = sorted(sorted(acrs, key=lambda i: acrs[i])[:20])
    for table in further_tables(compared)[:2]:
        assert table.caption.endswith(" The 20 worst of 40 classes.")
        assert [column.key for column in table.layout.columns][-20:] == list(map(str, worst))


def test_what_one_class_reaches_is_said_once_per_rule() -> None:
    rows = [image(i, i % 2, 1, 0.4) for i in range(9)]
    runs = [summary_of(rows, "a"), summary_of(rows, "b", dataset="other"), summary_of(rows, "c", cascade=[0.5, 0.25])]
    (text,) = constant_sentences(comparisons(runs))
    assert re.findall(r"ACR [\d.]+ at σ = 0.5( \(cascade\))?", text) == ["", " (cascade)"]


@pytest.mark.parametrize(
    ("runs", "rest"), [(5, "; 1 more run is in the tables."), (6, "; 2 more runs are in the tables.")]
)
def test_unranked_runs_beyond_the_first_are_counted(runs: int, rest: str) -> None:
    summaries = [summary_of([image(i, 1, 1, 0.5) for i in range(9)], f"r{k}", alpha=0.1 / (k + 1)) for k in range(runs)]
    (text,) = headlines(comparisons(summaries))
    assert rest in text
    assert ": 100% of the images have the largest radius" in text, "equal shares are one number"


@pytest.mark.parametrize("seed", range(3))
def test_paired_differences_against_a_loop(seed: int) -> None:
    ours, theirs = random_rows(seed, 60), random_rows(seed + 10, 60)
    shuffled = random.Random(seed).sample(theirs, len(theirs))  # rows are paired by their index, not by their place
    (comparison,) = comparisons([summary_of(ours, "ours", objective="other"), summary_of(shuffled, "theirs")])
    assert (comparison.ranked, comparison.reference) == (True, "theirs"), "the Gaussian run"
    (paired,) = comparison.paired
    gaps = [a - b for a, b in zip(counted(ours), counted(theirs), strict=True)]
    assert paired.acr.value == pytest.approx(statistics.fmean(gaps))
    assert paired.acr.standard_error == pytest.approx(statistics.stdev(gaps) / math.sqrt(60))
    assert list(paired.accuracy) == [0.0, 0.25, 0.5, 1.0], "1.5 is out of reach of 1,000 votes"
    for radius, difference in paired.accuracy.items():
        pairs = [(certified(a, radius), certified(b, radius)) for a, b in zip(ours, theirs, strict=True)]
        won, lost = pairs.count((True, False)), pairs.count((False, True))
        assert difference.value == pytest.approx((won - lost) / 60)
        error = math.sqrt(((won + lost) / 60 - ((won - lost) / 60) ** 2) / 59)
        assert difference.standard_error == pytest.approx(error)
        assert difference.significant == (won != lost and stats.binomtest(won, won + lost).pvalue <= 0.05)
    table = next(t.layout for t in further_tables([comparison]) if t.title == "Differences from a reference run")
    cells = dict(zip([column.key for column in table.columns], table.groups[0][0], strict=True))
    assert paired.acr.significant == (abs(paired.acr.value) > 2 * (paired.acr.standard_error or 0))
    for key, difference, scale, decimals in (("acr", paired.acr, 1, 3), ("0.50", paired.accuracy[0.5], 100, 1)):
        value, error = scale * difference.value, scale * (difference.standard_error or 0)
        star = "*" if difference.significant else ""
        text = f"{value:+.{decimals}f} ({error:.{decimals}f}){star}".replace("-", "−")
        assert (cells[key].value, cells[key].text) == (pytest.approx(value), text), "accuracies are in points"
    means = [(a + b) / 2 for a, b in zip(counted(ours), counted(theirs), strict=True)]
    easy = [gap for gap, mean in zip(gaps, means, strict=True) if mean >= statistics.median(means)]
    hard = [gap for gap, mean in zip(gaps, means, strict=True) if mean < statistics.median(means)]
    assert paired.easy is not None
    assert paired.hard is not None
    assert (paired.easy.value, paired.hard.value) == (pytest.approx(np.mean(easy)), pytest.approx(np.mean(hard)))


def test_of_two_radii_as_near_to_sigma_the_smaller_is_in_the_headline() -> None:
    run = summarize(our_file(random_rows(0, 20)), "run", (0.0, 0.25, 0.75, 1.0))
    assert comparisons([run])[0].headline_radius == 0.25


def test_the_best_run_needs_a_significant_lead_over_every_other() -> None:
    low = [image(i, 1, 1, 0.1) for i in range(30)]
    high = [image(i, 1, 1, 0.6 + 0.01 * (i % 3)) for i in range(30)]
    same = [image(i, 1, 1, 0.6 + 0.01 * ((i + 1) % 3)) for i in range(30)]
    (comparison,) = comparisons([summary_of(low, "low"), summary_of(high, "high")])
    best = comparison.best_at(None)
    assert best is not None
    assert (best.name, best.second, best.significant) == ("high", "low", True)
    assert comparison.best_at(1.0) is None, "no run certifies it"
    (comparison,) = comparisons([summary_of(low, "low"), summary_of(high, "high"), summary_of(same, "same")])
    best = comparison.best_at(None)
    assert best is not None
    assert (best.name, best.second, best.significant) == ("high", "same", False)
    # The third run is 0.15 below the best, with a standard error of 0.084; the second 0.1 below it on every image.
    radii = {"best": (0.6, 0.6), "second": (0.5, 0.5), "third": (0.0, 0.9)}
    runs = [summary_of([image(i, 1, 1, pair[i % 2]) for i in range(30)], name) for name, pair in radii.items()]
    best = comparisons(runs)[0].best_at(None)
    assert best is not None
    assert (best.second, best.lead.significant, best.significant) == ("second", True, False)


def test_the_headline_tells_the_best_run_from_the_reference_at_its_radius() -> None:
    """At 0.5 by one of 30 images, which establishes nothing, although the difference of ACR is established."""
    rows = {"plain": [0.1, *[0.5] * 29], "best": [1.0] * 30, "second": [0.5] * 30}
    methods = {"plain": "gaussian", "best": "b", "second": "s"}
    runs = [
        summary_of([image(i, 1, 1, radius) for i, radius in enumerate(radii)], name, objective=methods[name])
        for name, radii in rows.items()
    ]
    (comparison,) = comparisons(runs)
    assert comparison.paired[0].acr.significant
    (text,) = headlines([comparison])
    assert "second: 30, the difference is not established; plain: 29, the difference is not established." in text


@pytest.mark.parametrize(
    ("won", "lost", "established"),
    [(0, 0, False), (4, 0, False), (5, 0, False), (6, 0, True), (7, 1, False), (8, 1, True), (14, 5, False)],
)
def test_differences_of_accuracies_are_established_by_the_sign_test(won: int, lost: int, established: bool) -> None:
    """All but the first exceed two standard errors; four images all favour one of two equal runs once in 8 times."""
    first = [0.6] * won + [0.1] * lost + [0.1] * (500 - won - lost)
    second = [0.1] * won + [0.6] * lost + [0.1] * (500 - won - lost)
    runs = [
        summary_of([image(i, 1, 1, radius) for i, radius in enumerate(radii)], name)
        for name, radii in (("first", first), ("second", second))
    ]
    (paired,) = comparisons(runs, reference="second")[0].paired
    assert paired.accuracy[0.5].significant is established


@pytest.mark.parametrize("seed", range(8))
def test_differences_of_the_acr_of_few_images_against_scipy(seed: int) -> None:
    """The exact randomization test, with zeros, equal sizes and sizes that differ."""
    random = np.random.default_rng(seed)
    zeros, ours = np.zeros(20), np.zeros(20)
    ours[: 4 + seed] = random.choice([0.5, 0.5, -0.5, 1.5], 4 + seed) * (1 if seed % 2 else random.random(4 + seed))
    given = ours[ours != 0]
    test = stats.permutation_test((given,), np.sum, permutation_type="samples", n_resamples=np.inf, vectorized=False)
    assert randomization_test(given) == pytest.approx(test.pvalue)
    assert difference_of_radii(ours, zeros).significant == (test.pvalue <= 0.05)


@pytest.mark.parametrize("images", [7, 8, 20, 100])
def test_equal_runs_seldom_have_an_established_difference_of_acr(images: int) -> None:
    """Enumerated, for sizes that are equal: the test is that of signs. Two standard errors would be wrong in 12.5%."""
    for differing in range(1, min(images, 16) + 1):
        wrong = 0
        for won in range(differing + 1):
            ours = np.array([0.5] * won + [-0.5] * (differing - won) + [0.0] * (images - differing))
            established = difference_of_radii(ours, np.zeros(images)).significant
            assert established == (stats.binomtest(won, differing).pvalue <= 0.05)
            wrong += established * math.comb(differing, won)
        assert wrong / 2**differing <= 0.05


def test_the_best_of_many_equal_runs_seldom_has_an_established_lead_over_the_reference() -> None:
    """Of ten; by the test that two runs have, in about 9% of all cases."""
    random, alone, said = np.random.default_rng(0), [], []
    for _ in range(60):
        chances = np.where(random.random(400) < 0.8, random.random(400) < 0.6, random.random(400))
        runs = [
            summary_of([image(i, 1, 1, 0.6 if random.random() < p else 0.1) for i, p in enumerate(chances)], f"r{k}")
            for k in range(10)
        ]
        (comparison,) = comparisons(runs, reference="r9")
        best = comparison.best_at(0.5)
        assert best is not None
        alone += [run.accuracy[0.5].significant for run in comparison.paired if run.name == best.name]
        said.append("is established" in headlines([comparison])[0].replace("is not established", ""))
    assert np.mean(said) < 0.05 < np.mean(alone)


def test_a_few_images_establish_nothing() -> None:
    """All of them differ alike, so the standard error is 0; five coins fall alike once in 16 times."""
    for count, established in ((5, False), (6, True)):
        runs = [summary_of([image(i, 1, 1, radius) for i in range(count)], f"{radius}") for radius in (0.1, 0.6)]
        best = comparisons(runs)[0].best_at(None)
        assert best is not None
        assert (best.lead.standard_error, best.significant) == (pytest.approx(0), established)
        (worse,) = comparisons(runs, reference="0.6")[0].paired
        assert (worse.acr.value, worse.acr.significant) == (pytest.approx(-0.5), established)


def test_a_cascade_has_no_share_at_the_ceiling() -> None:
    """The second image was answered by the stage of the smaller sigma: all its votes agree, at a smaller radius."""
    first = image(0, 1, 1, 2.4)
    later = Certificate(2, 0.6, 10, 1000, 1000, ((2, 1000),), (((1, 500), (2, 500)),))
    run = summary_of([first, CertifiedImage(1, 2, later, 0.5)], sigma=1.0, cascade=[1.0, 0.25])
    assert run.ceiling is not None
    assert run.ceiling > 0.6
    assert run.at_ceiling is None
    assert not run.limited_by_n


def test_only_images_whose_votes_all_go_to_their_label_are_at_the_ceiling() -> None:
    """One tenth of the images is enough to say that n limits the result."""
    counts = [1000, *[999] * 8]
    rows = [CertifiedImage(i, 1, Certificate(1, 0.5, 10, 1000, k, ((1, k),)), 0.0) for i, k in enumerate(counts)]
    wrong = image(9, 0, 1, 0.5)
    run = summary_of([*rows, wrong])
    assert (run.at_ceiling, run.limited_by_n) == (0.1, True)
    assert run.ceiling is not None
    assert run.reaches(run.ceiling)
    more = summary_of([*rows, wrong, image(10, 0, 1, 0.5)])
    assert (more.at_ceiling, more.limited_by_n) == (pytest.approx(1 / 11), False)
    (text,) = headlines(comparisons([summary_of([*rows[:5], wrong])]))
    assert ": 17% of the images have the largest radius" in text, "one of six"
    assert summary_of([image(0, 1, 1, 0.5, n=0)]).at_ceiling is None, "without votes"


@pytest.mark.parametrize("bound", ["two-sided", "randomized"])
def test_the_largest_radius_is_that_of_the_bound(bound: str) -> None:
    """With a randomized bound it depends on the coin: no share of the images has one largest radius."""
    coin = 0.5 if bound == "randomized" else None
    radius = certified_radius(1000, 0, 1000, Gaussian(0.5), 0.001, bound=bound, coin=coin)
    row = Certificate(1, radius, 10, 1000, 1000, ((1, 1000),), coin=coin)
    run = summary_of([CertifiedImage(0, 1, row, 0.5)], bound=bound)
    assert run.ceiling is not None
    assert (run.ceiling == radius, run.at_ceiling) == ((True, 1.0) if coin is None else (False, None))


def test_the_largest_radius_of_integer_noise_counts_its_rounding() -> None:
    """With a billion votes the 1e-10 added to the error is 1.4% of it."""
    n = 10**9
    error = -math.expm1(math.log(0.001) / n)
    radius = 0.5 * float(stats.norm.isf(error + 1e-10))
    run = summary_of([image(0, 1, 1, radius, n=n)], n=n, sound=True)
    assert run.ceiling is not None
    assert run.ceiling == pytest.approx(radius, rel=1e-8)
    assert run.ceiling < 0.5 * stats.norm.isf(error) - 1e-3


def test_a_sequential_rule_says_nothing_about_radii_beyond_its_own() -> None:
    """All images stopped after 1,000 votes that agree: not the votes limit their radius, but the question."""
    rows = [image(i, 1, 1, 0.25) for i in range(10)]
    until, full = (summary_of(rows, name, radii=[0.25], hold_back=name == "full") for name in ("until", "full"))
    assert (until.ceiling, until.limited_by_n) == (None, False)
    assert [until.reaches(radius) for radius in (0.25, 0.5)] == [True, False]
    several = summary_of(rows, radii=[0.5, 0.25])
    assert [several.reaches(radius) for radius in (0.25, 0.5, 0.75)] == [True, True, False]
    (text,) = headlines(comparisons([until]))
    assert text.startswith("10 of 10 test digits of MNIST keep their class under every change of L2 length up to 0.25 ")
    (comparison,) = comparisons([until, full])
    assert not comparison.ranked, "one of them has the full radius of images that reach n votes"


def test_the_constant_classifier() -> None:
    rows = [image(i, min(i % 4, 2), 0, 0.1) for i in range(40)]
    (text,) = constant_sentences(comparisons([summary_of(rows)]))
    ceiling = 0.5 * stats.norm.ppf(0.001 ** (1 / 1000))
    assert "always answers class 2 has certified accuracy 50.0%" in text
    assert text.endswith(f"ACR {0.5 * ceiling:.3f} at σ = 0.5.")
    fewer = [image(i, min(i % 4, 2), 0, 0.1, n=500) for i in range(40)]
    both = constant_sentences(comparisons([summary_of(fewer, "few", n=500), summary_of(rows, "many")]))
    assert both == [text], "the largest of the group"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n": 500}, "n differs (1,000 and 500)"),
        ({"n": 2_345_678}, "n differs (1,000 and 2,345,678)"),
        ({"alpha": 0.01}, "alpha differs (0.001 and 0.01)"),
        ({"bound": "two-sided"}, "bound differs (one-sided and two-sided)"),
        ({"alpha": None}, "alpha differs (0.001 and not recorded)"),
        ({"radius_loss": 0.1}, "radius loss differs (0 and 0.1)"),
        ({"radii": [0.5]}, "radii differs (none and [0.5])"),
        ({"label_aware": True}, "label-aware differs (False and True)"),
        ({"sound": True}, "sound differs (False and True)"),
    ],
)
def test_runs_that_are_certified_otherwise_are_not_ranked(changes: dict[str, object], reason: str) -> None:
    rows = [image(i, 1, 1, 0.5, n=int(str(changes.get("n", 1000)))) for i in range(9)]
    (comparison,) = comparisons([summary_of(random_rows(0, 9, 1), "a"), summary_of(rows, "b", **changes)])
    assert reason in comparison.obstacles
    assert (comparison.best, comparison.paired, comparison.ranked) == ((), (), False)
    assert f"These runs are not ranked: {reason}" in headlines([comparison])[0]


def test_runs_none_of_which_records_its_alpha_are_not_ranked() -> None:
    runs = [summary_of(random_rows(seed, 9, 1), name, alpha=None) for seed, name in enumerate("ab")]
    (comparison,) = comparisons(runs)
    assert comparison.obstacles == ("alpha is not recorded",)
    assert not comparison.ranked


def test_runs_certified_by_one_rule_are_compared_whatever_n_it_chose_for_their_images() -> None:
    """The second run got the same n for all its images, which is below that of the settings."""
    first = [image(i, 1, 1, 0.5, n=1000 - 100 * (i % 3)) for i in range(9)]
    second = [image(i, 1, 1, 0.25, n=800) for i in range(9)]
    rule = {"radius_loss": 0.02}
    (comparison,) = comparisons([summary_of(first, "a", **rule), summary_of(second, "b", **rule)])
    assert comparison.obstacles == ()
    assert [run.acr.value for run in comparison.paired] == [pytest.approx(-0.25)]
    for reference in ("a", "b"):  # of the images of the second run, no 800 votes show 1.5
        (comparison,) = comparisons([summary_of(first, "a", **rule), summary_of(second, "b", **rule)], reference)
        assert list(comparison.paired[0].accuracy) == [0.0, 0.25, 0.5, 1.0]
    (comparison,) = comparisons([summary_of(first, "a", **rule), summary_of(second, "b", radius_loss=0.05)])
    assert comparison.obstacles == ("radius loss differs (0.02 and 0.05)",)


def test_runs_with_the_randomized_bound_are_in_a_group_of_their_own() -> None:
    rows = random_rows(0, 9, 1)
    compared = comparisons([summary_of(rows, "a"), summary_of(rows, "b", bound="randomized")])
    assert [len(comparison.runs) for comparison in compared] == [1, 1]
    plain, randomized = headlines(compared)
    assert "randomized" not in plain
    assert ", randomized bound: " in randomized
    assert ", randomized bound: " in headlines(compared[1:])[0]


def test_runs_on_other_images_or_with_other_labels_are_not_ranked() -> None:
    rows = [image(i, 1, 1, 0.5) for i in range(9)]
    moved = [image(i + 1, 1, 1, 0.5) for i in range(9)]
    relabelled = [image(i, 2, 1, 0.5) for i in range(9)]
    for other, reason in ((moved, "the images differ"), (relabelled, "the labels of the same images differ")):
        (comparison,) = comparisons([summary_of(rows, "a"), summary_of(other, "b")])
        assert any(obstacle.startswith(reason) for obstacle in comparison.obstacles)
    for key in ("split", "images_sha256"):  # as of images with the same labels, clean and with added blur
        (comparison,) = comparisons([summary_of(rows, name, **{key: name}) for name in ("a", "b")])
        assert comparison.obstacles == ("split or images_sha256 differ, so these may be different images",)


def test_no_run_is_best_where_all_have_nothing() -> None:
    rows = [image(i, 1, 0, 0.4) for i in range(9)]
    (comparison,) = comparisons([summary_of(rows, "a"), summary_of(rows, "b", objective="macer")])
    assert (comparison.ranked, comparison.best) == (True, ())


def test_the_headline_of_radii_below_those_of_the_table() -> None:
    wrong = "No image is classified correctly with a certified radius above 0."
    for predict, radius, words in (
        (1, 0.2, "The largest certified radius is 0.200; "),
        (-1, 0.0, wrong),
        (2, 0.4, wrong),
    ):
        file = summary_of([image(0, 1, predict, radius)], "a").file
        assert headlines(comparisons([summarize(file, "a", [0.0])]))[0].startswith(words)


def test_the_headline_of_runs_of_which_one_has_too_few_votes_for_the_table() -> None:
    """With n = 10, 0.001 ** 0.1 = 0.501 is the largest lower bound: no radius above 0.01 can be shown."""
    rows = [image(i, 1, 1, 0.9) for i in range(9)]
    few = summary_of([image(i, 1, 1, 0.0005, n=10) for i in range(9)], "few", n=10)
    (text,) = headlines(comparisons([summary_of(rows, "many"), few]))
    assert text.startswith("No radius of the table above 0 can be shown by the votes of all runs; leave out those with")


def test_the_headline_in_words() -> None:
    better = [image(i, 1, 1 if i < 83 else 0, 0.7) for i in range(100)]
    worse = [image(i, 1, 1 if i >= 21 else 0, 0.7) for i in range(100)]
    (comparison,) = comparisons([summary_of(worse, "gaussian"), summary_of(better, "mix", objective="smoothmix")])
    assert comparison.headline_radius == 0.5
    (text,) = headlines([comparison])
    ends = stats.binomtest(83, 100).proportion_ci(method="wilson")
    low, high = math.floor(100 * ends.low), math.ceil(100 * ends.high)
    assert text.startswith(
        "83 of 100 test digits of MNIST keep their class under every change of L2 length up to 0.5 "
        f"(mix; 95% interval {low} to {high}). gaussian: 79, the difference is not established."
    )
    assert "The number of votes n limits the result: 79 to 83% of the images have the largest radius, 1.231." in text


def test_the_words_have_the_names_of_the_table(make_run: MakeRun, tmp_path: Path) -> None:
    """Not those of figures, such as "Consistency (λ = 5)" and "ensemble of 2", in every format and on a terminal."""
    runs = []
    for name, certified in (("plain", 40), ("w5", 80), ("w10", 60), ("both of them", 70)):
        method = "gaussian" if name == "plain" else "consistency" if name[0] == "w" else "ensemble of 2"
        rows = [image(i, i % 2, i % 2 if i < certified else 1 - i % 2, 0.7) for i in range(100)]
        if name == "w10":
            rows = [image(i, i % 2, 0, 0.7) for i in range(100)]
        runs.append(make_run(name, rows, objective=method))
        weight = name.removeprefix("w")
        (runs[-1] / "recipe.yaml").write_text(f"objective: {{name: {method}, weight: {weight}}}\n")
    contents = write_report(runs, tmp_path / "out", ["md", "html"]).contents
    labels = ["Gaussian", "Consistency (λ = 5)", "Consistency (λ = 10)", "ensemble of 2"]
    assert list(contents.labels.values()) == labels
    (words,) = contents.headlines
    assert "(w5; 95% interval" in words
    assert ". both of them: 70, the difference is established; plain: 40, the difference is established." in words
    assert "None of the 50 images of class 1 is certified by w10." in words
    assert not [label for label in labels if label in words]
    console = Console(width=1000, record=True)
    for shown in terminal_report(contents, 1000):
        console.print(shown)
    texts = [(tmp_path / "out" / name).read_text() for name in ("report.md", "report.html")]
    assert all(words in text for text in (*texts, console.export_text()))


def test_a_reference_that_no_run_has() -> None:
    with pytest.raises(RequestError, match="reference: expected one of run, got other"):
        comparisons([summary_of(random_rows(0))], "other")
