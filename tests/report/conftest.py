"""Certificates files to report on: ours with votes and settings, and the field's with six columns."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smoothcert.certification.certificates import CertificatesFile, CertifiedImage, certificates_writer
from smoothcert.certification.checks import RowLimits
from smoothcert.certification.columns import Columns
from smoothcert.smoothing.certificate import ABSTAIN, Certificate

SETTINGS = {
    "sigma": 0.5,
    "n": 1000,
    "n0": 10,
    "alpha": 0.001,
    "dataset": "mnist",
    "split": "test",
    "objective": "gaussian",
    "precision": "fp32",
    "seed": 1,
}
# label, prediction, radius: right 6 times, wrong twice (with a radius that must not count), abstained twice.
PLAIN = (
    (3, 3, 0.1),
    (1, 1, 0.25),
    (2, 0, 0.9),
    (4, ABSTAIN, 0.0),
    (5, 5, 0.5),
    (6, 6, 0.5),
    (7, 1, 0.3),
    (8, 8, 1.1),
    (9, ABSTAIN, 0.0),
    (0, 0, 0.7499),
)
FIELD_FILE = (
    "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"
    "0\t3\t3\t0.951\t1\t0:00:12.345678\n"
    "20\t8\t-1\t0.0\t0\t0:00:12.1\n"
    "40\t8\t8\t0.0\t1\t0:00:11\n"
    "60\t0\t5\t0.623\t0\t0:00:12.345678\n"
    "80\t6\t6\t0.00123\t1\t1 day, 0:00:12.345678"
)


def image(
    index: int, label: int, predict: int, radius: float, n: int = 1000, n0: int = 10, other: int = 0
) -> CertifiedImage:
    """A row whose n votes all went to its class, or to `other` where it abstains: all that a report needs of them."""
    cls = other if predict == ABSTAIN else predict
    return CertifiedImage(index, label, Certificate(predict, radius, n0, n, n, ((cls, n),) if n else ()), 0.5)


def images(rows: Sequence[tuple[int, int, float]] = PLAIN, **numbers: int) -> list[CertifiedImage]:
    return [image(i, *row, **numbers) for i, row in enumerate(rows)]


def as_file(rows: Sequence[CertifiedImage], **settings: object) -> CertificatesFile:
    """A file in memory with these settings alone."""
    return CertificatesFile(Path("some.tsv"), tuple(rows), settings, {})


def our_file(rows: Sequence[CertifiedImage] | None = None, **changes: object) -> CertificatesFile:
    """A file in memory with SETTINGS; None leaves a setting out."""
    settings = {key: value for key, value in {**SETTINGS, **changes}.items() if value is not None}
    return as_file(images() if rows is None else rows, **settings)


def random_rows(seed: int, count: int = 200, classes: int = 3) -> list[CertifiedImage]:
    """Labels cycle through the classes; radii are at most what 1,000 votes can show at sigma 0.5."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        predict = rng.choice([ABSTAIN, i % classes, i % classes, i % classes, rng.randrange(classes)])
        radius = 0.0 if predict == ABSTAIN else rng.choice([0.25, 0.5, 1.2 * rng.random()])
        rows.append(image(i, i % classes, predict, radius))
    return rows


@pytest.fixture(autouse=True)
def smaller_radii(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round radii below what the votes show are read; larger ones are refused, as always.

    Both checks are changed, that of a row and that of all rows at once, so that files are read as columns, as usual.
    """
    check, allow = RowLimits._check_radius, RowLimits.allow

    def check_from_above(limits: RowLimits, certificate: Certificate) -> None:
        try:
            check(limits, certificate)
        except ValueError as error:
            if " is below " not in str(error):
                raise

    def allow_from_above(limits: RowLimits, columns: Columns) -> bool:
        if allow(limits, columns) or not limits._limited:
            return allow(limits, columns)
        votes = zip(columns.n.tolist(), columns.count.tolist(), strict=True)
        shown = [limits.radius(Certificate(0, 0.0, 1, n, count, ((0, count),))) for n, count in votes]
        return allow(limits, replace(columns, radius=np.maximum(columns.radius, shown)))

    monkeypatch.setattr(RowLimits, "_check_radius", check_from_above)
    monkeypatch.setattr(RowLimits, "allow", allow_from_above)


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run(name, rows, file=..., **settings) writes a run folder with one more certificates file; None leaves a
    setting out."""

    def make(
        name: str, rows: Sequence[CertifiedImage] | None = None, file: str = "test", **changes: Mapping[str, Any]
    ) -> Path:
        settings = {k: v for k, v in {**SETTINGS, **changes}.items() if v is not None}
        path = tmp_path / name / "certificates" / f"{file}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        # 1000 votes show at most 2.46 sigma: at a small sigma the plain rows have smaller radii.
        sigma = settings.get("sigma")
        scale = min(1.0, sigma / 0.5) if isinstance(sigma, float) else 1.0
        plain = [(label, predict, radius * scale) for label, predict, radius in PLAIN]
        with certificates_writer(path, settings, {}) as writer:
            writer.append(images(plain) if rows is None else rows)
        return tmp_path / name

    return make


@pytest.fixture
def field_file(tmp_path: Path) -> Path:
    path = tmp_path / "noise_0.25"
    path.write_text(FIELD_FILE)
    return path
