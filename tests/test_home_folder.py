"""Paths that begin with ~ are in the home folder, in Python and on the command line; no folder is called "~"."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import tiny_recipe

import smoothcert as sc
from smoothcert.cli import with_expanded_home
from smoothcert.data import ImageData


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.chdir(tmp_path / "here")
    return folder


def test_python_functions_find_and_write_files_at_home(home: Path, tiny_data: ImageData) -> None:
    recipe = tiny_recipe(epochs=1)
    run = sc.train(recipe, tiny_data, "~/a", device="cpu")
    assert run.folder == home / "a"
    sc.train(recipe, tiny_data, "~/b", init="~/a", device="cpu")
    file = sc.certify_dataset(sc.load("~/a"), tiny_data, "~/a.tsv", n=100, max_images=2, device="cpu")
    assert sc.read_certificates("~/a.tsv").acr == file.acr
    (row,) = sc.report("~/a.tsv", out="~/report", formats="md")
    assert row["images"] == 2
    assert sorted(path.name for path in home.iterdir()) == ["a", "a.json", "a.tsv", "b", "report"]
    assert not list(Path.cwd().iterdir())


def test_the_command_line_expands_what_a_shell_leaves(
    home: Path, trained_run: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    shutil.copytree(trained_run, home / "a")
    options = ("--dataset", "mnist-sample", "--n", 100, "--max-images", 2, "--device", "cpu")
    assert run_cli("certify", "~/a", "--out=~/c", *options)[0] == 0
    assert (home / "c/certificates/test-n100.tsv").exists()
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    ("word", "expanded"),
    [
        ("~/a", "HOME/a"),
        ("--out=~/a", "--out=HOME/a"),
        ("--out=a~b", "--out=a~b"),
        ("a~b", "a~b"),
        ("--out", "--out"),
        ("--set=name=~", "--set=name=~"),
        ("~nobody-has-this-name/a", "~nobody-has-this-name/a"),
        ("-", "-"),
    ],
)
def test_only_a_leading_tilde_is_expanded(home: Path, word: str, expanded: str) -> None:
    assert with_expanded_home(word) == expanded.replace("HOME", str(home))
