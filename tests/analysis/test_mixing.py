"""The first ratio at which a prediction changes: against known thresholds, a fine grid, and half-spaces."""

import csv
import io

import numpy as np
import pytest
import torch
from half_space import SCORES
from torch import Tensor

from smoothcert.analysis.compared_runs import ComparedRuns, UnrestrictedAttack
from smoothcert.analysis.mixing import (
    GRID,
    HALVINGS,
    Mixing,
    Ratios,
    draw_mixing,
    first_change,
    mixing_csv,
    mixing_ratios,
)
from smoothcert.errors import RequestError

CPU = torch.device("cpu")
RESOLUTION = 1 / (GRID * 2**HALVINGS)
ATTACK = UnrestrictedAttack(steps=3, step_size=0.25, num_noise=8)
"""As far as 0.75: the image at 0.9 withstands it."""


def test_known_thresholds_are_found_to_the_resolution() -> None:
    thresholds = torch.tensor([-0.3, 0.0, 1e-9, 0.123, 0.5, 0.77777, 0.9999, 1.0, 1.01], dtype=torch.float64)
    found = first_change(lambda positions, ratios: thresholds[positions] - ratios, len(thresholds), CPU)
    assert found[:2].tolist() == [0, 0]
    assert found[-1] == torch.inf
    inside = found[2:-1] - thresholds[2:-1]
    assert (inside >= 0).all()
    assert (inside <= RESOLUTION).all()


def test_a_change_that_is_undone_later_counts() -> None:
    phases = torch.rand(40, generator=torch.Generator().manual_seed(1)).double()

    def ahead(positions: Tensor, ratios: Tensor) -> Tensor:
        return torch.cos(6 * ratios + 6 * phases[positions]) + 0.3

    found = first_change(ahead, len(phases), CPU)
    fine = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    for i, ratio in enumerate(found.tolist()):
        changed = ahead(torch.full_like(fine, i).long(), fine) <= 0
        expected = float(fine[changed][0]) if changed.any() else float("inf")
        assert ratio == pytest.approx(expected, abs=RESOLUTION + 1e-4)


def test_images_that_have_changed_are_not_looked_at_again() -> None:
    asked: list[int] = []

    def ahead(positions: Tensor, ratios: Tensor) -> Tensor:
        asked.append(len(positions))
        return 0.1 - ratios

    first_change(ahead, 7, CPU)
    assert asked == [7] * 3 + [7] * HALVINGS


@pytest.fixture(scope="module")
def mixing(half_spaces: ComparedRuns) -> Mixing:
    return mixing_ratios(half_spaces, range(4), ATTACK, num_noise=200)


def test_ratios_of_half_spaces(mixing: Mixing) -> None:
    for run in mixing.runs:
        assert run.ratio[:2] == pytest.approx([score / 0.75 for score in SCORES[:2]], abs=0.06)
        assert run.ratio[2:].tolist() == [0, np.inf]
        assert run.distance == pytest.approx(0.75, rel=1e-3)
        assert (run.wrong_from_the_start, run.never_changes) == (0.25, 0.25)


def test_an_image_does_not_depend_on_its_neighbours(mixing: Mixing, half_spaces: ComparedRuns) -> None:
    # Image 2 is wrong from the start: those after it move up in what is left to look at.
    after = mixing_ratios(half_spaces, [2, 1], ATTACK, num_noise=200)
    assert [run.ratio[1] for run in after.runs] == [run.ratio[1] for run in mixing.runs]


def test_progress_counts_the_images_of_each_run(half_spaces: ComparedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoothcert.analysis.compared_runs.default_batch_size", lambda *of: 40)
    seen: list[tuple[str, int]] = []
    mixing_ratios(half_spaces, [0, 1, 2], ATTACK, num_noise=20, on_progress=lambda *at: seen.append(at))
    assert seen == [("flat", 2), ("flat", 3), ("steep", 2), ("steep", 3)]


def test_median_counts_images_that_never_change() -> None:
    assert Ratios("a", np.asarray([0.0, 0.2, np.inf]), np.ones(3)).median == 0.2
    assert np.isinf(Ratios("a", np.asarray([0.2, np.inf, np.inf]), np.ones(3)).median)


def test_csv_and_figure(mixing: Mixing) -> None:
    rows = list(csv.DictReader(io.StringIO(mixing_csv(mixing))))
    assert [row["index"] for row in rows] == ["0", "1", "2", "3"] * 2
    assert [float(row["ratio"]) for row in rows[4:]] == pytest.approx(mixing.runs[1].ratio.tolist())
    figure = draw_mixing(mixing)
    assert [np.asarray(line.get_ydata()).max() for line in figure.axes[0].get_lines()] == [75, 75]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    lengths = [float(np.median(run.distance)) for run in mixing.runs]
    assert texts == [
        f"{name}: 25% right at every ratio; ratio 1 is L2 length {length:.2f} (median)"
        for name, length in zip(("flat", "steep"), lengths, strict=True)
    ]


def test_wrong_requests(half_spaces: ComparedRuns) -> None:
    with pytest.raises(RequestError, match="at least one image"):
        mixing_ratios(half_spaces, [], ATTACK)
    with pytest.raises(RequestError, match="n: expected 1 to"):
        mixing_ratios(half_spaces, [0], ATTACK, num_noise=0)
