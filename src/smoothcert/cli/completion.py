"""Values that a shell completes: presets, tables of papers, methods and data sets, without torch."""

from collections.abc import Iterable


def _beginning(known: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]


def complete_preset(incomplete: str) -> list[str]:
    from smoothcert.papers.presets import PRESETS

    return _beginning(PRESETS, incomplete)


def complete_table(incomplete: str) -> list[str]:
    from smoothcert.papers.tables import paper_table_names

    return _beginning(paper_table_names(), incomplete)


def complete_objective(incomplete: str) -> list[str]:
    from smoothcert.objectives import OBJECTIVES

    return _beginning(OBJECTIVES, incomplete)


def complete_dataset(incomplete: str) -> list[str]:
    from smoothcert.data import DATASETS

    return _beginning((*DATASETS, "folder:", "npz:"), incomplete)
