"""The certificates file: exact round trip, resume, torn and damaged files, files of other tools."""

import errno
import json
import math
import os
import re
from pathlib import Path
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothcert.certification.certificates import (
    COLUMNS,
    CertifiedImage,
    certificates_writer,
    format_row,
    parse_row,
    read_certificates,
)
from smoothcert.certification.checks import RowLimits, bound_of, check_settings
from smoothcert.certification.recertify import bounded_again, recertify
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.results import differing_settings, settings_path
from smoothcert.noise import NOISES
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.smoothing.certificate import Certificate, certificate_of_class, sorted_votes

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
def test_rows_are_read_back_exactly(index: int, radius: float, label: int, seconds: float, counts: list[int]) -> None:
    votes = tuple(enumerate(counts))
    original = CertifiedImage(index, label, Certificate(0, radius, 100, sum(counts), counts[0], votes), seconds)
    back = parse_row(format_row(original))
    assert (back.index, back.label, back.certificate) == (index, label, original.certificate)
    assert back.seconds == pytest.approx(seconds, abs=1e-6)


def test_first_columns_are_those_of_other_tools(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", 0)
    header, line = (tmp_path / "a.tsv").read_text().splitlines()
    assert header == "idx\tlabel\tpredict\tradius\tcorrect\ttime\tn0\tn\tcount\tvotes"
    assert line == "0\t3\t3\t0.25\t1\t0:00:00.500000\t5\t10\t9\t3:9,1:1"


def test_a_second_writer_resumes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    assert write(path, 0, 1) == []
    assert write(path, 2) == [0, 1]
    stored = read_certificates(path)
    assert [r.index for r in stored.rows] == [0, 1, 2]
    assert stored.settings == SETTINGS
    assert stored.provenance == {"who": "test"}


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps an open file")
def test_a_file_that_is_deleted_meanwhile_ends_the_work(tmp_path: Path) -> None:
    """Otherwise hours of rows go into a file that has no name."""
    path = tmp_path / "a.tsv"
    with certificates_writer(path, SETTINGS, {}) as writer:
        writer.append([row(0)])
        path.unlink()
        with pytest.raises(WorkError, match=r"a\.tsv: was deleted or moved while rows were added to it; put it back"):
            writer.append([row(1)])
    assert write(path, 0, 1) == []


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
    assert path.read_bytes() == whole[: whole.rfind(b"\n", 0, -cut) + 1]
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
    with pytest.raises(RequestError, match=r"n: the file has 10, the request 20.*in Python: out"):
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
    with pytest.raises(WorkError, match=r"a\.json: damaged.*; restore it$"):
        write(path, 1)


@pytest.mark.parametrize("digest", [5, {"a": 1}, None])
def test_a_stored_digest_of_another_type_differs(digest: object) -> None:
    (line,) = differing_settings({"weights_sha256": digest}, {"weights_sha256": "0123456789abcdef"})
    assert line == f"weights_sha256: the file has {digest!r}, the request '0123456789ab'"


def test_files_of_other_tools_are_read(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.write_text("\t".join(COLUMNS[:6]) + "\n0\t7\t7\t1.01\t1\t0:01:02.500000\n20\t2\t-1\t0.0\t0\t1 day, 0:00:01")
    stored = read_certificates(path)
    assert [(r.index, r.label, r.certificate.prediction, r.radius_if_correct, r.seconds) for r in stored.rows] == [
        (0, 7, 7, 1.01, 62.5),
        (20, 2, -1, 0.0, 86401.0),
    ]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.tsv"):
        read_certificates(tmp_path / "none.tsv")


POSSIBLE = {"sigma": 0.25, "n": 200, "n0": 100, "alpha": 0.001, "noise": "gaussian", "bound": "one-sided"}

ALL_AGREE = f"3\t7\t7\t{0.25 * NormalDist().inv_cdf(0.001 ** (1 / 200))}\t1\t0:00:01\t100\t200\t200\t7:200"


def possible(path: Path, settings: dict[str, object], *rows: str) -> None:
    """A file of ours with these lines."""
    path.with_suffix(".json").write_text(json.dumps({"settings": settings, "provenance": {}}))
    path.write_text("\t".join(COLUMNS) + "\n" + "".join(line + "\n" for line in rows))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("0\t7\t7\t99.0\t1\t0:00:01\t100\t200\t200\t7:200", "the radius 99 exceeds 0.456"),
        ("0\t7\t7\t0.4\t1\t0:00:01\t100\t200\t150\t7:150,1:50", "the most that 150 of 200 votes can show"),
        ("-1\t7\t7\t0.1\t1\t0:00:01\t100\t200\t200\t7:200", "column 'idx'"),
        ("0\t-7\t7\t0.1\t0\t0:00:01\t100\t200\t200\t7:200", "column 'label'"),
        ("0\t7\t-2\t0.0\t0\t0:00:01\t100\t200\t200\t7:200", "column 'predict'"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t-1\t200\t200\t7:200", "column 'n0'"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t-200\t-200\t7:-200", "column 'n'"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t200\t250\t7:250,1:-50", "column 'votes'"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t200\t201\t7:150,1:50", "count 201 exceeds n = 200"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t200\t200\t7:150,1:50", "count is 200, but class 7 has 150"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t200\t100\t7:100,7:100", "name a class twice"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t200\t100\t7:100,1:100|7:100,7:100", "name a class twice"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t900\t900\t7:900", "has 900 votes, the settings say n = 200"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t100\t100\t7:100", "has 100 votes, the settings say n = 200"),
        ("0\t7\t-1\t0.1\t0\t0:00:01\t100\t200\t200\t7:200", "abstains but has the radius"),
        ("0\t7\t7\t0.4\t1\t0:00:01\t100\t200\t200\t7:200", "the radius 0.4 is below 0.456"),
        ("0\t7\t-1\t0.0\t0\t0:00:01\t100\t200\t200\t7:200", "the radius 0 is below 0.456"),
        ("0\t7\t7\t0.0\t1\t0:00:01\t100\t200\t110\t7:110,1:90", "the class 7 is more than 110 of 200 votes can show"),
        ("0\t7\t7\tinf\t1\t0:00:01\t100\t200\t200\t7:200", "expected a radius >= 0, got inf"),
        ("0\t7\t7\tnan\t1\t0:00:01\t100\t200\t200\t7:200", "expected a radius >= 0, got nan"),
        ("0\t7\t7\t0.1\t1\tinf\t100\t200\t200\t7:200", "expected a time, got inf"),
        ("0\t7\tseven\t0.1\t1\t0:00:01\t100\t200\t200\t7:200", "column 'predict': expected an integer, got 'seven'"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t2_00\t200\t7:200", "column 'n': expected an integer, got '2_00'"),
        ("0\t7\t7\t0,1\t1\t0:00:01\t100\t200\t200\t7:200", "column 'radius': expected a number, got '0,1'"),
        ("0\t7\t7\t0.1\tyes\t0:00:01\t100\t200\t200\t7:200", "column 'correct': expected an integer, got 'yes'"),
        ("0\t7\t7\t0.1\t1\t ,0:01\t100\t200\t200\t7:200", "column 'time': expected a time, got ' ,0:01'"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t200\t200\t7", "column 'votes': expected an integer, got ''"),
        ("\t".join(COLUMNS), "column 'idx': expected an integer, got 'idx'"),
        ("0\t7", "expected 6, 10 or 11 columns, got 2"),
        ("0\t12\t7\t0.1\t0\t0:00:01\t100\t200\t200\t7:200", "class 12 is out of range for 10 classes"),
        ("0\t7\t7\t0.1\t1\t0:00:01\t100\t200\t199\t7:199,11:1", "class 11 is out of range for 10 classes"),
    ],
)
def test_impossible_rows_are_refused_with_line_and_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "a.tsv"
    possible(path, POSSIBLE | {"num_classes": 10}, ALL_AGREE, line)
    with pytest.raises(WorkError, match=rf"a\.tsv, line 3: damaged .*{re.escape(reason)}"):
        read_certificates(path)
    possible(path, POSSIBLE | {"num_classes": 10}, ALL_AGREE)
    assert len(read_certificates(path).rows) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"bound": "clopper-pearson one-sided"},
        {"bound": "two-sided"},
        {"noise": "laplace"},
        {"noise": "uniform"},
        {"radii": [0.1], "n": 1000},
        {"radii": [0.3], "n": 1000},
        {"radii": [0.1, 0.2], "n": 1000},
        {"radii": [0.1], "hold_back": True, "n": 1000},
        {"radii": [0.1, 0.2], "hold_back": True, "n": 1000},
        {"radii": [0.1, 0.9], "n": 1000},
        {"radius_loss": 0.1, "n": 1000},
        {"sound": True},
    ],
)
def test_radii_that_votes_do_not_show_under_each_rule_are_refused(tmp_path: Path, settings: dict[str, object]) -> None:
    """The largest radius of the rule, computed as certify does, is read; one a little larger is refused.

    One a little smaller is read only if the votes were stopped by a test: then their order decides.
    """
    noise = NOISES[settings.get("noise", "gaussian")](0.25)
    alone = settings.get("radii") == [0.3]  # its test stops where it claims, so the last votes must show the radius
    votes = [0, 190, 10] if settings.get("bound") == "two-sided" or alone else [0, 200]
    certificate = certificate_of_class(1, votes, 100, noise, 0.001, bound=bound_of(settings))
    radius = certificate.radius
    if "radii" in settings and not alone:  # not even 200 votes that agree show 0.9
        radius = noise.radius(1 - 0.001 ** (1 / 200))
    if settings.get("radii") in ([0.1], [0.1, 0.2]) and not settings.get("hold_back"):
        radius = max(settings["radii"]) * (1 + 1e-9)
    pairs = ",".join(f"{c}:{k}" for c, k in certificate.votes)
    line = f"0\t1\t1\t{{}}\t1\t0:00:01\t100\t200\t{votes[1]}\t{pairs}"
    path = tmp_path / "a.tsv"
    possible(path, POSSIBLE | settings, line.format(radius))
    assert read_certificates(path).rows[0].certificate.radius == radius
    possible(path, POSSIBLE | settings, line.format(radius * 1.001))
    with pytest.raises(WorkError, match=r"line 2: damaged .the radius .* exceeds"):
        read_certificates(path)
    possible(path, POSSIBLE | settings, line.format(radius * 0.999))
    if "radii" in settings:
        assert read_certificates(path).rows[0].certificate.radius == radius * 0.999
        return
    with pytest.raises(WorkError, match=r"line 2: damaged .the radius .* is below"):
        read_certificates(path)
    abstained = line.format(0.0).replace("1\t1\t0.0\t1", "1\t-1\t0.0\t0")
    possible(path, POSSIBLE | settings, abstained)
    with pytest.raises(WorkError, match=r"line 2: damaged .the radius 0 is below"):
        read_certificates(path)
    possible(path, POSSIBLE | settings | {"sigma": 0.26}, line.format(radius))
    with pytest.raises(WorkError, match=r"is below .* at sigma 0.26.*repair the line or .*json, or move"):
        read_certificates(path)


