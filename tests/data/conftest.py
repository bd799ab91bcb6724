"""A mirror on 127.0.0.1, an address without a mirror, and a guard against reading values from a device."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from local_mirror import Mirror, handler
from torch import Tensor


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    mirror = Mirror()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(mirror))
    mirror.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield mirror
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def dead_url(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address that refuses connections at once: the port was free a moment ago."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.server_close()
    return f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the host reads a value of a tensor, because it would wait for a GPU."""

    def refuse(*_: object) -> None:
        raise AssertionError("a value is read")

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, name, refuse)
