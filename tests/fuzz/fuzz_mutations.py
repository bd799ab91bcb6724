"""A seeded mutator: damages bytes, text, tables, trees of values, tensors and the containers that hold them.

All choices come from one random generator, so the same seed and the same input give the same damaged file.
"""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import torch
import yaml

NESTED = "@@nested@@"
"""Stands for a list nested too deep for an encoder; `nest` puts the brackets into the text."""
DEPTHS = (1_000, 100_000)
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 10, 0.5, -0.0, 1e-308, 1e300, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *(2**31, 2**40, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**40),
)
TEXTS = (
    *("", " ", "x", "0", "-1", "1e400", "nan", "None", "true", "²", "٣", "1_000", "\x00", "\x1b[31mred\x1b[0m", "a\nb"),
    *("a\tb", "\u202e", "\u0085", "\u2028", "\x9b31m", "é" * 40, "=1+1", "@x", "../..", "~nobody/x", "%s{0}", "[bold]"),
    *("os:abort", "folder:/", "npz:", "x" * 5_000, "\ud800"),
)
CELLS = (
    *("", "x", "-1", "0", "1", "7", "nan", "inf", "-inf", "1e308", "1e400", "99", "0.25", "9223372036854775808"),
    *("1" + "0" * 40, "1" * 5_000, "²", "٣", "1_0", " 1 ", "0:00:01", "1 day, 0:00:00", "99999999999 days, 0:00:00"),
    *(
        "7:20",
        "7:-1,3:21",
        "7:10,7:10",
        ":",
        "3:",
        "0:20",
        "-1:20",
        "99999999999:20",
        "\x1b[31m",
        "\x00",
        "\ud800",
        "=1",
    ),
)


