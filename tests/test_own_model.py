"""A user's own network: certified, trained and predicted with through the command line, without registration."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_recipe
from torch import nn

import smoothcert as sc
from smoothcert import RequestError
from smoothcert.certification.attack_file import read_attacks
from smoothcert.certification.certificates import read_certificates
from smoothcert.certification.certify_dataset import certify_dataset
from smoothcert.data import mnist
from smoothcert.models import build_model, check_outputs, own_model
from smoothcert.training.checkpoint import load_run, refuse_code, write_tensors
from smoothcert.training.loop import train
from smoothcert.training.run_folder import check_run_folder

Cli = Callable[..., tuple[int, str, str]]
MODULE = """
import asyncio
import functools
import os
import torch
from torch import nn

class Brightness(nn.Module):
    "Class 1 where the mean is above one half: the boundary is a hyperplane."
    def __init__(self, num_classes):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
    def forward(self, x):
        score = (x.flatten(1).mean(1) - 0.5) * self.scale
        return torch.stack([-score, score], 1)

def brightness(num_classes):
    return Brightness(num_classes)

def three():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

def small(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))

def plain():
    return lambda x: torch.stack([0.5 - x.flatten(1).mean(1), x.flatten(1).mean(1) - 0.5], 1)

def fails():
    raise RuntimeError("no weights")


def nothing():
    return 5

def leaves():
    raise SystemExit(0)

def cancels():
    raise asyncio.CancelledError

cached = functools.cache(small)
filled = functools.partial(small, num_classes=2)
ends = functools.partial(os.abort)

