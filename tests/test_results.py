"""The committed tables of results/ are what `smoothcert report` makes of the committed certificates."""

from itertools import takewhile
from pathlib import Path

import pytest

from smoothcert.certificates import read_certificates
from smoothcert.paper_runs import paper_runs, published_for
from smoothcert.recipe import load_train_recipe
from smoothcert.report import average_certified_radius, find_certificates, write_report

RESULTS = Path(__file__).parent.parent / "results"


@pytest.mark.parametrize(
    ("name", "runs", "table", "formats", "same_images"),
    [
        ("mnist", "mnist", "smoothmix/table2", ("md", "csv", "png"), False),
        ("mnist-same-images", "mnist", "smoothmix/table2", ("md", "csv"), True),
        ("mnist-consistency-paper", "mnist", "consistency/supp-table2", ("md", "csv"), False),
        ("float32", "float32", "smoothmix/table2", ("md", "csv", "png"), False),
    ],
)
def test_the_tables_are_rendered_from_their_certificates(
    name: str, runs: str, table: str, formats: tuple[str, ...], same_images: bool, tmp_path: Path
) -> None:
    report = write_report([RESULTS / runs], tmp_path, formats, published=published_for(table), same_images=same_images)
    assert report.written
    for path in report.written:
        committed = RESULTS / name / path.name
        if path.suffix == ".png":  # the drawing library's version shows in the pixels
            assert committed.exists()
        else:
            assert path.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8"), path.name


@pytest.mark.parametrize("table", ["smoothmix/table2", "consistency/supp-table2"])
def test_all_rows_are_there_and_in_the_published_order(table: str, tmp_path: Path) -> None:
    report = write_report([RESULTS / "mnist"], tmp_path, ["csv"], published=published_for(table), same_images=True)
    published = report.contents.published
    assert {row.row for row in published.values()} == {run.name for run in paper_runs(table)}
    ranked = [(s.sigma, published[s.name].acr, s.acr, s.name) for s in report.summaries if s.name in published]
    wrong = [
        (worse, better)
        for sigma, less, ours, worse in ranked
        for other, more, higher, better in ranked
        if sigma == other and less is not None and more is not None and less < more and ours >= higher
    ]
    assert wrong == []


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
        ((_, path),) = find_certificates([RESULTS / "mnist" / run.name])
        rows = read_certificates(path).rows
        some = "" if len(rows) == 10_000 else "*"
        expected.setdefault(run.label, []).extend([f"{average_certified_radius(rows):.3f}{some}", f"{run.acr:.3f}"])
    assert table[2:] == [f"| {' | '.join([label, *cells])} |" for label, cells in expected.items()]
