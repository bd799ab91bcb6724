"""For notebooks: the table of certified runs (`smoothcert.report`), and the certificates of one run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smoothcert.certification.certificates import CertificatesFile, read_certificates
from smoothcert.errors import RequestError
from smoothcert.io.compressed import stem
from smoothcert.report.contents import Choices, read_contents
from smoothcert.report.locate import find_certificates
from smoothcert.report.paired import Difference
from smoothcert.report.summary import Summary, summarize

if TYPE_CHECKING:  # tables are made without torch and matplotlib
    from matplotlib.figure import Figure

    from smoothcert.training.checkpoint import Run

Row = dict[str, str | float | int | None]


def report(
    runs: "str | Path | Run | Sequence[str | Path | Run]",
    *,
    radii: Sequence[float] | None = None,
    reference: str | None = None,
    out: str | Path | None = None,
    formats: Sequence[str] = ("md", "csv", "html", "png"),
) -> list[Row]:
    """Return one row per certificates file of `runs` (run folders, folders of them, or files), for `pandas.DataFrame`.

    A row has the name, data set, sigma, method, average certified radius (ACR) and its standard error, the certified
    accuracy (a fraction) at each of `radii`, the abstention rate and the number of images and votes. Runs of one sigma
    and data set are compared on the images that all of them have: `acr_minus_reference` is the difference from the run
    `reference` (by default the Gaussian or first one), with the standard error of the paired difference. With `out`,
    the report is also written there, as the command `smoothcert report` does: tables and a page as md, csv, tex and
    html, figures as png, pdf and svg.
    """
    given = runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    paths = [run.folder if hasattr(run, "folder") else Path(run) for run in given]
    choices = Choices(radii=radii, reference=reference)
    if out is None:
        contents = read_contents(paths, choices)
    else:
        from smoothcert.report import write_report  # draws figures, which takes a second to import

        contents = write_report(paths, Path(out), formats, choices=choices).contents
    differences = {run.name: (c.reference, run.acr) for c in contents.comparisons for run in c.paired}
    return [_row(summary, *differences.get(summary.name, (None, None))) for summary in contents.summaries]


def _row(summary: Summary, reference: str | None, difference: Difference | None) -> Row:
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
        "bound": str(summary.protocol["bound"]),
        "votes": summary.votes,
        "reference": reference,
        "acr_minus_reference": None if difference is None else difference.value,
        "acr_minus_reference_standard_error": None if difference is None else difference.standard_error,
    }


def plot_certificates(file: CertificatesFile, path: str | Path | None) -> "Figure":
    """Draw the curve of one file; also write the figure to `path` if one is given."""
    from smoothcert.report.curves import draw_curves

    figure = draw_curves([summarize(file, stem(file.path), ())])
    if path is not None:
        figure.savefig(path)
    return figure


def certificates_of_run(folder: Path, name: str | None) -> CertificatesFile:
    """The only certificates file of the run, or the one called `name`."""
    files = dict(find_certificates([folder]))
    by_stem = {stem(path): path for path in files.values()}
    if name is not None and name not in by_stem:
        raise RequestError(f"{folder}: expected certificates among {', '.join(by_stem)}, got {name}")
    if name is None and len(by_stem) > 1:
        raise RequestError(
            f"{folder}: expected one certificates file, got {', '.join(by_stem)}; choose one with "
            f"read_certificates({next(iter(by_stem))!r})"
        )
    return read_certificates(by_stem[name] if name is not None else next(iter(by_stem.values())))
