"""Downloads from a mirror on this machine: checked, from the next mirror on failure, never half written."""

import hashlib
import multiprocessing
import os
import random
import threading
from pathlib import Path

import pytest
from local_mirror import Mirror

from smoothcert.data.download import UnreachableError, download
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import replaced_atomically

CONTENT = random.Random(0).randbytes(300_000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "file.gz"


def names(destination: Path) -> list[str]:
    return sorted(path.name for path in destination.parent.iterdir())


def test_file_arrives_whole_and_leaves_nothing_else(mirror: Mirror, destination: Path) -> None:
    mirror.files["file"] = CONTENT
    download([mirror.url("file")], destination, DIGEST)
    assert destination.read_bytes() == CONTENT
    assert names(destination) == ["file.gz"]
    assert mirror.requests == ["file"]
    (destination.parent / "plain").touch()
    assert destination.stat().st_mode == (destination.parent / "plain").stat().st_mode, "readable as the umask allows"


def test_progress_is_shown_with_the_time_left(
    mirror: Mirror, destination: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror.files["file"] = CONTENT
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    download([mirror.url("file")], destination, DIGEST)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "300.0/300.0 kB" in shown.err
    assert "0:00:00" in shown.err
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    destination.unlink()
    download([mirror.url("file")], destination, DIGEST)
    assert capsys.readouterr().err == f"downloading file.gz from 127.0.0.1:{mirror.port}\n"


def test_connection_that_closes_early_falls_to_the_next_mirror(mirror: Mirror, destination: Path) -> None:
    mirror.files = {"first": CONTENT, "second": CONTENT}
    mirror.closes_after = 70_000
    with pytest.raises(UnreachableError, match=r"first: .*70000 bytes read, 230000 more expected"):
        download([mirror.url("first")], destination, DIGEST)
    assert not destination.parent.exists()
    mirror.closes_after = 70_000
    download([mirror.url("first"), mirror.url("second")], destination, DIGEST)
    assert mirror.requests == ["first", "first", "second"]
    assert destination.read_bytes() == CONTENT


def test_what_a_killed_process_left_is_removed(mirror: Mirror, destination: Path) -> None:
    mirror.files["file"] = CONTENT
    destination.parent.mkdir()
    with replaced_atomically(destination) as temporary:
        (destination.parent / temporary.name.replace(".tmp", "0.tmp")).write_bytes(CONTENT[:5000])
    destination.unlink()
    download([mirror.url("file")], destination, DIGEST)
    assert names(destination) == ["file.gz"]


def test_full_disk_is_one_line_and_keeps_the_old_file(mirror: Mirror, destination: Path) -> None:
    """A limit on the size of files fails like a full disk: in the middle of writing."""
    resource = pytest.importorskip("resource")
    mirror.files["file"] = CONTENT
    destination.parent.mkdir()
    destination.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(WorkError, match=r"folder: could not be written to \(File too large\); make room"):
            download([mirror.url("file")], destination, DIGEST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert destination.read_bytes() == b"old"
    assert names(destination) == ["file.gz"]


def test_bad_checksum_falls_to_the_next_mirror(mirror: Mirror, destination: Path) -> None:
    mirror.files = {"bad": b"not the file", "good": CONTENT}
    download([mirror.url("bad"), mirror.url("good")], destination, DIGEST)
    assert mirror.requests == ["bad", "good"]
    assert destination.read_bytes() == CONTENT


def test_absent_on_one_mirror_falls_to_the_next(mirror: Mirror, dead_url: str, destination: Path) -> None:
    mirror.files["file"] = CONTENT
    download([dead_url + "file", mirror.url("absent"), mirror.url("file")], destination, DIGEST)
    assert destination.read_bytes() == CONTENT


def test_wrong_everywhere_leaves_no_file(mirror: Mirror, destination: Path) -> None:
    mirror.files = {"bad": b"not the file", "worse": b""}
    with pytest.raises(UnreachableError) as raised:
        download([mirror.url("bad"), mirror.url("worse")], destination, DIGEST)
    assert not destination.parent.exists()
    message = str(raised.value)
    assert "\n" not in message
    for expected in ("file.gz", DIGEST, hashlib.sha256(b"not the file").hexdigest(), mirror.url("worse")):
        assert expected in message


def test_failure_keeps_the_file_that_was_there(mirror: Mirror, destination: Path) -> None:
    destination.parent.mkdir()
    destination.write_bytes(b"old")
    mirror.files["bad"] = b"not the file"
    with pytest.raises(WorkError):
        download([mirror.url("bad")], destination, DIGEST)
    assert destination.read_bytes() == b"old"


def test_right_file_is_not_downloaded_again(mirror: Mirror, destination: Path) -> None:
    destination.parent.mkdir()
    destination.write_bytes(CONTENT)
    download([mirror.url("file")], destination, DIGEST)
    assert mirror.requests == []


def test_downloads_at_the_same_time_fetch_once(mirror: Mirror, destination: Path) -> None:
    """Threads and a second process: both wait for one lock."""
    mirror.files["file"] = CONTENT
    arguments = ([mirror.url("file")], destination, DIGEST)
    tasks = [threading.Thread(target=download, args=arguments) for _ in range(3)]
    if hasattr(os, "fork"):
        tasks.append(multiprocessing.get_context("fork").Process(target=download, args=arguments))
    for task in reversed(tasks):
        task.start()
    for task in tasks:
        task.join()
    assert mirror.requests == ["file"]
    assert destination.read_bytes() == CONTENT
    assert names(destination) == ["file.gz"]


def test_unreachable_mirrors_are_named_in_one_line(mirror: Mirror, dead_url: str, destination: Path) -> None:
    with pytest.raises(UnreachableError) as raised:
        download([dead_url + "file", mirror.url("absent")], destination, DIGEST)
    message = str(raised.value)
    assert "\n" not in message
    assert f"{dead_url}file: [Errno" in message
    assert f"{mirror.url('absent')}: HTTP status 404" in message
    assert not destination.parent.exists(), "a folder that was made for nothing"


def test_redirection_is_followed_to_http_but_not_elsewhere(mirror: Mirror, destination: Path) -> None:
    mirror.files["file"] = CONTENT
    mirror.redirects = {"moved": mirror.url("file"), "away": "ftp://127.0.0.1/file"}
    with pytest.raises(UnreachableError, match="ftp"):
        download([mirror.url("away")], destination, DIGEST)
    assert not destination.exists()
    download([mirror.url("moved")], destination, DIGEST)
    assert destination.read_bytes() == CONTENT


def test_folder_that_cannot_be_made_is_one_line(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RequestError, match="expected a folder to write to, got 'File exists'; choose another folder"):
        download([mirror.url("file")], tmp_path / "file" / "below", DIGEST)
    assert mirror.requests == []
