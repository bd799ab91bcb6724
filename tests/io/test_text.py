"""Text from outside is one printable line in every output, and never a formula."""

import csv
import io
import math
import sys

import pytest
from rich.table import Table

from smoothcert.certification.certify_dataset import CertificationStatus
from smoothcert.io.console import PlainConsole
from smoothcert.io.text import (
    csv_text,
    did_you_mean,
    duration,
    error_line,
    escape_markdown,
    flattened,
    markdown_table,
    named_error,
    natural_order,
    one_line,
    parse_count,
    printable,
    radius_text,
    rate,
)
from smoothcert.report import progress
from smoothcert.report.progress import counting_bar, status_bar, status_bars


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain σ = 0.5", "plain σ = 0.5"),
        (" two\n\tlines\r\n", "two lines"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("bytes \udcff", r"bytes \udcff"),
        ("\u202egnp.txt", r"\u202egnp.txt"),
        ("a\u2028b\x85c\u00a0d", "a b c d"),
    ],
)
def test_one_line(text: str, shown: str) -> None:
    assert one_line(text) == shown
    assert one_line(shown) == shown
    shown.encode()


@pytest.mark.parametrize(
    "ordered",
    [
        ["weight0.5", "weight2", "weight10", "weight10.5"],
        ["a", "a1", "a1.0", "a2", "b1", "b1-c2", "b1-c10"],
        ["lr1e-4", "lr0.001", "lr1"],
        ["0.25", "0.5", "1", "a"],
    ],
)
def test_numbers_in_names_are_ordered_as_numbers(ordered: list[str]) -> None:
    for names in (ordered, ordered[::-1], sorted(ordered)):
        assert sorted(names, key=natural_order) == ordered


def test_errors_have_their_type_and_their_text_if_there_is_one() -> None:
    assert named_error(ValueError("too\nlarge")) == "ValueError: too large"
    assert named_error(EOFError()) == "EOFError"


def test_printable_keeps_indentation() -> None:
    assert printable("  a: 1\x1b") == r"  a: 1\x1b"


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1", " =1", "-", "--a"])
def test_a_formula_in_csv_is_text(text: str) -> None:
    ((cell,),) = csv.reader(io.StringIO(csv_text([[text]])))
    assert cell == "'" + text.strip()


def test_numbers_in_csv_stay_numbers() -> None:
    numbers = [-1, -0.25, 1e-12, 1 / 3, "-0.5", "+1e-3"]
    assert csv_text([[*numbers, None, "a,b"]]) == '-1,-0.25,1e-12,0.3333333333,-0.5,+1e-3,,"a,b"\n'


def test_the_console_shows_hostile_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole(file=sys.stdout, force_terminal=True, width=100)
    table = Table("run\x1b[2J")
    table.add_row("[red]a[/red] :smile: \x1b]0;title\x07")
    console.print(table)
    console.print("wrote \x1b[2J:warning: [bold]b", soft_wrap=True, highlight=False)
    out = capsys.readouterr().out
    assert r"[red]a[/red] :smile: \x1b]0;title\x07" in out
    assert r"wrote \x1b[2J:warning: [bold]b" in out
    assert "\x1b[2J" not in out
    assert "\x1b]0" not in out


