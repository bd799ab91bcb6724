"""Files of other tools with what their users say about them: `smoothcert report ... --as "name=CAT-RS,sigma=0.5"`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from smoothcert.certification.certificates import CertificatesFile
from smoothcert.certification.checks import check_settings
from smoothcert.data.datasets import OTHER_NUMBERS
from smoothcert.errors import RequestError, WorkError
from smoothcert.io.text import did_you_mean, parse_count, radius_text
from smoothcert.report.protocol import ceiling_of

Description = Mapping[str, str]
"""Key -> value, as given."""
Named = tuple[str, CertificatesFile]
KEYS = ("name", "file", "sigma", "dataset", "split", "n", "n0", "alpha", "noise", "bound", "method", "model")
NUMBERS: Mapping[str, Callable[[str], float]] = {"sigma": float, "alpha": float, "n": parse_count, "n0": parse_count}
ROUNDED = 0.01
"""Relative excess of a radius over what its votes can show: other tools print three digits."""


def parse_description(text: str) -> dict[str, str]:
    """`name=CAT-RS,sigma=0.5` as a mapping; unknown keys and missing values are a RequestError."""
    given: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise RequestError(f'--as: expected KEY=VALUE,... such as "name=CAT-RS,sigma=0.5", got "{part[:60]}"')
        if key not in KEYS:
            raise RequestError(f"--as: expected keys out of {', '.join(KEYS)}, got '{key}'; {did_you_mean(key, KEYS)}")
        given[key] = value
    return given


def describe(files: Sequence[Named], descriptions: Sequence[Description]) -> list[Named]:
    """`files` with the names and settings of `descriptions`.

    Each description belongs to the file that its `file` names, or else to the next file without settings of its own,
    in order. Without `dataset`, the file is taken to be of the data set that all other files record, in its official
    form; without `split`, a file of that data set is taken to be of their split.
    """
    described = list(files)
    free = [i for i, (_, file) in enumerate(files) if not file.settings]
    recorded = {(file.settings.get("dataset"), file.settings.get("split")) for _, file in files if file.settings}
    for description in descriptions:
        place = _place(files, free, description)
        free = [i for i in free if i != place]
        name, file = described[place]
        settings = _settings(description)
        if len(recorded) == 1:
            dataset, split = next(iter(recorded))
            official = dataset and dataset.removesuffix(OTHER_NUMBERS)  # which other tools have read
            if settings.setdefault("dataset", official) == official:
                settings.setdefault("split", split)
        settings = {key: value for key, value in settings.items() if value is not None}
        try:
            check_settings(settings, file.path)
        except WorkError as error:
            reason = str(error).partition("damaged, ")[2].partition("; ")[0]
            raise RequestError(f"--as: {reason}; correct it") from error
        described[place] = (description.get("name", name), replace(file, settings=settings))
        _refuse_impossible(described[place][1])
    names = [name for name, _ in described]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RequestError(f"expected a different name for each run, got '{twice[0]}' twice; choose another with --as")
    return described


def _refuse_impossible(file: CertificatesFile) -> None:
    """Refuse sigma, n and alpha at which no votes show the largest radius of the file: one of them is wrong."""
    sigma, n, alpha = (file.settings.get(key) for key in ("sigma", "n", "alpha"))
    ceiling = ceiling_of(file, sigma, n, alpha)
    largest = float(file.columns.radius.max(initial=0.0))
    if ceiling is not None and largest > ceiling * (1 + ROUNDED):
        raise RequestError(
            f"--as: expected radii of at most {radius_text(ceiling)} for sigma {sigma:g}, n {n:,} and alpha {alpha:g}, "
            f"got {radius_text(largest)} in {file.path}; correct these"
        )


def _place(files: Sequence[Named], free: Sequence[int], description: Description) -> int:
    """The position of the file that `description` is about."""
    wanted = description.get("file")
    if wanted is None:
        if not free:
            raise RequestError(
                "--as: expected one for each file of another tool, got more; runs of smoothcert describe themselves"
            )
        return free[0]
    places = [i for i in free if str(files[i][1].path) == wanted or files[i][1].path.name == wanted]
    if len(places) != 1:
        raise RequestError(f"--as: expected file= to name one file without settings, got '{wanted}'; give its path")
    return places[0]


def _settings(description: Description) -> dict[str, Any]:
    """The settings of a description, as a certificates file records them; wrong numbers are a RequestError."""
    settings: dict[str, Any] = {key: description[key] for key in KEYS[2:] if key in description}
    for key, parse in NUMBERS.items():
        if (text := description.get(key)) is not None:
            try:
                settings[key] = parse(text)
            except ValueError:
                raise RequestError(f"--as: expected a number for {key}, got '{text[:40]}'; correct it") from None
    if "method" in settings:
        settings["objective"] = settings.pop("method")
    return settings
