"""What every table consists of, columns and groups of rows of cells, and its text in each format."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from smoothcert.io.text import csv_text, escape_markdown, markdown_table, one_line

Value = float | int | str | None
UNKNOWN = "–"
MOST_DECIMALS = 10
_SIGNED = re.compile(r"^(\+|\$-\$)(\d+(?:\.\d+)?)")
"""The sign and the digits of a difference at the start of a cell in LaTeX."""

_GREEK = {
    **{"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "varepsilon", "ζ": "zeta", "η": "eta"},
    **{"θ": "theta", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho"},
    **{"σ": "sigma", "τ": "tau", "φ": "varphi", "χ": "chi", "ψ": "psi", "ω": "omega", "Δ": "Delta", "Φ": "Phi"},
}
_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{letter: rf"$\{name}$" for letter, name in _GREEK.items()},
    **{c: rf"$\{name}$" for c, name in {"±": "pm", "×": "times", "·": "cdot", "≤": "leq", "≥": "geq"}.items()},
    "→": r"$\rightarrow$",
    "−": "$-$",
    "∞": r"$\infty$",
    UNKNOWN: "--",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: `key` is its title in CSV, `title` elsewhere. Percentages are kept as percentages."""

    key: str
    title: str
    value: Callable[[Any], Value]
    """From the subject of a row (a run, a mean over seeds) to the number or text in its cell."""
    decimals: int | None = None
    csv_only: bool = False
    radius: float | None = None
    """The radius at which the column gives the certified accuracy; None for the other columns."""
    ranked: bool = False
    """Whether the largest value of a group is marked: ACR and accuracies."""
    shaded: bool = False
    """Whether the HTML page shades its percentages."""
    text: Callable[[Any], str] | None = None
    """The text of the cell, if it is not the value with its decimals."""
    folds_at: int | None = None
    """On a terminal, longer texts may take several lines, so that more columns fit."""
    left_out: int = 0
    """A narrow terminal leaves out the columns with 1 first, then those with 2, and so on; never those with 0."""
    in_latex: bool = True
    """Whether a table in LaTeX has the column without being asked for it."""

    @property
    def numeric(self) -> bool:
        return self.decimals is not None

    def cell(self, subject: object) -> "Cell":
        value = self.value(subject)
        return Cell(value, shown(value, self.decimals) if self.text is None else self.text(subject))


