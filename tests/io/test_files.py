import errno
import os
import stat
from pathlib import Path

import pytest

from smoothcert.data.npz_file import load_npz
from smoothcert.errors import RequestError
from smoothcert.io.files import check_regular_file, write_text_atomically
from smoothcert.io.results import only_writer
from smoothcert.training.checkpoint import read_model_file
from smoothcert.training.run_folder import MODEL


def test_only_regular_files_are_accepted(tmp_path: Path) -> None:
    file, fifo = tmp_path / "file", tmp_path / "fifo"
    file.write_text("")
    check_regular_file(file)
    check_regular_file(tmp_path / "absent")
    os.mkfifo(fifo)
    for path, kind in ((fifo, "a pipe"), (tmp_path, "a folder")):
        with pytest.raises(RequestError, match=kind):
            check_regular_file(path)


def test_a_file_without_permission_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for file in (MODEL, "images.npz"):
        (tmp_path / file).write_bytes(b"not read")
    monkeypatch.setattr(Path, "open", refused)  # the tests may run as root, who may read every file
    with pytest.raises(RequestError, match=r"model\.safetensors: expected a file that can be read, got 'Permission"):
        read_model_file(tmp_path / MODEL)
    with pytest.raises(RequestError, match=r"images\.npz: expected a file that can be read, got 'Permission"):
        load_npz(tmp_path / "images.npz", "test")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_written_files_have_the_permissions_that_the_umask_allows(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_text_atomically(tmp_path / "file", "old")
        write_text_atomically(tmp_path / "file", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_result_in_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    refused = pytest.raises(RequestError, match=r"file: expected a folder to write to, got .*; choose another")
    with refused, only_writer(tmp_path / "file" / "a.tsv"):
        pass


def test_work_that_fails_leaves_no_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fails"), only_writer(tmp_path / "runs/a/certificates/one.tsv"):
        raise ValueError("fails")
    assert not list(tmp_path.iterdir())
    with only_writer(path := tmp_path / "runs/b/one.tsv"):
        path.touch()
    assert path.exists()
