"""ImageNet folders through training and certification, in one process and in two: same images, same losses."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from data.photographs import write_photograph
from processes import run_together

from smoothcert import cli
from smoothcert.certification.certificates import read_certificates

MODEL = """
from torch import nn

def small(num_classes):
    "Without batch norm, whose statistics would depend on the number of processes."
    return nn.Sequential(nn.Conv2d(3, 4, 7, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 28 * 28, num_classes))
"""
RECIPE = """
{dataset: imagenet, model: 'photo_net:small', sigma: 0.25, objective: {name: consistency, num_noise: 2, weight: 1},
 epochs: 1, batch_size: 8, learning_rate: 0.01, learning_rate_drops: []}
"""


def run_command(folder: Path, *arguments: str) -> object:
    """The exit code of `smoothcert` in `folder`."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["smoothcert", *arguments]
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


@pytest.mark.slow
def test_two_steps_on_generated_photographs(
    tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, images in (("train", 4), ("val", 1)):
        for c, wnid in enumerate(("n01440764", "n01443537")):
            for i in range(images):
                name = f"{wnid}_{i}.JPEG"
                write_photograph(
                    tmp_path / "imagenet" / split / wnid / name, 10 * c + i, width=300 + 20 * i, height=260
                )
    (tmp_path / "photo_net.py").write_text(MODEL)
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SMOOTHCERT_DATA", str(tmp_path))
    options = ("train", "--recipe", "r.yaml", "--model", "photo_net:small", "--device", "cpu", "--out")
    assert run_together(run_command, tmp_path, *options, "two") == [0, 0]
    code, _, errors = run_cli(*options, "one")
    assert code == 0, errors
    one, two = (json.loads((tmp_path / name / "metrics.jsonl").read_text()) for name in ("one", "two"))
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
    assert one["kl"] == pytest.approx(two["kl"], rel=1e-2, abs=1e-6)
    certify = ("certify", "one", "--model", "photo_net:small", "--n", "100", "--device", "cpu")
    assert run_cli(*certify)[0] == 0
    rows = read_certificates(tmp_path / "one/certificates/test-n100.tsv").rows
    assert [row.label for row in rows] == [0, 1]
