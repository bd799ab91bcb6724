"""The command line: what each command prints and writes, and that a wrong request costs one line and exit code 2."""

import dataclasses
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import ndtri
from tiny import digest, tiny_recipe

from smoothcert import RequestError, WorkError, __version__, cli
from smoothcert.certification.certificates import read_certificates
from smoothcert.certification.settings import CertifySettings
from smoothcert.data import DATASETS, ImageData, Images, mnist
from smoothcert.models import LeNet
from smoothcert.models.precision import Precision
from smoothcert.training.checkpoint import load_run
from smoothcert.training.choices import Compiling, InputLayer, NoiseName

Cli = Callable[..., tuple[int, str, str]]
SAMPLE = ["--preset", "mnist/gaussian", "--set", "dataset=mnist-sample"]


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def test_certify_then_report(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    code, out, _ = run_cli("certify", run, "--n", 200, "--max-images", 5, "--skip", 3, "--device", "cpu")
    assert code == 0
    rows = read_certificates(run / "certificates" / "test-n200.tsv").rows
    assert [row.index for row in rows] == [0, 3, 6, 9, 12]
    assert "test-n200.tsv" in out
    assert " votes for 5 images\n" in out
    code, out, _ = run_cli("report", run, "--out", tmp_path / "report", "--format", "md,csv,tex,png")
    assert code == 0
    acr = sum(row.radius_if_correct for row in rows) / 5
    assert f"{acr:.3f}" in out
    assert f"{acr:.3f}" in (tmp_path / "report" / "report.md").read_text()
    assert (tmp_path / "report" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_certify_continues_with_the_seed_of_the_file(run_cli: Cli, run: Path) -> None:
    for images in (2, 4):
        code, _, err = run_cli("certify", run, "--n", 100, "--max-images", images, "--device", "cpu")
        assert (code, err) == (0, "")
    assert len(read_certificates(run / "certificates" / "test-n100.tsv").rows) == 4


def test_certify_warns_before_sampling_when_n_is_too_small(run_cli: Cli, run: Path) -> None:
    code, out, _ = run_cli("certify", run, "--n", 100, "--max-images", 1, "--radius", 1.5, "--device", "cpu")
    assert code == 0
    assert "cannot certify radius 1.5" in out
    assert " votes for 1 image\n" in out
    assert out.index("cannot certify") < out.index("wrote")
    code, out, _ = run_cli("certify", run, "--n", 9, "--max-images", 1, "--device", "cpu")
    assert (code, "n = 9 votes cannot certify any image at alpha 0.001: all abstain; n = 10 can" in out) == (0, True)


def test_train_and_resume(run_cli: Cli, tmp_path: Path, tiny_data: ImageData) -> None:
    recipe, data = tmp_path / "r.yaml", tmp_path / "few.npz"
    np.savez(data, images=tiny_data.images[:64, 0].numpy(), labels=tiny_data.labels[:64].numpy())
    tiny_recipe(dataset=f"npz:{data}", epochs=1).save(recipe)
    arguments = ("train", "--recipe", recipe, "--out", tmp_path / "run", "--device", "cpu", "--set", "seed=3")
    assert run_cli(*arguments)[0] == 0
    assert "seed: 3" in (tmp_path / "run" / "recipe.yaml").read_text()
    code, _, err = run_cli(*arguments)
    assert code == 2
    assert "--resume" in err
    assert run_cli("train", "--out", tmp_path / "run", "--resume", "--device", "cpu")[0] == 0


def test_predict(run_cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = mnist.load_sample("test")
    rows = read_rows(run_cli, run)
    confident = max(rows, key=lambda row: row.radius_if_correct)
    path = tmp_path / "digit.png"
    Image.fromarray(data.images[confident.index, 0].numpy()).save(path)
    monkeypatch.chdir(tmp_path)  # a short path is not folded
    code, out, _ = run_cli("predict", run, path.name, "--n", 500, "--device", "cpu")
    assert code == 0
    cells = [cell.strip() for cell in next(line for line in out.splitlines() if "digit.png" in line).split("│")]
    assert cells[2] == str(confident.label)
    assert float(cells[3]) > 0
    Image.fromarray(data.images[0, 0].numpy()).resize((40, 40)).save(path)
    code, _, err = run_cli("predict", run, path)
    assert code == 2
    assert "expected an image of 28x28 pixels, got 40x40" in err
    assert run_cli("predict", run, path, "--resize", "--n", 100)[0] == 0


def read_rows(run_cli: Cli, run: Path):
    run_cli("certify", run, "--n", 100, "--max-images", 20, "--device", "cpu")
    return read_certificates(run / "certificates" / "test-n100.tsv").rows


@pytest.mark.parametrize(
    ("command", "entry"),
    [("presets", "mnist/gaussian"), ("datasets", "mnist-sample"), ("models", "lenet"), ("objectives", "gaussian")],
)
def test_lists(run_cli: Cli, command: str, entry: str) -> None:
    code, out, _ = run_cli(command)
    assert (code, entry in out) == (0, True)


def test_preset_and_objective_are_shown_in_full(run_cli: Cli) -> None:
    code, out, _ = run_cli("presets", "mnist/gaussian", "--sigma", 1.0)
    assert code == 0
    assert "sigma: 1.0" in out
    assert "name: gaussian" in out
    assert "objective.num_noise" in run_cli("objectives", "gaussian")[1]


@pytest.mark.parametrize("given", ["smoothmx", "smoothmix"])
def test_a_wrong_run_folder_gets_a_hint(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Typing errors in the name or in the folder above it; without a similar run, how to train one."""
    monkeypatch.chdir(tmp_path)
    for name in ("smoothmix", "gaussian"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "model.safetensors").touch()
    for folder in (given, f"runs/{given}x", f"run/{given}"):
        code, out, err = run_cli("certify", folder)
        assert (code, out, err) == (2, "", f"smoothcert: {folder}: no such run folder; did you mean runs/smoothmix?\n")
    make = "`smoothcert train --preset NAME --out runs/macer` makes one\n"
    assert f"no such run folder; the current folder is {tmp_path}; {make}" in run_cli("certify", "runs/macer")[2]
    assert "give one of the runs in it, such as runs/gaussian, runs/smoothmix\n" in run_cli("certify", ".")[2]
    (tmp_path / "audit/certificates").mkdir(parents=True)  # as `certify --model ... --out audit` leaves it
    assert "only: in its place give --model FILE.py:function" in run_cli("predict", "audit", "a.png")[2]


UNREADABLE = ("--dataset", f"npz:{__file__}", "--sigma", 0.5)
"""Data that fail when they are read: other faults of a request are reported first."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["certify", "nowhere"], "nowhere: no such run folder"),
        (["certify", "net.py:build"], "no such run folder; a network of your own is --model net.py:build"),
        (["train", *UNREADABLE, "--method", "gausian"], "unknown method gausian; did you mean gaussian"),
        (["train", *UNREADABLE, "--method", "gaussian", "--arch", "lenett"], "got lenett; did you mean lenet"),
        (["certify", "."], ".: expected a run folder, got one without recipe.yaml and model.safetensors"),
        (["train", "--out", "x"], "give --preset NAME, --recipe FILE, or --dataset NAME --method NAME --sigma S"),
        (["train", "--dataset", "mnist-sample", "--sigma", 0.5], "--method NAME: missing"),
        (["train", "--dataset", "mnist-sample", "--method", "gaussian"], "--sigma S: missing"),
        (["train", "--dataset", "folder:nowhere", "--method", "gaussian", "--sigma", 0.5], "folder:nowhere: expected"),
        (["train", "--resume"], "--resume: expected the run to continue, got none; name it by --out"),
        (["train", "--out", "x", "--resume"], "x: holds no run to continue"),
        (["train", "--out", "x", *SAMPLE, "--model", "lenett"], "lenett"),
        (["train", "--out", "x", *SAMPLE, "--model", "os:nope"], "nope"),
        (["train", "--out", "x", "--preset", "mnist/gausian"], "did you mean mnist/gaussian"),
        (["train", "--out", "x", "--preset", "mnist/gaussian", "--set", "model=lenett"], "did you mean lenet"),
        (["train", "--out", "x", "--preset", "mnist/gaussian", "--set", "epoch=3"], "did you mean epochs"),
        (["train", "--out", "x", "--preset", "mnist/gaussian", "--sigma", "-1"], "sigma: expected a number > 0"),
        (
            ["train", "--out", "x", "--preset", "mnist/gaussian", "--sigma", "much"],
            "'--sigma': expected a valid number, got much",
        ),
        (["merge"], "Missing argument 'files'; `smoothcert merge --help` has an example"),
        (["certify", "x", "--n", "1.5"], "expected a whole number, such as 100000, 100k or 1e5, got 1.5"),
        (["certify", "x", "--n", "many"], "expected a whole number, such as 100000, 100k or 1e5, got many"),
        (["train", "--out", "x", "--preset", "a", "--recipe", "b"], "not both"),
        (["train", "--out", "x", "--recipe", "missing.yaml"], "missing.yaml: cannot be read"),
        (
            ["train", "--out", "x", "--preset", "mnist/gaussian", "--compile", "maybe"],
            "'maybe' is not one of 'auto', 'always', 'never'",
        ),
        (["train"], "give --preset NAME, --recipe FILE, or --dataset"),
        (["train", *SAMPLE, "--set", "=3"], "--set =3: expected key=value"),
        (["train", *SAMPLE, "--sigma", "0.5", "--set", "seed=0,1"], "of key=a,b use `smoothcert sweep`"),
        (["train", *SAMPLE, "--sigma", "0.5", "--set", "learning_rate_drops=[1],[2]"], "use `smoothcert sweep`"),
        (["train", *SAMPLE, "--set", "objective.lambd=3"], "objective.lambd: unknown key"),
        (["report", "x", "--radii", "0", "--radii", "1"], "got it 2 times; give all its values at once, as in A,B"),
        (["certify", "x", "--alpha", "0.1", "--alpha", "0.2"], "--alpha: expected once, got it 2 times; leave one out"),
        (["certfy", "x"], "No such command 'certfy'"),
        (["certify", "x", "--max", "5"], "No such option: --max (Possible options: --max-images)"),
        (["certify", "x", "--imges", "5"], "--imges (Possible options: --image-size, --max-images)"),
        (["certify", "x", "--foo"], "No such option: --foo\n"),
        (["report", "nowhere"], "nowhere"),
        (["report", "x", "--caption", "Results"], "--caption: expected tex in --format with it, got md,csv,html,png"),
        (
            ["report", "x", "--format", "md", "--images", "folder:x"],
            "--images: expected html in --format with it, got md",
        ),
        (["presets", "nothing"], "no preset is called nothing"),
        (["presets", "mnist/", "--sigma", 0.5], "--sigma: expected the name of one preset with it, got mnist/"),
        (["objectives", "nothing"], "or your own FILE.py:Class, got nothing; choose one of these"),
        (["objectives", "smothmix"], "got smothmix; did you mean smoothmix"),
        (["train", "mnist/gaussian"], "argument(s) (mnist/gaussian); `smoothcert train --help` lists what it takes"),
        (["train", "--out", "x", *SAMPLE, "--device", "tpu"], "tpu"),
    ],
)
def test_wrong_request_prints_one_line(
    run_cli: Cli, tmp_path: Path, monkeypatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run_cli(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("smoothcert: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train --preset mnist/gaussian", "train-denoiser --dataset mnist --sigma 0.5"])
def test_a_folder_that_cannot_be_trained_into_is_refused_before_data_are_read(
    run_cli: Cli, run: Path, tmp_path: Path, command: str
) -> None:
    """The folder of the data is a file, which is what a request that reads them would be refused for."""
    (tmp_path / "file").touch()
    asked = [*command.split(), "--data", tmp_path / "file", "--out"]
    message = f"{run}: holds a run already; continue it with --resume or choose another --out"
    assert run_cli(*asked, run)[::2] == (2, f"smoothcert: {message}\n")
    code, _, err = run_cli(*asked, tmp_path / "file")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{tmp_path / 'file'}: expected a folder to write to, got a file; choose another --out" in err


def test_reproduce_refuses_a_file_as_its_folder_before_it_starts(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = run_cli("reproduce", "smoothmix/table2", "--quick", "--out", tmp_path / "file")
    message = f"{tmp_path / 'file'}: expected a folder to write to, got a file; choose another --out"
    assert (code, out, err) == (2, "", f"smoothcert: {message}\n")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def build(:\n", "mine.py failed (SyntaxError: invalid syntax (mine.py, line 1)); correct it"),
        (
            "import no_such_module\n",
            "mine.py failed in line 1 (ModuleNotFoundError: No module named 'no_such_module'); install the module or",
        ),
        ("from .layers import Layer\n", "(ImportError: attempted relative import with no known parent package); "),
        ("from .layers import Layer\n", "; code of a package is package.module:function"),
    ],
)
def test_your_own_file_that_cannot_be_read_is_named_with_the_reason(
    run_cli: Cli, tmp_path: Path, code: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    asked = ["--dataset", "mnist-sample", "--sigma", 0.5, "--out", tmp_path / "out"]
    result, _, err = run_cli("certify", "--model", f"{tmp_path / 'mine.py'}:build", *asked)
    assert (result, err.count("\n")) == (2, 1)
    assert message in err


def test_one_class_is_not_trained(run_cli: Cli, tmp_path: Path, tiny_data: ImageData) -> None:
    np.savez(tmp_path / "one.npz", images=tiny_data.images[:64, 0].numpy(), labels=np.zeros(64, int))
    asked = ["train", "--dataset", f"npz:{tmp_path / 'one.npz'}", "--method", "gaussian", "--sigma", 0.5]
    code, _, err = run_cli(*asked, "--out", tmp_path / "run", "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1)
    assert "expected images of at least two classes, got one" in err
    assert not (tmp_path / "run").exists()


def test_a_folder_given_as_a_file_is_named_as_one(run_cli: Cli, tmp_path: Path) -> None:
    message = f"smoothcert: {tmp_path}: expected a file, got a folder; give another path\n"
    for command in (["import", "--sigma", 1, "--out", tmp_path / "new"], ["recertify"]):
        assert run_cli(*command, tmp_path)[::2] == (2, message)


CHOICES = {
    "certify x --bound": get_args(CertifySettings.model_fields["bound"].annotation),
    "certify x --noise": get_args(NoiseName),
    "certify x --precision": ("auto", *get_args(Precision)),
    "certify x --device": ("auto", "cpu", "cuda", "mps"),
    "recertify x --bound": get_args(CertifySettings.model_fields["bound"].annotation),
    "attack x --precision": ("auto", *get_args(Precision)),
    "predict x y --precision": ("auto", *get_args(Precision)),
    "train --out x --compile": get_args(Compiling),
    "import x --out y --sigma 1 --input-layer": get_args(InputLayer),
    "analyze margins x --device": ("auto", "cpu", "cuda", "mps"),
    "reproduce x --device": ("auto", "cpu", "cuda", "mps"),
}
"""Options with a few allowed values, each with what the package accepts."""


@pytest.mark.parametrize("command", CHOICES)
def test_wrong_choice_is_one_line_with_the_allowed_values(run_cli: Cli, command: str) -> None:
    option = command.split()[-1]
    code, _, err = run_cli(*command.split(), "nope")
    allowed = ", ".join(f"'{value}'" for value in CHOICES[command])
    assert code == 2
    assert err == f"smoothcert: Invalid value for '{option}': 'nope' is not one of {allowed}.\n"


@pytest.mark.parametrize("command", CHOICES)
def test_help_shows_the_choices(run_cli: Cli, command: str) -> None:
    words, option = command.split(), command.split()[-1]
    code, out, _ = run_cli(*words[: 2 if words[0] == "analyze" else 1], "--help")
    assert code == 0
    shown = next(line for line in out.splitlines() if f" {option} " in line)
    assert "|".join(CHOICES[command]) in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "0"], "n: expected at least 1"),
        (["--alpha", "2"], "alpha: expected less than 1"),
        (["--skip", "0"], "skip: expected at least 1"),
        (["--precision", "int4"], "'int4' is not one of 'auto', 'fp32', 'bf16', 'fp16'"),
        (["--sigma", "0"], "sigma: expected greater than 0"),
        (["--batch-size", "0"], "batch_size: expected at least"),
        (["--seed", "-3"], "seed: expected at least"),
        (["--radius", "nan"], "--radius: expected a number >= 0, got nan"),
        (["--until-radius", "inf"], "until_radius: expected a number above 0, got inf"),
        (["--until-radius", "0"], "until_radius: expected a number above 0, got 0"),
        (["--name", "../../x"], "--name: expected a file's name without folders"),
        (["--dataset", "x"], "FILE.py:Name, got 'x'; choose one of these"),
        (["--dataset", "lab.data:Mine"], "got lab.data:Mine (ModuleNotFoundError: No module named 'lab'); run where"),
        (["--hub", "hf:x"], "its network is tiny, got --hub hf:x; leave --hub out"),
        (["--radii", ""], "radii: expected comma-separated numbers, got nothing"),
        pytest.param(
            ["--device", "cuda"],
            "torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
    ],
)
def test_wrong_certify_options(run_cli: Cli, run: Path, options: list[str], message: str) -> None:
    code, _, err = run_cli("certify", run, *options)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (run / "certificates").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize(
    "command",
    [
        "train --preset mnist/gaussian --sigma 0.5 --out a",
        "train-denoiser --dataset mnist --sigma 0.5 --out a",
        "doctor --model torch.nn:Flatten --dataset mnist",
        "adapt --model torch.nn:Flatten --dataset mnist --sigma 0.5 --out a.safetensors",
    ],
)
def test_a_gpu_that_is_not_there_is_refused_before_data_are_downloaded(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run_cli(*command.split(), "--device", "cuda", "--data", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "torch sees no GPU" in err
    assert list(tmp_path.iterdir()) == []


def test_other_settings_for_a_file_are_refused(run_cli: Cli, run: Path) -> None:
    run_cli("certify", run, "--n", 100, "--max-images", 1, "--name", "mine", "--device", "cpu")
    code, _, err = run_cli("certify", run, "--n", 200, "--max-images", 1, "--name", "mine", "--device", "cpu")
    assert code == 2
    assert "n: the file has 100, the request 200" in err


def test_images_of_an_earlier_call_are_reported(run_cli: Cli, run: Path) -> None:
    def certified(*options: object) -> str:
        code, out, _ = run_cli("certify", run, "--n", 100, "--device", "cpu", *options)
        assert code == 0
        return out

    assert "note:" not in certified("--skip", 3, "--max-images", 2)
    assert "note:" not in certified("--skip", 1, "--max-images", 4), "more of the same is what was asked for"
    assert "has 3 more images, from an earlier call; a report uses all 5" in " ".join(
        certified("--skip", 9, "--max-images", 2).split()
    )


def test_version(run_cli: Cli) -> None:
    assert run_cli("--version") == (0, f"smoothcert {__version__}\n", "")


def test_damaged_files_exit_with_1(run_cli: Cli, run: Path) -> None:
    run_cli("certify", run, "--n", 100, "--max-images", 1, "--name", "mine", "--device", "cpu")
    path = run / "certificates" / "mine.tsv"
    path.write_text("what is this\n")
    code, _, err = run_cli("report", run)
    assert (code, err.count("\n")) == (1, 1)
    assert "not a certificates file" in err
    (run / "model.safetensors").write_bytes(b"nothing")
    code, _, err = run_cli("certify", run)
    assert (code, err.count("\n")) == (1, 1)
    assert "damaged" in err


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_says_how_to_continue(
    number: int, expected: int, run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    monkeypatch.setattr("smoothcert.training.loop.train", lambda *_, **__: signal.raise_signal(number))
    recipe = tmp_path / "r.yaml"
    tiny_recipe().save(recipe)
    code, _, err = run_cli("train", "--recipe", recipe, "--out", tmp_path / "run", "--device", "cpu")
    signal.signal(signal.SIGINT, inherited)
    assert (code, err.count("\n"), "--resume" in err) == (expected, 1, True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_ends_a_worker_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for the others handles no signals; torchrun would have to wait until it may kill it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with cli.recording_signals([]):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupt_that_compiled_code_reports_as_damage_is_an_interrupt(
    run_cli: Cli, trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object, **options: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:  # as safetensors does
            raise WorkError("model.safetensors: damaged") from error

    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    monkeypatch.setattr("smoothcert.training.checkpoint.read_model_file", load)
    code, _, err = run_cli("export", trained_run, "--out", trained_run / "half")
    restored = signal.signal(signal.SIGINT, inherited)
    assert (code, "interrupted" in err, "damaged" in err) == (130, True, False)
    assert restored is signal.default_int_handler


def test_resume_starts_a_run_that_was_interrupted_before_its_first_file(run_cli: Cli, tmp_path: Path) -> None:
    images = np.zeros((4, 28, 28), np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(4) % 2)
    request = ("train", "--dataset", f"npz:{tmp_path / 'a.npz'}", "--method", "gaussian", "--sigma", 0.5)
    request = (*request, "--model", "lenet", "--epochs", 1, "--set", "batch_size=2", "--device", "cpu")
    assert run_cli(*request, "--out", tmp_path / "run", "--resume")[0] == 0
    assert run_cli(*request, "--out", tmp_path / "whole")[0] == 0
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")


def test_import_then_certify(run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A LeNet saved the way the field does gives the certificates that the original gives."""

    def absent(split: str, folder: Path) -> Images:
        raise RequestError("MNIST is not there")

    # Without MNIST the check of the input layer is skipped, and said to be.
    monkeypatch.setitem(DATASETS, "mnist", dataclasses.replace(DATASETS["mnist"], load=absent))
    original = LeNet(10).eval()
    state = {f"module.{name}": tensor for name, tensor in original.state_dict().items()}
    torch.save({"arch": "lenet", "epoch": 90, "state_dict": state}, tmp_path / "checkpoint.pth.tar")
    arguments = ("import", tmp_path / "checkpoint.pth.tar", "--sigma", 0.5, "--out", tmp_path / "imported")
    code, out, err = run_cli(*arguments)
    assert (code, err) == (0, "")
    assert "not checked" in out
    images = torch.rand(4, 1, 28, 28)
    assert torch.equal(load_run(tmp_path / "imported").model(images), original(images))
    code, _, err = run_cli("certify", tmp_path / "imported", "--dataset", "mnist-sample", "--n", 100, "--max-images", 2)
    assert (code, err) == (0, "")
    code, _, err = run_cli(*arguments)
    assert code == 2
    assert err.count("\n") == 1


def test_rules_from_the_command_line(run_cli: Cli, run: Path) -> None:
    """Each rule writes a file of its own name; the votes it spent are said."""
    few = ("certify", run, "--max-images", 4, "--seed", 1, "--device", "cpu")
    code, out, _ = run_cli(*few, "--n", 1000, "--until-radius", 0.25)
    assert code == 0
    assert " votes for 4 images instead of 4,400\n" in out
    rows = read_certificates(run / "certificates" / "test-n1000-radii.tsv").rows
    assert all(row.certificate.radius in (0.0, pytest.approx(0.25)) for row in rows)
    for options, name in (
        (("--radii", "0.1,0.2", "--name", "grid"), "grid"),
        (("--radius-loss", 0.2), "test-n250-loss"),
        (("--label-aware",), "test-n250-label-aware"),
        (("--bound", "two-sided"), "test-n250-two-sided"),
        (("--sound",), "test-n250-sound"),
        (("--noise", "laplace"), "test-n250-laplace"),
        (("--shard", "2/2"), "test-n250-shard2of2"),
    ):
        code, _, err = run_cli(*few, "--n", 250, *options)
        assert (code, err) == (0, "")
        assert (run / "certificates" / f"{name}.tsv").exists()
    assert [r.index for r in read_certificates(run / "certificates/test-n250-shard2of2.tsv").rows] == [1, 3]
    names = ("test-n1000-radii", "test-n250-loss", "test-n250-label-aware", "test-n250-sound", "test-n250-laplace")
    files = (run / "certificates" / f"{name}.tsv" for name in names)
    code, out, _ = run_cli("report", *files, "--out", run / "report", "--format", "md")
    assert code == 0
    assert "(label-aware)" in out
    report = (run / "report" / "report.md").read_text()
    for remark in (
        "until radius 0.25 was",
        "two-stage",
        "benchmarks only",
        "sound integer",
        "radii in L1",
        "times fewer",
    ):
        assert remark in report
    for options, message in (
        (("--until-radius", 0.2, "--radii", "0.1"), "not both"),
        (("--shard", "3/2"), "expected i/k with 1 <= i <= k"),
        (("--shard", "x"), "expected i/k"),
        (("--until-radius", 99), "99 can never be certified"),
    ):
        code, out, err = run_cli(*few, "--n", 250, *options)
        assert (code, out) == (2, "")
        assert message in err


def test_recertify_command(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    run_cli("certify", run, "--n", 200, "--max-images", 4, "--seed", 1, "--device", "cpu")
    file, other = run / "certificates" / "test-n200.tsv", tmp_path / "other.tsv"
    code, out, _ = run_cli("recertify", file, "--alpha", 0.01, "--out", other)
    assert (code, "both files" in out) == (0, False)
    assert f"reports about {run} now show both files" in run_cli("recertify", file, "--alpha", 0.01)[1]
    before, after, next_to_it = map(read_certificates, (file, other, file.with_name("test-n200-alpha0.01.tsv")))
    assert all(b.certificate.radius > a.certificate.radius for a, b in zip(before.rows, after.rows, strict=True))
    assert [row.certificate for row in after.rows] == [row.certificate for row in next_to_it.rows]
    code, _, err = run_cli("recertify", file, "--alpha", 3, "--out", tmp_path / "x.tsv")
    assert code == 2
    assert "alpha: expected at least 1e-300 and less than 1" in err


def test_attack_command(run_cli: Cli, run: Path) -> None:
    run_cli("certify", run, "--n", 200, "--skip", 3, "--max-images", 4, "--seed", 1, "--device", "cpu")
    options = ("--n", 200, "--seed", 1, "--device", "cpu")
    code, out, err = run_cli("attack", run, *options, "--radii", "0.5,3", "--steps", 2, "--num-noise", 2)
    assert (code, err) == (0, "")
    assert "accuracy under attack" in out
    assert len((run / "attacks" / "pgd.tsv").read_text().splitlines()) == 5
    # Certificates with forged votes are refuted.
    path, votes = run / "certificates" / "test-n200.tsv", 10**9
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    radius = -0.5 * ndtri(-math.expm1(math.log(0.001) / votes))
    rows = [[*c[:2], c[1], str(radius), "1", c[5], c[6], str(votes), str(votes), f"{c[1]}:{votes}"] for c in lines[1:]]
    path.write_text("\n".join("\t".join(c) for c in [lines[0], *rows]) + "\n")
    settings = path.with_suffix(".json")
    settings.write_text(settings.read_text().replace('"n": 200,', f'"n": {votes},'))
    code, out, err = run_cli(
        "attack", run, *options, "--name", "again", "--radii", "2.75", "--steps", 30, "--num-noise", 8
    )
    assert code == 1
    assert "CONTRADICTION: image" in out
    assert "the certificates are wrong" in err


def test_value_with_a_line_break_is_refused_in_one_line(run_cli: Cli) -> None:
    code, out, err = run_cli("presets", "mnist/gaussian", "--sigma", "a\nb")
    assert (code, out) == (2, "")
    assert err.startswith("smoothcert: ")
    assert len(err.splitlines()) == 1


def test_next_commands_leave_out_the_data_folder_of_the_environment(
    run_cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def onwards(*options: object) -> str:
        code, out, error = run_cli("train", "--out", run, "--resume", "--device", "cpu", *options)
        assert code == 0, error
        return out.partition("next: ")[2].strip()

    (run / "state.pt").unlink()  # a finished run, which was trained on a part of its data set
    monkeypatch.delenv("SMOOTHCERT_DATA", raising=False)
    assert onwards("--data", tmp_path) == f"smoothcert certify {run} --data {tmp_path}"
    monkeypatch.setenv("SMOOTHCERT_DATA", f"{tmp_path}{os.sep}")
    assert onwards() == f"smoothcert certify {run}"
    assert onwards("--data", run) == f"smoothcert certify {run} --data {run}"