@pytest.mark.parametrize(
    "settings",
    [
        {"sigma": None, "n": "many"},
        {"sigma": "0.5"},
        {"objective": "x" * 20_000},
        {"sigma": 1e308},
        {"sigma": -1},
        {"sigma": True},
        {"noise": ["gaussian"]},
        {"noise": "cauchy"},
        {"bound": {}},
        {"dataset": ["mnist"]},
        {"alpha": 2},
        {"radii": 3},
        {"radii": ["a"]},
        {"n": 10**30},
        {"label_aware": "yes"},
        {"seed": [1]},
        {"images_sha256": {"a": 1}},
    ],
)
def test_wrong_settings_are_one_line(tmp_path: Path, settings: dict[str, object]) -> None:
    path, key = tmp_path / "a.tsv", list(settings)[-1]
    possible(path, POSSIBLE | settings, ALL_AGREE)
    for read in (read_certificates, lambda path: recertify(path, tmp_path / "x.tsv", alpha=0.01)):
        with pytest.raises(WorkError, match=rf"a\.json: damaged, expected .* for '{key}'") as caught:
            read(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["n", "n0"])
def test_numbers_of_votes_that_certify_takes_are_read(tmp_path: Path, key: str) -> None:
    for votes in (1, 10**9):
        check_settings({key: votes}, tmp_path / "a.tsv")
    for votes in (0, 10**9 + 1):
        with pytest.raises(WorkError, match=f"expected an integer from 1 to 1,000,000,000 for '{key}'"):
            check_settings({key: votes}, tmp_path / "a.tsv")


