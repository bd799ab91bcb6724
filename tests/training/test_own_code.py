"""Users' code under another name: a run continues if the content of the file is the same, and says so if it is not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from tiny import Killed, killed_after_the_first_epoch, tiny_recipe
from torch import nn

import smoothcert as sc
from smoothcert.certification.certificates import read_certificates
from smoothcert.certification.model_provenance import changes_of
from smoothcert.data import ImageData
from smoothcert.errors import RequestError
from smoothcert.training.api import load
from smoothcert.training.checkpoint import load_run, read_model_file

OBJECTIVE = """
from smoothcert.objectives import Gaussian

class Mine(Gaussian):
    num_noise: int = 2
    scale: float = 1.0

    def loss(self, *arguments):
        terms = super().loss(*arguments)
        return terms._replace(loss=self.scale * terms.loss)
"""
NETWORK = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))
"""
DATA = """
import torch
from smoothcert import load_dataset

def digits(split):
    return load_dataset("mnist-sample", split).subset(torch.arange(256))
"""
FEW = ("--n", 50, "--max-images", 2, "--device", "cpu")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch, run_cli: Cli) -> Path:
    """A folder with code, and the folder "run" after one of two epochs with it."""
    (tmp_path / "own_method.py").write_text(OBJECTIVE)
    (tmp_path / "own_network.py").write_text(NETWORK)
    np.savez(tmp_path / "small.npz", images=tiny_data.images[:, 0].numpy(), labels=tiny_data.labels.numpy())
    monkeypatch.chdir(tmp_path)
    code, _, errors = run_cli(
        *("train", "--preset", "mnist/gaussian", "--sigma", 0.5, "--dataset", f"npz:{tmp_path}/small.npz"),
        *("--set", "learning_rate_drops=[]", "--set", "batch_size=64", "--set", "scale=2", "--epochs", 1),
        *("--objective", "own_method.py:Mine", "--model", "own_network.py:build", "--out", "run", "--device", "cpu"),
    )
    assert (code, errors) == (0, "")
    set_epochs(tmp_path / "run", 2)
    return tmp_path


