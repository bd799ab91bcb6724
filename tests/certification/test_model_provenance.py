"""What a result was computed with, and how a model came about."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import smoothcert
from smoothcert.certification.model_provenance import model_provenance
from smoothcert.errors import WorkError
from smoothcert.io.results import write_settings
from smoothcert.training.versions import CHECKOUT, source_commit, versions


def git(folder: Path, *arguments: str) -> str:
    own = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=own | names).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "--quiet", "-m", "first")
    git(folder, "tag", "-a", "v1", "-m", "a tag is not what is asked for")
    return folder


def test_versions_record_the_commit_and_uncommitted_changes(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    source_commit.cache_clear()
    assert source_commit(checkout) == {"commit": head}
    (checkout / "file").write_text("2")
    source_commit.cache_clear()
    assert source_commit(checkout) == {"commit": f"{head}-dirty"}


def test_the_commit_is_that_of_the_repository_of_this_test() -> None:
    repository = Path(__file__).parents[2]
    source = Path(smoothcert.__file__)
    if not (repository / ".git").exists() or not source.is_relative_to(repository):
        pytest.skip("needs smoothcert from a git checkout")
    assert repository == CHECKOUT
    source_commit.cache_clear()
    recorded = versions(torch.device("cpu"))["commit"]
    assert recorded.removesuffix("-dirty") == git(repository, "rev-parse", "HEAD")


def test_no_commit_is_recorded_without_a_checkout(tmp_path: Path) -> None:
    assert source_commit(tmp_path) == {}
    (tmp_path / ".git").mkdir()
    source_commit.cache_clear()
    assert source_commit(tmp_path) == {}, "not a repository"


def test_provenance_comes_from_the_model_before_its_certificates(tmp_path: Path) -> None:
    assert model_provenance(tmp_path) == {}
    certificates = tmp_path / "certificates" / "test.tsv"
    certificates.parent.mkdir()
    certificates.write_text("")
    write_settings(certificates, {}, {"model": {"precision": "bf16"}})
    assert model_provenance(tmp_path) == {"precision": "bf16"}
    about = json.dumps({"provenance": {"precision": "fp32"}})
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"smoothcert": about})
    assert model_provenance(tmp_path) == {"precision": "fp32"}


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("nothing")
    with pytest.raises(WorkError, match="damaged or not a smoothcert model"):
        model_provenance(tmp_path)
