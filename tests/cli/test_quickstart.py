"""`smoothcert quickstart` end to end: three methods trained and certified, ACR in the published order."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from smoothcert.certification.certificates import read_certificates
from smoothcert.data import datasets
from smoothcert.papers.reproduce.planning import QUICK_CHANGES
from smoothcert.report import style

quickstart = import_module("smoothcert.cli.quickstart")  # the package has a command of that name


@pytest.mark.slow
def test_methods_have_the_published_order_on_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaussian is below Consistency and SmoothMix at sigma 0.5: a small network, 2,400 images, and 25 test images."""
    load = datasets.load_dataset
    few = {"train": slice(2400), "test": slice(None)}
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, split, *_, **__: (d := load(name, split)).subset(torch.arange(len(d))[few[split]]),
    )
    budget = [change for change in QUICK_CHANGES["mnist"] if not change.startswith(("epochs", "learning_rate_drops"))]
    monkeypatch.setitem(QUICK_CHANGES, "mnist", (*budget, "model=tiny", "epochs=1", "learning_rate_drops=[]"))
    monkeypatch.setattr(quickstart, "VOTES", 100)
    monkeypatch.setattr(quickstart, "SKIP", 80)
    quickstart.quickstart(tmp_path)
    acr = {
        folder.name: read_certificates(folder / "certificates" / "test-n100.tsv").acr
        for folder in (tmp_path / "runs").iterdir()
    }
    assert acr["gaussian"] < acr["consistency"]
    assert acr["gaussian"] < acr["smoothmix"]
    report = (tmp_path / "report" / "report.md").read_text()
    assert all(f"{value:.3f}" in report for value in acr.values())
    assert (tmp_path / "report" / "curves.png").stat().st_size > 10_000
    # Finished work is not repeated.
    before = (tmp_path / "runs/smoothmix/state.pt").stat().st_mtime_ns
    monkeypatch.setattr(style, "_picture", lambda figure, kind: b"a picture")
    quickstart.quickstart(tmp_path)
    assert (tmp_path / "runs/smoothmix/state.pt").stat().st_mtime_ns == before
