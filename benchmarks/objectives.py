"""What a training step of each method costs compared with Gaussian, at the MNIST presets, measured in one process.

    python benchmarks/objectives.py [--device cpu|cuda] [--sigma 0.5] [--images 512]

Prints seconds for one pass over the images (all chunks of all batches) and the ratio to Gaussian. The methods take
turns for three rounds; the figure is the median.
"""

import argparse
import platform
import statistics
import time
from datetime import date

import torch

from smoothcert.models import LeNet
from smoothcert.noise import Gaussian
from smoothcert.objectives import Progress
from smoothcert.papers.presets import PRESETS, preset


def one_pass(name: str, sigma: float, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Seconds to train on all images once."""
    recipe = preset(name, sigma)
    objective, size = recipe.objective, recipe.images_per_step
    device = images.device
    model = LeNet(10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    generator = torch.Generator(device).manual_seed(0)
    one = torch.ones((), device=device)
    teacher = LeNet(10).to(device).eval()  # of distillation
    shares = torch.full((size, 10), 0.1, device=device)  # votes of the teacher of CAT-RS
    start = time.perf_counter()
    for begin in range(0, len(images), size):
        batch = images[begin : begin + size]
        noise = Gaussian(sigma).sample((objective.num_noise, *batch.shape), generator)
        uniform = torch.rand(len(batch), generator=generator, device=device)
        progress = Progress(sigma, one, one, uniform, targets=shares[: len(batch)], teacher=teacher)
        objective.loss(model, batch, labels[begin : begin + size], noise, progress).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sigma", type=float, default=0.5)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for, but torch sees no GPU; use --device cpu")
    device = torch.device(arguments.device)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    print(f"{date.today()}  torch {torch.__version__}  {device.type} {hardware}  {torch.get_num_threads()} threads")
    images = torch.rand(arguments.images, 1, 28, 28, device=device)
    labels = torch.randint(10, (arguments.images,), device=device)
    names = [name for name in PRESETS if name.startswith("mnist/") and "ablation" not in name]
    for name in names:
        one_pass(name, arguments.sigma, images[:256], labels[:256])
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            times[name].append(one_pass(name, arguments.sigma, images, labels))
    base = statistics.median(times["mnist/gaussian"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:32s} {median:8.3f} s   {median / base:6.1f} x")


if __name__ == "__main__":
    main()
