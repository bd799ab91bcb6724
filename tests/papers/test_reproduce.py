"""Reproducing a table: plan, train and certify what is missing, report; interrupted and failed work is kept."""

import csv
import io
import multiprocessing
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import CONTEXT
from tiny import tiny_recipe
from torch import Tensor, nn

from smoothcert.certification.certificates import CertifiedImage, read_certificates, write_certificates
from smoothcert.certification.settings import CertifySettings
from smoothcert.data import ImageData, Split, datasets, mnist
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.compressed import compress
from smoothcert.io.console import PlainConsole
from smoothcert.objectives import Adversary, Consistency, Gaussian, Macer, Objective, SmoothAdv, SmoothMix, Stability
from smoothcert.objectives.inputs_per_image import inputs_per_image
from smoothcert.papers import reproduce as reproduction
from smoothcert.papers.presets import preset
from smoothcert.papers.reproduce import (
    PlannedRun,
    Request,
    missing,
    outcomes,
    plan,
    plan_table,
    run_state,
    share_runs,
    title_of,
    work,
)
from smoothcert.papers.reproduce import estimate as estimates
from smoothcert.papers.reproduce.planning import planned_run
from smoothcert.papers.reproduce.run_state import sizes_of, with_estimate
from smoothcert.papers.rows import paper_runs
from smoothcert.smoothing.certificate import Certificate
from smoothcert.training.checkpoint import InputSpec, load_run
from smoothcert.training.loop import train

