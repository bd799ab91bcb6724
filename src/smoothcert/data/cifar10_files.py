"""The two official formats of a CIFAR-10 batch file, both read into records of one label byte and 3,072 pixel bytes.

https://www.cs.toronto.edu/~kriz/cifar.html describes them: fixed-length binary records, and a Python pickle.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from smoothcert.errors import WorkError

NUM_CLASSES = 10
PIXELS = 3 * 32 * 32  # the red plane, the green, the blue, each row by row
RECORD = 1 + PIXELS

Records = NDArray[np.uint8]
"""[n, 3073]: label, pixels."""


def read_binary(path: Path) -> Records:
    """The records of a binary batch file: whole ones only, labels in 0..9, else a WorkError says what was found."""
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise WorkError(f"{path}: expected a readable file, found: {error.strerror or error}; check it") from None
    if content.size == 0 or content.size % RECORD:
        raise _bad_file(path, f"expected whole records of {RECORD} bytes, found {content.size} bytes")
    return _with_good_labels(path, content.reshape(-1, RECORD))


def read_python(path: Path) -> Records:
    """The records of a pickled batch file, read without running anything that the file asks for.

    Unpickling normally calls whatever functions a file names. Here the names that a numpy array needs lead to
    stand-ins that only store what they are given, and every other name is refused with a WorkError.
    """
    batch = _unpickled(path)
    fields = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    pixels, labels = fields.get("data"), fields.get("labels")
    if not isinstance(pixels, _StoredArray) or not isinstance(labels, list):
        raise _bad_file(path, f"expected the fields data (an array) and labels (a list), found {sorted(fields)}")
    if not all(type(label) is int and 0 <= label < NUM_CLASSES for label in labels):
        raise _bad_file(path, f"expected labels in 0..{NUM_CLASSES - 1}, found others")
    array = pixels.to_numpy(path)
    if array.shape != (len(labels), PIXELS) or not labels:
        raise _bad_file(
            path, f"expected {PIXELS} pixels for each label, found {len(labels)} labels and shape {array.shape}"
        )
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], array], axis=1)


def _with_good_labels(path: Path, records: Records) -> Records:
    if (highest := int(records[:, 0].max())) >= NUM_CLASSES:
        raise _bad_file(path, f"expected labels in 0..{NUM_CLASSES - 1}, found label {highest}")
    return records


class _StoredType:
    """Stands in for numpy.ndarray and numpy.dtype: keeps the arguments, does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment, which unsigned bytes do not have


class _StoredArray:
    """Stands in for an array under reconstruction: numpy's own code never sees a state that the file made up."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def to_numpy(self, path: Path) -> NDArray[np.uint8]:
        """The array of unsigned bytes that the state (version, shape, dtype, Fortran order?, content) describes."""
        try:
            _, shape, dtype, fortran_order, content = self.state
            if dtype.arguments[0] not in ("u1", "|u1"):
                raise ValueError(f"dtype {dtype.arguments[0]!r}")
            raw = content.encode("latin1") if isinstance(content, str) else content
            return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran_order else "C")
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise _bad_file(path, f"expected an array of unsigned bytes, found something else ({error})") from None


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _StoredType,
    ("numpy", "dtype"): _StoredType,
    ("numpy.core.multiarray", "_reconstruct"): _StoredArray,
    ("numpy._core.multiarray", "_reconstruct"): _StoredArray,
}


class _ArraysOnly(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file, encoding="latin1")  # Python 2 wrote the official files: its str are bytes
        self.path = path

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in _ALLOWED:
            raise WorkError(
                f"{self.path}: expected a pickle of one numpy array and its labels, found one that asks for "
                f"{module}.{name}, which was not run; delete the file, it may be malicious"
            )
        return _ALLOWED[module, name]


def _unpickled(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, path).load()
    except WorkError:
        raise
    except OSError as error:
        raise WorkError(f"{path}: expected a readable file, found: {error.strerror or error}; check it") from None
    except Exception as error:  # a damaged pickle can fail in nearly any way
        raise _bad_file(path, f"expected a whole pickle, found damaged data ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise _bad_file(path, f"expected a pickled dict, found {type(content).__name__}")
    return content


def _bad_file(path: Path, problem: str) -> WorkError:
    return WorkError(f"{path}: {problem}; replace it, or delete its folder so that the official files are downloaded")
