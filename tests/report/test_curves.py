"""The curves are exact, and the pictures are in the requested formats."""

import io
import math
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib import get_backend, rcParams
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from scipy.stats import norm

from smoothcert.certification.attack_file import AttackedImage, attacks_writer, empirical_accuracy, read_attacks
from smoothcert.certification.certificates import CertificatesFile, CertifiedImage, read_certificates
from smoothcert.certification.columns import columns_of
from smoothcert.errors import WorkError
from smoothcert.report import summarize
from smoothcert.report.curves import ATTACKED, ATTACKED_PART, attacked_curve, draw_curves, step_curve
from smoothcert.report.style import new_figure, pictures_of

from .conftest import SETTINGS, MakeRun, as_file, image, images, our_file


def figure_of(runs: Sequence[tuple[str, CertificatesFile]]) -> Figure:
    return draw_curves([summarize(file, name, ()) for name, file in runs])


def spread(scale: float, count: int = 100) -> list[CertifiedImage]:
    return [image(i, 1, 1, scale * (i + 1) / count) for i in range(count)]


def curve_lines(figure: Figure) -> list[list[str]]:
    return [[str(x.get_label()) for x in axes.lines if str(x.get_label())[0] != "_"] for axes in figure.axes]


def test_steps_are_exact_at_and_between_the_jumps() -> None:
    rows = images()
    x, y = step_curve(columns_of(rows))
    assert x[0] == 0
    assert y[-1] == 0
    jumps = [0.1, 0.25, 0.5, 0.7499, 1.1]
    for radius in [*jumps, *np.nextafter(jumps, 0), *np.linspace(0.01, 1.5, 300)]:
        held = y[np.flatnonzero(x < radius)[-1]]
        assert held == columns_of(rows).certified_accuracy(radius)
    assert y[0] == columns_of(rows).certified_accuracy(0)


def test_the_figure_shows_the_step_curve_in_percent() -> None:
    rows = images()
    (axes,) = figure_of([("a", our_file(rows))]).axes
    (line,) = [x for x in axes.lines if x.get_label() == "Gaussian"]
    x, y = step_curve(columns_of(rows))
    assert line.get_drawstyle() == "steps-post"
    np.testing.assert_array_equal(line.get_xdata(), x)
    np.testing.assert_allclose(line.get_ydata(), 100 * y)
    assert "%" in axes.get_ylabel()
    assert axes.get_xlabel() == "L2 radius"


def test_one_panel_per_sigma_and_one_look_per_method() -> None:
    runs = [
        (f"{method}-{sigma}", our_file(sigma=sigma, objective=method))
        for sigma in (1.0, 0.25)
        for method in ("gaussian", "smoothmix")
    ]
    figure = figure_of([*runs, ("theirs", as_file(images()))])
    assert [axes.get_title() for axes in figure.axes] == ["MNIST, σ = 0.25", "MNIST, σ = 1.00", "σ not recorded"]
    assert curve_lines(figure) == [["Gaussian", "SmoothMix"]] * 2 + [["theirs"]]
    looks: dict[str, set[tuple[object, str]]] = {}
    for axes in figure.axes:
        for line in axes.lines:
            looks.setdefault(str(line.get_label()), set()).add((line.get_color(), str(line._dash_pattern)))
    looks = {label: seen for label, seen in looks.items() if label[0] != "_"}
    assert all(len(seen) == 1 for seen in looks.values())
    assert len(set().union(*looks.values())) == 3
    assert len({colour for seen in looks.values() for colour, _ in seen}) == 3


def test_two_runs_of_a_method_keep_their_names() -> None:
    assert curve_lines(figure_of([("first", our_file()), ("second", our_file())])) == [["first", "second"]]
    clash = [("Gaussian", our_file(objective=None)), ("other", our_file(objective="gaussian"))]
    assert curve_lines(figure_of(clash)) == [["Gaussian", "other"]]


def test_data_sets_do_not_share_a_panel() -> None:
    figure = figure_of([("a", our_file()), ("b", our_file(dataset="cifar10"))])
    assert [axes.get_title() for axes in figure.axes] == ["CIFAR-10, σ = 0.50", "MNIST, σ = 0.50"]


def test_a_known_limit_of_n_is_marked() -> None:
    (axes,) = figure_of([("a", our_file())]).axes
    marked = [line.get_xdata()[0] for line in axes.lines if line.get_linewidth() == 0.7]  # type: ignore[index]
    assert marked == [pytest.approx(0.5 * norm.ppf(0.001 ** (1 / 1000)))]
    assert axes.texts[0].get_text() == f"{len(our_file().rows)} images\nn = 1,000 votes per image"
    (axes,) = figure_of([("a", our_file(alpha=None))]).axes
    assert not [line for line in axes.lines if line.get_linewidth() == 0.7]


