"""Each printed row has a recipe or a reason; a finished run finds its row and its differences from the paper."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.io.results import read_settings, settings_path, write_settings
from smoothcert.objectives import Consistency, Gaussian, Macer, SmoothAdv, SmoothMix
from smoothcert.papers.presets import PRESETS, preset
from smoothcert.papers.rows import PaperRun, differences_from, paper_runs, published, published_for
from smoothcert.papers.tables import paper_table, paper_table_names
from smoothcert.report import Published
from smoothcert.training.recipe import TrainRecipe, with_overrides

EVERY_RUN = [run for table in paper_table_names() for run in paper_runs(table)]


def only(table: str, label: str, sigma: float) -> PaperRun:
    (run,) = [run for run in paper_runs(table) if (run.label, run.sigma) == (label, sigma)]
    return run


@pytest.mark.parametrize("table", paper_table_names())
def test_runs_cover_each_row_of_each_table_in_order(table: str) -> None:
    runs = paper_runs(table)
    rows: list[object] = []
    for run in runs:
        if not rows or rows[-1] != run.row:
            rows.append(run.row)
    assert rows == paper_table(table)
    assert len({run.name for run in runs}) == len(runs)
    assert all((run.recipe is None) == (run.reason is not None) for run in runs)
    assert all(re.fullmatch(r"[a-z0-9.-]+", run.name) for run in runs)


def test_published_row_of_a_preset_has_its_recipe() -> None:
    found = 0
    for chosen in PRESETS.values():
        for sigma, (table, columns) in chosen.published.items():
            for run in paper_runs(table):
                printed = {**run.row, "sigma": str(run.sigma)}
                if all(printed.get(k) == str(v) or _number(printed.get(k)) == v for k, v in columns.items()) and (
                    run.sigma == sigma
                ):
                    assert run.recipe == chosen.recipe(sigma), (table, columns)
                    assert run.acr == chosen.published_acr(sigma)
                    found += 1
    assert found > 100


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


@pytest.mark.parametrize("table", paper_table_names())
def test_recipe_has_the_values_that_its_row_prints(table: str) -> None:
    """The printed columns and the numbers inside the label, compared with the objective's own fields."""
    for run in paper_runs(table):
        if run.recipe is not None:
            assert_as_printed(run, run.recipe)


def assert_as_printed(run: PaperRun, recipe: TrainRecipe) -> None:
    assert recipe.sigma == run.sigma == float(run.row.get("sigma", run.sigma))
    objective = recipe.objective
    printed = {**run.row, **dict(re.findall(r"(lambda|eta)=(\d+)\)", run.row.get("method", "")))}
    if "0" in (printed.get("lambda"), printed.get("eta")):
        assert objective == Gaussian()
        return
    fields = {"lambda": "weight", "eta": "eta", "m": "num_noise", "epsilon": "max_norm"}
    for column, field in fields.items():
        if column in printed:
            limit = getattr(objective, field)
            assert (float("inf") if limit is None else limit) == float(printed[column])
    if "alpha_T" in printed:
        assert isinstance(objective, SmoothMix)
        assert f"{objective.step_size}x{objective.steps}" == printed["alpha_T"]
    if isinstance(objective, SmoothMix) and "sigma" in printed and recipe.dataset != "imagenet":
        assert objective.one_step == ("one-step" in printed.get("method", ""))


