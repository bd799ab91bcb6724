"""Result files: rows appended to a TSV, each on disk before the next, and a JSON file beside it with their settings."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, TypeVar

from smoothcert.errors import RequestError, WorkError
from smoothcert.files import LockedError, locked, write_text_atomically

Row = TypeVar("Row")


def settings_path(path: Path) -> Path:
    """Where the settings of the result file `path` are kept."""
    return path.with_name(path.name.removesuffix(".tsv") + ".json")


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """{"settings": ..., "provenance": ...} of the result file `path`."""
    beside = settings_path(path)
    try:
        stored = json.loads(beside.read_text(encoding="utf-8"))
        return {"settings": dict(stored["settings"]), "provenance": dict(stored["provenance"])}
    except OSError as error:
        raise RequestError(
            f"{path}: expected its settings in {beside.name} beside it, got none that can be read; "
            "restore that file, or move this one and choose another --name"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise WorkError(f"{beside}: damaged, expected JSON with 'settings' and 'provenance' ({error})") from error


def write_settings(path: Path, settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    content = {"settings": dict(settings), "provenance": dict(provenance)}
    write_text_atomically(settings_path(path), json.dumps(content, indent=2) + "\n")


def stored_settings(path: Path) -> dict[str, Any]:
    """The settings of an existing result file, {} where there is none: a resumed run goes on with them."""
    return read_settings(path)["settings"] if settings_path(path).exists() else {}


def differing_settings(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], names: tuple[str, str] = ("the file", "the request")
) -> list[str]:
    """`field: the file has X, the request Y` for each field that differs, or with other `names` of the two."""
    normal = json.loads(json.dumps(dict(wanted)))
    keys = [*stored, *(k for k in normal if k not in stored)]
    return [
        f"{k}: {names[0]} has {stored.get(k)!r}, {names[1]} {normal.get(k)!r}"
        for k in keys
        if stored.get(k) != normal.get(k)
    ]


@contextmanager
def alone(path: Path, otherwise: str = "choose another --name") -> Iterator[None]:
    """Refuse a second process that would write the file `path` at the same time; the refusal ends in `otherwise`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path.with_name(f".{path.name}.lock"), wait=False))
        except LockedError as error:
            raise RequestError(f"{path}: another process is writing it; wait for it, or {otherwise}") from error
        yield


class ResultWriter(Generic[Row]):
    """Appends rows; they are on disk when `append` returns, so a kill costs the rows in flight and no others.

    Opening an existing file resumes it: its settings must equal `settings`, a torn last line is cut off, and
    `done` holds the rows that are there. A damaged file is refused and left untouched. `parse` gives the rows of a
    file and the bytes that they and the header take up.
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
        length = 0
        if path.exists():
            if differences := differing_settings(read_settings(path)["settings"], settings):
                raise RequestError(
                    f"{path}: was made with other settings ({'; '.join(differences)}); "
                    "use those or choose another --name"
                )
            self.done, length = parse(path)
        else:
            write_settings(path, settings, provenance)
        self._file: IO[bytes] = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(length)
        self._file.seek(length)
        if length == 0:
            self._write(header)

    def _write(self, text: str) -> None:
        self._file.write(text.encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows; they are on disk when this returns."""
        self._write("".join(map(self._format_row, rows)))

    def __enter__(self) -> "ResultWriter[Row]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