@pytest.mark.parametrize(
    ("noise", "sound"), [("gaussian", False), ("gaussian", True), ("laplace", False), ("uniform", False)]
)
def test_recertify_bounds_the_class_that_the_first_votes_chose(tmp_path: Path, noise: str, sound: bool) -> None:
    """An abstention stores its count alone: the class with more votes was not chosen, and is not certified."""
    lost = "0\t0\t-1\t0.0\t0\t0:00:01\t100\t200\t80\t0:120,1:80"
    close = "1\t2\t-1\t0.0\t0\t0:00:01\t100\t200\t115\t2:115,1:85"
    possible(tmp_path / "a.tsv", POSSIBLE | {"noise": noise, "sound": sound}, lost, close)
    assert recertify(tmp_path / "a.tsv", tmp_path / "b.tsv", alpha=0.2) == 2
    first, second = (row.certificate for row in read_certificates(tmp_path / "b.tsv").rows)
    assert (first.prediction, first.radius, first.count) == (-1, 0.0, 80)
    error = error_upper_bound(115, 200, 0.2) + (1e-10 if sound else 0.0)
    assert (second.prediction, second.radius) == (2, NOISES[noise](0.25).radius(error))


def test_an_image_that_a_label_aware_rule_left_out_stays_without_votes_and_coin() -> None:
    left_out = CertifiedImage(4, 1, Certificate(-1, 0.0, 100, 0, 0, ()), 0.5)
    limits = RowLimits({"sigma": 1.0, "alpha": 0.01, "bound": "randomized", "seed": 3})
    assert bounded_again(left_out, limits) == left_out


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("n", [2, 4, 10])
def test_recertified_abstentions_are_wrong_with_probability_at_most_alpha(n: int, alpha: float) -> None:
    """All counts of two classes, of which the first votes chose class 1, in a file of abstentions. Equal counts do not
    say which class was chosen, and above alpha 1/2 the other one must not get a certificate."""
    again: list[Certificate] = []
    for count in range(n + 1):
        old = CertifiedImage(0, 1, Certificate(-1, 0.0, 100, n, count, sorted_votes([n - count, count])), 0.5)
        limits = RowLimits({"sigma": 1.0, "alpha": alpha, "bound": "one-sided"})
        again.append(bounded_again(old, limits).certificate)
    for p in (k / 200 for k in range(100, 200)):
        radii = {0: 0.0, 1: NormalDist().inv_cdf(p)}
        wrong = [count for count, c in enumerate(again) if c.radius > radii.get(c.prediction, 0.0)]
        assert sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in wrong) <= alpha