def set_epochs(run: Path, epochs: int) -> None:
    fields = yaml.safe_load((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(yaml.safe_dump(fields | {"epochs": epochs}))


def resume(run_cli: Cli, objective: str, network: str, run: str | Path = "run") -> tuple[int, str, str]:
    named = ("--objective", objective, "--model", network)
    return run_cli("train", "--resume", "--out", run, *named, "--device", "cpu")


@pytest.mark.parametrize("form", ["./{}.py", "{folder}/{}.py", "moved/{}_of_2020.py", "{}"])
def test_a_run_continues_under_another_name_of_the_same_code(project: Path, run_cli: Cli, form: str) -> None:
    """Another spelling, another place, and a module that Python imports; the hyper-parameters are those of the run."""
    (project / "moved").mkdir()
    for name in ("own_method", "own_network"):
        shutil.copy(project / f"{name}.py", project / f"moved/{name}_of_2020.py")
    objective, network = (form.format(name, folder=project) for name in ("own_method", "own_network"))
    code, output, errors = resume(run_cli, f"{objective}:Mine", f"{network}:build")
    assert (code, errors) == (0, "")
    assert "changed after" not in output
    run = load_run(project / "run", f"{network}:build")
    assert run.epoch == 2
    assert run.recipe.to_mapping()["objective"]["scale"] == 2


def test_a_run_continues_in_another_folder(project: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    code, _, errors = resume(run_cli, "../own_method.py:Mine", "../own_network.py:build", "../run")
    assert (code, errors) == (0, "")
    code, output, errors = run_cli("certify", "../run", "--model", "../own_network.py:build", *FEW)
    assert (code, errors) == (0, "")
    assert "is not the recipe of the network" not in output
    assert load("../run", code="../own_network.py:build").epoch == 2


@pytest.mark.parametrize("name", ["own_method.py", "own_network.py"])
def test_code_that_has_changed_is_reported_and_recorded(project: Path, run_cli: Cli, name: str) -> None:
    code = (project / name).read_text()
    (project / name).write_text(code + "number = 1\n")
    exit_code, output, errors = resume(run_cli, "own_method.py:Mine", "own_network.py:build")
    assert (exit_code, errors) == (0, "")
    of_file = {"own_method.py": "own_method.py:Mine", "own_network.py": "own_network.py:build"}[name]
    line = f"note: run: {of_file} changed after it was trained for 1 of 2 epochs; for a run with the new code only, "
    assert line + "train into another --out\n" in output
    set_epochs(project / "run", 3)
    again = resume(run_cli, "own_method.py:Mine", "own_network.py:build")
    assert again[0] == 0
    assert "changed after" not in again[1], "it is the same as before"
    assert "earlier_code" in read_model_file(project / "run/model.safetensors").provenance
    assert run_cli("certify", "run", "--model", "own_network.py:build", *FEW)[0] == 0
    (certificates,) = (project / "run/certificates").glob("*.tsv")
    assert "trained with code that changed between its epochs" in changes_of(
        read_certificates(certificates).provenance, 3
    )


def test_a_network_whose_code_has_changed_is_certified_with_a_warning(project: Path, run_cli: Cli) -> None:
    """The weights fit, but the network may compute something else."""
    (project / "own_network.py").write_text(NETWORK.replace("nn.Flatten(), ", "nn.Flatten(), nn.Tanh(), "))
    with pytest.raises(RequestError, match="its weights do not fit"):
        load("run", code="own_network.py:build")
    (project / "own_network.py").write_text(NETWORK.replace("classes))", "classes), nn.Tanh())"))
    said = "run: the code of its network own_network.py:build has changed since it was trained; restore the code"
    for command in (("certify", "run", *FEW), ("attack", "run", "--n", 50, "--max-images", 2, "--device", "cpu")):
        code, output, errors = run_cli(*command, "--model", "own_network.py:build")
        assert code == 0
        assert " ".join((output + errors).split()).count(said) == 1
    with pytest.warns(UserWarning, match="the code of its network own_network.py:build has changed"):
        load("run", code="own_network.py:build")
    (project / "own_network.py").write_text(NETWORK)
    assert said not in " ".join(
        run_cli("certify", "run", "--model", "own_network.py:build", *FEW, "--name", "b")[1].split()
    )


def test_other_code_is_refused_in_one_line(project: Path, run_cli: Cli) -> None:
    """The content is another, or the class: nothing about hyper-parameters, which are not the difference."""
    (project / "other.py").write_text(OBJECTIVE + "class Other(Mine): pass\n")
    shutil.copy(project / "own_network.py", project / "second.py")
    (project / "second.py").write_text(NETWORK + "other = build\n")
    for objective, network, difference in (
        (
            "other.py:Mine",
            "own_network.py:build",
            "objective.name: the run has 'own_method.py:Mine', the request 'other.py:Mi",
        ),
        (
            "own_method.py:Mine",
            "second.py:build",
            "model: the run has 'own_network.py:build', the request 'second.py:build'",
        ),
    ):
        code, _, errors = resume(run_cli, objective, network)
        assert code == 2
        assert f"holds a run of another recipe ({difference}" in errors
        assert "scale" not in errors
        assert len(errors.splitlines()) == 1
    with pytest.raises(RequestError, match=r"its network is the code own_network\.py:build; allow it with --model"):
        load("run", code="second.py:build")


def test_code_that_only_a_file_names_does_not_run_to_compare_it(project: Path) -> None:
    """Also if the user names other code."""
    ran = project / "ran"
    (project / "own_network.py").write_text(NETWORK + f"open({str(ran)!r}, 'a').close()\n")
    (project / "mine.py").write_text(NETWORK)
    assert load("run", code="mine.py:build").epoch == 1, "the content is that of the training"
    assert not ran.exists()


def test_a_data_set_of_code_may_move_and_its_changes_are_noted(project: Path, run_cli: Cli) -> None:
    """A change that the images do not show, such as one of random transforms."""
    (project / "moved").mkdir()
    (project / "own_data.py").write_text(DATA)
    (project / "moved/own_data.py").write_text(DATA)
    small = ("--set", "learning_rate_drops=[]", "--set", "batch_size=64", "--epochs", 1, "--device", "cpu")
    named = ("--preset", "mnist/gaussian", "--sigma", 0.5, "--dataset", "own_data.py:digits")
    assert run_cli("train", *named, *small, "--out", "digits")[0] == 0
    continued = ("train", "--resume", "--out", "digits", "--device", "cpu", "--dataset")
    set_epochs(project / "digits", 2)
    code, output, errors = run_cli(*continued, "moved/own_data.py:digits")
    assert (code, errors) == (0, "")
    assert "changed after" not in output
    assert load("digits").recipe.dataset == "moved/own_data.py:digits"
    set_epochs(project / "digits", 3)
    (project / "moved/own_data.py").write_text(DATA + "number = 1\n")
    code, output, errors = run_cli(*continued, "moved/own_data.py:digits")
    assert (code, errors) == (0, "")
    assert "moved/own_data.py:digits changed after it was trained for 2 of 3 epochs" in " ".join(output.split())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--method", "own_method.py", "recipe: objective: expected FILE.py:Class, got own_method.py; add the name of"),
        ("--model", "own_network", "model: expected a known model, got own_network; choose one of densenet40"),
        ("--model", "own_network.build", ", or your own as FILE.py:function"),
    ],
)
def test_code_without_its_file_or_its_name_is_refused_with_the_form(
    run_cli: Cli, option: str, value: str, message: str
) -> None:
    code, _, errors = run_cli("train", "--preset", "mnist/gaussian", "--sigma", 0.5, option, value, "--out", "run")
    assert code == 2
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_a_run_with_a_network_that_was_given_in_python_continues_there(
    tmp_path: Path, tiny_data: ImageData, run_cli: Cli
) -> None:
    network, recipe = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), tiny_recipe(learning_rate_drops=())
    with pytest.raises(Killed):
        sc.train(recipe, tiny_data, tmp_path / "run", model=network, on_epoch=killed_after_the_first_epoch)
    code, _, errors = run_cli("train", "--resume", "--out", tmp_path / "run")
    line = "its network Sequential was given to `train` in Python; continue it there: train(recipe, data, out, "
    assert (code, f"{line}model=network, resume=True)\n" in errors) == (2, True)
    for wrong, given in ((nn.Linear, "the class Linear"), (lambda: network, "function")):
        with pytest.raises(RequestError, match=f"expected a torch module that receives the weights, got {given}"):
            load(tmp_path / "run", model=wrong)  # type: ignore[arg-type]
    assert sc.train(recipe, tiny_data, tmp_path / "run", model=network, resume=True).finished