def test_settings_that_no_column_prints() -> None:
    """The runtime table repeats rows of the main table; networks, seeds and the data set are the table's."""
    runtime = {run.label: run for run in paper_runs("consistency/table3")}
    main = {run.acr: run.recipe for run in paper_runs("consistency/table1") if run.sigma == 0.5}
    assert all(run.recipe == main[run.acr] for run in runtime.values())
    assert {run.recipe.model for run in paper_runs("consistency/table4") if run.recipe} == {"resnet20", "densenet40"}
    stability = [run for run in paper_runs("consistency/supp-table7") if run.label == "Stability (lambda=5,10,20)"]
    weights = [run.recipe.objective.model_dump()["weight"] for run in stability if run.recipe]
    assert weights == [5, 10, 20] * 3
    seeds = paper_runs("mnist/acr-over-5-seeds")
    assert len(seeds) == 10 * 3 * 5
    assert [run.recipe.seed for run in seeds if run.recipe] == [0, 1, 2, 3, 4] * 30
    assert {run.acr for run in seeds if run.label == "MACER"} == {0.9201, 1.5899, 1.5950}
    best = only("consistency/table1", "SmoothAdv + hyperparameter search", 1.0).recipe
    assert best is not None
    assert isinstance(best.objective, SmoothAdv)
    assert (best.objective.num_noise, best.objective.adversary.epsilon) == (2, 2.0)
    macer = only("consistency/table4", "DenseNet-40, MACER", 0.5).recipe
    assert macer is not None
    assert macer.objective == Macer(weight=4)
    assert (macer.epochs, macer.learning_rate, macer.model) == (150, 0.1, "densenet40")
    zhai = only("consistency/table1", "MACER", 0.5).recipe
    assert zhai is not None
    assert (zhai.epochs, zhai.learning_rate, zhai.model) == (440, 0.01, "resnet110")
    imagenet = only("consistency/table2", "Gaussian + Consistency (lambda=10)", 0.5).recipe
    assert imagenet is not None
    assert (imagenet.dataset, imagenet.objective) == ("imagenet", Consistency(weight=10))


def test_unpublished_settings_are_not_guessed() -> None:
    unknown = [run for run in EVERY_RUN if run.recipe is None]
    assert {(run.table, run.label.split(" (")[0]) for run in unknown} == {
        ("consistency/table1", "SmoothAdv + Consistency")
    }
    assert len(unknown) == 3
    first_version = [run for run in EVERY_RUN if run.remark and "second softmax" in run.remark]
    assert {run.table for run in first_version} == {f"consistency/table{number}" for number in (1, 2, 3, 4)}
    assert all(run.recipe and isinstance(run.recipe.objective, Consistency) for run in first_version)
    assert {run.table for run in first_version if "probably" in str(run.remark)} == {"consistency/table4"}


def test_rows_for_which_the_papers_print_different_numbers_name_the_other() -> None:
    """SmoothMix's tables have new runs of two methods that the Consistency paper has too."""
    differing = {(run.label, run.sigma, run.acr): run.remark for run in EVERY_RUN if "prints ACR" in str(run.remark)}
    mnist, cifar10 = ("consistency/supp-table2", "smoothmix/table2"), ("consistency/table1", "smoothmix/table1")
    numbers = {("MACER", 1.0): (mnist, 1.570, 1.598)}
    numbers |= {("SmoothAdv", 0.5): (cifar10, 0.689, 0.684), ("SmoothAdv", 1.0): (cifar10, 0.682, 0.660)}
    expected = {}
    for (label, sigma), ((first, second), here, there) in numbers.items():
        expected[label, sigma, here] = f"{second} prints ACR {there:.3f} for this row"
        expected[label, sigma, there] = f"{first} prints ACR {here:.3f} for this row"
    assert differing == expected


def test_published_numbers_as_printed() -> None:
    run = only("smoothmix/table2", "SmoothMix (eta=5)", 1.0)
    assert run.acr == 1.820
    assert run.accuracy_at[0.0] == 93.7
    assert run.accuracy_at[2.75] == 21.5
    assert len(run.accuracy_at) == 12


def certificates(folder: Path, recipe: TrainRecipe | None, epoch: object = None, **settings: object) -> Path:
    """An empty certificates file in a run folder, with its settings."""
    path = folder / "certificates" / "test.tsv"
    path.parent.mkdir(parents=True)
    path.write_text("")
    if recipe is not None:
        recipe.save(folder / "recipe.yaml")
    provenance = {} if epoch is None else {"epoch": epoch}
    path.with_suffix(".json").write_text(json.dumps({"settings": settings, "provenance": provenance}))
    return path


