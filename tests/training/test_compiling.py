"""Whether compiling a run saves time."""

import math
import os
from pathlib import Path

import pytest

from smoothcert.models import CifarResNet, LeNet
from smoothcert.training.captured_step import keep_compiled_kernels, seconds_worth_compiling


def test_short_runs_are_not_compiled_and_long_ones_are() -> None:
    assert 10 < seconds_worth_compiling(LeNet(10), "auto") < 60


def test_a_deep_network_needs_a_longer_run() -> None:
    assert 100 < seconds_worth_compiling(CifarResNet(110, 10), "auto") < 1000


def test_networks_with_our_kernels_are_not_compiled() -> None:
    assert seconds_worth_compiling(CifarResNet(110, 10), "auto", by_kernels=True) == math.inf
    assert seconds_worth_compiling(CifarResNet(110, 10), "always", by_kernels=True) == 0
    assert seconds_worth_compiling(LeNet(10), "auto", by_kernels=True) < 60, "compiling fuses the other layers"


def test_always_and_never_override_the_estimate() -> None:
    assert seconds_worth_compiling(LeNet(10), "always") == 0
    assert seconds_worth_compiling(LeNet(10), "never") == math.inf


def test_kernel_cache_is_next_to_the_data_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOOTHCERT_DATA", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep_compiled_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")
