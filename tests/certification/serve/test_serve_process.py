"""A real server process: its page in a real browser, and its end, which answers what was accepted."""

import http.client
import json
import math
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny  # noqa: F401 - processes that load the trained run need its network
import torch
from processes import PATIENCE, print_to, start_process

from report.browser import PROGRAM, Browser
from smoothcert import cli
from smoothcert.certification.serve.log import read_log

from .conftest import png

CLIENTS = 12


def serve(run: Path, log: Path, output: Path) -> None:
    print_to(output)
    sys.argv = ["smoothcert", "serve", str(run), "--port", "0", "--device", "cpu", "--log", str(log)]
    cli.main()


class Server:
    """`smoothcert serve RUN --port 0` and its address."""

    def __init__(self, run: Path, log: Path) -> None:
        output = log.parent / "server"
        self.process = start_process(serve, run, log, output)
        deadline, shown = time.monotonic() + PATIENCE, ""
        while "open http" not in shown:
            assert time.monotonic() < deadline, shown
            assert self.process.is_alive(), shown
            time.sleep(0.05)
            printed = output.with_suffix(".out")
            shown = printed.read_text() if printed.exists() else ""
        self.url = shown.partition("open ")[2].split()[0]

    def predict(self, body: bytes, query: str) -> dict[str, object]:
        request = urllib.request.Request(
            f"{self.url}/v1/predict?{query}", body, {"Content-Type": "image/png"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            found: dict[str, object] = json.load(response)
            return found


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "log"


@pytest.fixture(scope="module")
def server(trained_run: Path, log: Path) -> Iterator[Server]:
    started = Server(trained_run, log)
    yield started
    started.process.kill()
    started.process.join()


def until(browser: Browser, condition: str) -> None:
    """Wait until a condition holds in the page."""
    for _ in range(300):
        if browser.value(condition):
            return
        time.sleep(0.1)
    pytest.fail(f"{condition} does not become true: {browser.value('document.body.innerText')[-500:]}")


def draw_zero(browser: Browser) -> None:
    """Draw an ellipse with the mouse."""
    points = [(0.5 + 0.22 * math.sin(k / 3), 0.5 - 0.34 * math.cos(k / 3)) for k in range(20)]
    for kind, point in (
        ("mousePressed", points[0]),
        *(("mouseMoved", p) for p in points),
        ("mouseReleased", points[-1]),
    ):
        x, y = browser.centre("#pad", *point)
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)


def drop(browser: Browser, content: bytes) -> None:
    """Drop a file on the page."""
    browser.value(
        "(() => { const carried = new DataTransfer();"
        f"carried.items.add(new File([Uint8Array.of({','.join(map(str, content))})], 'a.png', {{type: 'image/png'}}));"
        "document.dispatchEvent(new DragEvent('drop', {dataTransfer: carried, bubbles: true, cancelable: true})) })()"
    )


LEFT = """(async () => {
  const content = JSON.stringify({n: 0, votes: {}, radius: 0, abstained: true, notes: [], votes_used: 0});
  const events = ["look", "answer"].map((kind) => `event: ${kind}\\ndata: ${content}\\n\\n`).join("");
  const left = new AbortController(), chunks = [{done: false, value: new TextEncoder().encode(events)}, {done: true}];
  matchMedia = () => ({matches: false});
  const shown = follow({read: async () => chunks.shift()}, left.signal);
  setTimeout(() => left.abort(), 0);
  await shown;
})()"""
"""An answer of which all events have arrived, and whose looks are being shown when the next image is sent."""


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine: install Debian's chromium")
def test_page_shows_certificates_of_drawn_and_dropped_digits_and_the_problem_of_a_bad_file(
    server: Server, tmp_path: Path, digit: torch.Tensor
) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.call("Page.navigate", url=server.url)
        until(browser, "typeof models !== 'undefined' && models.length === 1")
        browser.value("matchMedia = () => ({matches: true})")  # no animation
        draw_zero(browser)
        drop(browser, png(digit))  # before the drawing is sent
        until(browser, "document.getElementById('claim').textContent.startsWith('Every image closer')")
        assert browser.value("lastImage.type") == "image/png"
        until(browser, "pen.getImageData(0, 0, 280, 280).data.some((value, k) => k % 4 === 0 && value)")
        browser.value("new Promise(done => setTimeout(done, 750))")
        assert browser.value("lastImage.type") == "image/png", "the drawing is not sent in place of the file"
        browser.value(LEFT)
        assert browser.value("document.getElementById('class').textContent") == "0", "not the answer that was left"
        browser.value("matchMedia = () => ({matches: true})")
        draw_zero(browser)
        until(browser, "lastImage.type === 'application/octet-stream'")
        until(browser, "document.getElementById('claim').textContent.startsWith('Every image closer')")
        assert browser.value("document.getElementById('class').textContent") == "0"
        assert float(browser.value("document.getElementById('radius').textContent")) > 0.1
        assert browser.value("document.querySelectorAll('.copy').length") == 8
        assert browser.value("document.querySelectorAll('.bar .bound').length") == 1
        until(browser, "document.getElementById('changed').naturalWidth === 28")
        drop(browser, b"not an image")
        until(browser, "!document.getElementById('message').hidden")
        assert "expected a PNG or JPEG file" in browser.value("document.getElementById('message').textContent")
        assert browser.value("document.getElementById('details').hidden")
        for width in (390, 320):
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=True
            )
            assert browser.value("document.documentElement.scrollWidth") <= width
        ours = [line for line in browser.complaints if not line.startswith(f"fetches {server.url}")]
        # The browser reports the status of the refused file, and the picture that it cannot show.
        assert [line for line in ours if "400" not in line and not line.startswith("fetches blob:")] == []


@pytest.mark.slow
def test_shutdown_answers_what_was_accepted(server: Server, log: Path, digit: torch.Tensor) -> None:
    """Clients ask until the server stops: a request is answered, or never reached the server, as the log shows."""
    body, busy, answers, refused = png(digit), threading.Event(), [], []

    def client() -> None:
        while True:
            try:
                answers.append(server.predict(body, "votes=100&rule=fixed"))
                if len(answers) >= CLIENTS:
                    busy.set()
            except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
                refused.append(error)
                return

    assert json.load(urllib.request.urlopen(f"{server.url}/healthz", timeout=60)) == {"status": "ok"}
    before = sum(len(read_log(path)[0]) for path in log.glob("*.tsv"))
    with ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(CLIENTS):
            pool.submit(client)
        assert busy.wait(PATIENCE)
        server.process.terminate()
        server.process.join(PATIENCE)
    assert server.process.exitcode == 0
    assert len(refused) == CLIENTS
    assert not any(isinstance(error, urllib.error.HTTPError) for error in refused)
    rows = [row for path in log.glob("*.tsv") for row in read_log(path)[0]]
    assert len(rows) - before == len(answers)
    assert all(len(found["answers"]) == 1 for found in answers)  # type: ignore[arg-type]