def test_a_finished_run_with_own_code_stays_as_it_is(project: Path, run_cli: Cli) -> None:
    set_epochs(project / "run", 1)
    before = (project / "run/model.safetensors").stat().st_mtime_ns
    for objective in ("own_method.py:Mine", "./own_method.py:Mine"):
        code, output, errors = resume(run_cli, objective, "own_network.py:build")
        assert (code, errors) == (0, "")
        assert "trained already, 1 of 1 epochs" in output
    assert (project / "run/model.safetensors").stat().st_mtime_ns == before


def test_a_sweep_says_which_runs_are_of_earlier_code(project: Path, run_cli: Cli) -> None:
    asked = (
        *("sweep", "--preset", "mnist/gaussian", "--sigma", 0.5, "--dataset", "npz:small.npz", "--epochs", 1),
        *("--set", "learning_rate_drops=[]", "--set", "batch_size=64", "--set", "seed=0,1", "--out", "sweep"),
        *FEW,
    )
    assert run_cli(*asked, "--objective", "own_method.py:Mine")[0] == 0
    shutil.move(project / "own_method.py", project / "moved.py")
    code, output, errors = run_cli(*asked, "--objective", "moved.py:Mine", "--dry-run")
    assert (code, errors, output.count("done")) == (0, "", 2)
    assert "changed after" not in output
    (project / "own_method.py").write_text(OBJECTIVE + "number = 1\n")
    code, output, errors = run_cli(*asked, "--objective", "own_method.py:Mine", "--dry-run")
    assert (code, errors) == (0, "")
    line = "own_method.py:Mine changed after these runs were trained: seed0, seed1; choose another --out to train them"
    assert f"warning: {line} again" in " ".join(output.split())
