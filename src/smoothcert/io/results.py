"""Result files: a TSV to which rows are appended, each on disk before the next, and a JSON file with their settings."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, TypeVar

from smoothcert.errors import RequestError, WorkError, write_error
from smoothcert.io.compressed import compressed_form, plain_form, stem
from smoothcert.io.files import (
    LockedError,
    all_or_none,
    check_regular_file,
    locked,
    made_folder,
    remove_temporaries,
    write_text_atomically,
)
from smoothcert.io.references import full_name
from smoothcert.io.text import error_line

Row = TypeVar("Row")


def settings_path(path: Path) -> Path:
    """The path of the settings of the result file `path`."""
    return path.with_name(f"{stem(path)}.json")


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Read {"settings": ..., "provenance": ...} of the result file `path`."""
    json_path = settings_path(path)
    check_regular_file(json_path)
    try:
        stored = json.loads(json_path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        parts = {key: stored[key] for key in ("settings", "provenance")}
        if wrong := [key for key, value in parts.items() if not isinstance(value, dict)]:
            raise TypeError(f"'{wrong[0]}' is not a mapping")
        return parts
    except OSError as error:
        raise RequestError(
            f"{path}: expected its settings in {json_path.name} next to it, got none that can be read; "
            "restore that file, or move this one or choose another (--name; in Python: out)"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WorkError(
            f"{json_path}: damaged, expected JSON with 'settings' and 'provenance' ({error_line(error)}); restore it"
        ) from error


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which are not JSON: Python reads them, but other readers do not."""
    raise ValueError(f"{name} is not a JSON number")


def write_settings(path: Path, settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Replace the JSON file next to the result file `path`, atomically."""
    content = {"settings": dict(settings), "provenance": dict(provenance)}
    write_text_atomically(settings_path(path), json.dumps(content, indent=2) + "\n")


def stored_settings(path: Path) -> dict[str, Any]:
    """The settings of an existing result file, with which a resumed run continues; {} if there is none."""
    return read_settings(path)["settings"] if settings_path(path).exists() else {}


DIGEST = "_sha256"
"""Ending of the names of settings that identify weights, images or classes."""


def differing_settings(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], names: tuple[str, str] = ("the file", "the request")
) -> list[str]:
    """`field: the file has X, the request Y` for each field that differs; `names` are the words for the two sides.

    A setting that only one side has, and that is off there (None, False, 0 or empty), does not differ: an earlier
    version did not know it. Digests are last, and shortened to twelve characters. Names of data and code may write
    their path in another way.
    """

    def meant(value: object) -> object:
        return full_name(value) if isinstance(value, str) else value

    normal = json.loads(json.dumps(dict(wanted)))
    differences = []
    for key in sorted({**stored, **normal}, key=lambda key: key.endswith(DIGEST)):
        values = stored.get(key), normal.get(key)
        if (key in stored) != (key in normal) and not any(values):
            continue
        if meant(values[0]) != meant(values[1]):
            first, second = (
                repr(value[:12] if key.endswith(DIGEST) and isinstance(value, str) else value) for value in values
            )
            differences.append(f"{key}: {names[0]} has {first}, {names[1]} {second}")
    return differences


def _lock(path: Path) -> Path:
    """The lock file of a result file, which is the same for both of its forms."""
    return path.with_name(f".{plain_form(path).name}.lock")


@contextmanager
def only_writer(path: Path, otherwise: str = "choose another --name") -> Iterator[None]:
    """Refuse a second process that would write the file `path` at the same time; the message ends in `otherwise`.

    Temporary files that killed processes left of it, of its compressed form and of its settings are removed, and so are
    folders that it has made, and in which nothing was written.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(made_folder(path.parent))
            stack.enter_context(locked(_lock(path), wait=False))
        except LockedError as error:
            raise RequestError(f"{path}: another process is writing it; wait for it, or {otherwise}") from error
        except OSError as error:
            raise write_error(path.parent, error) from error
        for file in (plain_form(path), compressed_form(path), settings_path(path)):
            remove_temporaries(file)
        yield


@contextmanager
def not_being_written(path: Path, otherwise: str) -> Iterator[None]:
    """Refuse a file that another process is writing, and keep others from writing it meanwhile."""
    with only_writer(path, otherwise) if _lock(path).exists() else nullcontext():
        yield


def refuse_existing(out: Path) -> None:
    """Refuse to replace the result file `out` or its settings."""
    if out.is_dir():  # perhaps one without a name, such as "."
        raise RequestError(f"{out}: expected a file to write, got a folder; choose another --out")
    for path in (plain_form(out), compressed_form(out), settings_path(out)):
        if os.path.lexists(path):
            raise RequestError(f"{path}: exists already; choose another --out")


@contextmanager
def new_result(out: Path) -> Iterator[None]:
    """Be the only writer of the new result file `out`; a body that fails leaves neither the file nor its settings."""
    with only_writer(out, "choose another --out"):
        refuse_existing(out)
        with all_or_none(settings_path(out), out):
            yield


class ResultWriter(Generic[Row]):
    """Appends rows; they are on disk when `append` returns, so that a killed process loses only its current rows.

    A new file is created together with its first rows, or at the end of the `with` block if there is no error: work
    that fails before its first row leaves no file. Opening an existing file resumes it: its settings must equal
    `settings`, an incomplete last line is cut off, and `done` holds its rows. A damaged file is refused and not
    changed. `parse` returns the rows of a file and the number of bytes of the header and these rows.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        provenance: Mapping[str, Any],
        *,
        header: str,
        parse: Callable[[Path], tuple[list[Row], int]],
        format_row: Callable[[Row], str],
    ) -> None:
        self.path = path
        self.done: list[Row] = []
        self._format_row = format_row
        self._settings, self._provenance, self._header = settings, provenance, header
        self._file: IO[bytes] | None = None
        length = 0
        if path.exists():
            if differences := differing_settings(read_settings(path)["settings"], settings):
                raise RequestError(
                    f"{path}: was made with other settings ({'; '.join(differences)}); "
                    "use those or choose another file (--name; in Python: out)"
                )
            self.done, length = parse(path)
        if length > 0:
            self._file = path.open("r+b")
            self._file.truncate(length)
            self._file.seek(length)

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows; they are on disk when this returns.

        On a full disk, or if somebody has deleted or moved the file, raise a WorkError; the rest can be continued.
        """
        text = "".join(map(self._format_row, rows))
        if self._file is None:
            self._create(text)
            return
        try:
            self._file.write(text.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # closing tries to write once more
                self._file.close()
            raise write_error(self.path.parent, error) from error
        if not self.path.exists():  # Unix writes on, and the rows are lost when the file is closed
            raise WorkError(
                f"{self.path}: was deleted or moved while rows were added to it; put it back to continue it, or start "
                "again with the same command"
            )

    def _create(self, text: str) -> None:
        """Write the settings, then the header and the first rows at once: no reader sees a file without them."""
        if not self.path.exists():
            write_settings(self.path, self._settings, self._provenance)
        write_text_atomically(self.path, self._header + text)
        self._file = self.path.open("r+b")
        self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> "ResultWriter[Row]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None and error is None:
            self._create("")
        if self._file is not None:
            self._file.close()
