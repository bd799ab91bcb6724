"""Reports and analyses replace what smoothcert wrote and nothing else."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from smoothcert.errors import RequestError
from smoothcert.io.written_files import MANIFEST, write_files


def test_files_are_replaced_and_removed_repeatedly(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    assert write_files(out, {"a.md": b"1", "b.png": b"2", "c.csv": None}) == [out / "a.md", out / "b.png"]
    write_files(out, {"other.csv": b"3"})
    assert write_files(out, {"a.md": b"4", "b.png": None}) == [out / "a.md"]
    assert {path.name: path.read_bytes() for path in out.glob("[!.]*")} == {"a.md": b"4", "other.csv": b"3"}
    assert sorted(json.loads((out / MANIFEST).read_text())["files"]) == ["a.md", "other.csv"]


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    for name in (f".{MANIFEST}.0a1b2c3d.tmp", ".a.md.0a1b2c3d.tmp", ".mine.tmp"):
        (tmp_path / name).write_text("a part")
    write_files(tmp_path, {"a.md": b"1"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.tmp", MANIFEST, "a.md"]


@pytest.mark.parametrize(
    "manifest", [None, b"", b"[1]", b'{"files": 3}', b'{"files": {"a.md": 3}}', b"\xff", b"[" * 9999]
)
def test_a_file_of_the_user_is_refused_and_nothing_is_written(tmp_path: Path, manifest: bytes | None) -> None:
    (tmp_path / "a.md").write_text("mine")
    if manifest is not None:
        (tmp_path / MANIFEST).write_bytes(manifest)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RequestError, match=r"expected no files but those that smoothcert wrote, got a\.md; choose"):
        write_files(tmp_path, {"b.png": b"new", "a.md": b"new"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_files(tmp_path, {"a.md": b"new"}, force=True)
    write_files(tmp_path, {"a.md": b"newer"})
    assert (tmp_path / "a.md").read_bytes() == b"newer"


def test_a_file_that_the_user_has_changed_is_not_replaced(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.md": b"1", "b.png": b"2"})
    (tmp_path / "a.md").write_text("with my remarks")
    (tmp_path / "b.png").write_text("mine")
    with pytest.raises(RequestError, match=r"got a\.md;"):
        write_files(tmp_path, {"a.md": b"3", "b.png": None})
    write_files(tmp_path, {"b.png": None})
    assert (tmp_path / "b.png").read_text() == "mine", "what is not ours is not removed"


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "dangling link"])
def test_links_folders_and_pipes_are_not_replaced(tmp_path: Path, kind: str) -> None:
    target, path = tmp_path / "target", tmp_path / "a.md"
    target.write_text("precious")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(RequestError, match=r"got a\.md;"):
        write_files(tmp_path, {"a.md": b"new"})
    assert target.read_text() == "precious"


@pytest.mark.parametrize("done", range(5))
def test_after_a_kill_the_same_call_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int) -> None:
    """The rename after `done` others does not happen: two files and twice the list are renamed."""
    write_files(tmp_path, {"a.md": b"old", "b.md": b"old"})
    renamed, replace = [], Path.replace

    def killed(path: Path, target: Path) -> Path:
        renamed.append(path)
        if len(renamed) > done:
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        if done < 4:
            with pytest.raises(KeyboardInterrupt):
                write_files(tmp_path, {"a.md": b"new", "b.md": b"new"})
    write_files(tmp_path, {"a.md": b"newer", "b.md": b"newer"})
    assert [(tmp_path / name).read_bytes() for name in ("a.md", "b.md")] == [b"newer"] * 2


def test_analyze_refuses_before_it_works(run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("analyze", "input-dependent-noise", "--max-dimension", 10, "--out", out, "--format", "svg")
    assert run_cli(*arguments)[0] == 0
    (out / "input-dependent-noise.csv").write_text("mine")
    code, shown, err = run_cli(*arguments)
    assert (code, shown, err.count("\n")) == (2, "", 1)
    assert (out / "input-dependent-noise.csv").read_text() == "mine"
    assert run_cli(*arguments, "--force")[0] == 0
    assert (out / "input-dependent-noise.csv").read_text() != "mine"