CPU = torch.device("cpu")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input of training takes a second, each vote a thousand."""
    monkeypatch.setattr(estimates, "_seconds_per_trained_input", lambda *network: 1.0)
    monkeypatch.setattr(estimates, "_seconds_per_vote", lambda *network: 1000.0)


def names(planned: list[PlannedRun]) -> list[str]:
    return [run.folder.name for run in planned]


def request(**changes: object) -> Request:
    return Request(**({"table": "smoothmix/table2", "out": Path("out"), "device": "cpu"} | changes))  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_clock")
def test_plan_has_the_selected_rows(tmp_path: Path) -> None:
    everything = plan(request(out=tmp_path))
    assert len(everything) == 27
    assert {run.state for run in everything} == {"missing"}
    assert {(run.settings.n, run.settings.skip, run.images) for run in everything} == {(100_000, 1, 10_000)}
    assert all(run.recipe == run.paper.recipe for run in everything)
    some = plan(request(out=tmp_path, sigmas=(0.5, 1.0), methods=("one-STEP",)))
    assert names(some) == [f"smoothmix-eta{eta}-one-step-adversary-{sigma}" for sigma in (0.5, 1.0) for eta in (1, 5)]
    seeds = plan(request(out=tmp_path, sigmas=(0.5,), methods=("macer",), seeds=(0, 3)))
    assert [(run.folder.name, run.recipe and run.recipe.seed) for run in seeds] == [
        ("macer-0.5", 0),
        ("macer-0.5-seed3", 3),
    ]
    assert names(plan(request(out=tmp_path, sigmas=(0.5, 0.5), methods=("macer",), seeds=(1, 0, 1)))) == [
        "macer-0.5-seed1",
        "macer-0.5",
    ]
    two = plan(request(out=tmp_path, sigmas=(0.5,), methods=("macer", "STAB")))
    assert names(two) == ["stability-0.5", "macer-0.5"]
    with pytest.raises(RequestError, match=r"table2: no row has the method 'gausian'; sigmas: 0.25.*methods: Gaussian"):
        plan(request(out=tmp_path, sigmas=(0.5,), methods=("macer", "gausian")))
    table = plan(
        request(out=tmp_path, table="mnist/acr-over-5-seeds", seeds=(1, 4), methods=("macer",), sigmas=(0.25,))
    )
    assert names(table) == ["macer-0.25-seed1", "macer-0.25-seed4"]
    imagenet = plan(request(out=tmp_path, table="smoothmix/table4"))
    assert {(run.settings.skip, run.images) for run in imagenet} == {(100, 500)}


@pytest.mark.usefixtures("no_clock")
def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no row has the sigma.*sigmas: 0.25, 0.5, 1; methods: Gaussian, "):
        plan(request(out=tmp_path, sigmas=(0.3,)))
    with pytest.raises(RequestError, match="none of these rows can be trained: the paper does not give"):
        plan(request(out=tmp_path, table="consistency/table1", methods=("SmoothAdv + Consistency",)))
    with pytest.raises(RequestError, match=r"sigma: expected 0\.5 .*, got 0\.3; choose rows with --sigma"):
        plan(request(out=tmp_path, sigmas=(0.5,), methods=("macer",), overrides=("sigma=0.3",)))
    assert len(plan(request(out=tmp_path, sigmas=(0.5,), methods=("macer",), overrides=("sigma=0.5",)))) == 1
    for fields in ({"seeds": (1, 2)}, {"table": "mnist/acr-over-5-seeds"}):
        with pytest.raises(RequestError, match=r"--set seed: expected \d for the row macer.*, got 1; .* with --seeds"):
            plan(request(out=tmp_path, methods=("macer",), overrides=("seed=1",), **fields))
    assert len(plan(request(out=tmp_path, sigmas=(0.5,), methods=("macer",), overrides=("seed=1",), seeds=(1,)))) == 1
    with pytest.raises(RequestError, match="image_size: expected none for mnist"):
        plan(request(out=tmp_path, methods=("macer",), overrides=("image_size=8",)))
    with pytest.raises(RequestError, match="jobs: expected at least 1, got 0"):
        plan(request(out=tmp_path, jobs=0))
    with pytest.raises(RequestError, match="smoothmix/table2"):
        plan(request(out=tmp_path, table="smoothmix/table20"))
    tiny_recipe().save(tmp_path / "gaussian-0.5" / "recipe.yaml")
    with pytest.raises(RequestError, match=r"gaussian-0\.5: holds a run of another recipe"):
        plan(request(out=tmp_path, methods=("gaussian",)))


@pytest.mark.usefixtures("no_clock")
def test_quick_names_folders_and_keeps_what_an_ablation_varies(tmp_path: Path) -> None:
    (run,) = plan(request(out=tmp_path, quick=True, sigmas=(1.0,), methods=("SmoothMix (eta=5) + one",)))
    assert run.folder.name.startswith("quick-")
    assert run.recipe is not None
    assert (run.recipe.dataset, run.recipe.epochs, run.settings.n, run.images) == ("mnist-sample", 2, 1000, 100)
    # Eight steps of length 1 become one of length 8; the one-step side stays as near as it was.
    assert run.recipe.objective == SmoothMix(num_noise=2, steps=1, step_size=8, one_step=True, one_step_radius=1)
    for table in ("smoothmix/table7", "smoothmix/table9", "consistency/supp-table5"):
        for ablation in plan(request(out=tmp_path, table=table, quick=True)):
            assert ablation.recipe is not None
            assert ablation.paper.recipe is not None
            assert ablation.recipe.objective == ablation.paper.recipe.objective
    architectures = plan(request(out=tmp_path, table="consistency/table4", quick=True))
    assert {run.recipe.model for run in architectures if run.recipe} == {"resnet20", "densenet40"}
    main = plan(request(out=tmp_path, table="smoothmix/table1", quick=True, overrides=("epochs=5",)))
    assert {(run.recipe.model, run.recipe.epochs) for run in main if run.recipe} == {("resnet20", 5)}


@pytest.mark.parametrize(
    ("objective", "inputs"),
    [
        (Gaussian(), 1),
        (Stability(), 1 + 1),
        (Macer(), 16),
        (Consistency(num_noise=3), 3),
        (SmoothAdv(num_noise=4, adversary=Adversary(steps=10)), 4 * 10 + 4),
        (Consistency(num_noise=4, adversary=Adversary(steps=2)), 4 * 2 + 4),
        (SmoothMix(num_noise=4, steps=8), 4 * 8 + 4 + 4),
    ],
    ids=lambda value: value.name if isinstance(value, Objective) else str(value),
)
def test_inputs_per_image_equal_the_formulas(objective: Objective, inputs: int) -> None:
    assert inputs_per_image(objective) == inputs


@pytest.mark.usefixtures("no_clock")
def test_estimate_is_inputs_times_seconds(tmp_path: Path) -> None:
    """Batches of 256 leave 96 of MNIST's 60,000 images out of an epoch."""
    (run,) = plan(request(out=tmp_path, sigmas=(0.5,), methods=("Consistency",), n=400, skip=2, max_images=10))
    assert run.seconds == 90 * (60_000 - 96) * 2 + 1000 * 10 * (400 + 100)
    shown = io.StringIO()
    table = plan_table([replace(run, seconds=9_350), replace(run, seconds=9_350)])
    PlainConsole(file=shown, width=80).print(table)
    assert shown.getvalue().splitlines()[-1].strip() == "estimate for all, one after the other: 5 h 11 min"


