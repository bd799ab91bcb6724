"""Writing reports into a folder without replacing files that smoothcert did not write.

A hidden file in the folder lists the names and the SHA-256 of the files that were written. A file that is not in the
list, or that has changed since, belongs to the user: it is replaced only on request.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from smoothcert.errors import RequestError, write_error
from smoothcert.io.files import file_digest, remove_temporaries, replaced_atomically, write_text_atomically
from smoothcert.io.results import only_writer

MANIFEST = ".smoothcert-report.json"
Digests = dict[str, list[str]]
"""File name -> SHA-256 of its content; several while the file is being replaced."""


def refuse_foreign_files(folder: Path, names: Iterable[str], force: bool) -> None:
    """Refuse to replace a file of `folder` that is not as smoothcert wrote it, and a `folder` that cannot be written.

    A `folder` that does not exist cannot be made if the first parent that exists is a file, or may not be written.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    got = None
    if not existing.is_dir():
        got = "a file" if existing == folder else f"a path inside the file {existing}"
    elif not os.access(existing, os.W_OK):
        got = f"one that may not be written ({existing})"
    if got is not None:
        raise RequestError(f"{folder}: expected a folder to write to, got {got}; choose another folder")
    written = _written(folder)
    foreign = [name for name in names if not force and _foreign(folder / name, written.get(name, []))]
    if foreign:
        raise RequestError(
            f"{folder}: expected no files but those that smoothcert wrote, got {', '.join(foreign)}; choose another "
            "folder, move them away or, in report and analyze, replace them with --force"
        )


def write_files(
    folder: Path,
    files: Mapping[str, bytes | None],
    force: bool = False,
    request: Mapping[str, object] | None = None,
) -> list[Path]:
    """Write each file into `folder` atomically and return the paths of the written files.

    A content of None removes a file that an earlier call wrote; files of the user are kept. Nothing is written if
    `refuse_foreign_files` refuses one of the files, and on a full disk the files of an earlier call stay as they were.
    The next call recognises the files of a killed process, and removes its temporary ones; a second process that writes
    into the folder at the same time is refused.
    `request` says how the files were made (see `stored_request`); without it, the one stored before is kept.
    """
    request = stored_request(folder) if request is None else request
    refuse_foreign_files(folder, (name for name, content in files.items() if content is not None), force)
    with only_writer(folder / MANIFEST, "choose another folder"):
        for name in files:
            remove_temporaries(folder / name)
        return _write_files(folder, files, request)


def _write_files(folder: Path, files: Mapping[str, bytes | None], request: Mapping[str, object] | None) -> list[Path]:
    contents = {name: content for name, content in files.items() if content is not None}
    digests = {name: [hashlib.sha256(content).hexdigest()] for name, content in contents.items()}
    before = _written(folder)
    kept = {name: known for name, known in before.items() if name not in files}
    try:
        either = {name: [*before.get(name, []), *new] for name, new in digests.items()}
        with ExitStack() as replaced:  # when all contents are on the disk
            for name, content in contents.items():
                replaced.enter_context(replaced_atomically(folder / name)).write_bytes(content)
            _write_manifest(folder, {**before, **either}, stored_request(folder))
        for name in files.keys() - contents.keys():
            if not _foreign(folder / name, before.get(name, [])):
                (folder / name).unlink(missing_ok=True)
        _write_manifest(folder, {**kept, **digests}, request)
    except OSError as error:
        raise write_error(folder, error) from error
    return [folder / name for name in contents]


def _foreign(path: Path, digests: list[str]) -> bool:
    if not os.path.lexists(path):
        return False
    if path.is_symlink() or not path.is_file():
        return True
    try:
        return file_digest(path) not in digests
    except OSError:
        return True


def _written(folder: Path) -> Digests:
    """The list in `folder`; empty if there is none that can be read."""
    files = _manifest(folder).get("files")
    known = files.items() if isinstance(files, dict) else ()
    return {name: digests for name, digests in known if isinstance(digests, list)}


def is_as_written(folder: Path, name: str) -> bool:
    """Whether the file `name` of `folder` is there as smoothcert wrote it."""
    return (folder / name).is_file() and not _foreign(folder / name, _written(folder).get(name, []))


def stored_request(folder: Path) -> Mapping[str, object] | None:
    """How the files of `folder` were made, as given to `write_files`; None if that is not known."""
    request = _manifest(folder).get("request")
    return request if isinstance(request, dict) else None


def _manifest(folder: Path) -> dict[str, object]:
    path = folder / MANIFEST
    try:
        stored = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _write_manifest(folder: Path, digests: Digests, request: Mapping[str, object] | None) -> None:
    about = "Files that smoothcert wrote here, with their SHA-256. It replaces these and no others."
    content = {"about": about, "files": dict(sorted(digests.items()))} | ({"request": request} if request else {})
    write_text_atomically(folder / MANIFEST, json.dumps(content, indent=2) + "\n")
