"""Reading YAML from others: plain data of bounded size, or an error of one line."""

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from smoothcert.errors import RequestError
from smoothcert.io.files import check_regular_file
from smoothcert.io.text import error_line

MOST_BYTES = 1_000_000
"""Recipes have a few hundred bytes."""


class _PlainLoader(yaml.SafeLoader):
    """The safe loader without aliases (a few lines of them describe gigabytes), repeated keys and lone surrogates."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("expected values, got an alias (*name)")
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str):
            value.encode()  # a UnicodeEncodeError for text that cannot be written to a file
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in counts.items():
            if count > 1:
                raise yaml.YAMLError(f"expected each key once, got {name} {count} times")
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The value in `text`; a ValueError of one line if it cannot be read."""
    try:
        return yaml.load(text, _PlainLoader)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # the parser raises many kinds, such as IndexError
        raise ValueError(error_line(error, 120)) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, or a RequestError that names the file."""
    check_regular_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); give a recipe in YAML") from error
    if len(content) > MOST_BYTES:
        raise RequestError(f"{path}: expected a recipe of at most {MOST_BYTES:,} bytes, got more; give another file")
    try:
        value = parse_yaml(content.decode("utf-8"))
    except ValueError as error:
        raise RequestError(f"{path}: not YAML ({error}); see `smoothcert presets NAME`") from error
    if not isinstance(value, dict):
        given = "an empty file" if value is None else type(value).__name__
        raise RequestError(f"{path}: expected a mapping of recipe fields, got {given}; see `smoothcert presets NAME`")
    if not all(isinstance(key, str) for key in value):
        raise RequestError(f"{path}: expected names of fields as keys, got others; see `smoothcert presets NAME`")
    return value
