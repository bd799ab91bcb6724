"""Tables in the layout of the papers: sigma, run, ACR, certified accuracy in percent at each radius."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from rich.table import Table
from rich.text import Text

from smoothcert.errors import RequestError
from smoothcert.report.summary import Summary

Value = float | int | str | None
UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of every table: `key` heads it in CSV, `title` elsewhere. Percentages are kept as percentages."""

    key: str
    title: str
    value: Callable[[Summary], Value]
    decimals: int | None = None
    csv_only: bool = False

    @property
    def numeric(self) -> bool:
        return self.decimals is not None


@dataclass(frozen=True, slots=True)
class Cell:
    """A value, the text that shows it, and whether it is the best of its group."""

    value: Value
    text: str
    best: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns and cells that all formats share. `groups`: one entry a sigma, each a list of rows of cells."""

    columns: tuple[Column, ...]
    groups: tuple[tuple[tuple[Cell, ...], ...], ...]

    def for_reading(self) -> "Layout":
        """Without the columns that only a program wants."""
        kept = [i for i, column in enumerate(self.columns) if not column.csv_only]
        groups = tuple(tuple(tuple(row[i] for i in kept) for row in group) for group in self.groups)
        return Layout(tuple(self.columns[i] for i in kept), groups)


def decimals_needed(numbers: Sequence[float]) -> int:
    """At least 2, and as many as tell the numbers apart and show each to one part in ten thousand."""
    for decimals in range(2, 10):
        shown = {f"{x:.{decimals}f}" for x in numbers}
        if len(shown) == len(set(numbers)) and all(abs(round(x, decimals) - x) <= 1e-4 * abs(x) for x in numbers):
            return decimals
    return 10


def by_sigma(summaries: Sequence[Summary]) -> list[Summary]:
    """Sorted by sigma, the unknown last, then by data set; in the given order within."""
    return sorted(summaries, key=lambda summary: summary.group)


def _accuracy_column(radius: float, decimals: int) -> Column:
    def percent(summary: Summary) -> Value:
        fraction = summary.accuracy_at.get(radius)
        return None if fraction is None else 100 * fraction

    label = f"{radius:.{decimals}f}"
    return Column(label, label, percent, decimals=1)


def _columns(summaries: Sequence[Summary]) -> tuple[Column, ...]:
    radii = sorted({radius for summary in summaries for radius in summary.accuracy_at})
    radius_decimals = decimals_needed(radii)
    sigma_decimals = decimals_needed([s.sigma for s in summaries if s.sigma is not None])
    one_dataset = len({s.dataset for s in summaries} - {None}) < 2
    # A method that only repeats the name of the run says nothing.
    no_method = all(s.method is None or s.method == s.name for s in summaries)
    return (
        Column("sigma", "σ", lambda s: s.sigma, decimals=sigma_decimals),
        Column("dataset", "data set", lambda s: s.dataset, csv_only=one_dataset),
        Column("name", "run", lambda s: s.name),
        Column("method", "method", lambda s: s.method, csv_only=no_method),
        Column("acr", "ACR", lambda s: s.acr, decimals=3),
        Column("acr_standard_error", "±", lambda s: s.acr_standard_error, decimals=3, csv_only=True),
        *(_accuracy_column(radius, radius_decimals) for radius in radii),
        Column("abstention", "abstain", lambda s: 100 * s.abstention, decimals=1),
        Column("images", "images", lambda s: s.images, decimals=0),
        Column("n", "n", lambda s: s.n, decimals=0, csv_only=True),
        Column("n0", "n0", lambda s: s.n0, decimals=0, csv_only=True),
        Column("alpha", "α", lambda s: s.alpha, decimals=3, csv_only=True),
        Column("split", "split", lambda s: s.split, csv_only=True),
        Column("precision", "precision", lambda s: s.precision, csv_only=True),
        Column("votes", "votes", lambda s: s.votes, decimals=0, csv_only=True),
    )


def _shown(value: Value, decimals: int | None) -> str:
    if value is None:
        return UNKNOWN
    return value if isinstance(value, str) else f"{value:.{decimals or 0}f}"


def _best_acr(group: Sequence[Summary]) -> str | None:
    """The largest ACR as it is shown, so that equal cells are marked alike; None where there is nothing to compare.

    Files that do not tell their sigma may have different ones: they are not ranked.
    """
    if len(group) < 2 or group[0].sigma is None:
        return None
    return _shown(max(summary.acr for summary in group), 3)


def layout(summaries: Sequence[Summary]) -> Layout:
    """The cells of every table, sorted by sigma (unknown last), then in the given order; groups hold one sigma each."""
    if not summaries:
        raise RequestError("expected at least one run to tabulate, got none; give run folders or certificates files")
    columns = _columns(summaries)
    groups = []
    for _, members in groupby(by_sigma(summaries), key=lambda summary: summary.group):
        group = list(members)
        best = _best_acr(group)
        rows = []
        for summary in group:
            pairs = [(column, column.value(summary)) for column in columns]
            texts = [_shown(value, column.decimals) for column, value in pairs]
            rows.append(
                tuple(
                    Cell(value, text, best=column.key == "acr" and text == best)
                    for (column, value), text in zip(pairs, texts, strict=True)
                )
            )
        groups.append(tuple(rows))
    return Layout(columns, tuple(groups))


def one_line(text: str) -> str:
    """`text` with every run of white space and control characters as one space: it cannot break a row."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def escape_markdown(text: str) -> str:
    """`text` so that Markdown shows it as it is, in a table cell too. Underscores inside words need no escape."""
    return re.sub(r"([\\|*`<\[\]]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", one_line(text))


