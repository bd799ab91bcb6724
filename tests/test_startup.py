"""What a process imports: nothing that its system lacks, nothing that its command does not need."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smoothcert import kernels
from smoothcert.certificates import read_certificates
from smoothcert.kernels import kernels_work

COMPILER = ("torch._dynamo", "torch._inductor", "sympy")


def run_python(script: str, *arguments: object, cwd: Path) -> str:
    """What `script` prints in a process that sees only what is installed."""
    command = [sys.executable, "-P", "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_python_interface_does_not_import_the_compiler(tmp_path: Path) -> None:
    script = (
        f"import smoothcert, sys; smoothcert.SmoothedClassifier; print([m for m in {COMPILER} if m in sys.modules])"
    )
    assert run_python(script, cwd=tmp_path) == "[]\n"


def test_certify_runs_without_posix_locks_and_without_the_compiler(trained_run: Path, tmp_path: Path) -> None:
    """Windows has no fcntl."""
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    script = f"""
import sys
sys.modules["fcntl"] = None
import smoothcert, smoothcert.cli
try:
    smoothcert.cli.main()
except SystemExit as end:
    print(end.code, [m for m in {COMPILER} if m in sys.modules])
"""
    options = ("--n", 100, "--max-images", 2, "--device", "cpu")
    assert run_python(script, "certify", run, *options, cwd=tmp_path).splitlines()[-1] == "0 []"
    assert len(read_certificates(run / "certificates" / "test-n100.tsv").rows) == 2
    assert list((run / "certificates").glob(".*")) == []


def test_the_compiler_takes_the_answer_about_kernels_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not trace the function, which tries to build a kernel; the mark is that of torch's decorator."""

    @torch.compiler.assume_constant_result
    def marked() -> None: ...

    assert vars(kernels_work) == vars(marked)
    monkeypatch.setattr(kernels, "triton", object())
    monkeypatch.setattr(kernels, "_tried", lambda gpu: Path(sys.executable).exists())  # cannot be traced
    compiled = torch.compile(lambda x: x + 2 * kernels.kernels_work(0), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 2
