"""A user's own images through the command line: splits, class names, and what predict says."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import tiny_recipe

from smoothcert.certification.certificates import read_certificates
from smoothcert.certification.certify_dataset import certify_dataset
from smoothcert.data import ImageData, load_folder, mnist
from smoothcert.errors import RequestError
from smoothcert.models.precision import resolve_precision
from smoothcert.training.api import train
from smoothcert.training.checkpoint import load_run

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Three digits of each of the classes "zero", "one" and "seven" of the MNIST sample, without a split."""
    data = mnist.load_sample("test")
    for label, name in ((0, "zero"), (1, "one"), (7, "seven")):
        (tmp_path / "digits" / name).mkdir(parents=True)
        for index in (data.labels == label).nonzero().flatten()[:3].tolist():
            Image.fromarray(data.images[index, 0].numpy()).save(tmp_path / "digits" / name / f"{index}.png")
    return tmp_path / "digits"


@pytest.fixture
def own_run(digits: Path, tmp_path: Path, run_cli: Cli) -> tuple[Path, str]:
    """A run trained on `digits`, and what training printed."""
    tiny_recipe(dataset=f"folder:{digits}", epochs=1, batch_size=4, learning_rate_drops=()).save(tmp_path / "r.yaml")
    code, out, err = run_cli("train", "--recipe", tmp_path / "r.yaml", "--out", tmp_path / "run", "--device", "cpu")
    assert code == 0, err
    return tmp_path / "run", out


def test_data_without_a_split_are_reported(
    own_run: tuple[Path, str], digits: Path, tmp_path: Path, run_cli: Cli
) -> None:
    run, trained = own_run
    assert f"note: folder:{digits} has no split: all 9 images are trained on" in trained
    code, out, err = run_cli("certify", run, "--n", 100, "--device", "cpu")
    assert code == 0, err
    assert out.count("the certified accuracy is that of images that the network was trained on") == 1
    path = run / "certificates" / "test-n100.tsv"
    assert read_certificates(path).settings["split"] == "all"
    assert read_certificates(path).provenance["class_names"] == ["one", "seven", "zero"]
    code, out, err = run_cli("report", run, "--format", "md", "--out", tmp_path / "report")
    assert code == 0, err
    text = (tmp_path / "report/report.md").read_text()
    assert "certified on images that it was trained on" in text
    assert "always answers class one has" in text, "reports name the classes of a user's folders"
    # With other images there is nothing to warn of.
    for split in ("train", "test"):
        shutil.copytree(digits, tmp_path / "split" / split)
    code, out, _ = run_cli(
        "certify", run, "--n", 100, "--dataset", f"folder:{tmp_path / 'split'}", "--name", "b", "--device", "cpu"
    )
    assert code == 0
    assert "warning" not in out
    assert read_certificates(run / "certificates" / "b.tsv").settings["split"] == "test"


