"""One HTML file that opens offline: the result in words, curves, tables, a gallery, recipes, provenance.

The template in `page/` is filled by Jinja2, which escapes every text: names of runs, recipes and settings may come from
anyone. The scripts in `page/` draw curves and gallery from JSON inside the file. A policy in the page allows only its
own script and no requests.
"""

import base64
import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files as package_files
from itertools import groupby
from typing import TYPE_CHECKING, Any

from smoothcert import __version__
from smoothcert.io.text import flattened, one_line, printable
from smoothcert.report.contents import Contents
from smoothcert.report.figures import FIGURES
from smoothcert.report.html_data import curve_data, gallery_data
from smoothcert.report.labels import by_sigma, facts_of
from smoothcert.report.layout import Layout, comma_separated
from smoothcert.report.looks import Look, looks_of
from smoothcert.report.names import meanings_in
from smoothcert.report.summary import Summary
from smoothcert.training.run_folder import recipe_of_certificates

if TYPE_CHECKING:
    from jinja2 import Template

_SCRIPTS = ("page.js", "table.js", "curves.js", "gallery.js")


def html_page(contents: Contents, written: datetime.date | None = None) -> str:
    """The whole page, dated `written` (default: today). The same contents and date give the same text.

    The gallery of `contents` is asked once per data set and split for the pictures that the page shows; if it has none,
    or there is no gallery, the page lists the images without pictures and says why.
    """
    from markupsafe import Markup  # comes with Jinja2; both are needed only here

    written = written or datetime.date.today()
    labels = contents.labels
    settings = contents.hyperparameters
    looks = looks_of(labels.values())
    styles = list(looks.values())
    numbered = list(looks)
    look_of = {name: numbered.index(label) for name, label in labels.items()}
    ordered = by_sigma(contents.summaries)
    panels = curve_data(contents.panels, look_of, styles)
    script = "\n".join(map(_page_file, _SCRIPTS))
    letters = [f"{column.title.split()[0]} = " for column in contents.table.columns if column.key in settings]
    return _template().render(
        title=contents.title,
        about=[*facts_of(contents.summaries), f"{written.day} {written:%B %Y}"],
        csv=base64.b64encode(comma_separated(contents.table).encode("utf-8", "backslashreplace")).decode(),
        headlines=contents.headlines,
        meanings=f"{'; '.join(meanings_in(['σ = ', *letters, *labels.values()]))}.",
        explanations=contents.explanations,
        looks=look_of,
        table=_shown(contents.table),
        notes={**contents.warnings, **contents.notes},
        further=[(t.title, t.caption, _shown(t.layout)) for t in contents.further],
        figures=_figures(contents),
        runs=list(map(_provenance, ordered)),
        version=__version__,
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(_page_file("style.css") + _look_rules(styles)),
        data=Markup(_embedded({"panels": panels, "gallery": gallery_data(ordered, contents.gallery, labels)})),
    )


def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["line"] = one_line
    environment.filters["word"] = lambda text: re.sub(r"\W", "-", text)
    return environment.from_string(_page_file("template.html"))


def _page_file(name: str) -> str:
    return package_files("smoothcert.report").joinpath("page", name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON for a script element: without `<`, nothing in it can end the element or start another."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _look_rules(looks: Sequence[Look]) -> str:
    """The colours of the runs, on a white and on a dark page."""
    light = "\n".join(f".look-{i} {{ --look: {look.colour}; }}" for i, look in enumerate(looks))
    dark = "\n".join(f"  .look-{i} {{ --look: {look.dark}; }}" for i, look in enumerate(looks))
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _figures(contents: Contents) -> list[tuple[str, str, str]]:
    """Title, caption and data URI of the figures of the report but for the curves, which the page draws itself."""
    return [
        (title, caption, f"data:image/png;base64,{base64.b64encode(contents.pictures[f'{name}.png']).decode()}")
        for name, (title, caption) in FIGURES.items()
        if name != "curves" and f"{name}.png" in contents.pictures
    ]


def _shown(content: Layout) -> dict[str, Any]:
    """A table as the template takes it; `spans` are the columns under and outside the heading of the radii."""
    shown = content.for_reading()
    spans = [(yes, len(list(cells))) for yes, cells in groupby(column.radius is not None for column in shown.columns)]
    spans = spans if any(yes for yes, _ in spans) else []
    return {"columns": shown.columns, "groups": shown.groups, "spans": spans}


def _provenance(summary: Summary) -> dict[str, Any]:
    """What the files of the run record about its training and certification."""
    file = summary.file
    path = recipe_of_certificates(file.path)
    # It was read before: a file that is too large for a recipe is refused.
    lines = None if path is None else path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {
        "name": summary.name,
        "line": summary.in_words,
        "recipe": None if lines is None else "\n".join(map(printable, lines)),
        "settings": _texts(file.settings),
        "provenance": _texts(file.provenance),
    }


def _texts(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in flattened(fields).items()
    }
