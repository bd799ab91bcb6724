"""Download one file with a known SHA-256 from the first of several mirrors that delivers it; never half written."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from rich.progress import DownloadColumn, TaskID, TimeRemainingColumn, TransferSpeedColumn

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
    import pooch  # here, because most commands download nothing
    from requests.exceptions import RequestException

    with _Bar(name, urlsplit(url).netloc) as bar:
        # As stored: a file that the server compresses for the transfer would have another length and digest.
        headers = {"User-Agent": "smoothcert", "Accept-Encoding": "identity"}
        fetch = pooch.HTTPDownloader(bar, CHUNK_BYTES, timeout=TIMEOUT_SECONDS, headers=headers)
        try:
            fetch(url, str(path), None)
        except RequestException as error:
            raise UnreachableError(f"{url}: {_reason(error)}") from error
    if (digest := file_digest(path)) != sha256:
        raise UnreachableError(f"{url}: expected SHA-256 {sha256}, got {digest}")


def _reason(error: BaseException) -> str:
    """What failed, from the error that caused the others: "[Errno 111] Connection refused", not the whole chain."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    while error.__context__ is not None:
        error = error.__context__
    return f"HTTP status {status}" if status else error_line(error)


class _Bar:
    """A progress bar on stderr with the time left, with the methods that pooch calls; one line if it is no terminal."""

    total = 0

    def __init__(self, name: str, host: str) -> None:
        columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = terminal_bar(*columns, transient=True)
        self._task: TaskID = self._progress.add_task(name, total=None)
        self._progress.console.print(f"downloading {name} from {host}")

    def update(self, count: int) -> None:
        self._progress.update(self._task, advance=count, total=self.total or None)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None: ...

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


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
