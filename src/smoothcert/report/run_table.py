"""The table of certified runs for notebooks: `smoothcert.report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smoothcert.certification.certificates import read_certificates
from smoothcert.report.contents import cut_to_shared_images
from smoothcert.report.locate import find_certificates
from smoothcert.report.summary import Summary, default_radii, summarize

if TYPE_CHECKING:  # tables are made without torch
    from smoothcert.training.checkpoint import Run

Row = dict[str, str | float | int | None]


def report(
    runs: "str | Path | Run | Sequence[str | Path | Run]",
    *,
    radii: Sequence[float] | None = None,
    out: str | Path | None = None,
    formats: Sequence[str] = ("md", "csv", "html", "png"),
) -> list[Row]:
    """Return one row per certificates file of `runs` (run folders, folders of them, or files), for `pandas.DataFrame`.

    A row has the name, data set, sigma, method, average certified radius (ACR) and its standard error, the certified
    accuracy (a fraction) at each of `radii`, the abstention rate and the number of images and votes. Runs of one sigma
    and data set are compared on the images that all of them have. With `out`, the report is also written there, as the
    command `smoothcert report` does: tables and a page as md, csv, tex and html, figures as png, pdf and svg.
    """
    given = runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    paths = [run.folder if hasattr(run, "folder") else Path(run) for run in given]
    if out is not None:
        from smoothcert.report import write_report  # draws figures, which takes a second to import

        return [_row(summary) for summary in write_report(paths, Path(out), formats, radii).summaries]
    read = [(name, read_certificates(path)) for name, path in find_certificates(paths)]
    files = cut_to_shared_images([(name, file) for name, file in read if file.rows])
    columns = list(radii) if radii is not None else default_radii([file for _, file in files])
    return [_row(summarize(file, name, columns)) for name, file in files]


def _row(summary: Summary) -> Row:
    accuracies = {f"certified_accuracy_{radius:g}": value for radius, value in summary.accuracy_at.items()}
    return {
        "name": summary.name,
        "dataset": summary.dataset,
        "method": summary.method,
        "sigma": summary.sigma,
        "acr": summary.acr,
        "acr_standard_error": summary.acr_standard_error,
        **accuracies,
        "abstention": summary.abstention,
        "images": summary.images,
        "n": summary.n,
        "alpha": summary.alpha,
        "bound": str(dict(summary.protocol)["bound"]),
        "votes": summary.votes,
    }
