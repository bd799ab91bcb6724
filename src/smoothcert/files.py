"""Reading only regular files, and writing files so that a reader sees the old content or the new, never a half."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smoothcert.errors import RequestError


@contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is fsynced and renamed over `path`, else removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes files private; the result should have the permissions that open() would have given it.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file that holds `text`."""
    with replaced_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_inside(path: Path, folder: Path) -> None:
    """Refuse to write to a `path` in `folder` that a symbolic link leads out of it."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RequestError(
            f"{path}: a symbolic link leads to {path.resolve()}, outside of {folder}; expected to write inside it: "
            "remove the link"
        )


def check_regular_file(path: Path) -> None:
    """Refuse a path that exists and is not a regular file: opening a pipe or a device could block forever."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe, socket or device"
        raise RequestError(f"{path}: expected a file, got {kind}; give another path")
