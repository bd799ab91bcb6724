"""Columns for hyper-parameters that differ, and ACR against those that are numbers."""

import csv
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import smoothcert as sc
from smoothcert.report import write_report
from smoothcert.report.contents import Choices, read_contents
from smoothcert.report.sweep_curves import draw_sweeps

from .conftest import MakeRun, image

RECIPE = {"dataset": "mnist", "model": "lenet", "sigma": 0.5, "epochs": 1, "precision": "auto", "seed": 0}


def trained(make_run: MakeRun, name: str, radius: float, objective: dict[str, Any], **changes: Any) -> Path:
    run = make_run(name, [image(i, 1, 1, radius) for i in range(5)], objective=objective["name"])
    (run / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "objective": objective, **changes}))
    return run


def consistency(make_run: MakeRun, weight: float, radius: float, seed: int = 0, **changes: Any) -> Path:
    name = f"w{weight:g}-seed{seed}" + "".join(f"-{value}" for value in changes.values())
    return trained(make_run, name, radius, {"name": "consistency", "weight": weight}, seed=seed, **changes)


def test_parameters_that_differ_are_columns(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        consistency(make_run, 5.0, 0.2),
        consistency(make_run, 10.0, 0.3, epochs=2),
        trained(make_run, "plain", 0.1, {"name": "gaussian", "num_noise": 1}),
        trained(make_run, "mix", 0.1, {"name": "smoothmix", "num_noise": 4, "eta": 5, "one_step": False}),
        trained(make_run, "one", 0.1, {"name": "smoothmix", "num_noise": 4, "eta": 5, "one_step": True}),
        make_run("no-recipe"),
    ]
    report = write_report(runs, tmp_path / "out", ["csv", "md"], radii=[0.0])
    rows = {row["name"]: row for row in csv.DictReader((tmp_path / "out/report.csv").open(newline=""))}
    assert {name: row["objective.weight"] for name, row in rows.items()} == {
        "w5-seed0": "5",
        "w10-seed0-2": "10",
        "plain": "",
        "mix": "",
        "one": "",
        "no-recipe": "",
    }
    assert rows["plain"]["epochs"] == "1", "a column shows every run that has the parameter"
    assert "objective.num_noise" not in rows["mix"], "methods may differ in it"
    assert not [key for key in rows["mix"] if key in ("seed", "model", "objective.name")]
    text = (tmp_path / "out/report.md").read_text()
    assert "| σ | run | method | epochs | λ | ACR |" in text
    assert rows["one"]["objective.one_step"] == "True"
    assert "| 0.50 | one | SmoothMix (η = 5), one-step | " in text, "the column would repeat the method"
    assert f"| 0.50 | mix | {report.contents.labels['mix']} | " in text, "as in the legends of figures"
    assert report.contents.labels["mix"] == "SmoothMix (η = 5)"
    assert report.contents.sweeps == [], "two values are not a curve"