def test_a_full_disk_names_the_folder_and_the_file_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.tsv"
    write(path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WorkError, match=f"{re.escape(str(tmp_path))}: could not be written to"):
            write(path, 1)
    write(path, 2)
    assert [row.index for row in read_certificates(path).rows] in ([0, 2], [0, 1, 2])


def test_recertify_names_a_missing_setting(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    for key in ("bound", "sigma", "noise", "alpha"):
        settings = {k: v for k, v in POSSIBLE.items() if k != key}
        possible(path, settings, ALL_AGREE)
        with pytest.raises(RequestError, match=f"expected the setting '{key}', got none"):
            recertify(path, tmp_path / "x.tsv")
        assert not (tmp_path / "x.tsv").exists()


def test_the_smallest_alpha_of_recertify(tmp_path: Path) -> None:
    possible(tmp_path / "a.tsv", POSSIBLE, ALL_AGREE)
    assert recertify(tmp_path / "a.tsv", tmp_path / "b.tsv", alpha=1e-300) == 1
    for alpha in (9e-301, 0.0, 1.0, float("nan")):
        with pytest.raises(RequestError, match="alpha: expected at least 1e-300 and less than 1, got"):
            recertify(tmp_path / "a.tsv", tmp_path / "c.tsv", alpha=alpha)


def test_recertify_draws_no_coins_without_the_seed_of_the_file(tmp_path: Path) -> None:
    """Shards of several seeds were merged: no seed gives the coins of all images."""
    possible(tmp_path / "a.tsv", POSSIBLE | {"seed": None}, ALL_AGREE)
    with pytest.raises(RequestError, match="expected the seed that its coins are drawn from, got none"):
        recertify(tmp_path / "a.tsv", tmp_path / "x.tsv", bound="randomized")
    assert not (tmp_path / "x.tsv").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"settings": [], "provenance": {}}',
        "[1]",
        '{"settings": {}}',
        '{"settings": {"weight": NaN}, "provenance": {}}',
    ],
)
def test_settings_of_another_structure_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.tsv"
    write(path, 0)
    settings_path(path).write_text(text)
    with pytest.raises(WorkError, match=r"a\.json: damaged"):
        read_certificates(path)


