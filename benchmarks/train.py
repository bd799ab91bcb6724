"""Seconds per epoch of training: the usual loop and ours, one after the other in one process.

    python benchmarks/train.py [--run lenet|resnet110|resnet20|resnet50] [--methods gaussian,consistency,smoothmix]
                               [--epochs 3] [--usual-steps 100] [--no-usual] [--precision auto] [--jobs 1,4]
                               [--images 60000] [--folder FOLDER]

The usual loop: a DataLoader with worker processes, batches cut into one chunk per noise, float32 (TF32 convolutions)
without capture, SGD, and the loss and accuracy read by the host after each step. It runs `--usual-steps` steps, from
which its epoch is computed. Ours: `smoothcert.training.loop.train` as `smoothcert train` calls it, the median of its
epochs after the first; with `--compile` it is compiled in the first epoch however short the run. The first epoch is
shown too: it holds the start. `--jobs` trains several copies side by side and prints what that does to the total.
Images are random pixels on the device: speed does not depend on them. With `--folder`, ours reads the images of the
data set from there, such as ImageNet's FOLDER/train/<wnid>/*.JPEG, with random crops in worker processes.
"""

import argparse
import json
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from smoothcert.data import DATASETS, ImageData, Images, load_dataset
from smoothcert.objectives import Progress
from smoothcert.papers.presets import preset
from smoothcert.training.checkpoint import InputSpec, new_model
from smoothcert.training.choices import Compiling
from smoothcert.training.loop import train
from smoothcert.training.metrics import METRICS
from smoothcert.training.recipe import TrainRecipe, with_overrides
from smoothcert.training.several_runs import train_together

RUNS = {
    "lenet": ("mnist", 1.0, 60_000),
    "resnet110": ("cifar10", 0.5, 50_000),
    "resnet20": ("cifar10", 0.5, 50_000),
    "resnet50": ("imagenet", 0.5, 2_560),
}


def random_images(dataset: str, count: int) -> ImageData:
    spec = DATASETS[dataset]
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, *spec.shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(spec.num_classes, (count,), generator=generator)
    return ImageData(pixels, labels, spec.num_classes, dataset, "train", spec.normalization)


def usual_epoch_seconds(recipe: TrainRecipe, data: ImageData, device: torch.device, steps: int) -> float:
    model = new_model(recipe.model, InputSpec.of(data)).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    floats = TensorDataset(data.images.float() / 255, data.labels)
    loader = DataLoader(floats, recipe.batch_size, shuffle=True, num_workers=4, pin_memory=True, drop_last=True)
    one = torch.ones((), device=device)
    objective, done, started = recipe.objective, 0, 0.0
    while True:
        for images, labels in loader:
            for chunk, targets in zip(
                images.split(recipe.images_per_step), labels.split(recipe.images_per_step), strict=True
            ):
                chunk, targets = chunk.to(device), targets.to(device)
                noise = torch.stack([torch.randn_like(chunk) * recipe.sigma for _ in range(objective.num_noise)])
                uniform = torch.rand(len(chunk), device=device)
                terms = objective.loss(model, chunk, targets, noise, Progress(recipe.sigma, one, one, uniform))
                optimizer.zero_grad()
                terms.loss.backward()
                optimizer.step()
                terms.loss.item()
                if terms.noisy_logits is not None:
                    (terms.noisy_logits.argmax(-1) == targets).float().mean().item()
                done += 1
                if done == 5:
                    started = time.perf_counter()
                if done == steps + 5:
                    seconds = time.perf_counter() - started
                    return (
                        seconds
                        / steps
                        * (len(data) // recipe.batch_size)
                        * (recipe.batch_size // recipe.images_per_step)
                    )


def our_epochs(recipe: TrainRecipe, data: Images, device: str, compiling: Compiling) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, data, Path(folder) / "run", device=device, compiling=compiling, on_note=print)
        return [json.loads(line) for line in (Path(folder) / "run" / METRICS).read_text().splitlines()]


def together_seconds(recipe: TrainRecipe, data: ImageData, device: str, jobs: int) -> float:
    """Wall-clock seconds of `jobs` runs side by side, their start included; they are compiled if that saves time."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        runs = [(with_overrides(recipe, [f"seed={i}"]), data, Path(folder) / str(i)) for i in range(jobs)]
        failures = train_together(runs, jobs, device=device)
        if failures:
            raise SystemExit(str(failures))
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="lenet", choices=list(RUNS))
    parser.add_argument("--methods", default="gaussian,consistency,smoothmix")
    parser.add_argument("--epochs", type=int, default=3, help="at least 2: the first, with the start, is not measured")
    parser.add_argument("--usual-steps", type=int, default=100)
    parser.add_argument("--no-usual", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--jobs", default="")
    parser.add_argument("--images", type=int, help="fewer than the data set has, for CPUs")
    parser.add_argument("--folder", type=Path, help="where the data set is, for ours")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda was asked for, but torch sees no GPU; use --device cpu")
    if arguments.epochs < 2:
        parser.error(f"--epochs: expected at least 2, got {arguments.epochs}")
    device = torch.device(arguments.device)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{date.today()}  torch {torch.__version__}  {device.type} {hardware}  {arguments.run}")
    compiling: Compiling = "always" if arguments.compile else "never"
    dataset, sigma, count = RUNS[arguments.run]
    data = random_images(dataset, arguments.images or count)
    ours_from: Images = data
    if arguments.folder is not None:
        ours_from = load_dataset(dataset, "train", arguments.folder)
    changes = [f"epochs={arguments.epochs}", f"model={arguments.run}", f"precision={arguments.precision}"]
    changes += ["learning_rate=1e-4"]  # random labels: nothing is to be learnt, nothing may diverge
    for method in arguments.methods.split(","):
        recipe = with_overrides(preset(f"{dataset}/{method}", sigma), changes)
        lines = our_epochs(recipe, ours_from, arguments.device, compiling)
        ours = statistics.median(line["seconds"] for line in lines[1:]) * len(data) / len(ours_from)
        memory = lines[-1].get("peak_memory_bytes", 0) / 2**30
        first = f"(first {lines[0]['seconds']:.1f} s, peak {memory:.2f} GiB)"
        text = f"{method:24s} ours {ours:8.3f} s/epoch, {len(data) / ours:.0f} images/s {first}"
        if not arguments.no_usual:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            usual = usual_epoch_seconds(recipe, data, device, arguments.usual_steps)
            memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            text += f"   usual {usual:8.3f} s/epoch (peak {memory:.2f} GiB)   {usual / ours:5.2f} x"
        print(text, flush=True)
        for jobs in map(int, filter(None, arguments.jobs.split(","))):
            seconds = together_seconds(recipe, data, arguments.device, jobs)
            rate = jobs * arguments.epochs / seconds
            print(f"{method:24s} {jobs} side by side: {seconds:.1f} s, {rate:.2f} epochs/s in all", flush=True)


if __name__ == "__main__":
    main()