number = 5
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module and a data set of uniform grey 4x4 images, dark ones labelled 0, bright ones 1."""
    (tmp_path / "mine_for_test.py").write_text(MODULE)
    levels = np.array([40, 60, 200, 220], dtype=np.uint8)
    images = np.repeat(levels, 16).reshape(4, 4, 4)
    np.savez(tmp_path / "grey.npz", images=images, labels=np.array([0, 0, 1, 1]))
    (tmp_path / "leaves_when_imported.py").write_text("raise SystemExit(0)")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_certify_from_a_module_through_the_command_line(workplace: Path, run_cli: Cli) -> None:
    """The distance of a uniform image to the boundary is |level - 1/2| * sqrt(16): certificates come close to it."""
    options = ("--dataset", "npz:grey.npz", "--sigma", 0.5, "--device", "cpu")
    code, _, errors = run_cli(
        "certify", "--model", "mine_for_test:brightness", "--n", 20_000, "--out", "runs/c", *options
    )
    assert code == 0, errors
    stored = read_certificates(workplace / "runs/c/certificates/test-n20000.tsv")
    assert all(row.correct for row in stored.rows)
    for row, level in zip(stored.rows, (40, 60, 200, 220), strict=True):
        truth = abs(level / 255 - 0.5) * 4
        assert truth - 0.15 < row.certificate.radius <= truth
    assert stored.settings["model"] == "mine_for_test:brightness"
    assert stored.settings["precision"] == "fp32"
    code, _, errors = run_cli("certify", "--model", "mine_for_test:three", "--n", 100, "--out", "runs/d", *options)
    assert code == 2
    assert "gives [2, 3] for 2 images, expected logits [2, 2]" in errors
    assert not (workplace / "runs/d").exists()


def test_attack_own_network_without_a_run_folder(workplace: Path, run_cli: Cli) -> None:
    """All images are nearer than 1.5 to the boundary and farther than 1 from it: attacks of 1.6 succeed, of 0.9 not."""
    own = ("--model", "mine_for_test.py:brightness", "--dataset", "npz:grey.npz", "--sigma", 0.5, "--device", "cpu")
    attack = ("attack", *own, "--out", "runs/c", "--radii", "0.9,1.6", "--steps", 10, "--num-noise", 4, "--n", 2000)
    code, out, err = run_cli(*attack)
    assert (code, err) == (0, "")
    attacks = read_attacks(workplace / "runs/c/attacks/pgd.tsv")
    assert [row.withstood for row in attacks.rows] == [False] * 4
    assert all(1 < row.distance <= 1.6 for row in attacks.rows)
    certify = shlex.split(out.partition("next: smoothcert ")[2])
    assert run_cli(*certify, "--n", 500, "--device", "cpu", "--quiet")[0] == 0, "the next step runs as printed"
    code, out, err = run_cli(*attack, "--name", "checked")
    assert (code, err) == (0, "")
    checked = read_attacks(workplace / "runs/c/attacks/checked.tsv")
    assert all(row.certified_radius and row.certified_radius < row.distance for row in checked.rows)
    assert shlex.split(out.partition("next: smoothcert ")[2]) == ["report", "runs/c"]
    assert run_cli("report", "runs/c", "--format", "csv")[0] == 0
    for wrong, message in {
        ("attack", *own[:4]): "(or --hub hf:NAME) --dataset NAME --sigma S --out DIR; missing: --out DIR",
        ("attack", *own[:4], "--out", "runs/d"): "--sigma: missing; give the noise level",
    }.items():
        code, _, err = run_cli(*wrong)
        assert (code, err.count("\n"), message in err) == (2, 1, True), err


@pytest.mark.slow
def test_train_then_certify_own_network(workplace: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace / "r.yaml").write_text(
        "{dataset: 'npz:grey.npz', model: 'mine_for_test:small', sigma: 0.1,"
        " objective: {name: smoothmix, num_noise: 2}, epochs: 2, batch_size: 4,"
        " learning_rate: 0.5, learning_rate_drops: []}"
    )
    network, device = ("--model", "mine_for_test:small"), ("--device", "cpu")
    code, out, errors = run_cli("train", "--recipe", "r.yaml", *network, "--out", "runs/t", *device)
    assert code == 0, errors
    assert "next: smoothcert certify runs/t --model mine_for_test:small" in out
    code, _, errors = run_cli("certify", "runs/t", "--n", 100, *device)
    assert code == 2
    assert 'allow it with --model mine_for_test:small (Python: code="mine_for_test:small")' in errors
    code, _, errors = run_cli("certify", "runs/t", *network, "--n", 100, *device)
    assert code == 0, errors
    assert len(read_certificates(workplace / "runs/t/certificates/test-n100.tsv").rows) == 4
    run = load_run(workplace / "runs/t", "mine_for_test:small")
    assert run.spec.shape == (1, 4, 4)
    assert run.spec.num_classes == 2
    pytest.importorskip("fastapi")
    monkeypatch.setattr("smoothcert.certification.serve.server.serve", lambda *arguments: None)
    code, output, errors = run_cli("serve", "runs/t", *network, "--port", 0, *device)
    assert (code, "serving t (gaussian noise, sigma 0.1" in output) == (0, True), errors
    code, _, errors = run_cli("serve", "runs/t", "--port", 0, *device)
    assert (code, "allow it with --model mine_for_test:small" in errors) == (2, True)


def test_training_imports_no_code_that_only_a_file_names(workplace: Path, run_cli: Cli) -> None:
    """A recipe, a model or a folder may come from somebody else; --model says that its code may run."""
    (workplace / "named_by_a_file.py").write_text("from mine_for_test import small")
    (workplace / "r.yaml").write_text(
        "{dataset: 'npz:grey.npz', model: 'named_by_a_file:small', sigma: 0.1, objective: gaussian, epochs: 1,"
        " batch_size: 4, learning_rate_drops: []}"
    )
    (workplace / "downloaded").mkdir()
    shutil.copy(workplace / "r.yaml", workplace / "downloaded" / "recipe.yaml")
    refusal = "its network is the code named_by_a_file:small; allow it with --model named_by_a_file:small"
    for arguments in (
        ("--recipe", "r.yaml", "--out", "runs/t"),
        ("--recipe", "r.yaml", "--out", "runs/t", "--set", "epochs=2"),
        ("--out", "downloaded", "--resume"),
        ("--out", "downloaded", "--resume", "--recipe", "downloaded/recipe.yaml"),
    ):
        code, _, errors = run_cli("train", *arguments, "--device", "cpu")
        assert (code, refusal in errors) == (2, True), errors
        assert "named_by_a_file" not in sys.modules
    assert not (workplace / "runs").exists()

    allow = ("--model", "named_by_a_file:small", "--device", "cpu")
    code, output, errors = run_cli("train", "--recipe", "r.yaml", "--out", "runs/t", *allow)
    assert code == 0, errors
    assert "next: smoothcert certify runs/t --model named_by_a_file:small" in output
    assert run_cli("train", "--out", "downloaded", "--resume", *allow)[0] == 0
    changed = ("--set", "model=named_by_a_file:small", "--device", "cpu")
    assert run_cli("train", "--recipe", "r.yaml", "--out", "runs/u", *changed)[0] == 0


def test_commands_in_refusals_of_runs_are_quoted() -> None:
    folder = Path("my runs/a")
    with pytest.raises(RequestError, match=r"`smoothcert train --preset NAME --out 'my runs/a'` makes one"):
        check_run_folder(folder)
    with pytest.raises(
        RequestError, match=r"--model 'my net\.py:f' .*, give --model 'a b\.py:f' --init 'my runs/a' in"
    ):
        refuse_code(folder, "my net.py:f", "a b.py:f")


def test_plain_callables_and_modules_are_accepted(workplace: Path) -> None:
    assert own_model("mine_for_test:plain", 2)(torch.ones(3, 1, 4, 4)).shape == (3, 2)
    model = own_model("mine_for_test:small", 7)
    assert isinstance(model, nn.Module)
    check_outputs(model, "small", (1, 4, 4), 7)
    assert model.training


@pytest.mark.parametrize("change", [lambda x: x.sub_(0.25), lambda x: x.mul_(2)])
def test_model_that_overwrites_its_input_is_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Its second call would get another image: doctor, the accuracy of certify and some losses would be wrong."""

    def model(images: torch.Tensor) -> torch.Tensor:
        return change(images).flatten(1)[:, :2]

    images, line = torch.rand(4, 1, 2, 2), "leaves its input unchanged, got one that overwrites it"
    with pytest.raises(RequestError, match=line):
        check_outputs(model, "mine", (1, 2, 2), 2)
    with pytest.raises(RequestError, match=line):
        sc.SmoothedClassifier(model, sigma=0.5).certify(images, n=10)
    with pytest.raises(RequestError, match=line):
        sc.doctor(model, [(images, torch.tensor([0, 1, 0, 1]))])


