"""`smoothcert quickstart` end to end: three methods trained and certified, ACR in the published order."""

from importlib import import_module
from pathlib import Path

import pytest

from smoothcert.certification.certificates import read_certificates
from smoothcert.report import average_certified_radius

quickstart = import_module("smoothcert.cli.quickstart")  # the package has a command of that name


@pytest.mark.slow
def test_the_published_order_shows_on_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaussian below Consistency and below SmoothMix at sigma 0.5, with half the epochs of the quickstart."""
    budget = [change for change in quickstart.BUDGET if not change.startswith(("epochs", "learning_rate_drops"))]
    monkeypatch.setattr(quickstart, "BUDGET", (*budget, "epochs=1", "learning_rate_drops=[]"))
    monkeypatch.setattr(quickstart, "VOTES", 400)
    quickstart.run_quickstart(tmp_path)
    acr = {
        folder.name: average_certified_radius(read_certificates(folder / "certificates" / "test-n400.tsv").rows)
        for folder in (tmp_path / "runs").iterdir()
    }
    assert acr["gaussian"] < acr["consistency"]
    assert acr["gaussian"] < acr["smoothmix"]
    report = (tmp_path / "report" / "report.md").read_text()
    assert all(f"{value:.3f}" in report for value in acr.values())
    assert (tmp_path / "report" / "curves.png").stat().st_size > 10_000
    # What is finished is not done again.
    before = (tmp_path / "runs/smoothmix/state.pt").stat().st_mtime_ns
    quickstart.run_quickstart(tmp_path)
    assert (tmp_path / "runs/smoothmix/state.pt").stat().st_mtime_ns == before
