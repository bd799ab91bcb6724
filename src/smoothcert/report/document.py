"""The texts of a report: the Markdown page, the CSV and LaTeX files, the output on a terminal."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from smoothcert.errors import RequestError
from smoothcert.io.text import did_you_mean, escape_markdown, one_line, some_of
from smoothcert.report.contents import Contents
from smoothcert.report.figures import FIGURES
from smoothcert.report.further_tables import ACR_DIFFERENCE
from smoothcert.report.html import html_page
from smoothcert.report.labels import by_sigma, facts_of
from smoothcert.report.layout import Layout, comma_separated, escape_latex, latex, markdown, terminal
from smoothcert.report.paired import FEW
from smoothcert.report.seeds_table import SEEDS_CAPTION, seeds_sentences
from smoothcert.report.tables import CAPTION

PUBLISHED_ROWS = "the published row under each run, and the difference: run minus published, accuracies in points"
DIFFERENCES = (
    "ACR − ...: paired difference over the images from the reference, which has a dash, with its standard error in "
    "brackets; a star marks differences of more than two standard errors (where at most "
    f"{FEW} images differ, of a randomization test at 5%)."
)
BOLD = "Bold: better than every other run of its σ, by an established difference."


def _items(notes: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A Markdown list: the runs of each note in bold, then the note."""
    return "".join(
        f"- {', '.join(f'**{escape_markdown(name)}**' for name in names)}: {escape_markdown(note)}\n"
        for note, names in notes
    )


def _comparison(contents: Contents) -> str:
    """The Markdown section on the differences from the paper; empty where nothing is compared."""
    if not contents.published:
        return ""
    title = f"## Next to {escape_markdown(contents.tables)}"
    return f"\n{title}\n\nIn italics: {PUBLISHED_ROWS}.\n\n{_items(contents.notes.items())}"


def _figures(pictures: Collection[str]) -> str:
    """Each figure once, in a format that a browser shows."""
    parts = []
    for name, (title, caption) in FIGURES.items():
        drawn = [file for file in (f"{name}.png", f"{name}.svg") if file in pictures]
        if drawn:
            parts.append(f"\n![{title}]({drawn[0]})\n\n{caption}\n")
    return "".join(parts)


def _paragraphs(sentences: Sequence[str]) -> str:
    return "\n\n".join(map(escape_markdown, sentences)) + "\n"


def markdown_page(contents: Contents) -> str:
    """The report as one Markdown page: the result in words, the table, then the details."""
    warnings = f"\n{_items(contents.warnings.items())}" if contents.warnings else ""
    further = "".join(f"\n## {t.title}\n\n{markdown(t.layout)}\n{t.caption}\n" for t in contents.further)
    return (
        f"# {escape_markdown(contents.title)}\n\n"
        f"{_paragraphs(contents.headlines)}\n"
        f"{markdown(contents.table)}\n"
        f"{_paragraphs(contents.explanations)}"
        f"{warnings}{_comparison(contents)}{_figures(contents.pictures)}{further}\n"
        "## How each run was certified\n\n"
        f"{_items((s.in_words, [s.name]) for s in by_sigma(contents.summaries))}"
    )


def latex_document(contents: Contents) -> str:
    """The table of the runs, what differs from the paper below it, then the table over seeds, for LaTeX."""
    asked = contents.latex
    columns = _full_keys(asked.columns, contents)
    label = asked.label or "tab:certified"
    parts = [latex(_chosen(contents.table, columns), asked.caption or _caption(contents), label)]
    lines = [f"{', '.join(names)}: {note}." for note, names in {**contents.warnings, **contents.notes}.items()]
    if lines:
        notes = "\n\n".join(escape_latex(line) for line in lines)
        parts.append(f"{{\\footnotesize\n{notes}\n\\par}}\n")
    if contents.seeds_table is not None:
        keys = [key for key in columns if contents.seeds_table.has(key)]
        means = _chosen(contents.seeds_table, [*keys, "seeds"] if keys else ())
        start = f"{asked.caption.rstrip('.')}. " if asked.caption else ""
        words = ["Mean ± sample standard deviation over training seeds.", *seeds_sentences(means)]
        parts.append(latex(means, f"{start}{' '.join(words)}", f"{label}-seeds"))
    return "\n".join(parts)


