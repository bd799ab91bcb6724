"""A layout as Markdown, CSV, LaTeX or a table for the terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from smoothcert.io.text import csv_text, escape_markdown, markdown_table, one_line
from smoothcert.report.layout import UNKNOWN, Cell, Layout, fitting

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
    "−": "$-$",
    UNKNOWN: "--",
}


def escape_latex(text: str) -> str:
    """`text` so that LaTeX prints it as it is."""
    return "".join(_LATEX.get(c, c) for c in one_line(text))


def markdown(content: Layout) -> str:
    """A GitHub table; the best of each group is bold, what is beside a run's own is in italics."""
    table = content.for_reading()

    def marked(cell: Cell) -> str:
        text = escape_markdown(cell.text)
        mark = "**" if cell.best else "*" if cell.aside and text else ""
        return f"{mark}{text}{mark}"

    rows = [[marked(cell) for cell in row] for group in table.groups for row in group]
    rule = ["---:" if column.numeric else ":---" for column in table.columns]
    return markdown_table([column.title for column in table.columns], rows, rule)


def comma_separated(content: Layout) -> str:
    """All numbers with ten digits, a header line first; unknown values empty."""
    table = content.for_programs()
    rows = ([cell.value for cell in row] for group in table.groups for row in group)
    return csv_text([[column.key for column in table.columns], *rows])


def latex(content: Layout) -> str:
    """A tabular for the booktabs package, a rule between groups; bold and italics as in Markdown."""
    table = content.for_reading()

    def line(cells: Sequence[str]) -> str:
        return " & ".join(cells) + r" \\"

    def marked(cell: Cell) -> str:
        text = escape_latex(cell.text)
        mark = "textbf" if cell.best else "textit" if cell.aside and text else ""
        return rf"\{mark}{{{text}}}" if mark else text

    blocks = ["\n".join(line([marked(cell) for cell in row]) for row in group) for group in table.groups]
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


def terminal(content: Layout, width: int, caption: str) -> Table:
    """A table for a terminal of `width` columns, radii left out where it is too narrow for all.

    Names are shown as they are, never read as rich markup.
    """
    fit = fitting(content.for_reading(), width)
    table = Table(caption=caption)
    for column in fit.columns:
        table.add_column(Text(column.title), justify="right" if column.numeric else "left", no_wrap=True)
    for group in fit.groups:
        for row in group:
            styles = ["bold" if cell.best else "italic" if cell.aside else "" for cell in row]
            cells = [Text(one_line(cell.text), style=style) for cell, style in zip(row, styles, strict=True)]
            table.add_row(*cells, end_section=row is group[-1])
    return table
