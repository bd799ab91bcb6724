"""HTTP: POST /v1/predict (JSON or server-sent events), GET /v1/model, /healthz, /metrics and the page at /."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from smoothcert.certification.serve.engine import Job, QueueFullError
from smoothcert.certification.serve.pictures import data_url, noisy_copies, worst_change
from smoothcert.certification.serve.requests import Ask, RefusedError, decode_file, decode_raw, split_body
from smoothcert.certification.serve.rule import Plan
from smoothcert.certification.serve.service import ServedModel, Service, answer, context, state
from smoothcert.errors import RequestError
from smoothcert.io.text import one_line

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
"""Address -> file and type: on Windows, other programs may have registered other types."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
BODY_SECONDS = 30
"""Time in which a client must have sent its body."""


def make_app(service: Service, token: str | None = None) -> FastAPI:
    """The application around `service`; with a `token`, only the page and /healthz answer without it.

    The service is closed, and all accepted requests are answered, when the application shuts down.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(title="smoothcert", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    app.add_middleware(Guard, service=service, token=token)

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        scheduler = service.engine.scheduler
        now = {"queue_images": len(scheduler), "passes_total": scheduler.passes, "drawn_votes_total": scheduler.votes}
        return PlainTextResponse(service.metrics.text(**now), media_type="text/plain; version=0.0.4")

    @app.get("/v1/model")
    async def model() -> dict[str, Any]:
        return {"models": [m.describe() for m in service.models], "limits": vars(service.limits)}

    @app.post("/v1/predict")
    async def predict(request: Request) -> Response:
        return await answer_request(service, request)

    for path, (name, media_type) in PAGE_FILES.items():  # a mount of the folder would hide wrong methods of the others
        app.add_api_route(path, page_file(name, media_type), include_in_schema=False)
    app.add_exception_handler(RefusedError, lambda request, error: problem(error.status, error))
    app.add_exception_handler(RequestError, lambda request, error: problem(400, error))
    app.add_exception_handler(HTTPException, lambda request, error: problem(error.status_code, error.detail))
    for status in (404, 405):
        app.add_exception_handler(status, partial(unknown_address, status))
    full = "the queue is full; try again in a second, or send fewer images"
    app.add_exception_handler(QueueFullError, lambda request, error: problem(429, full, {"Retry-After": "1"}))
    app.add_exception_handler(Exception, lambda request, error: problem(500, "internal error; see the server's output"))
    return app


@dataclass
class Guard:
    """Asks for the token, adds the security headers, and counts responses."""

    app: ASGIApp
    service: Service
    token: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
                self.service.metrics.add(f'smoothcert_responses_total{{code="{message["status"]}"}}')
            await send(message)

        app: ASGIApp = self.app
        if self.token is not None and scope["path"] not in (*PAGE_FILES, "/healthz"):
            header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            wanted = "expected the header 'Authorization: Bearer TOKEN' with the token of this server"
            refusal = problem(401, wanted, {"WWW-Authenticate": "Bearer"})
            app = self.app if authorized(header, self.token) else refusal
        await app(scope, receive, send_with_headers)


def authorized(header: str, token: str) -> bool:
    """Compare the bearer token of a header in a time that depends on neither token."""
    kind, _, given = header.partition(" ")
    digests = (hashlib.sha256(text.encode()).digest() for text in (given.strip(), token))
    return hmac.compare_digest(*digests) and kind.lower() == "bearer"


def problem(status: int, message: object, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": one_line(message)}, status, headers)


def unknown_address(status: int, request: Request, error: Exception) -> JSONResponse:
    """The answer to an address that this server does not have, or has for another method."""
    wanted = "POST /v1/predict, or GET /v1/model, /healthz, /metrics or /"
    return problem(
        status, f"expected {wanted}, got {request.method} {request.url.path}", getattr(error, "headers", None)
    )


def page_file(name: str, media_type: str) -> Callable[[], Awaitable[FileResponse]]:
    async def give() -> FileResponse:
        return FileResponse(PAGE / name, media_type=media_type)

    return give


async def read_body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be longer than `limit` bytes."""
    refused = RefusedError(413, f"expected a body of at most {limit:,} bytes, got a longer one; send smaller images")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise refused
    parts = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise refused
                parts.append(part)
    except TimeoutError:
        raise RefusedError(408, f"expected the whole body within {BODY_SECONDS} seconds") from None
    return b"".join(parts)


