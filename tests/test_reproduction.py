"""A table reproduced: planned, trained and certified where missing, reported; interrupted and failed work is kept."""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny import tiny_recipe

from smoothcert import cli
from smoothcert.certificates import read_certificates
from smoothcert.checkpoint import InputSpec, load_run
from smoothcert.cli.several import split
from smoothcert.data import mnist_sample
from smoothcert.errors import RequestError, WorkError
from smoothcert.objectives import Adversary, Consistency, Gaussian, Macer, Objective, SmoothAdv, SmoothMix, Stability
from smoothcert.paper_runs import paper_runs
from smoothcert.recipe import load_train_recipe
from smoothcert.reproduction import PlannedRun, Request, duration, plan, plan_table, work
from smoothcert.reproduction import estimate as estimates

CPU = torch.device("cpu")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["smoothcert", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return call


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
def test_a_plan_has_the_rows_asked_for(tmp_path: Path) -> None:
    everything = plan(request(out=tmp_path))
    assert len(everything) == 27
    assert {run.state for run in everything} == {"missing"}
    assert {(run.n, run.skip, run.images) for run in everything} == {(100_000, 1, 10_000)}
    assert all(run.recipe == run.paper.recipe for run in everything)
    some = plan(request(out=tmp_path, sigmas=(0.5, 1.0), method="one-STEP"))
    assert names(some) == [f"smoothmix-eta{eta}-one-step-adversary-{sigma}" for sigma in (0.5, 1.0) for eta in (1, 5)]
    seeds = plan(request(out=tmp_path, sigmas=(0.5,), method="macer", seeds=(0, 3)))
    assert [(run.folder.name, run.recipe and run.recipe.seed) for run in seeds] == [
        ("macer-0.5", 0),
        ("macer-0.5-seed3", 3),
    ]
    table = plan(request(out=tmp_path, table="mnist/acr-over-5-seeds", seeds=(1, 4), method="macer", sigmas=(0.25,)))
    assert names(table) == ["macer-0.25-seed1", "macer-0.25-seed4"]
    imagenet = plan(request(out=tmp_path, table="smoothmix/table4"))
    assert {(run.skip, run.images) for run in imagenet} == {(100, 500)}


@pytest.mark.usefixtures("no_clock")
def test_wrong_requests_cost_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no row has the sigma.*sigmas: 0.25, 0.5, 1; methods: Gaussian, "):
        plan(request(out=tmp_path, sigmas=(0.3,)))
    with pytest.raises(RequestError, match="none of these rows can be trained: the paper does not tell"):
        plan(request(out=tmp_path, table="consistency/table1", method="SmoothAdv + Consistency"))
    with pytest.raises(RequestError, match="jobs: expected at least 1, got 0"):
        plan(request(out=tmp_path, jobs=0))
    with pytest.raises(RequestError, match="smoothmix/table2"):
        plan(request(out=tmp_path, table="smoothmix/table20"))
    tiny_recipe().save(tmp_path / "gaussian-0.5" / "recipe.yaml")
    with pytest.raises(RequestError, match=r"gaussian-0\.5: holds a run of another recipe"):
        plan(request(out=tmp_path, method="gaussian"))


@pytest.mark.usefixtures("no_clock")
def test_quick_says_so_and_keeps_what_an_ablation_varies(tmp_path: Path) -> None:
    (run,) = plan(request(out=tmp_path, quick=True, sigmas=(1.0,), method="SmoothMix (eta=5) + one"))
    assert run.folder.name.startswith("quick-")
    assert run.recipe is not None
    assert (run.recipe.dataset, run.recipe.epochs, run.n, run.images) == ("mnist-sample", 2, 1000, 100)
    # Eight steps of length 1 become one of length 8; the one-step side stays as near as it was.
    assert run.recipe.objective == SmoothMix(num_noise=2, steps=1, step_size=8, one_step=True, one_step_radius=1)
    assert "not the paper's protocol" in str(plan_table(request(quick=True), [run]).title)
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
def test_inputs_are_counted_as_the_formulas_say(objective: Objective, inputs: int) -> None:
    assert estimates.inputs_per_image(objective) == inputs


@pytest.mark.usefixtures("no_clock")
def test_an_estimate_is_inputs_times_seconds(tmp_path: Path) -> None:
    """Batches of 256 leave 96 of MNIST's 60,000 images out of an epoch."""
    (run,) = plan(request(out=tmp_path, sigmas=(0.5,), method="Consistency", n=400, skip=2, max_images=10))
    assert run.seconds == 90 * (60_000 - 96) * 2 + 1000 * 10 * (400 + 100)
    shown = str(plan_table(request(), [replace(run, seconds=9_350), replace(run, seconds=9_350)]).caption)
    assert shown == "estimate for all, one after the other: 5.2 h"
    assert [duration(s) for s in (12, 150, 20_000, 400_000)] == ["12 s", "2.5 min", "5.6 h", "4.6 days"]


def test_a_measurement_grows_with_the_work() -> None:
    spec = InputSpec((1, 28, 28), 10)
    one, ten = (estimates.training_seconds(tiny_recipe(), spec, 640, epochs, CPU) for epochs in (1, 10))
    assert 0 < one < 600
    assert ten == pytest.approx(10 * one)
    assert 0 < estimates.certification_seconds("lenet", spec, 1000, CPU) < 600


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A few hundred images of the bundled sample."""
    train, test = mnist_sample.load("train"), mnist_sample.load("test")
    path = tmp_path / "few.npz"
    images = {"train_images": train.images[:256, 0], "test_images": test.images[:40, 0]}
    np.savez(path, train_labels=train.labels[:256], test_labels=test.labels[:40], **images)
    return path


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.slow
@pytest.mark.usefixtures("no_clock")
def test_two_rows_end_to_end(run_cli: Cli, sample: Path, tmp_path: Path) -> None:
    """Planned only; trained and certified, two at once; then only what was deleted; then one is damaged."""
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


def runs_in(folder: Path, count: int) -> list[PlannedRun]:
    (paper,) = [run for run in paper_runs("smoothmix/table2") if run.name == "gaussian-0.5"]
    return [PlannedRun(paper, folder / str(number), paper.recipe, 100, 1, None, 10) for number in range(count)]


def workshop(jobs: int) -> work.Workshop:
    return work.Workshop(jobs, "cpu", None, Console(quiet=True))


def python_in_place_of_smoothcert(
    monkeypatch: pytest.MonkeyPatch, codes: Mapping[str, str]
) -> list["subprocess.Popen[bytes]"]:
    """Folder name -> what its process does, as Python code; the processes that were started."""
    monkeypatch.setattr(work, "commands", lambda run, workshop: [str(run.folder)])
    started: list[subprocess.Popen[bytes]] = []
    genuine = subprocess.Popen

    def start(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        started.append(genuine([sys.executable, "-c", codes[Path(command[-1]).name]], **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_processes_that_fail_are_told_and_the_others_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {
        "0": "import os; print(os.environ['OMP_NUM_THREADS'])",
        "1": "import sys; print('at epoch 3'); sys.exit('smoothcert: the loss diverged')",
        "2": "import os; print('at epoch 4', flush=True); os.kill(os.getpid(), 9)",
        "3": "import time; time.sleep(0.3)",
    }
    started = python_in_place_of_smoothcert(monkeypatch, codes)
    failed = work.at_once(runs_in(tmp_path, 4), workshop(2))
    assert failed == {
        tmp_path / "1": "the loss diverged",
        tmp_path / "2": "killed by signal 9, last seen at: at epoch 4",
    }
    assert len(started) == 4
    threads = int((tmp_path / "0" / work.LOG).read_text())
    assert threads == max(1, torch.get_num_threads() // 2)


def test_no_more_than_the_jobs_run_at_once_and_none_outlives_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = python_in_place_of_smoothcert(monkeypatch, dict.fromkeys("01234", "import time; time.sleep(60)"))
    looks = 0

    def interrupt(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(work.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        work.at_once(runs_in(tmp_path, 5), workshop(2))
    assert len(started) == 2
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2


def test_runs_that_train_together_give_what_each_gives_alone(tmp_path: Path, sample: Path) -> None:
    """Two of them, and a third whose batches are larger than the data, which fails alone."""
    runs = [
        replace(run, recipe=tiny_recipe(dataset=f"npz:{sample}", epochs=1, seed=seed, batch_size=size))
        for run, seed, size in zip(runs_in(tmp_path, 3), (0, 1, 2), (64, 64, 512), strict=True)
    ]
    failed = work.train_runs(runs, workshop(2))
    assert list(failed) == [runs[2].folder]
    assert "batch_size: expected at most the 256 training images, got 512" in failed[runs[2].folder]
    work.train_here(replace(runs[1], folder=tmp_path / "alone"), workshop(1))
    together, alone = (load_run(folder).model.state_dict() for folder in (runs[1].folder, tmp_path / "alone"))
    assert all(torch.equal(together[name], alone[name]) for name in alone)


def test_in_turn_a_failure_does_not_stop_the_rest(tmp_path: Path) -> None:
    seen = []

    def fail_first(run: PlannedRun) -> None:
        seen.append(run.folder.name)
        if run.folder.name == "0":
            raise WorkError("the loss\ndiverged")

    assert work.in_turn(runs_in(tmp_path, 3), fail_first) == {tmp_path / "0": "the loss diverged"}
    assert seen == ["0", "1", "2"]


def test_a_process_trains_only_where_epochs_are_missing(tmp_path: Path) -> None:
    (run,) = runs_in(tmp_path, 1)
    both = work.commands(run, workshop(2))
    assert both[: both.index("then")] == ["train", "--out", str(run.folder), "--resume", "--device", "cpu"]
    assert load_train_recipe(run.folder / "recipe.yaml") == run.recipe
    certify = work.commands(replace(run, epochs_done=90, skip=3, max_images=7), workshop(2))
    assert certify[:4] == both[both.index("then") + 1 :][:4] == ["certify", str(run.folder), "--n", "100"]
    assert certify[4:] == ["--skip", "3", "--max-images", "7", "--name", "test-n100", "--device", "cpu"]
    assert split(both) == [both[:6], both[7:]]


def test_a_process_ends_with_the_one_that_started_it() -> None:
    code = "from smoothcert.cli.several import end_with_input; end_with_input(); print('up', flush=True); "
    sleeping = [sys.executable, "-c", code + "import time; time.sleep(60)"]
    with subprocess.Popen(sleeping, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(timeout=30) == 1
