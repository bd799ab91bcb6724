"""The distribution of p is that of the votes."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from smoothcert.certification.certificates import CertificatesFile, CertifiedImage, read_certificates
from smoothcert.certification.columns import Floats
from smoothcert.report import summarize
from smoothcert.report.distribution import LEAST_SHOWN, cumulative, draw_distribution, probits_of
from smoothcert.report.style import pictures_of
from smoothcert.smoothing.certificate import Certificate

from .conftest import our_file

NORMAL = NormalDist()
# Votes for the label (class 3) out of 1000.
RIGHT_VOTES = (1000, 1000, 999, 980, 800, 501, 500, 300, 4, 0)


def voted(index: int, votes: int, n: int = 1000) -> CertifiedImage:
    """An image of class 3 with `votes` of its n votes for that class; its radius is no part of what is drawn."""
    pairs = tuple(sorted(((c, k) for c, k in ((3, votes), (5, n - votes)) if k), key=lambda pair: -pair[1]))
    return CertifiedImage(index, 3, Certificate(pairs[0][0], 0.1, 10, n, pairs[0][1], pairs), 0.5)


def bare(index: int, predict: int, radius: float) -> CertifiedImage:
    return CertifiedImage(index, 3, Certificate(predict, radius, 0, 0, 0, ()), 0.5)


def voted_file(votes: Sequence[int] = RIGHT_VOTES, n: int = 1000, **settings: object) -> CertificatesFile:
    return our_file([voted(i, k, n) for i, k in enumerate(votes)], **settings)


def only(stored: CertificatesFile) -> Floats | None:
    return probits_of(summarize(stored, "a", ()))


def drawn(files: Sequence[tuple[str, CertificatesFile]]) -> Figure:
    figure = draw_distribution([summarize(file, name, ()) for name, file in files])
    assert figure is not None
    return figure


def held(x: np.ndarray, y: np.ndarray, at: float) -> float:  # type: ignore[type-arg]
    return float(y[np.flatnonzero(x <= at)[-1]])


def test_the_curve_is_the_share_of_images_with_at_most_that_vote_share() -> None:
    distribution = only(voted_file())
    assert distribution is not None
    x, y = cumulative(distribution, 9.0)
    assert x[0] == pytest.approx(NORMAL.inv_cdf(LEAST_SHOWN))
    assert (np.diff(x) >= 0).all()
    for p in (0.0101, 0.25, 0.3001, 0.4999, 0.5001, 0.5011, 0.79, 0.81, 0.979, 0.981, 0.9989, 0.9991, 0.999999):
        counted = sum(votes / 1000 <= p for votes in RIGHT_VOTES) / len(RIGHT_VOTES)
        assert held(x, y, NORMAL.inv_cdf(p)) == pytest.approx(counted)
    assert held(x, y, NORMAL.inv_cdf(0.3) + 1e-9) == pytest.approx(0.3), "the image at p itself counts"
    assert held(x, y, NORMAL.inv_cdf(0.3) - 1e-9) == pytest.approx(0.2)
    assert y[-1] == pytest.approx(0.8), "the images whose votes all agree are not counted"
    assert x[-1] == 9.0
    assert np.isposinf(distribution).mean() == pytest.approx(0.2)


def test_votes_of_several_stages_have_no_distribution() -> None:
    stages = voted_file(cascade=[0.5, 0.25])
    assert only(stages) is None
    note = drawn([("stages", stages), ("loud", voted_file())]).get_supxlabel()
    assert note == "not drawn, without votes of one classifier for every image: stages"


def test_a_wrong_image_counts_by_its_label_not_by_the_winner() -> None:
    unanimous_for_another = only(voted_file([0, 0, 1000]))
    assert unanimous_for_another is not None
    assert np.isposinf(unanimous_for_another).mean() == pytest.approx(1 / 3)
    assert (unanimous_for_another[:2] == -math.inf).all()


def test_files_without_votes_are_named_and_not_drawn() -> None:
    silent = our_file([bare(0, 3, 0.5)])
    partly = our_file([bare(0, 3, 0.5), voted(1, 900)])
    assert only(silent) is None
    assert only(partly) is None
    assert draw_distribution([summarize(silent, "silent", ())]) is None
    note = drawn([("silent", silent), ("loud", voted_file())]).get_supxlabel()
    assert note.startswith("not drawn")
    assert note.endswith(": silent")
    assert drawn([("loud", voted_file())]).get_supxlabel() == ""


def test_the_figure_shows_the_curve_in_percent() -> None:
    (axes, *_) = drawn([("a", voted_file())]).axes
    (curve,) = [x for x in axes.lines if x.get_label() == "Gaussian"]
    distribution = only(voted_file())
    assert distribution is not None
    x, y = cumulative(distribution, float(np.asarray(curve.get_xdata())[-1]))
    np.testing.assert_allclose(np.asarray(curve.get_xdata()), x)
    np.testing.assert_allclose(np.asarray(curve.get_ydata()), 100 * y)
    assert curve.get_drawstyle() == "steps-post"
    last_resolved = NORMAL.inv_cdf(1 - 1 / 1000)
    assert last_resolved < x[-1] == axes.get_xlim()[1], "the curve ends in the strip"
    assert (x[:-1] <= last_resolved + 1e-9).all(), "no step in the strip"


def test_ticks_are_at_the_probits_of_their_labels() -> None:
    (axes, *_) = drawn([("a", voted_file(n=100_000, votes=[99_999, 100_000]))]).axes
    labels = {text.get_text(): x for x, text in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)}
    assert list(labels) == ["0.01", "0.1", "0.5", "0.9", "0.99", "0.9999", "1"]
    for label in list(labels)[:-1]:
        assert NORMAL.cdf(labels[label]) == pytest.approx(float(label))


def test_the_upper_axis_is_the_radius_of_gaussian_noise() -> None:
    figure = drawn([("a", voted_file(sigma=0.5))])
    figure.draw_without_rendering()
    (top,) = figure.axes[0].child_axes
    low, high = figure.axes[0].get_xlim()
    assert top.get_xlim() == pytest.approx((0.5 * low, 0.5 * high))
    assert min(top.get_xticks()) == 0, "no radius below p = 1/2"
    assert not drawn([("a", voted_file(noise="laplace"))]).axes[0].child_axes
    assert not drawn([("a", voted_file(sigma=None))]).axes[0].child_axes


def test_one_panel_per_sigma_and_the_looks_of_the_other_figures() -> None:
    runs = [
        (f"{method}-{sigma}", voted_file(sigma=sigma, objective=method))
        for sigma in (1.0, 0.25)
        for method in ("gaussian", "smoothmix")
    ]
    figure = drawn(runs)
    assert [axes.get_title() for axes in figure.axes] == ["MNIST, σ = 0.25", "MNIST, σ = 1.00"]
    for axes in figure.axes:
        named = [line for line in axes.lines if str(line.get_label())[0] != "_"]
        assert [line.get_label() for line in named] == ["Gaussian", "SmoothMix"]
        assert [line.get_color() for line in named] == ["#4d4d4d", "#d55e00"]


def test_a_users_matplotlib_settings_change_nothing(field_file: Path) -> None:
    runs = [("$a_b$", voted_file()), ("theirs", read_certificates(field_file))]
    first = pictures_of("d", lambda: drawn(runs), ["svg"])
    with rc_context({"text.usetex": True}):
        assert pictures_of("d", lambda: drawn(runs), ["svg"]) == first
