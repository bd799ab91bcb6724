"""Data sets that are named as code, `FILE.py:Name`: their splits, refusals, and whose consent runs them."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import start_process
from tiny import tiny_recipe

from smoothcert import cli, train
from smoothcert.certification.certificates import read_certificates
from smoothcert.cli.denoising import next_step
from smoothcert.cli.options import ImageOptions
from smoothcert.data import ImageData, Split, load_dataset
from smoothcert.errors import RequestError

Cli = Callable[..., tuple[int, str, str]]
MODULE = """
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset

import smoothcert as sc

Path("imported").touch()
LEVELS = {"train": [10, 200, 20, 210, 30], "test": [40, 220, 230]}


class Grey(Dataset):
    classes = ("dark", "bright")

    def __init__(self, split):
        self.levels = LEVELS[split]

    def __len__(self):
        return len(self.levels)

    def __getitem__(self, index):
        return torch.full((1, 28, 28), self.levels[index], dtype=torch.uint8), int(self.levels[index] > 128)


def by_train(train=True):
    return Grey("train" if train else "test")

def without_split():
    return Grey("train")

def digits(split):
    return sc.load_dataset("mnist-sample", split)

class Streamed(IterableDataset):
    def __iter__(self):
        return iter(())

class Paths(Grey):
    def __getitem__(self, index):
        return Path("photo.png"), 0

class Named(Grey):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], "dark"

class Lost(Grey):
    def __getitem__(self, index):
        raise FileNotFoundError("photo.png")

class Rooted(Grey):
    def __init__(self, root, split):
        pass

class One(Grey):
    classes = ("dark",)

class FromOne(Grey):
    classes = None

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, label + 1

def number():
    return 5

five = 5
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "test_levels"), [("Grey", "test"), ("by_train", "test"), ("without_split", "train")])
def test_splits(name: str, test_levels: str) -> None:
    levels = {"train": [10, 200, 20, 210, 30], "test": [40, 220, 230]}
    splits: tuple[Split, Split] = ("train", "test")
    for split, expected in zip(splits, (levels["train"], levels[test_levels]), strict=True):
        data = load_dataset(f"./mine.py:{name}", split, allow_code=True)
        images, labels = data.batch(torch.arange(len(data)))
        assert images[:, 0, 0, 0].mul(255).round().tolist() == expected
        assert labels.tolist() == [level > 128 for level in expected]
        assert data.split == (split if name != "without_split" else "all")
        assert (data.name, data.class_names) == (f"./mine.py:{name}", ("dark", "bright"))


def test_images_of_the_package_are_taken_as_they_are() -> None:
    data = load_dataset("mine.py:digits", "test", allow_code=True)
    sample = load_dataset("mnist-sample", "test")
    assert isinstance(data, ImageData)
    assert data.digest() == sample.digest()
    assert data.name == "mine.py:digits"


