"""The certificates file: exact round trip, resume, torn and damaged files, files of other tools."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothcert.certificates import (
    COLUMNS,
    Certificate,
    CertifiedImage,
    certificates_writer,
    format_row,
    parse_row,
    read_certificates,
)
from smoothcert.errors import RequestError, WorkError
from smoothcert.result_file import settings_path

SETTINGS = {"sigma": 0.5, "n": 10, "seed": 1}


def row(index: int, radius: float = 0.25) -> CertifiedImage:
    return CertifiedImage(index, 3, Certificate(3, radius, 5, 10, 9, ((3, 9), (1, 1))), 0.5)


def write(path: Path, *indices: int, settings: dict[str, object] = SETTINGS) -> list[int]:
    with certificates_writer(path, settings, {"who": "test"}) as writer:
        writer.append([row(i) for i in indices])
        return [r.index for r in writer.done]


@given(
    st.integers(0, 10**6),
    st.floats(0, 10),
    st.integers(0, 9),
    st.floats(0, 10**6),
    st.lists(st.integers(1, 10**5), min_size=1, max_size=10),
)
def test_rows_come_back_exactly(index: int, radius: float, label: int, seconds: float, counts: list[int]) -> None:
    votes = tuple(enumerate(counts))
    original = CertifiedImage(index, label, Certificate(0, radius, 100, sum(counts), counts[0], votes), seconds)
    back = parse_row(format_row(original))
    assert (back.index, back.label, back.certificate) == (index, label, original.certificate)
    assert back.seconds == pytest.approx(seconds, abs=1e-6)


def test_columns_start_with_those_of_the_field(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", 0)
    header, line = (tmp_path / "a.tsv").read_text().splitlines()
    assert header == "idx\tlabel\tpredict\tradius\tcorrect\ttime\tn0\tn\tcount\tvotes"
    assert line == "0\t3\t3\t0.25\t1\t0:00:00.500000\t5\t10\t9\t3:9,1:1"


def test_appending_resumes(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    assert write(path, 0, 1) == []
    assert write(path, 2) == [0, 1]
    stored = read_certificates(path)
    assert [r.index for r in stored.rows] == [0, 1, 2]
    assert stored.settings == SETTINGS
    assert stored.provenance == {"who": "test"}


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_line_is_dropped_on_resume(tmp_path: Path, cut: int) -> None:
    """Wherever a kill cuts the file: rows before the cut stay, the row in flight goes, the result is whole again."""
    path = tmp_path / "a.tsv"
    write(path, 0, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    stored = read_certificates(path)
    left = [r.index for r in stored.rows]
    assert stored.torn == (not path.read_bytes().endswith(b"\n"))
    assert write(path) == left
    write(path, *[i for i in (0, 1, 2) if i not in left])
    assert path.read_bytes() == whole


def test_a_torn_header_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    write(path, 0)
    whole = path.read_bytes()
    for cut in (0, 1, 7):
        path.write_bytes(whole[:cut])
        assert write(path, 0) == []
        assert path.read_bytes() == whole


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    write(path, 0)
    before = path.read_bytes()
    with pytest.raises(RequestError, match=r"n: the file has 10, the request 20"):
        write(path, 1, settings=SETTINGS | {"n": 20})
    with pytest.raises(RequestError, match="alpha: the file has None"):
        write(path, 1, settings=SETTINGS | {"alpha": 0.1})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace("3:9,1:1", "3:9,1:x", 1), "line 2: damaged"),
        (lambda text: text.replace("3:9,1:1", "3:9,1:2", 1), "do not add up"),
        (lambda text: text.replace("\t1\t0:00", "\t0\t0:00", 1), "column 'correct'"),
        (lambda text: text.replace("0.25", "nan", 1), "expected a radius"),
        (lambda text: text.replace("idx", "index", 1), "not a certificates file"),
        (lambda text: text + text.splitlines()[1] + "\n", "image 0 is in the file twice"),
        (lambda text: "\x00\x01" * 40 + "\n" + text, "not a certificates file"),
    ],
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / "a.tsv"
    write(path, 0, 1)
    path.write_text(damage(path.read_text()))
    before = path.read_bytes()
    for action in (lambda: write(path, 2), lambda: read_certificates(path)):
        with pytest.raises(WorkError, match=message) as caught:
            action()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_damaged_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    write(path, 0)
    settings_path(path).write_text("{")
    with pytest.raises(WorkError, match=r"a\.json: damaged"):
        write(path, 1)


def test_files_of_other_tools_are_read(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.write_text("\t".join(COLUMNS[:6]) + "\n0\t7\t7\t1.01\t1\t0:01:02.500000\n20\t2\t-1\t0.0\t0\t1 day, 0:00:01")
    stored = read_certificates(path)
    assert [(r.index, r.label, r.certificate.predict, r.radius_if_correct, r.seconds) for r in stored.rows] == [
        (0, 7, 7, 1.01, 62.5),
        (20, 2, -1, 0.0, 86401.0),
    ]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.tsv"):
        read_certificates(tmp_path / "none.tsv")
