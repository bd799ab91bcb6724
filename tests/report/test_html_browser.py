"""The page in a real browser: it loads without a complaint, sorts, reads out its curves, and shows its pictures."""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from PIL import Image

from smoothcert.certification.certificates import CertificatesFile, CertifiedImage
from smoothcert.certification.columns import columns_of
from smoothcert.report import Contents, Summary, summarize
from smoothcert.report.html import html_page
from smoothcert.report.html_data import Pictures
from smoothcert.report.paired import comparisons
from smoothcert.report.published import Published

from .browser import PROGRAM, Browser
from .conftest import SETTINGS, image, images, our_file

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine: install Debian's chromium")

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def spread(scale: float, wrong: int) -> list[CertifiedImage]:
    return [image(i, 1, 1 if i >= wrong else 0, scale * (i + 1) / 40) for i in range(40)]


RUNS: dict[str, tuple[list[CertifiedImage], dict[str, object]]] = {
    "run 10": (spread(1.2, 4), {"objective": "b"}),
    "run 9": (spread(0.9, 2), {"objective": "c"}),
    HOSTILE: (images(), {"objective": None}),
    "other sigma": (spread(2.0, 0), {"sigma": 1.0, "objective": "b"}),
    "field": ([*spread(0.7, 20), image(40, 1, 1, 0.0)], {"sigma": None, "objective": None, "dataset": None}),
}