@dataclass(frozen=True, slots=True)
class Cell:
    """A value, its text, and whether it is the best of its group."""

    value: Value
    text: str
    best: bool = False
    aside: bool = False
    """Published or a difference: not a result of the run, shown in italics."""


Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns and cells that all formats share. `groups` has one entry per sigma, each a list of rows of cells."""

    columns: tuple[Column, ...]
    groups: tuple[tuple[Row, ...], ...]

    def has(self, key: str) -> bool:
        """Whether there is a column of this key."""
        return any(column.key == key for column in self.columns)

    def only(self, kept: Sequence[int]) -> "Layout":
        """The columns with these numbers."""
        groups = tuple(tuple(tuple(row[i] for i in kept) for row in group) for group in self.groups)
        return Layout(tuple(self.columns[i] for i in kept), groups)

    def for_reading(self) -> "Layout":
        """Without the columns that only programs need."""
        return self.only([i for i, c in enumerate(self.columns) if not c.csv_only])

    def for_latex(self) -> "Layout":
        """The columns that a table in LaTeX has without being asked for any."""
        return self.only([i for i, c in enumerate(self.columns) if c.in_latex and not c.csv_only])

    def fitting(self, width: int) -> "Layout":
        """At most `width` wide on a terminal: without the columns to be left out, then with every second, third, ...
        radius only."""
        radii = [i for i, column in enumerate(self.columns) if column.radius is not None]
        last = max(column.left_out for column in self.columns)
        fit = self
        for step, most in product(range(1, max(1, len(radii)) + 1), range(last + 1)):
            hidden = (set(radii) - set(radii[::step])) | {
                i for i, column in enumerate(self.columns) if 0 < column.left_out <= most
            }
            fit = self.only([i for i in range(len(self.columns)) if i not in hidden])
            if fit.printed_width(folded=True) <= width:
                break
        return fit

    def printed_width(self, *, folded: bool) -> int:
        """The width on a terminal: each column is as wide as its widest cell, a border and two spaces; `folded` texts
        that may take several lines do so."""
        rows = [row for group in self.groups for row in group]
        widest = [max(len(c.title), *(len(row[i].text) for row in rows)) for i, c in enumerate(self.columns)]
        most = [c.folds_at if folded else None for c in self.columns]
        return sum(min(width, limit or width) + 3 for width, limit in zip(widest, most, strict=True)) + 1


def layout_of(columns: Sequence[Column], groups: Sequence[Sequence[Any]]) -> Layout:
    """The table of some subjects in groups, of which empty ones are left out."""
    rows = tuple(tuple(tuple(column.cell(s) for column in columns) for s in group) for group in groups if group)
    return Layout(tuple(columns), rows)


def decimals_needed(numbers: Sequence[float]) -> int:
    """The decimals, at least 2, that tell the numbers apart and show each to one part in ten thousand."""
    for decimals in range(2, MOST_DECIMALS):
        texts = {f"{x:.{decimals}f}" for x in numbers}
        if len(texts) == len(set(numbers)) and all(abs(round(x, decimals) - x) <= 1e-4 * abs(x) for x in numbers):
            return decimals
    return MOST_DECIMALS


def shown(value: Value, decimals: int | None) -> str:
    """The text of a value: a number with its decimals (None: with four digits), a dash for an unknown value."""
    if value is None or isinstance(value, str):
        return UNKNOWN if value is None else value
    return f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"


def escape_latex(text: str) -> str:
    """`text` so that LaTeX prints it as it is; letters of scripts other than Latin and Greek need LuaLaTeX."""
    return "".join(_LATEX.get(c, c) for c in one_line(text))


def markdown(content: Layout) -> str:
    """A GitHub table; the best of each group is bold, published numbers and differences are in italics."""
    table = content.for_reading()

    def marked(cell: Cell) -> str:
        text = escape_markdown(cell.text)
        mark = "**" if cell.best else "*" if cell.aside and text else ""
        return f"{mark}{text}{mark}"

    rows = [[marked(cell) for cell in row] for group in table.groups for row in group]
    rule = ["---:" if column.numeric else ":---" for column in table.columns]
    return markdown_table([escape_markdown(column.title) for column in table.columns], rows, rule)


def comma_separated(content: Layout) -> str:
    """All numbers with ten digits, a header line first; unknown values are empty.

    Published numbers and differences have columns, not rows.
    """
    rows = [row for group in content.groups for row in group if not any(cell.aside for cell in row)]
    return csv_text([[column.key for column in content.columns], *([cell.value for cell in row] for row in rows)])


def terminal(content: Layout, width: int, caption: str = "") -> Table:
    """A table for a terminal of `width` columns, without some radii if it is too narrow for all.

    If it is still too wide, names take several lines, so that all numbers are readable. Names are shown as they are,
    never read as rich markup.
    """
    fit = content.for_reading().fitting(width)
    radii = [sum(column.radius is not None for column in part.columns) for part in (fit, content)]
    more = "a wider terminal shows more radii" if radii[0] < radii[1] else ""
    table = Table(caption="; ".join(filter(None, (caption, more))))
    folded = fit.printed_width(folded=False) > width
    for column in fit.columns:
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        no_wrap = column.numeric and column.folds_at is None
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if no_wrap else "fold"
        most = column.folds_at if folded and column.numeric else None  # so that names are folded only if they must
        table.add_column(Text(column.title), justify=justify, no_wrap=no_wrap, overflow=overflow, max_width=most)
    for group in fit.groups:
        for row in group:
            styles = ["bold" if cell.best else "italic" if cell.aside else "" for cell in row]
            cells = [Text(one_line(cell.text), style=style) for cell, style in zip(row, styles, strict=True)]
            table.add_row(*cells, end_section=row is group[-1])
    return table


def latex(content: Layout, caption: str, label: str) -> str:
    """A floating table: sigma once per group, a rule between groups, bold for the best, italics for published rows.

    A table that is wider than the text is scaled down to it.
    """
    lines = [
        r"% needs \usepackage{booktabs,graphicx}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(caption)}}}",
        rf"\label{{{one_line(label)}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{''.join('r' if column.numeric else 'l' for column in content.columns)}}}",
        r"\toprule",
        _latex_line([escape_latex(column.title) for column in content.columns]),
        r"\midrule",
        "\n\\midrule\n".join("\n".join(_latex_rows(group)) for group in content.groups),
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_rows(group: Sequence[Row]) -> list[str]:
    first, *others = group
    once = [first, *((replace(row[0], text=""), *row[1:]) for row in others)]
    return [_latex_line([_latex_cell(cell) for cell in row]) for row in once]


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    if not cell.aside:  # in LaTeX's text font, a plus is smaller than a minus
        text = _SIGNED.sub(lambda number: f"${number[1].strip('$')}{number[2]}$", text)
    mark = "textbf" if cell.best else "textit" if cell.aside and text else ""
    return rf"\{mark}{{{text}}}" if mark else text