def row_in(table: str) -> Callable[[Path], Published | None]:
    """From a certificates file to its row of `table`, by the settings next to the file."""
    find = published_for(table)
    return lambda path: find(file_at(path))


def file_at(path: Path) -> CertificatesFile:
    stored = read_settings(path) if settings_path(path).exists() else {"settings": {}, "provenance": {}}
    return CertificatesFile(path, (), **stored)


@pytest.mark.parametrize("table", paper_table_names())
def test_each_run_finds_its_row(table: str, tmp_path: Path) -> None:
    find = row_in(table)
    for run in paper_runs(table):
        if run.recipe is not None and run.recipe.seed == 0:
            row = find(certificates(tmp_path / run.name, run.recipe))
            assert row is not None
            assert (row.label, row.acr, row.accuracy_at) == (run.label, run.acr, run.accuracy_at)
            assert row.differences == ((run.remark,) if run.remark else ())


def test_differences_from_the_paper_are_reported(tmp_path: Path) -> None:
    find = row_in("smoothmix/table2")
    changed = with_overrides(
        preset("mnist/smoothmix", 0.5), ["epochs=2", "dataset=mnist-sample", "learning_rate_drops=[1]", "seed=7"]
    )
    row = find(certificates(tmp_path / "a", changed, epoch=1))
    assert row is not None
    assert row.label == "SmoothMix (eta=5)"
    assert row.differences == (
        "data mnist-sample, the paper's mnist",
        "epochs 2, the paper's 90",
        "learning-rate drops [1], the paper's [31, 61]",
        "certified after 1 of its 2 epochs",
    )
    other = with_overrides(preset("mnist/smoothmix", 0.5), ["objective.eta=4"])
    assert find(certificates(tmp_path / "b", other)) is None
    assert find(certificates(tmp_path / "c", preset("mnist/smoothmix", 0.3))) is None


def test_changes_of_the_weights_and_a_denoiser_are_reported(tmp_path: Path) -> None:
    """The recipe of such a run is the paper's, its classifier is not."""
    path = certificates(tmp_path / "a", preset("mnist/smoothmix", 0.5), denoiser={"model": "unet"})
    stored = json.loads(path.with_suffix(".json").read_text())
    changes = {"init": {"file": "a.pt"}, "batch_norm": {"sigma": 0.5}, "learning_rate_warm_up": 1}
    stored["provenance"] = {"model": {"precision": "fp32", **changes}}
    path.with_suffix(".json").write_text(json.dumps(stored))
    row = row_in("smoothmix/table2")(path)
    assert row is not None
    assert row.differences == (
        "started again, after a dead start, with 1 epoch of learning-rate warm-up",
        "trained from given weights",
        "batch norm adapted to noise after training",
        "certified behind a denoiser",
    )


def test_changed_hyper_parameters_are_reported(tmp_path: Path) -> None:
    run = only("consistency/supp-table2", "SmoothAdv + Consistency (lambda=1)", 0.5)
    assert run.recipe is not None
    changed = with_overrides(run.recipe, ["objective.num_noise=2", "objective.adversary.steps=2"])
    row = published(run, changed, file_at(certificates(tmp_path / "a", changed)))
    assert row.acr == 1.697
    assert row.differences == ("num_noise 2, the paper's 4", "adversary.steps 2, the paper's 10")


