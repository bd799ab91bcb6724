"""A real browser for tests: Chromium without a window, driven over its DevTools protocol through two pipes.

https://chromedevtools.github.io/devtools-protocol: one JSON object a message, messages separated by a zero byte.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60.0
"""Seconds without any message after which the browser is taken for dead."""
_LOWEST_FREE = 10
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", "--mute-audio")
_COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """One tab. `complaints` are the console messages, uncaught errors and refused requests of all pages so far."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        theirs, mine = zip(os.pipe(), os.pipe()[::-1], strict=True)
        # Out of the way of 3 and 4, where the browser expects its ends and which may be in use here.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, _LOWEST_FREE) for end in theirs]
        redirections = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirections, "bash", PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (*theirs, *ends):
            os.close(end)
        self._out, self._in = mine
        self._rest = b""
        self._last_id = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self._events: list[dict[str, Any]] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda received: received.get("id") == self._last_id)
        assert "error" not in answer, f"{method}: {answer['error']['message']}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path) -> None:
        """Show `page` and wait until it has loaded."""
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        if not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._until(lambda received: received.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def centre(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """Where a fraction (x, y) of an element lies in the window, once it is scrolled into view."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.value(f"{element}.getBoundingClientRect().toJSON()")
        left, top, width, height = (box[key] for key in ("left", "top", "width", "height"))
        return left + x * width, top + y * height

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        left, top = self.centre(selector, x, y)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)

    def click(self, selector: str) -> None:
        left, top = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=left, y=top, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            while b"\0" not in self._rest:
                ready, _, _ = select.select([self._in], [], [], PATIENCE)
                received = os.read(self._in, 1 << 20) if ready else b""
                assert received, "the browser has ended or does not answer"
                self._rest += received
            text, _, self._rest = self._rest.partition(b"\0")
            message: dict[str, Any] = json.loads(text)
            if "method" in message:
                self._events.append(message)
                self._note(message["method"], message["params"])
            if wanted(message):
                return message

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method in _COMPLAINTS:
            self.complaints.append(json.dumps(parameters)[:500])
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.complaints.append(f"fetches {url}")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
