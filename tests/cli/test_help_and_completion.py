"""What a user sees before a command runs: panels, groups, examples, completion, lists; and how counts are written."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from smoothcert.certification.certificates import read_certificates
from smoothcert.cli import COMMANDS, app
from smoothcert.cli.listing import console
from smoothcert.cli.registration import FILES, LISTS, PAPERS, START
from smoothcert.objectives import OBJECTIVES
from smoothcert.papers.presets import PRESETS
from smoothcert.papers.tables import paper_table, paper_table_names
from smoothcert.training.checkpoint import load_run, write_new_run

Cli = Callable[..., tuple[int, str, str]]
GROUPS = (
    *("Arguments", "Options", "Recipe", "Numbers", "Images", "Noise and votes", "Fewer votes", "Attack"),
    *("Network", "Output", "LaTeX", "Speed"),
)
"""As a user reads them: what, on which images, under which noise, where to."""


def all_commands() -> dict[str, Any]:
    """The commands and, as "analyze NAME", the sub-commands."""
    top = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    inner = {f"analyze {name}": command for name, command in top["analyze"].commands.items()}
    return {name: command for name, command in top.items() if name != "analyze"} | inner


@pytest.mark.parametrize("name", all_commands())
def test_each_command_has_an_example_that_parses_and_sorted_groups(
    name: str, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = all_commands()[name]
    program, *words = shlex.split(command.epilog.removeprefix("Example: "))
    assert (program, words[: len(name.split())]) == ("smoothcert", name.split())
    command.make_context(name, words[len(name.split()) :])
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    code, out, _ = run_cli(*name.split(), "--help")
    assert code == 0
    assert " ".join(command.epilog.split()) in " ".join(out.split())
    assert "…" not in out, "nothing is cut off on a narrow terminal"
    groups = re.findall("╭─ (.+?) ─", out)
    assert groups == [group for group in GROUPS if group in groups], "one order in all commands"
    if "--dataset " in out:
        places = [out.index(f" --{option} ") for option in ("dataset", "image-size", "data")]
        assert places == sorted(places)


def test_commands_are_in_four_panels(run_cli: Cli) -> None:
    _, out, _ = run_cli("--help")
    places = [out.index(f"─ {panel} ─") for panel in (START, PAPERS, FILES, LISTS)]
    assert places == sorted(places)
    for (name, _, panel, _), place in ((command, out.index(f"│ {command[0]} ")) for command in COMMANDS):
        assert max(start for start in places if start < place) == out.index(f"─ {panel} ─"), name


def test_options_of_certify_are_in_groups_and_flags_have_no_type(run_cli: Cli) -> None:
    _, out, _ = run_cli("certify", "--help")
    groups = {
        **{"Images": ["skip"], "Noise and votes": ["alpha", "radius"], "Fewer votes": ["until-radius", "radii"]},
        "Network": ["ensemble", "cascade", "consensus", "model", "init"],
    }
    for group, options in groups.items():
        assert set(options) <= set(options_in(out, group))
    (flag,) = (line for line in out.splitlines() if "--sound" in line)
    assert "<" not in flag


def options_in(page: str, group: str) -> list[str]:
    """The options in the box `group` of a help page."""
    return re.findall("│ --([a-z-]+) ", page[page.index(f"─ {group} ─") :].partition("╯")[0])


def test_the_numbers_of_an_analysis_are_in_one_group(run_cli: Cli) -> None:
    _, out, _ = run_cli("analyze", "input-dependent-noise", "--help")
    assert options_in(out, "Options") == ["p", "sigma", "other-sigma", "radius", "max-dimension", "help"]


def completed(monkeypatch: pytest.MonkeyPatch, run_cli: Cli, *words: str) -> list[str]:
    """What bash is given for the last of `words`, by the protocol of typer, in this process."""
    with monkeypatch.context() as environment:
        environment.setenv("_SMOOTHCERT_COMPLETE", "complete_bash")
        environment.setenv("COMP_WORDS", shlex.join(["smoothcert", *words]).removesuffix("''"))
        environment.setenv("COMP_CWORD", str(len(words)))
        code, out, err = run_cli()
    assert (code, err) == (0, "")
    return out.split()


def test_shell_completes_commands_presets_tables_and_methods(monkeypatch: pytest.MonkeyPatch, run_cli: Cli) -> None:
    def complete(*words: str) -> list[str]:
        return completed(monkeypatch, run_cli, *words)

    assert complete("re") == ["report", "reproduce", "recertify"]
    presets = [name for name in PRESETS if name.startswith("mnist/smoothmix")]
    assert complete("train", "--preset", "mnist/smoothmix") == complete("presets", "mnist/smoothmix") == presets
    assert complete("sweep", "--preset", "cifar10/mac") == ["cifar10/macer", "cifar10/macer-150-epochs"]
    tables = [name for name in paper_table_names() if name.startswith("smoothmix/")]
    assert complete("reproduce", "smoothmix/") == complete("report", "--paper", "smoothmix/") == tables
    assert complete("train", "--method", "") == list(OBJECTIVES)
    assert complete("certify", "--bound", "two") == ["two-sided"]
    assert complete("train", "--dataset", "mnist-s") == ["mnist-sample", "mnist-sample-held-out"]


def test_script_for_completion_is_printed(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    code, out, _ = run_cli("--show-completion")
    assert code == 0
    assert "_SMOOTHCERT_COMPLETE=complete_bash" in out
    assert "complete -o default" in out


def test_papers_lists_every_table_and_prints_one(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run_cli("papers")
    assert code == 0
    assert all(f" {name} " in out for name in paper_table_names())
    cells = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if " │ " in line]
    compared = {name: varied for _, name, *_, varied, _ in cells}
    assert (compared["smoothmix/table6"], compared["consistency/supp-table4"]) == ("eta", "loss, lambda")
    monkeypatch.setattr(console, "_width", 200)
    code, out, _ = run_cli("papers", "smoothmix/table6")
    assert code == 0
    for row in paper_table("smoothmix/table6"):
        assert any(line.split()[1:7:2] == [row["sigma"], row["eta"], row["acr"]] for line in out.splitlines())
    assert out.splitlines()[1].split()[1::2] == list(paper_table("smoothmix/table6")[0])  # every radius
    monkeypatch.setattr(console, "_width", 80)
    _, out, _ = run_cli("papers", "smoothmix/table6")
    assert out.splitlines()[1].split()[5:10:2] == ["acr", "0.00", "0.50"]
    assert "a wider terminal shows more radii" in out.splitlines()[-1]
    code, _, err = run_cli("papers", "smoothmix/table66")
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean smoothmix/table6" in err


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_less_output_keeps_the_warning_about_images_of_the_training(
    option: str, run_cli: Cli, trained_run: Path, tmp_path: Path
) -> None:
    name, run = f"npz:{tmp_path / 'few.npz'}", load_run(trained_run)
    np.savez(tmp_path / "few.npz", images=np.zeros((2, 28, 28), np.uint8), labels=[0, 9])
    run = replace(run, folder=tmp_path / "run", recipe=run.recipe.model_copy(update={"dataset": name}))
    write_new_run(run, run.model.state_dict())
    code, out, err = run_cli("certify", run.folder, "--n", 100, "--device", "cpu", option)
    assert (code, out.count("\n")) == (0, int(option == "--json"))
    assert f"warning: {name} has no split: the certified accuracy is that of images that" in err


def test_several_runs_with_json_and_quiet(run_cli: Cli, trained_run: Path, tmp_path: Path) -> None:
    """Each run gives the same certificates as alone; for machines, standard output has nothing but JSON."""
    runs = [Path(shutil.copytree(trained_run, tmp_path / name)) for name in ("a", "b", "alone")]
    options = ("--n", "0.1k", "--max-images", 3, "--seed", 1, "--device", "cpu")
    code, out, err = run_cli("certify", *runs[:2], *options, "--json", "--radius", 3)
    assert code == 0
    assert err.startswith("warning: n = 100 votes cannot certify radius 3"), "warnings are still printed"
    results = [json.loads(line) for line in out.splitlines()]
    assert [result["run"] for result in results] == [str(run) for run in runs[:2]]
    assert run_cli("certify", runs[2], *options, "--quiet") == (0, "", "")
    alone = read_certificates(runs[2] / "certificates" / "test-n100.tsv").rows
    for run, result in zip(runs[:2], results, strict=True):
        rows = read_certificates(run / "certificates" / "test-n100.tsv").rows
        assert [row.certificate for row in rows] == [row.certificate for row in alone]
        assert result["acr"] == pytest.approx(sum(row.radius_if_correct for row in rows) / 3)
        assert (result["images"], result["n"], result["votes"]) == (3, 100, 600)
    code, out, _ = run_cli("certify", *runs[:2], *options)
    command = shlex.split(out.partition("next: smoothcert ")[2])
    assert run_cli(*command, "--out", tmp_path / "report", "--format", "md")[0] == 0
    for wrong in (["--n", 0], ["--until-radius", 1, "--radii", 1]):
        before = sorted(tmp_path.rglob("*.tsv"))
        code, _, err = run_cli("certify", *runs[:2], *wrong)
        assert (code, err.count("\n"), sorted(tmp_path.rglob("*.tsv"))) == (2, 1, before)
    assert "one of them twice" in run_cli("certify", runs[0], runs[0])[2]
