"""Images per second that one core decodes, scales and crops for ImageNet-sized training and testing.

    python benchmarks/input.py FOLDER [--workers 1] [--seconds 5] [--rounds 3]

FOLDER has a folder of JPEG files for each class. `ImageFiles` reads them as `smoothcert train` and `smoothcert certify`
do, in `--workers` processes (0: in this one). The two take turns for several rounds; the table has the median and the
range. Files are read once before, so that the disk's cache is warm: this measures the cores, not the disk.
"""

import argparse
import platform
import statistics
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import PIL
import torch
from PIL import features

from smoothcert.data import ImageFiles, load_folder
from smoothcert.data.imagenet import DECODER

BATCH = 16


def rate(data: ImageFiles, seconds: float, seed: int) -> float:
    """Images per second of wall time, without the start of the workers: the clock starts with the first batches."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randint(len(data), (100_000, BATCH), generator=generator)
    batches = data.batches(order, slice(0, BATCH), seed)
    for _ in range(2 * max(1, data.workers or 0)):
        next(batches)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        next(batches)
        count += BATCH
    return count / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="class folders of JPEG files")
    parser.add_argument("--workers", type=int, default=1, help="decoding processes, at most as many as idle cores")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    listed = load_folder(options.folder, "train", image_size=224, in_memory_bytes=0)
    assert isinstance(listed, ImageFiles)  # in_memory_bytes=0: no pixels are kept
    data = replace(listed, workers=options.workers)
    sizes = [listed.files[index].stat().st_size for index in range(len(listed))]
    torch.set_num_threads(1)

    transforms = {
        transform: replace(data, random_parts=transform == "training", decoder=DECODER)
        for transform in ("training", "test")
    }
    rates: dict[str, list[float]] = {transform: [] for transform in transforms}
    for number in range(options.rounds):
        for transform, images in transforms.items():
            rates[transform].append(rate(images, options.seconds, number) / max(1, options.workers))

    print(
        f"{date.today()}, {platform.machine()}, {options.workers} worker processes, torch {torch.__version__}, "
        f"Pillow {PIL.__version__} (libjpeg-turbo {features.version_feature('libjpeg_turbo')}), "
        f"{len(sizes)} files, {sum(sizes) / len(sizes) / 1000:.0f} kB on average"
    )
    print(f"\n{'transform':<10} {'images/s per core':>18}   range")
    for transform, found in rates.items():
        middle, low, high = statistics.median(found), min(found), max(found)
        print(f"{transform:<10} {middle:>18.1f}   {low:.1f} to {high:.1f}")


if __name__ == "__main__":
    main()
