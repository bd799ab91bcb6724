"""Load test of `smoothcert serve` on this machine, next to the library and to a naive loop.

    python benchmarks/serve.py RUN [--clients 64] [--images 512] [--votes 10000] [--radius 0.5] [--seconds 4]

Clients send one image per request and wait for its answer. The library certifies the same images by the same rule, in
batches, before and after the server; machines change their speed, so trust the ratio. The naive server answers one
request after the other, each with all votes in a plain loop. At last the server is killed under load and restarted:
each request must have an answer or a connection that failed, and the log must have whole rows only.
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from smoothcert.certification.prepare import Prepared
from smoothcert.certification.serve.log import read_log
from smoothcert.certification.settings import CertifySettings, images_at_once, make_counter
from smoothcert.data import load_dataset
from smoothcert.smoothing.certificate import certificate_of_class
from smoothcert.training.checkpoint import Run, load_run

NAIVE_IMAGES, NAIVE_BATCH = 12, 100


class Server:
    """A server process on a port that stays the same after a restart."""

    def __init__(self, run: Path, log: Path, queue: int, port: int = 0) -> None:
        command = [sys.executable, "-m", "smoothcert", "serve", run, "--port", port, "--log", log, "--queue", queue]
        environment = {**os.environ, "COLUMNS": "200"}
        self.process = subprocess.Popen(
            list(map(str, [*command, "--device", "cpu"])), stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("open http"))
        self.port = int(line.split()[1].rpartition(":")[2])


@dataclass
class Load:
    """What the clients saw."""

    seconds: list[float] = field(default_factory=list)
    votes: int = 0
    errors: list[str] = field(default_factory=list)
    failures: int = 0
    """Requests whose connection failed: the client knows that it has no answer."""
    wall: float = 0.0


def ask(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, dict[str, object]]:
    connection.request("POST", path, body, {"Content-Type": "application/octet-stream"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def run_clients(
    port: int, clients: int, bodies: list[bytes], path: str, *, until: threading.Event | None = None
) -> Load:
    """Each of `clients` threads sends the next image as soon as it has an answer: all images, or `until` is set."""
    load, lock, position = Load(), threading.Lock(), iter(range(len(bodies) if until is None else 10**9))

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while until is None or not until.is_set():
            with lock:
                k = next(position, None)
            if k is None:
                return
            started = time.perf_counter()
            try:
                status, found = ask(connection, path, bodies[k % len(bodies)])
            except (OSError, http.client.HTTPException):
                connection.close()
                with lock:
                    load.failures += 1
                time.sleep(0.05)
                continue
            with lock:
                load.seconds.append(time.perf_counter() - started)
                answers = found.get("answers")
                if status != 200 or not isinstance(answers, list) or len(answers) != 1 or "error" in answers[0]:
                    load.errors.append(f"{status} {found}"[:200])
                else:
                    load.votes += answers[0]["votes_used"]

    started = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load.wall = time.perf_counter() - started
    return load


def library(run: Run, images: torch.Tensor, settings: CertifySettings) -> tuple[float, int]:
    """Seconds and votes of the library for the same images and rule, in the batches of `smoothcert certify`."""
    device, shape = torch.device("cpu"), run.spec.shape
    recipe = settings.completed({}, device, shape, {"sigma": run.recipe.sigma, "noise": run.recipe.noise})
    counter = make_counter(run.model, shape, run.spec.num_classes, recipe, device)
    prepared, group = Prepared(counter, recipe, shape, device), images_at_once(recipe)
    prepared.certify(images[:1], [(0, 0)])  # loads what the first call needs
    started, votes = time.perf_counter(), 0
    for start in range(0, len(images), group):
        part = images[start : start + group]
        rows = prepared.certify(part, [(recipe.seed, start + k) for k in range(len(part))])
        votes += sum(row.n0 + row.n for row in rows)
    return time.perf_counter() - started, votes


@torch.no_grad()
def naive(run: Run, images: torch.Tensor, votes: int, alpha: float = 0.001) -> float:
    """Seconds per request of a server without batching and sequential tests: a plain loop over all votes."""
    from smoothcert.noise import NOISES

    noise, model = NOISES[run.recipe.noise](run.recipe.sigma), run.model.eval()
    assert isinstance(model, nn.Module)
    started = time.perf_counter()
    for image in images:
        counts = []
        for n in (100, votes):
            total = np.zeros(run.spec.num_classes, dtype=np.int64)
            for start in range(0, n, NAIVE_BATCH):
                size = min(NAIVE_BATCH, n - start)
                noisy = image + torch.randn(size, *image.shape) * noise.sigma
                total += np.bincount(model(noisy).argmax(1).numpy(), minlength=len(total))
            counts.append(total)
        certificate_of_class(int(counts[0].argmax()), counts[1].tolist(), 100, noise, alpha)
    return (time.perf_counter() - started) / len(images)


def rows_of(log: Path) -> int:
    return sum(len(read_log(file)[0]) for file in log.glob("*.tsv"))


def kill_and_restart(
    server: Server, run: Path, log: Path, clients: int, bodies: list[bytes], path: str, seconds: float
) -> None:
    """Kill `server` under load, start another one on its port and log, and compare answers, failures and rows."""
    earlier, stop = rows_of(log), threading.Event()
    results: list[Load] = []
    thread = threading.Thread(target=lambda: results.append(run_clients(port, clients, bodies, path, until=stop)))
    port = server.port
    thread.start()
    time.sleep(seconds)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    torn = [file.name for file in log.glob("*.tsv") if not file.read_bytes().endswith(b"\n")]
    server = Server(run, log, 4 * clients, port)
    time.sleep(seconds)
    stop.set()
    thread.join()
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait()
    rows = rows_of(log) - earlier
    (load,) = results
    print(
        f"kill -9 and restart under load: {len(load.seconds)} answers, {load.failures} failed connections, "
        f"{len(load.errors)} errors, {rows} rows in the log, torn rows: {len(torn)}, exit code at the end: {code}"
    )
    assert rows >= len(load.seconds), "an answer is not in the log"
    assert not torn
    assert not load.errors, load.errors[:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--votes", type=int, default=10_000)
    parser.add_argument("--radius", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=4.0, help="load before the server is killed, and after")
    arguments = parser.parse_args()
    run = load_run(arguments.run)
    data = load_dataset(run.recipe.dataset, "test")
    images, _ = data.batch(torch.arange(arguments.images) % len(data))
    bodies = [image.numpy().astype("<f4").tobytes() for image in images]
    settings = CertifySettings(n=arguments.votes, radii=(arguments.radius,), hold_back=False, seed=1)
    path = f"/v1/predict?votes={arguments.votes}&radius={arguments.radius}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        before = library(run, images, settings)
        server = Server(arguments.run, log, 4 * arguments.clients)
        load = run_clients(server.port, arguments.clients, bodies, path)
        after = library(run, images, settings)
        rows = rows_of(log)
        answered, speed = len(load.seconds), load.votes / load.wall
        speeds = [votes / seconds for seconds, votes in (before, after)]
        print(
            f"{arguments.run.name}: {arguments.clients} clients, {len(bodies)} requests, radius {arguments.radius:g}, "
            f"at most {arguments.votes:,} votes, {torch.get_num_threads()} threads"
        )
        print(
            f"answers: {answered}, errors: {len(load.errors)}, lost: {len(bodies) - answered}, rows in the log: {rows}"
        )
        print(
            f"server: {answered / load.wall:.1f} answers/s, {speed:,.0f} votes/s; library before and after: "
            f"{speeds[0]:,.0f} and {speeds[1]:,.0f} votes/s; ratio {speed / np.mean(speeds):.2f}"
        )
        p50, p99 = (1000 * np.quantile(load.seconds, q) for q in (0.5, 0.99))
        print(f"time to an answer: median {p50:.0f} ms, 99th percentile {p99:.0f} ms")
        each = naive(run, images[:NAIVE_IMAGES], arguments.votes)
        print(
            f"naive loop, one request after the other, all votes: {1 / each:.2f} answers/s; "
            f"the server is {answered / load.wall * each:.1f} x faster"
        )
        assert not load.errors, load.errors[:3]
        assert answered == len(bodies) == rows
        kill_and_restart(server, arguments.run, log, arguments.clients, bodies, path, arguments.seconds)


if __name__ == "__main__":
    main()
