"""Reproduce tables of the papers: plan the runs, train and certify what is missing, report it with the published rows.

The state is read from the folders: the same request continues where it stopped, and finished work is not repeated.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.console import PlainConsole
from smoothcert.io.text import counted, escape_markdown, markdown_table
from smoothcert.io.written_files import write_files
from smoothcert.papers.reproduce.planning import PlannedRun, Request, plan, share_runs
from smoothcert.papers.reproduce.run_state import plan_table
from smoothcert.papers.reproduce.work import failures_in_words, finish_runs
from smoothcert.papers.rows import PaperRun, paper_runs, published
from smoothcert.report import Published, write_report
from smoothcert.report.published import PublishedFor
from smoothcert.report.thumbnails import pictures

__all__ = ["QUICK", "PlannedRun", "Request", "plan", "plan_table", "reproduce", "share_runs"]

QUICK = "quick, scaled-down: not the paper's protocol"
FORMATS = ("md", "csv", "tex", "html", "png")
NOT_ASKED, DONE, FAILED = "not asked for", "done", "failed: "

Outcome = tuple[PaperRun, str, str]
"""A run of the table, the name of its folder, its state in the end."""


def reproduce(plans: Sequence[tuple[Request, Sequence[PlannedRun]]], console: PlainConsole) -> None:
    """Train and certify what is missing of the plans, then write a report for each, with the published rows.

    The requests differ only in their tables (see `share_runs`). Runs and reports that fail are named in one WorkError
    at the end, after all others are finished.
    """
    runs = {run.folder: run for _, planned in plans for run in planned if run.recipe is not None}
    failed = finish_runs(list(runs.values()), plans[0][0], console)
    problems = [failures_in_words(failed, len(runs))] if failed else []
    for request, planned in plans:
        finished = [run for run in planned if run.recipe is not None and run.folder not in failed]
        try:
            if finished:
                show_report(request, finished, outcomes(request, planned, failed), console)
        except (RequestError, WorkError, OSError) as error:
            problems.append(f"{request.table} could not be reported: {error}")
    if problems:
        raise WorkError("; ".join(problems))


def outcomes(request: Request, planned: Sequence[PlannedRun], failed: Mapping[Path, str]) -> list[Outcome]:
    """Return the outcome of each run of the table, and of each seed if the request names several."""
    by_name: dict[str, list[PlannedRun]] = {}
    for run in planned:
        by_name.setdefault(run.paper.name, []).append(run)
    rows: list[Outcome] = []
    for paper in paper_runs(request.table):
        for run in by_name.get(paper.name, []):
            state = run.state if run.recipe is None else DONE
            state = FAILED + failed[run.folder] if run.folder in failed else state
            rows.append((paper, run.folder.name, state))
        if paper.name not in by_name:
            rows.append((paper, "", NOT_ASKED))
    return rows


def show_report(
    request: Request, finished: Sequence[PlannedRun], rows: Sequence[Outcome], console: PlainConsole
) -> None:
    """Write the report and rows.md, and print the table, what is missing in it, and the files."""
    out = request.out / f"{request.prefix}{request.report}"
    title = title_of(request, rows)
    report = write_report(
        [run.certificates for run in finished],
        out,
        FORMATS,
        title=title,
        published=row_of_file(finished),
        gallery=partial(pictures, folder=request.reader.folder),
    )
    write_files(out, {"rows.md": rows_page(title, rows).encode()})
    console.print(title, style="bold")
    report.show(console)
    for line in (f"wrote {out / 'rows.md'}", *missing(rows)):
        console.print(line)


def title_of(request: Request, rows: Sequence[Outcome]) -> str:
    """Return the table's name, how it was reproduced, and how much of it if not all."""
    seeds = ", ".join(map(str, dict.fromkeys(request.seeds)))
    runs = {paper.name for paper, _, _ in rows}
    done = {paper.name for paper, _, state in rows if state == DONE}
    failed = sum(state.startswith(FAILED) for _, _, state in rows)
    parts = [
        QUICK if request.quick else "reproduced",
        f"seeds: {seeds}" if seeds else "",
        f"{len(done)} of {len(runs)} runs" if done < runs else "",
        f"{failed} failed" if failed else "",
    ]
    return f"{request.table} ({'; '.join(part for part in parts if part)})"


def missing(rows: Sequence[Outcome]) -> list[str]:
    """Return one line per reason why runs are not in the table; each failed seed is counted."""
    runs = f"the paper's {len({paper.name for paper, _, _ in rows})} runs"
    tried = f"{counted(sum(state == DONE or state.startswith(FAILED) for _, _, state in rows), 'run')} tried"
    counts = Counter(state for _, _, state in rows if state != DONE)
    return [
        f"not in this table: {count} of {tried if state.startswith(FAILED) else runs}, {state}"
        for state, count in counts.items()
    ]


def row_of_file(finished: Sequence[PlannedRun]) -> PublishedFor:
    """Return the function from a certificates file to the row of its run, also if overrides changed the recipe.

    `missing` reports the rows without a run.
    """
    by_file = {run.certificates.resolve(): run for run in finished}

    def find(file: CertificatesFile) -> Published:
        run = by_file[file.path.resolve()]
        return replace(published(run.paper, run.known_recipe, file), rows=())

    return find


def rows_page(title: str, rows: Sequence[Outcome]) -> str:
    """Return the outcome of each run of the table as Markdown."""
    cells = (
        (paper.label, f"{paper.sigma:g}", "" if paper.acr is None else str(paper.acr), folder, state)
        for paper, folder, state in rows
    )
    table = markdown_table(
        ("row", "σ", "published ACR", "run", "state"), [[escape_markdown(cell) for cell in row] for row in cells]
    )
    return f"# {escape_markdown(title)}: outcome of each row\n\n{table}"
