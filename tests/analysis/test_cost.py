"""The cost table says what the files of a run say."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from half_space import untrained_run
from rich.console import Console

from smoothcert.analysis.cost import (
    Cost,
    cost_csv,
    cost_markdown,
    cost_table,
    draw_cost,
    training_costs,
)
from smoothcert.certification.columns import FIELD_COLUMNS
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.results import write_settings
from smoothcert.objectives import Adversary, Consistency, Gaussian, Macer, SmoothAdv, SmoothMix
from smoothcert.report.layout import terminal
from smoothcert.training.metrics import METRICS
from smoothcert.training.run_folder import MODEL

ROWS = "0\t7\t7\t0.5\t1\t0:00:01\n1\t2\t3\t0.9\t0\t0:00:01\n2\t1\t-1\t0.0\t0\t0:00:01\n3\t4\t4\t1.5\t1\t0:00:01\n"
GIB = 1024**3


def certify(run: Path, name: str, rows: str, sigma: float, **settings: object) -> None:
    path = run / "certificates" / f"{name}.tsv"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\t".join(FIELD_COLUMNS) + "\n" + rows)
    write_settings(path, {"sigma": sigma, **settings}, {})


def append(run: Path, text: str) -> None:
    with (run / METRICS).open("a") as file:
        file.write(text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five epochs of 7, 1, 2, 3 and 1 seconds, the last two with their memory, and a torn line."""
    folder = untrained_run(tmp_path / "a", (7.0, 1.0, 2.0), epochs=5, objective=Consistency(weight=5))
    append(folder, json.dumps({"epoch": 3, "seconds": 3.0, "peak_memory_bytes": 3 * GIB}) + "\n")
    append(folder, json.dumps({"epoch": 4, "seconds": 1.0, "peak_memory_bytes": 2 * GIB}) + '\n{"epoch": 5, "sec')
    return folder


def test_times_memory_and_device(run: Path) -> None:
    (cost,) = training_costs([run])
    assert (cost.seconds_per_epoch, cost.seconds, cost.epochs, cost.epochs_planned) == (1.5, 14.0, 5, 5)
    assert (cost.peak_memory_bytes, cost.device) == (3 * GIB, "cuda (a card)")
    assert (cost.run, cost.method, cost.sigma, cost.acr) == ("a", "consistency", 0.5, None)
    assert "weight 5.0" in cost.hyperparameters
    assert "adversary" not in cost.hyperparameters


def test_acr_is_that_of_the_largest_file_at_the_training_sigma(run: Path) -> None:
    certify(run, "whole", ROWS, 0.5)
    certify(run, "part", ROWS.splitlines(keepends=True)[0], 0.5)
    more = ROWS + "5\t4\t4\t9.0\t1\t0:00:01\n"
    certify(run, "another-sigma", more, 0.25)
    kinds = {"bound": "randomized", "noise": "laplace", "radii": [9.0], "label_aware": True, "denoiser": {"name": "x"}}
    for key, value in kinds.items():
        certify(run, key, more, 0.5, **{key: value})
    (cost,) = training_costs([run])
    assert cost.acr == pytest.approx((0.5 + 1.5) / 4)
    assert cost.certified_images == 4


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b'{"epoch": 5}',
        b'{"epoch": 5, "seconds": -1}',
        b'{"epoch": 5, "seconds": 1, "peak_memory_bytes": "x"}',
        b'{"epoch": 5, "seconds": 1, "runs_at_once": "x"}',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    run = untrained_run(tmp_path / "a", (7.0, 1.0))
    whole = (run / METRICS).read_bytes()
    (run / METRICS).write_bytes(whole + line + b"\n" + whole)
    with pytest.raises(WorkError) as caught:
        training_costs([run])
    assert str(caught.value) == f"{run / METRICS}, line 3: damaged; repair the line or move the file"
    # At the end and without its newline it is what a kill left of a line.
    (run / METRICS).write_bytes(whole + line)
    assert training_costs([run])[0].seconds == 8


def test_metrics_that_cannot_be_read_are_named(run: Path) -> None:
    (run / METRICS).unlink()
    (run / METRICS).mkdir()
    with pytest.raises(RequestError, match=r"metrics.jsonl: expected a file, got a folder"):
        training_costs([run])


def test_a_run_without_weights_still_has_its_times(run: Path) -> None:
    (run / MODEL).unlink()
    (cost,) = training_costs([run])
    assert cost.device is None
    assert cost.seconds == 14


def published(folder: Path, **changes: object) -> tuple[float | None, float | None]:
    (cost,) = training_costs([untrained_run(folder, **changes)])
    return cost.published_hours, cost.published_memory_gb


