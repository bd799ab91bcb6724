"""The committed tables of results/ are what `smoothcert report` makes of the committed certificates."""

from itertools import takewhile
from pathlib import Path

import pytest

from smoothcert.certificates import read_certificates
from smoothcert.paper_runs import paper_runs, published_for
from smoothcert.recipe import load_train_recipe
from smoothcert.report import average_certified_radius, find_certificates, write_report

RESULTS = Path(__file__).parent.parent / "results"


@pytest.mark.parametrize(("name", "least"), [("mnist", 16), ("float32", 4)])
def test_the_tables_are_rendered_from_their_certificates(name: str, least: int, tmp_path: Path) -> None:
    folder = RESULTS / name
    runs = sorted(path for path in folder.iterdir() if path.is_dir())
    assert len(runs) >= least
    write_report(runs, tmp_path, ("md", "csv", "png"), published=published_for("smoothmix/table2"))
    for name in ("report.md", "report.csv"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (folder / name).read_text(encoding="utf-8"), name
    for picture in ("curves.png", "distribution.png", "training.png"):
        assert (folder / picture).exists()


def test_each_result_has_its_recipe_and_provenance() -> None:
    for folder in (path for path in (RESULTS / "mnist").iterdir() if path.is_dir()):
        recipe, ((_, path),) = load_train_recipe(folder / "recipe.yaml"), find_certificates([folder])
        file = read_certificates(path)
        assert (file.settings["training_sigma"], file.settings["objective"]) == (recipe.sigma, recipe.objective.name)
        assert {"versions", "precision"} <= file.provenance["model"].keys()
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == recipe.epochs == file.provenance["epoch"]


def test_the_first_table_of_the_readme_is_that_of_the_results() -> None:
    lines = (RESULTS.parent / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = list(takewhile(lambda line: line.startswith("|"), lines[start:]))
    expected: dict[str, list[str]] = {}
    for run in paper_runs("smoothmix/table2"):
        folder = RESULTS / "mnist" / run.name
        ours = f"{acr_of(folder):.3f}" if folder.exists() else "–"
        expected.setdefault(run.label, []).extend([ours, f"{run.acr:.3f}"])
    assert table[2:] == [f"| {' | '.join([label, *cells])} |" for label, cells in expected.items()]


def acr_of(folder: Path) -> float:
    ((_, path),) = find_certificates([folder])
    return average_certified_radius(read_certificates(path).rows)