def test_numbers_of_images_that_differ_are_a_range() -> None:
    figure = figure_of([("a", our_file(images()[:4])), ("b", our_file()), ("c", our_file(images()[:5]))])
    assert figure.axes[0].texts[0].get_text() == "4 to 10 images, see the table\nn = 1,000 votes per image"


def test_one_legend_lists_each_method_once() -> None:
    runs = [(f"{name}-{sigma}", our_file(sigma=sigma, objective=name)) for sigma in (0.5, 1.0) for name in ("x", "y")]
    assert legend_texts(figure_of(runs)) == ["x", "y"]


def test_a_few_curves_are_named_at_their_ends() -> None:
    """In the order of their ends, in their colours, next to no legend; curves with the same ends have a legend."""
    apart = {"low": 0.5, "middle": 0.7, "high": 0.9}
    runs = [
        (k, our_file([*spread(0.5, 100 - round(100 * v)), *[image(0, 1, 1, 1.2)] * round(100 * v)], objective=None))
        for k, v in apart.items()
    ]
    figure = figure_of(runs)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    names = {text.get_text(): text for text in axes.texts if text.get_text() in apart}
    heights = [names[name].get_window_extent().y0 for name in apart]
    assert heights == sorted(heights)
    lines = {str(line.get_label()): line.get_color() for line in axes.lines}
    assert {name: text.get_color() for name, text in names.items()} == {name: lines[name] for name in apart}
    assert legend_texts(figure) == []
    assert legend_texts(figure_of([(f"run {i}", our_file(objective=None)) for i in range(4)])) != []
    low = figure_of([("short", our_file([image(i, 1, 1, 0.5) for i in range(9)], objective=None))])
    assert legend_texts(low) == ["short"], "a line from 0.5 to a name at 1.28 would look like a curve"


def test_a_long_legend_takes_no_room_from_the_panel() -> None:
    heights = []
    for number in (3, 30):
        names = [f"a run with a long name, number {i}" for i in range(number)]
        figure = figure_of([(name, our_file(spread(1.0), objective=None)) for name in names])
        figure.draw_without_rendering()
        (axes,), (legend,) = figure.axes, figure.legends
        box = legend.get_window_extent()
        assert box.y1 < axes.get_tightbbox().y0
        assert (box.x0 >= 0, box.x1 <= figure.bbox.width, box.y0 >= 0) == (True, True, True)
        heights.append(axes.get_window_extent().height)
    assert 0.9 * heights[0] < heights[1] < 1.1 * heights[0]


def attack(run: Path, distances: list[float], name: str = "test", **settings: object) -> Path:
    """An attacks file of `run`: image i fell at distances[i]; 0: wrong as it is, infinite: withstood."""
    path = run / "attacks" / f"{name}.tsv"
    rows = [AttackedImage(i, 1, 0 if d < math.inf else 1, d, None, False, d, 0.1) for i, d in enumerate(distances)]
    with attacks_writer(path, {**SETTINGS, "radii": [0.5, 1.0, 1.4], **settings}, {}) as writer:
        writer.append(rows)
    return path


FELL = [0.5, 1.0, 0.0, 0.0, 1.0, math.inf, 0.0, math.inf, 1.2, 1.0]


def run_file(run: Path) -> CertificatesFile:
    return read_certificates(run / "certificates" / "test.tsv")


def thin_lines(figure: Figure) -> list[Line2D]:
    return [line for axes in figure.axes for line in axes.lines if line.get_linewidth() == 0.8]


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_attacked_steps_are_exact_up_to_the_last_radius(make_run: MakeRun) -> None:
    stored = read_attacks(attack(make_run("a"), FELL))
    steps = attacked_curve(stored)
    assert steps.radii[0] == 0
    assert steps.radii[-1] == 1.4
    for radius in [0.5, 1.0, 1.2, 1.4, *np.nextafter([0.5, 1.0, 1.2], 0), *np.linspace(0.01, 1.4, 99)]:
        held = steps.accuracy[np.flatnonzero(steps.radii < radius)[-1]]
        assert held == pytest.approx(empirical_accuracy(stored.rows, radius))


def test_attacks_are_a_thin_curve_of_the_runs_colour_above_the_certified_one(make_run: MakeRun) -> None:
    run = make_run("a")
    attack(run, FELL)
    figure = figure_of([("a", run_file(run))])
    (line,) = thin_lines(figure)
    (certified,) = [x for x in figure.axes[0].lines if x.get_label() == "Gaussian"]
    assert line.get_color() == certified.get_color()
    assert line.get_drawstyle() == "steps-post"
    steps = attacked_curve(read_attacks(run / "attacks" / "test.tsv"))
    np.testing.assert_allclose(np.asarray(line.get_ydata()), 100 * steps.accuracy)
    assert legend_texts(figure) == [ATTACKED] == ["attacked (upper bound)"]


