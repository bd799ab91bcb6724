"""Values that a shell completes: presets, tables of papers, methods and data sets, without torch."""

from collections.abc import Callable
from importlib import import_module


def completer(module: str, names: str) -> Callable[[str], list[str]]:
    """Return the function that completes one of `names`, a collection in `module` or a function that returns one."""

    def complete(incomplete: str) -> list[str]:
        known = getattr(import_module(f"smoothcert.{module}"), names)
        return [name for name in (known() if callable(known) else known) if name.startswith(incomplete)]

    return complete


complete_preset = completer("papers.presets", "PRESETS")
complete_table = completer("papers.tables", "paper_table_names")
complete_objective = completer("objectives", "OBJECTIVES")
complete_dataset = completer("data", "DATASETS")