def test_every_changed_field_of_a_recipe_is_reported() -> None:
    """All fields of a recipe, but for the seed and the precision, which the provenance knows better."""
    paper = preset("mnist/gaussian", 0.5)
    others = {
        "dataset": "mnist-sample",
        "image_size": 28,
        "augment": "crop",
        "model": "resnet20",
        "sigma": 0.3,
        "noise": "laplace",
        "objective": "macer",
        "epochs": 2,
        "batch_size": 32,
        "learning_rate": 0.5,
        "learning_rate_drops": "[1]",
        "learning_rate_warm_up": 1,
        "momentum": 0.5,
        "nesterov": "true",
        "weight_decay": 0.5,
        "optimizer": "adamw",
        "schedule": "cosine",
        "ema": 0.9,
        "sampler": "radius-weighted",
    }
    left_out = {"seed", "precision", "teacher", "teacher_votes"}
    assert set(others) == set(TrainRecipe.model_fields) - left_out, "give each field of a recipe another value here"
    for field, value in others.items():
        assert differences_from(paper, with_overrides(paper, [f"{field}={value}"])), field
    assert differences_from(paper, with_overrides(paper, ["sigma=0.3"])) == ["sigma 0.3, the paper's 0.5"]
    taught = preset("mnist/catrs", 0.5)
    assert differences_from(taught, taught) == []
    for override, expected in {
        "teacher.epochs=3": f"teacher.epochs 3, the paper's {taught.teacher.epochs}",  # type: ignore[union-attr]
        "teacher_votes=5": f"votes of the teacher 5, the paper's {taught.teacher_votes}",
    }.items():
        assert differences_from(taught, with_overrides(taught, [override])) == [expected]


@pytest.mark.parametrize("epoch", ["x", None, [1], 90])
def test_invalid_epoch_is_not_compared(epoch: object, tmp_path: Path) -> None:
    row = row_in("smoothmix/table2")(certificates(tmp_path / "a", preset("mnist/gaussian", 0.5), epoch))
    assert row is not None
    assert row.differences == ()


@pytest.mark.parametrize("recorded_in", ["certificates", "model"])
@pytest.mark.parametrize(
    ("asked", "trained", "reported"),
    [("auto", "bf16", True), ("auto", "fp32", False), ("bf16", None, True), ("fp32", None, False)],
)
def test_precision_of_training_is_reported(
    asked: str, trained: str | None, reported: bool, recorded_in: str, tmp_path: Path
) -> None:
    recipe = with_overrides(preset("mnist/gaussian", 0.5), [f"precision={asked}"])
    path = certificates(tmp_path / "a", recipe)
    if trained is not None and recorded_in == "certificates":
        write_settings(path, {}, {"model": {"precision": trained}})
    elif trained is not None:
        about = json.dumps({"provenance": {"precision": trained}})
        save_file({"weight": torch.zeros(1)}, tmp_path / "a" / "model.safetensors", metadata={"smoothcert": about})
    row = row_in("smoothmix/table2")(path)
    assert row is not None
    assert row.differences == (("precision bf16, the paper's fp32",) if reported else ())


def test_a_damaged_model_does_not_hide_the_row_of_its_certificates(tmp_path: Path) -> None:
    path = certificates(tmp_path / "a", preset("mnist/gaussian", 0.5))
    (tmp_path / "a" / "model.safetensors").write_bytes(b"damaged")
    row = row_in("smoothmix/table2")(path)
    assert row is not None
    assert row.differences == ()


def test_networks_are_compared_if_the_table_compares_them(tmp_path: Path) -> None:
    recipe = with_overrides(preset("cifar10/gaussian", 0.5), ["model=densenet40"])
    path = certificates(tmp_path / "a", recipe)
    row = row_in("consistency/table4")(path)
    assert row is not None
    assert (row.label, row.acr, row.differences) == ("DenseNet-40, Gaussian", 0.494, ())
    elsewhere = row_in("smoothmix/table1")(path)
    assert elsewhere is not None
    assert elsewhere.differences == ("network densenet40, the paper's resnet110",)
    assert row_in("consistency/table4")(certificates(tmp_path / "b", preset("cifar10/gaussian", 0.5))) is None


