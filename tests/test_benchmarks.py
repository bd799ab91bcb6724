"""Each script in benchmarks/ runs at its smallest size on a CPU and prints the lines that its readers look for."""

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from data.photographs import write_photograph
from tiny import tiny_recipe

from smoothcert.papers.presets import PRESETS
from smoothcert.training.checkpoint import Run, load_run, new_model, save_weights

FOLDER = Path(__file__).parents[1] / "benchmarks"
NUMBER = r"[\d,]+(?:\.\d+)?"

Script = Callable[..., list[str]]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the benchmarks measure memory and CPU time as on Unix")


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Script]:
    """Runs `python benchmarks/NAME ARGUMENTS` in this process, and returns the lines that it prints."""
    threads = torch.get_num_threads()

    def call(name: str, *arguments: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capfd.readouterr().out.splitlines()

    yield call
    torch.set_num_threads(threads)


def ratios(lines: list[str], unit: str) -> dict[str, float]:
    """The name and the ratio of each line 'NAME SPEED UNIT RATIO x'."""
    found = [re.fullmatch(rf"(\S.*?) +{NUMBER} {unit} +({NUMBER}) x", line) for line in lines]
    return {match[1]: float(match[2]) for match in found if match}


def test_every_benchmark_has_a_test() -> None:
    tested = re.findall(r'run_script\(\s*"(\w+\.py)"', Path(__file__).read_text(encoding="utf-8"))
    assert {*tested} == {path.name for path in FOLDER.glob("*.py")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["api.py", "certify.py", "fewer_votes.py", "objectives.py", "train.py"])
def test_a_gpu_that_is_not_there_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *(["run"] if name == "fewer_votes.py" else []), "--device", "cuda"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"{name}: error: --device: cuda was asked for, but torch sees no GPU; use --device cpu"


def test_api(run_script: Script) -> None:
    lines = run_script("api.py", "--images", 2, "--n", 200, "--rounds", 1)
    found = ratios(lines, "votes/s")
    assert found.keys() == {"command line", "Python"}
    assert found["command line"] == 1


def test_certify(run_script: Script) -> None:
    lines = run_script("certify.py", "--votes", 200, "--rounds", 1, "--batch-size", 250, "--precision", "fp32")
    found = ratios(lines, "votes/s")
    assert found.keys() == {"usual loop fp32", "smoothcert fp32", "smoothcert fp32 sound"}
    assert found["usual loop fp32"] == 1
    assert re.fullmatch(r"peak resident memory: \d+ MiB, after more votes \d+ MiB", lines[-1])


def test_fewer_votes(run_script: Script, trained_run: Path) -> None:
    """The votes per image and their ratio to n0 + n agree."""
    lines = run_script("fewer_votes.py", trained_run, "--images", 4, "--n", 1000, "--radius", 0.25)
    assert lines[0] == "trained, radius 0.25, 4 images, at most n = 1,000 votes"
    shares = re.fullmatch(rf"certified: ({NUMBER})%; lost against n votes each: ({NUMBER})% .*", lines[1])
    assert shares is not None
    assert all(float(share) in (0, 25, 50, 75, 100) for share in shares.groups())
    spent = re.fullmatch(rf"votes per image: ({NUMBER}), (\d+) times fewer", lines[2])
    assert spent is not None
    assert int(spent[2]) == pytest.approx(1100 / float(spent[1].replace(",", "")), abs=0.6)


def test_input(run_script: Script, tmp_path: Path) -> None:
    for number in range(4):
        write_photograph(tmp_path / f"class{number % 2}" / f"{number}.jpg", number)
    lines = run_script("input.py", tmp_path, "--workers", 0, "--seconds", 0.01, "--rounds", 1)
    assert "4 files" in lines[0]
    assert lines[2].split() == ["transform", "images/s", "per", "core", "range"]
    assert [line.split()[0] for line in lines[3:]] == ["training", "test"]
    for line in lines[3:]:
        median, low, _, high = line.split()[1:]
        assert 0 < float(median) == float(low) == float(high)


def test_objectives(run_script: Script) -> None:
    found = ratios(run_script("objectives.py", "--images", 2, "--rounds", 1), "s")
    assert found.keys() == {name for name in PRESETS if name.startswith("mnist/") and "ablation" not in name}
    assert found["mnist/gaussian"] == 1


def test_report(run_script: Script) -> None:
    lines = run_script("report.py", "--runs", 3, "--images", 20, "--formats", "md,csv")
    pattern = rf"3 runs x 20 certificates, md,csv: {NUMBER} CPU s, {NUMBER} s, peak memory {NUMBER} MiB; (.*)"
    match = re.fullmatch(pattern, lines[-1])
    assert match is not None
    assert re.fullmatch(rf"report\.csv {NUMBER} bytes, report\.md {NUMBER} bytes", match[1])


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_train(run_script: Script) -> None:
    settings = ["--methods", "gaussian", "--epochs", 2, "--images", 256, "--usual-steps", 1, "--device", "cpu"]
    _, compared, several = run_script("train.py", *settings, "--jobs", 1)[-3:]
    ours = rf"gaussian +ours +{NUMBER} s/epoch, \d+ images/s \(first {NUMBER} s, peak 0\.00 GiB\)"
    assert re.fullmatch(rf"{ours} +usual +{NUMBER} s/epoch \(peak 0\.00 GiB\) +{NUMBER} x", compared)
    assert re.fullmatch(rf"gaussian +1 side by side: {NUMBER} s, {NUMBER} epochs/s in all", several)


def test_serve(run_script: Script, trained_run: Path, tmp_path: Path) -> None:
    """The script itself compares the answers with the rows of the log."""
    pytest.importorskip("fastapi")
    trained = load_run(trained_run)
    model = new_model("lenet", trained.spec)  # a network that the server process knows
    served = tmp_path / "served"
    served.mkdir()
    save_weights(Run(served, tiny_recipe(model="lenet"), trained.spec, model, trained.epoch, trained.provenance))
    settings = ["--clients", 2, "--images", 4, "--votes", 100, "--radius", 0.25, "--seconds", 0.2]
    lines = run_script("serve.py", served, *settings)
    assert lines[0].startswith("served: 2 clients, 4 requests, radius 0.25, at most 100 votes")
    assert lines[1] == "answers: 4, errors: 0, lost: 0, rows in the log: 4"
    assert [line.partition(":")[0] for line in lines[2:5]] == [
        "server",
        "time to an answer",
        "naive loop, one request after the other, all votes",
    ]
    assert re.fullmatch(r"kill -9 .*, 0 errors, \d+ rows in the log, torn rows: 0, exit code at the end: \d+", lines[5])
