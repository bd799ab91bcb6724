"""The committed tables of results/ are what `smoothcert report` makes of the committed certificates."""

from pathlib import Path

from smoothcert.paper_runs import published_for
from smoothcert.report import write_report

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
