"""Download one file with a known SHA-256 from the first of several mirrors that delivers it; never half written."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from smoothcert.errors import WorkError, write_error
from smoothcert.io.console import terminal_bar
from smoothcert.io.files import file_digest, locked, made_folder, remove_temporaries, replaced_atomically
from smoothcert.io.text import error_line

TIMEOUT_SECONDS = 10.0  # to connect, and between two pieces of the answer
CHUNK_BYTES = 1 << 16


class UnreachableError(WorkError):
    """No mirror delivered the file: the network or the mirrors are down, or they have another file."""


def download(urls: Sequence[str], destination: Path, sha256: str) -> None:
    """Make `destination` the file with digest `sha256`, from the first of `urls` that delivers it.

    On an error `destination` is as it was before. One process at a time downloads into a folder; the others wait and
    use its file. Raises UnreachableError if no mirror delivered it.
    """
    with only_downloader(destination.parent):
        if destination.is_file() and file_digest(destination) == sha256:
            return
        remove_temporaries(destination)  # of a process that was killed
        problems: list[str] = []
        for url in urls:
            try:
                with replaced_atomically(destination) as temporary:
                    _fetch(url, temporary, sha256, destination.name)
                return
            except UnreachableError as error:
                problems.append(str(error))
        raise UnreachableError(f"{destination.name} could not be downloaded ({'; '.join(problems)}); try again later")


def _fetch(url: str, path: Path, sha256: str, name: str) -> None:
    """Write the content of `url` to `path` and show the progress; another digest than `sha256` is an error."""
    import requests  # here, because most commands download nothing

    # As stored: a file that the server compresses for the transfer would have another length and digest.
    headers = {"User-Agent": "smoothcert", "Accept-Encoding": "identity"}
    bar = terminal_bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), transient=True)
    task = bar.add_task(name, total=None)
    bar.console.print(f"downloading {name} from {urlsplit(url).netloc}")
    try:
        with bar, requests.get(url, stream=True, timeout=TIMEOUT_SECONDS, headers=headers) as answer:
            answer.raise_for_status()
            bar.update(task, total=int(answer.headers.get("Content-Length", 0)) or None)
            with path.open("wb") as file:
                for chunk in answer.iter_content(CHUNK_BYTES):
                    file.write(chunk)
                    bar.advance(task, len(chunk))
    except requests.RequestException as error:
        raise UnreachableError(f"{url}: {_reason(error)}") from error
    if (digest := file_digest(path)) != sha256:
        raise UnreachableError(f"{url}: expected SHA-256 {sha256}, got {digest}")


def _reason(error: BaseException) -> str:
    """What failed, from the error that caused the others: "[Errno 111] Connection refused", not the whole chain."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    while error.__context__ is not None:
        error = error.__context__
    return f"HTTP status {status}" if status else error_line(error)


@contextmanager
def only_downloader(folder: Path) -> Iterator[None]:
    """Make `folder` and let one process at a time download into it; a folder that cannot be written to is one line.

    Folders that are still empty at the end are removed: a misspelt one does not stay.
    """
    try:
        with made_folder(folder), locked(folder / ".lock", wait=True):
            yield
    except OSError as error:
        raise write_error(folder, error) from error
