"""Downloading one file whose SHA-256 is known: from several mirrors, resumed, never half there."""

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import locked
from smoothcert.io.text import one_line

Progress = Callable[[int, int | None], None]

TIMEOUT_SECONDS = 10.0  # to connect, and between two pieces of the answer
CHUNK_BYTES = 1 << 16


class UnreachableError(WorkError):
    """No mirror delivered the file: the network is down, or the mirrors are, or they no longer have it."""


class _MirrorFailed(Exception):
    """One mirror did not deliver; the next may."""


def download(urls: Sequence[str], destination: Path, sha256: str, progress: Progress | None = None) -> None:
    """Make `destination` the file with digest `sha256`, taken from the first of `urls` that delivers it.

    On return `destination` holds exactly that content; on an error it is as it was before. What has arrived waits in
    `<destination>.part`, and the next mirror or the next call goes on from there. A complete file with another digest
    is deleted and the next mirror tried. `progress` receives (bytes so far, bytes in all or None if not told).
    Raises UnreachableError when no mirror delivered and WorkError when a mirror delivered something else.
    """
    _check_urls(urls)
    part = destination.with_name(destination.name + ".part")
    try:
        with made(destination.parent), alone_in(destination.parent):
            if _digest(destination) != sha256:
                _fetch_from_any(urls, part, sha256, progress)
                part.replace(destination)
    except OSError as error:
        problem = error.strerror or error
        raise WorkError(f"cannot write {destination}: {problem}; free the space or choose another folder") from error


def _check_urls(urls: Sequence[str]) -> None:
    if not urls:
        raise RequestError("expected at least one address to download from, got none; give one")
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https"):
            raise RequestError(f"expected an http or https address, got {url!r}; give one of these")


def _fetch_from_any(urls: Sequence[str], part: Path, sha256: str, progress: Progress | None) -> None:
    """Complete `part`; on return its content has the digest `sha256` and has reached the disk."""
    problems: list[str] = []
    wrong_content = False
    for url in urls:
        try:
            resumed = _fetch(url, part, progress)
            if resumed and _digest(part) != sha256:
                # The old beginning may be what is wrong, so the mirror gets a second chance with an empty file.
                part.unlink()
                _fetch(url, part, progress)
        except _MirrorFailed as failure:
            problems.append(f"{url}: {failure}")
            continue
        digest = _digest(part)
        if digest == sha256:
            return
        part.unlink()
        wrong_content = True
        problems.append(f"{url}: expected SHA-256 {sha256}, got {digest}")
    error = WorkError if wrong_content else UnreachableError
    raise error(f"{part.stem} could not be downloaded ({'; '.join(problems)}); try again later")


def _fetch(url: str, part: Path, progress: Progress | None) -> bool:
    """Append to `part` what it lacks of `url`, or write all of it; returns whether an old beginning was kept."""
    offset = part.stat().st_size if part.exists() else 0
    with _opened(url, offset) as response:
        if response is None:  # nothing lies beyond the offset: the part is complete or wrong, the digest tells
            return True
        kept = offset if response.status == http.HTTPStatus.PARTIAL_CONTENT else 0
        length = response.headers.get("Content-Length")
        total = kept + int(length) if length is not None and length.isdecimal() else None
        done = kept
        with part.open("ab" if kept else "wb") as file:
            for chunk in _chunks(response):
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and done != total:  # http.client takes a connection that closes early for the end
        raise _MirrorFailed(f"the connection closed after {done} of {total} bytes")
    return kept > 0


@contextmanager
def _opened(url: str, offset: int) -> Iterator[http.client.HTTPResponse | None]:
    """The answer of `url` from byte `offset` on; None where the server says that the file ends before it."""
    request = urllib.request.Request(url, headers={"User-Agent": "smoothcert"})
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    try:
        response = _opener().open(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        if offset == 0 or error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise _MirrorFailed(f"HTTP status {error.code}") from error
        yield None
        return
    except (OSError, http.client.HTTPException) as error:
        raise _MirrorFailed(_reason(getattr(error, "reason", error))) from error
    with response:
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            _check_range(response, offset)
        yield response


def _check_range(response: http.client.HTTPResponse, offset: int) -> None:
    given = response.headers.get("Content-Range", "")
    match = re.match(r"bytes (\d+)-", given)
    if match is None or int(match[1]) != offset:
        raise _MirrorFailed(f"asked for bytes from {offset} on, got Content-Range {given!r}")


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body, piece by piece; a failing network is told apart from a failing disk here."""
    while True:
        try:
            chunk = response.read(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _MirrorFailed(_reason(error)) from error
        if not chunk:
            return
        yield chunk


def _opener() -> urllib.request.OpenerDirector:
    """An opener for http and https alone: the usual one also follows redirections to ftp."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make `folder`; where what follows fails, what this made and is still empty goes again: a misspelt one does not
    stay."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in new:
            with suppress(OSError):
                path.rmdir()
        raise


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time write into `folder`: the processes of one run would write the same part file."""
    with locked(folder / ".lock", wait=True):
        yield


def _digest(path: Path) -> str | None:
    """The SHA-256 of a file in hexadecimal; None where there is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(problem: object) -> str:
    return one_line(problem) or type(problem).__name__
