"""The certificates files of the paths that a user gives, with distinct names; the recipes of their runs."""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from smoothcert.errors import RequestError, WorkError
from smoothcert.io.compressed import PLAIN, plain_form, result_files
from smoothcert.io.text import natural_order
from smoothcert.io.written_files import MANIFEST
from smoothcert.io.yaml_file import read_yaml
from smoothcert.training.run_folder import (
    CERTIFICATES,
    MODEL,
    RECIPE,
    check_exists,
    run_of_certificates,
    stored_fields,
)

_ENDING = re.compile(r"(?<=.)\.(tsv|txt)(\.gz)?$")
"""Files of other tools are called things like `noise_0.25`: only these endings are not part of the name."""
_RUN_FILES = (RECIPE, MODEL, CERTIFICATES)


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _RUN_FILES)


def _with_runs_in(paths: Iterable[Path]) -> list[Path]:
    """`paths`, where a folder of certified runs becomes the certificates files in it, then its runs, certified or
    not, numbers in their names sorted as numbers."""
    every: list[Path] = []
    for path in paths:
        check_exists(path)
        holds_runs = path.is_dir() and not result_files(path / CERTIFICATES)
        runs = sorted(filter(_is_run, path.iterdir()), key=natural_order) if holds_runs else []
        certified = any(result_files(run / CERTIFICATES) for run in runs)
        every += [*result_files(path), *runs] if certified else [path]
    return every


def _files_of(path: Path) -> tuple[Path, list[Path]]:
    """The path that the files are named after, and the files, if there are any."""
    if not path.is_dir():
        run = run_of_certificates(path)
        return (path if run is None or plain_form(path).suffix != PLAIN else run), [path]
    folder = path.resolve()
    if files := result_files(path / CERTIFICATES):
        return folder, files
    return (folder.parent if folder.name == CERTIFICATES else folder), result_files(path)


def _no_certificates(path: Path) -> RequestError:
    """The error of a folder without certificates: what it should hold, and the command that makes them for a run."""
    if path.name == CERTIFICATES or _is_run(path):
        run = path.parent if path.name == CERTIFICATES else path
        return RequestError(
            f"{path}: expected certificates (*.tsv), got none; make them with `{_certify_command(run)}`"
        )
    return RequestError(
        f"{path}: expected a run folder (certificates/*.tsv) or a folder of *.tsv files, got neither; "
        "give one that was certified with `smoothcert certify RUN`, or the files of another tool by their names"
    )


def _certify_command(run: Path) -> str:
    """The command that certifies `run`; it names a network that is the user's own code, which is not run otherwise."""
    network = ""
    with suppress(WorkError):
        network = str(read_recipe(run).get("model", ""))
    return shlex.join(["smoothcert", "certify", str(run), *(["--model", network] if ":" in network else [])])


def read_recipe(run: Path) -> Mapping[str, Any]:
    """The recipe.yaml in the folder `run`, with the fields that earlier versions left out; {} without one."""
    recipe = run / RECIPE
    if not recipe.is_file():
        return {}
    try:
        fields = read_yaml(recipe)
    except RequestError as error:
        reason = str(error).removeprefix(f"{recipe}: ").partition(";")[0]
        raise WorkError(
            f"{recipe}: expected the recipe of a run in YAML, got '{reason}'; restore or remove it"
        ) from error
    return stored_fields(fields) if "momentum" in fields else fields  # the recipes of imported models have no training


def run_recipe(path: Path) -> Mapping[str, Any]:
    """The recipe of the run that the certificates file `path` belongs to; {} without one."""
    run = run_of_certificates(path)
    return {} if run is None else read_recipe(run)


def distinct_names(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Names that occur twice get the folders of their paths in front, as many as needed.

    Files of one folder whose names differ only in their endings keep one name.
    """
    folders = [path.resolve().parent.parts for path in paths]
    longer = list(names)
    for depth in range(1, max(map(len, folders), default=1)):
        counts = Counter(longer)
        longer = [
            "/".join([*parts[-depth:], name]) if counts[text] > 1 else text
            for text, name, parts in zip(longer, names, folders, strict=True)
        ]
    return longer


def find_certificates(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """(name, certificates file) for each file that `paths` name, in the order given; names are distinct.

    A path is a run folder (it holds `certificates/*.tsv`), a folder of such folders (`*.tsv` files in it count too), a
    folder of `*.tsv` files, or a file of any name. Folders without certificates are skipped (see `locate`); it is a
    RequestError if all are. A file of a run is named after the run's folder, with `/<stem>` if there are several files
    of that run; any other file after itself. A file that is given twice is listed once.
    """
    return locate(paths)[0]


def locate(paths: Sequence[Path], without: Collection[Path] = ()) -> tuple[list[tuple[str, Path]], list[Path]]:
    """What `find_certificates` gives, and what it skips: the folders among `paths`, and the runs in folders of runs,
    that have no certificates; reports aside. Names are those that files have if there are none `without`."""
    if not paths:
        raise RequestError("expected at least one run folder or certificates file, got none; give one to report on")
    by_real_path: dict[Path, tuple[Path, Path]] = {}  # the file as it was given, and what it is named after
    uncertified: list[Path] = []
    every = _with_runs_in(map(Path, paths))
    for path in every:
        owner, files_of_path = _files_of(path)
        if not files_of_path and path not in uncertified and not (path / MANIFEST).is_file():
            uncertified.append(path)
        for file in (file for file in files_of_path if file not in without):
            by_real_path.setdefault(file.resolve(), (file, owner))
    if not by_real_path:
        raise _no_certificates(every[0])
    files, owners = zip(*by_real_path.values(), strict=True)
    counts = Counter(owners)
    names = []
    for file, owner in by_real_path.values():
        stem = _ENDING.sub("", file.name)
        if owner == file:
            names.append(stem)
        else:
            names.append(f"{owner.name}/{stem}" if counts[owner] > 1 else owner.name)
    return list(zip(distinct_names(names, owners), files, strict=True)), uncertified
