"""The page says what the certificates say, whatever the names of runs, and holds all that it needs."""

import base64
import datetime
import hashlib
import json
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smoothcert.certification.certificates import CertificatesFile, CertifiedImage, read_certificates
from smoothcert.certification.columns import columns_of
from smoothcert.io.text import one_line
from smoothcert.report import Contents, summarize
from smoothcert.report.further_tables import further_tables
from smoothcert.report.headline import headlines
from smoothcert.report.html import html_page
from smoothcert.report.html_data import (
    NOT_ASKED,
    NOT_RECORDED,
    OTHER_LABELS,
    PER_KIND,
    STEPS_PER_UNIT,
    Gallery,
    Pictures,
    in_steps,
    kinds_of,
    most_differing,
)
from smoothcert.report.layout import comma_separated
from smoothcert.report.paired import comparisons
from smoothcert.report.published import Published
from smoothcert.report.tables import intervals_layout, layout
from smoothcert.smoothing.certificate import ABSTAIN, Certificate

from .conftest import PLAIN, MakeRun, image, images, our_file

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
RADII = (0.0, 0.25, 0.5)
VOID = {"meta", "link", "img", "br", "line", "path"}


class Seen(HTMLParser):
    """The elements and texts of a page, as a browser would take them apart; it must be well nested."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += text

    def count(self, tag: str) -> int:
        return len(self.texts.get(tag, []))


def page(*runs: tuple[str, CertificatesFile], title: str = "Title", gallery: Gallery | None = None, **more: Any) -> str:
    summaries = [summarize(run, name, RADII) for name, run in runs]
    return html_page(Contents(title, summaries, gallery=gallery, comparisons=comparisons(summaries), **more))


def embedded(text: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert len(found) == 1
    data: dict[str, Any] = json.loads(found[0])
    return data


def test_names_and_settings_are_never_html_or_script(make_run: MakeRun) -> None:
    run = make_run("a", dataset=HOSTILE, objective=HOSTILE, precision=HOSTILE, classes=[HOSTILE] * 10)
    (run / "recipe.yaml").write_text(f"x: '{HOSTILE}'")
    hostile = read_certificates(run / "certificates" / "test.tsv")
    asked = Pictures({0: b"\x89PNG"}, {})
    more = {"notes": {HOSTILE: [HOSTILE]}, "published": {HOSTILE: Published(HOSTILE, HOSTILE, 1.0, {}, ())}}
    text = page((HOSTILE, hostile), ("b", our_file(dataset=HOSTILE)), title=HOSTILE, gallery=lambda *_: asked, **more)
    seen, plain = Seen(text), Seen(page(("a", our_file()), ("b", our_file()), title="t"))
    assert seen.count("script") == plain.count("script") == 2
    assert seen.count("img") == 0
    assert not [name for _, attributes in seen.elements for name in attributes if name.startswith("on")]
    assert seen.texts["title"] == seen.texts["h1"] == [HOSTILE]
    assert f"x: '{HOSTILE}'" in seen.texts["pre"]
    assert any(HOSTILE in text for text in seen.texts["p"])
    assert embedded(text)["gallery"]["runs"][0]["name"] == HOSTILE
    assert embedded(text)["gallery"]["runs"][0]["kinds"][1]["images"][0]["label"] == HOSTILE


def test_the_policy_allows_only_the_pages_script_and_no_requests() -> None:
    text = page(("a", our_file()))
    seen = Seen(text)
    (policy,) = [a["content"] or "" for tag, a in seen.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    digest = base64.b64encode(hashlib.sha256(seen.texts["script"][1].encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    places = [attributes.get(name) for _, attributes in seen.elements for name in ("src", "href")]
    assert all(place.startswith(("data:", "#")) for place in places if place is not None)
    assert "{{" not in text
    assert "url(" not in text


def test_tables_are_those_of_the_other_formats() -> None:
    runs = [("a", our_file()), ("b", our_file(objective=None)), ("c", our_file([image(0, 1, 1, 0.3)], sigma=None))]
    summaries = [summarize(run, name, RADII) for name, run in runs]
    published = {"a": Published("t/1", "Gaussian", 0.7, {0.25: 55.0}, ())}
    compared = comparisons(summaries)
    expected = layout(summaries, published, compared).for_reading()
    further = [table.layout.for_reading() for table in further_tables(compared)]
    assert further
    intervals = intervals_layout(summaries).for_reading()
    text = page(*runs, published=published, notes={"few images": ["a", "b"]})
    tables = re.findall(r'<table class="results">(.*?)</table>', text, flags=re.DOTALL)
    for table, content in zip(tables, (expected, *further, intervals), strict=True):
        seen = Seen(table)
        assert seen.texts["button"] == [column.title for column in content.columns]
        rows = [row for group in content.groups for row in group]
        shown = re.findall(r"<tbody>(.*)</tbody>", table, flags=re.DOTALL)[0]
        # The page has the methods under the names of its legend.
        cells = [one_line(cell.text) for row in rows for cell in row]
        assert Seen(shown).texts["td"] == ["Gaussian" if text == "gaussian" else text for text in cells]
        marked = [" best" in (attributes["class"] or "") for tag, attributes in Seen(shown).elements if tag == "td"]
        assert marked == [cell.best for row in rows for cell in row]
    assert text.count('<tr class="aside">') == 2
    assert "<b>a, b</b>: few images" in text


def test_the_curves_have_every_step_of_the_data() -> None:
    rows = {"a": images(), "b": [image(i, 1, 1, math.sqrt(i)) for i in range(50)]}
    data = embedded(page(*((name, our_file(some, objective=None)) for name, some in rows.items())))
    (panel,) = data["panels"]
    assert (panel["title"], panel["norm"]) == ("MNIST, σ = 0.50", "L2")
    for run in panel["runs"]:
        some = rows[run["name"]]
        radii = [steps / STEPS_PER_UNIT for steps in accumulate(run["steps"])]
        for radius in (0.0, 0.1, 0.3, 0.5, 0.5001, 0.7498, 0.75, 2.3, 6.99, 7.0, 7.01):
            enough = [r for r in radii if r >= radius]
            assert len(enough) / run["images"] == columns_of(some).certified_accuracy(radius)
        assert radii == sorted(radii)
    summary = summarize(our_file(), "a", ())
    assert panel["ceilings"] == [[summary.ceiling, 1000]]


def test_one_panel_per_sigma_and_data_set_and_one_look_per_method() -> None:
    runs = [
        (f"{method}-{sigma}", our_file(sigma=sigma, objective=method)) for sigma in (1.0, 0.25) for method in ("x", "y")
    ]
    panels = embedded(page(*runs, ("theirs", our_file(sigma=None, dataset="cifar10", objective=None))))["panels"]
    assert [panel["title"] for panel in panels] == ["MNIST, σ = 0.25", "MNIST, σ = 1.00", "CIFAR-10, σ not recorded"]
    shown = [[(run["label"], run["look"]) for run in panel["runs"]] for panel in panels]
    assert shown[0] == shown[1]
    assert [label for panel in shown for label, _ in panel] == ["x", "y", "x", "y", "theirs"]
    assert len({look for panel in shown for _, look in panel}) == 3
    twice = embedded(page(("one", our_file()), ("two", our_file())))["panels"]
    assert [run["label"] for run in twice[0]["runs"]] == ["one", "two"]


@given(st.floats(0, 100))
@example(math.nextafter(0.117, 0))
def test_no_step_of_a_curve_lies_beyond_its_radius(radius: float) -> None:
    (steps,) = in_steps([radius])
    shown = Fraction(int(steps), STEPS_PER_UNIT)
    assert Fraction(radius) - Fraction(11, 10 * STEPS_PER_UNIT) < shown
    assert float(shown) <= radius


@given(st.floats(0, 100), st.sampled_from([3, 6]))
@example(math.nextafter(0.117, 0), 3)  # times 1000 this is rounded up to 117
@example(math.nextafter(0.00002, 0), 6)
def test_no_radius_is_shown_larger_than_it_was_certified(radius: float, decimals: int) -> None:
    shown = float(in_steps([radius], 10**decimals)[0] / 10**decimals)
    assert Fraction(radius) - Fraction(11, 10 ** (decimals + 1)) < Fraction(shown) <= Fraction(radius)
    assert float(f"{shown:.{decimals}f}") == shown


def test_radii_with_three_digits_are_not_rounded() -> None:
    for per_unit in (10_000, 10**6):
        steps = in_steps([thousandths / 1000 for thousandths in range(5001)], per_unit)
        assert steps.tolist() == list(range(0, 5 * per_unit + 1, per_unit // 1000))


def test_radii_are_rounded_down_in_curves_and_cards() -> None:
    data = embedded(page(("a", our_file([image(0, 1, 1, 0.1239999)]))))
    assert data["panels"][0]["runs"][0]["steps"] == [1239]
    assert data["gallery"]["groups"] == [{"0": [[0, "1", True, 0.123]]}]


def test_every_image_is_right_wrong_or_abstained_and_the_extremes_come_first() -> None:
    rows = images()
    kinds = {kind: positions.tolist() for kind, positions in kinds_of(columns_of(rows)).items()}
    assert sorted(kinds) == ["abstained", "largest radius", "smallest radius", "wrong"]
    assert kinds["smallest radius"] == [0, 1, 4, 5, 9, 7]
    assert kinds["largest radius"] == [7, 9, 4, 5, 1, 0]
    assert kinds["wrong"] == [2, 6]
    assert kinds["abstained"] == [3, 8]
    assert len(PLAIN) == 10


def test_a_card_has_classes_votes_and_radius() -> None:
    votes = ((2, 600), (0, 300), (1, 60), (4, 40))
    rows = [CertifiedImage(7, 0, Certificate(2, 0.12399, 10, 1000, 600, votes), 0.1)]
    rows += [CertifiedImage(9, 1, Certificate(ABSTAIN, 0.0, 10, 0, 0, ()), 0.1)]
    file = our_file(rows, classes=["cat", "dog", "frog"])
    data = embedded(page(("a", file), gallery=lambda *_: Pictures({7: b"\x89PNGx"}, {7: 0, 9: 1})))
    assert data["gallery"]["pictures"] == ["data:image/png;base64," + base64.b64encode(b"\x89PNGx").decode()]
    kinds = {kind["title"]: kind for kind in data["gallery"]["runs"][0]["kinds"]}
    assert kinds["wrong"]["images"] == [
        {
            "index": 7,
            "label": "cat",
            "n": 1000,
            "votes": [["frog", 600, False], ["cat", 300, True], ["dog", 60, False]],
            "picture": 0,
        }
    ]
    (silent,) = kinds["abstained"]["images"]
    assert (silent["votes"], silent["picture"]) == ([], None)
    assert data["gallery"]["groups"] == [{"7": [[0, "frog", False, 0.123]], "9": [[0, None, False, 0.0]]}]
    assert kinds["smallest radius"] == {"title": "smallest radius", "total": 0, "images": []}


def test_pictures_are_asked_for_once_and_shared_by_runs_on_the_same_images() -> None:
    rows = [image(i, 1, 1, i / 100) for i in range(100)]
    asked: list[tuple[str, str, list[int]]] = []

    def gallery(dataset: str, split: str, indices: Sequence[int]) -> Pictures:
        asked.append((dataset, split, list(indices)))
        return Pictures({i: f"{dataset} {i}".encode() for i in indices}, dict.fromkeys(indices, 1))

    runs = [("a", our_file(rows)), ("b", our_file(rows, objective="x")), ("c", our_file(rows[:1], dataset="other"))]
    data = embedded(page(*runs, gallery=gallery))["gallery"]
    extremes = [*range(PER_KIND), *range(100 - PER_KIND, 100)]
    assert sorted(asked) == [("mnist", "test", extremes), ("other", "test", [0])]
    assert len(data["pictures"]) == 2 * PER_KIND + 1
    for run, dataset in zip(
        sorted(data["runs"], key=lambda run: run["name"]), ("mnist", "mnist", "other"), strict=True
    ):
        assert run["note"] is None
        for card in (card for kind in run["kinds"] for card in kind["images"]):
            stored = data["pictures"][card["picture"]].removeprefix("data:image/jpeg;base64,")
            assert base64.b64decode(stored).decode() == f"{dataset} {card['index']}"
    assert data["runs"][0]["kinds"][1]["total"] == 100


def test_an_image_is_shown_under_all_runs_and_the_largest_differences_come_first() -> None:
    radii = {"a": [0.1, 0.2, 0.3, 0.4], "b": [0.1, 0.9, 0.3, 0.5], "c": [0.1, 0.2, 0.3]}
    runs = [
        (name, our_file([image(i, 1, 1 if i else 0, r) for i, r in enumerate(own)], objective=None))
        for name, own in radii.items()
    ]
    gallery = embedded(page(*runs))["gallery"]
    for number, run in enumerate(gallery["runs"]):
        kind = run["kinds"][0]
        assert (run["name"], kind["title"]) == (list(radii)[number], "runs differ")
        assert [card["index"] for card in kind["images"]] == [1], "others are the same, wrong, or not in all runs"
    (outcomes,) = gallery["groups"]
    assert outcomes["1"] == [[0, "1", True, 0.2], [1, "1", True, 0.9], [2, "1", True, 0.2]]
    assert [number for number, *_ in outcomes["3"]] == [0, 1], "the third run has no such image"
    assert outcomes["0"][0] == [0, "0", False, 0.1]


@pytest.mark.parametrize(
    ("gallery", "settings", "reason"),
    [
        (None, {}, NOT_ASKED),
        (lambda *_: "No pictures: not there.", {}, "No pictures: not there."),
        (lambda *_: Pictures({}, {}), {"dataset": None}, NOT_RECORDED),
        (lambda *_: Pictures({0: b"x"}, {0: 9}, ("name",) * 10), {}, OTHER_LABELS),
    ],
)
def test_without_pictures_the_page_lists_the_images_and_the_reason(
    gallery: Gallery | None, settings: dict[str, Any], reason: str
) -> None:
    data = embedded(page(("a", our_file(**settings)), gallery=gallery))["gallery"]
    (run,) = data["runs"]
    assert run["note"] == reason
    assert not data["pictures"]
    cards = [card for kind in run["kinds"] for card in kind["images"]]
    assert len(cards) == 16
    assert {card["picture"] for card in cards} == {None}
    assert cards[0]["label"] == "3"


def test_pictures_follow_the_order_of_classes_that_was_certified() -> None:
    """Folders are read in alphabetical order; `--classes` names another one, which the certificates record."""
    rows = [image(0, 1, 1, 0.5), image(1, 0, 1, 0.5)]

    def folder(*_: object) -> Pictures:
        return Pictures({0: b"x", 1: b"y"}, {0: 0, 1: 1}, ("ant", "bee"))

    file = our_file(rows, classes=["bee", "ant", "cat"])
    (without,) = embedded(page(("a", file)))["gallery"]["runs"]
    assert {card["label"] for kind in without["kinds"] for card in kind["images"]} == {"ant", "bee"}
    (run,) = embedded(page(("a", file), gallery=folder))["gallery"]["runs"]
    assert run["note"] is None
    cards = {card["index"]: card for kind in run["kinds"] for card in kind["images"]}
    assert [(cards[index]["label"], cards[index]["picture"] is None) for index in (0, 1)] == [
        ("ant", False),
        ("bee", False),
    ]


def test_recipe_settings_and_provenance_of_each_run_are_in_the_page(make_run: MakeRun, field_file: Path) -> None:
    run = make_run("a", noise="gaussian", radii=[0.5, 1.2])
    (run / "recipe.yaml").write_text("epochs: 90\nobjective:\n  name: gaussian\n")
    stored = read_certificates(run / "certificates" / "test.tsv")
    full = CertificatesFile(stored.path, stored.rows, stored.settings, {"versions": {"torch": "2.13"}, "seeds": [1, 2]})
    text = page(("a", full), ("theirs", read_certificates(field_file)))
    after = text.partition('<section id="provenance">')[2]
    ours, theirs = re.findall(r"<details>(.*?)</details>", after, flags=re.DOTALL)
    assert "<pre>epochs: 90\nobjective:\n  name: gaussian</pre>" in ours
    facts = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", ours))
    assert facts == {
        **{key: value if isinstance(value, str) else json.dumps(value) for key, value in stored.settings.items()},
        "versions.torch": "2.13",
        "seeds": "[1, 2]",
    }
    assert "say nothing more" in theirs
    assert "<pre>" not in theirs


def test_lone_surrogates_are_escaped(tmp_path: Path) -> None:
    text = page(("a", our_file(precision="half \ud800")), title="broken \udcff")
    (tmp_path / "page.html").write_text(text, encoding="utf-8")


def test_the_page_says_what_it_is_about_and_its_result_in_words() -> None:
    runs = [("a", our_file(model="lenet")), ("b", our_file(model="lenet", objective="smoothmix"))]
    summaries = [summarize(run, name, RADII) for name, run in runs]
    text = html_page(Contents("Title", summaries, comparisons=comparisons(summaries)), datetime.date(2026, 3, 5))
    (about,) = re.findall(r'<p class="about">(.*?)</p>', text)
    assert re.findall("<span>(.*?)</span>", about) == [
        *("MNIST", "LeNet", "L2 radii", "10 images", "n = 1,000 votes", "α = 0.001", "5 March 2026")
    ]
    seen = Seen(text)
    words = headlines(comparisons(summaries))
    assert words[0] in seen.texts["p"]
    assert text.index(words[0]) < text.index('<section id="curves">') < text.index('<table class="results">')


def test_the_csv_file_can_be_downloaded() -> None:
    summaries = [summarize(our_file(), "a", RADII)]
    text = html_page(Contents("t", summaries, comparisons=comparisons(summaries)))
    (link,) = [a for _, a in Seen(text).elements if a.get("download")]
    content = base64.b64decode((link["href"] or "").removeprefix("data:text/csv;base64,")).decode()
    assert content == comma_separated(layout(summaries, {}, comparisons(summaries)))


def test_figures_of_the_report_are_in_the_page() -> None:
    drawn = {"curves.png": b"c", "distribution.png": b"d", "distribution.pdf": b"x"}
    sources = [a["src"] for tag, a in Seen(page(("a", our_file()), pictures=drawn)).elements if tag == "img"]
    assert sources == ["data:image/png;base64," + base64.b64encode(b"d").decode()], "the curves are interactive"


def test_images_that_differ_most_between_runs_are_found_by_their_indices() -> None:
    """The second run has other images too, in another order; wrong images count as 0."""
    one = [image(i, 1, 1, radius) for i, radius in ((1, 0.5), (2, 0.6), (3, 0.2), (4, 1.0))]
    other = [image(4, 1, 0, 1.0), image(3, 1, 1, 0.5), image(2, 1, 1, 0.6), image(1, 1, 1, 0.4), image(0, 1, 1, 0.9)]
    runs = [summarize(our_file(rows), name, []) for name, rows in (("one", one), ("other", other))]
    assert most_differing(runs) == [4, 3, 1], "by 1.0, 0.3 and 0.1; image 2 does not differ"
