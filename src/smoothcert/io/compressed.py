"""Compressed result files: a finished NAME.tsv may be stored as NAME.tsv.gz, with its settings in NAME.json as before,
and the metrics of a finished run as metrics.jsonl.gz.

Files that are being written stay plain text, to which rows can be appended.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from smoothcert.errors import RequestError, WorkError
from smoothcert.io.files import check_regular_file, replaced_atomically
from smoothcert.io.text import natural_order

PLAIN, COMPRESSED = ".tsv", ".tsv.gz"
LINES, COMPRESSED_LINES = ".jsonl", ".jsonl.gz"
MOST_BYTES = 2**28
"""Largest unpacked size: ten times the votes of 50,000 images with 100 classes each."""


def stem(path: Path) -> str:
    """The name of a result file without .tsv or .tsv.gz."""
    return path.name.removesuffix(".gz").removesuffix(PLAIN) if path.name.endswith((PLAIN, COMPRESSED)) else path.name


def plain_form(path: Path) -> Path:
    """NAME.tsv for NAME.tsv.gz, also for .jsonl; any other path unchanged."""
    packed = path.name.endswith((COMPRESSED, COMPRESSED_LINES))
    return path.with_name(path.name.removesuffix(".gz")) if packed else path


def compressed_form(path: Path) -> Path:
    """NAME.tsv.gz for NAME.tsv, also for .jsonl; any other path unchanged."""
    return path.with_name(f"{path.name}.gz") if path.name.endswith((PLAIN, LINES)) else path


def exists(path: Path) -> bool:
    """Whether the result file exists in one form or the other."""
    # In this order, in which another process unpacks: one of the two always exists.
    return compressed_form(path).exists() or plain_form(path).exists()


def existing_form(path: Path) -> Path:
    """The form in which the result file exists, the plain one of two; `path` if it does not (see `one_form_each`)."""
    forms = dict.fromkeys((plain_form(path), compressed_form(path)))
    return next(iter(one_form_each(form for form in forms if form.exists())), path)


def one_form_each(paths: Iterable[Path]) -> list[Path]:
    """Return `paths` with one form of each file, the plain one of two.

    A process that is killed while it compresses or unpacks a file leaves both. Two forms with different content are
    refused.
    """
    forms: dict[Path, Path] = {}
    for path in paths:
        plain = plain_form(path)
        other = forms.setdefault(plain, path)
        if other != path:
            if not _same_content(plain):
                raise RequestError(
                    f"{other}: expected one form of this file, got {path.name} next to it as well; keep the one with "
                    "more rows and move the other"
                )
            forms[plain] = plain
    return list(forms.values())


def _same_content(plain: Path) -> bool:
    try:
        return plain.read_bytes() == read_content(compressed_form(plain), "one form of the file")
    except WorkError:  # the compressed form is damaged
        return False


def result_files(folder: Path) -> list[Path]:
    """The result files in `folder`, plain and compressed, sorted by name (numbers as numbers); hidden files are left
    out."""
    files = [*folder.glob(f"*{PLAIN}"), *folder.glob(f"*{COMPRESSED}")]
    files = [path for path in files if path.is_file() and path.name[0] != "."]
    return one_form_each(sorted(files, key=lambda path: natural_order(plain_form(path).name)))


def read_content(path: Path, kind: str) -> bytes:
    """The content of a file, unpacked if its name ends in .gz; `kind` is what a user should give instead."""
    check_regular_file(path)
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            content = file.read(MOST_BYTES + 1)
        if not content:
            raise EOFError("it is empty")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise WorkError(f"{path}: damaged, expected a whole gzip file ({error}); restore it") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error}); give {kind}") from error
    if len(content) > MOST_BYTES:
        raise WorkError(
            f"{path}: expected at most {MOST_BYTES / 2**20:,.0f} MiB after unpacking, got more; give {kind}"
        )
    return content


def write_content(path: Path, content: bytes) -> None:
    """Replace `path` by a file that holds `content`, compressed if its name ends in .gz."""
    with replaced_atomically(path) as temporary:
        # Without a time: the same content gives the same bytes.
        temporary.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def compress(path: Path) -> None:
    """Replace a file by its compressed form."""
    write_content(compressed_form(path), path.read_bytes())
    path.unlink()


@contextmanager
def plain_while_written(path: Path) -> Iterator[Path]:
    """Yield the plain form of a result file, to which rows can be appended.

    A compressed file is unpacked before. After the body, the file is compressed if it was before or if `path` asks for
    it. If the body fails, a file that has changed stays plain, so that it can be continued.
    """
    existing_form(path)  # refuses two forms that differ
    plain, packed = plain_form(path), compressed_form(path)
    before = read_content(packed, "a result file") if packed != plain and packed.exists() else None
    if before is not None:
        write_content(plain, before)
        packed.unlink()
    try:
        yield plain
    except BaseException:
        if before is not None and plain.read_bytes() == before:
            compress(plain)
        raise
    if path != plain or before is not None:
        compress(plain)