def gallery(dataset: str, split: str, indices: Sequence[int]) -> Pictures:
    file = io.BytesIO()
    Image.new("L", (28, 28), 128).save(file, "PNG")
    return Pictures(dict.fromkeys(indices, file.getvalue()), {})


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = [
        (name, CertificatesFile(Path("f.tsv"), tuple(rows), {k: v for k, v in (SETTINGS | other).items() if v}, {}))
        for name, (rows, other) in RUNS.items()
    ]
    summaries = [summarize(file, name, (0.0, 0.5)) for name, file in files]
    published = {"run 9": Published("t/1", "C", 0.4, {}, ())}
    path = tmp_path_factory.mktemp("page") / "report.html"
    contents = Contents("Report", summaries, published=published, gallery=gallery, comparisons=comparisons(summaries))
    path.write_text(html_page(contents), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def loaded(browser: Browser, page: Path) -> Browser:
    """The page, loaded once for the tests that leave it as it was or restore it."""
    browser.complaints.clear()
    browser.open(page)
    assert settled(browser).complaints == []
    return browser


@pytest.fixture
def opened(loaded: Browser) -> Iterator[Browser]:
    """The page, with the pointer outside of its figures; nothing may complain during a test."""
    loaded.hover("h1")
    yield loaded
    assert settled(loaded).complaints == []


def settled(browser: Browser) -> Browser:
    """After three frames: one finds that a size has changed, the next one draws, also on a machine that is busy."""
    browser.value("new Promise(done => setTimeout(done, 30))")
    for _ in range(3):
        browser.value("new Promise(requestAnimationFrame)")
    return browser


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.value(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")
    return found


def column(browser: Browser, number: int) -> list[str]:
    return texts(browser, f"#table h2 + .scroll tbody tr:not(.aside) td:nth-child({number})")


def readout(browser: Browser, panel: int) -> tuple[float, dict[str, float]]:
    """The radius and the accuracies in percent that a panel shows at the cursor, by label."""
    lines = texts(browser, f".panel:nth-child({panel}) .readout:not([hidden]) p")
    values = (re.fullmatch(r"(.*?)(\d+\.\d) %", line) for line in lines[1:])
    return float(lines[0].removeprefix("radius ")), {match[1]: float(match[2]) for match in values if match}


def test_complaints_are_heard(browser: Browser, tmp_path: Path) -> None:
    """What the other tests rely on: errors, messages and requests are noticed."""
    for number, body in enumerate(
        ("<script>missing()</script>", "<script>console.error('x')</script>", "<img src=http://localhost:9/x.png>")
    ):
        browser.complaints.clear()
        bad = tmp_path / f"{number}.html"
        bad.write_text(f"<!doctype html><title>t</title>{body}")
        browser.open(bad)
        assert settled(browser).complaints != [], body


def test_the_page_loads_whole_and_runs_no_script_but_its_own(opened: Browser) -> None:
    assert texts(opened, "h1") == ["Report"]
    assert opened.value("document.scripts.length") == 2
    assert HOSTILE in texts(opened, "#table h2 + .scroll tbody td")
    assert HOSTILE in texts(opened, ".chip span")
    assert HOSTILE in texts(opened, "select option")
    assert opened.value("document.querySelectorAll('img:not(.card img)').length") == 0


def test_a_click_on_a_heading_sorts(opened: Browser) -> None:
    heads = texts(opened, "#table h2 + .scroll thead tr:last-child th")
    acr, name, method = (heads.index(title) + 1 for title in ("ACR", "run", "method"))
    before = column(opened, name)
    acrs = [float(text) for text in column(opened, acr)]
    assert acrs != sorted(acrs)
    button = "#table h2 + .scroll thead tr:last-child th:nth-child({}) button".format
    opened.click(button(acr))
    assert [float(text) for text in column(opened, acr)] == sorted(acrs, reverse=True)
    assert opened.value("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    opened.click(button(acr))
    assert [float(text) for text in column(opened, acr)] == sorted(acrs)
    opened.click(button(acr))
    assert column(opened, name) == before
    opened.click(button(name))
    sorted_names = column(opened, name)
    assert sorted_names.index("run 9") < sorted_names.index("run 10"), "numbers in names count as numbers"
    for _ in range(2):
        opened.click(button(method))
        assert column(opened, method)[-2:] == ["–", "–"], "the unknown stays last"


def test_published_rows_stay_under_their_run(opened: Browser) -> None:
    heads = texts(opened, "#table h2 + .scroll thead tr:last-child th")
    for _ in range(2):
        opened.click(f"#table h2 + .scroll thead tr:last-child th:nth-child({heads.index('ACR') + 1}) button")
        names = texts(opened, f"#table h2 + .scroll tbody td:nth-child({heads.index('run') + 1})")
        at = names.index("run 9")
        assert names[at + 1 : at + 3] == ["published", "difference"]


def test_the_readout_is_the_certified_accuracy_of_every_run(opened: Browser) -> None:
    labels = {"b": "run 10", "c": "run 9", HOSTILE: HOSTILE}
    for fraction in (0.1, 0.35, 0.6, 0.85):
        opened.hover(".panel:first-child svg", fraction)
        radius, shown = readout(opened, 1)
        assert shown.keys() == labels.keys()
        for label, name in labels.items():
            exact = 100 * columns_of(RUNS[name][0]).certified_accuracy(radius)
            assert shown[label] == pytest.approx(exact, abs=0.05), "at the radius that is shown, not at the pointer"
        assert texts(opened, ".panel:nth-child(2) .readout:not([hidden])") == []


def test_the_line_follows_the_pointer(opened: Browser) -> None:
    svg = ".panel:first-child svg"
    for fraction in (0.3, 0.7):
        opened.hover(svg, fraction)
        line = opened.value("document.querySelector('.cursor').getBoundingClientRect().left")
        assert line == pytest.approx(opened.centre(svg, fraction)[0], abs=1.5)
        assert opened.value("document.querySelectorAll('.cursor').length") == 1
    opened.hover("h1")
    assert texts(opened, ".readout:not([hidden])") == []
    assert opened.value("document.querySelectorAll('.cursor, .dot').length") == 0


def test_the_left_end_counts_all_right_images(opened: Browser) -> None:
    opened.hover(".panel:first-child svg", 0.005)
    radius, shown = readout(opened, 1)
    assert radius == 0
    assert shown == {"b": 90.0, "c": 95.0, HOSTILE: 60.0}
    opened.hover(".panel:nth-child(3) svg", 0.005)
    assert readout(opened, 3) == (0, {"field": 51.2}), "21 of 41, one of them with radius 0"


def test_a_curve_has_a_step_for_each_right_image(opened: Browser) -> None:
    paths = opened.value("[...document.querySelectorAll('.panel:first-child .curve')].map(p => p.getAttribute('d'))")
    assert [path.count("V") for path in paths] == [36, 38, 5], "two of six radii are equal"


def test_one_legend_has_each_name_once_with_its_acr_in_every_panel(opened: Browser) -> None:
    acr = {name: f"{columns_of(rows).acr:.3f}" for name, (rows, _) in RUNS.items()}
    in_panels = {
        "b": f"{acr['run 10']} · {acr['other sigma']} · –",
        "c": f"{acr['run 9']} · – · –",
        HOSTILE: f"{acr[HOSTILE]} · – · –",
        "field": f"– · – · {acr['field']}",
    }
    assert texts(opened, ".chip") == [f"{label}ACR {shown}" for label, shown in in_panels.items()]


def test_a_click_on_a_name_hides_and_shows_a_run(opened: Browser) -> None:
    chip, curves = ".chip", ".panel:first-child .curve"
    count = f"document.querySelectorAll({curves!r}).length"
    assert opened.value(count) == 3
    opened.click(chip)
    assert opened.value(count) == 2
    assert opened.value(f"document.querySelector({chip!r}).getAttribute('aria-pressed')") == "false"
    opened.hover(".panel:first-child svg")
    assert sorted(readout(opened, 1)[1]) == [HOSTILE, "c"]
    opened.click(chip)
    assert opened.value(count) == 3


def test_the_keys_move_the_line(opened: Browser) -> None:
    opened.value("document.querySelector('.panel:nth-child(2) svg').focus()")
    opened.press("ArrowRight")
    first, _ = readout(opened, 2)
    opened.press("ArrowRight")
    second, shown = readout(opened, 2)
    assert 0 < first < second
    assert second == pytest.approx(2 * first, abs=0.002)
    assert shown["b"] == pytest.approx(100 * columns_of(RUNS["other sigma"][0]).certified_accuracy(second), abs=2.6)
    opened.press("End")
    assert readout(opened, 2)[1] == {"b": 0.0}
    opened.press("Escape")
    assert texts(opened, ".readout:not([hidden])") == []


def choose(browser: Browser, run: int) -> None:
    browser.value(f"document.querySelector('select').value = {run}")
    browser.value("document.querySelector('select').dispatchEvent(new Event('change'))")


def test_the_gallery_shows_the_chosen_run_and_kind_under_all_runs(opened: Browser) -> None:
    assert int(texts(opened, ".count")[0].partition(" of the images that all runs have")[0]) <= 10, (
        "all of the third run"
    )
    shown = opened.value("[...document.querySelector('.card').querySelectorAll('.outcomes li')].map(e => e.title)")
    assert len(shown) == 3, "one line per run of the panel"
    assert [title.split(":")[0] for title in shown] == ["run 10", "run 9", HOSTILE]
    opened.click(".kinds button:nth-child(2)")
    assert texts(opened, ".card .radius")[:2] == ["radius 0.150", "radius 0.180"]
    pictures = "Promise.all([...document.images].map(i => i.decode())).then(() => document.images.length)"
    assert opened.value(pictures) == 24
    opened.click(".kinds button:nth-child(3)")
    assert texts(opened, ".card .radius")[0] == "radius 1.200"
    opened.click(".kinds button:nth-child(4)")
    assert len(texts(opened, ".card")) == 4
    assert "predicted 0 ✗" in texts(opened, ".card")[0]
    choose(opened, 2)
    assert len(texts(opened, ".card")) == 2
    opened.click(".kinds button:nth-child(5)")
    assert all("abstained" in text for text in texts(opened, ".card"))
    choose(opened, 4)
    assert len(texts(opened, ".card")) == 21, "a kind that a run has none of gives way to one that it has"
    assert texts(opened, ".reason:not([hidden])") != []
    assert opened.value("document.images.length") == 0
    choose(opened, 0)


# Everything that sticks out of the window or of the box that should show it. Boxes that scroll may be wider inside.
CLIPPED = """
(() => {
  const limit = document.documentElement.clientWidth + 1;
  const scrolls = (e) => e.closest('.scroll') !== null;
  const all = [...document.querySelectorAll('main *, header *')];
  const wide = all.filter(e => !scrolls(e) && e.getBoundingClientRect().right > limit);
  const texts = [...document.querySelectorAll('.plot svg')].flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(t => {
      const own = t.getBoundingClientRect();
      const sideways = own.left < box.left - 1 || own.right > box.right + 1;
      return sideways || own.top < box.top - 1 || own.bottom > box.bottom + 1;
    });
  });
  return [...wide, ...texts].map(e => e.outerHTML.slice(0, 80));
})()
"""


@pytest.mark.parametrize("width", [390, 1280, 1600])
def test_nothing_is_clipped(opened: Browser, width: int) -> None:
    opened.call("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 500)
    settled(opened)
    assert opened.value(CLIPPED) == []
    assert opened.value("document.documentElement.scrollWidth") <= width
    top = opened.value("document.querySelector('.plot').getBoundingClientRect().top + scrollY")
    assert top < 844, "the first curve is on the first screen"
    height = opened.value("document.querySelector('.plot').getBoundingClientRect().height")
    assert height >= 280, "a curve is tall enough to read"
    inside = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    scrolled = opened.value(inside)
    if width == 390:
        assert scrolled > 0
        opened.value("document.querySelector('#table .scroll').scrollLeft = 200")
        box, name = (
            opened.value(f"document.querySelector({selector!r}).getBoundingClientRect().left")
            for selector in ("#table .scroll", "#table .scroll tbody .is-name")
        )
        assert name == pytest.approx(box, abs=1), "the names stay in view"
        opened.value("document.querySelector('#table .scroll').scrollLeft = 0")
        acr = opened.value("document.querySelector('#table .scroll tbody .is-acr').getBoundingClientRect().right")
        assert acr <= 390, "ACR is in view without scrolling"
    opened.hover(".panel:first-child svg", 0.45)
    assert opened.value(CLIPPED) == []
    opened.call("Emulation.clearDeviceMetricsOverride")


def test_on_paper_no_table_is_cut_and_hints_on_clicks_are_left_out(opened: Browser) -> None:
    # US letter on its side, with margins of 1 cm: narrower than A4 minus its margins.
    width = 980
    opened.call("Emulation.setDeviceMetricsOverride", width=width, height=740, deviceScaleFactor=1, mobile=False)
    opened.call("Emulation.setEmulatedMedia", media="print")
    tables = "[...document.querySelectorAll('table')].map(e => e.getBoundingClientRect().right)"
    assert max(opened.value(tables)) <= width
    styles = opened.value(
        "['th button', '.is-name', '.by-hand', '.scroll'].map(s => getComputedStyle(document.querySelector(s)))"
        ".map(s => [s.display, s.position, s.overflowX])"
    )
    assert [styles[0][0], styles[1][1], styles[2][0], styles[3][2]] == ["contents", "static", "none", "visible"]
    opened.call("Emulation.setEmulatedMedia", media="")
    opened.call("Emulation.clearDeviceMetricsOverride")


def test_on_paper_everything_is_unfolded_and_in_light_colours(opened: Browser) -> None:
    colour = "getComputedStyle(document.querySelector('#provenance .swatch')).backgroundColor"
    opened.call(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    assert opened.value(colour) == "rgb(160, 82, 45)"
    assert opened.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    opened.value("dispatchEvent(new Event('beforeprint'))")
    assert opened.value("document.querySelectorAll('details:not([open])').length") == 0
    opened.value("dispatchEvent(new Event('afterprint'))")
    assert opened.value("document.querySelectorAll('details[open]').length") == 0
    opened.call(
        "Emulation.setEmulatedMedia", media="screen", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    assert opened.value(colour) == "rgb(215, 161, 126)"
    opened.call("Emulation.setEmulatedMedia", media="", features=[])


def show_report(browser: Browser, folder: Path, summaries: Sequence[Summary]) -> None:
    page = folder / "report.html"
    page.write_text(html_page(Contents("Report", summaries, comparisons=comparisons(summaries))), encoding="utf-8")
    browser.open(page)


def test_the_readout_rounds_as_the_table_does(browser: Browser, tmp_path: Path) -> None:
    """Shares that are half way between two decimals, or would be without the rounding of a division."""
    counts = {"a": (1211, 2000), "b": (145, 2000), "c": (1, 400), "d": (3, 400)}
    files = {
        name: our_file([image(i, 1, int(i < right), 0.5) for i in range(size)], objective=name)
        for name, (right, size) in counts.items()
    }
    summaries = [summarize(file, name, (0.0,)) for name, file in files.items()]
    show_report(browser, tmp_path, summaries)
    browser.hover(".panel svg", 0.005)
    heads = texts(browser, "#table h2 + .scroll thead tr:last-child th")
    table = dict(zip(column(browser, heads.index("run") + 1), column(browser, heads.index("0.00") + 1), strict=True))
    radius, shown = readout(browser, 1)
    assert radius == 0
    assert {name: f"{percent:.1f}" for name, percent in shown.items()} == table
    assert table == {"a": "60.6", "b": "7.2", "c": "0.2", "d": "0.8"}


def test_a_name_starts_next_to_its_colour(browser: Browser, tmp_path: Path) -> None:
    """It is not moved to the line below the swatch where the table is wider than the screen."""
    summaries = [summarize(our_file(), "name" * count, (0.0, 0.5)) for count in range(1, 7)]
    browser.call("Emulation.setDeviceMetricsOverride", width=700, height=844, deviceScaleFactor=1, mobile=False)
    show_report(browser, tmp_path, summaries)
    distances = browser.value(
        """[...document.querySelectorAll('#table td.is-name .swatch')].map(swatch => {
             const text = document.createRange();
             text.selectNodeContents(swatch.nextSibling);
             return text.getClientRects()[0].top - swatch.getBoundingClientRect().top;
        })"""
    )
    assert len(distances) > len(summaries)
    assert max(map(abs, distances)) < 10
