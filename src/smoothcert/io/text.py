"""Text from outside (file names, settings, error messages) made safe for every output: terminal, CSV, Markdown; counts,
radii and times as text."""

import csv
import difflib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any

_FORMULA = ("=", "+", "-", "@")


def printable(text: object) -> str:
    """`text` with an escape such as \\x1b in place of each character that cannot be shown.

    These are control characters, which a terminal would obey, characters that change the direction of writing, and
    lone surrogates, which stand for bytes of a file name that are not UTF-8 and cannot be written to a file.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def one_line(text: object) -> str:
    """`text` printable and on one line: each run of white space becomes one space."""
    return printable(" ".join(str(text).split()))


def error_line(error: object, most: int = 160) -> str:
    """The text of an exception on one line of at most `most` characters; its type if it has no text."""
    return one_line(error)[:most] or type(error).__name__


def named_error(error: BaseException) -> str:
    """The type and the text, if any, of an exception on one line, for an error of a user's code, which may be any."""
    return f"{type(error).__name__}: {one_line(error)[:160]}".removesuffix(": ")


def given_type(value: object) -> str:
    """The type of `value`, for messages; "the class X" for a class X that was given in place of an object."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def did_you_mean(name: object, known: Iterable[str], otherwise: str | None = None, synonyms: Iterable[str] = ()) -> str:
    """The hint "did you mean a, b?" with up to three names: `synonyms`, then names of `known` that are similar.

    If there are none, `otherwise`, or "choose one of" all of `known`.
    """
    known = list(known)
    near = list(dict.fromkeys([*synonyms, *difflib.get_close_matches(str(name), known, n=3)]))[:3]
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"choose one of {', '.join(known)}" if otherwise is None else otherwise


def parse_count(value: str | int) -> int:
    """A count that may be written as 100000, 100_000, 100k, 2M or 1e5; other texts are a ValueError."""
    text = re.sub(r"(?<=\d)_(?=\d)", "", str(value).strip().lower())
    number = re.fullmatch(r"(-?\d{1,30}(?:\.\d{1,6})?)(?:e(\d{1,2}))?([km]?)", text, re.ASCII)
    count = Fraction(number[1]) * 10 ** (int(number[2] or 0) + {"": 0, "k": 3, "m": 6}[number[3]]) if number else None
    if count is None or count.denominator != 1:
        raise ValueError("expected a whole number, such as 100000, 100k or 1e5")
    return int(count)


def counted(count: int, noun: str) -> str:
    """A number with its noun, as in "1 image" and "2,000 images"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def some_of(names: Sequence[str]) -> str:
    """Up to four names, as in "a, b and c"; of more the first three and how many follow."""
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def number_text(number: float) -> str:
    """A whole number with all its digits, as in 1,000,000; other numbers with up to six digits."""
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def radius_text(radius: float) -> str:
    """A certified radius with three decimals, rounded down: nothing beyond it is proved.

    One with at most three decimals stays as it is; a product such as 1000 * 1.001 would be rounded.
    """
    return str(Decimal(str(float(radius))).quantize(Decimal("0.001"), ROUND_FLOOR))


def duration(seconds: float) -> str:
    """A time in words, such as 1.3 s, 4 min 20 s, 8 h 42 min or 4.8 days."""
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes / (24 * 60):,.1f} days"


def rate(per_second: float) -> str:
    """A number per second: a whole one from 100 on; a smaller one with three digits, so that a slow one is not 0."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], rule: Sequence[str] | None = None) -> str:
    """A GitHub table. `titles` and `rows` are Markdown (see `escape_markdown`); `rule` aligns columns as in `---:`."""
    lines = (titles, rule or ["---"] * len(titles), *rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def natural_order(name: object) -> tuple[list[tuple[float, str]], str]:
    """A key that sorts names with their numbers as numbers: weight2 before weight10, 0.5 before 1.0."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", str(name))
    return [(float(part), "") if i % 2 else (-1.0, part) for i, part in enumerate(parts)], str(name)


def flattened(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`fields` without nesting: the keys of nested mappings are joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def escape_markdown(text: str) -> str:
    """`text` so that Markdown shows it as it is, in a table cell too. Underscores inside words need no escape."""
    return re.sub(r"([\\|*`<\[\]]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", one_line(text))


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """A CSV file: floats with ten digits, None as an empty cell, text on one line.

    A spreadsheet runs text that begins with = + - or @ as a formula: an apostrophe before it prevents that. Numbers,
    also negative ones, remain numbers.
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(_cell, row) for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return f"{value:.10g}"
    text = one_line(value)
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