def test_strings_are_printed_in_one_line_and_tables_fit_the_width(capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole(file=sys.stdout, force_terminal=True, width=20)
    command = "next: smoothcert certify runs/a --n 10000"
    console.print(command)
    assert capsys.readouterr().out == f"{command}\n", "as it is copied, without colours"
    table = Table("command")
    table.add_row(command)
    console.print(table)
    assert command not in capsys.readouterr().out


@pytest.mark.parametrize(("rank", "printed"), [("0", "note: a\nwarning: b\n"), ("1", "")])
def test_one_of_several_processes_prints_notes(
    rank: str, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    PlainConsole(file=sys.stdout).note("a")
    PlainConsole(file=sys.stdout).warn("b")
    assert capsys.readouterr().out == printed


def test_a_progress_bar_shows_hostile_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    name = "run\x1b[2J[red]"
    with counting_bar({name: 1}) as show:
        show(name, 1)
    out = capsys.readouterr().out
    assert r"run\x1b[2J[red]" in out
    assert "\x1b[2J" not in out


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_before_the_first_progress_leaves_no_bar(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    with pytest.raises(ValueError, match="refused"), status_bar("run"):
        raise ValueError("refused")
    out = capsys.readouterr().out
    erase_line = "\x1b[2K"
    assert out.endswith(erase_line) if terminal else out == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((1.26, "1.3 s"), (42.4, "42 s"), (59.7, "1 min 0 s"), (260, "4 min 20 s"), (31_320, "8 h 42 min")),
        *((172_740, "47 h 59 min"), (414_720, "4.8 days")),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_slow_work_has_a_speed(capsys: pytest.CaptureFixture[str]) -> None:
    status = CertificationStatus(1, 2, 0.5, images_per_second=0.00321, votes_per_second=0.6421)
    with status_bar("run") as show:
        show(status)
    assert "1/2 ACR 0.500 5 min 12 s left 0.00321 img/s 0.642 votes/s" in " ".join(capsys.readouterr().out.split())
    assert [rate(x) for x in (41.77, 99.96, 2053.4)] == ["41.8", "100", "2,053"]


@pytest.mark.parametrize(("terminal", "pause", "lines"), [(False, -1.0, 2), (False, 1000.0, 0), (True, -1.0, 0)])
def test_log_file_gets_a_line_of_progress_per_minute(
    terminal: bool, pause: float, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Elsewhere the bar is drawn again and again; its last state is printed in any case."""
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(progress, "LINE_SECONDS", pause)
    with status_bars(PlainConsole()) as show:
        for done in (1, 2):
            show("run\x1b", CertificationStatus(done, 2, 0.5, 0.1, 10.0))
    out = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(r"run\x1b: ") for line in out) == lines
    if lines:
        assert out[0] == r"run\x1b: 1/2 ACR 0.500 10 s left 0.1 img/s 10 votes/s"
    assert any("2/2 ACR 0.500" in line for line in out[lines:])


def test_error_line_is_short_and_never_empty() -> None:
    assert error_line(ValueError("two\nlines \x1b")) == "two lines \\x1b"
    assert error_line(ValueError("x" * 500), 20) == "x" * 20
    assert error_line(KeyError()) == "KeyError"


def test_did_you_mean_names_similar_names_else_all() -> None:
    known = ["gaussian", "laplace", "gauss"]
    assert did_you_mean("gausian", known) == "did you mean gaussian, gauss?"
    assert did_you_mean("gausian", known, synonyms=["laplace"]) == "did you mean laplace, gaussian, gauss?"
    assert did_you_mean("zzz", known) == "choose one of gaussian, laplace, gauss"
    assert did_you_mean("zzz", known, "choose one of these") == "choose one of these"


def test_markdown_tables() -> None:
    assert markdown_table(["a", "b"], [["1", escape_markdown("x|y")]]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |\n"
    assert markdown_table(["a"], [], ["---:"]) == "| a |\n| ---: |\n"


def test_nested_keys_are_joined_by_dots() -> None:
    assert flattened({"a": 1, "b": {"c": 2, "d": {"e": [3]}}, "f": {}}) == {"a": 1, "b.c": 2, "b.d.e": [3]}


@pytest.mark.parametrize(
    ("text", "count"),
    [("100k", 10**5), ("1e5", 10**5), ("100_000", 10**5), ("1.5k", 1500), ("2M", 2 * 10**6), (7, 7), ("-3", -3)],
)
def test_counts(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e-3", "1e", "0x10", "1,000", "nan", "٣", "_1", "1__0", "1" * 99])
def test_other_texts_are_not_counts(text: str) -> None:
    with pytest.raises(ValueError, match="expected a whole number"):
        parse_count(text)


def test_radii_are_rounded_down_and_those_with_three_decimals_stay() -> None:
    for text in (f"{thousandths / 1000:.3f}" for thousandths in range(1, 4000)):
        radius = float(text)
        before = math.nextafter(radius, 0)
        assert radius_text(radius) == radius_text(math.nextafter(radius, 9)) == text
        assert radius_text(before) == f"{radius - 0.001:.3f}"
