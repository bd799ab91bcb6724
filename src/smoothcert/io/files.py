"""Checks of paths, file locks, and atomic writes: a reader sees the old content or the new, never a part."""

import errno
import glob
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from smoothcert.errors import RequestError, write_error

TEMPORARY = ".tmp"


def with_home(path: str | Path) -> Path:
    """`path` with a leading ~ or ~user replaced by the home folder; an unknown user is a RequestError."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise RequestError(
            f"{path}: expected ~ or ~ and a known user, got an unknown one; write the path out"
        ) from None


@contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success it is fsynced and renamed to `path`, else removed.

    A folder that cannot be written to is a RequestError, a full disk a WorkError; `path` is then unchanged, and folders
    that were made for it are removed.
    """
    try:
        with made_folder(path.parent):
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
            try:
                # A new file gets the permissions that the umask allows.
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                yield temporary
                with temporary.open("r+b") as file:
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path.parent, error) from error


def remove_temporaries(path: Path) -> None:
    """Remove files that killed calls of `replaced_atomically` left next to `path`. No other process may write it."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY}"):
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file that holds `text`."""
    with replaced_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def all_or_none(*paths: Path) -> Iterator[None]:
    """Remove the files `paths`, none of which existed before, if the body that writes them fails or is interrupted."""
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make `folder` and its parents; afterwards remove those that it has made and in which nothing was written."""
    with ExitStack() as stack:
        for each in reversed([folder, *folder.parents]):
            if not each.is_dir():
                with suppress(FileExistsError):  # another process may make it meanwhile, and then owns it
                    each.mkdir()
                    stack.callback(_remove_empty, each)
        folder.mkdir(exist_ok=True)  # refuses a file in its place
        yield


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty
        folder.rmdir()


def check_inside(path: Path, folder: Path) -> None:
    """Refuse to write to a `path` in `folder` if a symbolic link leads outside of it."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RequestError(
            f"{path}: a symbolic link leads to {path.resolve()}, outside of {folder}; expected to write inside it: "
            "remove the link"
        )


def check_regular_file(path: Path) -> None:
    """Refuse a path that exists and is not a regular file, or one that may not be read; a missing one is accepted.

    Opening a pipe or a device could block forever. Libraries report a file without permission as missing or damaged.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe, socket or device"
        raise RequestError(f"{path}: expected a file, got {kind}; give another path")
    try:
        path.open("rb").close()
    except PermissionError as error:
        raise RequestError(
            f"{path}: expected a file that can be read, got '{error.strerror}'; ask its owner for access or give "
            "another path"
        ) from error
    except FileNotFoundError:
        return


def file_digest(file: Path) -> str:
    """SHA-256 of the content of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""Errors of file systems that have no locks."""
LOCK_SECONDS = 0.2
"""Time to try again, because an attempt can fail while the holder removes the file."""


class LockedError(Exception):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold a lock on the file `path`, which is created and removed: at most one process runs the body.

    If another process holds the lock, wait for it or raise LockedError. The lock ends with its process, so a killed
    process blocks nobody. On file systems without locks the body runs without one. A symbolic link is refused, and its
    target is not opened.
    """
    from filelock import FileLock, Timeout  # here, because most commands start without it

    if path.is_symlink():
        raise RequestError(f"{path}: expected no file or a lock file, got a symbolic link; remove it")
    lock = FileLock(path, timeout=-1 if wait else LOCK_SECONDS, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise LockedError(str(path)) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        try:
            # Before the release: afterwards the file could be the lock of another process.
            with suppress(OSError):  # Windows refuses this, and removes the file on release
                path.unlink()
        finally:
            lock.release()