def test_certificates_into_a_file_are_refused_at_once(tmp_path: Path, run_cli: Cli) -> None:
    """Before the network is built: it does not exist."""
    (tmp_path / "weights.pt").touch()
    out, data = tmp_path / "weights.pt", ("--dataset", "mnist-sample", "--sigma", 0.5)
    code, _, errors = run_cli("certify", "--model", "no_such_module_here:f", *data, "--out", out)
    assert (code, errors) == (
        2,
        f"smoothcert: {out}: expected a folder to write to, got a file; choose another --out\n",
    )


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_such_module_here:f", "run where Python finds the module"),
        ("./no_such_file.py:small", "no_such_file.py, which does not exist; correct the path"),
        ("mine_for_test:missing", "expected a function missing in mine_for_test, got none"),
        ("mine_for_test:number", "to be a function, got int; write a function that returns the network"),
        ("mine_for_test:fails", r"mine_for_test:fails\(\) failed \(RuntimeError: no weights\)"),
        ("mine_for_test:nothing", "to return a module or a callable, got int; return the network"),
        ("mine_for_test:leaves", r"leaves\(\) failed \(SystemExit: 0\)"),
        ("mine_for_test:cancels", r"cancels\(\) failed \(CancelledError"),
        ("mine_for_test:ends", "written in Python"),
        ("torch:zeros", "expected torch:zeros to be a function or a class written in Python"),
        ("os:abort", "written in Python"),
        ("sys:exit", "written in Python"),
        ("leaves_when_imported:build", "SystemExit: 0"),
        ("./leaves_when_imported.py:build", "SystemExit: 0"),
        ("folder.py:build", "expected a file, got a folder"),
        (":build", "expected package.module:function or FILE.py:function"),
    ],
)
def test_wrong_references_are_refused(workplace: Path, reference: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        own_model(reference, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cached", "filled", "Brightness"])
def test_wrapped_functions_and_classes_build_networks(workplace: Path, name: str) -> None:
    check_outputs(own_model(f"mine_for_test:{name}", 2), name, (1, 4, 4), 2)


def test_user_network_in_a_file(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = workplace / "elsewhere"
    folder.mkdir()
    (folder / "helper_of_test.py").write_text("CLASSES = 5")
    code = "import helper_of_test, torch\ndef build():\n    return torch.nn.Linear(2, helper_of_test.CLASSES)\n"
    (folder / "torch.py").write_text("raise RuntimeError")  # must not replace the package
    (folder / "json.py").write_text(code)
    for reference in ("elsewhere/json.py:build", f"{folder}/json.py:build", "./elsewhere/../elsewhere/json.py:build"):
        assert own_model(reference, 2).out_features == 5
    import json

    assert "elsewhere" not in str(json.__file__)
    assert own_model("mine_for_test.py:small", 3)[1].out_features == 3


def test_a_file_changed_in_the_same_second_is_imported_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python compares stored bytecode with a file by length and second only."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for outputs in (3, 5):
        file.write_text(f"from torch import nn\ndef build(): return nn.Linear(2, {outputs})")
        os.utime(file, (1_000_000_000, 1_000_000_000))
        assert own_model(f"{file}:build", None).out_features == outputs


def test_network_of_another_shape_is_refused_before_training(workplace: Path) -> None:
    with pytest.raises(RequestError, match=r"gives \[2, 3\] for 2 images, expected logits \[2, 2\]"):
        build_model("mine_for_test:three", (1, 4, 4), 2)
    with pytest.raises(RequestError, match=r"fails on inputs of shape \[3, 9, 9\]"):
        build_model("mine_for_test:three", (3, 9, 9), 3)
    with pytest.raises(RequestError, match="expected mine_for_test:plain to return a torch module"):
        build_model("mine_for_test:plain", (1, 4, 4), 2)


def test_plain_module_is_trained_certified_and_loaded(tmp_path: Path) -> None:
    """No name, no registration: the module itself goes in, and its weights come back into a module like it."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    data = mnist.load_sample("train").subset(torch.arange(128))
    module, before = build(), build().state_dict()
    train(tiny_recipe(model="mine", epochs=1), data, tmp_path / "run", model=module, device="cpu")
    assert not torch.equal(module[1].weight.detach(), before["1.weight"])
    run = load_run(tmp_path / "run", model=build())
    assert torch.equal(run.model[1].weight, module[1].weight)
    certify_dataset(module, data, tmp_path / "c.tsv", sigma=0.5, n=100, seed=1, max_images=2, device="cpu")
    assert len(read_certificates(tmp_path / "c.tsv").rows) == 2
    with pytest.raises(RequestError, match=r"same dtype.* use float32 \(model\.float\(\)"):
        train(tiny_recipe(model="mine"), data, tmp_path / "other", model=build().bfloat16(), device="cpu")
    wrong = nn.Sequential(nn.Flatten(), nn.Linear(784, 3))
    with pytest.raises(RequestError, match="mine gives"):
        train(tiny_recipe(model="mine"), data, tmp_path / "other", model=wrong, device="cpu")


class WithExtraState(nn.Linear):
    """A layer with a state that is no tensor, as those of libraries for quantization have."""

    def get_extra_state(self) -> dict[str, str]:
        return {"recipe": "fp8"}

    def set_extra_state(self, state: dict[str, str]) -> None:
        pass


def test_extra_state_is_certified_and_refused_before_training(tmp_path: Path) -> None:
    """A file of weights cannot hold it; certificates do not need it."""
    model, plain = (nn.Sequential(nn.Flatten(), kind(784, 10)) for kind in (WithExtraState, nn.Linear))
    model.load_state_dict(plain.state_dict(), strict=False)
    data, options = mnist.load_sample("test"), {"sigma": 0.5, "n": 50, "max_images": 2, "seed": 1, "device": "cpu"}
    files = [certify_dataset(m, data, tmp_path / f"{i}.tsv", **options) for i, m in enumerate((model, plain))]
    assert [row.certificate for row in files[0]] == [row.certificate for row in files[1]]
    assert files[0].settings["weights_sha256"] == files[1].settings["weights_sha256"]
    with pytest.raises(RequestError, match=r"got 1\._extra_state, a dict; return a tensor from get_extra_state"):
        train(tiny_recipe(model="mine"), data, tmp_path / "run", model=model, device="cpu")
    with pytest.raises(RequestError, match=r"got 1\._extra_state"):
        write_tensors(tmp_path / "adapted.safetensors", model.state_dict(), {})
    assert not {"run", "adapted.safetensors"} & {path.name for path in tmp_path.iterdir()}


def test_file_in_the_folder_does_not_replace_a_package(tmp_path: Path) -> None:
    """`cd downloaded && smoothcert ...` must not run what lies there."""
    (tmp_path / "yaml.py").write_text("open('ran', 'w')")
    # As the installed program does: its own folder, not the current one, is the first in sys.path.
    program = tmp_path / "bin" / "smoothcert"
    program.parent.mkdir()
    program.write_text("from smoothcert.cli import main; main()")
    assert subprocess.run([sys.executable, program, "presets"], cwd=tmp_path, capture_output=True).returncode == 0
    assert not (tmp_path / "ran").exists()


class CastsToHalf(nn.Linear):
    """A network in float16 that works as it is."""

    def __init__(self) -> None:
        super().__init__(784, 10, dtype=torch.float16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.flatten(1).half())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: (torch.zeros(len(x), 10), 1), r"got tuple; wrap it: lambda x: model\(x\)\[0\]"),
        (lambda x: {"scores": torch.zeros(len(x), 10)}, "got dict with the keys scores; return the logits"),
        (lambda x: torch.zeros(len(x), 7), r"gives \[2, 7\] for 2 images, expected logits \[2, 10\]"),
        (lambda x: torch.zeros(len(x), 12), "name the classes of all outputs: --classes FILE"),
        (lambda x: torch.zeros(len(x)), r"got \[2\]; for one logit z of two classes return torch.stack"),
        (CastsToHalf(), r"to the dtype of its weights, or use float32 \(model\.float\(\), precision fp32"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 10)), r"fails on inputs of shape \[1, 28, 28\]"),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 10, device="meta")), "got one on the device meta, without any"),
    ],
)
def test_models_that_do_not_fit_are_one_line(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        certify_dataset(model, mnist.load_sample("test"), tmp_path / "a.tsv", sigma=0.5, n=10, device="cpu")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_types_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    """The certificates of a network in bf16 are those of the same weights in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(dtype)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    wide.load_state_dict(model.state_dict())
    options = {"sigma": 0.5, "n": 50, "max_images": 3, "seed": 1, "device": "cpu"}
    rows = [
        [
            row.certificate
            for row in certify_dataset(m, mnist.load_sample("test"), tmp_path / f"{i}.tsv", **options).rows
        ]
        for i, m in enumerate((model, wide))
    ]
    assert rows[0] == rows[1]
    assert model[1].weight.dtype == dtype


def test_a_file_is_imported_once_until_its_text_changes(tmp_path: Path) -> None:
    """It may load large weights; in a notebook its author changes it between two calls."""
    path, log = tmp_path / "net.py", tmp_path / "log"

    def write(value: int) -> None:
        log_line = f"open({str(log)!r}, 'a').write('imported {value}\\n')\n"
        path.write_text(log_line + f"def build():\n    return lambda x: x.flatten(1)[:, :2] * 0 + {value}\n")

    def logits() -> list[float]:
        classifier = own_model(f"{path}:build", None)
        return classifier(torch.rand(1, 1, 4, 4))[0].tolist()  # type: ignore[no-any-return]

    write(1)
    assert logits() == logits() == [1, 1]
    write(20)
    assert logits() == [20, 20]
    assert log.read_text() == "imported 1\nimported 20\n"


@pytest.mark.parametrize(
    "command",
    [
        "train --method gaussian --sigma 0.5 --out run",
        "train --preset mnist/gaussian --sigma 0.5 --out run",
        "certify --sigma 0.5 --out run",
        "attack --sigma 0.5 --out run",
        "adapt --sigma 0.5 --out a.safetensors",
        "doctor",
    ],
)
@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("--model own_net.py:smal", "expected a function smal in own_net.py, got none; did you mean small?"),
        ("--model own_net.py:small --init nowhere.pt", "nowhere.pt: no such file"),
    ],
)
def test_a_wrong_network_is_reported_before_images_are_read(
    workplace: Path, run_cli: Cli, command: str, network: str, message: str
) -> None:
    (workplace / "slow.py").write_text("def data(split):\n    raise SystemExit('the images are read')\n")
    (workplace / "own_net.py").write_text(MODULE)
    code, _, err = run_cli(*command.split(), *network.split(), "--dataset", "slow.py:data", "--device", "cpu")
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
