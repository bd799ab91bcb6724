"""One HTML file that opens offline: a sortable table, interactive curves, a gallery of images, recipes, provenance.

The table and the provenance are plain HTML; the scripts in `page/` draw curves and gallery from JSON inside the file.
Names of runs, recipes and settings may come from anyone: they are escaped, and a policy in the page allows only its own
script and no requests.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files as package_files
from itertools import groupby
from typing import Any

from smoothcert import __version__
from smoothcert.certification.certificates import CertificatesFile
from smoothcert.io.text import flattened, one_line, printable
from smoothcert.report.contents import Contents
from smoothcert.report.html_gallery import gallery_data, rounded_down
from smoothcert.report.layout import Cell, Column, Layout
from smoothcert.report.panels import Member, panels_of, titles_of
from smoothcert.report.summary import Summary, counted_radii
from smoothcert.report.tables import by_sigma, intervals_layout, layout, seeds_layout
from smoothcert.training.run_folder import recipe_of_certificates

_SCRIPTS = ("page.js", "table.js", "curves.js", "gallery.js")
_RADIUS_DECIMALS = 6
_MOST_OF_RECIPE = 100_000  # bytes
_LOOKS = 7  # colours in style.css


def html_page(contents: Contents) -> str:
    """The whole page. The same contents give the same text.

    The gallery of `contents` is asked once per data set and split for the pictures that the page shows; if it has none,
    or there is no gallery, the page lists the images without pictures and says why.
    """
    panels = panels_of(contents.summaries)
    labels = {member.summary.name: one_line(member.label) for panel in panels for member in panel}
    looks = {label: look for look, label in enumerate(dict.fromkeys(labels.values()))}
    colours = {name: looks[label] for name, label in labels.items()}
    ordered = by_sigma(contents.summaries)
    tables = [("95% confidence intervals", intervals_layout(contents.summaries))]
    if contents.seeds:
        tables.insert(0, ("Mean ± sd over seeds", seeds_layout(contents.seeds, contents.published)))
    notes = {**contents.warnings, **contents.notes}
    script = "\n".join(map(_page_file, _SCRIPTS))
    parts = {
        "title": _shown(contents.title),
        "style": _page_file("style.css"),
        "script": script,
        "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "table": _table(layout(contents.summaries, contents.published), colours),
        "notes": "".join(_note(note, names) for note, names in notes.items()),
        "more": "\n".join(f"<h3>{_shown(heading)}</h3>\n{_table(content, colours)}" for heading, content in tables),
        "provenance": "\n".join(map(_provenance, ordered)),
        "data": _embedded(
            {"panels": _panels(panels, colours, labels), "gallery": gallery_data(ordered, contents.gallery)}
        ),
        "version": __version__,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _page_file("template.html"))


def _page_file(name: str) -> str:
    return package_files("smoothcert.report").joinpath("page", name).read_text(encoding="utf-8")


def _shown(text: object) -> str:
    """`text` as HTML that shows it, on one line."""
    return escape(one_line(text))


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON for a script element: without `<`, nothing in it can end the element or start another."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _panels(
    panels: Sequence[Sequence[Member]], colours: Mapping[str, int], labels: Mapping[str, str]
) -> list[dict[str, Any]]:
    """For each sigma and data set its runs, each with the ascending radii that count: all steps of its curve."""

    def run(summary: Summary) -> dict[str, Any]:
        return {
            "name": one_line(summary.name),
            "label": labels[summary.name],
            "look": colours[summary.name],
            "acr": f"{summary.acr:.3f}",
            "images": summary.images,
            "radii": [rounded_down(r, _RADIUS_DECIMALS) for r in sorted(counted_radii(summary.file.rows))],
        }

    def ceilings(panel: Sequence[Member]) -> list[tuple[float, int]]:
        pairs = {(member.summary.ceiling, member.summary.n) for member in panel}
        return sorted((ceiling, n) for ceiling, n in pairs if ceiling is not None and n is not None)

    return [
        {"title": one_line(title), "runs": [run(member.summary) for member in panel], "ceilings": ceilings(panel)}
        for panel, title in zip(panels, titles_of(panels), strict=True)
    ]


def _table(content: Layout, colours: Mapping[str, int]) -> str:
    """The table of the other formats; cells keep their value for sorting, runs have the colour of their curve."""
    shown = content.for_reading()
    body = []
    for group in shown.groups:
        for position, row in enumerate(group):
            # Published rows and differences stay under their run.
            kind = "aside" if any(cell.aside for cell in row) else "first" if position == 0 else "next"
            cells = "".join(_cell(column, cell, colours) for column, cell in zip(shown.columns, row, strict=True))
            body.append(f'<tr class="{kind}">{cells}</tr>\n')
    heads = (
        f'<th scope="col" class="{"number" if column.numeric else "text"}">'
        f'<button type="button">{_shown(column.title)}</button></th>'
        for column in shown.columns
    )
    head = f"<thead>{_radius_heading(shown.columns)}<tr>{''.join(heads)}</tr></thead>"
    return f'<div class="scroll"><table class="results">{head}\n<tbody>\n{"".join(body)}</tbody></table></div>'


def _note(note: str, names: Sequence[str]) -> str:
    return f'<p class="note"><b>{_shown(", ".join(names))}</b>: {_shown(note)}</p>\n'


def _radius_heading(columns: Sequence[Column]) -> str:
    """A heading over the columns that are named by a radius."""
    spans = [(yes, len(list(members))) for yes, members in groupby(column.radius is not None for column in columns)]
    text = "certified accuracy (%) at radius"
    cells = (f'<th colspan="{n}" class="over">{text}</th>' if yes else f'<td colspan="{n}"></td>' for yes, n in spans)
    return f"<tr>{''.join(cells)}</tr>" if any(yes for yes, _ in spans) else ""


def _cell(column: Column, cell: Cell, colours: Mapping[str, int]) -> str:
    classes = "number" if column.numeric else "text"
    classes += " best" if cell.best else ""
    attributes = "" if cell.value is None else f' data-value="{_shown(cell.value)}"'
    if column.radius is not None and isinstance(cell.value, int | float) and not cell.aside:
        classes += " accuracy"
        attributes += f' style="--share:{min(max(cell.value, 0.0), 100.0):.1f}%"'
    text = _shown(cell.text)
    if column.key == "name" and cell.value in colours:
        text = f'<span class="swatch look-{colours[str(cell.value)] % _LOOKS}"></span>{text}'
    return f'<td class="{classes}"{attributes}>{text}</td>'


def _provenance(summary: Summary) -> str:
    """What the files of the run record about its training and certification, folded up."""
    file = summary.file
    error = "" if summary.acr_standard_error is None else f" ± {summary.acr_standard_error:.3f}"
    line = [
        f"ACR {summary.acr:.3f}{error}",
        f"{summary.images:,} images",
        "" if summary.n is None else f"n = {summary.n:,}",
        "" if summary.alpha is None else f"alpha = {summary.alpha:g}",
        *summary.remarks,
    ]
    recipe = _recipe(file)
    blocks = (
        f"<h3>Recipe</h3><pre>{escape(recipe)}</pre>" if recipe else "",
        _facts("Certification", file.settings),
        _facts("Provenance", file.provenance),
    )
    inside = "".join(f"<div>{block}</div>" for block in blocks if block)
    nothing = '<p class="note">The files of this run say nothing more.</p>'
    return (
        f"<details><summary><b>{_shown(summary.name)}</b> "
        f"<span>{_shown(', '.join(filter(None, line)))}</span></summary>"
        f'<div class="facts">{inside or nothing}</div></details>'
    )


def _recipe(file: CertificatesFile) -> str | None:
    """The text of the recipe of the run that `file` belongs to; None without one."""
    path = recipe_of_certificates(file.path)
    if path is None:
        return None
    with path.open("rb") as stream:
        content = stream.read(_MOST_OF_RECIPE + 1)
    lines = content[:_MOST_OF_RECIPE].decode("utf-8", "replace").splitlines()
    return "\n".join(map(printable, [*lines, *(["..."] if len(content) > _MOST_OF_RECIPE else [])]))


def _facts(heading: str, fields: Mapping[str, Any]) -> str:
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in flattened(fields).items()
    }
    rows = "".join(f"<tr><th>{_shown(key)}</th><td>{_shown(text)}</td></tr>" for key, text in texts.items())
    return f"<h3>{heading}</h3><table>{rows}</table>" if rows else ""
