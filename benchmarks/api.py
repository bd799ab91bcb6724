"""Votes per second through the Python interface and through the command line, side by side.

    python benchmarks/api.py [--model lenet|resnet20] [--images 20] [--n 10000] [--rounds 3] [--device cpu|cuda]

Both certify the same images of a random network into a file: `SmoothedClassifier.certify_loader(out=...)`, and what
`smoothcert certify --model` runs in its process (without the start of Python). They take turns; the ratio is of the
medians. The certificates must be equal.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import typer

import smoothcert as sc
from smoothcert.cli import app
from smoothcert.models import build_model

SHAPES = {"lenet": ("mnist-sample", (1, 28, 28)), "resnet20": ("cifar10", (3, 32, 32))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="lenet", choices=list(SHAPES))
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for, but torch sees no GPU; use --device cpu")
    dataset, shape = SHAPES[arguments.model]
    data = sc.load_dataset(dataset, "test")
    torch.manual_seed(0)
    model = build_model(arguments.model, shape, 10).eval().to(arguments.device)
    images, labels = data.batch(torch.arange(arguments.images))
    batches = [(images, labels)]
    command = typer.main.get_command(app)
    seconds: dict[str, list[float]] = {"command line": [], "Python": []}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        torch.save(model.cpu().state_dict(), weights)
        model.to(arguments.device)
        source = Path(folder) / "network.py"
        source.write_text(
            "import torch\nfrom smoothcert.models import build_model\n\n\ndef build():\n"
            f"    model = build_model({arguments.model!r}, {shape!r}, 10)\n"
            f"    model.load_state_dict(torch.load({str(weights)!r}))\n    return model.eval()\n"
        )
        for number in range(arguments.rounds + 1):  # the first round warms up
            out = Path(folder) / str(number)
            options = ["--sigma", "0.5", "--n", str(arguments.n), "--max-images", str(arguments.images), "--seed", "1"]
            network = ["--model", f"{source}:build", "--dataset", dataset, "--device", arguments.device]
            start = time.perf_counter()
            command(["certify", *network, *options, "--out", str(out)], standalone_mode=False)
            middle = time.perf_counter()
            smoothed = sc.SmoothedClassifier(model, sigma=0.5)
            (result,) = smoothed.certify_loader(batches, n=arguments.n, seed=1, out=out / "api.tsv")
            end = time.perf_counter()
            rows = sc.read_certificates(out / "certificates" / f"test-n{arguments.n}.tsv").rows
            assert [row.certificate for row in rows] == list(result)
            if number:
                seconds["command line"].append(middle - start)
                seconds["Python"].append(end - middle)
    votes = arguments.images * (arguments.n + 100)
    rates = {name: votes / statistics.median(times) for name, times in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:14s} {rate:12,.0f} votes/s   {rate / rates['command line']:5.2f} x")


if __name__ == "__main__":
    main()
