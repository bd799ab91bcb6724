"""Margins of linear classifiers are normal: their mean, spread and share below 0 are known."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from half_space import SCORES, SIGMA
from scipy.special import ndtr

from smoothcert.analysis.compared_runs import ComparedRuns
from smoothcert.analysis.margins import draw_margins, margins_csv, margins_of, margins_under_noise
from smoothcert.errors import RequestError
from smoothcert.noise import Gaussian


def test_margins_are_differences_of_log_probabilities() -> None:
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(0)).double()
    logs = logits.log_softmax(1).tolist()
    expected = [row[3] - max(row[c] for c in (0, 1, 2, 4)) for row in logs]
    assert margins_of(logits, 3).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_margin_beyond_the_smallest_probability_is_kept() -> None:
    assert margins_of(torch.tensor([[0.0, 300.0]]), 0).tolist() == [-300.0]


def test_share_below_zero_and_moments_of_a_half_space(half_spaces: ComparedRuns) -> None:
    n, index = 4000, 1
    found = margins_under_noise(half_spaces, index, n)
    values, score = found.values["flat"], SCORES[index]
    assert len(values) == n
    assert len(np.unique(values)) > 0.99 * n, "every noise is a new one; some sums of pixels are rounded alike"
    # z_1 - z_0 = 2 s, and s is N(score, sigma^2) under noise; pixels are whole numbers, so scores are off by 0.008.
    assert values.mean() == pytest.approx(2 * score, abs=4 * 2 * SIGMA / math.sqrt(n) + 0.016)
    assert values.std() == pytest.approx(2 * SIGMA, rel=0.05)
    chance = ndtr(-score / SIGMA)
    assert found.share_below_zero("flat") == pytest.approx(chance, abs=4 * math.sqrt(chance / n) + 0.01)


def test_all_runs_see_the_same_noise(half_spaces: ComparedRuns) -> None:
    found = margins_under_noise(half_spaces, 0, 700)
    assert len(found.values["flat"]) == 700
    np.testing.assert_allclose(found.values["steep"], 3 * found.values["flat"], rtol=1e-4, atol=1e-5)


def test_a_seed_repeats_and_another_does_not(half_spaces: ComparedRuns) -> None:
    first, again, other = (margins_under_noise(half_spaces, 0, 50, seed).values["flat"] for seed in (1, 1, 2))
    assert (first == again).all()
    assert not (first == other).any()


def test_csv_has_one_row_per_noise_and_one_column_per_run(half_spaces: ComparedRuns) -> None:
    found = margins_under_noise(half_spaces, 0, 20)
    lines = margins_csv(found).splitlines()
    assert lines[0] == "noise,flat,steep"
    columns = np.asarray([[float(cell) for cell in line.split(",")] for line in lines[1:]]).T
    np.testing.assert_allclose(columns, [np.arange(20), found.values["flat"], found.values["steep"]], rtol=1e-8)


@pytest.mark.parametrize("sigma", [SIGMA, 1e-6])
def test_histograms_hold_every_noise_and_labels_the_share(half_spaces: ComparedRuns, sigma: float) -> None:
    found = margins_under_noise(replace(half_spaces, noise=Gaussian(sigma)), 2, 400)
    figure = draw_margins(found)
    outlines = [patch for patch in figure.axes[0].patches if hasattr(patch, "get_data")]
    for patch in outlines:
        assert patch.get_data().values.sum() == pytest.approx(100)
        assert np.abs(patch.get_data().edges).min() < 1e-9  # no bar stands on both sides of 0
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == [f"{run}: {found.share_below_zero(run):.1%} misclassified" for run in ("flat", "steep")]


def test_outliers_stay_in_the_picture_at_its_edge(half_spaces: ComparedRuns) -> None:
    found = margins_under_noise(half_spaces, 0, 4000)
    far = replace(found, values={"flat": np.append(found.values["flat"], -1e6)})
    axes = draw_margins(far).axes[0]
    outline = next(patch for patch in axes.patches if hasattr(patch, "get_data"))
    assert outline.get_data().values.sum() == pytest.approx(100)
    assert axes.get_xlim()[0] > -100


def test_wrong_requests(half_spaces: ComparedRuns) -> None:
    with pytest.raises(RequestError, match="index: expected 0 to 3, the images of greys, got 4"):
        margins_under_noise(half_spaces, 4)
    with pytest.raises(RequestError, match="index: expected 0 to 3, the images of greys, got -1"):
        margins_under_noise(half_spaces, -1)
    with pytest.raises(RequestError, match="n: expected 1 to 1,000,000"):
        margins_under_noise(half_spaces, 0, 0)