def test_published_costs_are_those_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # ResNet-110 on CIFAR-10 without building one: the table reads recipes, not networks.
    monkeypatch.setattr("half_space.new_model", lambda recipe, spec: torch.nn.Linear(1, 1))
    theirs = {"model": "resnet110", "dataset": "cifar10", "epochs": 150, "batch_size": 256}
    assert published(tmp_path / "a", **theirs, objective=Consistency(weight=20)) == (8.7, 2.9)
    assert published(tmp_path / "b", **theirs, objective=Gaussian(), sigma=0.25) == (4.6, 2.9)
    assert published(tmp_path / "c", **theirs, objective=SmoothAdv(num_noise=2)) == (23.1, 3.0)
    assert published(tmp_path / "d", **theirs, objective=Macer()) == (14.1, 9.4)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "resnet20"},
        {"dataset": "mnist-sample"},
        {"epochs": 30},
        {"batch_size": 128},
        {"objective": Consistency(num_noise=4)},
        {"objective": Consistency(adversary=Adversary())},
        {"objective": SmoothAdv(num_noise=8)},
        {"objective": SmoothAdv(num_noise=2, adversary=Adversary(steps=2))},
        {"objective": SmoothAdv(num_noise=2, adversary=Adversary(attack="ddn"))},
        {"objective": Macer(num_noise=8)},
        {"objective": SmoothMix(num_noise=2)},
    ],
)
def test_other_work_has_no_published_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    monkeypatch.setattr("half_space.new_model", lambda recipe, spec: torch.nn.Linear(1, 1))
    theirs = {"model": "resnet110", "dataset": "cifar10", "epochs": 150, "batch_size": 256, "objective": Gaussian()}
    assert published(tmp_path / "a", **theirs | change) == (None, None)


def columns_of(costs: list[Cost]) -> dict[str, list[str]]:
    """Title -> the cells of its column."""
    table = cost_table(costs)
    return {column.title: [row[i].text for row in table.groups[0]] for i, column in enumerate(table.columns)}


def test_tables(run: Path, tmp_path: Path) -> None:
    unfinished = untrained_run(tmp_path / "b|c", (9.0, 2.0), epochs=4)
    begun = untrained_run(tmp_path / "d", (2.0,))
    costs = training_costs([run, unfinished, begun])
    rows = list(csv.DictReader(io.StringIO(cost_csv(costs))))
    assert [row["seconds"] for row in rows] == ["14", "11", "2"]
    assert rows[0]["hyperparameters"].startswith("num_noise 2, weight 5.0")
    assert rows[1]["peak_memory_bytes"] == ""
    shown = columns_of(costs)
    assert shown["epochs"] == ["5", "2 of 4", "1 of 2"]
    assert shown["total"] == ["14 s", "about 15 s", "2.0 s so far"]
    assert [row["seconds_planned"] for row in rows] == ["14", "15", ""]
    assert "About:" in cost_markdown(costs)
    assert "About:" not in cost_markdown(costs[:1])
    assert not any("published" in title for title in shown)
    assert r"| b\|c | gaussian |" in cost_markdown(costs)


def cost_of(seconds: float, **fields: object) -> Cost:
    known = {"run": "a", "dataset": "cifar10", "model": "resnet110", "method": "gaussian", "hyperparameters": ""}
    rest = {"sigma": 0.5, "epochs": 2, "epochs_planned": 2, "seconds_per_epoch": seconds / 2, "seconds": seconds}
    unknown = {"peak_memory_bytes": None, "device": None, "runs_at_once": 1, "acr": None, "certified_images": None}
    return Cost(**{**known, **rest, **unknown, **fields})


def test_bars_are_as_long_as_the_times(run: Path) -> None:
    short = draw_cost([cost_of(30.0), cost_of(90.0, run="b")])
    assert [bar.get_width() for bar in short.axes[0].patches] == [0.5, 1.5]
    begun = draw_cost([cost_of(30.0, epochs_planned=10)])
    assert [bar.get_width() for bar in begun.axes[0].patches] == [(30 + 8 * 15) / 60]
    long = draw_cost([cost_of(7200.0, peak_memory_bytes=2 * GIB, published_hours=4.6, published_memory_gb=2.9)])
    times, memory = ([bar.get_width() for bar in axes.patches] for axes in long.axes)
    assert times == [2, 4.6]
    assert memory == [2, pytest.approx(2.9e9 / GIB)]
    assert [text.get_text() for text in long.axes[0].texts] == ["2 h 0 min, published 4 h 36 min"]
    assert long.axes[0].get_xscale() == "linear"
    assert long.axes[0].get_xlabel() == "training time (hours)"


