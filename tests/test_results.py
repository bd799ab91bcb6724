"""The committed tables of results/ are what `smoothcert report` makes of the committed certificates."""

from pathlib import Path

from smoothcert.certificates import read_certificates
from smoothcert.paper_runs import published_for
from smoothcert.papers import published_acr
from smoothcert.report import average_certified_radius, find_certificates, write_report

RESULTS = Path(__file__).parent.parent / "results"


def test_the_mnist_tables_are_rendered_from_their_certificates(tmp_path: Path) -> None:
    folder = RESULTS / "mnist"
    runs = sorted(path for path in folder.iterdir() if path.is_dir())
    assert len(runs) >= 4
    write_report(runs, tmp_path, ("md", "csv", "png"), published=published_for("smoothmix/table2"))
    for name in ("report.md", "report.csv"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (folder / name).read_text(encoding="utf-8"), name
    for picture in ("curves.png", "distribution.png", "training.png"):
        assert (folder / picture).exists()


def test_the_first_table_of_the_readme_is_that_of_the_results() -> None:
    summaries = {path.name: acr_of(path) for path in (RESULTS / "mnist").iterdir() if path.is_dir()}
    lines = (RESULTS.parent / "README.md").read_text(encoding="utf-8").splitlines()
    for method in ("Gaussian", "Consistency"):
        (line,) = [line for line in lines if line.startswith(f"| {method} |")]
        cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
        expected = []
        for sigma in (0.5, 1.0):
            published = published_acr("smoothmix/table2", sigma=sigma, method=method)
            expected += [f"{summaries[f'{method.lower()}-{sigma}']:.3f}", f"{published:.3f}"]
        assert cells == expected


def acr_of(folder: Path) -> float:
    ((_, path),) = find_certificates([folder])
    return average_certified_radius(read_certificates(path).rows)
