"""`smoothcert presets`, `papers`, `datasets`, `models` and `objectives`: lists with one line per entry."""

from itertools import takewhile
from operator import itemgetter
from typing import Annotated

import typer
from rich.table import Column, Table

from smoothcert.cli.options import NOISE_LEVEL, command_line, console, show_table
from smoothcert.errors import RequestError
from smoothcert.io.text import did_you_mean


def presets(
    preset: Annotated[str | None, typer.Argument(help="Print this preset's recipe.")] = None,
    sigma: Annotated[float | None, typer.Option(help=NOISE_LEVEL)] = None,
) -> None:
    """List the published runs and our own recipes, or print the recipe of one."""
    from smoothcert.papers.presets import PRESETS
    from smoothcert.papers.presets import preset as find_preset

    chosen = {key: entry for key, entry in PRESETS.items() if key.startswith(preset or "")}
    if preset in PRESETS or not chosen:
        print(find_preset(str(preset), sigma).to_yaml(), end="")
        return
    if sigma is not None:
        raise RequestError(f"--sigma: expected the name of one preset with it, got {preset or 'none'}; give one")
    table = Table(Column("preset", overflow="fold"), "sigma", "published ACR")
    for key, entry in chosen.items():
        values = (entry.published_acr(s) for s in entry.sigmas)
        shown = " / ".join("-" if value is None else f"{value:.3f}" for value in values)
        table.add_row(key, " / ".join(f"{s:g}" for s in entry.sigmas), shown)
    console.print(table)
    if ours := [key for key in chosen if key.endswith("/best")]:
        console.print(f"for a large ACR: {', '.join(ours)} (docs/best-recipe.md)")


def papers(
    table: Annotated[str | None, typer.Argument(help="Print the published rows of this table.")] = None,
) -> None:
    """List the papers' tables, or print the published rows of one."""
    from smoothcert.papers.tables import dataset_of, is_radius, paper_table, paper_table_names
    from smoothcert.report import layout

    if table is not None:
        rows = paper_table(table)
        columns = []
        for title in rows[0]:
            if title == "method":
                columns.append(layout.Column(title, title, itemgetter(title), folds_at=18))
            else:
                radius = float(title) if is_radius(title) else None
                columns.append(layout.Column(title, title, itemgetter(title), 0, radius=radius))
        console.print(layout.terminal(layout.layout_of(columns, [rows]), console.width))
        return
    listed = Table(*(Column(title, no_wrap=True) for title in ("table", "data set", "rows", "sigma")), "compares")
    for name in paper_table_names():
        rows = paper_table(name)
        sigmas = sorted({float(row["sigma"]) for row in rows if row.get("sigma")})
        compared = ", ".join(t for t in takewhile(lambda title: not title.startswith("acr"), rows[0]) if t != "sigma")
        levels = " / ".join(f"{sigma:g}" for sigma in sigmas) or "-"
        listed.add_row(name, dataset_of(name), str(len(rows)), levels, compared)
    console.print(listed)
    console.print(f"next: {command_line('papers', 'smoothmix/table2')}")


def datasets() -> None:
    """List the data sets."""
    from smoothcert.data import DATASETS, OWN_DATA

    show_registry({name: spec.description for name, spec in DATASETS.items()} | dict(OWN_DATA))


def models() -> None:
    """List the networks."""
    from smoothcert.models import MODELS

    show_registry({name: spec.description for name, spec in MODELS.items()})


def objectives(
    objective: Annotated[str | None, typer.Argument(help="Show this method's fields.")] = None,
) -> None:
    """List the training methods, or the hyper-parameters of one."""
    from smoothcert.objectives import OBJECTIVES

    if objective is None:
        show_registry({key: (kind.__doc__ or "").splitlines()[0] for key, kind in OBJECTIVES.items()})
        return
    if objective not in OBJECTIVES and ":" not in objective:
        expected = f"one of {', '.join(OBJECTIVES)}, or your own FILE.py:Class"
        hint = did_you_mean(objective, OBJECTIVES, "choose one of these")
        raise RequestError(f"objective: expected {expected}, got {objective}; {hint}")
    from smoothcert.training.user_objective import import_objective

    fields = (OBJECTIVES.get(objective) or import_objective(objective)).model_fields
    texts = {f"objective.{key}": f"{f.description or ''} (default {f.default})".lstrip() for key, f in fields.items()}
    show_registry(texts)


def show_registry(entries: dict[str, str]) -> None:
    show_table(["", ""], entries.items(), box=None, show_header=False)
