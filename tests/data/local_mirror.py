"""A mirror on 127.0.0.1 that can be made to fail, and that records its requests."""

from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler


@dataclass
class Mirror:
    """Serves `files` (path to content) over HTTP and records the path of each request."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    closes_after: int | None = None  # the next answer ends after this number of bytes of its body
    redirects: dict[str, str] = field(default_factory=dict)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


def handler(mirror: Mirror) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.removeprefix("/")
            mirror.requests.append(path)
            if path in mirror.redirects:
                return self._answer(302, b"", Location=mirror.redirects[path])
            return self._answer(200, mirror.files[path]) if path in mirror.files else self._answer(404, b"")

        def _answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            limit, mirror.closes_after = mirror.closes_after, None
            self.wfile.write(body[:limit])

    return Handler
