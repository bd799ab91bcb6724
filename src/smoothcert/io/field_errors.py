"""Turn the validation errors of pydantic into one line for the user."""

import inspect
import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from smoothcert.errors import RequestError
from smoothcert.io.text import did_you_mean, printable

MOST_SHOWN = 120
LETTERS = {
    **dict.fromkeys(("lambda", "lambda_", "lam", "lbd"), "weight"),
    **{"m": "num_noise", "lr": "learning_rate"},
}
"""What papers call a hyper-parameter -> its field."""
PLAIN_WORDS = {
    **{"greater than or equal to": "at least", "less than or equal to": "at most"},
    "a valid tuple": "a list, such as [30, 60] or [] for none",
}
"""Words of pydantic -> those of our messages."""


class FieldsError(RequestError):
    """One line about the wrong fields of a record, and what pydantic found, for a record that contains this one."""

    def __init__(self, kind: type[BaseModel], error: ValidationError) -> None:
        super().__init__(describe_errors(kind, error))
        self.kind = kind
        self.error = error


def describe_errors(kind: type[BaseModel], error: ValidationError, prefix: str = "") -> str:
    """One line: for each wrong field its name, what was expected and what was given; similar names for unknown keys."""
    return "; ".join(_describe(kind, detail, prefix) for detail in error.errors())


def field_descriptions(kind: type[BaseModel]) -> dict[str, str]:
    """The descriptions of all fields by name; fields of nested models have a dot in their names.

    A field that may be one of several models, which is declared as their abstract base, is not described further.
    """
    descriptions: dict[str, str] = {}
    for name, field in kind.model_fields.items():
        descriptions[name] = field.description or ""
        for part in (field.annotation, *get_args(field.annotation)):
            # Not `kind` again, which would not end: the teacher in a recipe is a recipe.
            known = isinstance(part, type) and issubclass(part, BaseModel) and part is not kind
            if known and not inspect.isabstract(part):
                descriptions |= {f"{name}.{inner}": text for inner, text in field_descriptions(part).items()}
    return descriptions


def _synonyms(kind: type[BaseModel], field: str, prefix: str) -> list[str]:
    """Fields that an unknown name may mean, by a symbol in their description, such as (lambda), or by initials."""
    word = field.rpartition(".")[2].lower()
    fields = field_descriptions(kind)
    letter = LETTERS.get(word)
    # The fields of an objective depend on the method: those of all papers are known.
    inside = [f"objective.{letter}"] if letter not in fields and letter is not None and "objective" in fields else []
    return inside + [
        prefix + name
        for name, description in fields.items()
        if f"({word})" in description
        or name == letter
        or ("_" in name and word == "".join(part[:1] for part in name.split("_")))
    ]


def _describe(kind: type[BaseModel], error: Any, prefix: str) -> str:
    field = prefix + ".".join(str(part) for part in error["loc"])
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, FieldsError):  # of a record in a record, or of the record itself
        return describe_errors(cause.kind, cause.error, f"{field}." if error["loc"] else prefix)
    if error["type"] == "extra_forbidden":
        names = [prefix + name for name in field_descriptions(kind)]
        hint = did_you_mean(field, sorted(names), synonyms=_synonyms(kind, field, prefix))
        return f"{shown(field)}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{field}: missing; it must be given"
    if error["type"] == "value_error":
        # Our own validators name the field, the value and what is allowed.
        return str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "frozen_instance":
        example = f"`{error['loc'][-1]}: float = 1.0`"
        return f"{field}: expected no assignment to self, got one; declare {example} in the class, or use a variable"
    expected = in_plain_words(str(error["msg"])).removeprefix("expected ")
    return f"{field}: expected {expected}, got {shown(repr(error['input']))}"


def in_plain_words(message: str) -> str:
    """A message of pydantic, or one that ends with it, in the words of our messages."""
    message = re.sub(r", unable to parse .*", "", message).replace("Input should be ", "expected ", 1)
    for words, plain in PLAIN_WORDS.items():
        message = message.replace(words, plain)
    return re.sub(r"0\.00000\d+", lambda number: f"{float(number[0]):g}", message)  # pydantic writes out all zeros


def shown(text: str) -> str:
    """`text` for a message: printable and at most MOST_SHOWN characters."""
    return printable(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}...")
