"""Along the normal of a half-space everything is known: the distance, the votes, the confidence, where classes meet."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from half_space import SCORES, SIGMA
from scipy.special import expit, ndtr

from smoothcert.analysis.compared_runs import ComparedRuns, UnrestrictedAttack, smoothed
from smoothcert.analysis.interpolation import (
    SHOWN,
    Interpolation,
    draw_interpolation,
    interpolate,
    interpolation_csv,
)
from smoothcert.errors import RequestError

INDEX, N = 1, 1500
ATTACK = UnrestrictedAttack(steps=3, step_size=0.25, num_noise=8)


@pytest.fixture(scope="module")
def found(half_spaces: ComparedRuns) -> Interpolation:
    return interpolate(half_spaces, INDEX, ATTACK, points=16, num_noise=N)


def expected_confidence(score: float, steepness: float) -> float:
    """E[sigmoid(2 steepness (score + sigma e))] for a standard normal e, by Gauss and Hermite."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    return float((weights * expit(2 * steepness * (score + SIGMA * nodes))).sum() / weights.sum())


def test_the_attack_walks_along_the_normal(found: Interpolation) -> None:
    for line in found.lines:
        assert line.distance == pytest.approx(0.75, rel=1e-4)
        assert line.other == 0
        np.testing.assert_allclose(line.strip[-1] - line.strip[0], -0.75 / 4, rtol=1e-4)
        assert len(line.strip) == SHOWN


@pytest.mark.parametrize(("run", "steepness"), [(0, 1.0), (1, 3.0)])
def test_votes_and_confidence_have_their_closed_form(found: Interpolation, run: int, steepness: float) -> None:
    line = found.lines[run]
    scores = round(255 * (0.5 + SCORES[INDEX] / 4)) / 255 * 4 - 2 - 0.75 * found.ratios
    error = 4 * 0.5 / math.sqrt(N)
    np.testing.assert_allclose(line.votes[:, 1], ndtr(scores / SIGMA), atol=error)
    np.testing.assert_allclose(line.confidence[:, 1], [expected_confidence(s, steepness) for s in scores], atol=error)
    np.testing.assert_allclose(line.confidence.sum(1), 1, atol=1e-6)


def test_classes_meet_on_the_boundary(found: Interpolation) -> None:
    for line in found.lines:
        assert found.crossing(line) == pytest.approx(SCORES[INDEX] / 0.75, abs=0.05)


def test_a_crossing_is_the_first_and_lies_on_the_chord(found: Interpolation) -> None:
    ratios = np.asarray([0.0, 0.5, 1.0])

    def crossing(*label: float) -> float | None:
        confidence = np.stack([1 - np.asarray(label), np.asarray(label)], axis=1)
        line = replace(found.lines[0], confidence=confidence)
        return replace(found, ratios=ratios).crossing(line)

    assert crossing(0.8, 0.6, 0.55) is None
    assert crossing(0.4, 0.6, 0.7) == 0
    assert crossing(0.9, 0.3, 0.9) == pytest.approx(0.5 * 0.8 / 1.2)
    assert crossing(0.9, 0.6, 0.4) == pytest.approx(0.75)


def test_a_third_class_may_overtake_first(found: Interpolation) -> None:
    confidence = np.asarray([[0.1, 0.8, 0.1], [0.1, 0.4, 0.5], [0.7, 0.2, 0.1]])
    line = replace(found.lines[0], confidence=confidence, votes=confidence)
    whole = replace(found, ratios=np.asarray([0.0, 0.5, 1.0]), lines=(line,))
    assert whole.crossing(line) == pytest.approx(0.5 * 0.7 / 0.8)
    axes = draw_interpolation(whole).axes[0]
    assert "2" in [text.get_text() for text in axes.texts]


def test_the_other_class_is_never_the_label(half_spaces: ComparedRuns) -> None:
    withstands = interpolate(half_spaces, 3, ATTACK, points=2, num_noise=20)
    for line in withstands.lines:
        assert line.confidence[-1].argmax() == withstands.label == 1
        assert line.other == 0
        assert withstands.crossing(line) is None


def test_the_line_is_evaluated_under_fresh_noise(half_spaces: ComparedRuns) -> None:
    images, _ = half_spaces.images([INDEX])
    found = interpolate(half_spaces, INDEX, ATTACK, points=2, num_noise=30, seed=4)
    for line, run in zip(found.lines, half_spaces.runs, strict=True):
        noise = half_spaces.noise_blocks([INDEX], 30, 4, "estimate")
        confidence, votes = smoothed(run.classifier, images, noise)
        np.testing.assert_allclose(line.confidence[0], confidence[0], atol=1e-6)
        np.testing.assert_allclose(line.votes[0], votes[0], atol=1e-6)


def test_points_in_parts_change_nothing(half_spaces: ComparedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = interpolate(half_spaces, INDEX, ATTACK, points=5, num_noise=30)
    monkeypatch.setattr("smoothcert.analysis.compared_runs.default_batch_size", lambda *of: 40)
    parts = interpolate(half_spaces, INDEX, ATTACK, points=5, num_noise=30)
    for a, b in zip(whole.lines, parts.lines, strict=True):
        np.testing.assert_allclose(a.confidence, b.confidence, atol=1e-6)


def test_csv_and_figure(found: Interpolation) -> None:
    rows = list(csv.DictReader(io.StringIO(interpolation_csv(found))))
    assert len(rows) == 2 * 16
    assert float(rows[15]["distance"]) == pytest.approx(0.75, rel=1e-4)
    assert float(rows[20]["confidence_1"]) == pytest.approx(found.lines[1].confidence[4, 1])
    assert float(rows[20]["votes_0"]) == pytest.approx(found.lines[1].votes[4, 0])
    assert rows[20]["run"] == "steep"
    plain, voted = (draw_interpolation(found, votes=votes) for votes in (False, True))
    assert len(plain.axes) == 6, "for each run curves, images, and what was added to them"
    assert len(voted.axes[0].get_lines()) == len(plain.axes[0].get_lines()) + 2
    curves = [np.asarray(line.get_ydata()).tolist() for line in plain.axes[0].get_lines()]
    for c in (found.label, found.lines[0].other):
        assert found.lines[0].confidence[:, c].tolist() in curves


def test_wrong_requests(half_spaces: ComparedRuns) -> None:
    with pytest.raises(RequestError, match="points: expected 2 to 1,000,000"):
        interpolate(half_spaces, 0, ATTACK, points=1)
    with pytest.raises(RequestError, match="step-size: expected a number > 0, got 0"):
        UnrestrictedAttack(4, 0.0)
