"""`smoothcert presets`, `datasets`, `models` and `objectives`: lists with one line per entry."""

from typing import Annotated

import typer
from rich.table import Column, Table

from smoothcert.cli.options import console
from smoothcert.errors import RequestError


def presets(
    name: Annotated[str | None, typer.Argument(help="Print this preset's recipe.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise level.")] = None,
) -> None:
    """List the published runs, or print the recipe of one."""
    from smoothcert.papers.presets import PRESETS, preset

    if name is not None and name in PRESETS:
        print(preset(name, sigma).to_yaml(), end="")
        return
    chosen = {key: found for key, found in PRESETS.items() if name is None or key.startswith(name)}
    if not chosen:
        preset(str(name))
    table = Table(Column("preset", overflow="fold"), "sigma", "published ACR")
    for key, found in chosen.items():
        values = (found.published_acr(s) for s in found.sigmas)
        shown = " / ".join("-" if value is None else f"{value:.3f}" for value in values)
        table.add_row(key, " / ".join(f"{s:g}" for s in found.sigmas), shown)
    console.print(table)


def datasets() -> None:
    """List the data sets."""
    from smoothcert.data import DATASETS, OWN_DATA

    show_registry({name: spec.description for name, spec in DATASETS.items()} | dict(OWN_DATA))


def models() -> None:
    """List the networks."""
    from smoothcert.models import MODELS

    show_registry({name: spec.description for name, spec in MODELS.items()})


def objectives(name: Annotated[str | None, typer.Argument(help="Show this method's fields.")] = None) -> None:
    """List the training methods, or the hyper-parameters of one."""
    from smoothcert.objectives import OBJECTIVES

    if name is None:
        show_registry({key: (kind.__doc__ or "").splitlines()[0] for key, kind in OBJECTIVES.items()})
        return
    if name not in OBJECTIVES and ":" not in name:
        raise RequestError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {name}")
    if name in OBJECTIVES:
        fields = OBJECTIVES[name].model_fields
    else:
        from smoothcert.training.user_objective import import_objective

        fields = import_objective(name).model_fields
    show_registry({f"objective.{key}": f"{f.description} (default {f.default})" for key, f in fields.items()})


def show_registry(entries: "dict[str, str]") -> None:
    table = Table(box=None, show_header=False)
    for key, text in entries.items():
        table.add_row(key, text)
    console.print(table)
