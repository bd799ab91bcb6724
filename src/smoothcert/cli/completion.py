"""Values that a shell completes: presets, tables of papers, methods, data sets and run folders, without torch."""

from collections.abc import Iterable
from pathlib import Path

from smoothcert.training.run_folder import CERTIFICATES, RECIPE

DEEPEST = 3
"""Levels of folders that are searched for runs."""
MOST_ENTRIES = 2000
"""Entries of folders that are looked at: a shell waits for the answer."""


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


def complete_run(incomplete: str) -> list[str]:
    """The run folders whose path begins with `incomplete`, spelled as it is; also folders of certificates alone."""
    typed = Path(incomplete)
    parent, name = (typed, "") if not incomplete or incomplete.endswith("/") else (typed.parent, typed.name)
    return [f"./{run}" if incomplete.startswith("./") else str(run) for run in _runs_below(parent, name)]


def _runs_below(folder: Path, name: str) -> list[Path]:
    """The runs below `folder`, the nearest first, in entries that begin with `name`; hidden folders are left out."""
    runs: list[Path] = []
    level, looked_at = [folder], 0
    for depth in range(DEEPEST):
        entries = [entry for parent in level for entry in _folders(parent) if depth or entry.name.startswith(name)]
        looked_at += len(entries)
        runs += [entry for entry in entries if (entry / RECIPE).is_file() or (entry / CERTIFICATES).is_dir()]
        level = [entry for entry in entries if entry not in runs]
        if looked_at > MOST_ENTRIES:
            break
    return runs


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(entry for entry in parent.iterdir() if entry.name[0] != "." and entry.is_dir())
    except OSError:  # a folder that cannot be read has nothing to offer
        return []
