"""How commands are registered: panels of commands, groups of options, an example for each, and shell completion."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, get_args

import typer
from typer.models import OptionInfo, ParameterInfo

START, PAPERS, FILES, LISTS = "Start", "Papers", "Files", "Lists"
"""The panels of commands."""

GROUPS = {
    "Recipe": ("preset", "recipe", "objective", "epochs", "set_", "init", "teacher", "seeds", "method", "quick"),
    "Images": (
        *("dataset", "image_size", "classes", "channels", "skip_unreadable", "skip", "max_images", "shard", "index"),
        *("data", "resize"),
    ),
    "Noise and votes": ("sigma", "noise", "n", "n0", "alpha", "bound", "sound", "radius", "seed", "num_noise"),
    "Fewer votes": ("until_radius", "radii", "radius_loss", "label_aware"),
    "Network": ("model", "denoiser", "arch", "input_layer", "ensemble", "cascade", "consensus", "hub"),
    "Speed": ("device", "precision", "compile", "compile_", "batch_size", "jobs", "capture", "sync_batch_norm"),
    "LaTeX": ("columns", "caption", "label"),
    "Output": (
        *("out", "name", "format_", "paper", "json_", "quiet", "track", "force", "dry_run", "evaluate_every"),
        "compress_",
    ),
}
"""Group -> parameters of commands; other options are in the group "Options"."""
COMPLETIONS = {
    **dict.fromkeys(("tables", "table", "paper"), ("papers.tables", "paper_table_names")),
    "preset": ("papers.presets", "PRESETS"),
    "objective": ("objectives", "OBJECTIVES"),
    "dataset": ("data", "DATASETS"),
}
"""Parameter of a command -> the values that a shell completes: a module without torch, and a collection or function."""
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def add_command(app: typer.Typer, name: str, function: Callable[..., None], panel: str | None, example: str) -> None:
    """Register `function` as the command `name`, with its options in groups and `example` below its help.

    A parameter whose type is a dataclass stands for the options that are its fields.
    """
    together: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        options = parameter.annotation
        if is_dataclass(options):
            together[parameter.name] = options
        parameters += inspect.signature(options).parameters.values() if is_dataclass(options) else [parameter]  # type: ignore[arg-type]

    def call(**values: Any) -> None:
        for group, options in together.items():
            values[group] = options(**{field.name: values.pop(field.name) for field in fields(options)})
        function(**values)

    for parameter in parameters:
        _describe(parameter)
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    call.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    call.__doc__ = function.__doc__
    app.command(name, rich_help_panel=panel, epilog=f"Example: smoothcert {example}")(call)


def _describe(parameter: inspect.Parameter) -> None:
    """Set what follows from the name and the type of a parameter: its group and its completion; flags show no type."""

    def complete(incomplete: str) -> list[str]:
        module, name = COMPLETIONS[parameter.name]
        known = getattr(import_module(f"smoothcert.{module}"), name)
        return [value for value in (known() if callable(known) else known) if value.startswith(incomplete)]

    for info in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(info, ParameterInfo) and parameter.name in COMPLETIONS:
            info.autocompletion = complete
        if isinstance(info, OptionInfo):
            info.rich_help_panel = info.rich_help_panel or _GROUP_OF.get(parameter.name)
            if bool in (parameter.annotation.__origin__, *get_args(parameter.annotation.__origin__)):
                info.metavar = ""
