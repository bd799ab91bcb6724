"""A mirror on 127.0.0.1 that can be told to misbehave, and what it was asked."""

import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler


@dataclass
class Mirror:
    """Serves `files` (path to content) over HTTP and records the path and the Range header of each request."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    serves_ranges: bool = True
    closes_after: int | None = None  # the next answer breaks off after so many bytes of its body
    redirects: dict[str, str] = field(default_factory=dict)
    range_shift: int = 0  # a faulty server: answers with a range that starts elsewhere than asked

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


def handler(mirror: Mirror) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path, asked = self.path.removeprefix("/"), self.headers.get("Range")
            mirror.requests.append((path, asked))
            if path in mirror.redirects:
                self._head(302, 0, Location=mirror.redirects[path])
            elif path not in mirror.files:
                self._head(404, 0)
            else:
                self._serve(mirror.files[path], asked)

        def _serve(self, content: bytes, asked: str | None) -> None:
            match = re.fullmatch(r"bytes=(\d+)-", asked or "")
            if match is None or not mirror.serves_ranges:
                self._head(200, len(content))
                return self._body(content)
            start = int(match[1]) + mirror.range_shift
            if start >= len(content):
                return self._head(416, 0)
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._head(206, len(content) - start, **{"Content-Range": span})
            self._body(content[start:])

        def _head(self, status: int, length: int, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def _body(self, body: bytes) -> None:
            limit, mirror.closes_after = mirror.closes_after, None
            self.wfile.write(body[:limit])

    return Handler