def read_request(
    service: Service, media_type: str, query: dict[str, str], body: bytes
) -> tuple[Ask, ServedModel, Plan, list[Tensor], list[list[str]]]:
    """Check and decode a request: the question, the model, the plan, the images, and notes on each image."""
    ask, parts = split_body(media_type, query, body, service.limits)
    model = service.model(ask.model)
    plan = model.plan(ask.question(service.limits))
    if media_type == "application/octet-stream":
        images = list(decode_raw(parts[0], ask, model.decoder.shape, service.limits))
        return ask, model, plan, images, [[] for _ in images]
    names = ["the image"] if len(parts) == 1 else [f"image {k + 1}" for k in range(len(parts))]
    decoded = [
        decode_file(part, name, model.decoder, service.limits, resize=ask.resize)
        for part, name in zip(parts, names, strict=True)
    ]
    return ask, model, plan, [image for image, _ in decoded], [notes for _, notes in decoded]


async def answer_request(service: Service, request: Request) -> Response:
    """Answer POST /v1/predict: with JSON when all images have ended, or with a stream of events for one image."""
    body = await read_body(request, service.limits.body)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    query = dict(request.query_params)
    ask, model, plan, images, notes = await asyncio.to_thread(read_request, service, media_type, query, body)
    if "text/event-stream" in request.headers.get("accept", ""):
        if len(images) != 1:
            raise RequestError(f"expected one image for a stream of events, got {len(images)}")
        events = await start_stream(service, ask, model, plan, images[0], notes[0])
        return StreamingResponse(events, media_type="text/event-stream")
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[Job] = asyncio.Queue()

    def notify(job: Job) -> None:
        if job.ending is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ended.put_nowait, job)

    jobs = service.submit(model, images, plan, ask.milliseconds, notify)
    watch = asyncio.create_task(cancel_when_left(request, jobs))
    try:
        for _ in jobs:
            await ended.get()
    finally:
        watch.cancel()
    answers = [answer(job, model, notes[k]) for k, job in enumerate(jobs)]
    failed = all(job.ending == "failed" for job in jobs)
    return JSONResponse({"answers": answers, **context(plan, model)}, 500 if failed else 200)


async def cancel_when_left(request: Request, jobs: Sequence[Job]) -> None:
    """Let the jobs end at their next look once the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for job in jobs:
        job.cancelled = True


def event(kind: str, content: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n"


async def start_stream(
    service: Service, ask: Ask, model: ServedModel, plan: Plan, image: Tensor, notes: Sequence[str]
) -> AsyncIterator[str]:
    """Submit the job, so that a full queue is refused with a status, and return its events."""
    loop = asyncio.get_running_loop()
    looks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def notify(job: Job) -> None:
        """Describe the look in the thread of the engine, before the job continues."""
        shown = {**state(job, model), "n": job.progress.n if job.progress else 0, "ended": job.ending}
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(looks.put_nowait, shown)

    (job,) = service.submit(model, [image], plan, ask.milliseconds, notify)
    return stream(job, model, looks, ask.copies, notes)


async def stream(
    job: Job, model: ServedModel, looks: "asyncio.Queue[dict[str, Any]]", copies: int, notes: Sequence[str]
) -> AsyncIterator[str]:
    """The events of one image: `start`, a `look` for each look, then `answer` or `error`.

    A client who leaves ends the job at its next look.
    """
    try:
        yield event("start", {**context(job.plan, model), "picture": data_url(job.image[None]) if copies else None})
        before = 0
        while True:
            shown = await looks.get()
            n = shown["n"]
            if copies and n > before:
                shown["copies"] = await asyncio.to_thread(noisy_copies, job, before, n - before, copies)
            before = n
            yield event("look", shown)
            if shown["ended"] is not None:
                break
        final = answer(job, model, notes)
        if copies and "error" not in final:
            final["change"] = await asyncio.to_thread(worst_change, job, model)
        yield event("error" if "error" in final else "answer", final)
    finally:
        job.cancelled = True
