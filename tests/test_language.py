"""Plain English: phrases that readers stumbled over do not return to the package, the documentation or the tests."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UNITS = "epoch|image|run|file|panel|row|class|step|kernel|vote|input|batch|line|noise|radius|figure|second"
PHRASES = {
    f"(line|row|list|column|ratio|number|wnid|vote|seconds|microseconds|bytes) an? ({UNITS})": "one ... per ...",
    "told": "reported, known, given",
    "(go|goes|going|went) on": "continue",
    "(stands? )?beside": "next to",
    "reckon(s|ed|ing)?": "estimate, extrapolate",
    "(come|comes|came) to (be|so|more|less|n|the same|[0-9]+)": "amount to, reach, become",
    "by (itself|themselves)": "alone, automatically",
    "one's own": "user, your own",
    "so many": "this many, n",
    "(for )?such is": "because",
    "so_far": "the name of what is counted",
    "what (became|has become) of": "the outcome of",
    "(has|have) come (furthest|so far)|how far .{1,30} has come": "the most advanced, the state of",
    "none the worse": "still valid",
    "the house": "source layout",
}
"""Phrase -> what to write in its place."""

ALLOWED = {
    "docs/reproduce.md": "shows what a command prints",
    "src/smoothcert/report/document.py": "the heading of published rows in committed reports",
}
"""Path of a file -> the reason why it may contain such a phrase."""


def pattern(phrase: str) -> re.Pattern[str]:
    """Return a pattern for whole words, also across lines and in snake_case names."""
    words = phrase.replace(" ", r"(?:_|[\s#]+)")
    return re.compile(rf"(?<![a-z])(?:{words})(?![a-z])", re.IGNORECASE)


PATTERNS = {pattern(phrase): instead for phrase, instead in PHRASES.items()}
ANY = pattern("|".join(PHRASES))


def texts() -> list[Path]:
    folders = (ROOT / name for name in ("src", "docs", "tests", "examples", "benchmarks"))
    paths = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md"))
    return sorted({*paths, ROOT / "README.md", ROOT / "CONTRIBUTING.md"} - {Path(__file__)})


def problems(text: str) -> list[str]:
    """Return "line: phrase; write ..." for each phrase in `text`."""
    if not ANY.search(text):
        return []
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())!r}; write: {instead}"
        for expression, instead in PATTERNS.items()
        for match in expression.finditer(text)
    ]


def test_archaic_phrases_are_not_used() -> None:
    checked = {path.relative_to(ROOT).as_posix(): path for path in texts()}
    found = {name: problems(path.read_text(encoding="utf-8")) for name, path in checked.items() if name not in ALLOWED}
    assert [f"{name}, {problem}" for name, problem in found.items() for problem in problem] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Prints a line an epoch.", 1),
        ("What failed is told, and\n    # training goes\n    # on.", 2),
        ("def test_problems_are_told() -> None:", 1),
        ("The total is printed next to the published one, once per epoch. Untold, besides, goes only.", 0),
    ],
)
def test_phrases_are_recognised(text: str, count: int) -> None:
    assert len(problems(text)) == count
