"""Rows that are parsed all at once: the same as rows parsed one by one, and no damage that only one of the two sees."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from smoothcert.certification.certificates import (
    CertificatesFile,
    CertifiedImage,
    parse_row,
    read_certificates,
    write_certificates,
)
from smoothcert.certification.checks import RowLimits
from smoothcert.certification.columns import Columns, ParsedRows, columns_of, parse_columns
from smoothcert.certification.recertify import bounded_again
from smoothcert.errors import WorkError
from smoothcert.noise import Gaussian
from smoothcert.smoothing.certificate import ABSTAIN, Certificate, certificate_of_class

SETTINGS = {"sigma": 0.5, "n": 100, "n0": 10, "alpha": 0.001, "bound": "one-sided", "num_classes": 4}
VOTES = ((90, 5, 5, 0), (100, 0, 0, 0), (0, 99, 0, 1), (25, 25, 26, 24), (10, 0, 85, 5), (60, 40, 0, 0), (0, 0, 0, 100))
LABELS = (0, 0, 1, 2, 0, 1, 3)


def rows() -> list[CertifiedImage]:
    noise = Gaussian(0.5)
    certificates = [certificate_of_class(int(np.argmax(votes)), votes, 10, noise, 0.001) for votes in VOTES]
    numbered = enumerate(zip(LABELS, certificates, strict=True))
    return [CertifiedImage(3 * i, label, certificate, 61.25) for i, (label, certificate) in numbered]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_certificates(tmp_path / "a.tsv", rows(), SETTINGS, {})
    return tmp_path / "a.tsv"


def assert_same(ours: Columns, theirs: Columns) -> None:
    for name in Columns.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)


def test_rows_and_columns_are_those_that_were_written(path: Path) -> None:
    file = read_certificates(path)
    assert isinstance(file.rows, ParsedRows)
    assert file.rows == tuple(rows())
    assert (file.rows[2], list(file.rows[4:]), len(file.rows)) == (rows()[2], rows()[4:], 7)
    assert_same(file.columns, columns_of(rows()))


def test_columns_say_what_rows_say(path: Path) -> None:
    columns = read_certificates(path).columns
    expected = [row.correct and row.certificate.prediction != ABSTAIN for row in rows()]
    assert columns.correct.tolist() == expected
    assert columns.votes_for(columns.label).tolist() == [dict(r.certificate.votes).get(r.label, 0) for r in rows()]
    # Rows 3 and 5 abstain: the class with the stored count of votes.
    assert columns.prediction.tolist()[3] == ABSTAIN
    assert [row.certificate.chosen for row in rows()] == [0, 0, 1, 2, 2, 0, 3]


@pytest.mark.parametrize("votes", [(40, 40, 20, 0), (0, 40, 20, 40), (40, 60, 0, 0), (45, 10, 45, 0)])
def test_the_chosen_class_is_the_one_that_recertify_uses(votes: tuple[int, ...]) -> None:
    """At an alpha near 1 every class is certified, except where equal counts leave open which one was chosen."""
    certificate = certificate_of_class(int(np.argmax(votes)), votes, 10, Gaussian(0.5), 0.001)
    stored = CertifiedImage(0, 0, replace(certificate, prediction=ABSTAIN, radius=0.0), 1.0)
    again = bounded_again(stored, RowLimits({"alpha": 0.999999, "bound": "one-sided", "sigma": 0.5}))
    expected = ABSTAIN if sorted(votes)[-1] == sorted(votes)[-2] else int(np.argmax(votes))
    assert stored.certificate.chosen == expected == again.certificate.prediction


@pytest.mark.parametrize("parsed", [True, False])
def test_some_images_of_a_file(path: Path, parsed: bool) -> None:
    file = read_certificates(path)
    file = file if parsed else CertificatesFile(path, tuple(file.rows), file.settings, {})
    few = file.only({3, 9, 18, 100})
    assert few.rows == tuple(row for row in rows() if row.index in (3, 9, 18))
    assert_same(few.columns, columns_of(tuple(few.rows)))


@pytest.mark.parametrize("settings", [SETTINGS, {}])
def test_what_is_accepted_at_once_is_accepted_row_by_row(path: Path, settings: dict[str, object]) -> None:
    """Random damage: a character replaced, removed or repeated, or two pieces exchanged."""
    body = path.read_text().partition("\n")[2]
    limits, generator, accepted = RowLimits(settings), random.Random(0), 0
    for _ in range(2_000):
        i, j = sorted(generator.sample(range(len(body)), 2))
        damaged = generator.choice(
            [
                body[:i] + generator.choice("0123456789\t\n:,-. e|_x\r") + body[i + 1 :],
                body[:i] + body[i + 1 :],
                body[:i] + body[i] + body[i:],
                body[:i] + body[j] + body[i + 1 : j] + body[i] + body[j + 1 :],
            ]
        )
        if (columns := parse_columns(damaged.split("\n")[:-1], limits)) is None:
            continue
        parsed = [parse_row(line) for line in damaged.split("\n")[:-1]]
        for row in parsed:
            limits.check(row.label, row.certificate)
        assert len({row.index for row in parsed}) == len(parsed)
        assert_same(columns, columns_of(parsed))
        accepted += damaged != body
    assert accepted > 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 99}, "has 100 votes"),
        ({"n": 101}, "has 100 votes"),
        ({"num_classes": 3}, "class 3 is out of range"),
        ({"alpha": 1e-9}, "exceeds"),
        ({"alpha": 0.01}, "is below"),
        ({"sigma": 0.4}, "exceeds"),
        ({"sigma": 0.51}, "is below"),
    ],
)
def test_rows_that_the_settings_forbid_are_refused(path: Path, settings: dict[str, float], message: str) -> None:
    changed = {**SETTINGS, **settings}
    write_certificates(path, rows(), changed, {})
    assert parse_columns(path.read_text().split("\n")[1:-1], RowLimits(changed)) is None
    with pytest.raises(WorkError, match=message):
        read_certificates(path)


def test_a_row_of_fewer_votes_is_refused_although_it_abstains(path: Path) -> None:
    abstained = rows()[3:4]
    assert abstained[0].certificate.abstained
    write_certificates(path, abstained, {**SETTINGS, "n": 101}, {})
    with pytest.raises(WorkError, match="has 100 votes, the settings say n = 101"):
        read_certificates(path)


@pytest.mark.parametrize("count", [1, 51, 80, 99, 100])
@pytest.mark.parametrize("alpha", [0.001, 0.3])
@pytest.mark.parametrize("sound", [False, True])
def test_the_radius_of_all_rows_is_that_of_single_rows(count: int, alpha: float, sound: bool) -> None:
    """Radii just below and above what the votes show, with the tolerance: both checks agree."""
    limits = RowLimits({**SETTINGS, "alpha": alpha, "sound": sound})
    votes = ((0, count), (1, 100 - count))
    shown = limits.radius(Certificate(0, 1.0, 10, 100, count, votes))
    below = 1e-6 + 0.5e-6 / shown if shown else 0.0
    for factor in (0.0, 0.5, 1 - 1.001 * below, 1 - 0.999 * below, 1.0, 1 + 0.999e-6, 1 + 1.001e-6, 1.1):
        radius = shown * factor or (0.0 if shown else 1e-3)
        row = CertifiedImage(0, 0, Certificate(0, radius, 10, 100, count, votes), 0.1)
        try:
            limits.check(row.label, row.certificate)
            right = True
        except ValueError:
            right = False
        assert limits.allow(columns_of([row])) == right == (shown > 0 and 1 - below < factor < 1.000001)
    abstained = CertifiedImage(0, 0, Certificate(ABSTAIN, 0.0, 10, 100, count, votes), 0.1)
    assert limits.allow(columns_of([abstained])) == (shown == 0)
