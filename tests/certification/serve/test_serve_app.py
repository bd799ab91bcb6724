"""The HTTP interface in this process: answers, limits, errors, token, streams and metrics."""

import base64
import json
import math
import shutil
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from tiny import TinyNet, other_run
from torch import nn

from smoothcert.certification.serve import app as app_module
from smoothcert.certification.serve.app import authorized, make_app
from smoothcert.certification.serve.log import read_log
from smoothcert.certification.serve.rule import Question
from smoothcert.certification.serve.service import BUCKETS, Metrics, ServedModel, Service
from smoothcert.certification.settings import CertifySettings
from smoothcert.certification.subject import Subject
from smoothcert.errors import RequestError
from smoothcert.models import MODELS, ModelSpec
from smoothcert.smoothing.bounds import error_upper_bound
from smoothcert.training.checkpoint import load_run

from .conftest import png, served_run

PNG = {"content-type": "image/png"}
RAW = {"content-type": "application/octet-stream"}
JSON = {"content-type": "application/json"}


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service), raise_server_exceptions=False) as started:
        yield started


def predict(client: TestClient, body: bytes, headers: dict[str, str] = PNG, **query: object) -> Any:
    response = client.post("/v1/predict", content=body, headers=headers, params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_one_image_gets_a_certificate_that_its_votes_show(
    client: TestClient, service: Service, digit: torch.Tensor
) -> None:
    found = predict(client, png(digit), votes=2000, rule="fixed")
    (answer,) = found["answers"]
    assert answer["class"] == 0
    assert answer["abstained"] is False
    count = answer["votes"]["0"]
    assert sum(answer["votes"].values()) == 2000
    assert answer["votes_used"] == 2100
    q = error_upper_bound(count, 2000, 0.001)
    noise = service.models[0].counter.noise
    assert answer["radius"] == pytest.approx(noise.radius(q))
    assert answer["lower_bound"] == pytest.approx(1 - q)
    assert found["model"]["digest"] == service.models[0].digest
    assert found["rule"] == {"name": "fixed", "radius": None, "votes": 2000, "alpha": 0.001, "looks": 4}
    assert "operating system" in found["seeds"]


def test_the_log_names_the_model_of_each_answer(
    served: ServedModel, trained_run: Path, tmp_path: Path, digit: torch.Tensor
) -> None:
    other = served_run(other_run(load_run(trained_run), tmp_path / "other", 1))
    service = Service([served, other], log=tmp_path / "log")
    asked = [(other, 500), (served, 600), (other, 700)]
    for model, votes in asked:
        plan = model.plan(Question(votes, 0.001, None, "fixed"))
        service.submit(model, [digit.unsqueeze(0) / 255], plan, None, lambda job: None)
    service.close()
    rows, _ = read_log(tmp_path / "log" / "certificates-00001.tsv")
    answered = {(row.model, row.question.votes) for row in rows}  # in whatever order
    assert answered == {(model.key, votes) for model, votes in asked}


def test_same_image_in_every_encoding(client: TestClient, digit: torch.Tensor) -> None:
    """The noise differs, so only the class is compared."""
    floats = (digit.numpy() / np.float32(255)).astype("<f4").tobytes()
    bodies = [
        (png(digit), PNG, {}),
        (png(digit, "JPEG"), {"content-type": "image/jpeg"}, {}),
        (floats, RAW, {"shape": "1,28,28"}),
        (floats * 3, RAW, {"shape": "3,1,28,28", "dtype": "float32"}),
        (digit.numpy().tobytes(), RAW, {"dtype": "uint8"}),
        (png(digit.repeat_interleave(3, 0).repeat_interleave(3, 1)), PNG, {"resize": "true"}),
    ]
    for body, headers, query in bodies:
        found = predict(client, body, headers, radius=0.05, votes=3000, **query)
        assert [(a["class"], a["certified"], a["ended"]) for a in found["answers"]] == [(0, True, "decided")] * (
            3 if "3,1,28,28" in query.values() else 1
        )
    assert found["answers"][0]["notes"] == ["scaled and cropped to 28x28 pixels: the radius is about the result"]
    images = [base64.b64encode(png(digit)).decode()] * 2
    found = predict(client, json.dumps({"images": images, "radius": 0.05}).encode(), JSON)
    assert [a["class"] for a in found["answers"]] == [0, 0]


def test_noise_is_new_for_each_request(client: TestClient, digit: torch.Tensor) -> None:
    faint = png((digit * 0.2).to(torch.uint8))
    votes = [predict(client, faint, votes=1000, rule="fixed")["answers"][0]["votes"] for _ in range(3)]
    assert not votes[0] == votes[1] == votes[2]


def test_deadline_answers_at_a_look(client: TestClient, digit: torch.Tensor) -> None:
    (answer,) = predict(client, png(digit), votes=20_000, milliseconds=1, rule="fixed")["answers"]
    assert answer["ended"] == "deadline"
    assert answer["abstained"]
    assert sum(answer["votes"].values()) % 500 == 0


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(side: int) -> bytes:
    """A small PNG file whose header promises side x side pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


SMALL = png(torch.zeros(28, 28, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("body", "headers", "query", "status", "message"),
    [
        (b"x" * 100_001, PNG, "", 413, "at most 100,000 bytes"),
        (bomb(5000), PNG, "?resize=true", 413, "at most 10,000 pixels, got 5000x5000"),
        (bomb(30_000), PNG, "?resize=true", 400, "at most 178,956,970 pixels, got more"),
        (bomb(28), PNG, "", 200, ""),
        (SMALL[:45], PNG, "", 400, "cannot be decoded (image file is truncated); send another"),
        (b"GIF89a", PNG, "", 400, "expected a PNG or JPEG file, got 6 bytes"),
        (b"", PNG, "", 400, "got 0 bytes"),
        (png(torch.zeros(5, 6, dtype=torch.uint8)), PNG, "", 400, "28x28 pixels, got 6x5; scale it, or add resize"),
        (SMALL, {"content-type": "text/plain"}, "", 415, "expected the content type image/png"),
        (SMALL, PNG, "?radius=-1", 400, "radius: expected greater than 0"),
        (SMALL, PNG, "?radius=nan", 400, "radius: expected a finite number"),
        (SMALL, PNG, "?radius=5", 400, "cannot certify radius 5"),
        (SMALL, PNG, "?radius=1e-12", 400, "expected at least 1e-06 sigma"),
        (SMALL, PNG, "?alpha=1", 400, "alpha: expected at most 0.5"),
        (SMALL, PNG, "?votes=1000000", 400, "votes: expected at most 20,000 on this server"),
        (SMALL, PNG, "?milliseconds=1e9", 400, "milliseconds: expected at most 30,000"),
        (SMALL, PNG, "?seed=1", 400, "seed: unknown key"),
        (SMALL, PNG, "?radius=0.1&rule=fixed", 400, "expected none with rule=fixed"),
        (SMALL, PNG, "?model=../../etc/passwd", 404, "model: expected trained"),
        (b"1234", RAW, "", 400, "expected 3136 bytes per image"),
        (b"\0\0\xc0\x7f" * 784, RAW, "", 400, "expected numbers from 0 to 1"),
        (bytes(784 * 5), RAW, "?dtype=uint8", 413, "at most 4 images"),
        (bytes(784), RAW, "?dtype=uint8&shape=28,28", 400, "shape: expected 1,28,28"),
        (b"[" * 50_000, JSON, "", 400, "not JSON"),
        (b'{"images": ["%%%"]}', JSON, "", 400, "expected base64"),
        (b'{"images": []}', JSON, "", 400, "images: expected a list of PNG or JPEG files in base64, got none"),
        (b'{"image": "aaaa"}', JSON, "", 400, "in base64, got none"),
        (b'{"images": "aaaa"}', JSON, "", 400, "in base64, got str"),
        (b'{"images": ["aaaa", 1]}', JSON, "", 400, "in base64, got a list with other values"),
        (json.dumps({"images": ["aaaa"] * 5}).encode(), JSON, "", 413, "at most 4"),
        (
            json.dumps({"images": ["aaaa"], "rule": "x"}).encode(),
            JSON,
            "",
            400,
            "rule: expected 'sequential' or 'fixed'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_wrong_requests_cost_one_line(
    client: TestClient, body: bytes, headers: dict[str, str], query: str, status: int, message: str
) -> None:
    response = client.post("/v1/predict" + query, content=body, headers=headers)
    assert response.status_code == status, response.text
    if status == 200:
        return
    error = response.json()["error"]
    assert message in error
    assert "\n" not in error
    assert "Traceback" not in response.text
    assert len(error) < 400


def test_full_queue_is_refused_with_429(client: TestClient, service: Service, digit: torch.Tensor) -> None:
    service.engine.scheduler.limit = 2
    response = client.post("/v1/predict", content=digit.numpy().tobytes() * 3, headers=RAW, params={"dtype": "uint8"})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert "the queue is full" in response.json()["error"]
    assert len(service.engine.scheduler) == 0


def test_unknown_errors_show_no_details(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(app_module, "read_request", fail)
    response = client.post("/v1/predict", content=SMALL, headers=PNG)
    assert response.status_code == 500
    assert response.json() == {"error": "internal error; see the server's output"}


def test_token_is_asked_for_everywhere_but_on_the_page_and_for_health(service: Service) -> None:
    with TestClient(make_app(service, "correct-horse-battery")) as client:
        for path, status in (("/v1/model", 401), ("/metrics", 401), ("/nothing", 401), ("/healthz", 200), ("/", 200)):
            assert client.get(path).status_code == status
        assert client.post("/v1/predict", content=SMALL, headers=PNG).status_code == 401
        for header, status in (("Bearer correct-horse-battery", 200), ("Bearer correct", 401), ("Basic x", 401)):
            assert client.get("/v1/model", headers={"authorization": header}).status_code == status
    assert not authorized("", "")
    assert authorized("bearer x", "x")


def test_stream_shows_looks_copies_and_a_covered_change(client: TestClient, digit: torch.Tensor) -> None:
    headers = {**PNG, "accept": "text/event-stream"}
    response = client.post("/v1/predict?copies=4&votes=3000", content=png(digit), headers=headers)
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    events = [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in blocks]
    kinds = [kind for kind, _ in events]
    assert kinds[0] == "start"
    assert set(kinds[1:-1]) == {"look"}
    assert kinds[-1] == "answer"
    looks = [content for kind, content in events if kind == "look"]
    assert looks[0]["n"] == 0
    assert [look["n"] for look in looks[1:]] == list(range(500, looks[-1]["n"] + 1, 500))
    assert all(later["radius"] >= look["radius"] for look, later in pairwise(looks))
    assert all(len(look["copies"]["classes"]) == 4 for look in looks[1:])
    final = events[-1][1]
    assert final["class"] == 0
    assert final["change"]["class"] == 0
    assert 0 < final["change"]["distance"] <= final["radius"] * (1 + 1e-5)
    refused = client.post("/v1/predict?radius=-1", content=png(digit), headers=headers)
    assert refused.status_code == 400


def test_model_metrics_and_log_agree(
    client: TestClient, service: Service, served: ServedModel, digit: torch.Tensor, tmp_path: Path
) -> None:
    described = client.get("/v1/model").json()
    assert described["models"][0]["weights_sha256"] == served.digest
    assert described["models"][0]["shape"] == [1, 28, 28]
    assert described["limits"]["queue"] == 8
    assert str(tmp_path) not in json.dumps(described)
    answers = predict(client, digit.numpy().tobytes() * 2, RAW, dtype="uint8", radius=0.05)["answers"]
    (fixed,) = predict(client, png(digit), rule="fixed", votes=1000)["answers"]
    rows, _ = read_log(tmp_path / "log" / "certificates-00001.tsv")
    assert [row.certificate.radius for row in rows] == [a["radius"] for a in (*answers, fixed)]
    text = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines())
    assert float(values["smoothcert_votes_total"]) == sum(a["votes_used"] for a in (*answers, fixed))
    assert float(values["smoothcert_answer_seconds_count"]) == 3
    assert float(values["smoothcert_queue_images"]) == 0
    wanted = "expected POST /v1/predict, or GET /v1/model, /healthz, /metrics or /, got"
    unknown, other_method = client.get("/docs"), client.get("/v1/predict")
    assert (unknown.status_code, unknown.json()) == (404, {"error": f"{wanted} GET /docs"})
    assert (other_method.status_code, other_method.json()) == (405, {"error": f"{wanted} GET /v1/predict"})
    assert other_method.headers["allow"] == "POST"
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http-equiv", "")


def test_metrics_count_every_vote_and_have_all_buckets_in_order() -> None:
    metrics = Metrics()
    for votes in (10**9, 1):
        metrics.add("smoothcert_votes_total", votes)
    for seconds in (0.3, 20.0, 400.0):
        metrics.observe(seconds)
    lines = [line.rsplit(" ", 1) for line in metrics.text(queue_images=2).splitlines()]
    assert ["smoothcert_votes_total", "1000000001"] in lines
    assert lines[-1] == ["smoothcert_queue_images", "2"]
    buckets = [(float(name.split('"')[1]), int(count)) for name, count in lines if "_bucket" in name]
    assert [limit for limit, _ in buckets] == [*sorted(BUCKETS), math.inf]
    assert all(count == sum(seconds <= limit for seconds in (0.3, 20.0, 400.0)) for limit, count in buckets)


def test_a_network_with_dependent_votes_is_not_served(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Centred(TinyNet):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images - images.mean(0))

    monkeypatch.setitem(MODELS, "tiny", ModelSpec("of the other images in the batch", (1, 28, 28), Centred))
    with pytest.raises(RequestError, match="depend on one input alone"):
        served_run(trained_run)


def test_wrong_options_of_the_command_cost_one_line(
    trained_run: Path, tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "token").write_text("short")
    shutil.copytree(trained_run, tmp_path / "copy")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in (
            ((), "expected run folders, --model, --hub or --demo, got none of them"),
            ((trained_run, "--demo"), "got several of them"),
            ((tmp_path / "no",), "no such run folder"),
            ((trained_run, tmp_path / "copy", "--port", 0), "expected runs with different weights"),
            ((trained_run, trained_run, "--port", 0), "name each once, or rename a folder"),
            ((trained_run, "--port", port), f"cannot listen on 127.0.0.1, port {port}"),
            ((trained_run, "--sigma", -1, "--port", 0), "sigma: expected greater than 0, got -1"),
            ((trained_run, "--token", tmp_path / "token"), "at least 16 visible ASCII characters"),
        ):
            code, _, error = run_cli("serve", *arguments)
            assert (code, error.count("\n")) == (2, 1)
            assert message in error


def test_the_network_itself_is_not_moved_to_the_device(trained_run: Path) -> None:
    """What votes is a copy on the device: the network there as well would take its memory twice."""
    moved: list[nn.Module] = []

    class Recorded(nn.Sequential):
        def to(self, *args: Any, **options: Any) -> "Recorded":
            moved.append(self)
            return super().to(*args, **options)

    run = load_run(trained_run)
    subject = Subject.of(Recorded(run.model))
    settings = CertifySettings(sigma=0.5)
    served = ServedModel.of("mine", subject, run.spec, run.recipe.dataset, torch.device("cpu"), settings)
    assert isinstance(subject.classifier, Recorded)
    assert served.counter.classifier is not subject.classifier
    assert all(network is not subject.classifier for network in moved)
