"""The public names: documented with their signatures and runnable examples, typed, and shown in an example."""

import inspect
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import smoothcert as sc

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
NAMES = sorted(set(sc.__all__) - {"__version__"})


def public(name: str) -> Any:
    """The object, also where a package has the same name (`report`)."""
    module = import_module(f"smoothcert.{sc._MODULES[name]}")
    return getattr(module, name, module)  # a public module, too


class Hidden:
    """A default value that the page shows as dots, such as a function."""

    def __repr__(self) -> str:
        return "..."


def signature(call: Any, *, bound: bool = False) -> str:
    """The signature without annotations, and without `self` if the call is `bound`."""
    found = inspect.signature(call)
    plain = (type(None), bool, int, float, str, tuple, type)
    parameters = [
        p.replace(annotation=p.empty, default=p.default if isinstance(p.default, plain) else Hidden())
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=parameters[1 if bound else 0 :], return_annotation=found.empty))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented_with_an_example(name: str) -> None:
    assert name in sc._MODULES
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    (section,) = [text for text in sections if text.startswith(f"`{name}`\n")]
    assert "```python\n" in section
    value = public(name)
    shown = re.findall(rf"^{name}\(.*\)$", section, flags=re.MULTILINE)
    if inspect.isfunction(value) or shown:
        assert shown == [f"{name}{signature(value)}"]


def test_the_layer_that_the_doctor_names_needs_no_import_of_its_own() -> None:
    code = "import smoothcert; print(smoothcert.models.Normalize((0.5,), (0.25,)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Normalize")


def test_the_page_documents_nothing_else() -> None:
    assert sorted(re.findall(r"^## `(\w+)`$", PAGE, flags=re.MULTILINE)) == NAMES
    signatures = "".join(re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL))
    methods = re.findall(r"^(\w+)\.(\w+)(\(.*\))$", signatures, flags=re.MULTILINE)
    assert len(methods) >= 5
    for owner, method, shown in methods:
        assert shown == signature(getattr(public(owner), method), bound=True)
    kind = sc.SmoothedClassifier
    own = {name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert own - {"extra_repr"} == {method for owner, method, _ in methods if owner == kind.__name__}


def test_the_page_lists_the_names_of_other_modules_that_the_guide_uses() -> None:
    """All of them exist, and no other one is imported or named in full in the documentation and the examples."""
    rows = re.findall(r"^\| `(smoothcert\.[\w.]+)` \| (.*?) \|", PAGE, flags=re.MULTILINE)
    listed = {(module, name) for module, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert [name for module, name in listed if not hasattr(import_module(module), name)] == []
    used: set[tuple[str, str]] = set()
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    for text in (page.read_text(encoding="utf-8") for page in pages):
        for module, names in re.findall(r"^from (smoothcert\.[\w.]+) import (.*)$", text, flags=re.MULTILINE):
            used |= {(module, name) for name in names.split(", ")}
        used |= {*re.findall(r"\b(smoothcert(?:\.\w+)+)\.(\w+)\(", text)}
    assert len(used) > 12
    assert used - listed <= {("smoothcert.data", "load_dataset")}, "which is sc.load_dataset"


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(block, "docs/api.md", "exec"), names)
    assert len(names["file"].rows) == 8
    assert names["rows"][0]["images"] == 8


def test_the_table_of_runs_is_the_report(tmp_path: Path) -> None:
    """Against the numbers of a file, and against the table that is written."""
    run = ROOT / "results/float32/consistency-0.5"
    (row,) = sc.report(str(run), radii=(0, 1.5), out=tmp_path / "report", formats=("csv",))
    rows = sc.read_certificates(run / "certificates" / "test-n100000.tsv.gz").rows
    radii = [r.certificate.radius for r in rows if r.certificate.prediction == r.label]
    assert row["acr"] == pytest.approx(sum(radii) / len(rows))
    assert row["certified_accuracy_1.5"] == pytest.approx(sum(r >= 1.5 for r in radii) / len(rows))
    assert [path.name for path in (tmp_path / "report").glob("*.csv")] == ["report.csv"]
    for runs in ([run], run, run.parent.glob(run.name), {str(run): None}):
        assert sc.report(runs, radii=(0, 1.5)) == [row]


def test_the_notebook_runs(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        folder = Path(shutil.copytree(trained_run, tmp_path / "quickstart" / "runs" / name))
        certificates = folder / "certificates"
        certificates.mkdir()
        for file in (ROOT / "results/float32/consistency-0.5/certificates").glob("test-n100000.*"):
            shutil.copy(file, certificates)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    source = (ROOT / "examples/notebook.py").read_text(encoding="utf-8")
    small = source.replace("IMAGES, VOTES = 100, 1_000", "IMAGES, VOTES = 20, 100")
    assert small != source
    (tmp_path / "notebook.py").write_text(small, encoding="utf-8")
    runpy.run_path(str(tmp_path / "notebook.py"))
    assert capsys.readouterr().out.count("ACR 1.645") == 2
    assert len(sc.read_certificates(tmp_path / "notebook/certificates/mine.tsv").rows) == 20
    assert (tmp_path / "notebook/curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_typed_user_project_uses_every_name() -> None:
    """`make check` runs mypy on it."""
    used = set(re.findall(r"sc\.(\w+)", (ROOT / "tests/user_project/certify_mine.py").read_text(encoding="utf-8")))
    assert used >= {*NAMES}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert settings["strict"]
    assert "tests/user_project" in settings["files"]
    assert (Path(sc.__file__).parent / "py.typed").exists()
