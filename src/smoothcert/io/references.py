"""Names of users' data and code: `folder:PATH`, `npz:PATH`, `FILE.py:Name` and `package.module:Name`."""

from pathlib import Path


def full_name(name: str) -> str:
    """Return `name` with its path written in full: names of the same data, or of the same code, become the same text.

    A path that this system cannot resolve, such as one in the home of an unknown user, stays as it is.
    """
    kind, _, path = name.partition(":")
    source, _, attribute = name.rpartition(":")
    try:
        if kind in ("folder", "npz"):
            return f"{kind}:{Path(path).expanduser().resolve()}"
        if source.endswith(".py"):
            return f"{Path(source).expanduser().resolve()}:{attribute}"
    except (RuntimeError, ValueError, OSError):
        pass
    return name


def same_reference(first: str, second: str) -> bool:
    """Whether two names are of the same data or of the same code, however their paths are written."""
    return full_name(first) == full_name(second)