def test_predict_shows_names_and_explains_the_radius(
    own_run: tuple[Path, str], digits: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = own_run
    assert load_run(run).spec.class_names == ("one", "seven", "zero")
    monkeypatch.chdir(tmp_path)
    image = Image.open(next((digits / "one").iterdir()))
    image.save("a.png")
    code, out, err = run_cli("predict", run, "a.png", "--n", 300, "--alpha", 0.5, "--device", "cpu")
    assert code == 0, err
    cell = next(line for line in out.splitlines() if "a.png" in line).split("│")[2].strip()
    assert cell in ("abstain", "0 one", "1 seven", "2 zero")
    last = out.splitlines()[-1]
    assert last.startswith(
        f"radius: the smoothed classifier (network in {resolve_precision('auto', torch.device('cpu'))}) "
        "gives this class to every image closer than this in L2 (pixels in [0, 1]); "
        "each row is wrong with probability at most 0.5; "
    )
    assert "is the most that n = 300 votes can show" in last
    Path("names.txt").write_text("een\nzeven\nnul\n")
    assert run_cli("predict", run, "a.png", "--n", 10, "--classes", "names.txt", "--device", "cpu")[0] == 0
    Path("names.txt").write_text("een\n")
    code, _, err = run_cli("predict", run, "a.png", "--n", 10, "--classes", "names.txt", "--device", "cpu")
    assert code == 2
    assert "expected 3 names" in err


def test_predict_reports_changed_images(own_run: tuple[Path, str], tmp_path: Path, run_cli: Cli) -> None:
    run, _ = own_run
    path = tmp_path / "wide.png"
    Image.new("RGBA", (84, 28), (255, 0, 0, 90)).save(path)
    code, out, err = run_cli("predict", run, path, "--resize", "--n", 10, "--device", "cpu")
    assert code == 0, err
    for note in ("scaled and cropped to 28x28", "converted to grey", "composited on black where transparent"):
        assert out.count(note) == 1
    for content, code in ((np.zeros((28, 28), np.uint16), 1), (np.zeros((28, 29), np.uint8), 2)):
        Image.fromarray(content).save(path)
        found, _, err = run_cli("predict", run, path, "--device", "cpu")
        assert found == code
        assert err.count("\n") == 1
        assert "wide.png: expected " in err


def test_model_with_more_outputs_than_folders(
    digits: Path, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ten.py").write_text(
        "import torch\ndef build():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))\n"
    )
    arguments = ("certify", "--model", "ten.py:build", "--dataset", f"folder:{digits}", "--sigma", 0.5, "--n", 50)
    arguments += ("--out", "out", "--device", "cpu", "--max-images")
    code, _, err = run_cli(*arguments, 5)
    assert code == 2
    assert "name the classes of all outputs: --classes FILE" in err
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    Path("classes.txt").write_text("\n".join(names))
    code, _, err = run_cli(*arguments, 5, "--classes", "classes.txt")
    assert code == 0, err
    stored = read_certificates(tmp_path / "out/certificates/test-n50.tsv")
    assert [row.label for row in stored.rows] == [1, 1, 1, 7, 7]
    assert stored.settings["classes"] == names
    assert run_cli(*arguments, 9, "--classes", "classes.txt")[0] == 0
    assert [row.label for row in read_certificates(stored.path).rows] == [1, 1, 1, 7, 7, 7, 0, 0, 0]
    Path("classes.txt").write_text("\n".join(sorted(names)))
    code, _, err = run_cli(*arguments, 9, "--classes", "classes.txt")
    assert code == 2
    assert "was made with other settings" in err
    Path("classes.txt").write_text("\n".join(names[:7]))
    code, _, err = run_cli(*arguments, 9, "--classes", "classes.txt")
    assert code == 2
    assert "got a list without seven" in err


def test_run_with_more_classes_than_the_folder(trained_run: Path, digits: Path, tmp_path: Path, run_cli: Cli) -> None:
    run = shutil.copytree(trained_run, tmp_path / "run")
    arguments = ("certify", run, "--dataset", f"folder:{digits}", "--n", 100, "--device", "cpu")
    code, _, err = run_cli(*arguments)
    assert code == 2
    assert "or name the classes of all outputs: --classes FILE" in err
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    (tmp_path / "classes.txt").write_text("\n".join(names))
    code, _, err = run_cli(*arguments, "--classes", tmp_path / "classes.txt")
    assert code == 0, err
    rows = read_certificates(run / "certificates" / "test-n100.tsv").rows
    assert sum(row.correct for row in rows) >= 5


def test_options_of_folders_hold_for_training_certification_and_attacks(
    digits: Path, tmp_path: Path, run_cli: Cli
) -> None:
    """Grey files as RGB, with one damaged file and more outputs than folders."""
    (tmp_path / "colour.py").write_text(
        "import torch\ndef build(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 784, num_classes))\n"
    )
    network = ("--model", f"{tmp_path}/colour.py:build")
    (digits / "one" / "damaged.png").write_bytes(b"not an image")
    (tmp_path / "classes.txt").write_text("one\ntwo\nseven\nzero")
    tiny_recipe(dataset=f"folder:{digits}", epochs=1, batch_size=4, learning_rate_drops=()).save(tmp_path / "r.yaml")
    arguments = ("train", "--recipe", tmp_path / "r.yaml", "--out", tmp_path / "run", *network, "--device", "cpu")
    code, _, err = run_cli(*arguments, "--channels", 3)
    assert (code, "damaged.png" in err) == (1, True)
    readable = ("--classes", tmp_path / "classes.txt", "--skip-unreadable")
    again = (*network, *readable)
    code, out, err = run_cli(*arguments, "--channels", 3, *readable)
    assert code == 0, err
    assert "1 of 10 files are skipped: one/damaged.png" in out
    assert f"next: smoothcert certify {tmp_path / 'run'} {' '.join(map(str, again))}" in out
    assert load_run(tmp_path / "run", network[1]).spec.shape == (3, 28, 28)
    code, _, err = run_cli("certify", tmp_path / "run", *again, "--n", 10, "--device", "cpu")
    assert code == 0, err
    rows = read_certificates(tmp_path / "run/certificates/test-n10.tsv").rows
    assert [row.label for row in rows] == [0, 0, 0, 2, 2, 2, 3, 3, 3]
    few = ("--steps", 1, "--num-noise", 1, "--votes", 50, "--max-images", 1, "--radii", 0.5, "--device", "cpu")
    code, _, err = run_cli("attack", tmp_path / "run", *again, *few)
    assert code == 0, err


def test_a_size_of_folders_is_not_asked_of_other_data(digits: Path, tmp_path: Path, run_cli: Cli) -> None:
    """The run has `image_size`, which only folders take: an npz file and an analysis of it have their own shape."""
    fields = {"dataset": f"folder:{digits}", "image_size": 28, "epochs": 1, "batch_size": 4, "learning_rate_drops": ()}
    tiny_recipe(**fields).save(tmp_path / "r.yaml")
    assert run_cli("train", "--recipe", tmp_path / "r.yaml", "--out", tmp_path / "run", "--device", "cpu")[0] == 0
    data = load_folder(digits, "test")
    assert isinstance(data, ImageData)
    np.savez(tmp_path / "same.npz", images=data.images.numpy(), labels=data.labels.numpy())
    other = ("--dataset", f"npz:{tmp_path / 'same.npz'}", "--device", "cpu")
    code, _, err = run_cli("certify", tmp_path / "run", "--n", 10, *other)
    assert (code, err) == (0, "")
    code, _, err = run_cli("analyze", "margins", tmp_path / "run", "--n", 10, "--out", tmp_path / "analysis", *other)
    assert (code, err) == (0, "")


def test_labels_follow_the_class_order_of_the_run(digits: Path, tmp_path: Path, run_cli: Cli) -> None:
    """A run knows the order of its classes: it need not be given again, and another order is refused."""
    (tmp_path / "classes.txt").write_text("zero\none\nseven\n")
    tiny_recipe(dataset=f"folder:{digits}", epochs=1, batch_size=4, learning_rate_drops=()).save(tmp_path / "r.yaml")
    run, few = tmp_path / "run", ("--n", 10, "--device", "cpu")
    trained = ("train", "--recipe", tmp_path / "r.yaml", "--out", run, "--device", "cpu")
    assert run_cli(*trained, "--classes", tmp_path / "classes.txt")[0] == 0
    assert run_cli("certify", run, *few)[0] == 0
    certified = read_certificates(run / "certificates/test-n10.tsv")
    assert [row.label for row in certified.rows] == [1, 1, 1, 2, 2, 2, 0, 0, 0]
    assert run_cli("certify", run, *few, "--classes", tmp_path / "classes.txt")[0] == 0, "the same file continues"
    assert run_cli("train", "--resume", "--out", run, "--device", "cpu")[::2] == (0, ""), "these are the same labels"
    (tmp_path / "classes.txt").write_text("one\nseven\nzero\n")
    code, _, err = run_cli("certify", run, *few, "--classes", tmp_path / "classes.txt", "--name", "other")
    assert (code, "class 0 of its model is zero, and one in folder:" in err) == (2, True)
    with pytest.raises(RequestError, match="class 0 of its model is zero"):
        certify_dataset(load_run(run), load_folder(digits, "test"), tmp_path / "other.tsv", n=10)


def test_weights_of_a_run_bring_the_order_of_its_classes(digits: Path, tmp_path: Path, run_cli: Cli) -> None:
    """As --init, in certification, prediction and training; code that has moved and changed is a case for it."""
    (tmp_path / "flat.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 3))\n"
    )
    (tmp_path / "classes.txt").write_text("zero\none\nseven\n")
    tiny_recipe(dataset=f"folder:{digits}", epochs=1, batch_size=4, learning_rate_drops=()).save(tmp_path / "r.yaml")
    run, new, cpu = tmp_path / "run", f"{tmp_path}/moved.py:build", ("--device", "cpu")
    trained = ("train", "--recipe", tmp_path / "r.yaml", "--model", f"{tmp_path}/flat.py:build", "--out", run, *cpu)
    assert run_cli(*trained, "--classes", tmp_path / "classes.txt")[0] == 0
    assert run_cli("certify", run, "--model", f"{tmp_path}/./flat.py:build", "--n", 10, *cpu)[0] == 0, "the same file"
    (tmp_path / "flat.py").rename(tmp_path / "moved.py")
    assert run_cli("certify", run, "--model", new, "--n", 10, *cpu)[0] == 0, "its content is the same"
    (tmp_path / "moved.py").write_text((tmp_path / "moved.py").read_text() + "number = 1\n")
    code, _, err = run_cli("certify", run, "--model", new, "--n", 10, *cpu)
    assert (code, f"if it has moved, give --model {new} --init {run} in place of the run" in err) == (2, True)
    weights = ("--model", new, "--init", run, "--sigma", 0.5)
    data = ("--dataset", f"folder:{digits}", *cpu)
    assert run_cli("certify", *weights, *data, "--n", 10, "--out", tmp_path / "again")[0] == 0
    certified = read_certificates(tmp_path / "again/certificates/test-n10.tsv")
    assert [row.label for row in certified.rows] == [1, 1, 1, 2, 2, 2, 0, 0, 0]
    image = next((digits / "one").iterdir())
    code, out, _ = run_cli("predict", *weights, image, "--n", 1000, "--format", "json", *cpu)
    answer = json.loads(out)["images"][0]
    assert (code, answer["name"]) == (0, {0: "zero", 1: "one", 2: "seven"}.get(answer["class"]))
    assert run_cli("train", *weights, *data, "--method", "gaussian", "--epochs", 1, "--out", tmp_path / "tuned")[0] == 0
    assert load_run(tmp_path / "tuned", new).spec.class_names == ("zero", "one", "seven")
    recipe = tiny_recipe(dataset=f"folder:{digits}", model=new, epochs=1, batch_size=4, learning_rate_drops=())
    for start in ({"init": run}, {"resume": True}):
        in_python = train(recipe, out=tmp_path / "in-python", device="cpu", on_note=print, **start)
        assert in_python.spec.class_names == ("zero", "one", "seven")


def test_classes_that_the_run_does_not_have(digits: Path, tmp_path: Path, run_cli: Cli) -> None:
    """Another name for a class is reported; a class of the model at another place is refused."""
    tiny_recipe(dataset=f"folder:{digits}", epochs=1, batch_size=4, learning_rate_drops=()).save(tmp_path / "r.yaml")
    assert run_cli("train", "--recipe", tmp_path / "r.yaml", "--out", tmp_path / "run", "--device", "cpu")[0] == 0
    certify = ("certify", tmp_path / "run", "--n", 10, "--device", "cpu")
    assert " is zero in " not in run_cli(*certify)[1]
    (digits / "zero").rename(digits / "zzz")
    code, out, _ = run_cli(*certify, "--name", "renamed")
    assert (code, f"class 2 is zero in {tmp_path / 'run'} and zzz in folder:{digits}: classes are" in out) == (0, True)
    (digits / "zzz").rename(digits / "aaa")
    code, _, err = run_cli(*certify, "--name", "moved")
    assert (code, "class 1 of its model is seven, and one in folder:" in err) == (2, True)


@pytest.mark.parametrize("reference", ["torch:zeros", "os:abort", "sys:exit"])
def test_built_in_functions_are_refused(run_cli: Cli, tmp_path: Path, reference: str) -> None:
    code, _, err = run_cli(
        *("certify", "--model", reference, "--dataset", "mnist-sample", "--sigma", 0.5, "--out", tmp_path / "out"),
        *("--device", "cpu"),
    )
    assert code == 2
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