def test_a_field_is_set_once(run_cli: Cli, tmp_path: Path) -> None:
    changes = ("--set", "epochs=1", "--set", "epochs=2")
    code, _, err = run_cli("reproduce", "smoothmix/table2", "--quick", *changes, "--out", tmp_path / "out", "--dry-run")
    assert (code, err) == (2, "smoothcert: --set epochs=2: epochs is given twice; leave one out\n")


@pytest.mark.usefixtures("no_clock")
def test_long_work_is_announced_with_what_takes_less(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("reproduce", "smoothmix/table1", "--sigma", 0.5, "--method", "gaussian", "--device", "cpu", "--dry-run")
    for words, advice in ((("--quick",), "a GPU or fewer epochs (--set epochs=1)"), ((), "--quick, fewer votes (--n)")):
        code, shown, _ = run_cli(*asked, *words)
        assert (code, f"fewer rows (--sigma, --method), {advice}" in " ".join(shown.split())) == (0, True)
    for measured in ("_seconds_per_trained_input", "_seconds_per_vote"):
        monkeypatch.setattr(estimates, measured, lambda *network: 1e-6)
    assert "take less" not in run_cli(*asked, "--quick")[1]


@pytest.mark.usefixtures("no_clock")
def test_estimate_has_an_attack_only_in_the_epochs_that_compute_it() -> None:
    recipe, spec = preset("cifar10/sun2024", 0.5), InputSpec((3, 32, 32), 10)
    seconds = estimates.training_seconds(recipe, spec, 2560, 100, CPU)
    assert seconds == 2560 * (20 * 4 + 80 * (4 + 6 * 4)), "six attack steps from epoch 70 of 150 on"


class Viewing(nn.Module):
    """A network that counts on its images lying row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(1, 4, 5), nn.Linear(4 * 24 * 24, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.convolution(images).view(len(images), -1))
        return logits


def test_user_network_is_measured_without_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "_network", lambda name, spec: Viewing())
    recipe = tiny_recipe(model="theirs:Viewing")
    assert estimates.training_seconds(recipe, InputSpec((1, 28, 28), 10), 640, 1, CPU) > 0


def test_estimate_is_proportional_to_epochs() -> None:
    spec = InputSpec((1, 28, 28), 10)
    one, ten = (estimates.training_seconds(tiny_recipe(), spec, 640, epochs, CPU) for epochs in (1, 10))
    assert 0 < one < 600
    assert ten == pytest.approx(10 * one)
    assert 0 < estimates.certification_seconds("lenet", spec, 1000, CPU) < 600


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A few hundred images of the bundled sample."""
    train, test = mnist.load_sample("train"), mnist.load_sample("test")
    path = tmp_path / "few.npz"
    images = {"train_images": train.images[:256, 0], "test_images": test.images[:40, 0]}
    np.savez(path, train_labels=train.labels[:256], test_labels=test.labels[:40], **images)
    return path


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.slow
@pytest.mark.usefixtures("no_clock", "texts_only")
def test_two_rows_in_two_processes_then_resumed_then_damaged(
    run_cli: Cli, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned only; trained and certified, two at once; then only what was deleted; then one is damaged."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: CONTEXT)  # processes that start at once
    out = tmp_path / "out"
    asked = ["reproduce", "consistency/supp-table2", "--sigma", "0.5", "--method", "gaussian", "--quick"]
    small = ["--set", f"dataset=npz:{sample}", "--set", "epochs=1", "--n", 100, "--skip", 2, "--device", "cpu"]
    first, second = (out / f"quick-{name}-0.5" for name in ("gaussian", "gaussian-consistency-lambda5"))
    certificates = Path("certificates/test-n100.tsv")

    code, shown, _ = run_cli(*asked, *small, "--out", out, "--dry-run")
    assert code == 0
    assert all(
        part in shown for part in (first.name, second.name, "1.553", "1.657", "missing", "estimate for all", "quick")
    )
    assert not out.exists()

    code, shown, errors = run_cli(*asked, *small, "--out", out, "--jobs", 2)
    assert (code, errors) == (0, "")
    assert [row.index for row in read_certificates(first / certificates).rows] == list(range(0, 40, 2))
    assert [row.index for row in read_certificates(second / certificates).rows] == list(range(0, 40, 2))
    report = (out / "quick-report" / "report.md").read_text()
    for text in (shown, report):
        assert "quick, scaled-down: not the paper's protocol; 2 of 18 runs" in text
        assert "epochs 1, the paper's 90" in text
        assert all(acr in text for acr in ("1.553", "1.657"))
    assert "not in this table: 16 of the paper's 18 runs, not asked for" in shown
    assert "missing here" not in shown, "reported once"
    rows = (out / "quick-report" / "rows.md").read_text()
    assert (rows.count("| done |"), rows.count("| not asked for |")) == (2, 16)

    before = [contents(first), contents(second)]
    (first / certificates).unlink()
    (first / certificates).with_suffix(".json").unlink()
    code, shown, _ = run_cli(*asked, *small, "--out", out)
    assert (code, shown.count("│ trained "), shown.count("│ done ")) == (0, 1, 1)
    assert len(read_certificates(first / certificates).rows) == 20
    kept = {path: content for path, content in before[0].items() if "certificates" not in path}
    assert {path: content for path, content in contents(first).items() if "certificates" not in path} == kept
    assert contents(second) == before[1]

    (first / "model.safetensors").write_bytes(b"torn")
    code, shown, errors = run_cli(*asked, *small, "--out", out)
    assert (code, shown.count("│ done ")) == (1, 1)
    assert "1 of 2 runs failed" in errors
    assert first.name in errors
    assert f"wrote {out / 'quick-report' / 'report.md'}" in shown
    assert "failed: " in (out / "quick-report" / "rows.md").read_text()
    assert contents(second) == before[1]


def finished_in(out: Path, table: str = "smoothmix/table2", seeds: tuple[int, ...] = (0,)) -> list[PlannedRun]:
    """The row of Gaussian training at sigma 0.5, trained and certified with each seed, as far as its files tell."""
    (paper,) = [run for run in paper_runs(table) if run.name == "gaussian-0.5"]
    assert paper.recipe is not None
    runs = []
    for seed in seeds:
        recipe = paper.recipe.model_copy(update={"seed": seed})
        folder = out / (paper.name + (f"-seed{seed}" if seed else ""))
        settings = CertifySettings(n=40, max_images=1)
        runs.append(PlannedRun(folder, recipe, settings, 1, epochs_done=90, images_done=1, paper=paper))
        recipe.save(folder / "recipe.yaml")
        certify_in(folder, "test-n40", 40)
    return runs


def certify_in(folder: Path, name: str, n: int) -> None:
    row = CertifiedImage(0, 7, Certificate(7, 0.5, 100, n, n, ((7, n),)), 0.1)
    write_certificates(folder / "certificates" / f"{name}.tsv", [row], {"sigma": 0.5, "n": n}, {})


@pytest.fixture
def texts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures, which take their time."""
    monkeypatch.setattr(reproduction, "FORMATS", ("md", "csv"))


def reproduced(asked: Request, planned: list[PlannedRun]) -> str:
    """What `reproduce` prints."""
    shown = io.StringIO()
    reproduction.reproduce([(asked, planned)], PlainConsole(file=shown, width=200))
    return shown.getvalue()


@pytest.mark.usefixtures("texts_only")
def test_report_has_only_the_requested_certificates(tmp_path: Path) -> None:
    """Not what the run was certified to before, and not other files in the folder."""
    planned = finished_in(tmp_path, seeds=(0, 3))
    compress(planned[1].certificates)
    certify_in(planned[0].folder, "test-n20", 20)
    (planned[0].folder / "certificates" / "mine.tsv").write_text("not certificates")
    reproduced(request(out=tmp_path), planned)
    with (tmp_path / "report" / "report.csv").open() as file:
        rows = [(row["name"], row["n"], row["published_row"]) for row in csv.DictReader(file)]
    assert rows == [("gaussian-0.5", "40", "Gaussian"), ("gaussian-0.5-seed3", "40", "Gaussian")]


@pytest.mark.usefixtures("texts_only")
def test_seeds_of_one_row_count_as_one_run(tmp_path: Path) -> None:
    asked = request(out=tmp_path, seeds=(0, 3, 4))
    planned = finished_in(tmp_path, seeds=asked.seeds)
    shown = reproduced(asked, planned)
    assert "smoothmix/table2 (reproduced; seeds: 0, 3, 4; 1 of 27 runs)" in shown
    assert "not in this table: 26 of the paper's 27 runs, not asked for" in shown
    rows = outcomes(asked, planned, {planned[1].folder: "torn", planned[2].folder: "torn"})
    assert title_of(asked, rows) == "smoothmix/table2 (reproduced; seeds: 0, 3, 4; 1 of 27 runs; 2 failed)"
    assert missing(rows) == [
        "not in this table: 26 of the paper's 27 runs, not asked for",
        "not in this table: 2 of 3 runs tried, failed: torn",
    ]
    done = [row for row in rows if row[1] == "gaussian-0.5"]
    assert title_of(request(), done) == "smoothmix/table2 (reproduced)"


@pytest.mark.usefixtures("no_clock")
def test_tables_share_runs_of_the_same_recipe(run_cli: Cli, tmp_path: Path) -> None:
    """No weight of the consistency term is Gaussian training, as is none of SmoothMix's; T = 8 is in both of its."""
    tables = ("smoothmix/table6", "smoothmix/table7", "consistency/supp-table6")
    alone = [plan(request(out=tmp_path, table=table)) for table in tables]
    eta, steps, weight = share_runs(alone)
    assert eta == alone[0]
    assert names(steps) == [*names(alone[1])[:3], "smoothmix-eta1-1.0"]
    assert names(weight) == ["smoothmix-eta0-1.0", *names(alone[2])[1:]]
    assert [run.paper for run in weight] == [run.paper for run in alone[2]]
    assert (steps[3].recipe, steps[3].seconds) == (alone[1][3].recipe, 0)
    assert weight[1:] == alone[2][1:]
    begun = [replace(run, epochs_done=3, seconds=5.0) if run is alone[1][3] else run for run in alone[1]]
    eta, steps, _ = share_runs([alone[0], begun, alone[2]])
    assert eta[1].folder == steps[3].folder == begun[3].folder, "the one that is most advanced"
    assert (eta[1].seconds, steps[3].seconds) == (5, 0)
    changes = {"out": tmp_path, "overrides": ("objective={name: gaussian}",)}
    alike = [plan(request(table=table, **changes)) for table in tables]
    alike[1] = [replace(run, epochs_done=i) for i, run in enumerate(alike[1])]
    assert len({run.recipe for planned in alike for run in planned}) == 1
    assert share_runs(alike) == alike, "each row of a table has a run of its own"
    code, shown, _ = run_cli("reproduce", *tables, "--out", tmp_path, "--device", "cpu", "--dry-run")
    assert (code, shown.count("smoothmix-eta1-1.0"), shown.count("estimate for all")) == (0, 2, 3)
    code, _, error = run_cli("reproduce", *tables, "--dry-run")
    assert (code, "give --out DIR for the runs that 3 tables share" in error) == (2, True)
    code, _, error = run_cli("reproduce", "smoothmix/table1", "smoothmix/table2", "--out", tmp_path, "--dry-run")
    assert code == 2
    assert "gaussian-0.25: expected one recipe, got those of smoothmix/table1 and smoothmix/table2" in error


@pytest.mark.usefixtures("no_clock")
def test_plan_uses_the_run_of_another_table_with_the_same_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(folder: Path, model: str) -> None:
        raise WorkError(f"{folder}: damaged")

    (eta,) = plan(request(out=tmp_path, table="smoothmix/table6", methods=("eta=0",)))
    assert eta.recipe is not None
    eta.recipe.save(eta.folder / "recipe.yaml")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "recipe.yaml").write_text("nonsense")
    weight = request(out=tmp_path, table="consistency/supp-table6")
    assert names(plan(weight))[:2] == ["smoothmix-eta0-1.0", "consistency-lambda1-1.0"]
    assert names(plan(replace(weight, seeds=(0, 1))))[:2] == ["smoothmix-eta0-1.0", "consistency-lambda0-1.0-seed1"]
    other = tmp_path / "another" / "recipe.yaml"
    eta.recipe.save(other)
    monkeypatch.setattr(run_state, "load_run", lambda folder, model: SimpleNamespace(epoch=len(folder.name)))
    (eta.folder / "model.safetensors").touch()
    assert names(plan(weight))[0] == "smoothmix-eta0-1.0", "the one that is most advanced"
    (other.parent / "model.safetensors").touch()
    monkeypatch.setattr(run_state, "load_run", damaged)
    assert names(plan(weight))[0] == "consistency-lambda0-1.0", "none that is damaged"
    own = tmp_path / "consistency-lambda0-1.0" / "recipe.yaml"
    eta.recipe.save(own)
    monkeypatch.setattr(run_state, "load_run", lambda folder, model: SimpleNamespace(epoch=len(folder.name)))
    assert names(plan(weight))[0] == "consistency-lambda0-1.0", "its own, where it has one"
    own.unlink()
    full = [f"{key}={value}" for key, value in eta.recipe.to_mapping().items() if isinstance(value, str | int | list)]
    quick = replace(weight, quick=True, overrides=tuple(full), methods=("lambda=0",))
    assert names(plan(quick)) == ["quick-consistency-lambda0-1.0"], "a full one is no quick one"
    changed = replace(weight, overrides=("objective={name: gaussian}",))
    assert names(plan(changed)) == names(plan(replace(changed, out=tmp_path / "none"))), "rows that are alike"


@pytest.mark.usefixtures("no_clock")
def test_method_may_be_in_another_table_of_the_call(tmp_path: Path) -> None:
    asked = request(out=tmp_path, table="smoothmix/table6", methods=("eta=0", "lambda=0"))
    with pytest.raises(RequestError, match="no row has the method 'lambda=0'"):
        plan(asked)
    assert names(plan(replace(asked, other_tables=("consistency/supp-table6",)))) == ["smoothmix-eta0-1.0"]


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(
    ("tables", "reports"),
    [
        (
            ["smoothmix/table6", "consistency/supp-table6"],
            ["report-smoothmix-table6", "report-consistency-supp-table6"],
        ),
        (["smoothmix/table6", "smoothmix/table6"], ["report"]),
    ],
)
def test_each_table_has_its_own_report(
    tables: list[str], reports: list[str], run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked_on, written = [], []
    monkeypatch.setattr(reproduction, "finish_runs", lambda runs, *rest: worked_on.extend(runs) or {})
    monkeypatch.setattr(reproduction, "show_report", lambda request, *rest: written.append(request.report))
    code, _, error = run_cli("reproduce", *tables, "--out", tmp_path, "--device", "cpu")
    assert (code, error, written) == (0, "", reports)
    assert len(names(worked_on)) == len(set(names(worked_on))) == (14 if len(reports) == 2 else 6)


@pytest.mark.usefixtures("texts_only")
def test_shared_run_is_trained_once_and_reported_in_each_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, worked_on = ("smoothmix/table2", "consistency/supp-table2"), []
    plans = [
        (request(out=tmp_path, table=table, report=f"report-{i}"), finished_in(tmp_path, table))
        for i, table in enumerate(tables)
    ]
    monkeypatch.setattr(reproduction, "finish_runs", lambda runs, *rest: worked_on.extend(runs) or {})
    shown = io.StringIO()
    reproduction.reproduce(plans, PlainConsole(file=shown, width=200))
    assert names(worked_on) == ["gaussian-0.5"]
    for i, table in enumerate(tables):
        assert f"{table} (reproduced; 1 of {(27, 18)[i]} runs)" in shown.getvalue()
        with (tmp_path / f"report-{i}" / "report.csv").open() as file:
            assert [row["published_table"] for row in csv.DictReader(file)] == [table]

    def stumble(request: Request, *rest: object) -> None:
        reports.append(request.table)
        raise OSError(f"no room for {request.table}")

    reports: list[str] = []
    monkeypatch.setattr(reproduction, "show_report", stumble)
    with pytest.raises(WorkError, match=f"{tables[0]} could not be .* for {tables[0]}; .* no room for {tables[1]}"):
        reproduction.reproduce(plans, PlainConsole(file=shown))
    assert reports == list(tables)


@pytest.mark.usefixtures("no_clock")
def test_untrainable_row_is_planned_once(tmp_path: Path) -> None:
    asked = request(out=tmp_path, table="consistency/table1", sigmas=(0.5,), seeds=(1, 2))
    planned = plan(asked)
    unknown = [run.folder.name for run in planned if run.recipe is None]
    assert unknown == ["smoothadv-consistency-lambda5-0.5"]
    assert len(planned) == 2 * len({run.paper.name for run in planned}) - 1


@pytest.mark.usefixtures("texts_only")
@pytest.mark.parametrize("name", ["o[/x]", "o[old]"])
def test_brackets_in_paths_are_printed(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    good, bad = finished_in(out, seeds=(0, 3))
    bad = replace(bad, problem=f"{bad.folder}: torn")
    plan_shown = io.StringIO()
    PlainConsole(file=plan_shown, width=400).print(plan_table([good, bad]))
    assert f"cannot be used: {bad.problem}" in plan_shown.getvalue()
    report = io.StringIO()
    with pytest.raises(WorkError):
        reproduction.reproduce([(request(out=out), [good, bad])], PlainConsole(file=report, width=400))
    assert f"runs tried, failed: {bad.problem}" in report.getvalue()
    assert f"wrote {out / 'report' / 'report.md'}" in report.getvalue()


def test_failed_runs_are_reported_even_if_the_report_fails(tmp_path: Path) -> None:
    good, bad = finished_in(tmp_path, seeds=(0, 3))
    (good.folder / "recipe.yaml").write_text("torn: [")
    with pytest.raises(WorkError, match=r"recipe\.yaml") as alone:
        reproduced(request(out=tmp_path), [good])
    with pytest.raises(WorkError, match=r"1 of 2 runs failed.*gaussian-0\.5-seed3: no weights.*recipe\.yaml") as both:
        reproduced(request(out=tmp_path), [good, replace(bad, problem="no weights")])
    assert str(both.value).endswith(str(alone.value))


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("jobs", [1, 2])
def test_images_are_scaled_to_the_recipes_image_size(jobs: int, tmp_path: Path) -> None:
    """Files of many sizes, which cannot be read without one; the second recipe's is not what its network takes."""
    for number in range(8):
        picture = tmp_path / "pictures" / str(number % 2) / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (36 + number, 40)).save(picture)
    recipe = tiny_recipe(dataset=f"folder:{tmp_path / 'pictures'}", epochs=1, batch_size=8)
    few = CertifySettings(n=10, max_images=2)
    right, wrong = (
        replace(run, recipe=recipe.model_copy(update={"image_size": size}), settings=few)
        for run, size in zip(runs_in(tmp_path / "out", 2), (28, 20), strict=True)
    )
    assert sizes_of(right.known_recipe, request()) == (8, 8)
    assert with_estimate(right, request(), CPU).seconds > 0
    failed = work.train_runs([right, wrong], request(jobs=jobs), QUIET)
    assert list(failed) == [wrong.folder]
    assert "the data has (1, 20, 20)" in failed[wrong.folder]
    assert load_run(right.folder).spec.shape == (1, 28, 28)
    work.certify(right, request(jobs=jobs))
    assert [row.index for row in read_certificates(right.certificates).rows] == [0, 1]


def runs_in(folder: Path, count: int) -> list[PlannedRun]:
    (paper,) = [run for run in paper_runs("smoothmix/table2") if run.name == "gaussian-0.5"]
    settings = CertifySettings(n=100)
    return [PlannedRun(folder / str(number), paper.recipe, settings, 10, paper=paper) for number in range(count)]


QUIET = PlainConsole(quiet=True)


def test_full_disk_does_not_stop_the_other_runs(tmp_path: Path, tiny_data: ImageData) -> None:
    runs, limit = runs_in(tmp_path, 2), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        failed = work.in_turn(runs, lambda run: train(tiny_recipe(epochs=1), tiny_data, run.folder, device="cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert set(failed) == {run.folder for run in runs}
    assert all("could not be written to (File too large)" in reason for reason in failed.values())


def test_processes_share_the_cores_and_report_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, shown = runs_in(tmp_path, 2), io.StringIO()

    def call(calls: object, jobs: int, environment: dict[str, str], on_end: Callable[..., None]) -> dict[Path, str]:
        assert environment["OMP_NUM_THREADS"] == str(max(1, torch.get_num_threads() // jobs))
        on_end(runs[1].folder, None, 2.2)
        on_end(runs[0].folder, "the loss diverged", 75.4)
        return {runs[0].folder: "the loss diverged"}

    monkeypatch.setattr(work, "call_in_processes", call)
    failed = work.finish_in_processes(runs, request(jobs=2), PlainConsole(file=shown))
    assert failed == {runs[0].folder: "the loss diverged"}
    assert shown.getvalue() == "finished 1 (1 of 2, 2 s)\nfailed 0 (2 of 2, 75 s)\n"


def test_runs_trained_together_equal_runs_trained_alone(tmp_path: Path, sample: Path) -> None:
    """Two of them; one whose batches are larger than the data, and one whose data are not there, fail alone."""
    data = (sample, sample, sample, tmp_path / "absent.npz")
    runs = [
        replace(run, recipe=tiny_recipe(dataset=f"npz:{path}", epochs=1, seed=seed, batch_size=size))
        for run, path, seed, size in zip(runs_in(tmp_path, 4), data, (0, 1, 2, 3), (64, 64, 512, 64), strict=True)
    ]
    failed = work.train_runs(runs, request(jobs=2), QUIET)
    assert failed.keys() == {runs[2].folder, runs[3].folder}
    assert "expected a file, got nothing at" in failed[runs[3].folder]
    assert "batch_size: expected at most the 256 training images, got 512" in failed[runs[2].folder]
    work.train_run(replace(runs[1], folder=tmp_path / "alone"), request())
    together, alone = (load_run(folder).model.state_dict() for folder in (runs[1].folder, tmp_path / "alone"))
    assert all(torch.equal(together[name], alone[name]) for name in alone)


def test_in_turn_continues_after_a_failure(tmp_path: Path) -> None:
    seen = []

    def fail_first(run: PlannedRun) -> None:
        seen.append(run.folder.name)
        if run.folder.name == "0":
            raise WorkError("the loss\ndiverged")

    assert work.in_turn(runs_in(tmp_path, 3), fail_first) == {tmp_path / "0": "the loss diverged"}
    assert seen == ["0", "1", "2"]


def test_runs_that_failed_for_one_reason_are_named_together() -> None:
    failed = {Path("runs/a"): "no data", Path("runs/b"): "the loss diverged", Path("runs/c"): "no data"}
    shown = work.failures_in_words(failed, 5)
    assert shown.startswith("3 of 5 runs failed")
    assert shown.endswith("(a, c: no data; b: the loss diverged)")


def test_notes_about_images_are_printed_once_and_a_trained_run_needs_no_training_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, shown = runs_in(tmp_path, 2), io.StringIO()

    def load(name: str, split: Split, *_: object, **__: object) -> ImageData:
        return replace(mnist.load_sample(split), notes=(f"the {split} images are few",))

    monkeypatch.setattr(datasets, "load_dataset", load)
    work.print_notes(runs, request(), PlainConsole(file=shown))
    assert shown.getvalue() == "note: the train images are few\nnote: the test images are few\n"
    work.print_notes([replace(run, epochs_done=90) for run in runs], request(), PlainConsole(file=shown))
    assert (shown.getvalue().count("train"), shown.getvalue().count("test")) == (1, 2)


@pytest.mark.usefixtures("no_clock")
def test_each_part_of_a_data_set_is_read_once(tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the estimate, the notes, the training and the certification of all runs together."""
    read, load = list[str](), datasets.load_dataset

    def counted(name: str, split: Split, *rest: Any, **options: Any) -> Any:
        read.append(split)
        return load(name, split, *rest, **options)

    monkeypatch.setattr(datasets, "load_dataset", counted)
    recipe, asked = tiny_recipe(dataset=f"npz:{sample}", epochs=1), request()
    few = CertifySettings(n=10, max_images=2)
    runs = [replace(run, recipe=recipe, settings=few) for run in runs_in(tmp_path, 2)]
    assert work.finish_runs([with_estimate(run, asked, CPU) for run in runs], asked, QUIET) == {}
    assert all(run.certificates.exists() for run in runs)
    assert sorted(read) == ["test", "train"]


def test_a_process_trains_only_if_epochs_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(work, "train_run", lambda run, *rest: calls.append(f"train {run.folder.name}"))
    monkeypatch.setattr(work, "certify", lambda run, *rest: calls.append(f"certify {run.folder.name}"))
    (run,) = runs_in(tmp_path, 1)
    work.finish_run(run, request())
    work.finish_run(replace(run, epochs_done=90), request())
    assert calls == ["train 0", "certify 0", "certify 0"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_full_disk_fails_only_the_run_that_is_too_large(jobs: int, tmp_path: Path, sample: Path) -> None:
    """The weights of the first run are larger than a file may be; those of the second are not."""
    resource = pytest.importorskip("resource")
    (tmp_path / "small_for_test.py").write_text(
        "from torch import nn\ndef build(): return nn.Sequential(nn.AvgPool2d(14), nn.Flatten(), nn.Linear(4, 10))"
    )
    recipes = [
        tiny_recipe(dataset=f"npz:{sample}", model=model, epochs=1) for model in ("lenet", "small_for_test:build")
    ]
    large, small = (replace(run, recipe=r) for run, r in zip(runs_in(tmp_path / "out", 2), recipes, strict=True))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            failed = work.train_runs([large, small], request(jobs=jobs), QUIET)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(failed) == [large.folder]
        assert "\n" not in failed[large.folder]
        assert load_run(small.folder, "small_for_test:build").finished


def test_compile_option_reaches_the_votes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def certified(run: object, data: object, path: Path, settings: CertifySettings, **rest: object) -> None:
        seen.append(settings.compile)

    monkeypatch.setattr(work, "certify_dataset", certified)
    monkeypatch.setattr(work, "load_run", lambda folder, code: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: mnist.load_sample("test"))
    (paper,) = [run for run in paper_runs("smoothmix/table2") if run.name == "gaussian-0.5"]
    for wanted in (False, True):
        work.certify(planned_run(request(out=tmp_path, compile=wanted), paper, None), request())
    assert seen == [False, True]