def test_a_writer_that_fails_before_its_first_row_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), certificates_writer(tmp_path / "new" / "a.tsv", SETTINGS, {}):
        raise KeyboardInterrupt
    assert not (tmp_path / "new").exists()
    with certificates_writer(tmp_path / "a.tsv", SETTINGS, {}):
        pass
    assert read_certificates(tmp_path / "a.tsv").rows == ()


def test_a_folder_is_refused_and_a_file_in_it_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="got a folder; give a certificates file"):
        read_certificates(tmp_path)
    run = Path(__file__).parents[2] / "results/cifar10/consistency-0.5"
    with pytest.raises(RequestError, match=r"got a folder; .* such as certificates/test-n100000\.tsv\.gz$"):
        read_certificates(run)
    with pytest.raises(RequestError, match=r"such as test-n100000\.tsv\.gz$"):
        read_certificates(run / "certificates")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tsv")
    with pytest.raises(RequestError, match="expected a file, got a pipe"):
        read_certificates(tmp_path / "a.tsv")
    write(tmp_path / "b.tsv", 0)
    settings_path(tmp_path / "b.tsv").unlink()
    os.mkfifo(tmp_path / "b.json")
    with pytest.raises(RequestError, match="expected a file, got a pipe"):
        read_certificates(tmp_path / "b.tsv")


def test_every_certificates_file_of_the_results_is_read() -> None:
    files = sorted((Path(__file__).parents[2] / "results").rglob("*.tsv.gz"))
    assert len(files) >= 63
    # The smallest of each folder here; the larger ones are read by the tests of the tables.
    smallest = {path.parents[2]: path for path in sorted(files, key=lambda path: -path.stat().st_size)}
    for path in smallest.values():
        stored = read_certificates(path)
        assert stored.rows
        assert not stored.torn
