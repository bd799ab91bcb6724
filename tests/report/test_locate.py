"""From paths to certificates files with names."""

from pathlib import Path

import pytest

from smoothcert.errors import RequestError
from smoothcert.io.written_files import write_files
from smoothcert.report import find_certificates
from smoothcert.report.contents import NO_CERTIFICATES, Choices, read_contents
from smoothcert.report.locate import locate
from smoothcert.training.run_folder import runs_in

from .conftest import FIELD_FILE, MakeRun


def test_run_folder_certificates_folder_and_file(make_run: MakeRun, field_file: Path, tmp_path: Path) -> None:
    a, b, c = make_run("a"), make_run("b"), make_run("c")
    found = find_certificates([c, a / "certificates", b / "certificates" / "test.tsv", field_file])
    assert found == [
        ("c", c / "certificates" / "test.tsv"),
        ("a", a / "certificates" / "test.tsv"),
        ("b", b / "certificates" / "test.tsv"),
        ("noise_0.25", field_file),
    ]


def test_several_files_in_a_run(make_run: MakeRun) -> None:
    make_run("a", file="test")
    run = make_run("a", file="more")
    (run / "certificates" / ".hidden.tsv").write_text("")
    assert [name for name, _ in find_certificates([run])] == ["a/more", "a/test"]
    assert [path.name for _, path in find_certificates([run / "certificates"])] == ["more.tsv", "test.tsv"]
    one, other = run / "certificates" / "test.tsv", run / "certificates" / "more.tsv"
    assert find_certificates([one]) == [("a", one)]
    assert find_certificates([one, other]) == [("a/test", one), ("a/more", other)]


def test_a_folder_of_runs_is_all_that_are_certified(make_run: MakeRun, field_file: Path) -> None:
    b, a = make_run("b"), make_run("a")
    (a.parent / "trained-only").mkdir()
    (a.parent / "report.md").write_text("not a run")
    expected = [(run.name, run / "certificates" / "test.tsv") for run in (a, b)]
    assert find_certificates([a.parent]) == expected
    assert find_certificates([b, a.parent]) == expected[::-1], "named once"


def test_runs_without_certificates_are_skipped_and_known_in_a_folder_and_one_by_one(make_run: MakeRun) -> None:
    run = make_run("certified")
    runs, trained = run.parent, run.parent / "trained"
    trained.mkdir()
    (trained / "recipe.yaml").write_text("")
    for paths in ([runs], sorted(runs.iterdir())):
        assert locate(paths) == ([("certified", run / "certificates" / "test.tsv")], [trained])
    assert read_contents([runs, trained], Choices()).warnings == {NO_CERTIFICATES: ["trained"]}, "once"
    other = runs / "others" / "trained"
    other.mkdir(parents=True)
    assert read_contents([runs, other], Choices()).warnings == {
        NO_CERTIFICATES: [f"{runs.name}/trained", "others/trained"]
    }


def test_a_report_among_runs_is_skipped_and_reports_alone_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    run, report = make_run("run"), tmp_path / "report"
    write_files(report, {"report.md": b"text"})
    assert locate([report, run]) == ([("run", run / "certificates" / "test.tsv")], [])
    with pytest.raises(RequestError, match="expected a run folder"):
        find_certificates([report])
    other = tmp_path / "other"
    write_files(other, {"report.md": b"text"})
    with pytest.raises(RequestError, match="expected a run folder"):
        find_certificates([report, other])


def test_a_file_next_to_runs_does_not_hide_them(make_run: MakeRun) -> None:
    run = make_run("a")
    (run.parent / "merged.tsv").write_text(FIELD_FILE)
    expected = [("merged", run.parent / "merged.tsv"), ("a", run / "certificates" / "test.tsv")]
    assert find_certificates([run.parent]) == expected


def test_a_folder_of_tables_is_named_after_itself(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "x.tsv").write_text(FIELD_FILE)
    assert find_certificates([folder]) == [("theirs", folder / "x.tsv")]


def test_a_run_named_by_a_dot(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run("here"))
    assert [name for name, _ in find_certificates([Path(".")])] == ["here"]


def test_equal_names_become_distinct(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("x/run"), make_run("y/run"), make_run("z/x/run"), make_run("other")]
    names = [name for name, _ in find_certificates(runs)]
    assert names == [f"{tmp_path.name}/x/run", "y/run", "z/x/run", "other"]
    same = [tmp_path / "a.tsv", tmp_path / "a.txt"]
    for path in same:
        path.write_text(FIELD_FILE)
    with pytest.raises(RequestError, match=r"expected a different name for each run, got '.*/a' twice; .* --as"):
        read_contents(same, Choices())


def test_numbers_in_names_are_sorted_as_numbers(make_run: MakeRun) -> None:
    """Runs in a folder, and files of a run; paths keep the order in which they are given."""
    ordered = ["weight0.5", "weight2", "weight2-seed1", "weight2-seed10", "weight10", "weight10.5", "weight100"]
    for name in sorted(ordered):
        make_run(f"runs/{name}")
    runs = make_run("runs/weight2").parent
    assert [name for name, _ in find_certificates([runs])] == ordered
    assert [run.name for run in runs_in(runs, Path.is_dir)] == ["runs"]
    assert [run.name for run in runs_in(runs, lambda path: (path / "certificates").is_dir())] == ordered
    given = [runs / "weight10", runs / "weight2"]
    assert [name for name, _ in find_certificates(given)] == ["weight10", "weight2"]
    for votes in (10000, 100000, 1000):
        make_run("several", file=f"test-n{votes}")
    several = find_certificates([make_run("several", file="test-n9")])
    assert [name for name, _ in several] == [f"several/test-n{votes}" for votes in (9, 1000, 10000, 100000)]


def test_a_file_that_is_named_twice_is_listed_once(make_run: MakeRun) -> None:
    run = make_run("a")
    assert len(find_certificates([run, run / "certificates", run / "certificates" / "test.tsv"])) == 1


def test_wrong_paths(tmp_path: Path) -> None:
    trained, empty, half = tmp_path / "trained", tmp_path / "empty", tmp_path / "half"
    for folder in (trained, empty, half / "certificates"):
        folder.mkdir(parents=True)
    (trained / "recipe.yaml").write_text("")
    for path, reason in (
        (tmp_path / "missing", "no such file or folder"),
        (trained, f"smoothcert certify {trained}`"),
        (half, f"smoothcert certify {half}`"),
        (half / "certificates", f"smoothcert certify {half}`"),
        (empty, "got neither.*smoothcert certify RUN"),
    ):
        with pytest.raises(RequestError, match=reason) as caught:
            find_certificates([path])
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="at least one"):
        find_certificates([])
