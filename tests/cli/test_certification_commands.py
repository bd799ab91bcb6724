"""`certify`, `merge`, `recertify` and `attack` as a user calls them: warnings, refusals and the printed next steps."""

import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_recipe

from smoothcert import cli
from smoothcert.certification.attack_file import read_attacks
from smoothcert.certification.certificates import read_certificates
from smoothcert.data import DATASETS, ImageData, mnist
from smoothcert.errors import RequestError
from smoothcert.models import LeNet
from smoothcert.training.metrics import METRICS, append_metrics

Cli = Callable[..., tuple[int, str, str]]
FEW = ("--n", 50, "--n0", 20, "--device", "cpu")
MODULE = """
import torch
from torch import nn

class Constant(nn.Module):
    def forward(self, x):
        return torch.nn.functional.one_hot(torch.zeros(len(x), dtype=torch.long), 10).float()

def constant():
    return Constant()

def small(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))
"""


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module and a data set of four 8x8 colour images of two classes."""
    (tmp_path / "nets_for_cli_test.py").write_text(MODULE)
    levels = np.repeat(np.array([40, 60, 200, 220], dtype=np.uint8), 192).reshape(4, 8, 8, 3)
    labels = np.array([0, 0, 1, 1])
    np.savez(tmp_path / "grey.npz", images=levels, labels=labels)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def printed_next(out: str) -> list[str]:
    """The words of the command that the output ends with."""
    (line,) = (line for line in out.splitlines() if "next: smoothcert " in line and not line.startswith("warning"))
    return shlex.split(line.split("next: smoothcert ")[1])


def test_certify_prints_no_warning_for_a_trained_run(run_cli: Cli, run: Path) -> None:
    code, out, err = run_cli("certify", run, *FEW, "--max-images", 100)
    assert (code, err) == (0, "")
    assert "warning:" not in out
    stored = read_certificates(run / "certificates" / "test-n50.tsv").provenance["accuracy"]
    assert stored["images"] == 100
    assert stored["noisy"] > 0.5


def test_another_sigma_or_noise_than_in_training_is_reported(run_cli: Cli, run: Path) -> None:
    for options, asked in (
        (("--sigma", 0.6), "gaussian noise at sigma 0.6"),
        (("--noise", "laplace"), "laplace noise at sigma 0.5"),
    ):
        code, out, _ = run_cli("certify", run, *FEW, *options, "--max-images", 3, "--name", options[0].strip("-"))
        assert code == 0
        (warning,) = (line for line in out.splitlines() if line.startswith("warning"))
        assert f"was trained with gaussian noise at sigma 0.5, not with {asked}" in warning


def test_a_recipe_that_was_edited_after_training_is_reported(run_cli: Cli, run: Path) -> None:
    recipe = run / "recipe.yaml"
    text = recipe.read_text()
    for edited, differs in ((text.replace("sigma: 0.5", "sigma: 0.25"), True), (text + "epochs: 99\n", False)):
        lines = [line for line in edited.splitlines() if differs or line == "epochs: 99" or "epochs:" not in line]
        recipe.write_text("\n".join(lines))
        code, out, _ = run_cli("certify", run, *FEW, "--max-images", 2)
        warned = "recipe.yaml: is not the recipe of the network (sigma: the file has 0.25, the network 0.5)"
        assert (code, warned in out, "warning" in out) == (0, differs, differs)


def test_another_sigma_gets_its_own_file(run_cli: Cli, run: Path) -> None:
    files = run / "certificates"
    for options in ((), ("--sigma", 0.6), ("--sigma", 0.5), ("--sigma", 0.6, "--shard", "1/2")):
        assert run_cli("certify", run, *FEW, *options, "--max-images", 2)[0] == 0
    expected = {"test-n50": 0.5, "test-n50-sigma0.6": 0.6, "test-n50-sigma0.6-shard1of2": 0.6}
    assert {path.stem: read_certificates(path).settings["sigma"] for path in files.glob("*.tsv")} == expected


@pytest.mark.usefixtures("no_pictures")
def test_certificates_in_another_folder(run_cli: Cli, trained_run: Path, run: Path, tmp_path: Path) -> None:
    """Nothing is written into the run, which its fixture checks; the report knows its recipe."""
    out, few = tmp_path / "certified", (*FEW, "--max-images", 2)
    code, printed, err = run_cli("certify", trained_run, "--out", out, *few)
    assert (code, err) == (0, "")
    assert (out / "recipe.yaml").read_text() == (trained_run / "recipe.yaml").read_text()
    code, printed, _ = run_cli(*printed_next(printed), "--out", tmp_path / "report", "--format", "md")
    assert code == 0
    assert "Gaussian" in printed
    assert run_cli("certify", trained_run, "--out", out, *FEW, "--max-images", 3)[0] == 0, "the file is continued"
    code, printed, err = run_cli("certify", trained_run, run, "--out", tmp_path / "all", *few, "--json")
    assert (code, err) == (0, "")
    assert [json.loads(line)["run"] for line in printed.splitlines()] == [str(trained_run), str(run)]
    assert {path.parent.parent.name for path in (tmp_path / "all").rglob("*.tsv")} == {"trained", "run"}
    recipe = (run / "recipe.yaml").read_bytes()
    assert run_cli("certify", run, "--out", run, *few)[0] == 0
    assert (run / "recipe.yaml").read_bytes() == recipe


def test_folders_that_certificates_of_a_run_cannot_go_to(run_cli: Cli, trained_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tiny_recipe(seed=7).save(other / "recipe.yaml")
    certified = tmp_path / "ensemble" / "certificates"
    certified.mkdir(parents=True)
    (certified / "test-n50.tsv").touch()
    twin = Path(shutil.copytree(trained_run, tmp_path / "twin" / trained_run.name))
    wrong_images = ("--dataset", f"npz:{tmp_path / 'two.npz'}")
    (tmp_path / "nets_for_cli_test.py").write_text(MODULE)
    code = f"{tmp_path / 'nets_for_cli_test.py'}:constant"
    own = ("--model", code, "--dataset", "mnist-sample", "--sigma", 0.5, "--out", twin)
    np.savez(tmp_path / "two.npz", images=np.zeros((2, 8, 8, 3), np.uint8), labels=np.arange(2))
    for words, expected in (
        ((trained_run, "--out", other), "without files of another classifier than"),
        ((trained_run, "--out", certified.parent), "without files of another classifier than"),
        ((trained_run, "--out", twin), "without files of another classifier than"),
        ((trained_run, twin, "--out", tmp_path / "new"), "--out: expected runs with different names"),
        ((trained_run, "--out", tmp_path / "new", *wrong_images), "its model takes images (1, 28, 28)"),
        (own, f"--out: expected a folder for {code} alone, got the run {twin}"),
    ):
        code, _, err = run_cli("certify", *words, *FEW, "--max-images", 2)
        assert (code, err.count("\n")) == (2, 1)
        assert expected in err
    assert not (tmp_path / "new").exists()


def test_a_network_that_fails_under_the_noise_is_reported(run_cli: Cli, run: Path) -> None:
    call = ("certify", run, *FEW, "--max-images", 100, "--sigma", 8)
    code, out, _ = run_cli(*call)
    assert code == 0
    units, _, warning = (line for line in out.splitlines() if line.startswith("warning"))
    assert units == (
        "warning: sigma 8 hides images in [0, 1] completely; if it is meant for pixels in 0..255, give 8/255 = 0.0314"
    )
    accuracy = read_certificates(run / "certificates" / "test-n50-sigma8.tsv").provenance["accuracy"]
    measured = f"clean accuracy {accuracy['clean']:.0%}, under noise {accuracy['noisy']:.0%} (100 images)"
    advice = "choose a smaller sigma; `smoothcert doctor` says how to train"
    assert warning == f"warning: not robust to this noise: {measured}; {advice}"
    code, out, _ = run_cli(*call)
    assert "not robust to this noise" not in out, "a finished file is not judged again"


def test_accuracy_at_chance_is_reported(run_cli: Cli, workplace: Path) -> None:
    code, out, _ = run_cli(
        *("certify", "--model", "nets_for_cli_test:constant", "--dataset", "mnist-sample", "--sigma", 0.25),
        *("--out", "runs/c", "--max-images", 100, *FEW),
    )
    assert code == 0
    (warning,) = (line for line in out.splitlines() if line.startswith("warning"))
    assert "accuracy at chance" in warning
    assert "check the normalisation (it belongs inside the model), the input range [0, 1] and the order" in warning


def test_accuracy_is_measured_on_all_classes_of_sorted_images(run_cli: Cli, workplace: Path) -> None:
    """The first hundred images have four of ten classes."""
    labels = np.repeat(np.arange(10), 30)
    images = np.zeros((300, 2, 2), np.uint8)
    np.savez("sorted.npz", images=images, labels=labels, class_names=np.array(list("abcdefghij")))
    Path("names.txt").write_text("\n".join("abcdefghij"))
    code, out, _ = run_cli(
        *("certify", "--model", "nets_for_cli_test:constant", "--dataset", "npz:sorted.npz", "--sigma", 0.25),
        *("--classes", "names.txt", "--out", "runs/c", "--n", 10, "--n0", 5, "--device", "cpu"),
    )
    assert code == 0
    (warning,) = (line for line in out.splitlines() if line.startswith("warning"))
    assert "accuracy at chance: clean accuracy 10%, under noise 10% (100 images)" in warning


def test_accuracy_of_a_network_from_elsewhere_is_shown(run_cli: Cli, workplace: Path) -> None:
    code, out, _ = run_cli(
        *("certify", "--model", "nets_for_cli_test:small", "--dataset", "npz:grey.npz", "--sigma", 0.25),
        *("--out", "runs/c", *FEW),
    )
    assert code == 0
    accuracy = read_certificates(workplace / "runs/c/certificates/test-n50.tsv").provenance["accuracy"]
    shown = f"note: clean accuracy {accuracy['clean']:.0%}, under noise {accuracy['noisy']:.0%} (4 images)"
    assert shown in out.splitlines()
    assert "note: no --init: the weights are those that nets_for_cli_test:small returns" in out.splitlines()


def test_another_model_than_that_of_the_run_is_refused(run_cli: Cli, run: Path) -> None:
    for command in (("certify", run), ("attack", run)):
        code, _, err = run_cli(*command, "--model", "some.module:function")
        assert (code, err.count("\n")) == (2, 1)
        assert "its network is tiny, got --model some.module:function; leave --model out" in err
    assert run_cli("certify", run, "--model", "tiny", *FEW, "--max-images", 1)[0] == 0


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "a\x1b[2J", "a\nb"])
def test_names_that_are_not_plain_file_names_are_refused(run_cli: Cli, run: Path, name: str) -> None:
    for command in ("certify", "attack"):
        code, _, err = run_cli(command, run, f"--name={name}", *("--n", 50, "--device", "cpu"))
        assert (code, err.count("\n")) == (2, 1)
        assert "--name: expected a file's name without folders" in err
        assert "\x1b" not in err
    assert not (run / "certificates").exists()


@pytest.mark.parametrize("shard", ["²/8", "1/²", "9999999999/2", "1/2/3", "-1/2", "0/2"])
def test_shards_that_are_not_numbers_are_refused(run_cli: Cli, run: Path, shard: str) -> None:
    code, _, err = run_cli("certify", run, "--shard", shard)
    assert (code, err.count("\n")) == (2, 1)
    assert "shard: expected i/k" in err


@pytest.mark.parametrize("n", [2**31, 2**63 - 1])
def test_too_many_votes_are_refused(run_cli: Cli, run: Path, n: int) -> None:
    code, _, err = run_cli("certify", run, "--n", n)
    assert (code, err.count("\n")) == (2, 1)
    assert "n: expected at most 1000000000" in err


@pytest.mark.parametrize("place", ["certificates", "certificates/test-n50.tsv", "attacks"])
def test_nothing_is_written_through_a_link_that_leaves_the_run(
    run_cli: Cli, run: Path, tmp_path: Path, place: str
) -> None:
    private = tmp_path / "private"
    if place.endswith("tsv"):
        (run / "certificates").mkdir()
        private.write_text("mine")
    else:
        private.mkdir()
    (run / place).symlink_to(private)
    command = "attack" if place == "attacks" else "certify"
    code, _, err = run_cli(command, run, "--n", 50, "--max-images", 1, "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1)
    assert "a symbolic link leads to" in err
    assert (private.read_text() == "mine") if private.is_file() else (os.listdir(private) == [])


def test_training_metrics_are_not_written_through_a_link_that_leaves_the_run(tmp_path: Path) -> None:
    private, run = tmp_path / "private", tmp_path / "run"
    private.write_text("mine")
    run.mkdir()
    (run / METRICS).symlink_to(private)
    with pytest.raises(RequestError, match="a symbolic link leads to"):
        append_metrics(run / METRICS, {"epoch": 0})
    assert private.read_text() == "mine"


def test_certificates_of_other_images_are_not_attacked(run_cli: Cli, run: Path) -> None:
    assert run_cli("certify", run, *FEW, "--max-images", 1)[0] == 0
    path = run / "certificates" / "test-n50.tsv"
    path.write_text(path.read_text().replace("\n0\t", "\n123456789\t"))
    code, _, err = run_cli("attack", run, "--n", 50, "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1)
    assert "image 123456789: expected an index below 2000" in err


def test_merge_through_the_command_line(run_cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed command, its pattern expanded as a shell does; with a shard missing it is refused."""
    monkeypatch.chdir(run.parent)
    for part in (1, 2):
        _, out, _ = run_cli("certify", run, *FEW, "--max-images", 4, "--shard", f"{part}/2")
        command, pattern, *rest = printed_next(out)
        shards = sorted(Path(pattern).parent.glob(Path(pattern).name))
        code, text, err = run_cli(command, *shards, *rest)
        if part == 1:
            assert code == 2
            assert "shard 2 of 2 is missing" in err
            code, text, err = run_cli(command, *shards, "--out", "part.tsv", "--partial")
            assert code == 0
            assert "merged with --partial, incomplete: shard 2 of 2 is missing" in text
    assert (code, err) == (0, "")
    assert [row.index for row in read_certificates("merged.tsv").rows] == [0, 1, 2, 3]
    assert run_cli(*printed_next(text))[0] == 0
    code, _, err = run_cli("merge", *shards, "--out", "merged.tsv")
    assert code == 2
    assert "merged.tsv: exists already" in err