def test_run_on_another_data_set_has_no_row(tmp_path: Path) -> None:
    """The two main tables have rows of the same objective and sigma, one on CIFAR-10, the other on MNIST."""
    cifar10, mnist = row_in("smoothmix/table1"), row_in("smoothmix/table2")
    recipe = preset("mnist/gaussian", 0.5)
    for name, dataset, found in (("a", "mnist", True), ("b", "mnist-sample", True), ("c", "npz:mnist", False)):
        path = certificates(tmp_path / name, with_overrides(recipe, [f"dataset={dataset}"]))
        assert cifar10(path) is None
        assert (mnist(path) is not None) == found
    assert mnist(certificates(tmp_path / "d", preset("cifar10/gaussian", 0.5))) is None
    for name, dataset in (("e", "cifar10"), ("f", "cifar10 (not the official files)"), ("g", None)):
        known = {} if dataset is None else {"dataset": dataset}
        path = certificates(tmp_path / name, None, objective="gaussian", sigma=0.5, **known)
        row = cifar10(path)
        assert row is not None
        assert (row.table, row.label) == ("smoothmix/table1", "Gaussian")
        assert (mnist(path) is None) == (dataset is not None)
    assert cifar10(certificates(tmp_path / "h", None, objective="gaussian", sigma=0.5, dataset="mnist")) is None


def test_file_without_recipe_is_matched_by_its_settings(tmp_path: Path) -> None:
    find = row_in("smoothmix/table2")
    row = find(certificates(tmp_path / "a", None, objective="macer", sigma=1.0))
    assert row is not None
    assert (row.label, row.acr) == ("MACER", 1.598)
    other = "consistency/supp-table2 prints ACR 1.570 for this row"
    assert row.differences == ("how it was trained is not recorded", other)
    named = find(certificates(tmp_path / "b", None, objective="SmoothMix (eta=5)", sigma=0.5))
    assert named is not None
    assert named.acr == 1.694
    assert find(certificates(tmp_path / "c", None, objective="smoothmix", sigma=0.5)) is None
    assert find(certificates(tmp_path / "d", None, objective="macer", sigma=0.3)) is None
    assert find(certificates(tmp_path / "e", None)) is None
    # Gaussian + Consistency alone can be trained by us, but SmoothAdv + Consistency is called the same.
    unclear = certificates(tmp_path / "f", None, objective="consistency", sigma=0.25)
    assert row_in("consistency/table1")(unclear) is None
    bare = tmp_path / "noise_0.25"
    bare.write_text("")
    assert find(bare) is None


def test_imported_model_is_matched_without_recipe(tmp_path: Path) -> None:
    path = certificates(tmp_path / "a", None, objective="gaussian", sigma=0.5)
    (tmp_path / "a" / "recipe.yaml").write_text("dataset: mnist\nmodel: lenet\nsigma: 0.5\n")
    row = row_in("smoothmix/table2")(path)
    assert row is not None
    assert row.label == "Gaussian"


def test_cross_entropy_rows_are_trained_in_the_form_of_their_numbers() -> None:
    """The paper's table of loss forms repeats rows of its other tables there: those are trained, and a run says so."""
    rows = {
        run.row["lambda"]: run for run in paper_runs("consistency/supp-table4") if run.row["loss"] == "cross-entropy"
    }
    elsewhere = {run.row["lambda"]: run for run in paper_runs("consistency/supp-table6")}
    assert set(rows) == {"5", "20"}
    for weight, run in rows.items():
        assert abs(run.acr - elsewhere[weight].acr) < 1e-9
        assert run.recipe == elsewhere[weight].recipe
        assert "of which the paper prints the numbers here" in run.remark


def test_published_row_names_all_rows_of_the_table(tmp_path: Path) -> None:
    row = row_in("smoothmix/table2")(certificates(tmp_path / "a", preset("mnist/macer", 0.5)))
    assert row is not None
    assert row.row == "macer-0.5"
    assert row.rows == tuple(run.name for run in paper_runs("smoothmix/table2"))


def test_untrainable_rows_are_not_reported_as_missing(tmp_path: Path) -> None:
    recipe = only("consistency/table1", "Gaussian", 0.5).recipe
    row = row_in("consistency/table1")(certificates(tmp_path / "a", recipe))
    assert row is not None
    assert set(row.rows) == {run.name for run in paper_runs("consistency/table1") if run.recipe is not None}
    assert len(row.rows) < len(paper_runs("consistency/table1"))
