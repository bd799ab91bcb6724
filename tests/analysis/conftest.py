"""Half-spaces as runs that the analyses compare; small run folders."""

from pathlib import Path

import pytest
import torch
from half_space import SCORES, SIGMA, HalfSpace, untrained_run

from smoothcert.analysis.compared_runs import ComparedRun, ComparedRuns
from smoothcert.data import ImageData
from smoothcert.noise import Gaussian


@pytest.fixture(scope="session")
def half_spaces() -> ComparedRuns:
    """Two half-spaces with the same boundary, the second three times as steep, on four grey images."""
    greys = torch.tensor([255 * (0.5 + score / 4) for score in SCORES]).round().to(torch.uint8)
    images = greys.view(-1, 1, 1, 1).expand(-1, 1, 4, 4).clone()
    data = ImageData(images, torch.ones(len(SCORES), dtype=torch.int64), 2, "greys", "test")
    runs = (ComparedRun("flat", HalfSpace(1.0), "flat"), ComparedRun("steep", HalfSpace(3.0), "steep"))
    return ComparedRuns(runs, data, Gaussian(SIGMA), torch.device("cpu"))


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two run folders that no test changes."""
    folder = tmp_path_factory.mktemp("runs")
    return [untrained_run(folder / f"run{seed}", seed=seed) for seed in (0, 1)]
