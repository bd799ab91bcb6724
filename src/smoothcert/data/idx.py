"""Reader of gzipped idx files, the format in which MNIST is distributed.

All numbers are big-endian: a magic number whose last byte counts the dimensions, one uint32 a dimension, the bytes.
"""

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smoothcert.errors import WorkError

IMAGES_MAGIC = 2051  # 0x00000803: unsigned bytes in three dimensions, [n, h, w]
LABELS_MAGIC = 2049  # 0x00000801: unsigned bytes in one dimension, [n]


def read_idx(path: Path, magic: int, sha256: str | None = None) -> NDArray[np.uint8]:
    """The array in the gzipped idx file `path`: [n, h, w] for IMAGES_MAGIC, [n] for LABELS_MAGIC.

    Guarantees that the file is whole: its header fits its length and, where `sha256` is given, that is the digest of
    the uncompressed content. The archive itself is not hashed, since the same content may be compressed in many ways.
    Otherwise a WorkError says what was found.
    """
    content = _decompressed(path)
    shape, start = _header(path, content, magic)
    expected, found = math.prod(shape), len(content) - start
    if found != expected:
        raise _bad_file(path, f"expected {expected} bytes of data for shape {list(shape)}, found {found}")
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is not None and digest != sha256:
        raise _bad_file(path, f"expected content with SHA-256 {sha256}, found {digest}")
    # A copy, because an array over bytes is read-only and a tensor made from it must not be.
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()


def _decompressed(path: Path) -> bytes:
    try:
        with gzip.open(path, "rb") as file:
            return file.read()
    except EOFError:
        size = path.stat().st_size
        raise _bad_file(path, f"expected a whole gzip archive, found one cut off after {size} bytes") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _bad_file(path, f"expected a gzip archive, found corrupt data ({error})") from None
    except OSError as error:
        raise WorkError(f"{path}: expected a readable file, found: {error.strerror or error}; check it") from None


def _header(path: Path, content: bytes, magic: int) -> tuple[tuple[int, ...], int]:
    """The shape that the header declares and the position where the data starts."""
    dimensions = magic & 0xFF
    start = 4 * (1 + dimensions)
    if len(content) < start:
        raise _bad_file(path, f"expected an idx header of {start} bytes, found {len(content)} bytes in all")
    found, *shape = struct.unpack(f">{1 + dimensions}I", content[:start])
    if found != magic:
        raise _bad_file(path, f"expected magic number {magic}, found {found}")
    return tuple(shape), start


def _bad_file(path: Path, problem: str) -> WorkError:
    return WorkError(f"{path}: {problem}; delete it so that it is downloaded again")
