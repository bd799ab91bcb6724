"""The two errors that reach a user as one line: a wrong request and work that failed."""

from errno import EACCES, EEXIST, EISDIR, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS
from pathlib import Path


class RequestError(ValueError):
    """A wrong request: the message says what was expected, what was given and what to do. Exit code 2."""


class WorkError(RuntimeError):
    """Work that failed although the request was right (a corrupt file, a diverging loss). Exit code 1."""


def write_error(folder: Path, error: OSError) -> RequestError | WorkError:
    """The error to raise for `error` while writing into `folder`: a RequestError for a folder that cannot be used, a
    WorkError for a full or failing disk."""
    reason = error.strerror or str(error)
    if error.errno in (EACCES, EPERM, EROFS, ENOTDIR, EEXIST, EISDIR, ENAMETOOLONG, ENOENT):
        return RequestError(f"{folder}: expected a folder to write to, got '{reason}'; choose another folder")
    return WorkError(f"{folder}: could not be written to ({reason}); make room or choose another folder")