def test_one_legend_for_runs_and_attacks(make_run: MakeRun) -> None:
    run, plain = make_run("a"), make_run("b", objective="smoothmix")
    attack(run, FELL)
    figure = figure_of([("a", run_file(run)), ("b", run_file(plain))])
    assert len(thin_lines(figure)) == 1
    assert legend_texts(figure) == [ATTACKED]


def test_only_attacks_on_the_certified_classifier_are_drawn(make_run: MakeRun) -> None:
    run = make_run("a")
    others = {"sigma": 1.0, "dataset": "cifar10", "sound": True, "weights_sha256": "00", "denoiser": {"model": "unet"}}
    for field, value in (others | {"consensus": 2, "classes_sha256": "00", "images_sha256": "00"}).items():
        attack(run, FELL, field, **{field: value})
    assert thin_lines(figure_of([("a", run_file(run))])) == []
    attack(run, [], "empty")
    assert thin_lines(figure_of([("a", run_file(run))])) == []
    attack(run, FELL[:4], "few", sound=False)
    figure = figure_of([("a", run_file(run))])
    assert len(thin_lines(figure)) == 1
    assert legend_texts(figure) == [ATTACKED_PART], "a curve of fewer images need not lie above"


def test_a_damaged_attacks_file_is_named(make_run: MakeRun) -> None:
    run = make_run("a")
    path = attack(run, FELL)
    path.write_text(path.read_text() + "x\n")
    with pytest.raises(WorkError, match=r"attacks/test\.tsv, line 12: damaged"):
        figure_of([("a", run_file(run))])


def test_a_wide_picture_has_no_more_pixels_than_a_page_shows() -> None:
    (png,) = pictures_of("wide", lambda: new_figure(9.6, 3.0), ["png"]).values()
    with Image.open(io.BytesIO(png or b"")) as picture:
        assert picture.size == (2_000, 625)


def test_pictures_of_every_kind() -> None:
    settings, backend = dict(rcParams), get_backend()
    summaries = [
        summarize(our_file(), "a <&> b", ()),
        summarize(our_file(spread(1.0), objective="smoothmix"), "b", ()),
    ]
    first = pictures_of("curves", lambda: draw_curves(summaries), ["png", "pdf", "svg"])
    png, pdf, svg = (picture or b"" for picture in first.values())
    with Image.open(io.BytesIO(png)) as picture:
        assert picture.format == "PNG"
        assert picture.info["dpi"][0] == pytest.approx(320, abs=0.1)
        colours = [colour for _, colour in picture.convert("RGB").getcolors(1 << 20)]
    assert max(colours) == (255, 255, 255), "white stays white"
    for wanted in ((0x4D, 0x4D, 0x4D), (0xD5, 0x5E, 0)):
        assert min(sum(abs(a - b) for a, b in zip(wanted, colour, strict=True)) for colour in colours) < 8
    assert pdf.startswith(b"%PDF")
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert dict(rcParams) == settings
    assert get_backend() == backend
    again = pictures_of("curves", lambda: draw_curves(summaries), ["png", "pdf", "svg"])
    assert again == first, "the same certificates give the same file"


def test_a_file_of_another_tool_and_one_without_a_correct_image(field_file: Path) -> None:
    wrong = our_file([image(0, 1, 2, 0.5)], alpha=None)
    figure = figure_of([("theirs", read_certificates(field_file)), ("wrong", wrong)])
    figure.draw_without_rendering()
    assert sorted(label for labels in curve_lines(figure) for label in labels) == ["Gaussian", "theirs"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["$x_{$", r"\$y^$", "_hidden", "a\tb\nc"])
def test_odd_names_are_text(name: str) -> None:
    runs = [(name, our_file(objective=None)), ("b", our_file(spread(1), objective=None))]
    for shown in (runs, runs[:1]):
        figure = figure_of(shown)
        figure.draw_without_rendering()
        assert len(curve_lines(figure)[0]) == len(shown)


def test_a_figure_with_images_has_all_shades() -> None:
    def draw() -> Figure:
        figure = new_figure(2, 2)
        figure.suptitle("a folder called 猫")  # which matplotlib's font does not have
        figure.subplots().imshow(np.arange(256.0).reshape(16, 16), cmap="gray", interpolation="nearest")
        return figure

    with warnings.catch_warnings(action="error"):
        file = pictures_of("x", draw, ["png"])["x.png"]
    with Image.open(io.BytesIO(file or b"")) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    assert len(colours & {(grey, grey, grey) for grey in range(256)}) > 250, "but for rounding"
