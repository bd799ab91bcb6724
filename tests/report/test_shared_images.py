"""Runs that were certified on different images, compared on those that they share."""

import csv
import statistics
from functools import partial
from pathlib import Path

import pytest

import smoothcert as sc
from smoothcert.errors import RequestError
from smoothcert.io.results import read_settings, write_settings
from smoothcert.report import write_report

from .conftest import MakeRun, image, images

ROWS = images()
COUNTED = [0.1, 0.25, 0.0, 0.0, 0.5, 0.5, 0.0, 1.1, 0.0, 0.7499]


def acrs(folder: Path) -> dict[str, tuple[int, float]]:
    with (folder / "report.csv").open(newline="") as file:
        return {row["name"]: (int(row["images"]), float(row["acr"])) for row in csv.DictReader(file)}


def test_only_the_images_that_all_have_count(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("all"), make_run("every-second", ROWS[::2]), make_run("other", ROWS[1:], dataset="cifar10")]
    write = partial(write_report, runs, tmp_path, ["csv"])
    write(same_images=False)
    every = {"all": (10, COUNTED), "every-second": (5, COUNTED[::2]), "other": (9, COUNTED[1:])}
    assert acrs(tmp_path) == {name: (n, pytest.approx(statistics.fmean(r))) for name, (n, r) in every.items()}
    write()
    shared = every | {"all": every["every-second"]}
    assert acrs(tmp_path) == {name: (n, pytest.approx(statistics.fmean(r))) for name, (n, r) in shared.items()}


def test_rows_for_notebooks_have_paired_differences_from_a_reference(make_run: MakeRun, tmp_path: Path) -> None:
    """Against the mean and standard error of the differences of the five images that both runs have."""
    better = [image(i, ROWS[i].label, ROWS[i].label, 0.1 * i) for i in range(0, 10, 2)]
    runs = [make_run("all", ROWS), make_run("better", better)]
    differences = [0.1 * i - COUNTED[i] for i in range(0, 10, 2)]
    standard_error = statistics.stdev(differences) / 5**0.5
    for out in (None, tmp_path):
        first, second = sc.report(runs, reference="all", out=out, formats=["csv"])
        assert (first["reference"], first["acr_minus_reference"]) == (None, None)
        assert second["reference"] == "all"
        assert second["acr_minus_reference"] == pytest.approx(statistics.fmean(differences))
        assert second["acr_minus_reference_standard_error"] == pytest.approx(standard_error)
    with pytest.raises(RequestError, match="reference: expected one of all, better, got worse"):
        sc.report(runs, reference="worse")


def test_runs_of_another_sigma_do_not_take_images_away(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("all"), make_run("some", ROWS[::2], sigma=1.0), make_run("theirs", ROWS[:3], sigma=None)]
    write_report(runs, tmp_path, ["csv"])
    assert {name: images for name, (images, _) in acrs(tmp_path).items()} == {"all": 10, "some": 5, "theirs": 3}


def test_different_images_with_the_same_numbers_do_not_take_images_away(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("all", images_sha256="a"), make_run("some", ROWS[::2], images_sha256="b"), make_run("last", ROWS)]
    write_report(runs, tmp_path, ["csv"])
    assert {name: images for name, (images, _) in acrs(tmp_path).items()} == {"all": 10, "some": 5, "last": 10}


def test_a_trial_in_the_folder_of_a_run_does_not_take_images_away(make_run: MakeRun, tmp_path: Path) -> None:
    """Two images with fewer votes, before the run was certified; other questions about a run are no trials."""
    run, other = make_run("mine", file="test-n1000"), make_run("other")
    few = images(n=500)[:2]
    make_run("mine", few, file="test-n500", n=500, seed=7)
    trial = run / "certificates" / "test-n500.tsv"

    def counts(*paths: Path, **choices: bool) -> dict[str, int]:
        write_report(paths, tmp_path / "out", ["md", "csv"], **choices)
        return {name: count for name, (count, _) in acrs(tmp_path / "out").items()}

    assert counts(run, other) == {"mine": 10, "other": 10}, "named as if there were no trial"
    text = (tmp_path / "out/report.md").read_text()
    assert "**mine/test-n500**: left out: another file of this run has its images and more" in text
    assert "not ranked:" not in text
    with pytest.warns(UserWarning, match="mine/test-n500: left out: another file of this run") as caught:
        assert [row["name"] for row in sc.report([run, other])] == ["mine", "other"]
    assert [warning.filename for warning in caught] == [__file__]
    assert counts(run, trial, other) == {"mine/test-n1000": 2, "mine/test-n500": 2, "other": 2}, "named"
    with pytest.warns(UserWarning, match="only the 2 images that all runs of the same σ have are counted"):
        assert [row["images"] for row in sc.report([run, trial, other])] == [2, 2, 2]
    assert counts(trial, other) == {"mine": 2, "other": 2}, "alone"
    every = counts(run, other, same_images=False)
    assert every == {"mine/test-n1000": 10, "mine/test-n500": 2, "other": 10}, "nothing to cut, nothing to leave out"
    for number, change in enumerate(({"n": 2000}, {"bound": "two-sided"}, {"alpha": 0.01}, {"weights_sha256": "a"})):
        make_run(f"run{number}")
        run = make_run(f"run{number}", images(n=change.get("n", 1000))[:2], file="further", **change)
        assert counts(run) == {f"run{number}/test": 2, f"run{number}/further": 2}


def test_a_run_that_was_cut_says_so(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("all"), make_run("some", ROWS[::2])]
    write_report(runs, tmp_path, ["md"])
    items = {line.split("**")[1]: line for line in (tmp_path / "report.md").read_text().splitlines() if "- **" in line}
    assert "5 images" in items["all"]
    assert "only the 5 images that all runs of the same σ have are counted" in items["all"]
    assert "that all runs" not in items["some"]


def test_a_run_without_images_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    for same_images in (False, True):
        with pytest.raises(RequestError, match="expected at least one certified image, got none; continue with"):
            write_report([make_run("empty", [])], tmp_path / "out", ["csv"], same_images=same_images)


def test_runs_without_a_common_image_are_not_ranked(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("even", ROWS[::2]), make_run("odd", ROWS[1::2])]
    report = write_report(runs, tmp_path / "out", ["md"])
    assert [summary.images for summary in report.contents.summaries] == [5, 5]
    assert "**even**, **odd**: not ranked: the images differ" in (tmp_path / "out/report.md").read_text()


def test_a_report_says_that_a_file_is_incomplete(make_run: MakeRun, tmp_path: Path) -> None:
    """Interrupted, or merged with --partial."""
    selection = {"images": 12, "skip": 1, "max_images": None, "shard": [1, 1]}
    for provenance, words in (
        ({"selection": selection}, "incomplete: test.tsv lacks 2 of its 12 images"),
        ({"incomplete": ["shard 2 of 2 is missing"]}, "incomplete: shard 2 of 2 is missing"),
        ({"selection": selection | {"images": 10}}, ""),
    ):
        path = make_run(f"run{len(words)}") / "certificates" / "test.tsv"
        write_settings(path, read_settings(path)["settings"], provenance)
        contents = write_report([path], tmp_path / "out", ["md"]).contents
        assert list(contents.warnings) == [words] * bool(words)
        assert words in (tmp_path / "out" / "report.md").read_text()
