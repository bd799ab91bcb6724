"""How commands are registered: panels of commands, groups of options, an example for each, and shell completion."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, get_args

import typer
from typer.models import OptionInfo, ParameterInfo

from smoothcert.errors import RequestError

START, PAPERS, FILES, LISTS = "Start", "Papers", "Files", "Lists"
"""The panels of commands."""

GROUPS = {
    "Recipe": (
        *("preset", "recipe", "method", "objective", "epochs", "set_", "init", "teacher", "seeds", "quick"),
        *("classifier", "classifier_init", "stability_weight"),
    ),
    "Numbers": ("paper", "radii", "reference", "all_images", "described", "linf"),
    "Images": (
        *("dataset", "image_size", "channels", "classes", "skip_unreadable", "resize", "index", "images"),
        *("certificates", "skip", "max_images", "shard", "data"),
    ),
    "Noise and votes": ("sigma", "noise", "n", "n0", "alpha", "bound", "sound", "radius", "num_noise", "seed"),
    "Fewer votes": ("until_radius", "radii", "radius_loss", "label_aware"),
    "Attack": ("radii", "steps", "step_size"),
    "Network": ("model", "arch", "input_layer", "hub", "init", "ensemble", "consensus", "cascade", "denoiser"),
    "Output": (
        *("out", "resume", "name", "title", "format_", "check", "compress_", "json_", "quiet", "evaluate_every"),
        *("track", "force", "dry_run"),
    ),
    "LaTeX": ("columns", "caption", "label"),
    "Speed": ("device", "precision", "batch_size", "jobs", "compile", "compile_", "capture", "sync_batch_norm"),
}
"""Group -> parameters of commands, in the order of the help. An option whose name is in two groups is shown in the
first one, unless its declaration names a group. Options in none are in "Options", which typer prints before these."""
COMPLETIONS = {
    **dict.fromkeys(("tables", "table", "paper"), ("papers.tables", "paper_table_names")),
    "preset": ("papers.presets", "PRESETS"),
    "objective": ("objectives", "OBJECTIVES"),
    "dataset": ("data", "DATASETS"),
}
"""Parameter of a command -> the values that a shell completes: a module without torch, and a collection or function."""
_GROUP_OF = {name: group for group, names in reversed(GROUPS.items()) for name in names}


class Command(typer.core.TyperCommand):
    """A command that refuses an option that is given twice: the parser would silently use the last value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        *_, given = self.make_parser(ctx).parse_args(args=[*args])
        for parameter in given:
            times = given.count(parameter)
            if times > 1 and isinstance(parameter, typer.core.TyperOption):
                if parameter.multiple or parameter.is_flag:
                    continue
                several = "comma-separated" in str(parameter.help).lower()
                advice = "give all its values at once, as in A,B" if several else "leave one out"
                raise RequestError(f"{parameter.opts[0]}: expected once, got it {times} times; {advice}")
        return super().parse_args(ctx, args)


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
    parameters.sort(key=_place)
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    call.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    call.__doc__ = function.__doc__
    app.command(name, cls=Command, rich_help_panel=panel, epilog=f"Example: smoothcert {example}")(call)


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


def _place(parameter: inspect.Parameter) -> tuple[int, int]:
    """The place of a parameter in the help: arguments as they are, then options by their groups."""
    infos = (info for info in parameter.annotation.__metadata__ if isinstance(info, ParameterInfo))
    group = next(infos).rich_help_panel or ""
    names = GROUPS.get(group, ())
    return [*GROUPS, group].index(group), names.index(parameter.name) if parameter.name in names else len(names)
