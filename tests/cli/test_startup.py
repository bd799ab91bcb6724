"""Start of a process: commands import nothing that the system lacks and nothing that they do not need."""

import importlib
import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import tiny_recipe

from smoothcert import cli
from smoothcert.certification.certificates import read_certificates
from smoothcert.data import ImageData
from smoothcert.models import kernels
from smoothcert.models.kernels import kernels_work
from smoothcert.training.loop import train

COMPILER = ("torch._dynamo", "torch._inductor", "sympy")


def run_python(script: str, *arguments: object, cwd: Path) -> str:
    """Return what `script` prints in a process that imports only what is installed."""
    command = [sys.executable, "-P", "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_certify_and_python_interface_need_no_posix_locks_and_no_compiler(tiny_data: ImageData, tmp_path: Path) -> None:
    """Windows has no fcntl."""
    few = tiny_data.subset(torch.arange(64))
    run = tmp_path / "run"
    train(tiny_recipe(model="lenet", epochs=1), few, run, device="cpu")  # a network that the other process knows
    script = f"""
import sys
sys.modules["fcntl"] = None
import smoothcert, smoothcert.cli
smoothcert.SmoothedClassifier
try:
    smoothcert.cli.main()
except SystemExit as end:
    print(end.code, [m for m in {(*COMPILER, "requests")} if m in sys.modules])
"""
    options = ("--n", 100, "--max-images", 2, "--device", "cpu")
    assert run_python(script, "certify", run, *options, cwd=tmp_path).splitlines()[-1] == "0 []"
    assert len(read_certificates(run / "certificates" / "test-n100.tsv").rows) == 2
    assert list((run / "certificates").glob(".*")) == []


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("presets", 0),
        ("presets mnist/smoothmix --sigma 1.0", 0),
        ("objectives consistency", 0),
        ("datasets", 0),
        ("certify runs/nope", 2),
        ("predict runs/nope x.png", 2),
        ("predict RUN nope.png", 2),
        ("attack runs/nope", 2),
        ("attack RUN --certificates nope.tsv", 2),
        ("recertify nope.tsv --alpha 1e-4", 2),
        ("import nope.pth --sigma 0.5 --out runs/new", 2),
        ("report runs/nope", 2),
        ("analyze margins runs/nope", 2),
        ("train --out runs/nope --resume", 2),
        ("train --out runs/new --preset mnist/nope", 2),
        ("train --out runs/new --recipe nope.yaml", 2),
        ("train --out runs/new --preset mnist/gaussian --set dataset=folder:nope", 2),
        ("certify --model net.py:build --dataset npz:nope.npz --sigma 0.5 --out runs/new", 2),
        ("reproduce nope/table", 2),
    ],
)
def test_commands_that_need_no_torch_do_not_import_it(
    command: str, code: int, trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes seconds to import. Here it cannot be imported, and the package is imported anew."""
    monkeypatch.chdir(tmp_path)
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("smoothcert", "torch")}
    try:
        for name in kept:
            del sys.modules[name]
        sys.modules["torch"] = None  # type: ignore[assignment]
        fresh = importlib.import_module("smoothcert.cli")
        monkeypatch.setattr(sys, "argv", ["smoothcert", *command.replace("RUN", str(trained_run)).split()])
        with pytest.raises(SystemExit) as end:
            fresh.main()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("smoothcert", "torch")]:
            del sys.modules[name]
        sys.modules.update(kept)
    assert end.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_compiler_treats_kernels_work_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not trace the function, which tries to build a kernel; the mark is that of torch's decorator."""

    @torch.compiler.assume_constant_result
    def marked() -> None: ...

    assert vars(kernels_work) == vars(marked)
    monkeypatch.setattr(kernels, "triton", object())
    monkeypatch.setattr(kernels, "_tried", lambda gpu: Path(sys.executable).exists())  # cannot be traced
    compiled = torch.compile(lambda x: x + 2 * kernels.kernels_work(0), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 2


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for another process")
def test_interrupt_during_imports_prints_one_line(tmp_path: Path) -> None:
    """The import of the command line is slowed down, so that the interrupt comes while it runs."""
    script = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for processes in the background
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            print("importing", flush=True)
            time.sleep(300)
sys.meta_path.insert(0, Slow())
from smoothcert.__main__ import main
main()
"""
    command = [sys.executable, "-P", "-c", script, "presets"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) == (130, "smoothcert: interrupted\n")


def test_an_interrupt_while_the_program_exits_prints_nothing(tmp_path: Path) -> None:
    """An impatient user presses Ctrl-C twice; the second one comes while Python ends."""
    script = """
import atexit, signal
from smoothcert.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(signal.raise_signal, signal.SIGINT)
main()
"""
    command = [sys.executable, "-P", "-c", script, "certify", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("smoothcert: nowhere: no such run folder")


@pytest.mark.parametrize(
    ("command", "encoding", "errors"),
    [
        ("report", "ascii", "strict"),
        ("report", "cp1252", "strict"),
        ("analyze", "ascii", "surrogateescape"),
        ("analyze", "latin-1", "strict"),
    ],
)
def test_tables_are_printed_on_terminals_without_utf_8(
    command: str, encoding: str, errors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Path(__file__).parents[2] / "results" / "mnist"
    arguments = {
        "report": ["report", str(runs / "gaussian-0.5"), "--format", "csv", "--paper", "smoothmix/table2"],
        "analyze": ["analyze", "input-dependent-noise", "--format", "svg"],
    }
    monkeypatch.setattr(sys, "argv", ["smoothcert", *arguments[command], "--out", str(tmp_path)])
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit) as end:
        cli.main()
    terminal.flush()
    shown = terminal.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert end.value.code == 0
    assert "+--" in shown
    assert "wrote" in shown
    if command == "report":  # less than published at radius 1.5
        assert " -0.5 " in shown


def test_short_commands_do_not_import_large_libraries(tmp_path: Path) -> None:
    """matplotlib and scipy take longer to import than everything else that these commands need."""
    script = """
import sys
import smoothcert.cli
for command in ("--help", "certify --help", "certify runs/nope", "train --out x --preset nope"):
    sys.argv[1:] = command.split()
    try:
        smoothcert.cli.main()
    except SystemExit:
        print(command, [name for name in ("torch", "matplotlib", "scipy") if name in sys.modules])
"""
    lines = run_python(script, cwd=tmp_path).splitlines()
    assert [line for line in lines if line.endswith("[]")][-2:] == [
        "certify runs/nope []",
        "train --out x --preset nope []",
    ]
