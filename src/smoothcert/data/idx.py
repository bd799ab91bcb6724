"""Reader of gzipped idx files, the format in which MNIST is distributed.

All numbers are big-endian: a magic number whose last byte counts the dimensions, one uint32 per dimension, the bytes.
"""

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smoothcert.errors import WorkError
from smoothcert.io.files import check_regular_file

IMAGES_MAGIC = 2051  # 0x00000803: unsigned bytes in three dimensions, [n, h, w]
LABELS_MAGIC = 2049  # 0x00000801: unsigned bytes in one dimension, [n]
MOST_BYTES = 1_000_000_000
"""Larger contents are refused before they are unpacked; the largest file of MNIST has 47,040,000 bytes of data."""


def read_idx(path: Path, magic: int, sha256: str | None = None) -> NDArray[np.uint8]:
    """The array in the gzipped idx file `path`: [n, h, w] for IMAGES_MAGIC, [n] for LABELS_MAGIC.

    At most MOST_BYTES are unpacked, whatever the archive holds. Guarantees that the file is whole: its header fits its
    length and, where `sha256` is given, that is the digest of the uncompressed content. The archive is not hashed,
    since the same content may be compressed in many ways. Otherwise a WorkError says what was found.
    """
    start = 4 * (1 + (magic & 0xFF))
    check_regular_file(path)
    with _reading(path) as file:
        header = file.read(start)
        shape = _shape(path, header, magic)
        expected = math.prod(shape)
        if expected > MOST_BYTES:
            raise _bad_file(
                path, f"expected at most {MOST_BYTES:,} bytes of data, found a header for {expected:,} {list(shape)}"
            )
        # One byte more than expected is enough to see that the file does not fit its header.
        content = header + file.read(expected + 1)
    if (found := len(content) - start) != expected:
        more = "more" if found > expected else f"{found}"
        raise _bad_file(path, f"expected {expected} bytes of data for shape {list(shape)}, found {more}")
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is not None and digest != sha256:
        raise _bad_file(path, f"expected content with SHA-256 {sha256}, found {digest}")
    # A copy, because an array over bytes is read-only and a tensor made from it must not be.
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()


@contextmanager
def _reading(path: Path) -> Iterator[gzip.GzipFile]:
    """The uncompressed content of `path` as a file; damage, seen then or later, is a WorkError."""
    try:
        with gzip.open(path, "rb") as file:
            yield file
    except EOFError:
        size = path.stat().st_size
        raise _bad_file(path, f"expected a whole gzip archive, found one cut off after {size} bytes") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _bad_file(path, f"expected a gzip archive, found corrupt data ({error})") from None
    except OSError as error:
        raise WorkError(f"{path}: expected a readable file, found: {error.strerror or error}; check it") from None


def _shape(path: Path, header: bytes, magic: int) -> tuple[int, ...]:
    """The shape that the header declares."""
    dimensions = magic & 0xFF
    start = 4 * (1 + dimensions)
    if len(header) < start:
        raise _bad_file(path, f"expected an idx header of {start} bytes, found {len(header)} bytes in all")
    found, *shape = struct.unpack(f">{1 + dimensions}I", header)
    if found != magic:
        raise _bad_file(path, f"expected magic number {magic}, found {found}")
    return tuple(shape)


def _bad_file(path: Path, problem: str) -> WorkError:
    return WorkError(f"{path}: {problem}; delete it so that it is downloaded again")
