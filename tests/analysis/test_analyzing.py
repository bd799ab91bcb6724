"""`smoothcert analyze`: every sub-command writes its figure and its numbers, and refuses in one line."""

import csv
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from half_space import untrained_run
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from smoothcert.analysis.output import Output, parse_formats
from smoothcert.cli.analyzing import analyze
from smoothcert.cli.options import console
from smoothcert.data import DATASETS
from smoothcert.errors import RequestError, WorkError


def call(*arguments: object) -> str:
    """What the command printed; its error where it failed."""
    result = CliRunner().invoke(analyze, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def check(out: Path, name: str) -> list[dict[str, str]]:
    """The rows of the csv file, if there is a picture too."""
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with (out / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_margins(two_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, known = tmp_path / "out", DATASETS["mnist-sample"]
    noted = replace(known, load=lambda *given: replace(known.load(*given), notes=("two files are missing",)))
    monkeypatch.setitem(DATASETS, "mnist-sample", noted)
    text = call("margins", *two_runs, "--index", 7, "--n", 60, "--out", out)
    assert text.startswith("note: two files are missing\n")
    assert f"wrote {out / 'margins.csv'}" in text.replace("\n", "")
    rows = check(out, "margins")
    assert len(rows) == 60
    below = sum(float(row["run0"]) < 0 for row in rows) / 60
    assert f"{below:.2%}" in text
    assert set(out.glob("[!.]*")) == {out / "margins.csv", out / "margins.png"}


def test_own_images_are_read_with_the_options_of_certify(two_runs: list[Path], tmp_path: Path) -> None:
    """Colour files of another size and of nine of the ten classes, and one that cannot be read."""
    for digit in range(9):
        (tmp_path / "photos" / str(digit)).mkdir(parents=True)
        Image.new("RGB", (40, 40), (20 * digit,) * 3).save(tmp_path / "photos" / str(digit) / "a.png")
    (tmp_path / "photos/0/b.png").write_text("no image")
    (tmp_path / "classes.txt").write_text("".join(f"{digit}\n" for digit in range(10)))
    asked = ("margins", *two_runs, "--n", 10, "--out", tmp_path / "out", "--dataset", f"folder:{tmp_path / 'photos'}")
    options = ("--image-size", 28, "--classes", tmp_path / "classes.txt", "--skip-unreadable")
    call(*asked, *options)
    assert len(check(tmp_path / "out", "margins")) == 10
    with pytest.raises(RequestError, match="folder:none: expected a folder, got nothing at"):
        call(*asked[:-1], "folder:none")


def test_interpolate(two_runs: list[Path], tmp_path: Path) -> None:
    options = ("--points", 3, "--n", 5, "--num-noise", 2, "--steps", 1, "--step-size", 0.5, "--votes")
    text = call("interpolate", *two_runs, "--index", 3, *options, "--out", tmp_path)
    rows = check(tmp_path, "interpolation")
    assert [row["ratio"] for row in rows] == ["0", "0.5", "1"] * 2
    # Clamping to [0, 1] only shortens the step.
    assert all(0 < float(row["distance"]) < 0.51 for row in rows[2::3])
    assert "equal confidence at" in text


def test_mixing(two_runs: list[Path], tmp_path: Path) -> None:
    options = ("--n", 4, "--num-noise", 2, "--steps", 1, "--skip", 3, "--max-images", 2)
    call("mixing", *two_runs, *options, "--out", tmp_path)
    rows = check(tmp_path, "mixing")
    assert [(row["run"], row["index"]) for row in rows] == [("run0", "0"), ("run0", "3"), ("run1", "0"), ("run1", "3")]


def test_cost(two_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 50)
    text = call("cost", *two_runs, "--out", tmp_path / "out")
    assert [row["seconds"] for row in check(tmp_path / "out", "cost")] == ["3", "3"]
    table = text.split("wrote")[0]
    assert "1.0 s" in table
    assert "run0" in table
    assert "…" not in table  # a narrow terminal has fewer columns, not shorter names
    assert "peak memory" not in table
    assert (tmp_path / "out" / "cost.md").read_text().startswith("# Training cost\n\n| run |")


def test_input_dependent_noise(tmp_path: Path) -> None:
    options = ("--p", 0.99, "--sigma", 0.5, "--other-sigma", 0.55, "--max-dimension", 1000, "--format", "png,svg")
    text = call("input-dependent-noise", *options, "--out", tmp_path)
    rows = check(tmp_path, "input-dependent-noise")
    assert (tmp_path / "input-dependent-noise.svg").read_bytes().startswith(b"<?xml")
    assert all(float(row["exact"]) <= float(row["bound"]) for row in rows)
    assert "CIFAR-10" in text
    assert "< 1e-300" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("margins", "RUN", "--index", 2000), "index: expected 0 to 1999, the images of mnist-sample, got 2000"),
        (("margins", "RUN", "--index", 2000, "--out", "RUN/recipe.yaml"), "expected a folder to write to, got a file"),
        (("margins", "RUN", "--index", 2000, "--out", "RUN/recipe.yaml/a"), "got a path inside the file"),
        (("margins", "RUN", "--format", "gif"), "expected png, pdf or svg, or several as in png,pdf, got 'gif'"),
        (("margins", "RUN", "--sigma", 0), "sigma: expected a number > 0"),
        (("margins", "RUN", "--sigma", "1e200"), "sigma: expected 0 to 1,000,000, got 1e+200"),
        (("margins", "nowhere"), "no such run folder"),
        (("interpolate", "RUN", "--steps", 0), "steps: expected 1 to 1,000,000, got 0"),
        (("mixing", "RUN", "--step-size", -1), "step-size: expected a number > 0, got -1"),
        (("mixing", "RUN", "--step-size", "inf"), "step-size: expected 0 to 1,000,000, got inf"),
        (("interpolate", "RUN", "--step-size", "nan"), "step-size: expected a number > 0, got nan"),
        (("margins", "RUN", "--seed", 10**23), f"seed: expected 0 to {2**63 - 1:,}, got {10**23}"),
        (("mixing", "RUN", "--seed", 2**63), f"seed: expected 0 to {2**63 - 1:,}, got {2**63}"),
        (("margins", "RUN", "--n", 0), "n: expected 1 to 1,000,000, got 0"),
        (("interpolate", "RUN", "--n", 2**63 - 1), f"n: expected 1 to 1,000,000, got {2**63 - 1}"),
        (("interpolate", "RUN", "--points", 10**12), f"points: expected 2 to 1,000,000, got {10**12}"),
        (("interpolate", "RUN", "--num-noise", 10**12), f"num-noise: expected 1 to 1,000,000, got {10**12}"),
        (("mixing", "RUN", "--steps", 10**12), f"steps: expected 1 to 1,000,000, got {10**12}"),
        (("mixing", "RUN", "--n", 2**63 - 1), f"n: expected 1 to 1,000,000, got {2**63 - 1}"),
        (("cost", "nowhere"), "expected a run folder"),
        (("input-dependent-noise", "--sigma", "1e200"), "sigma: expected 1e-06 to 1e+06, got 1e+200"),
        (("input-dependent-noise", "--max-dimension", 10**23), "max-dimension: expected 1 to 1000000000"),
        (("input-dependent-noise", "--p", 1.5), "probability: expected a number between 0 and 1"),
        (("input-dependent-noise", "--max-dimension", 10, "--out", "RUN/recipe.yaml"), "expected a folder to write to"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(
    two_runs: list[Path], arguments: tuple[object, ...], message: str
) -> None:
    given = [str(argument).replace("RUN", str(two_runs[0])) for argument in arguments]
    with pytest.raises(RequestError) as caught:
        call(*given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refused_request_writes_nothing(two_runs: list[Path], tmp_path: Path) -> None:
    other = untrained_run(tmp_path / "other", sigma=1.0)
    with pytest.raises(RequestError, match="--sigma"):
        call("margins", two_runs[0], other, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_are_not_read_as_markup(tmp_path: Path) -> None:
    run, out = untrained_run(tmp_path / "[" / "red]"), tmp_path / "[" / "bold]"
    closing = untrained_run(tmp_path / "other" / "red]")  # two of a name: both are called by their folders too
    options = ("--n", 2, "--num-noise", 1, "--steps", 1, "--max-images", 1, "--out", out)
    shown = call("mixing", run, closing, *options)
    assert f"wrote {out / 'mixing.csv'}" in shown.replace("\n", "")
    assert "mixing [/red]" in shown


def test_names_that_are_not_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    try:
        run, out = untrained_run(folder / "r\udce9n\x1b"), folder / "out"
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    assert "caf\\udce9" in call("cost", run, "--out", out)
    assert "r\\udce9n\\x1b" in (out / "cost.csv").read_text(encoding="utf-8")
    assert r"r\\udce9n\\x1b" in (out / "cost.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *((getattr(errno, name), WorkError) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO")),
        *((getattr(errno, name), RequestError) for name in ("EACCES", "EROFS", "ENOTDIR", "EEXIST", "ENAMETOOLONG")),
    ],
)
def test_only_errors_of_the_request_are_request_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("smoothcert.io.written_files.write_text_atomically", fail)
    with pytest.raises(kind, match=os.strerror(code)) as caught:
        Output(tmp_path, "numbers").write({"csv": "a\n"}, Figure)
    assert str(tmp_path) in str(caught.value)


def test_formats() -> None:
    assert parse_formats("png, svg,png") == ["png", "svg"]
    with pytest.raises(RequestError, match="got ''"):
        parse_formats("")


def test_text_that_is_not_utf8_is_written_escaped(tmp_path: Path) -> None:
    (path,) = Output(tmp_path, "numbers").write({"csv": "é\ud800\n"}, Figure)
    assert path.read_bytes() == "é\\ud800\n".encode()
