"""`smoothcert report` as a user calls it, on certificates files only."""

import csv
import errno
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny import tiny_recipe

import smoothcert
from smoothcert.papers.tables import published_acr

from .conftest import PLAIN, MakeRun, image, images

Report = Callable[..., tuple[int, str, str]]


@pytest.fixture
def report(run_cli: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Report:
    """Calls `smoothcert report` in an empty folder; exit code, output, errors."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    return partial(run_cli, "report")


def test_runs_next_to_a_papers_table(report: Report, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("mine")
    code, out, err = report(run, "--paper", "smoothmix/table2", "--format", "md", "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    acr = published_acr("smoothmix/table2", sigma=0.5, method="Gaussian")
    assert acr is not None
    for text in (out, (tmp_path / "out" / "report.md").read_text()):
        assert "published" in text
        assert f"{acr:.3f}" in text
        assert f"{acr - 0.31999:.3f}" in text.replace("−", ""), "ours is less by this"
        assert "10 images, the paper's 10,000" in text


def test_the_plain_report(report: Report, make_run: MakeRun, field_file: Path) -> None:
    code, out, err = report(make_run("mine"), field_file, "--radii", "0,0.5")
    assert (code, err) == (0, "")
    assert "published" not in out
    written = [".smoothcert-report.json", "curves.png", "distribution.png", "report.csv", "report.html", "report.md"]
    assert sorted(path.name for path in Path("report").iterdir()) == written


def test_wrong_requests_are_one_line_and_write_nothing(report: Report, make_run: MakeRun, tmp_path: Path) -> None:
    run, trained, other = make_run("mine"), tmp_path / "trained", tmp_path / "notes.txt"
    trained.mkdir()
    (trained / "recipe.yaml").write_text("sigma: 0.5\n")
    other.write_text("dear diary\n")
    moved = make_run("moved", training_sigma=0.5, sigma=0.25)
    for arguments, code, expected in (
        ([trained], 2, f"{trained}: expected certificates (*.tsv), got none; make them with `smoothcert certify"),
        ([run, tmp_path / "nowhere"], 2, f"{tmp_path / 'nowhere'}: no such file or folder; give a run folder"),
        ([run, other], 2, f"{other}: not a certificates file: expected the columns"),
        ([run, "--paper", "smoothmix/table22"], 2, "expected the name of a paper's table, got 'smoothmix/table22'"),
        ([run, "--paper", "smoothmix/table6"], 2, "mine: expected a run that the paper's table has"),
        ([run, "--format", "docx"], 2, "expected report formats out of md, csv, tex"),
        ([run, "--radii", "much"], 2, "radii: expected comma-separated numbers"),
        ([moved, run, "--paper", "smoothmix/table2"], 2, f"{moved}/certificates/test.tsv: expected certificates at"),
    ):
        got, _, err = report(*arguments)
        assert (got, err.count("\n")) == (code, 1), err
        assert err.startswith(f"smoothcert: {expected}"), err
        assert list(Path().iterdir()) == []


@pytest.mark.usefixtures("no_pictures")
def test_figures_that_an_earlier_report_drew_and_this_one_cannot_are_removed(
    report: Report, make_run: MakeRun, field_file: Path
) -> None:
    run = make_run("mine")
    lines = [{"epoch": i, "learning_rate": 0.1, "loss": 2.0 - i, "noisy_accuracy": 0.5, "seconds": 1.0} for i in (0, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report(run, "--format", "md,svg")[0] == 0
    assert "](training.svg)" in Path("report/report.md").read_text()
    assert report(field_file, "--format", "md,svg")[0] == 0
    assert not Path("report/training.svg").exists()
    assert "training.svg" not in Path("report/report.md").read_text()


def test_damaged_metrics_are_reported_before_anything_is_written(report: Report, make_run: MakeRun) -> None:
    run = make_run("mine")
    (run / "metrics.jsonl").write_text('{"epoch": 0, "loss": 1.0}\nnonsense\n')
    code, _, err = report(run)
    assert (code, err.count("\n")) == (1, 1), err
    assert "metrics.jsonl, line 2: damaged" in err
    assert not Path("report").exists()


def test_brackets_in_a_path_are_text(report: Report, make_run: MakeRun) -> None:
    code, out, err = report(make_run("mine"), "--out", "o[/x]", "--format", "md")
    assert (code, err) == (0, "")
    assert "wrote o[/x]/report.md" in out


def test_a_name_that_is_not_utf8(report: Report, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("mine").rename(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xffname"))
    assert report(run, "--format", "md,csv,tex,html")[0] == 0
    assert "bad\\udcffname" in Path("report/report.csv").read_text()


@pytest.mark.parametrize(
    ("settings", "code"), [({"split": "val"}, 0), ({"n": "many"}, 1), ({"radii": 3}, 1), ({"radii": ["a"]}, 1)]
)
def test_settings_of_other_tools_are_accepted_or_refused(
    report: Report, make_run: MakeRun, settings: dict[str, object], code: int
) -> None:
    found, _, err = report(make_run("mine", **settings), "--format", "md,html")
    assert found == code
    assert "Traceback" not in err


def test_a_full_disk_is_failed_work(report: Report, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("smoothcert.io.written_files.write_text_atomically", full)
    code, _, err = report(make_run("mine"), "--format", "md")
    assert code == 1
    assert "No space left on device" in err


@pytest.mark.parametrize("trained_on", ["folder:a", "folder:./x/../a", "folder:b", "npz:a", "folder:~nobody-here/a"])
def test_images_without_a_split_are_noted_if_the_run_was_trained_on_them(
    report: Report, make_run: MakeRun, trained_on: str
) -> None:
    run = make_run("mine", dataset="folder:a", split="all")
    tiny_recipe(dataset=trained_on).save(run / "recipe.yaml")
    code, out, _ = report(run, "--format", "csv")
    assert code == 0
    assert ("certified on images that it was trained on" in " ".join(out.split())) == trained_on.endswith(
        ("folder:a", "../a")
    )


def test_runs_on_different_images_are_reported(report: Report, make_run: MakeRun) -> None:
    runs = [make_run("all"), make_run("some", images()[::2])]
    note = "only the 5 images that all runs of the same σ have"
    code, out, _ = report(*runs, "--format", "csv")
    assert code == 0
    assert f"note: all: {note} are counted" in out.replace("\n", " ")
    code, out, _ = report(*runs, "--format", "csv", "--all-images")
    assert code == 0
    assert note not in out
    assert "not ranked: the images differ" in out
    code, out, _ = report(runs[0], make_run("other", images()[::2], sigma=1.0), "--format", "csv")
    assert "differ" not in out, "they are not compared"


def test_what_bold_and_established_mean_is_said_where_runs_are_compared(report: Report, make_run: MakeRun) -> None:
    runs = make_run("a"), make_run("b"), make_run("c", sigma=0.25)
    for given, compares in (([runs[0]], False), ([runs[0], runs[2]], False), (runs, True)):
        assert report(*given, "--format", "md,tex,html")[0] == 0
        for kind, words in {
            "md": ("Bold: ", "established"),
            "tex": ("Bold: ",),
            "html": ("Bold: ", "established"),
        }.items():
            text = Path("report", f"report.{kind}").read_text()
            assert "ertified accuracy" in text
            assert all((word in text) == compares for word in words), (kind, compares)


def test_runs_without_a_radius_in_l_infinity_are_noted(report: Report, make_run: MakeRun) -> None:
    known, own = make_run("known"), make_run("own", dataset="folder:/images", sigma=0.25)
    code, out, _ = report(known, own, "--format", "csv", "--linf")
    assert code == 0
    assert "note: own: no ACR in L∞" in out
    rows = csv.DictReader(Path("report/report.csv").read_text().splitlines())
    assert {row["name"]: bool(row["acr_l_infinity"]) for row in rows} == {"known": True, "own": False}


def test_one_image_is_not_called_images(report: Report, make_run: MakeRun) -> None:
    runs = make_run("one", images()[:1]), make_run("ten")
    code, out, _ = report(*runs, "--paper", "smoothmix/table2", "--format", "md,tex,html", "--radii", "0,0.1")
    assert code == 0
    assert "1 of 1 test digits of MNIST keeps its class" in " ".join(out.split())
    for text in (out, *(Path("report", f"report.{kind}").read_text() for kind in ("md", "tex", "html"))):
        words = " ".join(text.split()).replace("&#39;", "'").replace("$\\sigma$", "σ")
        assert "only the 1 image that all runs of the same σ have is counted" in words
        assert "1 image, the paper's 10,000" in words
        assert not re.search(r"(?<![\d.,])1 (images|votes|runs)", words)


def test_pictures_of_a_folder_that_only_the_certificates_name_are_not_embedded(
    report: Report, make_run: MakeRun, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    for name, label in (("a", 0), ("b", 1)):
        (private / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (200 * label, 10, 10)).save(private / name / "1.png")
    rows = [image(0, 0, 0, 0.5), image(1, 1, 1, 0.25)]
    run = make_run("received", rows, dataset=f"folder:{private}")
    assert report(run, "--format", "html")[0] == 0
    page = Path("report/report.html").read_text()
    assert "data:image" not in page
    assert f"add --images folder:{private}." in page
    code, out, _ = report(run, "--format", "html", "--images", f"folder:{private}")
    assert (code, "--images" in out) == (0, False)
    assert Path("report/report.html").read_text().count("data:image/png") == 2
    code, out, _ = report(run, "--format", "html", "--images", f"folder:{private.parent}")
    note = f"note: --images folder:{private.parent}: not shown, no certificates here are of these images; they are of"
    assert (code, " ".join(out.split()).count(f"{note} folder:{private}")) == (0, 1)
    assert "data:image" not in Path("report/report.html").read_text()
    code, _, err = report(run, "--format", "html", "--images", private)
    assert (code, err.count("\n")) == (2, 1)
    assert "images: expected folder:PATH or npz:PATH" in err
    code, _, err = report(run, "--format", "html", "--images", "folder:nowhere")
    place = Path("nowhere").absolute()
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"smoothcert: folder:nowhere: expected a folder, got nothing at {place}; give ")


def test_escape_sequences_and_formulas_are_text_in_every_output(
    report: Report, make_run: MakeRun, tmp_path: Path
) -> None:
    name = "=HYPERLINK(1)\x1b[2J\u202e"
    runs = [
        make_run(name, objective="@me\x1b]0;title\x07", dataset="-set\x1b[2J", precision="+fp\x1b", split="te\x1bst"),
        make_run("other", sigma=0.25, dataset="mnist\x9b", objective="-1"),
    ]
    code, out, err = report(*runs, "--format", "md,csv,tex,html,svg", "--out", "out\x1b[31m")
    assert (code, err) == (0, "")
    folder = Path("out\x1b[31m")
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert len(texts) >= 6
    for where, text in {**texts, "terminal": out}.items():
        unprintable = {c for c in text if not c.isprintable()} - set("\n")
        assert not unprintable - set("\t" if where.endswith("html") else ""), where
        if not where.startswith((".", "distribution", "curves")):
            assert "x1b" in text, where
    lines = list(csv.DictReader(texts["report.csv"].splitlines()))
    assert {lines[1]["name"], lines[1]["method"], lines[1]["dataset"], lines[1]["precision"]} == {
        r"'=HYPERLINK(1)\x1b[2J\u202e",
        r"'@me\x1b]0;title\x07",
        r"'-set\x1b[2J",
        r"'+fp\x1b",
    }
    assert lines[0]["method"] == "-1", "a number stays a number"
    code, _, err = report(tmp_path / "nowhere\x1b[2J", "--format", "md")
    assert code == 2
    assert r"nowhere\x1b[2J" in err


@pytest.mark.usefixtures("no_pictures")
def test_files_of_the_user_are_not_overwritten(report: Report, make_run: MakeRun, tmp_path: Path) -> None:
    run, out = make_run("mine"), tmp_path / "thesis"
    out.mkdir()
    for name in ("report.md", "training.png"):
        (out / name).write_text("dear reader")
    code, _, err = report(run, "--out", out, "--format", "md")
    assert (code, err.count("\n")) == (2, 1)
    assert "got report.md; choose another folder" in err
    assert sorted(path.name for path in out.iterdir()) == ["report.md", "training.png"]
    assert report(run, "--out", out, "--format", "md,png", "--force")[0] == 0
    assert (out / "report.md").read_text().startswith("# Certified robustness")
    assert (out / "training.png").read_text() == "dear reader", "this report has no such figure"
    assert report(run, "--out", out, "--format", "md")[0] == 0


@pytest.mark.usefixtures("no_pictures")
def test_a_report_of_other_runs_leaves_no_old_files(report: Report, make_run: MakeRun, tmp_path: Path) -> None:
    """A reader of the folder would take them for files of the new report; files that the user changed stay."""
    runs, out = [make_run("mine"), make_run("other")], tmp_path / "out"

    def files() -> set[str]:
        return {path.name for path in out.iterdir() if path.name[0] != "."}

    assert report(runs[0], "--out", out, "--format", "md,csv,html")[0] == 0
    assert report(runs[0], "--out", out, "--format", "tex,png", "--caption", "Mine")[0] == 0
    first = {"report.md", "report.csv", "report.html", "report.tex", "curves.png", "distribution.png"}
    assert files() == first, "another format of the same report"
    (out / "report.html").write_text("dear reader")
    (out / "notes.txt").write_text("dear reader")
    code, printed, _ = report(*runs, "--out", out, "--format", "md")
    assert (code, files()) == (0, {"report.md", "report.html", "notes.txt"})
    removed = " ".join(printed.split()).partition("removed ")[2]
    assert all(str(out / name) in removed for name in first - files())
    assert report(*runs, "--out", out, "--format", "csv", "--radii", "0,0.5")[0] == 0, "other columns"
    assert files() == {"report.csv", "report.html", "notes.txt"}
    assert report("--check", out)[0] == 1, "the page that the user wrote"
    (out / "report.html").unlink()
    assert report("--check", out)[0] == 0


def test_a_check_knows_the_table_of_an_earlier_call(report: Report, make_run: MakeRun, tmp_path: Path) -> None:
    """A table in LaTeX with its own columns and caption stays, next to files of a later call without it."""
    run, out = make_run("mine"), tmp_path / "out"
    assert report(run, "--out", out, "--format", "md,tex", "--columns", "name,acr", "--caption", "Mine")[0] == 0
    table = (out / "report.tex").read_text()
    assert report(run, "--out", out, "--format", "md,csv")[0] == 0
    assert (out / "report.tex").read_text() == table
    assert report("--check", out)[0] == 0
    assert report(run, "--out", out, "--format", "tex")[0] == 0
    assert (out / "report.tex").read_text() != table
    assert report("--check", out)[0] == 0


def test_python_writes_the_report_of_the_command(report: Report, make_run: MakeRun, tmp_path: Path) -> None:
    """Every file has the same bytes, the one that stores the request for --check too; old files are removed alike."""
    runs, formats = [make_run("mine"), make_run("other")], "md,csv,tex,html,png"
    for folder in ("python", "command"):
        assert report(runs[0], "--out", tmp_path / folder, "--format", f"{formats},svg")[0] == 0
    options = ("--radii", "0,0.25", "--reference", "other", "--format", formats)
    assert report(*runs, "--out", tmp_path / "command", *options)[0] == 0
    smoothcert.report(runs, radii=(0.0, 0.25), reference="other", out=tmp_path / "python", formats=formats.split(","))
    written = {path.name: path.read_bytes() for path in (tmp_path / "command").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "python").iterdir()} == written
    assert "curves.svg" not in written
    assert report("--check", tmp_path / "python")[0] == 0


@pytest.mark.parametrize(
    ("rule", "expected"),
    [({}, [0.4, 0.1, None]), ({"radii": [0.25, 0.5], "hold_back": False}, [0.4, None, None])],
    ids=["1,000 votes show at most 1.23 at sigma 0.5", "a sequential rule shows nothing beyond its largest radius"],
)
def test_python_has_no_number_where_the_tables_have_a_dash(
    make_run: MakeRun, tmp_path: Path, rule: dict[str, Any], expected: list[float | None]
) -> None:
    rows = images([(label, predict, min(r, rule["radii"][-1]) if rule else r) for label, predict, r in PLAIN])
    (row,) = smoothcert.report(make_run("mine", rows, **rule), radii=(0.5, 1, 1.5), out=tmp_path, formats="csv, md")
    assert [row[f"certified_accuracy_{radius}"] for radius in ("0.5", "1", "1.5")] == expected
    (cells,) = csv.DictReader((tmp_path / "report.csv").open())
    written = [cells[radius] for radius in ("0.50", "1.00", "1.50")]
    assert written == ["" if share is None else f"{100 * share:g}" for share in expected]


def test_certificates_under_other_noise_than_in_training_are_noted(report: Report, make_run: MakeRun) -> None:
    rows = images([(3, 3, 0.1), (1, 1, 0.05)])
    runs = [
        make_run("same", rows, training_sigma=0.5, noise="gaussian"),
        make_run("moved", rows, training_sigma=0.25),
        make_run("family", rows, training_sigma=0.5, noise="laplace"),
        make_run("unknown", rows),
    ]
    for run in runs[:3]:
        (run / "recipe.yaml").write_text("sigma: 0.5\nnoise: gaussian\n")
    code, out, _ = report(*runs, "--format", "md,tex,html")
    assert code == 0
    texts = [Path(f"report/report.{kind}").read_text() for kind in ("md", "tex", "html")]
    for note in (
        "moved: certified with sigma 0.5, trained with sigma 0.25",
        "family (L1): certified with laplace noise, trained with gaussian noise",
    ):
        for text in (out, *texts):
            assert note in re.sub(r"\*\*|<b>|</b>", "", text)
    assert all("same: certified" not in text and "unknown: certified" not in text for text in (out, *texts))


def test_a_file_without_images_is_left_out_with_a_note(report: Report, make_run: MakeRun) -> None:
    runs = [make_run("empty", []), make_run("mine")]
    code, out, err = report(*runs, "--format", "md,csv,html")
    assert (code, err) == (0, "")
    assert "note: empty: left out: no image is certified yet" in out
    assert "**empty**: left out: no image is certified yet" in Path("report/report.md").read_text()
    assert "<b>empty</b>: left out" in Path("report/report.html").read_text()
    assert [row["name"] for row in csv.DictReader(Path("report/report.csv").read_text().splitlines())] == ["mine"]
    code, _, err = report(runs[0])
    assert (code, err.count("\n")) == (2, 1)


def test_a_damaged_file_among_good_ones_is_named(report: Report, make_run: MakeRun) -> None:
    good, bad = make_run("good"), make_run("bad")
    path = bad / "certificates" / "test.tsv"
    path.write_text(path.read_text().replace("\t0.25\t", "\tnan\t"))
    code, _, err = report(good, bad)
    assert (code, err.count("\n")) == (1, 1)
    assert f"{path}, line 3: damaged" in err
    assert not Path("report").exists()


@pytest.mark.parametrize(
    "damage",
    [
        {"sigma": 1e308},
        {"sigma": "wide"},
        {"sigma": [0.5]},
        {"sigma": 10**400},
        {"alpha": 1e-320},
        {"n": None, "n0": None, "sigma": None},
        {"dataset": ["mnist"]},
        {"noise": ["gaussian"]},
        {"training_sigma": "x"},
        {"objective": {"name": "x"}},
        {"radii": {"a": 1}},
    ],
)
def test_damaged_settings_are_no_traceback(report: Report, make_run: MakeRun, damage: dict[str, object]) -> None:
    run = make_run("mine")
    path = run / "certificates" / "test.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "settings": {**stored["settings"], **damage}}))
    code, _, err = report(run, "--format", "md,csv,tex,html")
    assert (code, err.count("\n")) in ((0, 0), (1, 1)), err
    if code == 0:
        page = Path("report/report.html").read_text()
        data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
        assert data
        json.loads(data[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    else:
        assert "test.json" in err or "test.tsv" in err


@pytest.mark.parametrize("depth", [60, 900])
def test_settings_inside_settings_are_refused(report: Report, make_run: MakeRun, depth: int) -> None:
    run = make_run("mine")
    path = run / "certificates" / "test.json"
    path.write_text('{"settings": {"x": ' + "[" * depth + "]" * depth + '}, "provenance": {}}')
    code, _, err = report(run, "--format", "md,html")
    assert (code, err.count("\n")) == (1, 1), err
    assert str(path) in err


@pytest.mark.parametrize(
    "recipe",
    [
        b"\xff\xfe",
        b"a: [",
        b"- 1\n",
        b"objective: {1: a, b: c}\nseed: 0\n",
        b"sigma: .nan\nseed: 1e400\n",
        b"x" * 2_000_000,
        b"objective: gaussian\nsigma: 0.5\n",  # a name alone, as a recipe may have it
        b"objective: [1]\n",
        b"objective: {name: 5}\n",
        b"model: [1]\n",
    ],
)
def test_a_damaged_recipe_is_no_traceback(report: Report, make_run: MakeRun, recipe: bytes) -> None:
    run = make_run("mine")
    (run / "recipe.yaml").write_bytes(recipe)
    code, _, err = report(run, "--format", "md,html")
    assert (code, err.count("\n")) in ((0, 0), (1, 1)), err
    if code:
        assert "recipe.yaml" in err


def test_a_pipe_does_not_block_a_report(report: Report, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tsv")
    code, _, err = report(tmp_path / "pipe.tsv", "--format", "md,html")
    assert (code, err.count("\n")) == (2, 1), err
    assert f"{tmp_path / 'pipe.tsv'}: expected a file, got a pipe" in err


@pytest.mark.parametrize("radius", [1e300, 1e15, 1e-300])
def test_absurd_radii_of_other_tools(report: Report, tmp_path: Path, radius: float) -> None:
    path = tmp_path / "theirs"
    path.write_text(f"idx\tlabel\tpredict\tradius\tcorrect\ttime\n0\t1\t1\t{radius}\t1\t1.0\n1\t1\t1\t0.5\t1\t1.0\n")
    code, _, err = report(path, "--format", "md,csv,html,svg")
    assert (code, err.count("\n")) in ((0, 0), (1, 1)), err


@pytest.mark.parametrize("radii", ["1e308", "0,-1", "nan", "1e999", "1,,2", "\udcff", "0.5,x" * 10**5])
def test_absurd_columns(report: Report, make_run: MakeRun, radii: str) -> None:
    code, _, err = report(make_run("mine"), "--format", "csv", "--radii", radii)
    assert (code, err.count("\n")) == (2, 1), err
    assert len(err) < 300


def test_the_reference_may_be_the_path_of_a_run(
    report: Report, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of its folder, of its certificates file, or relative; stored by its name, so that --check works elsewhere."""
    runs = make_run("sweeps/a"), make_run("sweeps/b")
    monkeypatch.chdir(tmp_path)
    for number, given in enumerate(("b", runs[1], f"{runs[1]}/certificates/test.tsv", "sweeps/b", "./sweeps/b/")):
        out = tmp_path / f"out{number}"
        code, _, err = report("sweeps", "--reference", given, "--out", out, "--format", "csv")
        assert (code, err) == (0, "")
        rows = csv.DictReader((out / "report.csv").open(newline=""))
        assert [(row["name"], row["reference"]) for row in rows] == [("a", "b"), ("b", "")]
        assert json.loads((out / ".smoothcert-report.json").read_text())["request"]["reference"] == "b"
    monkeypatch.chdir(out)
    assert report("--check", ".")[0] == 0
    assert smoothcert.report(runs, reference=runs[1])[0]["reference"] == "b"
    make_run("sweeps/b", file="again", alpha=0.01)
    for given, expected in (
        (runs[1], f"expected one run, got {runs[1]}, which has the certificates b/again, b/test; give the name of one"),
        ("sweeps/c", "expected one of a, b/again, b/test, got sweeps/c; give the name or path of a run"),
    ):
        code, _, err = report(*runs, "--all-images", "--reference", given)
        assert (code, err) == (2, f"smoothcert: reference: {expected}\n")


def test_columns_by_the_last_part_of_their_names(report: Report, make_run: MakeRun, tmp_path: Path) -> None:
    for number in range(2):
        objective = f"{{name: consistency, weight: {number + 1}, steps: {number}, adversary: {{steps: {number}}}}}"
        run = make_run(f"sweep/r{number}", objective="consistency")
        (run / "recipe.yaml").write_text(f"objective: {objective}\nsigma: 0.5\nepochs: {number + 5}\n")
    tex = [tmp_path / "sweep", "--format", "tex", "--columns"]
    assert report(*tex, "weight,epochs,acr", "--out", "short")[0] == 0
    assert report(*tex, "objective.weight,epochs,acr", "--out", "long")[0] == 0
    assert Path("short/report.tex").read_text() == Path("long/report.tex").read_text()
    assert r" & run & $\lambda$ & epochs & ACR \\" in Path("short/report.tex").read_text()
    code, _, err = report(*tex, "steps,acr")
    message = "expected a column of report.csv, got 'steps'; give objective.adversary.steps or objective.steps"
    assert (code, err) == (2, f"smoothcert: columns: {message}\n")
    assert report(*tex, "wieght")[0] == 2


def test_a_column_of_a_name_comes_before_a_hyper_parameter_that_ends_in_it(
    report: Report, make_run: MakeRun, tmp_path: Path
) -> None:
    for number in range(2):
        run = make_run(f"sweep/r{number}", objective="gaussian")
        objective = f"{{name: own.py:Own, alpha: {number}.5, adversary: {{alpha: {number}}}}}"
        (run / "recipe.yaml").write_text(f"objective: {objective}\nsigma: 0.5\n")
    tex = [tmp_path / "sweep", "--format", "tex", "--columns"]
    assert report(*tex, "alpha,acr", "--out", "votes")[0] == 0
    assert "r0 & 0.001 & " in Path("votes/report.tex").read_text()
    assert report(*tex, "objective.alpha,acr", "--out", "training")[0] == 0
    assert "r0 & 0.5 & " in Path("training/report.tex").read_text()
