"""The log of the service: whole rows, rotation, restart, and recomputation by `recertify`."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from smoothcert.certification.recertify import recertify
from smoothcert.certification.serve.log import HEADER, CertificateLog, read_log
from smoothcert.certification.serve.rule import Question, RuleName, make_plan
from smoothcert.errors import RequestError, WorkError
from smoothcert.noise import Gaussian

MODELS: dict[str, dict[str, Any]] = {"abc": {"name": "a", "sigma": 0.5, "noise": "gaussian", "num_classes": 3}}
FIRST = "certificates-00001.tsv"


def append(log: CertificateLog, votes: int = 1000, rule: RuleName = "fixed", wrong: int = 20, looks: int = 99) -> None:
    plan = make_plan(Question(votes, 0.001, None, rule), Gaussian(0.5), 100, 500)
    progress = plan.start(1, 3)
    for _ in plan.looks[:looks]:
        progress.update(np.array([wrong, progress.missing - wrong, 0]))
    log.append("abc", plan.question, progress.certificate(), "budget", 0.01)


def test_rows_return_as_they_were_written_and_a_torn_one_is_cut_off(tmp_path: Path) -> None:
    log = CertificateLog(tmp_path, MODELS)
    append(log)
    append(log, 2000, "sequential")
    append(log, 2000, "sequential", looks=3)
    append(log, 2000, "fixed", looks=3)
    with pytest.raises(RequestError, match="another process is writing it"):
        CertificateLog(tmp_path, MODELS)
    log.close()
    path = tmp_path / FIRST
    before = path.read_bytes()
    path.write_bytes(before + b"4\t2026-01-01T00:00:00\tabc\tfix")
    rows, _ = read_log(path)
    assert [row.certificate.n for row in rows] == [1000, 2000, 1500, 1500]
    assert rows[0].certificate.radius == pytest.approx(0.5 * stats.norm.isf(stats.beta.isf(0.001, 41, 960)), rel=1e-9)
    log = CertificateLog(tmp_path, MODELS)
    append(log)
    log.close()
    assert path.read_bytes().startswith(before)
    assert [row.index for row in read_log(path)[0]] == [0, 1, 2, 3, 4]
    CertificateLog(tmp_path, {"abc": {**MODELS["abc"], "sigma": 1.0}}).close()  # another model: another file
    assert len(list(tmp_path.glob("certificates-*.tsv"))) == 2


def test_a_restarted_server_counts_rows_without_checking_them(tmp_path: Path) -> None:
    """Checking takes seconds for a full file; whoever reads the log checks it."""
    log, path = CertificateLog(tmp_path, MODELS), tmp_path / FIRST
    append(log)
    append(log)
    log.close()
    path.write_bytes(path.read_bytes().replace(b"fixed", b"guess", 1))
    log = CertificateLog(tmp_path, MODELS)
    append(log)
    log.close()
    assert [line.split("\t")[0] for line in path.read_text().splitlines()[1:]] == ["0", "1", "2"]
    with pytest.raises(WorkError, match="line 2: damaged"):
        read_log(path)
    for damage, message in ((b"x", "line 5: damaged"), (b"0", "line 5: image 0 is in the file twice")):
        content = path.read_bytes()
        path.write_bytes(content + damage + b"\n")
        with pytest.raises(WorkError, match=message):
            CertificateLog(tmp_path, MODELS)
        path.write_bytes(content)


def test_a_row_that_the_disk_has_no_room_for_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = CertificateLog(tmp_path, MODELS), os.write
    append(log)
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:20]))
    with pytest.raises(WorkError, match="no space left"):
        append(log)
    monkeypatch.undo()
    append(log)
    log.close()
    assert [row.index for row in read_log(tmp_path / FIRST)[0]] == [0, 1]


def test_files_are_rotated_and_the_oldest_removed(tmp_path: Path) -> None:
    log = CertificateLog(tmp_path, MODELS, largest=400, keep=3)
    for _ in range(30):
        append(log)
    log.close()
    files = sorted(tmp_path.glob("certificates-*.tsv"))
    assert len(files) == 3
    assert len(list(tmp_path.glob("certificates-*.json"))) == 3
    assert int(files[-1].stem[-5:]) > 5
    assert all(len(read_log(path)[0]) > 1 for path in files)


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps an open file")
def test_a_log_that_is_deleted_or_moved_away_continues_in_a_new_file(tmp_path: Path) -> None:
    """Otherwise the rows of a server that runs on go into a file that has no name."""
    log = CertificateLog(tmp_path / "log", MODELS)
    append(log)
    shutil.rmtree(tmp_path / "log")
    append(log)
    append(log)
    (tmp_path / "log" / FIRST).rename(tmp_path / "moved.tsv")
    append(log)
    log.close()
    assert (tmp_path / "moved.tsv").read_text().count("\n") == 3
    assert [row.index for row in read_log(tmp_path / "log" / FIRST)[0]] == [0]


def test_recertify_recomputes_answers_of_the_fixed_rule(
    tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    log = CertificateLog(tmp_path, MODELS)
    append(log, 2000, "sequential")
    log.close()
    path, out = tmp_path / FIRST, tmp_path / "out.tsv"
    with pytest.raises(
        RequestError, match="expected answers of the fixed rule, got none among 1, all of which pass the check"
    ):
        recertify(path, out)
    log = CertificateLog(tmp_path, MODELS)
    append(log)
    append(log, 1500)
    append(log, 2000, looks=3)  # a client or a deadline has chosen this number of votes
    log.close()
    code, printed, _ = run_cli("recertify", path, "--alpha", 0.05, "--out", out)
    assert code == 0
    assert printed.startswith(f"wrote 2 of 4 rows to {out}; the others are checked, not recomputed: ")
    rows, _ = read_log(out)
    assert [row.question.alpha for row in rows] == [0.05, 0.05]
    expected = [0.5 * stats.norm.isf(stats.beta.isf(0.05, k + 1, n - k)) for k, n in ((40, 1000), (60, 1500))]
    assert [row.certificate.radius for row in rows] == pytest.approx(expected, rel=1e-9)
    same_file = tmp_path / f"{path.stem}-recertified.tsv"
    assert run_cli("recertify", path)[1].startswith(f"wrote 2 of 4 rows to {same_file}; ")
    same = path.read_text().splitlines()[2:4]
    assert run_cli("recertify", path, "--alpha", 1e-5)[0] == 0
    CertificateLog(tmp_path, {"abc": {**MODELS["abc"], "sigma": 1.0}}, keep=1).close()  # a new file, the next number
    assert not path.exists()
    assert sorted(file.name for file in tmp_path.glob("*.tsv")) == [
        "certificates-00001-alpha1e-05.tsv",
        "certificates-00001-recertified.tsv",
        "certificates-00002.tsv",
        "out.tsv",
    ]
    assert same_file.read_text() == HEADER + "\n".join(same) + "\n"


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("fixed", {"radius": "1.5"}),
        ("sequential", {"radius": "2.9"}),
        ("fixed", {"budget": "1001"}),
        ("fixed", {"model": "xyz"}),
        ("sequential", {"rule": "guess"}),
        ("fixed", {"alpha": "nan"}),
    ],
)
def test_rows_that_claim_more_than_their_votes_show_are_refused(
    tmp_path: Path, rule: RuleName, change: dict[str, str]
) -> None:
    log = CertificateLog(tmp_path, MODELS)
    append(log, rule=rule)
    log.close()
    path = tmp_path / FIRST
    row = dict(zip(*(line.split("\t") for line in path.read_text().splitlines()), strict=True))
    path.write_text(HEADER + "\t".join((row | change).values()) + "\n")
    with pytest.raises(WorkError, match="line 2: damaged"):
        read_log(path)


def test_the_reserved_bound_before_the_last_look_is_refused(tmp_path: Path) -> None:
    """All of 1500 votes agree, of at most 2000: no radius above the grid, whose largest is 1.25, has been tested."""
    log = CertificateLog(tmp_path, MODELS)
    append(log, 2000, "sequential", wrong=0)
    append(log, 2000, "sequential", wrong=0, looks=3)
    log.close()
    path = tmp_path / FIRST
    last, early = (row.certificate for row in read_log(path)[0])
    assert (last.n, early.n) == (2000, 1500)
    assert last.radius > early.radius == pytest.approx(1.25)
    path.write_text(path.read_text().replace(f"\t{early.radius!r}\t", "\t1.29\t"))
    with pytest.raises(WorkError, match=r"line 3: damaged \(the radius 1\.29 exceeds 1\.25"):
        read_log(path)
