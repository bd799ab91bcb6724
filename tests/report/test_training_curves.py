"""Training curves show the numbers of metrics.jsonl, by sigma, with the drops of the learning rate."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from smoothcert.errors import WorkError
from smoothcert.report.style import pictures_of
from smoothcert.report.trained_run import TrainedRun, read_run
from smoothcert.report.training_curves import draw_training_curves

MakeTraining = Callable[..., tuple[str, Path]]


@pytest.fixture
def training(tmp_path: Path) -> MakeTraining:
    """training(name, epochs=..., sigma=..., method=..., scale=..., terms=...) writes a run folder of falling losses."""

    def make(
        name: str,
        epochs: int = 6,
        sigma: float | None = 0.5,
        method: str = "gaussian",
        scale: float = 1.0,
        terms: Mapping[str, float] | None = None,
    ) -> tuple[str, Path]:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        if sigma is not None:
            recipe = f"sigma: {sigma}\ndataset: mnist\nmodel: lenet\nobjective:\n  name: {method}\n"
            (folder / "recipe.yaml").write_text(recipe)
        lines = []
        for epoch in range(epochs):
            loss = scale * 0.5**epoch
            entry = {"epoch": epoch, "learning_rate": 0.1 if epoch < 3 else 0.01, "loss": loss}
            entry |= {"noisy_accuracy": 1 - 0.4 * scale * 0.8**epoch, "cross_entropy": loss / 2, "seconds": 1.0}
            entry |= {term: weight * loss for term, weight in (terms or {}).items()}
            lines.append(json.dumps(entry) + "\n")
        (folder / "metrics.jsonl").write_text("".join(lines))
        return name, folder

    return make


def read(runs: Sequence[tuple[str, Path]]) -> list[TrainedRun]:
    return [read_run(name, folder) for name, folder in runs]


def figure_of(*runs: tuple[str, Path]) -> Figure:
    figure = draw_training_curves(read(runs))
    assert figure is not None
    return figure


def curves(axes: Axes) -> dict[str, Line2D]:
    return {str(line.get_label()): line for line in axes.lines if str(line.get_label())[0] != "_"}


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_lines_are_the_metrics(training: MakeTraining) -> None:
    figure = figure_of(training("a"), training("b", method="smoothmix", scale=0.5))
    loss, accuracy = figure.axes
    assert list(curves(loss)) == list(curves(accuracy)) == ["Gaussian", "SmoothMix"]
    for label, scale in (("Gaussian", 1.0), ("SmoothMix", 0.5)):
        epochs = np.arange(6)
        np.testing.assert_array_equal(curves(loss)[label].get_xdata(), epochs)
        np.testing.assert_allclose(np.asarray(curves(loss)[label].get_ydata()), scale * 0.5**epochs)
        expected = 100 * (1 - 0.4 * scale * 0.8**epochs)
        np.testing.assert_allclose(np.asarray(curves(accuracy)[label].get_ydata()), expected)
    assert [axes.get_xlabel() for axes in figure.axes] == ["epoch", "epoch"]
    assert "loss" in loss.get_ylabel()
    assert "%" in accuracy.get_ylabel()
    assert legend_texts(figure) == ["Gaussian", "SmoothMix", "learning rate drops"]


def test_drops_of_the_learning_rate_are_marked(training: MakeTraining) -> None:
    figure = figure_of(training("a"), training("b", method="smoothmix", scale=0.5))
    for axes in figure.axes:
        marked = [line for line in axes.lines if line.get_linewidth() < 1]
        assert [list(np.asarray(line.get_xdata())) for line in marked] == [[3, 3]]
    assert "learning rate drops" in legend_texts(figure)
    name, folder = training("cosine")
    with (folder / "recipe.yaml").open("a") as recipe:
        recipe.write("schedule: cosine\n")
    for figure in (figure_of(training("c", epochs=3)), figure_of((name, folder))):
        assert not [line for axes in figure.axes for line in axes.lines if line.get_linewidth() < 1]
        assert legend_texts(figure) == ["Gaussian"]


def test_one_column_per_sigma_and_one_look_per_method(training: MakeTraining) -> None:
    runs = [
        training(f"{method}-{sigma}", sigma=sigma, method=method, scale=scale)
        for sigma in (1.0, 0.25)
        for method, scale in (("gaussian", 1.0), ("smoothmix", 0.4))
    ]
    figure = figure_of(*runs)
    assert [axes.get_title() for axes in figure.axes] == ["MNIST, LeNet, σ = 0.25", "MNIST, LeNet, σ = 1.00", "", ""]
    for axes in figure.axes:
        assert {label: line.get_color() for label, line in curves(axes).items()} == {
            "Gaussian": "#4d4d4d",
            "SmoothMix": "#d55e00",
        }


def test_each_further_term_has_a_panel_with_the_looks_of_the_legend(training: MakeTraining) -> None:
    plain = training("plain")
    consistency = training("c", method="consistency", scale=3.0, terms={"kl": 0.1, "entropy": 0.9})
    other = training("s", method="stability", scale=0.3, terms={"kl": 1.0, "stability": 2.0})
    figure = figure_of(plain, consistency, other)
    loss, _, *terms = figure.axes
    shown = {axes.get_ylabel(): curves(axes) for axes in terms}
    assert {name: list(lines) for name, lines in shown.items()} == {
        "term: entropy": ["Consistency"],
        "term: KL divergence": ["Consistency", "Stability"],
        "term: stability": ["Stability"],
    }
    np.testing.assert_allclose(
        np.asarray(shown["term: KL divergence"]["Consistency"].get_ydata()), 0.3 * 0.5 ** np.arange(6)
    )
    for lines in shown.values():
        for label, line in lines.items():
            same = curves(loss)[label]
            assert (line.get_color(), line.get_linestyle()) == (same.get_color(), same.get_linestyle())
    assert legend_texts(figure) == ["Gaussian", "Consistency", "Stability", "learning rate drops"]
    note = figure.legends[0].get_title().get_text()
    assert "own training inputs" in note
    assert "before weighting" in note


def test_a_single_run_is_named_in_the_legend(training: MakeTraining) -> None:
    figure = figure_of(training("a", method="macer", terms={"robust": 0.0}))
    assert figure.get_suptitle() == "MNIST, LeNet, σ = 0.50"
    assert legend_texts(figure) == ["MACER", "learning rate drops"]
    assert figure.axes[2].get_ylabel() == "term: robustness"
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear", "linear"], "no logarithm of 0"


def test_accuracies_are_on_a_linear_axis(training: MakeTraining) -> None:
    """Even where the first epoch is at a tenth of the last."""
    loss, accuracy = figure_of(training("a", scale=2.3)).axes
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")


def test_one_epoch_is_a_dot(training: MakeTraining) -> None:
    loss, accuracy = figure_of(training("a", epochs=1)).axes
    assert curves(loss)["Gaussian"].get_marker() == "o"
    for axes in (loss, accuracy):
        np.testing.assert_array_equal(curves(axes)["Gaussian"].get_xdata(), [0])


def test_a_number_that_is_not_finite_is_refused_with_its_line(training: MakeTraining) -> None:
    name, folder = training("a", epochs=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "loss": NaN, "noisy_accuracy": 0.5}\n')
    with pytest.raises(WorkError, match=r"metrics\.jsonl, line 2: damaged"):
        read([(name, folder)])


def test_runs_without_metrics_are_left_out(training: MakeTraining, tmp_path: Path) -> None:
    assert draw_training_curves(read([("bare", tmp_path), ("gone", tmp_path / "gone")])) is None
    assert draw_training_curves([]) is None
    unknown = training("unknown", sigma=None)
    figure = figure_of(("bare", tmp_path), unknown)
    assert list(curves(figure.axes[0])) == ["unknown"]
    assert "σ not recorded" in figure.get_suptitle()


def test_names_are_text(training: MakeTraining) -> None:
    runs = read([training("a_$b^{$"), training("other", scale=0.3)])
    picture = pictures_of("t", lambda: draw_training_curves(runs), ["svg"])["t.svg"]
    assert b"a_$b^{$" in (picture or b"")
