"""A LaTeX table for a paper: grouped by sigma, with the chosen columns, caption and label."""

from collections.abc import Sequence
from dataclasses import replace

from smoothcert.errors import RequestError
from smoothcert.io.text import did_you_mean, one_line
from smoothcert.report.contents import Contents
from smoothcert.report.layout import Cell, Layout, escape_latex
from smoothcert.report.names import dataset_name

# What papers leave out of a table of results.
_NOT_USUAL = ("abstention", "images", "votes")
BELOW = "Below each run: the published row, and run minus published (accuracies in points)."


def latex_document(contents: Contents) -> str:
    """The table of the runs, what differs from the paper below it, then the table over seeds, for `booktabs`."""
    runs = _chosen(contents.table, contents.latex.columns)
    caption = contents.latex.caption or _caption(contents)
    parts = [table(runs, caption, contents.latex.label or "tab:certified")]
    lines = [f"{', '.join(names)}: {note}." for note, names in {**contents.warnings, **contents.notes}.items()]
    if lines:
        notes = "\n\n".join(escape_latex(line) for line in lines)
        parts.append(f"{{\\footnotesize\n{notes}\n\\par}}\n")
    if contents.seeds_table is not None:
        means = _chosen(contents.seeds_table)
        parts.append(table(means, "Mean ± sample standard deviation over training seeds.", "tab:certified-seeds"))
    return "\n".join(parts)


def _caption(contents: Contents) -> str:
    """Data set, norm, number of images and votes, as far as all runs share them, and what the columns are."""
    summaries = contents.summaries
    facts: list[set[str | None]] = [
        {None if s.dataset is None else dataset_name(s.dataset) for s in summaries},
        {f"{s.norm} radii" for s in summaries},
        {f"{s.images:,} images" for s in summaries},
        {None if s.n is None else f"n = {s.n:,}" for s in summaries},
        {None if s.alpha is None else f"α = {s.alpha:g}" for s in summaries},
    ]
    shared = ", ".join(one_line(fact) for values in facts for fact in values if len(values) == 1 and fact is not None)
    bold = "Bold: better than every other run of its σ by more than two standard errors of the paired difference."
    below = f" {BELOW}" if contents.published else ""
    return f"ACR and certified accuracy (%) at each radius; {shared}. {bold}{below}"


def _chosen(content: Layout, keys: Sequence[str] = ()) -> Layout:
    """`content` with the columns `keys`, or the usual ones without keys; sigma always comes first, and the name of the
    run follows unless `keys` place it or the method."""
    if not keys:
        return content.for_reading().without(_NOT_USUAL)
    known = [column.key for column in content.columns]
    for key in keys:
        if key not in known:
            raise RequestError(f"columns: expected columns of report.csv, got '{key}'; {did_you_mean(key, known)}")
    named = () if {"name", "method"} & set(keys) else ("name",)
    return content.only([known.index(key) for key in dict.fromkeys(["sigma", *named, *keys])])


def table(content: Layout, caption: str, label: str) -> str:
    """A floating table: sigma once per group, a rule between groups, bold for the best, italics for published rows."""
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(caption)}}}",
        rf"\label{{{one_line(label)}}}",
        rf"\begin{{tabular}}{{{''.join('r' if column.numeric else 'l' for column in content.columns)}}}",
        r"\toprule",
        _line([escape_latex(column.title) for column in content.columns]),
        r"\midrule",
        "\n\\midrule\n".join("\n".join(_rows(group)) for group in content.groups),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _rows(group: Sequence[tuple[Cell, ...]]) -> list[str]:
    first, *others = group
    once = [first, *((replace(row[0], text=""), *row[1:]) for row in others)]
    return [_line([_marked(cell) for cell in row]) for row in once]


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _marked(cell: Cell) -> str:
    text = escape_latex(cell.text or (str(cell.value) if isinstance(cell.value, str) and not cell.aside else ""))
    mark = "textbf" if cell.best else "textit" if cell.aside and text else ""
    return rf"\{mark}{{{text}}}" if mark else text
