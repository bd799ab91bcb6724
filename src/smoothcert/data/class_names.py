"""Class names that a user gives, in the order of a model's outputs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

import torch

from smoothcert.data.streamed_images import Images
from smoothcert.errors import RequestError
from smoothcert.io.files import check_regular_file, with_home

MOST_CHARACTERS = 10_000_000


def with_classes(data: Images, names: Sequence[str]) -> Images:
    """`data` with labels that are positions in `names`, matched by name; `names` may have classes without images.

    Data without class names keep their labels, which must be positions in `names` already, unless `names` contains
    the numbers of all labels: then these are their names.
    """
    if isinstance(names, str | bytes | PurePath):
        raise RequestError(f"classes: expected a list of names, got {names!r}; use read_class_names for a file")
    labels = data.labels
    given = data.class_names
    numbers = tuple(map(str, range(data.num_classes)))
    if given is None and set(numbers) <= set(names):
        given = numbers
    if given is None:
        if data.num_classes > len(names):
            raise RequestError(
                f"classes: expected at least the {data.num_classes} classes of {data.name}, got {len(names)} names"
            )
    else:
        position = {name: index for index, name in enumerate(names)}
        if unknown := [name for name in given if name not in position]:
            some = ", ".join(unknown[:10]) + (f" and {len(unknown) - 10} more" if len(unknown) > 10 else "")
            raise RequestError(
                f"classes: expected the names of all classes of {data.name}, one per line, got a list without {some}; "
                "add them, or remove those images"
            )
        if twice := next((name for name in given if names.count(name) > 1), None):
            raise RequestError(
                f"classes: expected one output for each class of {data.name}, got two called {twice}; rename the "
                "class, and name all outputs: --classes FILE"
            )
        moved = torch.tensor([position[name] for name in given], dtype=torch.int64, device="cpu")
        labels = moved[labels.cpu()].to(labels.device)
    return replace(data, labels=labels, num_classes=len(names), class_names=tuple(names), relabelled=True)


def with_known_classes(data: Images, names: Sequence[str] | None) -> Images:
    """`data` with labels in the order of `names`, which a model contains, if these have all classes of `data`.

    Labels in an order that a user has given stay as they are.
    """
    if names is None or data.relabelled or data.class_names in (None, tuple(names)):
        return data
    if not set(data.class_names or ()) <= set(names):
        return data
    return with_classes(data, names)


def refuse_other_order(data: Images, names: Sequence[str] | None, owner: object) -> None:
    """Raise a RequestError if `data` has one of the classes `names` of `owner` at another position: labels would be
    mistaken."""
    given = data.class_names or ()
    positions = {name: index for index, name in enumerate(names or ())}
    place = next((index for index, name in enumerate(given) if positions.get(name, index) != index), None)
    if names is None or place is None or given == tuple(names):
        return
    raise RequestError(
        f"{owner}: class {place} of its model is {names[place]}, and {given[place]} in {data.name}; give the data the "
        "order of the model: --classes FILE (Python: load_dataset(..., classes=run.spec.class_names))"
    )


def unknown_class(data: Images, names: Sequence[str] | None, owner: object) -> str | None:
    """A warning if `data` has as many classes as `owner`, but not all of its classes `names`; else None."""
    given = data.class_names
    if names is None or given is None or len(given) != len(names) or set(given) <= set(names):
        return None
    place = next(index for index, name in enumerate(given) if name not in names)
    return (
        f"class {place} is {names[place]} in {owner} and {given[place]} in {data.name}: classes are matched by their "
        "order; if they are different things, give data with the classes of the model"
    )


def read_class_names(path: Path | str) -> tuple[str, ...]:
    """The names in a text file with one class per line, in the order of a model's outputs."""
    path = with_home(path)
    check_regular_file(path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RequestError(f"{path}: expected one class name per line, got a file that fails ({reason})") from None
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if len(text) > MOST_CHARACTERS:
        given = f"more than {MOST_CHARACTERS:,} characters"
    elif twice:
        given = f"{twice[0]} twice"
    elif not names:
        given = "none"
    else:
        return names
    raise RequestError(f"{path}: expected one class name per line, each once, got {given}; correct the file")