def _caption(contents: Contents) -> str:
    sentences = [f"ACR and certified accuracy (%) at each radius; {', '.join(facts_of(contents.summaries))}."]
    if contents.compares_runs:
        sentences.append(BOLD)
    if contents.published:
        sentences.append(f"In italics: {PUBLISHED_ROWS}.")
    if ACR_DIFFERENCE in contents.latex.columns:
        sentences.append(DIFFERENCES)
    return " ".join(sentences)


def _full_keys(keys: Sequence[str], contents: Contents) -> list[str]:
    """`keys` with the whole name of a hyper-parameter for its last part, as --set allows: weight, objective.weight."""
    full_keys = []
    for key in keys:
        same = sorted(full for full in contents.hyperparameters if full.rpartition(".")[2] == key)
        if len(same) > 1 and not contents.table.has(key):
            raise RequestError(f"columns: expected a column of report.csv, got '{key}'; give {' or '.join(same)}")
        full_keys.append(same[0] if same and not contents.table.has(key) else key)
    return full_keys


def _chosen(content: Layout, keys: Sequence[str] = ()) -> Layout:
    """`content` with the columns `keys`, or the usual ones without keys; sigma always comes first, and the name of the
    run follows unless `keys` place it or the method."""
    if not keys:
        return content.for_latex()
    known = [column.key for column in content.columns]
    for key in keys:
        if key not in known:
            hint = "add this radius to --radii" if key.replace(".", "", 1).isdecimal() else did_you_mean(key, known)
            raise RequestError(f"columns: expected columns of report.csv, got '{key}'; {hint}")
    named = () if {"name", "method"} & set(keys) else ("name",)
    return content.only([known.index(key) for key in dict.fromkeys(["sigma", *named, *keys])])


TEXTS: Mapping[str, Callable[[Contents], Mapping[str, str | None]]] = {
    "md": lambda contents: {"report.md": markdown_page(contents)},
    "csv": lambda contents: {
        "report.csv": comma_separated(contents.table),
        "report-seeds.csv": None if contents.seeds_table is None else comma_separated(contents.seeds_table),
    },
    "tex": lambda contents: {"report.tex": latex_document(contents)},
    "html": lambda contents: {"report.html": html_page(contents)},
}
"""Format -> the function that writes it: file name -> text, or None for a file of an earlier report to remove."""
TEXT_FILES = ("report.csv", "report-seeds.csv", "report.md", "report.tex", "report.html")
"""The files that TEXTS writes."""


def _listed(names: Sequence[str], runs: Sequence[str]) -> str:
    """The runs of a note on a terminal; the files of the report name all."""
    return "all runs" if len(runs) > 1 and set(names) == set(runs) else some_of(names)


def terminal_report(contents: Contents, width: int) -> list[RenderableType]:
    """The result in words, the tables and the notes to print on a terminal of `width` columns."""
    shown: list[RenderableType] = [Text(one_line(sentence), style="bold") for sentence in contents.headlines]
    shown.append(terminal(contents.table, width, CAPTION))
    if contents.published:
        shown.append(Text(f"next to {contents.tables}: {PUBLISHED_ROWS}", style="italic"))
    runs_here = [summary.name for summary in contents.summaries]
    shown += [Text(one_line(f"{_listed(names, runs_here)}: {note}")) for note, names in contents.notes.items()]
    shown += [
        Text(one_line(f"note: {_listed(names, runs_here)}: {note}"), style="yellow")
        for note, names in contents.warnings.items()
    ]
    if contents.seeds_table is not None:
        star = "; *: Welch's t-test, 5%" if contents.seeds_table.has(ACR_DIFFERENCE) else ""
        shown.append(terminal(contents.seeds_table, width, f"{SEEDS_CAPTION}{star}"))
    return shown