def test_rows_in_python_have_the_seed_and_the_hyperparameters_of_the_csv_file(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """So that a sweep can be grouped: its means equal those of the table over seeds."""
    radii = {(5.0, 0): 0.2, (5.0, 1): 0.3, (10.0, 0): 0.4, (10.0, 1): 0.6}
    runs = [consistency(make_run, weight, radius, seed) for (weight, seed), radius in radii.items()]
    plain = trained(make_run, "plain", 0.1, {"name": "gaussian", "num_noise": 1}, seed=3)
    rows = sc.report([*runs, plain, make_run("no-recipe")], out=tmp_path, formats="csv")
    assert {(row["objective.weight"], row["seed"]): row["acr"] for row in rows[:4]} == pytest.approx(radii)
    assert [(row["name"], row["seed"], row["objective.weight"]) for row in rows[4:]] == [
        ("plain", 3, None),
        ("no-recipe", None, None),
    ]
    first, *_ = csv.DictReader((tmp_path / "report.csv").open(newline=""))
    assert [key for key in rows[0] if key.startswith("objective.")] == ["objective.weight"]
    assert [key for key in first if key.startswith("objective.")] == ["objective.weight"]
    groups = {weight: [row["acr"] for row in rows if row["objective.weight"] == weight] for weight in (5.0, 10.0)}
    means = {
        float(row["objective.weight"]): float(row["acr"])
        for row in csv.DictReader((tmp_path / "report-seeds.csv").open(newline=""))
    }
    assert {weight: np.mean(acrs) for weight, acrs in groups.items()} == pytest.approx(means)


def test_a_field_of_a_recipe_does_not_replace_a_result(make_run: MakeRun) -> None:
    runs = [trained(make_run, f"r{i}", 0.2, {"name": "mine"}, acr=i, method=f"no {i}") for i in range(2)]
    rows = sc.report(runs)
    assert [(row["name"], row["method"], row["acr"]) for row in rows] == [
        ("r0", "mine", pytest.approx(0.2)),
        ("r1", "mine", pytest.approx(0.2)),
    ]


def test_columns_and_figures_of_a_users_method_have_the_names_of_its_fields(make_run: MakeRun, tmp_path: Path) -> None:
    """The column that it shares with a published method has the name that is right for both."""

    def mine(value: float) -> Path:
        objective = {"name": "methods.py:Mine", "weight": value, "steps": value, "epsilon": 1.0}
        return trained(make_run, f"mine{value:g}", value / 10, objective)

    runs = [mine(1.0), mine(2.0), consistency(make_run, 5.0, 0.2), consistency(make_run, 10.0, 0.2)]
    write_report(runs, tmp_path / "out", ["md"], radii=[0.0])
    assert "| σ | run | method | steps | weight | ACR |" in (tmp_path / "out/report.md").read_text()
    write_report(runs[2:], tmp_path / "published", ["md"], radii=[0.0])
    assert "| σ | run | method | λ | ACR |" in (tmp_path / "published/report.md").read_text()


def test_parts_of_one_run_are_not_columns_and_their_differences_are(make_run: MakeRun, tmp_path: Path) -> None:
    attacks = [None, {"steps": 3, "step_size": 0.5}, {"steps": 6, "step_size": 0.5}]
    runs = [
        trained(make_run, f"run{i}", 0.1, {"name": "gaussian", "noise_attack": attack}, ema=0.9 if i else None)
        for i, attack in enumerate(attacks)
    ]
    few, all_ = (write_report(some, tmp_path / "out", ["md"]).contents.hyperparameters for some in (runs[:2], runs))
    assert (few, all_) == ({"ema"}, {"ema", "objective.noise_attack.steps"})


def test_fields_that_earlier_versions_did_not_write_have_their_values(make_run: MakeRun, tmp_path: Path) -> None:
    """They used Nesterov momentum, and no warm-up of the learning rate."""
    earlier = consistency(make_run, 5.0, 0.2, momentum=0.9)
    now = consistency(make_run, 10.0, 0.3, momentum=0.9, nesterov=False, learning_rate_warm_up=0)
    write_report([earlier, now], tmp_path / "out", ["csv"], radii=[0.0])
    rows = list(csv.DictReader((tmp_path / "out/report.csv").open(newline="")))
    assert [row["nesterov"] for row in rows] == ["True", "False"]
    assert "learning_rate_warm_up" not in rows[0]


def test_sweep_over_a_number_with_seeds(make_run: MakeRun, tmp_path: Path) -> None:
    radii = {(5.0, 0): 0.20, (5.0, 1): 0.24, (10.0, 0): 0.30, (10.0, 1): 0.36, (1.0, 0): 0.12}
    runs = [consistency(make_run, weight, radius, seed) for (weight, seed), radius in radii.items()]
    runs.append(trained(make_run, "plain", 0.1, {"name": "gaussian"}))
    report = write_report(runs, tmp_path / "out", ["md", "svg"])
    (sweep,) = report.contents.sweeps
    assert sweep.parameter == "objective.weight"
    assert {value: len(own) for value, own in sweep.runs.items()} == {1.0: 1, 5.0: 2, 10.0: 2}
    assert sweep.reference is not None
    assert sweep.reference.name == "plain"
    figure = draw_sweeps([sweep])
    assert figure is not None
    assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx([0.12, 0.22, 0.33])
    (bars,) = figure.axes[0].collections
    spreads = [0.0, statistics.stdev([0.2, 0.24]), statistics.stdev([0.3, 0.36])]
    lengths = [np.ptp(segment.vertices[:, 1]) / 2 for segment in bars.get_paths()]
    np.testing.assert_allclose(lengths, spreads, atol=1e-12)
    assert "](sweeps.svg)" in (tmp_path / "out/report.md").read_text()
    assert (tmp_path / "out/sweeps.svg").exists()


def test_a_gaussian_run_of_fewer_votes_is_no_reference(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [consistency(make_run, weight, 0.1 + weight / 50) for weight in (1.0, 5.0, 10.0)]
    other = make_run("plain", [image(i, 1, 1, 0.1, n=500) for i in range(5)], objective="gaussian", n=500)
    (other / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "objective": {"name": "gaussian"}}))
    (sweep,) = write_report([*runs, other], tmp_path / "out", ["csv"]).contents.sweeps
    assert len(sweep.runs) == 3
    assert sweep.reference is None