def test_labels_that_count_from_1_are_reported() -> None:
    with pytest.warns(
        UserWarning, match=r"mine\.py:FromOne: no image has a label below 1; if your classes count from 1"
    ):
        data = load_dataset("mine.py:FromOne", "train", allow_code=True)
    assert data.num_classes == 3, "a class without images"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("mine.py:Gray", "dataset: expected a class Gray in mine.py, got none; did you mean Grey?"),
        ("none.py:Grey", "none.py, which does not exist; correct the path"),
        ("no_such_module:Grey", "No module named 'no_such_module'); run where Python finds the module"),
        ("mine.py", "dataset: expected FILE.py:Name, got mine.py; add the name of the class after a colon"),
        ("foldr:mine", ", folder:PATH, npz:PATH, FILE.py:Name, got 'foldr:mine'"),
        ("torch:Grey", "torch:Grey: `train` was given this Dataset in Python; name it: --dataset FILE.py:Grey"),
        ("os:abort", "to be a class or a function that returns a torch Dataset, got builtin_function_or_method"),
        ("mine.py:five", "to be a class or a function that returns a torch Dataset, got int"),
        ("mine.py:number", "expected a map-style torch Dataset with __len__ and __getitem__, got int"),
        ("mine.py:Streamed", "expected a map-style torch Dataset with __len__ and __getitem__, got Streamed"),
        ("mine.py:Rooted", "missing 1 required positional argument: 'root'); it is called with split or train, if it"),
        ("mine.py:Paths", "dataset item 0: expected the image as a tensor [c, h, w], got PosixPath; convert it"),
        ("mine.py:Named", "dataset item 0: expected an integer as label, got str; return the number of the class"),
        ("mine.py:Lost", "dataset item 0: failed (FileNotFoundError: photo.png); correct __getitem__"),
        ("mine.py:One", "expected labels in 0..0, got labels in 0..1; correct the labels or num_classes"),
    ],
)
def test_refusals(reference: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        load_dataset(reference, "test", allow_code=True)
    assert message in str(caught.value).replace("WindowsPath", "PosixPath")


def test_code_that_only_a_file_names_is_not_run(workplace: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run if the user names it, in another process too; certificates name it."""
    marker, cpu, named = workplace / "imported", ("--device", "cpu"), ("--dataset", "mine.py:Grey")
    train = ("train", *named, "--method", "gaussian", "--sigma", 0.5, "--epochs", 1, "--out", "run", *cpu)
    code, out, err = run_cli(*train)
    assert (code, err) == (0, "")
    assert "next: smoothcert certify run --dataset mine.py:Grey" in out
    certify = ("certify", "run", "--n", 20, *cpu)
    commands: list[tuple[object, ...]] = [
        certify,
        ("attack", "run", "--steps", 1, "--num-noise", 1, "--n", 20, *cpu),
        ("doctor", "run", *cpu),
        ("adapt", "run", "--out", "adapted", *cpu),
        ("analyze", "margins", "run", "--n", 10, *cpu),
        ("train", "--resume", "--out", "run", *cpu),
        ("train", "--recipe", "run/recipe.yaml", "--out", "again", *cpu),
        ("sweep", "--recipe", "run/recipe.yaml", "--set", "seed=0,1", "--dry-run", *cpu),
    ]
    marker.unlink()
    for name in [name for name in sys.modules if name.startswith("smoothcert_user_")]:
        monkeypatch.delitem(sys.modules, name)  # as in a new process
    for command in commands:
        code, _, err = run_cli(*command)
        assert (code, err.count("\n")) == (2, 1)
        assert "its data set is the code mine.py:Grey; allow it with --dataset mine.py:Grey" in err
        assert not marker.exists()
    assert run_cli(*commands[5], *named)[0] == 0, "the user may continue the run"
    assert marker.exists()
    assert run_cli(*commands[5], "--dataset", f"{workplace}/mine.py:Grey")[0] == 0, "however the path is written"
    other = start_process(certify_elsewhere, workplace, *map(str, certify), "--dataset", "./mine.py:Grey")
    other.join()
    assert other.exitcode == 0
    file = read_certificates(workplace / "run/certificates/test-n20.tsv")
    assert [row.label for row in file.rows] == [0, 1, 1]
    assert (file.settings["dataset"], file.settings["split"]) == ("./mine.py:Grey", "test")
    code, _, err = run_cli(*certify, *named)
    assert (code, err) == (0, ""), "the same data, and a file that is complete"


def test_the_next_step_after_train_denoiser_names_the_code(tmp_path: Path) -> None:
    """It would be refused without; built-in data are those of the run."""
    for data, words in (("mine.py:Grey", " --dataset mine.py:Grey"), ("mnist", "")):
        line = next_step(Path("out"), data, str(tmp_path), None, ImageOptions())
        assert line == f"next: smoothcert certify {tmp_path}{words} --denoiser out"


def test_python_does_not_run_code_that_only_a_recipe_names(workplace: Path) -> None:
    marker, name = workplace / "imported", "mine.py:Grey"
    recipe = tiny_recipe(dataset=name, model="lenet", epochs=1, batch_size=4)
    run = train(recipe, data=name, out="run", evaluate_every=1, device="cpu")
    assert run.recipe == recipe
    digits = load_dataset("mnist-sample", "train")
    marker.unlink()
    sys.modules.pop("mine", None)
    for option, call in (
        ("allow_code=True", lambda: load_dataset(run.recipe.dataset, "test")),
        ("data='mine.py:Grey'", lambda: train(recipe, out="again", device="cpu")),
        ("test_data='mine.py:Grey'", lambda: train(recipe, digits, "again", evaluate_every=1, device="cpu")),
    ):
        with pytest.raises(RequestError, match=re.escape(f"its data set is the code {name}; allow it with {option}")):
            call()
        assert not marker.exists()
        assert not (workplace / "again").exists()


def certify_elsewhere(folder: Path, *words: str) -> None:
    os.chdir(folder)
    sys.argv = ["smoothcert", *words]
    cli.main()