def test_attack_compares_the_name_of_the_data_with_the_certificates(
    run_cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CIFAR-10 does whose files are not the official ones."""

    def renamed(split: str, folder: Path) -> ImageData:
        changed = {"name": "mnist-sample (not the official files)", "notes": ("two files are not the official ones",)}
        return dataclasses.replace(mnist.load_sample(split), **changed)

    spec = dataclasses.replace(DATASETS["mnist-sample"], load=renamed)
    monkeypatch.setitem(DATASETS, "mnist-sample", spec)
    monkeypatch.chdir(run.parent)
    assert run_cli("certify", run, *FEW, "--max-images", 2)[0] == 0
    options = ("--radii", "0.5", "--steps", 2, "--num-noise", 2, "--n", 50, "--device", "cpu")
    code, out, err = run_cli("attack", run, *options)
    assert (code, err) == (0, "")
    assert out.startswith("note: two files are not the official ones\n")
    assert run_cli(*printed_next(out))[0] == 0
    monkeypatch.undo()
    code, _, err = run_cli("attack", run, *options, "--name", "other")
    assert code == 2
    assert "dataset: the file has 'mnist-sample (not the official files)', the request 'mnist-sample'" in err


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("network", ["resnet20", "nets_for_cli_test:small"])
def test_the_printed_next_steps_run(run_cli: Cli, workplace: Path, network: str) -> None:
    """train, certify, attack, report: each command is printed by the one before, with all it needs."""
    tiny_recipe(dataset="npz:grey.npz", model=network, epochs=1, learning_rate_drops=(), batch_size=4).save(
        workplace / "r.yaml"
    )
    code, out, err = run_cli(
        *("train", "--recipe", "r.yaml", "--model", network, "--out", "my runs/it's", "--data", "my data"),
        *("--device", "cpu"),
    )
    assert (code, err) == (0, "")
    certify = printed_next(out)
    assert certify[:2] == ["certify", "my runs/it's"]
    code, _, err = run_cli("report", "my runs/it's")
    assert (code, err.count("\n")) == (2, 1)
    _, *suggested = shlex.split(err.split("`")[1])
    assert suggested == certify[: certify.index("--data")]
    assert run_cli(*suggested, *FEW, "--name", "suggested")[0] == 0
    shutil.rmtree("my runs/it's/certificates")
    code, out, err = run_cli(*certify, *FEW)
    assert (code, err) == (0, "")
    assert run_cli(*printed_next(out))[0] == 0
    code, out, err = run_cli(
        *("attack", *certify[1:], "--radii", "0.5", "--steps", 2, "--num-noise", 2, "--n", 50, "--device", "cpu")
    )
    assert (code, err) == (0, "")
    assert run_cli(*printed_next(out))[0] == 0


@pytest.mark.usefixtures("no_pictures")
def test_attack_writes_to_another_folder_as_certify_does(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    """The run may be read-only: its certificates are compared, and the printed commands write next to the attacks."""
    attack = ("attack", run, "--out", tmp_path / "out", "--radii", "0.5", "--steps", 2, "--num-noise", 2, "--n", 50)
    code, out, err = run_cli(*attack, "--max-images", 1, "--device", "cpu")
    assert (code, err) == (0, "")
    assert printed_next(out) == ["certify", str(run), "--out", str(tmp_path / "out")], "there are no certificates yet"
    assert run_cli("certify", run, *FEW, "--max-images", 2)[0] == 0
    before = sorted(run.rglob("*"))
    code, out, err = run_cli(*attack, "--name", "compared", "--device", "cpu")
    assert (code, err) == (0, "")
    attacked = read_attacks(tmp_path / "out/attacks/compared.tsv").rows
    assert [row.certified_radius is None for row in attacked] == [False, False]
    assert run_cli(*printed_next(out), *FEW, "--max-images", 1)[0] == 0
    code, out, err = run_cli(*attack, "--name", "own", "--device", "cpu")
    assert (code, err, printed_next(out)) == (0, "", ["report", str(tmp_path / "out")])
    assert len(read_attacks(tmp_path / "out/attacks/own.tsv").rows) == 1, "certificates in the same folder come first"
    assert run_cli(*printed_next(out), "--out", tmp_path / "report")[0] == 0
    assert sorted(run.rglob("*")) == before
    (tmp_path / "out/recipe.yaml").write_text("of another run")
    code, _, err = run_cli(*attack)
    assert (code, err.count("\n")) == (2, 1)
    assert "expected a folder without files of another classifier" in err


def test_attack_refuses_wrong_radii_before_it_reads_a_file(run_cli: Cli, trained_run: Path) -> None:
    code, _, err = run_cli("attack", trained_run, "--radii", "x", "--certificates", trained_run / "recipe.yaml")
    assert (code, err.count("\n")) == (2, 1)
    assert "radii: expected comma-separated numbers" in err


def test_all_next_steps_are_known() -> None:
    """Each of these has a test that runs what it prints; a new one needs one, too."""
    sources = Path(cli.__file__).parent.glob("*.py")
    printing = {path.stem for path in sources if "next: " in path.read_text(encoding="utf-8")}
    here = {"attacking", "certification", "certify_targets", "listing", "training"}
    elsewhere = "test_batch_norm.py, test_denoiser.py, test_export.py and test_doctor_command.py"
    assert printing == here | {"adapting", "denoising", "doctor"}, elsewhere


@pytest.mark.usefixtures("no_pictures")
def test_next_steps_of_other_commands_run(run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `import`, `papers` and certificates of an own model, as printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets_for_cli_test.py").write_text(MODULE)
    few = mnist.load_sample("train").subset(torch.arange(40))
    np.savez(tmp_path / "few.npz", images=few.images[:, 0].numpy(), labels=few.labels.numpy())
    weights = {f"module.{name}": tensor for name, tensor in LeNet(10).state_dict().items()}
    torch.save({"arch": "lenet", "epoch": 90, "state_dict": weights}, tmp_path / "checkpoint.pth.tar")
    own = ("--model", "nets_for_cli_test.py:constant", "--dataset", "npz:few.npz", "--out", "runs/own")
    commands: list[tuple[object, ...]] = [
        ("papers",),
        ("import", "checkpoint.pth.tar", "--sigma", 0.5, "--dataset", "mnist-sample", "--out", "runs/imported"),
        ("certify", *own, "--sigma", 0.25, *FEW),
    ]
    names = []
    for command in commands:
        code, out, err = run_cli(*command)
        assert (code, err) == (0, "")
        steps = [shlex.split(line.split("next: smoothcert ")[1]) for line in out.splitlines() if "next: " in line]
        assert steps, command
        for step in steps:
            names.append(step[0])
            few_votes = (*FEW, "--max-images", 2) if step[0] == "certify" else ()
            code, _, err = run_cli(*step, *few_votes)
            assert (code, err) == (0, ""), step
            shutil.rmtree(tmp_path / "report", ignore_errors=True)
    assert {"papers", "certify", "report"} <= set(names)
