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

ALLOWED: dict[str, str] = {}
"""Path of a file -> the reason why it may contain such a phrase."""

PENDING: tuple[str, ...] = (
    "docs/reproduce.md",
    "src/smoothcert/analysis/compared_runs.py",
    "src/smoothcert/analysis/cost.py",
    "src/smoothcert/analysis/interpolation.py",
    "src/smoothcert/analysis/margins.py",
    "src/smoothcert/analysis/mixing.py",
    "src/smoothcert/certification/attack.py",
    "src/smoothcert/certification/attack_file.py",
    "src/smoothcert/certification/certificates.py",
    "src/smoothcert/certification/certify_dataset.py",
    "src/smoothcert/certification/model_provenance.py",
    "src/smoothcert/certification/recertify.py",
    "src/smoothcert/cli/analyzing.py",
    "src/smoothcert/cli/certification.py",
    "src/smoothcert/data/__init__.py",
    "src/smoothcert/data/download.py",
    "src/smoothcert/data/image_files.py",
    "src/smoothcert/data/imagenet.py",
    "src/smoothcert/io/results.py",
    "src/smoothcert/models/__init__.py",
    "src/smoothcert/models/kernels/joined_convolution.py",
    "src/smoothcert/models/kernels/residual_kernels.py",
    "src/smoothcert/models/kernels/residual_layers.py",
    "src/smoothcert/objectives/smoothmix.py",
    "src/smoothcert/report/__init__.py",
    "src/smoothcert/report/comparison.py",
    "src/smoothcert/report/distribution.py",
    "src/smoothcert/report/document.py",
    "src/smoothcert/report/html.py",
    "src/smoothcert/report/html_gallery.py",
    "src/smoothcert/report/layout.py",
    "src/smoothcert/report/locate.py",
    "src/smoothcert/report/metrics.py",
    "src/smoothcert/report/panels.py",
    "src/smoothcert/report/rendering.py",
    "src/smoothcert/report/seeds.py",
    "src/smoothcert/report/shared_images.py",
    "src/smoothcert/report/summary.py",
    "src/smoothcert/report/tables.py",
    "src/smoothcert/smoothing/accuracy.py",
    "src/smoothcert/smoothing/integer_noise.py",
    "src/smoothcert/smoothing/rules.py",
    "src/smoothcert/smoothing/sequential.py",
    "src/smoothcert/smoothing/votes.py",
    "src/smoothcert/training/loop.py",
    "src/smoothcert/training/metrics.py",
    "src/smoothcert/training/recipe.py",
    "src/smoothcert/training/setup.py",
    "src/smoothcert/training/step.py",
    "tests/analysis/test_cost.py",
    "tests/analysis/test_margins.py",
    "tests/certification/test_certification.py",
    "tests/certification/test_model_provenance.py",
    "tests/cli/test_certification_commands.py",
    "tests/data/local_mirror.py",
    "tests/data/test_imagenet.py",
    "tests/fuzz/README.md",
    "tests/fuzz/fuzz_targets.py",
    "tests/fuzz/test_fuzz.py",
    "tests/models/kernels/test_pooled_convolution.py",
    "tests/models/kernels/test_residual_layers.py",
    "tests/models/test_small_convolutions.py",
    "tests/report/test_comparison.py",
    "tests/report/test_distribution.py",
    "tests/report/test_html.py",
    "tests/report/test_locate.py",
    "tests/report/test_report_command.py",
    "tests/report/test_shared_images.py",
    "tests/report/test_summary.py",
    "tests/smoothing/test_integer_noise.py",
    "tests/smoothing/test_rules.py",
    "tests/training/test_compiling.py",
    "tests/training/test_import_checkpoint.py",
    "tests/training/test_loop.py",
    "tests/training/test_loop_gpu.py",
)
"""Files that are still to be rewritten; this list only becomes shorter."""


def pattern(phrase: str) -> re.Pattern[str]:
    """Return a pattern for whole words, also across lines and in snake_case names."""
    words = phrase.replace(" ", r"(?:_|[\s#]+)")
    return re.compile(rf"(?<![a-z])(?:{words})(?![a-z])", re.IGNORECASE)


PATTERNS = {pattern(phrase): instead for phrase, instead in PHRASES.items()}


def texts() -> list[Path]:
    folders = (ROOT / name for name in ("src", "docs", "tests"))
    paths = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md"))
    return sorted({*paths, ROOT / "README.md", ROOT / "CONTRIBUTING.md"} - {Path(__file__)})


def problems(text: str) -> list[str]:
    """Return "line: phrase; write ..." for each phrase in `text`."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())!r}; write: {instead}"
        for expression, instead in PATTERNS.items()
        for match in expression.finditer(text)
    ]


def test_archaic_phrases_are_not_used() -> None:
    skipped = {*ALLOWED, *PENDING}
    checked = {path.relative_to(ROOT).as_posix(): path for path in texts()}
    found = {name: problems(path.read_text(encoding="utf-8")) for name, path in checked.items() if name not in skipped}
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
