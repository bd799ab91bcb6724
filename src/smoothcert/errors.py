"""The two errors that reach a user as one line: a wrong request and work that failed."""

from errno import EACCES, EEXIST, EISDIR, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS
from pathlib import Path


class RequestError(ValueError):
    """The request was wrong: says what was expected, what was given and what to do. The CLI exits with 2."""


class WorkError(RuntimeError):
    """The request was right but the work failed (a corrupt file, a diverging loss). The CLI exits with 1."""


def write_error(folder: Path, error: OSError) -> RequestError | WorkError:
    """What to tell of `error` while writing into `folder`: a folder that cannot be used is a wrong request, a full or
    failing disk failed work."""
    reason = error.strerror or str(error)
    if error.errno in (EACCES, EPERM, EROFS, ENOTDIR, EEXIST, EISDIR, ENAMETOOLONG, ENOENT):
        return RequestError(f"{folder}: expected a folder to write to, got '{reason}'; choose another folder")
    return WorkError(f"{folder}: could not be written to ({reason}); make room or choose another folder")