def test_runs_on_other_images_are_no_sweep(make_run: MakeRun) -> None:
    runs = [consistency(make_run, weight, 0.1 + weight / 50) for weight in (1.0, 5.0, 10.0)]
    rows = (runs[2] / "certificates/test.tsv").read_text().splitlines(keepends=True)
    (runs[2] / "certificates/test.tsv").write_text("".join(rows[:-1]))
    for same_images, number in ((True, 1), (False, 0)):
        contents = read_contents(runs, Choices(same_images=same_images))
        assert len(contents.sweeps) == number


def test_only_runs_that_share_all_else_are_one_sweep(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [consistency(make_run, weight, 0.1 + weight / 50) for weight in (1.0, 5.0, 10.0)]
    runs += [consistency(make_run, weight, 0.1 + weight / 50, epochs=2) for weight in (1.0, 5.0)]
    (sweep,) = write_report(runs, tmp_path / "out", ["csv"]).contents.sweeps
    assert [run.name for own in sweep.runs.values() for run in own] == ["w1-seed0", "w5-seed0", "w10-seed0"]
    assert dict(sweep.shared) == {"epochs": 1}


def test_figure_of_sweeps(make_run: MakeRun) -> None:
    """Of single runs, the bars are standard errors over the images."""
    runs = [consistency(make_run, weight, 0.1 * weight, epochs=2) for weight in (1.0, 2.0, 4.0)]
    for run, weight in zip(runs, (1.0, 2.0, 4.0), strict=True):
        shutil.rmtree(run / "certificates")
        make_run(run.name, [image(i, 1, 1, 0.1 * weight * (i % 2)) for i in range(5)], objective="consistency")
    contents = read_contents(runs, Choices())
    figure = draw_sweeps(contents.sweeps * 2)
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_xlabel() == "λ: weight of the method's own term in the loss"
    assert axes.get_ylabel() == "average certified L2 radius (ACR)"
    assert axes.get_title() == "Consistency, MNIST, LeNet, σ = 0.5"
    assert axes.get_xscale() == "log", "each value is twice the one before"
    assert list(axes.lines[0].get_xdata()) == [1.0, 2.0, 4.0]
    (bars,) = axes.collections
    errors = [statistics.stdev([0.1 * w * (i % 2) for i in range(5)]) / 5**0.5 for w in (1.0, 2.0, 4.0)]
    np.testing.assert_allclose([np.ptp(segment.vertices[:, 1]) / 2 for segment in bars.get_paths()], errors)
    note = figure.legends[0].get_title().get_text()
    for part in ("5 images, n = 1,000", "1 standard error over images"):
        assert part in note
    assert draw_sweeps([]) is None


def test_the_axis_of_a_users_method_has_the_name_of_its_field(make_run: MakeRun) -> None:
    objective = {"name": "methods.py:Mine", "weight": 0.0}
    runs = [trained(make_run, f"mine{w}", 0.1 * w, objective | {"weight": float(w)}) for w in (1, 2, 4)]
    figure = draw_sweeps(read_contents(runs, Choices()).sweeps)
    assert figure is not None
    assert figure.axes[0].get_xlabel() == "weight"
