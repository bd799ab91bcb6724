"""What the documentation shows is run: the new objective of the guide, and the README's Python."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from tiny import tiny_recipe

from smoothcert.checkpoint import load_run
from smoothcert.data import ImageData
from smoothcert.objectives import OBJECTIVES
from smoothcert.recipe import with_overrides
from smoothcert.training import train

ROOT = Path(__file__).parent.parent


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_objective_of_the_guide_trains(
    tmp_path: Path, tiny_data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, registration = python_blocks(ROOT / "docs/add-an-objective.md")
    assert len(source.strip().splitlines()) < 30
    module = types.ModuleType("smooth_labels_of_the_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "add-an-objective.md", "exec"), module.__dict__)
    name, kind = re.findall(r'"(\w+)": (\w+),', registration)[0]
    monkeypatch.setitem(OBJECTIVES, name, getattr(module, kind))
    recipe = with_overrides(tiny_recipe(epochs=1), [f"objective={name}", "objective.smoothing=0.2"])
    train(recipe, tiny_data, tmp_path / "run", device="cpu")
    run = load_run(tmp_path / "run")
    assert run.recipe.method == name
    assert run.finished


def test_the_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its three lines, with a small network and images in place of the reader's."""
    (source,) = python_blocks(ROOT / "README.md")
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    names: dict[str, object] = {"model": network, "images": torch.rand(2, 3, 2, 2)}
    exec(compile(source.replace("100_000", "1_000"), "README.md", "exec"), names)
    assert len(names["certificates"]) == 2


def test_the_tree_of_the_readme_names_every_module() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    package = ROOT / "src/smoothcert"
    names = {p.name for p in package.glob("*.py")} | {p.name + "/" for p in package.iterdir() if p.is_dir()}
    missing = sorted(name for name in names - {"__pycache__/"} if name not in readme)
    assert missing == []


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
