"""One HTML file that opens offline: a sortable table, interactive curves, a gallery of images, recipes, provenance.

The table and the provenance are plain HTML; curves and gallery are drawn by the scripts in `page/` from JSON inside the
file. Names of runs, recipes and settings are text of others: they are escaped, and a policy in the page lets no script
run but its own and nothing be fetched.
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
from smoothcert.errors import RequestError
from smoothcert.io.text import flattened, one_line, printable
from smoothcert.report.comparison import Published
from smoothcert.report.html_gallery import Gallery, gallery_data, rounded_down
from smoothcert.report.panels import panel_titles, short_labels
from smoothcert.report.summary import Summary, counted_radii
from smoothcert.report.tables import Cell, Column, Layout, by_sigma, layout
from smoothcert.training.run_folder import recipe_of_certificates

_SCRIPTS = ("page.js", "table.js", "curves.js", "gallery.js")
_RADIUS_DECIMALS = 6
_MOST_OF_RECIPE = 100_000  # bytes
_LOOKS = 7  # colours in style.css

NOTHING: Mapping[str, Any] = {}

Files = Sequence[tuple[str, CertificatesFile]]


def html_page(
    title: str,
    files: Files,
    summaries: Sequence[Summary],
    gallery: Gallery | None = None,
    *,
    published: Mapping[str, Published] = NOTHING,
    notes: Mapping[str, Sequence[str]] = NOTHING,
    more: Sequence[tuple[str, Layout]] = (),
) -> str:
    """The whole page for runs of the given names; `summaries` are those of `files`, by name.

    `gallery` is asked once a data set and split for the pictures that the page shows; where it has none, or is absent,
    the gallery has its rows without pictures and says why. `published` are the rows of a paper that stand under runs,
    `notes` what differs from the paper -> the runs of which it holds, `more` further tables with their headings. The
    same input gives the same text.
    """
    named = dict(files)
    if len(named) < len(files) or {summary.name for summary in summaries} != set(named):
        raise RequestError("expected one summary for each run and names that differ, got others; rename the runs")
    ordered = by_sigma(summaries)
    panels = [list(members) for _, members in groupby(ordered, key=lambda summary: summary.group)]
    labels = {k: one_line(v) for k, v in short_labels((s.name, s.method, s.group) for s in ordered).items()}
    looks = {label: look for look, label in enumerate(dict.fromkeys(labels[summary.name] for summary in ordered))}
    colours = {name: looks[label] for name, label in labels.items()}
    data = {
        "panels": _panels(panels, named, labels, looks),
        "gallery": gallery_data([(summary.name, named[summary.name]) for summary in ordered], gallery),
    }
    script = "\n".join(map(_page_file, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": _shown(title),
        "style": _page_file("style.css"),
        "script": script,
        "script_digest": digest,
        "table": _table(layout(summaries, published), colours),
        "notes": "".join(_note(note, names) for note, names in notes.items()),
        "more": "\n".join(f"<h3>{_shown(heading)}</h3>\n{_table(content, colours)}" for heading, content in more),
        "provenance": "\n".join(_provenance(summary, named[summary.name]) for summary in ordered),
        "data": _embedded(data),
        "version": __version__,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _page_file("template.html"))


def _page_file(name: str) -> str:
    return package_files("smoothcert.report").joinpath("page", name).read_text(encoding="utf-8")


def _shown(text: object) -> str:
    """`text` as HTML that shows it, on one line."""
    return escape(one_line(text))


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element: without `<`, nothing in it can end the element or open another."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _panels(
    panels: Sequence[Sequence[Summary]],
    named: Mapping[str, CertificatesFile],
    labels: Mapping[str, str],
    looks: Mapping[str, int],
) -> list[dict[str, Any]]:
    """For each sigma and data set its runs, each with the ascending radii that count: all steps of its curve."""
    titles = panel_titles([(panel[0].sigma, panel[0].compared_on) for panel in panels])
    found = []
    for panel, title in zip(panels, titles, strict=True):
        runs = [
            {
                "name": one_line(summary.name),
                "label": labels[summary.name],
                "look": looks[labels[summary.name]],
                "acr": f"{summary.acr:.3f}",
                "images": summary.images,
                "radii": [rounded_down(r, _RADIUS_DECIMALS) for r in sorted(counted_radii(named[summary.name].rows))],
            }
            for summary in panel
        ]
        ceilings = {(s.ceiling, s.n) for s in panel if s.ceiling is not None and s.n is not None}
        found.append({"title": one_line(title), "runs": runs, "ceilings": sorted(ceilings)})
    return found


def _table(content: Layout, colours: Mapping[str, int]) -> str:
    """A table as the other formats have it; cells keep their value for sorting, runs have the colour of their curve."""
    shown = content.for_reading()
    body = []
    for group in shown.groups:
        for position, row in enumerate(group):
            # Rows aside stay under the run that they are about.
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


def _provenance(summary: Summary, file: CertificatesFile) -> str:
    """What the run's own files say of how it was trained and certified, folded up."""
    error = "" if summary.acr_standard_error is None else f" ± {summary.acr_standard_error:.3f}"
    told = [
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
        f"<span>{_shown(', '.join(filter(None, told)))}</span></summary>"
        f'<div class="facts">{inside or nothing}</div></details>'
    )


def _recipe(file: CertificatesFile) -> str | None:
    """The recipe of the run whose folder holds `file`, as it is written; None where there is none."""
    path = recipe_of_certificates(file.path)
    if path is None:
        return None
    with path.open("rb") as stream:
        content = stream.read(_MOST_OF_RECIPE + 1)
    lines = content[:_MOST_OF_RECIPE].decode("utf-8", "replace").splitlines()
    return "\n".join(map(printable, [*lines, *(["..."] if len(content) > _MOST_OF_RECIPE else [])]))


def _facts(heading: str, told: Mapping[str, Any]) -> str:
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in flattened(told).items()
    }
    rows = "".join(f"<tr><th>{_shown(key)}</th><td>{_shown(text)}</td></tr>" for key, text in texts.items())
    return f"<h3>{heading}</h3><table>{rows}</table>" if rows else ""
