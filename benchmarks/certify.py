"""Votes per second of certification: the field's usual loop and ours, side by side in one process.

    python benchmarks/certify.py [--model lenet|resnet110] [--device cpu|cuda] [--votes 100000] [--compile]

The usual loop: float32, one image, batches of 1,000, noise added on the fly, counts moved to numpy after each batch,
and LeNet as a plain sequence of layers. Same weights in both.
Ours: `VoteCounter` as `smoothcert certify` uses it (noise, forward, counting and the bound included), at each
precision asked for, with integer (sound) noise and, if asked for, compiled. They take turns for several rounds; the
ratio is of the medians. Also prints the growth of resident memory when more votes are asked for.
"""

import argparse
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial

import numpy as np
import torch
from torch import nn

from smoothcert.models import CifarResNet, LeNet
from smoothcert.models.precision import DTYPES, at_precision, resolve_precision
from smoothcert.noise import Gaussian
from smoothcert.smoothing.certificate import certificate_of_class
from smoothcert.smoothing.integer_noise import IntegerGaussian
from smoothcert.smoothing.votes import VoteCounter, default_batch_size

SIGMA = 0.5


def usual_loop(model: nn.Module, image: torch.Tensor, n: int, batch_size: int = 1000) -> np.ndarray:
    """Votes per class, as the field's certification scripts count them."""
    counts = np.zeros(10, dtype=int)
    with torch.no_grad():
        while n > 0:
            size = min(batch_size, n)
            n -= size
            batch = image.repeat((size, 1, 1, 1))
            predictions = model(batch + torch.randn_like(batch) * SIGMA).argmax(1)
            counts += np.bincount(predictions.cpu().numpy(), minlength=10)
    return counts


def plain(model: nn.Module) -> nn.Module:
    """LeNet's layers in the order in which the papers list them; other networks as they are."""
    if not isinstance(model, LeNet):
        return model
    return nn.Sequential(
        model.conv1,
        nn.ReLU(),
        nn.MaxPool2d(2),
        model.conv2,
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        model.fc1,
        nn.ReLU(),
        model.fc2,
    )


def ours(counter: VoteCounter, image: torch.Tensor, n: int) -> None:
    selection, estimation = (counter.count(image[None], [(0, 0)], *s) for s in (("select", 100), ("estimate", n)))
    certificate_of_class(int(selection[0].argmax()), estimation[0].tolist(), 100, counter.noise, 0.001)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="lenet", choices=["lenet", "resnet110"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--votes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="fp32,auto", help="comma-separated: auto, fp32, bf16, fp16")
    parser.add_argument("--batch-size", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for, but torch sees no GPU; use --device cpu")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    print(f"{date.today()}  torch {torch.__version__}  {device.type} {hardware}  {arguments.threads} threads")

    torch.manual_seed(0)
    shape = (1, 28, 28) if arguments.model == "lenet" else (3, 32, 32)
    model = (LeNet(10) if arguments.model == "lenet" else CifarResNet(110, 10)).eval().to(device)
    usual = plain(model)
    image = (torch.randint(256, shape) / 255).to(device)
    batch_size = arguments.batch_size or default_batch_size(device, shape)
    precisions = dict.fromkeys(resolve_precision(p, device) for p in arguments.precision.split(","))
    counters: dict[str, VoteCounter] = {
        p: VoteCounter(at_precision(model, p, device, shape), Gaussian(SIGMA), 10, batch_size, DTYPES[p])
        for p in precisions
    }
    fast = list(counters)[-1]
    counters[f"{fast} sound"] = replace(counters[fast], sound=IntegerGaussian(SIGMA))
    if arguments.compile:
        counters[f"{fast} compiled"] = replace(counters[fast], compiled=True)
    runs: dict[str, Callable[[int], object]] = {"usual loop fp32": partial(usual_loop, usual, image)}
    runs |= {f"smoothcert {name}": partial(ours, counter, image) for name, counter in counters.items()}

    rates: dict[str, list[float]] = {name: [] for name in runs}
    for call in runs.values():
        call(min(5000, arguments.votes))
    for _ in range(arguments.rounds):
        for name, call in runs.items():
            rates[name].append(arguments.votes / seconds(partial(call, arguments.votes), device))
    base = statistics.median(rates["usual loop fp32"])
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:26s} {median:12,.0f} votes/s   {median / base:5.2f} x")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours(next(iter(counters.values())), image, 10 * arguments.votes if device.type == "cuda" else 2 * arguments.votes)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak resident memory: {before / 1024:.0f} MiB, after more votes {after / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