_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "σ": r"$\sigma$",
    "α": r"$\alpha$",
    "±": r"$\pm$",
    UNKNOWN: "--",
}


def escape_latex(text: str) -> str:
    """`text` so that LaTeX prints it as it is."""
    return "".join(_LATEX.get(c, c) for c in one_line(text))


def markdown_table(summaries: Sequence[Summary]) -> str:
    """A GitHub table; the best ACR of each sigma is bold. Accuracies in percent."""
    table = layout(summaries).for_reading()

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |\n"

    def shown(cell: Cell) -> str:
        text = escape_markdown(cell.text)
        return f"**{text}**" if cell.best else text

    rows = [[shown(cell) for cell in row] for group in table.groups for row in group]
    rule = ["---:" if column.numeric else ":---" for column in table.columns]
    return "".join(map(line, [[column.title for column in table.columns], rule, *rows]))


def csv_table(summaries: Sequence[Summary]) -> str:
    """All numbers with ten digits, a header line first; accuracies in percent, unknown values empty."""
    table = layout(summaries)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column.key for column in table.columns)
    for group in table.groups:
        for row in group:
            writer.writerow(f"{c.value:.10g}" if isinstance(c.value, float) else c.value for c in row)
    return out.getvalue()


def latex_table(summaries: Sequence[Summary]) -> str:
    """A tabular for the booktabs package, a rule between sigmas; the best ACR of each sigma is bold."""
    table = layout(summaries).for_reading()

    def line(cells: Sequence[str]) -> str:
        return " & ".join(cells) + r" \\"

    def shown(cell: Cell) -> str:
        text = escape_latex(cell.text)
        return rf"\textbf{{{text}}}" if cell.best else text

    blocks = ["\n".join(line([shown(cell) for cell in row]) for row in group) for group in table.groups]
    lines = [
        r"% \usepackage{booktabs}; certified accuracy in percent at each radius",
        rf"\begin{{tabular}}{{{''.join('r' if column.numeric else 'l' for column in table.columns)}}}",
        r"\toprule",
        line([escape_latex(column.title) for column in table.columns]),
        r"\midrule",
        "\n\\midrule\n".join(blocks),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def fitting(content: Layout, width: int) -> Layout:
    """`content` at most `width` wide: without side columns, then with every second, third, ... radius only."""
    keys = [column.key for column in content.columns]
    radii = [i for i, column in enumerate(content.columns) if column.key == column.title and column.decimals == 1]
    sides = (), ("method",), ("method", "images", "abstention")
    shown = content
    for step, side in product(range(1, max(1, len(radii)) + 1), sides):
        hidden = (set(radii) - set(radii[::step])) | {i for i, key in enumerate(keys) if key in side}
        kept = [i for i in range(len(keys)) if i not in hidden]
        groups = tuple(tuple(tuple(row[i] for i in kept) for row in group) for group in content.groups)
        shown = Layout(tuple(content.columns[i] for i in kept), groups)
        if _printed_width(shown) <= width:
            break
    return shown


def _printed_width(content: Layout) -> int:
    """Columns are as wide as their widest cell, with a border and two spaces each."""
    rows = [row for group in content.groups for row in group]
    widest = (max(len(c.title), *(len(row[i].text) for row in rows)) for i, c in enumerate(content.columns))
    return sum(width + 3 for width in widest) + 1


def terminal_table(summaries: Sequence[Summary], width: int = 100) -> Table:
    """The same table for a terminal of `width` columns, radii left out where it is too narrow for all.

    Names are shown as they are, never read as rich markup.
    """
    content = fitting(layout(summaries).for_reading(), width)
    table = Table(caption="certified accuracy in % at each radius")
    for column in content.columns:
        table.add_column(Text(column.title), justify="right" if column.numeric else "left", no_wrap=True)
    for group in content.groups:
        for row in group:
            cells = [Text(one_line(cell.text), style="bold" if cell.best else "") for cell in row]
            table.add_row(*cells, end_section=row is group[-1])
    return table
