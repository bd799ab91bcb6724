"""Records: frozen, validated settings. Recipes are records that are written as YAML."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from smoothcert.errors import RequestError
from smoothcert.io.field_errors import FieldsError, describe_errors
from smoothcert.io.files import write_text_atomically


class Record(BaseModel):
    """A frozen record without unknown fields. Wrong ones are a RequestError of one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    field_prefix: ClassVar[str] = ""
    """What stands before the names of fields in messages of `model_copy`."""

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise FieldsError(type(self), error) from error

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy with changed fields, which are validated: pydantic's own method accepts any name and value."""
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return validated(type(self), {**fields, **(update or {})}, self.field_prefix)


class Recipe(Record):
    """The base of all recipes, which are written as YAML."""

    later_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that are written only if they are not at their defaults: recipes without them stay as they were."""

    def to_mapping(self) -> dict[str, Any]:
        fields = type(self).model_fields
        unset = {name for name in self.later_fields if getattr(self, name) == fields[name].default}
        return {name: value for name, value in self.model_dump(mode="json").items() if name not in unset}

    def to_yaml(self) -> str:
        text: str = yaml.safe_dump(self.to_mapping(), sort_keys=False)
        return text

    def save(self, path: Path) -> None:
        write_text_atomically(path, self.to_yaml())


R = TypeVar("R", bound=BaseModel)


def validated(kind: type[R], fields: Mapping[str, Any], prefix: str = "") -> R:
    """Make a `kind` from its fields; wrong ones, whose names begin with `prefix`, are a RequestError of one line."""
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        raise RequestError(describe_errors(kind, error, prefix)) from error


def parse_recipe(kind: type[R], fields: Mapping[str, Any], source: str) -> R:
    """Make a `kind` from the fields of `source`, such as a file, with which the RequestError of one line begins."""
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        raise RequestError(f"{source}: {describe_errors(kind, error)}") from error
