"""A uvicorn server around the application: its socket, its signals, and an end that answers what was accepted."""

import ipaddress
import logging
import signal
import socket
from pathlib import Path

import uvicorn

from smoothcert.certification.serve.app import make_app
from smoothcert.certification.serve.service import Service
from smoothcert.errors import RequestError

GRACE_SECONDS = 5
"""Time beyond the longest deadline in which accepted requests are answered at the end."""


def read_token(path: Path) -> str:
    """The token in the first line of a file."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: expected a text file with a token, got none that can be read") from error
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise RequestError(
            f"{path}: expected one line of at least 16 visible ASCII characters; "
            "`python -c 'import secrets; print(secrets.token_urlsafe())'` makes a token"
        )
    return token


def is_local(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port` (0: any free port)."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = str(error).partition(" (while")[0]  # the address follows
        raise RequestError(
            f"cannot listen on {host}, port {port} ({reason}); choose another --port or --host"
        ) from None


def address(listener: socket.socket) -> str:
    """The address of a listening socket, for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(service: Service, listener: socket.socket, token: str | None = None) -> None:
    """Serve until SIGINT or SIGTERM; then refuse new connections and answer the accepted requests."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    config = uvicorn.Config(
        make_app(service, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=service.limits.milliseconds // 1000 + GRACE_SECONDS,
    )
    # uvicorn raises the signal again after its shutdown; stopping a server is not an error.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listener])