def test_short_bars_are_seen_and_notes_are_those_of_the_table() -> None:
    begun = cost_of(2.4, epochs_planned=150, published_hours=4.6)
    figure = draw_cost([begun, replace(cost_of(7200.0, run="not measured"), seconds=None)])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel().endswith(", logarithmic")
    assert "150 epochs" in figure.get_suptitle()
    note = figure.legends[0].get_title().get_text()
    assert "About: the recorded epochs" in note
    assert "Published: consistency/table3" in note


def test_wrong_requests(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"expected a run folder with recipe.yaml"):
        training_costs([tmp_path / "nothing"])
    with pytest.raises(RequestError, match="expected a run folder, got a file; give the folder"):
        training_costs([run / "recipe.yaml"])
    with pytest.raises(RequestError, match="expected each run once"):
        training_costs([run, run])
    (run / MODEL).write_bytes(b"damaged")
    with pytest.raises(WorkError, match="damaged"):
        training_costs([run])
    (run / METRICS).unlink()
    with pytest.raises(RequestError, match=r"expected metrics.jsonl"):
        training_costs([run])


def test_devices_and_runs_at_once_are_those_of_the_epochs(run: Path) -> None:
    """A run that began next to others and ended alone on another device was not alone, nor on that device only."""
    (run / METRICS).write_text(
        "".join(
            json.dumps({"epoch": epoch, "seconds": 1.0, "device": device, "runs_at_once": number}) + "\n"
            for epoch, (device, number) in enumerate([("cuda (one)", 1), ("cuda (one)", 4), ("cuda (other)", 1)])
        )
    )
    (cost,) = training_costs([run])
    assert (cost.device, cost.runs_at_once) == ("cuda (one), cuda (other)", 4)


def test_the_acr_is_that_of_plain_certificates(run: Path) -> None:
    """Not of other statistics of the same votes, nor of other noise, whatever their names and numbers of images."""
    certify(run, "test-n100", ROWS, 0.5)
    right = training_costs([run])[0]
    certify(run, "test-n100-alpha0.1", ROWS.replace("0.5", "0.6"), 0.5)
    certify(run, "test-n200", ROWS.replace("0.5", "0.7"), 0.5)
    for name, settings in (("a", {"noise": "laplace"}), ("b", {"radii": [0.5]}), ("c", {"label_aware": True})):
        certify(run, name, ROWS + "4\t4\t4\t9.5\t1\t0:00:01\n", 0.5)
        write_settings(run / "certificates" / f"{name}.tsv", {"sigma": 0.5, **settings}, {})
    assert (right.acr, right.certified_images) == (0.5, 4)
    assert training_costs([run]) == [right]


def test_a_folder_of_runs_is_all_that_are_trained(run: Path, tmp_path: Path) -> None:
    other = untrained_run(tmp_path / "b", (7.0, 1.0))
    (tmp_path / "report").mkdir()
    assert training_costs([tmp_path]) == training_costs([run, other])


def test_runs_that_shared_a_device_say_so(run: Path) -> None:
    (run / MODEL).unlink()
    certify(run, "test", "", 0.5)
    write_settings(run / "certificates" / "test.tsv", {"sigma": 0.5}, {"model": {"runs_at_once": 18}})
    (cost,) = training_costs([run])
    assert cost.runs_at_once == 18
    assert columns_of([cost])["total"] == ["14 s, 18 at once"]
    assert "times and memory are for all of them together" in cost_markdown([cost])
    assert "at once" not in cost_markdown([cost_of(3.0)])


def test_nested_hyper_parameters_have_the_names_that_set_takes(tmp_path: Path) -> None:
    run = untrained_run(tmp_path / "a", (1.0, 1.0), epochs=2, objective=SmoothAdv(num_noise=2, adversary=Adversary()))
    (shown,) = columns_of(training_costs([run]))["hyper-parameters"]
    assert shown == "num_noise 2, adversary.attack pgd, adversary.steps 10, adversary.epsilon 1.0"


def test_a_narrow_terminal_folds_names_and_times_instead_of_cutting_them(tmp_path: Path) -> None:
    run = untrained_run(tmp_path / "smoothadv-consistency-lambda1-0.5", (70.0, 80.0, 90.0), epochs=500)
    certify(run, "whole", ROWS, 0.5)
    shown = io.StringIO()
    Console(file=shown, width=60).print(terminal(cost_table(training_costs([run])), 60))
    assert "σ" in shown.getvalue()
    assert "ACR" in shown.getvalue()
    assert "…" not in shown.getvalue()
