"""Reading only regular files, and writing files so that a reader sees the old content or the new, never a half."""

import glob
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smoothcert.errors import RequestError, write_error

TEMPORARY = ".tmp"


@contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success it is fsynced and renamed over `path`, else removed.

    A folder that cannot be written to is a RequestError, a full disk a WorkError; `path` is then as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
            # mkstemp makes files private; the result should have the permissions that open() would have given it.
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path.parent, error) from error


def remove_temporaries(path: Path) -> None:
    """Remove what killed calls of `replaced_atomically` left next to `path`. No other process may be writing it."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY}"):
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file that holds `text`."""
    with replaced_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_regular_file(path: Path) -> None:
    """Refuse a path that exists and is not a regular file: opening a pipe or a device could block forever."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe, socket or device"
        raise RequestError(f"{path}: expected a file, got {kind}; give another path")
