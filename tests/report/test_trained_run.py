"""What a run folder tells about its training, whole or torn."""

import json
import math
from pathlib import Path

import pytest

from smoothcert.certification.certificates import read_certificates
from smoothcert.errors import WorkError
from smoothcert.report.locate import find_certificates
from smoothcert.report.summary import Summary, summarize
from smoothcert.report.trained_run import further_terms, learning_rate_drops, read_metrics, read_run, training_runs
from smoothcert.report.training_curves import draw_training_curves
from smoothcert.training.metrics import append_metrics

from .conftest import MakeRun

ENTRIES = [
    {"epoch": e, "learning_rate": 0.01 * 0.1 ** (e // 2), "loss": 1.0 / (e + 1), "noisy_accuracy": 0.5 + 0.1 * e}
    for e in range(5)
]


def test_appended_metrics_are_read(tmp_path: Path) -> None:
    for entry in ENTRIES:
        append_metrics(tmp_path / "metrics.jsonl", entry)
    assert read_metrics(tmp_path) == ENTRIES
    assert read_metrics(tmp_path / "elsewhere") == []


def test_a_torn_last_line_is_ignored_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps(entry) + "\n" for entry in ENTRIES[:2])
    last = json.dumps(ENTRIES[2])
    for cut in range(0, len(last), 5):
        path.write_text(whole + last[:cut])
        assert read_metrics(tmp_path) == ENTRIES[:2]
    path.write_text(whole + last)
    assert read_metrics(tmp_path) == ENTRIES[:3], "only the newline was lost"


@pytest.mark.parametrize(
    "line",
    [
        '{"epoch": 1, "lo',
        "[1, 2]",
        '{"loss": 1.0}',
        '{"epoch": null}',
        "7",
        '{"epoch": true}',
        '{"epoch": 0.5}',
        '{"epoch": -1}',
        '{"epoch": 1, "loss": 1e300}',
        '{"epoch": 1, "loss": -1e300}',
        '{"epoch": 1, "loss": Infinity}',
        '{"epoch": 1, "noisy_accuracy": NaN}',
        '{"epoch": 1, "loss": "low"}',
        '{"epoch": 1, "seconds": [1]}',
        '{"epoch": 1, "consistency": 1e999}',
        '{"epoch": 1, "loss": 1' + "0" * 400 + "}",
        "[" * 100_000,
    ],
)
def test_other_damage_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps(ENTRIES[0])}\n{line}\n{json.dumps(ENTRIES[1])}\n")
    with pytest.raises(WorkError, match=r"metrics\.jsonl, line 2: damaged"):
        read_metrics(tmp_path)


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"epoch": 0}\n\xff\xfe\n{"epoch": 1}\n')
    with pytest.raises(WorkError, match=r"metrics\.jsonl, line 2: damaged"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("value", [1e30, -1e30, 5e-324])
def test_the_largest_and_smallest_numbers_can_be_drawn(value: float, tmp_path: Path) -> None:
    for epoch in range(3):
        line = {"epoch": epoch, "loss": value, "noisy_accuracy": 0.5, "learning_rate": 0.1, "consistency": value}
        append_metrics(tmp_path / "metrics.jsonl", line)
    figure = draw_training_curves([read_run("a", tmp_path)])
    assert figure is not None
    figure.draw_without_rendering()


def test_values_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    append_metrics(tmp_path / "metrics.jsonl", {"epoch": 0, "loss": 0.5, "device": "cpu", "note": None})
    assert read_metrics(tmp_path) == [{"epoch": 0, "loss": 0.5}]


def test_drops_are_the_first_epochs_at_a_lower_rate() -> None:
    assert learning_rate_drops(ENTRIES) == [2, 4]
    assert learning_rate_drops(ENTRIES[:2]) == []
    rising = [{"epoch": 0.0, "learning_rate": 0.1}, {"epoch": 1.0, "learning_rate": 0.2}]
    assert learning_rate_drops(rising) == []


def test_further_terms_are_the_unknown_keys() -> None:
    entry = {"epoch": 0.0, "learning_rate": 0.1, "loss": 1.0, "noisy_accuracy": 0.5, "cross_entropy": 0.4, "kl": 0.1}
    assert further_terms([entry, {**entry, "entropy": 0.2, "seconds": 3.0}]) == ["kl", "entropy"]
    assert further_terms([{**entry, "natural": 1.0, "robust": 0.5}]) == ["kl", "robust"]


def test_a_run_has_the_names_of_its_recipe(tmp_path: Path) -> None:
    append_metrics(tmp_path / "metrics.jsonl", ENTRIES[0])
    run = read_run("a", tmp_path)
    assert (run.group, run.method) == ((math.inf, ""), None)
    (tmp_path / "recipe.yaml").write_text("sigma: 0.5\ndataset: mnist\nobjective:\n  name: consistency\n")
    run = read_run("a", tmp_path)
    assert (run.group, run.method, run.metrics) == ((0.5, "mnist"), "consistency", ENTRIES[:1])
    (tmp_path / "recipe.yaml").write_text("sigma: wide\n")
    assert read_run("a", tmp_path).group == (math.inf, "")


def summaries_of(paths: list[Path]) -> list[Summary]:
    return [summarize(read_certificates(path), name, ()) for name, path in find_certificates(paths)]


def test_each_run_is_listed_once_by_its_folder(make_run: MakeRun, field_file: Path) -> None:
    one, two = make_run("one"), make_run("two")
    make_run("two", file="other")
    summaries = summaries_of([one, two, field_file])
    assert [summary.name for summary in summaries] == ["one", "two/other", "two/test", "noise_0.25"]
    assert [run.name for run in training_runs(summaries)] == ["one", "two"]


def test_runs_of_one_folder_name_keep_names_apart(make_run: MakeRun) -> None:
    runs = [make_run(folder) for folder in ("x/a", "y/a")]
    for folder in ("x/a", "y/a"):
        make_run(folder, file=f"other-{folder[0]}")
        make_run(folder, file=f"third-{folder[0]}")
    assert [run.name for run in training_runs(summaries_of(runs))] == ["x/a", "y/a"]
