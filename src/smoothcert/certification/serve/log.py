"""The log of a service: one row per image that was accepted, in TSV files that are rotated.

Each row has what its certificate depends on: the model, the rule, alpha, the radius asked for and the most votes
(`budget`), then the certificate with its votes, why it ended, and the time it took. The models (digest, sigma, noise)
are in a JSON file of the same name. No image, address or token is logged.

A row is one write to a file that is only appended to, so a killed server leaves whole rows; what a power failure tears
off is removed when the next server opens the file. `read_log` checks each row against its votes; a server that
continues a file counts its rows only, because checking 16 MiB takes seconds.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smoothcert.certification.certificates import (
    CertifiedImage,
    format_row,
    parse_row,
    parse_rows,
)
from smoothcert.certification.checks import RowLimits, check_settings
from smoothcert.certification.serve.rule import Question, RuleName, grid_radii
from smoothcert.errors import WorkError, write_error
from smoothcert.io.compressed import read_content
from smoothcert.io.files import write_text_atomically
from smoothcert.io.results import only_writer, read_settings, settings_path, write_settings
from smoothcert.noise import NOISES
from smoothcert.smoothing.certificate import ABSTAIN, Certificate

QUESTION_COLUMNS = ("at", "model", "rule", "alpha", "asked", "budget", "ended")
COLUMNS = ("idx", *QUESTION_COLUMNS, "predict", "radius", "time", "n0", "n", "count", "votes")
HEADER = "\t".join(COLUMNS) + "\n"
NAME = "certificates-{:05d}.tsv"
KIND = "a log of `smoothcert serve`"


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """One row: the answer for one image. `model` is the beginning of the digest of the weights."""

    index: int
    at: str
    """Date and time in UTC."""
    model: str
    question: Question
    ended: str
    certificate: Certificate
    seconds: float


def format_answer(row: LoggedAnswer) -> str:
    """One line of the log, with its newline: the question, then the columns of a certificates file but the label."""
    q = row.question
    asked = "" if q.radius is None else repr(q.radius)
    index, _, predict, radius, _, *rest = format_row(unlabelled(row)).rstrip("\n").split("\t")
    cells = (index, row.at, row.model, q.rule, repr(q.alpha), asked, str(q.votes), row.ended, predict, radius, *rest)
    return "\t".join(cells) + "\n"


def unlabelled(row: LoggedAnswer) -> CertifiedImage:
    """The row as one of a certificates file; a service knows no labels, so the label is 0."""
    return CertifiedImage(row.index, 0, row.certificate, row.seconds)


def parser(models: Mapping[str, Mapping[str, Any]]) -> Callable[[str], LoggedAnswer]:
    """Return the inverse of `format_answer`; it raises a ValueError for a row whose radius its votes do not show."""

    def parse(line: str) -> LoggedAnswer:
        cells = line.rstrip("\n").split("\t")
        if len(cells) != len(COLUMNS):
            raise ValueError(f"expected {len(COLUMNS)} columns, got {len(cells)}")
        index, at, model, rule, alpha, asked, budget, ended, predict, radius, *rest = cells
        names: dict[str, RuleName] = {"sequential": "sequential", "fixed": "fixed"}
        if rule not in names or model not in models:
            raise ValueError(f"unknown rule or model: {rule}, {model}")
        image = parse_row("\t".join((index, "0", predict, radius, str(int(predict == "0")), *rest)))
        question = Question(int(budget), float(alpha), float(asked) if asked else None, names[rule])
        row = LoggedAnswer(image.index, at, model, question, ended, image.certificate, image.seconds)
        check_answer(row, models[model])
        return row

    return parse


def check_answer(row: LoggedAnswer, model: Mapping[str, Any]) -> None:
    """Raise a ValueError if the answer claims what its votes do not show under its rule."""
    q = row.question
    certificate = row.certificate
    if not 0 < q.alpha < 1 or q.votes < 1 or (q.radius is not None and not q.radius > 0):
        raise ValueError(f"expected 0 < alpha < 1 and a budget and a radius above 0, got {q}")
    settings: dict[str, Any] = {**model, "alpha": q.alpha, "n": q.votes}
    if q.rule == "fixed":
        if certificate.n < q.votes:  # it ended before its only look: its votes show nothing
            settings["n"] = None
            if certificate.prediction != ABSTAIN:
                raise ValueError(f"the fixed rule claims a radius after {certificate.n} of {q.votes} votes")
    elif q.radius is not None:
        settings |= {"radii": [q.radius]}
    else:
        noise = NOISES[model["noise"]](model["sigma"])
        # The reserved bound is used at the last look only.
        held_back = certificate.n == q.votes
        settings |= {"radii": list(grid_radii(noise, q.votes, q.alpha)), "hold_back": held_back}
    RowLimits(settings).check(0, certificate)


def read_log(path: Path) -> tuple[list[LoggedAnswer], Mapping[str, Any]]:
    """The rows of a log, without a torn last line, and its settings."""
    settings = read_settings(path)["settings"]
    models = settings.get("models")
    if not isinstance(models, dict) or not all(isinstance(model, dict) for model in models.values()):
        raise WorkError(f"{settings_path(path)}: damaged, expected the settings of models; restore it")
    for model in models.values():
        check_settings(model, path)
        if missing := [key for key in ("sigma", "noise", "num_classes") if model.get(key) is None]:
            raise WorkError(f"{settings_path(path)}: damaged, expected '{missing[0]}' of each model; restore it")
    rows, _ = parse_rows(read_content(path, KIND), path, (COLUMNS,), parser(models), KIND)
    return rows, settings


@dataclass(frozen=True, slots=True)
class NumberedRow:
    """A row of which only the number is read."""

    index: int

    @classmethod
    def parse(cls, line: str) -> "NumberedRow":
        return cls(int(line.partition("\t")[0]))


def _number(path: Path) -> str:
    return path.stem.removeprefix("certificates-")


class CertificateLog:
    """Appends answers to the newest file of `folder`; a file of `largest` bytes, or one that somebody has deleted or
    moved away, is followed by a new one.

    The last `keep` files are kept. A second server in the same folder is refused.
    """

    def __init__(
        self, folder: Path, models: Mapping[str, Mapping[str, Any]], *, largest: int = 1 << 24, keep: int = 20
    ) -> None:
        self.folder, self.largest, self.keep = folder, largest, keep
        self._settings = {"models": {name: dict(model) for name, model in models.items()}}
        self._stack = ExitStack()
        self._stack.enter_context(only_writer(folder / "certificates", "choose another --log"))
        self._descriptor = -1
        files = self._files()
        newest = files[-1] if files else None
        if newest is not None and settings_path(newest).exists():
            rows, size = parse_rows(read_content(newest, KIND), newest, (COLUMNS,), NumberedRow.parse, KIND)
            self.rows = len(rows)
            os.truncate(newest, size)
            if read_settings(newest)["settings"] == self._settings and 0 < size < largest:
                self._open(newest)
                return
        self._create()

    def _files(self) -> list[Path]:
        """The files of the log, oldest first, without those that `recertify` has written next to them."""
        return sorted(path for path in self.folder.glob("certificates-*.tsv") if _number(path).isdecimal())

    def _create(self) -> None:
        """Start the next file, and remove the oldest ones."""
        number = max((int(_number(path)) for path in self._files()), default=0) + 1
        path = self.folder / NAME.format(number)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_settings(path, self._settings, {})
        write_text_atomically(path, HEADER)
        for old in self._files()[: -self.keep]:
            old.unlink()
            settings_path(old).unlink(missing_ok=True)
        self.rows = 0
        self._open(path)

    def _open(self, path: Path) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        self._path, self._size = path, os.fstat(self._descriptor).st_size

    def append(self, model: str, question: Question, certificate: Certificate, ended: str, seconds: float) -> None:
        """Write one row; if it does not fit on the disk, nothing of it remains and a WorkError is raised."""
        if self._size >= self.largest or not self._path.exists():
            os.fsync(self._descriptor)
            self._create()
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = LoggedAnswer(self.rows, now, model, question, ended, certificate, seconds)
        line = format_answer(row).encode()
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError("no space left for a whole row")
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise write_error(self.folder, error) from error
        self._size += len(line)
        self.rows += 1

    def close(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._stack.close()
