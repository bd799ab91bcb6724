"""Downloads against a mirror on this machine: resumed, checked, never half there."""

import hashlib
import random
import threading
from pathlib import Path

import pytest
from local_mirror import Mirror

from smoothcert.data.download import UnreachableError, download
from smoothcert.errors import RequestError, WorkError

CONTENT = random.Random(0).randbytes(300_000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "file.gz"


def names(destination: Path) -> list[str]:
    return sorted(path.name for path in destination.parent.iterdir())


def test_file_arrives_whole_with_progress_and_leaves_nothing_else(mirror: Mirror, destination: Path) -> None:
    mirror.files["file"] = CONTENT
    seen: list[tuple[int, int | None]] = []
    download([mirror.url("file")], destination, DIGEST, lambda done, total: seen.append((done, total)))
    assert destination.read_bytes() == CONTENT
    assert names(destination) == ["file.gz"]
    assert mirror.requests == [("file", None)]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_interrupted_download_is_resumed_by_the_next_call(mirror: Mirror, destination: Path) -> None:
    mirror.files["file"] = CONTENT
    mirror.closes_after = 100_000
    with pytest.raises(UnreachableError, match=r"closed after 100000 of 300000 bytes"):
        download([mirror.url("file")], destination, DIGEST)
    assert names(destination) == ["file.gz.part"]
    seen: list[tuple[int, int | None]] = []
    download([mirror.url("file")], destination, DIGEST, lambda done, total: seen.append((done, total)))
    assert mirror.requests == [("file", None), ("file", "bytes=100000-")]
    assert destination.read_bytes() == CONTENT
    assert names(destination) == ["file.gz"]
    assert seen[0][0] > 100_000
    assert seen[-1] == (300_000, 300_000)


def test_interrupted_download_is_resumed_from_the_next_mirror(mirror: Mirror, destination: Path) -> None:
    mirror.files = {"first": CONTENT, "second": CONTENT}
    mirror.closes_after = 70_000
    download([mirror.url("first"), mirror.url("second")], destination, DIGEST)
    assert mirror.requests == [("first", None), ("second", "bytes=70000-")]
    assert destination.read_bytes() == CONTENT


def test_server_that_ignores_ranges_starts_over(mirror: Mirror, destination: Path) -> None:
    mirror.files["file"] = CONTENT
    mirror.serves_ranges = False
    part_file(destination).write_bytes(CONTENT[:5000])
    download([mirror.url("file")], destination, DIGEST)
    assert mirror.requests == [("file", "bytes=5000-")]
    assert destination.read_bytes() == CONTENT


def test_part_with_wrong_bytes_is_thrown_away_and_fetched_anew(mirror: Mirror, destination: Path) -> None:
    mirror.files["file"] = CONTENT
    part_file(destination).write_bytes(b"x" * 5000)
    download([mirror.url("file")], destination, DIGEST)
    assert mirror.requests == [("file", "bytes=5000-"), ("file", None)]
    assert destination.read_bytes() == CONTENT


@pytest.mark.parametrize("part", [CONTENT, CONTENT + b"too long"])
def test_part_that_reaches_the_end_is_completed(mirror: Mirror, destination: Path, part: bytes) -> None:
    mirror.files["file"] = CONTENT
    part_file(destination).write_bytes(part)
    download([mirror.url("file")], destination, DIGEST)
    assert destination.read_bytes() == CONTENT


def test_answer_with_another_range_is_not_appended(mirror: Mirror, destination: Path) -> None:
    mirror.files["file"] = CONTENT
    mirror.range_shift = 10
    part = part_file(destination)
    part.write_bytes(CONTENT[:5000])
    with pytest.raises(UnreachableError, match="Content-Range"):
        download([mirror.url("file")], destination, DIGEST)
    assert part.read_bytes() == CONTENT[:5000]


def test_bad_checksum_falls_to_the_next_mirror(mirror: Mirror, destination: Path) -> None:
    mirror.files = {"bad": b"not the file", "good": CONTENT}
    download([mirror.url("bad"), mirror.url("good")], destination, DIGEST)
    assert mirror.requests == [("bad", None), ("good", None)]
    assert destination.read_bytes() == CONTENT


def test_absent_on_one_mirror_falls_to_the_next(mirror: Mirror, dead_url: str, destination: Path) -> None:
    mirror.files["file"] = CONTENT
    download([dead_url + "file", mirror.url("absent"), mirror.url("file")], destination, DIGEST)
    assert destination.read_bytes() == CONTENT


def test_wrong_everywhere_leaves_no_file(mirror: Mirror, destination: Path) -> None:
    mirror.files = {"bad": b"not the file", "worse": b""}
    with pytest.raises(WorkError) as raised:
        download([mirror.url("bad"), mirror.url("worse")], destination, DIGEST)
    assert not isinstance(raised.value, UnreachableError)
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
    mirror.files["file"] = CONTENT
    threads = [threading.Thread(target=download, args=([mirror.url("file")], destination, DIGEST)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mirror.requests == [("file", None)]
    assert destination.read_bytes() == CONTENT
    assert list(destination.parent.iterdir()) == [destination]


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


@pytest.mark.parametrize("urls", [[], ["file:///etc/hostname"], ["ftp://127.0.0.1/file"], ["/etc/hostname"]])
def test_only_http_addresses_are_accepted(destination: Path, urls: list[str]) -> None:
    with pytest.raises(RequestError, match=r"expected .* got .*; give"):
        download(urls, destination, DIGEST)
    assert not destination.parent.exists()


def test_folder_that_cannot_be_made_is_one_line(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(WorkError, match="cannot write"):
        download([mirror.url("file")], tmp_path / "file" / "below", DIGEST)
    assert mirror.requests == []


def part_file(destination: Path) -> Path:
    destination.parent.mkdir()
    return destination.with_name("file.gz.part")