class Mutator:
    def __init__(self, seed: str) -> None:
        self.random = Random(seed)

    def often(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self.random.randrange(len(choices))]

    def hostile(self) -> Any:
        """A value of a kind that the place is not made for."""
        kind = self.random.randrange(10)
        if kind < 4:
            return self.pick(NUMBERS)
        if kind < 7:
            return self.pick(TEXTS)
        return self.pick((None, None, True, False, [], {}, [1], [[]], {"x": 1}, [None], NESTED))

    # Bytes and text

    def bytes(self, content: bytes) -> bytes:
        """`content` with one to three kinds of damage."""
        for _ in range(self.pick((1, 1, 1, 2, 3))):
            content = self._damaged(bytearray(content))
        return content

    def _damaged(self, content: bytearray) -> bytes:
        random, size = self.random, len(content)
        start = random.randrange(size + 1)
        end = min(size, start + self.pick((1, 1, 2, 4, 8, 64, 1024)))
        kind = random.randrange(9)
        if kind == 0 and size:
            content[start % size] ^= 1 << random.randrange(8)
        elif kind == 1:
            del content[start:]
        elif kind == 2:
            del content[start:end]
        elif kind == 3:
            content[start:start] = bytes(random.randrange(256) for _ in range(self.pick((1, 2, 16))))
        elif kind == 4:
            content[start:start] = content[start:end] * self.pick((1, 3, 50))
        elif kind == 5:
            other = random.randrange(size + 1)
            content[start:end] = content[other : other + end - start]
        elif kind == 6:
            content[start:start] = self.pick((b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", b"\x00", b"\x1b]0;x\x07", b"\r"))
        elif kind == 7:
            content[start:end] = struct.pack(self.pick(("<I", ">I", "<Q", ">Q")), self.pick((0, 1, 2**31, 2**32 - 1)))
        else:
            content[start:end] = b"\xff" * (end - start) if self.often(0.5) else b"\x00" * (end - start)
        # Every hundredth file or so is empty.
        return b"" if self.often(0.01) else bytes(content)

    def text(self, content: bytes) -> bytes:
        """Lines dropped, repeated, exchanged, joined, ended otherwise; or damaged bytes."""
        if self.often(0.3):
            return self.bytes(content)
        lines = content.split(b"\n")
        at, other = self.random.randrange(len(lines)), self.random.randrange(len(lines))
        kind = self.random.randrange(7)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(other, lines[at])
        elif kind == 2:
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 3:
            return b"\r\n".join(lines)
        elif kind == 4:
            return content.rstrip(b"\n")
        elif kind == 5:
            lines[at] = self.bytes(lines[at])
        else:
            lines[at] = str(self.pick(TEXTS)).encode("utf-8", "surrogatepass")
        return b"\n".join(lines)

    def table(self, content: bytes) -> bytes:
        """Cells of a TSV replaced, columns dropped and added; or damaged text."""
        if self.often(0.3):
            return self.text(content)
        rows = [line.split("\t") for line in content.decode("utf-8").split("\n")]
        for _ in range(self.pick((1, 1, 1, 2, 3))):
            row = self.pick(rows[1:-1]) if len(rows) > 2 and self.often(0.95) else rows[0]
            at = self.random.randrange(len(row))
            kind = self.random.randrange(10)
            if kind == 0 and len(row) > 1:
                del row[at]
            elif kind == 1:
                row.insert(at, self.pick(CELLS))
            elif kind == 2:
                row[at] = self.pick(self.pick(rows))
            else:
                row[at] = self.pick(CELLS)
        return "\n".join("\t".join(row) for row in rows).encode("utf-8", "surrogatepass")

    # Trees of values

    def tree(self, value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
        """A copy of `value` (mappings, lists, tuples, leaves) with one place changed; `leaf` changes tensors."""
        places = list(_places(value))
        for _ in range(self.pick((1, 1, 1, 2))):
            value = self._changed(value, self.pick(places), leaf)
        return value

    def _changed(self, value: Any, place: tuple[Any, ...], leaf: Callable[[Any], Any] | None) -> Any:
        if not place:
            if leaf is not None and isinstance(value, torch.Tensor) and self.often(0.6):
                return leaf(value)
            return self.hostile()
        key, rest = place[0], place[1:]
        if isinstance(value, dict):
            if key not in value:
                return value
            kind = self.random.randrange(8) if not rest else 0
            if kind == 6:
                return {k: v for k, v in value.items() if k != key}
            if kind == 7:
                renamed = self.pick((*TEXTS[:10], 0, None))
                return {renamed if k == key else k: v for k, v in value.items()}
            return {k: self._changed(v, rest, leaf) if k == key else v for k, v in value.items()}
        if isinstance(value, list | tuple):
            items = list(value)
            if key >= len(items):
                return value
            if not rest and self.often(0.2):
                del items[key]
            elif not rest and self.often(0.2):
                items.insert(key, self.hostile())
            else:
                items[key] = self._changed(items[key], rest, leaf)
            return type(value)(items)
        return value

    def json(self, content: bytes) -> bytes:
        if self.often(0.25):
            return self.text(content)
        text = json.dumps(self.tree(json.loads(content)), indent=self.pick((None, 2)), ensure_ascii=self.often(0.8))
        return self.nest(text).encode("utf-8", "surrogatepass")

    def metrics(self, content: bytes) -> bytes:
        """Lines of JSON with one of them changed."""
        lines = content.splitlines()
        at = self.random.randrange(len(lines))
        lines[at] = self.nest(json.dumps(self.tree(json.loads(lines[at])))).encode("utf-8", "surrogatepass")
        return b"".join(line + b"\n" for line in lines)

    def yaml(self, content: bytes) -> bytes:
        if self.often(0.3):
            return self.text(content)
        tree = self.tree(yaml.safe_load(content))
        try:
            text = yaml.safe_dump(tree, sort_keys=False)
        except (yaml.YAMLError, ValueError, TypeError):
            text = json.dumps(tree)
        return self.nest(text).encode("utf-8", "surrogatepass")

    def nest(self, text: str) -> str:
        depth = self.pick(DEPTHS)
        opened, closed = self.pick((("[", "]"), ('{"x": ', "}")))
        for quoted in (f'"{NESTED}"', f"'{NESTED}'", NESTED):
            text = text.replace(quoted, opened * depth + ("0" if opened != "[" else "") + closed * depth)
        return text

    # Containers

    def tensor(self, value: torch.Tensor) -> Any:
        """A tensor of another shape, type or content."""
        kind = self.random.randrange(12)
        if kind == 0:
            return value.flatten()
        if kind == 1:
            return value.new_zeros(self.pick(((), (0,), (1,), (0, 3), (2, 2, 2))))
        if kind == 2:
            return value.to(self.pick((torch.float64, torch.float16, torch.int8, torch.bool, torch.complex64)))
        if kind in (3, 4) and value.is_floating_point():
            return torch.full_like(value, self.pick((float("nan"), float("inf"), -float("inf"), 1e30)))
        if kind == 5:
            return value.to_sparse()
        if kind == 6 and value.is_floating_point() and value.numel():
            changed = value.clone(memory_format=torch.contiguous_format)
            changed.view(-1)[self.random.randrange(value.numel())] = self.pick((float("nan"), float("inf"), 3e38))
            return changed
        if kind == 7:
            return value.unsqueeze(0)
        if kind == 8 and value.ndim:
            return value[:-1]
        if kind == 9:
            return value.new_zeros(1).expand(self.pick((10**3, 10**9, 2**40)))
        if kind == 10:
            return value.tolist() if value.numel() < 1000 else list(range(3))
        return self.hostile()

    def torch_file(self, content: bytes) -> bytes:
        """What torch.save wrote: a tree of values with one changed, or damaged bytes."""
        if self.often(0.35):
            return self.zip(content) if self.often(0.3) else self.bytes(content)
        tree = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        file = io.BytesIO()
        changed = _without_marks(self.tree(tree, self.tensor))
        try:
            torch.save(changed, file, _use_new_zipfile_serialization=self.often(0.8))
        except (RuntimeError, OverflowError, UnicodeError, NotImplementedError):  # not all that is hostile can be saved
            return self.bytes(content)
        return file.getvalue()

    def safetensors(self, content: bytes) -> bytes:
        """The JSON header, the settings inside its metadata, or bytes."""
        if self.often(0.2):
            return self.bytes(content)
        (length,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        if self.often(0.7):
            inner = json.loads(header["__metadata__"]["smoothcert"])
            header["__metadata__"]["smoothcert"] = self.nest(json.dumps(self.tree(inner)))
        else:
            header = self.tree(header)
        text = self.nest(json.dumps(header)).encode()
        declared = len(text) if self.often(0.95) else self.pick((0, 2**63, 2**64 - 1, len(text) + 1))
        return struct.pack("<Q", declared) + text + data

    def npz(self, content: bytes) -> bytes:
        """Arrays of another shape, type or number, headers that claim what is not there, or bytes."""
        if self.often(0.3):
            return self.zip(content) if self.often(0.4) else self.bytes(content)
        with np.load(io.BytesIO(content)) as archive:
            arrays = {name: archive[name] for name in archive.files}
        chosen = self.pick(sorted(arrays))
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                if name != chosen:
                    archive.writestr(_dated(f"{name}.npy"), npy(array))
                elif self.often(0.4):
                    archive.writestr(_dated(f"{name}.npy"), self._npy_header(array))
                elif self.often(0.85):
                    archive.writestr(_dated(f"{name}.npy"), npy(self._array(array)))
        return file.getvalue()

    def _array(self, array: np.ndarray) -> np.ndarray:
        kind = self.random.randrange(9)
        if kind == 0:
            return array.reshape(-1)
        if kind == 1:
            return np.array(self.pick((0, 3, 255)), dtype=array.dtype)
        if kind == 2:
            return np.zeros(self.pick(((0,), (0, 28, 28), (40, 0, 0), (1, 1, 1, 1, 1), (40, 28, 28, 3))), array.dtype)
        if kind == 3:
            return array.astype(self.pick((np.float32, np.int64, np.uint64, np.bool_, "U8", np.complex64)))
        if kind == 4:
            return array[: self.pick((1, 2, 39))]
        if kind == 5:
            return array[..., None]
        if kind == 6:
            value = self.pick((-1, -(2**63), 2**31, 2**40, 2**62, 2**63 - 1))
            changed = array.astype(np.int64)
            changed.reshape(-1)[self.random.randrange(max(1, changed.size))] = value
            return changed
        if kind == 7:
            return np.asfortranarray(array)
        return array[::-1]

    def _npy_header(self, array: np.ndarray) -> bytes:
        """An .npy file whose header claims another shape or type than its data has."""
        shape = self.pick(((10**15,), (2**62, 4), (-1,), (40, 28, 28, 10**6), (), (0,), (1, 2**63), ("x",), (0, 2**62)))
        described = self.pick((array.dtype.str, "|O", "<f8", "|V0", "x", "|S1000000000", "<U2000000000"))
        fields = f"{{'descr': {described!r}, 'fortran_order': {self.pick((True, False, 3))}, 'shape': {shape!r}, }}"
        header = fields.encode() + b" " * (-(len(fields) + 11) % 64) + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + array.tobytes()

    def zip(self, content: bytes) -> bytes:
        """A zip archive with a member gone, renamed, repeated or damaged, checksums right."""
        file = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
            chosen = self.pick(old.namelist())
            kind = self.random.randrange(4)
            for name in old.namelist():
                member = old.read(name)
                if name == chosen and kind == 0:
                    continue
                if name == chosen and kind == 1:
                    member = self.bytes(member)
                elif name == chosen and kind == 2:
                    name = self.pick(("x", "../x.npy", name + "x"))
                elif name == chosen:
                    member = b""
                new.writestr(_dated(name), member)
        return file.getvalue()

    def png(self, content: bytes) -> bytes:
        """Chunks of a PNG dropped, repeated or damaged, with right or wrong checksums; or damaged bytes."""
        if not content.startswith(b"\x89PNG") or self.often(0.3):
            return self.bytes(content)
        chunks, at = [], 8
        while at < len(content):
            (size,) = struct.unpack(">I", content[at : at + 4])
            chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + size]))
            at += 12 + size
        index = self.random.randrange(len(chunks))
        kind, body = chunks[index]
        how = self.random.randrange(5)
        if how == 0:
            del chunks[index]
        elif how == 1:
            chunks.insert(index, chunks[index])
        elif how == 2:
            side = self.pick((0, 1, 2**31 - 1, 50_000, 20_000, 2**32 - 1))
            chunks[0] = (b"IHDR", struct.pack(">II", side, self.pick((side, 28))) + chunks[0][1][8:])
        elif how == 3:
            chunks[index] = (self.pick((b"IDAT", b"tRNS", b"PLTE", b"acTL", b"zTXt", b"eXIf", b"xxxx")), body)
        else:
            chunks[index] = (kind, self.bytes(body))
        right = self.often(0.8)
        pieces = [b"\x89PNG\r\n\x1a\n"]
        for kind, body in chunks:
            pieces += [struct.pack(">I", len(body)), kind, body, struct.pack(">I", zlib.crc32(kind + body) * right)]
        return b"".join(pieces)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _dated(name: str) -> zipfile.ZipInfo:
    """A member without the present time in it."""
    return zipfile.ZipInfo(name)


def _places(value: Any, here: tuple[Any, ...] = ()) -> Any:
    """The paths of all values inside `value`, its own first."""
    yield here
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*here, key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _places(inner, (*here, index))


def _without_marks(value: Any) -> Any:
    """A tree in which NESTED is a list nested a few hundred deep: deeper ones cannot be pickled."""
    if isinstance(value, dict):
        return {key: _without_marks(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_without_marks, value))
    if value == NESTED if isinstance(value, str) else False:
        nested: list[Any] = []
        for _ in range(200):
            nested = [nested]
        return nested
    return value
